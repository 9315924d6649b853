"""Activities of a cluster's scheduler: ticks over the real store, words folded into signals, plans delivered."""

from __future__ import annotations

import asyncio
import secrets
from datetime import timedelta
from pathlib import Path

import pytest
import structlog
from temporalio.service import RPCError, RPCStatusCode
from temporalio.testing import ActivityEnvironment

from activities.cluster import ClusterActivities, tick
from activities.inbox import Inbox
from activities.snapshots import Snapshots
from model.cluster import DecideInput, DeliverPlanInput
from model.control import TELL_AGAIN, AddressedDirective, Directive, InboxBatch, NotifyInput
from model.ids import JobId
from model.job_state import JobPhase
from proxy_runtime.storage.blobs import Bucket
from proxy_runtime.storage.errors import StorageError
from proxy_runtime.storage.fleet import FleetStore
from scheduling.constants import SETTLE_S
from scheduling.reconcile import GRACE_S
from tests.scheduling.builders import T0, Cluster, device_ids, node, notice


@pytest.fixture
def store(tmp_path: Path) -> FleetStore:
    return FleetStore(Bucket.open(tmp_path.as_uri()), secrets.token_bytes(32))


def decide(store, *items, digest: str = "", number: int = 1, after: float = 0.0):
    batch = InboxBatch(
        tuple(item for item in items if hasattr(item, "demand")),
        tuple(item for item in items if hasattr(item, "alive")),
    )
    return tick(Snapshots(store, "c"), DecideInput("c", number, digest, (batch,), T0 + timedelta(seconds=after)))


def actions(result) -> dict[str, str]:
    return {str(item.job): item.directive.action for item in result.directives}


# -- ticks -----------------------------------------------------------------------------------------------------


def test_a_tick_writes_the_state_that_its_digest_names_and_the_one_that_it_decided_on(store):
    result = decide(store, node("node-1"), notice("gpt"))
    assert actions(result) == {"gpt": "place"}
    snapshots = Snapshots(store, "c")
    after = snapshots.read(result.digest)
    assert after is not None and after.job(JobId("gpt")).told.devices == device_ids("node-1", 2)
    base = snapshots.read(result.directives[0].directive.state_digest)
    assert base is not None and base.job(JobId("gpt")).told is None, "an audit can decide again"


def test_the_same_tick_again_decides_the_same(store):
    begun = decide(store, node("node-1"))
    first = decide(store, notice("gpt"), digest=begun.digest, number=2)
    assert decide(store, notice("gpt"), digest=begun.digest, number=2) == first
    assert actions(first) == {"gpt": "place"}


def test_a_lost_snapshot_is_replaced_by_the_newest_and_nothing_is_given_away_until_all_have_told(store):
    first = decide(store, node("node-1"), notice("gpt"))
    second = decide(store, notice("cnn"), digest=first.digest, number=2)
    store.delete_snapshot("c", second.digest)
    third = decide(store, notice("new"), digest=second.digest, number=3)
    asked = [item for item in third.directives if item.directive.request == TELL_AGAIN]
    assert [item.job for item in asked] == ["gpt"], "cnn was not in the snapshot: it tells by itself or is asked"
    assert "place" not in actions(third).values()
    assert third.wake_s == pytest.approx(SETTLE_S, abs=0.1)
    devices = device_ids("node-1", 2)
    runs = notice("gpt", phase=JobPhase.RUNNING, devices=devices, number=2, wants="nothing")
    fourth = decide(store, runs, digest=third.digest, number=4, after=SETTLE_S + 1)
    assert "place" not in actions(fourth).values(), "gpt has the devices"


def test_a_damaged_snapshot_counts_as_lost(store):
    first = decide(store, node("node-1"))
    second = decide(store, notice("gpt", 8), digest=first.digest)
    key = f"clusters/c/snapshots/{second.digest}.json.zst"
    store.bucket.put(key, store.bucket.get(key)[:-3])
    assert decide(store, digest=second.digest).summary.endswith("nothing to do")


def test_with_no_snapshot_at_all_nodes_that_have_parts_of_unknown_jobs_are_left_alone(store):
    result = decide(store, node("node-1", jobs=[("gpt", 1)]), notice("cnn"), digest="0" * 64)
    assert actions(result) == {"cnn": "wait"}


def test_a_store_that_is_away_is_no_lost_snapshot(store, monkeypatch):
    first = decide(store, node("node-1"), notice("gpt"))

    def away(cluster, digest):
        raise StorageError("The store does not answer.")

    monkeypatch.setattr(store, "get_snapshot", away)
    with pytest.raises(StorageError):
        decide(store, digest=first.digest)


def test_old_snapshots_are_removed(store):
    digest = ""
    for number in range(1, 6):
        digest = decide(store, notice("gpt", 8, number=number), digest=digest, number=number).digest
    snapshots = Snapshots(store, "c")
    snapshots.prune(keep=2)
    assert len(store.bucket.list("clusters/c/ticks/")) == 2
    assert 2 <= len(store.bucket.list("clusters/c/snapshots/")) <= 4
    assert snapshots.newest() == snapshots.read(digest)


