"""Records by compare-and-swap, heads of jobs, nodes: nothing is handed out twice, nothing goes back."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from pydantic import BaseModel

from model.control import AdvanceHeadInput, AllocateEpochInput, OpenJobInput
from model.ids import CheckpointId, Epoch, Generation, JobId, NodeId, Step, TenantId
from model.records import JobHead
from proxy_runtime.storage import Bucket, Fenced, FleetStore, StorageError
from proxy_runtime.storage.records import Records
from tests.proxy_runtime.storage.builders import SECRET, node_record

JOB = JobId("job")
NODES = (NodeId("a", 1),)


def opening(run: str, first: str = "first", tenant: str = "acme") -> OpenJobInput:
    return OpenJobInput(JOB, TenantId(tenant), first, run)


def checkpoint(number: int) -> CheckpointId:
    return CheckpointId(f"ck-{number:040x}")


@pytest.fixture(params=["memory://", "file"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> FleetStore:
    url = request.param if request.param != "file" else f"file://{tmp_path}/bucket"
    return FleetStore(Bucket.open(url), SECRET)


# -- records ------------------------------------------------------------------------------------------------------


class Counter(BaseModel):
    value: int = 0
    by: tuple[str, ...] = ()


def _count(args: tuple[str, str, int]) -> list[int]:
    url, name, times = args
    records = Records(Bucket.open(url), "records/counters", Counter)

    def add(current: Counter | None) -> Counter:
        return Counter(value=(current.value if current else 0) + 1)

    return [records.update(name, add).value for _ in range(times)]


@pytest.mark.parametrize("name", ["c"])
def test_processes_never_count_the_same(tmp_path: Path, name: str) -> None:
    url = f"file://{tmp_path}/bucket"
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(_count, [(url, name, 15)] * 3))
    values = [value for result in results for value in result]
    # A write whose answer was ambiguous is made again: a number may be left out, but never given twice.
    assert len(set(values)) == len(values) == 45
    bucket = Bucket.open(url)
    newest = Records(bucket, "records/counters", Counter).read(name)
    assert newest is not None and newest.value == max(values)
    assert len(bucket.list("records")) <= 8, "old versions are removed"
    assert list((tmp_path / "bucket/.writing").iterdir()) == []


def test_a_writer_that_slept_does_not_believe_that_its_version_counts(fleet: FleetStore) -> None:
    fast = Records(fleet.bucket, "records/x", Counter)
    slow = Records(fleet.bucket, "records/x", Counter)
    fast.update("r", lambda current: Counter(value=1))
    calls = 0

    def change(current: Counter | None) -> Counter:
        nonlocal calls
        calls += 1
        assert current is not None
        if calls == 1:  # version 2 is written, used and removed while this one sleeps
            for value in range(2, 12):
                fast.update("r", lambda _, value=value: Counter(value=value))
            assert "records/x/r/00000000000000000002.json" not in fleet.bucket.list("records/x")
        return Counter(value=current.value + 100)

    assert slow.update("r", change).value == 111
    assert calls == 2
    assert fast.read("r") == Counter(value=111)


def test_a_version_that_was_built_on_at_once_counts(fleet: FleetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records(fleet.bucket, "records/x", Counter)
    other = Records(fleet.bucket, "records/x", Counter)
    create, calls = Bucket.create, 0

    def followed(bucket: Bucket, key: str, data: bytes) -> bool:
        nonlocal calls
        calls += 1
        made = create(bucket, key, data)
        if calls == 1:
            other.update("r", lambda current: Counter(value=(current.value if current else 0) + 1))
        return made

    monkeypatch.setattr(Bucket, "create", followed)
    assert records.update("r", lambda current: Counter(value=(current.value if current else 0) + 10)).value == 10
    assert records.read("r") == Counter(value=11)


@pytest.mark.parametrize("content", [b"", b"{", b'{"format":"ergosphere/record"}'])
def test_a_damaged_record_is_told(fleet: FleetStore, content: bytes) -> None:
    fleet.open_job(opening("r1"))
    fleet.bucket.put(f"records/jobs/{JOB}/{2:020}.json", content)
    with pytest.raises(StorageError, match="damaged") as caught:
        fleet.head(JOB)
    assert caught.value.code == "storage.damaged"


# -- heads --------------------------------------------------------------------------------------------------------


def test_opening_a_job_is_idempotent_and_a_run_that_lost_it_does_not_get_it_back(fleet: FleetStore) -> None:
    first = fleet.open_job(opening("r1"))
    assert first.generation == 1 and fleet.open_job(opening("r1")) == first
    assert fleet.open_job(opening("r2")).generation == 2
    assert fleet.holds_generation(JOB, "r2", Generation(2))
    assert not fleet.holds_generation(JOB, "r1", Generation(1))
    assert not fleet.holds_generation(JOB, "r2", Generation(1))
    for call in (
        lambda: fleet.open_job(opening("r1")),
        lambda: fleet.allocate_epoch(AllocateEpochInput(JOB, "r1")),
        lambda: fleet.advance_head(AdvanceHeadInput(JOB, "r1", Epoch(1), NODES)),
    ):
        with pytest.raises(Fenced) as caught:
            call()
        assert caught.value.code == "runtime.fenced"


def test_advancing_the_head_is_idempotent_and_tells_where_the_job_was(fleet: FleetStore) -> None:
    fleet.open_job(opening("r1"))
    one, two = (fleet.allocate_epoch(AllocateEpochInput(JOB, "r1")).epoch for _ in range(2))
    there = (NodeId("b", 3),)
    assert fleet.advance_head(AdvanceHeadInput(JOB, "r1", one, NODES)).before == ()
    for _ in range(2):
        assert fleet.advance_head(AdvanceHeadInput(JOB, "r1", two, there)).before == NODES
    for epoch in (one, Epoch(two + 1)):  # a lower one; one that was never handed out
        with pytest.raises(Fenced):
            fleet.advance_head(AdvanceHeadInput(JOB, "r1", epoch, NODES))
    with pytest.raises(Fenced):
        fleet.advance_head(AdvanceHeadInput(JOB, "r1", two, NODES))


def test_only_the_epoch_that_counts_commits_and_never_an_older_checkpoint(fleet: FleetStore) -> None:
    fleet.open_job(opening("r1"))
    one, two = (fleet.allocate_epoch(AllocateEpochInput(JOB, "r1")).epoch for _ in range(2))
    fleet.advance_head(AdvanceHeadInput(JOB, "r1", one, NODES))
    fleet.commit_checkpoint(JOB, one, checkpoint(1), Step(10))
    fleet.open_job(opening("r2"))  # commits are fenced by epoch only
    fleet.commit_checkpoint(JOB, one, checkpoint(2), Step(20))
    fleet.commit_checkpoint(JOB, one, checkpoint(2), Step(20))
    with pytest.raises(Fenced):
        fleet.commit_checkpoint(JOB, one, checkpoint(1), Step(10))
    with pytest.raises(Fenced):
        fleet.commit_checkpoint(JOB, two, checkpoint(3), Step(30))
    fleet.advance_head(AdvanceHeadInput(JOB, "r2", two, NODES))
    with pytest.raises(Fenced):
        fleet.commit_final(JOB, one, checkpoint(3))
    fleet.commit_checkpoint(JOB, two, checkpoint(4), Step(15))
    fleet.commit_final(JOB, two, checkpoint(5))
    head = fleet.head(JOB)
    assert head is not None
    assert (head.checkpoint, head.step, head.final) == (checkpoint(4), 15, checkpoint(5))


def test_a_new_workflow_takes_the_id_over_without_what_was_before(fleet: FleetStore) -> None:
    fleet.open_job(opening("r1"))
    epoch = fleet.allocate_epoch(AllocateEpochInput(JOB, "r1")).epoch
    fleet.advance_head(AdvanceHeadInput(JOB, "r1", epoch, NODES))
    fleet.commit_checkpoint(JOB, epoch, checkpoint(1), Step(10))
    opened = fleet.open_job(opening("n1", first="n1", tenant="other"))
    assert (opened.generation, opened.epoch, opened.nodes, opened.checkpoint, opened.step) == (2, 2, (), None, 0)
    with pytest.raises(Fenced):
        fleet.commit_checkpoint(JOB, epoch, checkpoint(2), Step(20))
    again = fleet.allocate_epoch(AllocateEpochInput(JOB, "n1")).epoch
    assert fleet.advance_head(AdvanceHeadInput(JOB, "n1", again, (NodeId("c", 1),))).before == NODES
    head = fleet.head(JOB)
    assert head is not None and (again, head.tenant) == (3, "other")


def test_a_job_that_nobody_opened_is_fenced(fleet: FleetStore) -> None:
    assert fleet.head(JOB) is None and not fleet.holds_generation(JOB, "r", Generation(1))
    with pytest.raises(Fenced, match="never opened"):
        fleet.allocate_epoch(AllocateEpochInput(JOB, "r"))


class HeadMachine(RuleBasedStateMachine):
    """Any order of calls by any runs: epochs and generations are handed out once, and the head never goes back."""

    runs = Bundle("runs")
    epochs = Bundle("epochs")

    def __init__(self) -> None:
        super().__init__()
        self.fleet = FleetStore(Bucket.open("memory://"), SECRET)
        self.given: set[int] = set()
        self.generations: dict[int, str] = {}
        self.last: JobHead | None = None
        self.committed = 0

    @rule(target=runs, first=st.sampled_from(["x", "y"]), run=st.sampled_from("abcd"))
    def open(self, first: str, run: str) -> str:
        try:
            opened = self.fleet.open_job(opening(first + run, first))
        except Fenced:
            return first + run
        assert self.generations.setdefault(opened.generation, first + run) == first + run
        return first + run

    @rule(target=epochs, run=runs)
    def allocate(self, run: str) -> Epoch:
        try:
            epoch = self.fleet.allocate_epoch(AllocateEpochInput(JOB, run)).epoch
        except Fenced:
            return Epoch(0)
        assert epoch not in self.given
        self.given.add(epoch)
        return epoch

    @rule(run=runs, epoch=epochs, node=st.sampled_from(["a", "b"]))
    def advance(self, run: str, epoch: Epoch, node: str) -> None:
        head = self.fleet.head(JOB)
        try:
            self.fleet.advance_head(AdvanceHeadInput(JOB, run, epoch, (NodeId(node, 1),)))
        except Fenced:
            return
        assert head is not None and head.generation_run == run and epoch >= head.epoch

    @rule(epoch=epochs, step=st.integers(0, 5))
    def commit(self, epoch: Epoch, step: int) -> None:
        head = self.fleet.head(JOB)
        self.committed += 1
        try:
            self.fleet.commit_checkpoint(JOB, epoch, checkpoint(self.committed), Step(step))
        except Fenced:
            return
        assert head is not None and head.epoch == epoch

    @invariant()
    def the_head_never_goes_back(self) -> None:
        head, last = self.fleet.head(JOB), self.last
        self.last = head
        if head is None or last is None:
            return
        assert head.epoch >= last.epoch and head.allocated >= last.allocated and head.generation >= last.generation
        if head.checkpoint_epoch == last.checkpoint_epoch and head.checkpoint is not None:
            assert head.step >= last.step


TestHeads = HeadMachine.TestCase
TestHeads.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def _race(args: tuple[str, int]) -> list[tuple[str, int]]:
    url, number = args
    fleet = FleetStore(Bucket.open(url), SECRET)
    got: list[tuple[str, int]] = []
    for turn in range(6):
        run = f"p{number}t{turn}"
        got.append(("generation", fleet.open_job(opening(run)).generation))
        try:
            got.append(("epoch", fleet.allocate_epoch(AllocateEpochInput(JOB, run)).epoch))
            got.append(("epoch", fleet.allocate_epoch(AllocateEpochInput(JOB, run)).epoch))
        except Fenced:
            continue
    return got


def test_processes_never_get_the_same_epoch_or_generation(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as pool:
        got = [item for result in pool.map(_race, [(url, n) for n in range(3)]) for item in result]
    assert len(set(got)) == len(got) > 18


# -- nodes --------------------------------------------------------------------------------------------------------


def test_a_node_is_claimed_renewed_and_lost(fleet: FleetStore) -> None:
    first = fleet.claim_node(node_record())
    assert (first.node.incarnation, first.lost) == (1, False)
    renewed = fleet.renew_node(first.model_copy(update={"address": "127.0.0.1:2"}))
    assert (renewed.beat, renewed.address) == (first.beat + 1, "127.0.0.1:2")
    assert fleet.nodes() == [renewed] and fleet.node("n") == renewed and fleet.node("m") is None
    fleet.mark_lost(first.node)
    fleet.mark_lost(first.node)
    with pytest.raises(Fenced, match="given up"):
        fleet.renew_node(renewed)
    second = fleet.claim_node(renewed)
    assert (second.node.incarnation, second.lost) == (2, False) and second.beat > renewed.beat
    fleet.mark_lost(first.node)
    assert fleet.node("n") == second, "a lower incarnation is lost already"
    with pytest.raises(Fenced, match="taken over"):
        fleet.renew_node(renewed)
    with pytest.raises(Fenced):
        fleet.mark_lost(NodeId("n", 3))
    fleet.claim_node(node_record("host.example"))
    assert [str(record.node) for record in fleet.nodes()] == ["host.example@1", "n@2"]


def test_snapshots_and_keys(fleet: FleetStore) -> None:
    fleet.put_snapshot("local", "abc", b"{}")
    assert fleet.get_snapshot("local", "abc") == b"{}"
    with pytest.raises(StorageError) as caught:
        fleet.get_snapshot("local", "none")
    assert caught.value.code == "storage.missing"
    other = FleetStore(fleet.bucket, bytes(32))
    assert len({fleet.tenant_key("a"), fleet.tenant_key("b"), other.tenant_key("a")}) == 3
    assert fleet.peer_token != other.peer_token
    with pytest.raises(StorageError):
        FleetStore(fleet.bucket, b"short")


@given(names=st.lists(st.sampled_from("abc"), max_size=8))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_incarnations_are_never_used_twice(names: list[str]) -> None:
    fleet = FleetStore(Bucket.open("memory://"), SECRET)
    claimed = [fleet.claim_node(node_record(name)).node for name in names]
    assert len(set(claimed)) == len(claimed)
