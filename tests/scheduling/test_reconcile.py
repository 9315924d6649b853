"""What nodes say against what the ledger believes: late, twice, not at all, or something else."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from model.control import TELL_AGAIN, NodeNotice
from model.ids import Epoch
from model.job_state import JobPhase
from scheduling.reconcile import ASK_S, GRACE_S, SILENT_S
from scheduling.state import Finding
from tests.scheduling.builders import Cluster, node, notice

RUNS = [("gpt", 1)]


def found(cluster: Cluster) -> list[tuple[str, str, str]]:
    return [(item.kind, item.job, item.text) for item in cluster.state.findings if item.counts]


def told(name: str, jobs=(), device_ms=(), devices: int = 2) -> NodeNotice:
    return replace(node(name, devices, jobs=jobs), device_ms=tuple(device_ms))


@pytest.fixture
def cluster() -> Cluster:
    """gpt runs on both devices of node-1, says so, and so does the node."""
    made = Cluster(node("node-1"), node("node-2"))
    made.tell(notice("gpt", 2))
    directive = made.job("gpt").told.directive
    made.tell(
        made.next(
            "gpt", phase=JobPhase.RUNNING, devices=directive.devices, wants="nothing", epoch=Epoch(1),
            since=made.now + timedelta(seconds=5), delivered_ms=0,
        ),
        told("node-1", RUNS, [0]),
        after=5,
    )  # fmt: skip
    return made


def test_where_all_agree_nothing_is_found(cluster):
    for minute in range(1, 6):
        cluster.tell(told("node-1", RUNS, [120_000 * minute]), node("node-2"), after=60)
    assert cluster.state.findings == ()


def test_a_part_of_a_job_that_the_scheduler_does_not_know(cluster):
    stranger = told("node-2", [("ghost", 3)], [1000])
    cluster.tell(stranger)
    assert not found(cluster), "its notice may be on its way"
    cluster.tell(stranger, after=GRACE_S)
    text = "node-2 has a part of ghost, which the scheduler does not know"
    assert found(cluster) == [("stranger", "ghost", text)]
    waits = cluster.tell(notice("cnn", 2), after=1)
    assert waits["cnn"].directive.action == "wait", "nothing is placed on such a node"
    cluster.tell(node("node-2"))
    assert not found(cluster) and cluster.job("cnn").told is not None


def test_a_job_that_runs_and_is_not_on_its_node_is_asked_now_and_then(cluster):
    empty = told("node-1")
    cluster.tell(empty, after=GRACE_S)
    asked = cluster.tell(empty, after=GRACE_S)
    assert found(cluster) == [("missing", "gpt", "it says that it runs there, and node-1 has no part of it in epoch 1")]
    assert asked["gpt"].directive.request == TELL_AGAIN
    assert not cluster.tell(empty, after=1)
    assert set(cluster.tell(empty, after=ASK_S)) == {"gpt"}
    cluster.tell(cluster.next("gpt", phase=JobPhase.QUEUED, devices=(), wants="devices", delivered_ms=0))
    assert not found(cluster), "it has noticed that it was lost"


def test_a_node_that_was_told_of_before_the_job_ran_there_says_nothing(cluster):
    cluster.tell(told("node-1"), after=1)
    cluster.tell(after=GRACE_S)
    cluster.tell(after=GRACE_S)
    assert not found(cluster), "what it said last is of the job's first seconds"


def test_a_part_of_an_epoch_that_is_over(cluster):
    moved = cluster.next("gpt", devices=tuple(item for item, _ in node("node-2").devices), epoch=Epoch(2))
    cluster.tell(moved, told("node-1", RUNS, [10_000]), told("node-2", [("gpt", 2)], [0]))
    cluster.tell(after=GRACE_S)
    assert found(cluster) == [("leftover", "gpt", "node-1 still has its part of epoch 1; it is in epoch 2")]
    cluster.tell(told("node-1"))
    assert not found(cluster)


def test_a_node_that_has_delivered_less_than_is_counted(cluster):
    cluster.tell(told("node-1", RUNS, [120_000]), after=60)
    for _ in range(4):  # its ranks stand still
        cluster.tell(told("node-1", RUNS, [120_000]), node("node-2"), after=60)
    text = "node-1 has delivered 120 device-seconds to it in the last 300 s, 600 are counted"
    assert found(cluster) == [("delivered", "gpt", text)]
    account = cluster.job("gpt").account
    assert account is not None and account.served == 0.0, "the job's own word counts; this is only told"


def test_a_word_that_comes_twice_or_late_changes_nothing(cluster):
    cluster.tell(told("node-1", RUNS, [120_000]), after=60)
    (part,) = cluster.state.nodes[0].parts
    cluster.tell(told("node-1", RUNS, [70_000]), after=1)
    assert cluster.state.nodes[0].parts == (part,), "late"
    cluster.tell(told("node-1", RUNS, [120_000]), after=1)
    (again,) = cluster.state.nodes[0].parts
    assert (again.device_ms, again.base_ms) == (part.device_ms, part.base_ms)
    cluster.tell(after=GRACE_S)
    assert not found(cluster)


def test_a_node_that_says_nothing_while_others_do(cluster):
    for _ in range(4):
        cluster.tell(told("node-1", RUNS, [0]), after=SILENT_S / 4)
    cluster.tell(told("node-1", RUNS, [0]), after=1)
    assert "silent" not in {item.kind for item in cluster.state.findings if item.counts}, "for a while"
    cluster.tell(told("node-1", RUNS, [0]), after=GRACE_S)
    (silent,) = [item for item in cluster.state.findings if item.kind == "silent"]
    assert isinstance(silent, Finding) and silent.counts and silent.node.name == "node-2"
    cluster.tell(node("node-2"))
    assert "silent" not in {item.kind for item in cluster.state.findings}


def test_a_scheduler_that_was_away_does_not_blame_its_nodes(cluster):
    """All are silent then: their observer was away too."""
    cluster.tell(after=10 * SILENT_S)
    cluster.tell(after=GRACE_S)
    assert not found(cluster)
