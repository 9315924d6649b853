"""Of jobs that have ended only their end stays; nothing goes that a job needs which runs, or that is being written."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from model.control import AdvanceHeadInput, AllocateEpochInput, OpenJobInput
from model.ids import CheckpointId, Epoch, JobId, NodeId, Step, TenantId
from model.records import JobHead
from model.runtime import NodeParts
from proxy_runtime.checkpoint import Store
from proxy_runtime.storage import Bucket, FleetStore, documents
from proxy_runtime.storage.checkpoints import assemble, push, settle
from proxy_runtime.storage.documents import CheckpointDocument
from proxy_runtime.storage.garbage import LAST_S, MIN_AGE_S, RETAIN_AGE_S, Sweeper, retain
from tests.proxy_runtime.storage.builders import make_header, noise, write_parts

TENANT = TenantId("acme")


class Job:
    """A job of one rank, step by step; it knows what it may still need."""

    def __init__(self, fleet: FleetStore, store: Store, name: str) -> None:
        self.fleet, self.store, self.id = fleet, store, JobId(name)
        fleet.open_job(OpenJobInput(self.id, TENANT, "first", "first"))
        self.run, self.step = "first", 0
        self.epoch = Epoch(0)
        self.committed: list[CheckpointId] = []
        self.pending: NodeParts | None = None
        self.begin()

    def begin(self) -> None:
        """A new epoch counts."""
        self.pending = None
        self.epoch = self.fleet.allocate_epoch(AllocateEpochInput(self.id, self.run)).epoch
        self.fleet.advance_head(AdvanceHeadInput(self.id, self.run, self.epoch, (NodeId("a", 1),)))

    def write(self, content: bytes) -> None:
        """A node pushes."""
        self.pending, written = write_parts(self.store, "a", {0: content}, job=self.id, epoch=self.epoch)
        push(self.fleet, self.store, self.pending, written.packs, of=(self.id, self.epoch))

    def commit(self, *, final: bool = False) -> CheckpointId:
        """What was pushed becomes a checkpoint."""
        assert self.pending is not None
        self.step += 1
        parent = self.committed[-1] if self.committed else None
        header = make_header(1, self.step).model_copy(update={"parent": parent})
        made = assemble(self.fleet, self.store, self.id, self.epoch, header, [self.pending]).root
        if final:
            self.fleet.commit_final(self.id, self.epoch, made)
        else:
            self.fleet.commit_checkpoint(self.id, self.epoch, made, Step(self.step))
            self.committed.append(made)
        settle(self.fleet, TENANT, [self.pending])
        self.pending = None
        return made

    @property
    def head(self) -> JobHead:
        found = self.fleet.head(self.id)
        assert found is not None
        return found


def readable(fleet: FleetStore, checkpoint: CheckpointId) -> bool:
    """Whether a checkpoint and all of its packs are in the bucket."""
    document = documents.read(fleet.bucket, documents.manifest_key(TENANT, checkpoint), CheckpointDocument)
    return document is not None and all(
        fleet.bucket.size(documents.pack_key(TENANT, pack)) == size for pack, size in document.packs
    )


def packs(fleet: FleetStore) -> int:
    return len(fleet.bucket.list(f"tenants/{TENANT}/packs"))


@pytest.fixture
def clock() -> list[float]:
    """Seconds by which a sweep's clock is ahead."""
    return [0.0]


@pytest.fixture
def sweeper(fleet: FleetStore, clock: list[float]) -> Sweeper:
    return Sweeper(fleet, now=lambda: time.time() + clock[0])


@pytest.fixture
def job(fleet: FleetStore, node_store: Callable[[str], Store]) -> Job:
    """With three checkpoints."""
    made = Job(fleet, node_store("a"), "job")
    for _ in range(3):
        made.write(noise(100_000))
        made.commit()
    return made


def test_of_a_completed_job_its_files_stay(fleet: FleetStore, job: Job, sweeper: Sweeper, clock: list[float]) -> None:
    job.write(noise(1_000))
    final = job.commit(final=True)
    clock[0] = 120.0
    assert sweeper.sweep(TENANT).packs == 0, "nobody says that it has ended"
    assert sweeper.sweep(TENANT, [job.head]).packs == 3
    assert packs(fleet) == 1 and readable(fleet, final) and not fleet.bucket.list(f"tenants/{TENANT}/parts")
    assert job.head.checkpoint is None and job.head.final == final, "a workflow that is reset begins anew"
    clock[0] = 10 * LAST_S
    assert sweeper.sweep(TENANT, [job.head]).packs == 0 and readable(fleet, final)


def test_of_a_job_that_failed_its_last_checkpoint_stays_for_a_while(
    fleet: FleetStore, job: Job, sweeper: Sweeper, clock: list[float]
) -> None:
    job.write(noise(1_000))  # never committed
    clock[0] = 120.0
    assert sweeper.sweep(TENANT, [job.head]).packs == 3
    assert packs(fleet) == 1 and readable(fleet, job.committed[-1]) and job.head.checkpoint == job.committed[-1]
    clock[0] = LAST_S + 60
    assert sweeper.sweep(TENANT, [job.head]).packs == 1
    assert packs(fleet) == 0 and job.head.checkpoint is None


