"""Widths in the live scheduler: it shrinks before it preempts, grows into what is idle, and does what persons ask."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.ids import Epoch
from model.job_state import JobPhase
from model.orders import NodeOrder
from scheduling.constants import COOL_DOWN_S, LIVE, TELL_AGAIN_S
from tests.scheduling.builders import Cluster, device_ids, node, notice

ELASTIC = {"widths": (1, 2, 4), "measured": True}


def wide(cluster: Cluster, name: str = "gpt", tier: str = "basic", **fields) -> Cluster:
    """A job of four ranks that runs on four devices."""
    cluster.tell(notice(name, 4, tier, **(ELASTIC | fields)))
    cluster.run(name)
    cluster.tell(after=COOL_DOWN_S + 1)
    return cluster


def two_nodes() -> Cluster:
    return Cluster(node("node-1"), node("node-2"))


def told(cluster: Cluster, name: str):
    found = cluster.job(name).told
    assert found is not None
    return found.directive


def test_a_job_shrinks_for_another_instead_of_being_preempted():
    cluster = wide(two_nodes())
    directives = cluster.tell(notice("cnn", 2, "premium"))
    shrinks = directives["gpt"].directive
    assert (shrinks.action, shrinks.devices, shrinks.device_of_rank) == (
        "resize",
        device_ids("node-2", 2),
        (0, 0, 1, 1),
    )
    assert shrinks.reason == (
        "Basic job gpt shrinks to 2 of 4: Premium job cnn needs 2 devices, 0 are free. Of the ways through 2 nodes "
        "that were looked at, this one costs others least: 16 device-seconds."
    )
    waits = "0 of 2 devices free; waits for basic job gpt (4 devices on node-1 and node-2) to shrink."
    assert cluster.job("cnn").waiting == waits
    after = cluster.resize("gpt")
    assert after["cnn"].directive.devices == device_ids("node-1", 2)
    cluster.run("cnn")
    assert cluster.job("gpt").told is None and len(cluster.job("gpt").held_devices) == 2


def test_it_grows_into_idle_devices_some_time_later():
    cluster = wide(two_nodes())
    cluster.tell(notice("cnn", 2, "premium"))
    cluster.resize("gpt")
    cluster.run("cnn")
    cluster.end("cnn", after=10)
    assert cluster.job("gpt").told is None, "not at once"
    cluster.tell(after=LIVE.grow_cool_s)
    cluster.tell(after=LIVE.grow_every_s)
    grows = told(cluster, "gpt")
    assert (grows.action, len(grows.devices), grows.device_of_rank) == ("resize", 4, (0, 1, 2, 3))
    assert grows.reason == (
        "Basic job gpt grows by 2 devices, and has 4 devices on node-1 and node-2: 2 are free that nobody who waits "
        "can use."
    )
    assert len(cluster.job("gpt").held_devices) == 4, "they are nobody else's until it answers"
    cluster.resize("gpt")
    assert cluster.job("gpt").told is None


def test_a_growth_that_is_not_taken_up_frees_its_devices():
    cluster = wide(two_nodes())
    cluster.tell(notice("cnn", 2, "premium"))
    cluster.resize("gpt")
    cluster.run("cnn")
    cluster.end("cnn")
    cluster.tell(after=LIVE.grow_cool_s)
    cluster.tell(after=LIVE.grow_every_s)
    assert told(cluster, "gpt").action == "resize"
    cluster.tell(cluster.next("gpt"))  # a later notice in which it runs on as it did: it does not take it up any more
    assert len(cluster.job("gpt").held_devices) == 2
    assert len(cluster.tell(notice("new", 2, after=1))["new"].directive.devices) == 2


def test_a_job_that_cannot_be_that_narrow_is_preempted_instead():
    cluster = wide(two_nodes())
    cluster.tell(notice("cnn", 2, "premium"))
    assert told(cluster, "gpt").action == "resize"
    demand = replace(cluster.job("gpt").notice.demand, widths=(4,))  # it has looked: it would not fit
    cluster.tell(cluster.next("gpt", demand=demand))
    cluster.tell(after=COOL_DOWN_S + 1)
    cluster.tell(after=TELL_AGAIN_S)
    assert told(cluster, "gpt").action == "preempt"
    cluster.stop("gpt")
    assert told(cluster, "cnn").action == "place"


@pytest.mark.parametrize(("measured", "width"), [(True, 2), (False, None)])
def test_a_job_starts_narrower_only_when_it_is_known_to_fit(measured: bool, width: int | None):
    cluster = Cluster(node("node-1", 2))
    cluster.tell(notice("gpt", 4, **(ELASTIC | {"measured": measured})))
    found = cluster.job("gpt").told
    assert (None if found is None else len(found.directive.devices)) == width


def ask(cluster: Cluster, name: str, width: int, request: str = "r"):
    return cluster.tell(cluster.next(name, wants="resize", width=width, request=request))


def done(cluster: Cluster, name: str, width: int):
    """The job runs as asked, and asks for so many from now on."""
    cluster.resize(name)
    widths = tuple(one for one in (1, 2, 4) if one <= width)
    demand = replace(cluster.job(name).notice.demand, max_width=width, widths=widths)
    return cluster.tell(cluster.next(name, demand=demand))


def test_a_person_shrinks_a_job_and_lets_it_grow_again():
    cluster = wide(two_nodes())
    asked = ask(cluster, "gpt", 2)["gpt"].directive
    assert (asked.action, asked.request, asked.devices) == ("resize", "r", device_ids("node-1", 2))
    assert asked.reason == "A person resizes basic job gpt from 4 devices to 2 devices on node-1."
    done(cluster, "gpt", 2)
    assert cluster.job("gpt").answered == "r"
    assert not cluster.tell(after=LIVE.grow_cool_s + LIVE.grow_every_s), "it keeps what the person has said"
    asked = ask(cluster, "gpt", 4, "s")["gpt"].directive
    assert (asked.action, asked.devices) == ("resize", (*device_ids("node-1", 2), *device_ids("node-2", 2)))
    done(cluster, "gpt", 4)
    asked = ask(cluster, "gpt", 1, "t")["gpt"].directive
    assert (asked.devices, asked.device_of_rank) == (device_ids("node-1", 1), (0, 0, 0, 0))


@pytest.mark.parametrize("tier", ["basic", "standard"])
@pytest.mark.parametrize("width", [2, 4])
def test_what_a_person_asks_for_is_answered_also_when_the_job_might_grow_by_itself(tier: str, width: int):
    cluster = wide(two_nodes(), tier=tier)
    ask(cluster, "gpt", 1)
    done(cluster, "gpt", 1)
    asks = cluster.next("gpt", wants="resize", width=width, request="s")
    asked = cluster.tell(asks, after=LIVE.grow_cool_s + LIVE.grow_every_s)["gpt"].directive
    assert (asked.action, asked.request, len(asked.devices)) == ("resize", "s", width)
    assert asked.reason.startswith("A person resizes")


def test_a_person_asks_for_more_than_there_is():
    cluster = wide(two_nodes())
    ask(cluster, "gpt", 2)
    done(cluster, "gpt", 2)
    cluster.tell(notice("other", 1, "standard"))
    cluster.run("other")
    refused = ask(cluster, "gpt", 4, "more")["gpt"].directive
    assert (refused.action, refused.request) == ("refuse", "more")
    assert refused.reason == (
        "It needs 2 devices more, and 1 is free that it can use: ask for fewer, or again when others have given some "
        "up (`ergo fleet` shows who has them)."
    )
    there = ask(cluster, "gpt", 2, "s")["gpt"].directive.reason
    assert there == "The job runs on 2 devices already: there is nothing to do."


def test_a_job_of_a_drained_node_shrinks_where_there_is_no_other_room():
    cluster = wide(two_nodes())
    drained = cluster.tell(NodeOrder("node-1", "drain"))["gpt"].directive
    assert (drained.action, drained.devices) == ("resize", device_ids("node-2", 2))
    assert drained.reason == (
        "Basic job gpt shrinks to 2 of 4: node-1 is being emptied, and elsewhere 0 are free, in no place that suits it."
    )
    cluster.resize("gpt")
    assert not cluster.tell(after=LIVE.grow_cool_s + LIVE.grow_every_s), "nor does it grow back"


def test_a_node_that_is_lost_while_a_job_grows():
    cluster = wide(two_nodes())
    ask(cluster, "gpt", 2)
    done(cluster, "gpt", 2)
    ask(cluster, "gpt", 4, "more")
    lost = cluster.tell(node("node-2", alive=False))["gpt"].directive
    assert lost.action == "lost"
    cluster.tell(cluster.next("gpt", phase=JobPhase.QUEUED, devices=(), wants="devices", width=0, request=""))
    assert len(told(cluster, "gpt").devices) == 2, "what is left, and it is known to fit"
    assert cluster.job("gpt").notice.epoch == Epoch(2)
