"""Which nodes are there, by their beats and our clock."""

from __future__ import annotations

import pytest

from infra.node_watch import NodeWatch
from model.ids import DeviceId, Epoch, JobId, NodeId
from model.records import JobOnNode, NodeDevice, NodeRecord
from tests.scheduling.builders import CPU

LEASE_S = 10.0


def record(name: str, beat: int, **fields) -> NodeRecord:
    node = NodeId.parse(f"{name}@{fields.pop('incarnation', 1)}")
    return NodeRecord(
        node=node,
        cluster=fields.pop("cluster", "c"),
        boot_id="b",
        address="127.0.0.1:1",
        devices=(NodeDevice(id=DeviceId(node, ("cpu-0",)), accelerator="cpu"),),
        numerics=CPU,
        beat=beat,
        lease_s=LEASE_S,
        **fields,
    )


class Clock:
    """Looks every second and tells everything at once."""

    def __init__(self) -> None:
        self.watch = NodeWatch("c")
        self.now = 100.0

    def look(self, *records: NodeRecord):
        self.now += 1.0
        look = self.watch.look(records, self.now)
        self.watch.told(look.notices, self.now)
        return look

    def give_up(self, node: NodeId):
        notices = self.watch.given_up(node, self.now)
        self.watch.told(notices, self.now)
        return notices


def story(look) -> list[tuple[str, bool]]:
    return [(str(notice.node), notice.alive) for notice in look.notices]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_node_has_come_when_it_renews(clock):
    assert story(clock.look(record("n", 1))) == []
    assert story(clock.look(record("n", 2))) == [("n@1", True)]
    assert story(clock.look(record("n", 3))) == [], "told once"


def test_changes_are_told_steps_are_not(clock):
    for beat in (1, 2):
        clock.look(record("n", beat))
    part = JobOnNode(job=JobId("gpt"), epoch=Epoch(1))
    assert clock.look(record("n", 3, jobs=(part,))).notices[0].jobs == ((JobId("gpt"), Epoch(1)),)
    assert story(clock.look(record("n", 4, jobs=(part.model_copy(update={"device_ms": 5}),)))) == []
    assert clock.look(record("n", 5)).notices[0].jobs == ()


def test_a_lease_is_over_after_its_length_and_a_margin(clock):
    for beat in (1, 2):
        clock.look(record("n", beat))
    looks = [clock.look(record("n", 2)) for _ in range(13)]
    assert [len(look.lost) for look in looks] == [0] * 12 + [1]
    node = looks[-1].lost[0]
    assert [(notice.alive, str(notice.node)) for notice in clock.give_up(node)] == [(False, "n@1")]


def test_a_new_observer_watches_for_a_whole_lease_first(clock):
    looks = [clock.look(record("n", 7)) for _ in range(14)]
    assert [len(look.lost) for look in looks] == [0] * 13 + [1]
    assert all(not look.notices for look in looks), "nobody has seen it renew"


def test_a_time_in_which_nobody_looked_counts_against_no_lease(clock):
    for beat in (1, 2):
        clock.look(record("n", beat))
    clock.now += 1000
    assert not clock.look(record("n", 2)).lost
    assert [len(clock.look(record("n", 2)).lost) for _ in range(13)][-1] == 1


def test_an_outage_gives_nobody_up(clock):
    names = ["a", "b", "c", "d"]
    for beat in (1, 2):
        clock.look(*(record(name, beat) for name in names))
    # The last beats of nodes are up to two seconds apart.
    clock.look(record("a", 2), record("b", 3), record("c", 3), record("d", 3))
    looks = [clock.look(record("a", 2), *(record(name, 3) for name in names[1:])) for _ in range(30)]
    assert not any(look.lost for look in looks)
    assert [str(node) for node in looks[-1].holding] == ["a@1", "b@1", "c@1", "d@1"]
    # It is over: the one that really is away is given up after a lease in which the others were there.
    looks = [clock.look(record("a", 2), *(record(name, 4 + beat) for name in names[1:])) for beat in range(3)]
    assert [str(node) for node in looks[-1].lost] == ["a@1"]


def test_one_of_three_is_given_up(clock):
    for beat in range(20):
        look = clock.look(record("a", 1), record("b", beat + 1), record("c", beat + 1))
    assert [str(node) for node in look.lost] == ["a@1"]


def test_two_nodes_that_are_silent_are_both_given_up(clock):
    looks = [clock.look(record("a", 1), record("b", 1)) for _ in range(14)]
    assert len(looks[-1].lost) == 2


def test_another_incarnation_ends_the_one_before(clock):
    for beat in (1, 2):
        clock.look(record("n", beat))
    assert story(clock.look(record("n", 3, incarnation=2))) == [("n@1", False)]
    assert story(clock.look(record("n", 4, incarnation=2))) == [("n@2", True)]


def test_a_node_that_left_or_was_given_up_is_told_as_such(clock):
    for beat in (1, 2):
        clock.look(record("n", beat), record("m", beat))
    assert story(clock.look(record("n", 3, left=True), record("m", 2, lost=True))) == [("n@1", False), ("m@1", False)]
    assert not any(clock.look(record("n", 3, left=True), record("m", 2, lost=True)).lost for _ in range(20))


def test_what_was_not_told_is_told_again(clock):
    clock.look(record("n", 1))
    clock.now += 1
    assert clock.watch.look([record("n", 2)], clock.now).notices
    assert clock.watch.look([record("n", 2)], clock.now).notices, "`told` was not called"


def test_everything_is_told_again_after_a_minute(clock):
    told = [bool(clock.look(record("n", beat)).notices) for beat in range(1, 70)]
    assert told.count(True) == 2


def test_other_clusters_are_not_ours(clock):
    for beat in (1, 2):
        assert not clock.look(record("n", beat, cluster="other")).notices