@pytest.mark.parametrize("again", ["reset", "another"])
def test_a_job_that_was_taken_up_again_meanwhile_keeps_what_it_has(
    fleet: FleetStore, job: Job, sweeper: Sweeper, clock: list[float], again: str
) -> None:
    job.write(noise(1_000))
    job.commit(final=True)
    believed = job.head
    fleet.open_job(OpenJobInput(job.id, TENANT, "first" if again == "reset" else "other", "second"))
    job.run = "second"
    job.begin()
    job.write(noise(2_000))
    clock[0] = MIN_AGE_S - 60
    sweeper.sweep(TENANT, [believed])
    if again == "reset":
        assert all(readable(fleet, checkpoint) for checkpoint in job.committed)
    assert readable(fleet, job.commit())


def test_what_a_running_job_leaves_behind_goes_in_minutes(
    fleet: FleetStore, job: Job, sweeper: Sweeper, clock: list[float]
) -> None:
    clock[0] = RETAIN_AGE_S + 60
    assert retain(fleet, job.id, 2, now=sweeper.now).checkpoints == 1
    job.write(noise(3_000))  # pending, and stays so for long
    clock[0] = 120.0
    sweeper.sweep(TENANT)
    assert packs(fleet) == 4, "who has begun to read the dropped one may finish"
    clock[0] = RETAIN_AGE_S + 60
    assert sweeper.sweep(TENANT).packs == 1
    clock[0] = MIN_AGE_S - 60
    assert sweeper.sweep(TENANT).packs == 0
    assert readable(fleet, job.commit()) and all(readable(fleet, one) for one in job.committed[-2:])


def test_what_an_epoch_wrote_that_counts_no_more_goes_at_once(
    fleet: FleetStore, job: Job, sweeper: Sweeper, clock: list[float]
) -> None:
    job.write(noise(1_000))
    job.begin()
    clock[0] = 120.0
    assert sweeper.sweep(TENANT).packs == 1
    assert all(readable(fleet, one) for one in job.committed)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_writes_commits_ends_and_sweeps(tmp_path: Path, seed: int) -> None:
    fleet = FleetStore(Bucket.open(f"file://{tmp_path}/bucket"), bytes(32))
    store = fleet.node_store(tmp_path / "a", TENANT)
    chance, skew = random.Random(seed), 0.0
    sweeper = Sweeper(fleet, now=lambda: time.time() + skew)
    shared = [noise(20_000) for _ in range(3)]  # jobs find these chunks in packs of one another
    jobs = [Job(fleet, store, f"job-{number}") for number in range(4)]
    ended: dict[JobId, JobHead] = {}
    finals: list[CheckpointId] = []
    for _ in range(60):
        running = [one for one in jobs if one.id not in ended]
        one = chance.choice(running) if running else None
        match chance.choice(["write", "write", "commit", "commit", "epoch", "end", "sweep", "sweep", "later"]):
            case "write" if one is not None:
                one.write(chance.choice(shared) + chance.choice([b"", noise(5_000)]))
            case "commit" if one is not None and one.pending is not None:
                one.commit()
                retain(fleet, one.id, 2, now=sweeper.now)
            case "epoch" if one is not None:
                one.begin()
            case "end" if one is not None and chance.random() < 0.4:
                if one.pending is not None:
                    finals.append(one.commit(final=True))
                ended[one.id] = one.head
            case "sweep":
                sweeper.sweep(TENANT, list(ended.values()))
            case "later":
                skew += 61.0 if skew < MIN_AGE_S - 700 else 0.0
            case _:
                pass
        for each in jobs:
            needed = each.committed[-2:] if each.id not in ended else []
            if each.id in ended and each.head.final is None:
                needed = each.committed[-1:]
            assert all(readable(fleet, checkpoint) for checkpoint in needed)
            if each.pending is not None and each.id not in ended:
                key = documents.parts_key(TENANT, each.pending)
                part = documents.read(fleet.bucket, key, documents.PartsDocument)
                assert part is not None
                assert all(fleet.bucket.size(documents.pack_key(TENANT, pack)) == size for pack, size in part.packs)
        assert all(readable(fleet, checkpoint) for checkpoint in finals)
    for each in jobs:
        ended.setdefault(each.id, each.head)
    skew += RETAIN_AGE_S + 61
    sweeper.sweep(TENANT, list(ended.values()))
    left = {checkpoint for each in jobs for checkpoint in [each.head.final or each.head.checkpoint] if checkpoint}
    assert len(fleet.bucket.list(f"tenants/{TENANT}/manifests")) == len(left)
    assert sweeper.sweep(TENANT, list(ended.values())).packs == 0