def test_old_snapshots_are_removed_where_they_are_too_large_together(store):
    digest = ""
    for number in range(1, 9):
        digest = decide(store, notice("gpt", 8, number=number), digest=digest, number=number).digest
    size = sum(found.bytes for found in store.bucket.find("clusters/c/snapshots"))
    Snapshots(store, "c").prune(keep_bytes=size // 2)
    assert 3 <= len(store.bucket.list("clusters/c/ticks/")) <= 4
    assert sum(found.bytes for found in store.bucket.find("clusters/c/snapshots")) < 0.7 * size
    assert Snapshots(store, "c").read(digest) is not None


def test_what_nodes_and_the_ledger_say_differently_is_logged_once(store):
    ghost = node("node-1", jobs=[("ghost", 1)])
    with structlog.testing.capture_logs() as logs:
        result = decide(store, ghost)
        for number, after in ((2, GRACE_S), (3, GRACE_S + 1)):
            result = decide(store, ghost, digest=result.digest, number=number, after=after)
        decide(store, node("node-1"), digest=result.digest, number=4, after=GRACE_S + 2)
    told = [line for line in logs if "contradiction" in line["event"]]
    assert [(line["log_level"], line["kind"], line["job"]) for line in told] == [
        ("warning", "stranger", "ghost"),
        ("info", "stranger", "ghost"),
    ]
    assert told[0]["text"] == "node-1 has a part of ghost, which the scheduler does not know"


# -- inbox -----------------------------------------------------------------------------------------------------


class FakeClient:
    """Takes signals as Temporal does; `fail` makes it refuse."""

    def __init__(self) -> None:
        self.batches: list[InboxBatch] = []
        self.fail = 0
        self.told: list[str] = []
        self.gone: set[str] = set()
        self.most = self.now = 0

    async def start_workflow(self, workflow, input, *, start_signal_args, **options):
        if self.fail:
            self.fail -= 1
            raise RPCError("no answer", RPCStatusCode.UNAVAILABLE, b"")
        self.batches.append(start_signal_args[0])

    def get_workflow_handle(self, job):
        client = self

        class Handle:
            async def signal(self, name, directive):
                client.now += 1
                client.most = max(client.most, client.now)
                await asyncio.sleep(0)
                client.now -= 1
                if job in client.gone:
                    raise RPCError("workflow not found", RPCStatusCode.NOT_FOUND, b"")
                client.told.append(job)

        return Handle()


async def test_many_words_become_few_signals():
    client = FakeClient()
    inbox = Inbox(client, "c", gap_s=0.05)  # type: ignore[arg-type]
    await inbox.tell(notice("first"))
    await asyncio.gather(*(inbox.tell(notice(f"job-{index}")) for index in range(100)))
    assert [len(batch.jobs) for batch in client.batches] == [1, 100]


async def test_a_word_is_told_only_when_the_signal_is_taken():
    client = FakeClient()
    client.fail = 1
    inbox = Inbox(client, "c", gap_s=0.0)  # type: ignore[arg-type]
    results = await asyncio.gather(inbox.tell(notice("a")), inbox.tell(notice("b")), return_exceptions=True)
    assert all(isinstance(result, RPCError) for result in results)
    await inbox.tell(notice("a"))
    assert [batch.jobs[0].job for batch in client.batches] == ["a"]


async def test_large_batches_are_split(monkeypatch):
    monkeypatch.setattr("activities.inbox.BATCH_BYTES", 5000)
    client = FakeClient()
    await Inbox(client, "c").tell(*(notice(f"job-{index}") for index in range(50)))  # type: ignore[arg-type]
    assert len(client.batches) > 3
    assert [item.job for batch in client.batches for item in batch.jobs] == [f"job-{index}" for index in range(50)]


async def test_notify_ends_when_the_scheduler_has_it(store):
    client = FakeClient()
    activities = ClusterActivities(client, store)  # type: ignore[arg-type]
    await ActivityEnvironment().run(activities.notify, NotifyInput("c", notice("gpt")))
    assert client.batches[0].jobs == (notice("gpt"),)


# -- delivery --------------------------------------------------------------------------------------------------


async def test_a_plan_is_delivered_eight_at_a_time_and_says_who_is_gone(store):
    cluster = Cluster(node("node-1", 2))
    mail = cluster.tell(*(notice(f"job-{index:02}", 8) for index in range(30)))
    client = FakeClient()
    client.gone = {"job-03"}
    activities = ClusterActivities(client, store)  # type: ignore[arg-type]
    plan = DeliverPlanInput("c", tuple(mail.values()))
    result = await ActivityEnvironment().run(activities.deliver_plan, plan)
    assert result.gone == (JobId("job-03"),)
    assert len(client.told) == 29
    assert 1 < client.most <= 8


async def test_a_delivery_that_fails_in_part_is_repeated_as_a_whole(store, monkeypatch):
    client = FakeClient()
    activities = ClusterActivities(client, store)  # type: ignore[arg-type]
    directive = Directive("1", "wait", "Waits.", "tiers/1", "0" * 64)
    plan = DeliverPlanInput("c", (AddressedDirective(JobId("gpt"), "run", directive),))

    class Broken:
        async def signal(self, name, directive):
            raise RPCError("no answer", RPCStatusCode.UNAVAILABLE, b"")

    monkeypatch.setattr(client, "get_workflow_handle", lambda job: Broken())
    with pytest.raises(RPCError):
        await ActivityEnvironment().run(activities.deliver_plan, plan)
