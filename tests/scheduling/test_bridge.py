"""What the policy remembers of jobs over ticks, and how a state becomes a book."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from model.errors import ModelError
from model.ids import DeviceId, Epoch, Generation, TenantId
from model.job_state import JobPhase
from model.orders import NodeOrder, QuotaOrder
from scheduling.constants import COOL_DOWN_S
from scheduling.core.model import State
from scheduling.reasons import cooling
from scheduling.state import ClusterState
from tests.scheduling.builders import Cluster, device_ids, node, node_id, notice
from tests.scheduling.test_policy import reason, running, two_nodes


def test_what_was_delivered_is_counted_over_ticks_by_what_really_ran():
    cluster = two_nodes()
    cluster.tell(notice("std", 2, "standard"))
    account = cluster.job("std").account
    assert account is not None and account.admitted is not None, "it is promised its level when it is placed"
    cluster.run("std", after=100)
    cluster.tell(after=1000)
    account = cluster.job("std").account
    assert (account.delivered, account.served, account.rate) == (0.0, 0.0, 2), "counted when something changes"
    cluster.tell(cluster.next("std", phase=JobPhase.SUSPENDING, held=True), after=500)
    account = cluster.job("std").account
    assert (account.delivered, account.rate) == (3000.0, 0)


def test_an_hour_below_its_level_is_counted():
    cluster = running(two_nodes(), "prem", 2, "premium")
    cluster.tell(node("node-1", alive=False), node("node-2", alive=False), after=60)
    cluster.tell(cluster.next("prem", phase=JobPhase.QUEUED, devices=(), wants="devices"))
    cluster.tell(node("node-3"), after=4000)
    cluster.run("prem")
    account = cluster.job("prem").account
    assert (account.hours, account.below) == (1, 1)


def test_the_hour_of_a_job_that_a_person_holds_stands_still():
    cluster = running(two_nodes(), "prem", 2, "premium")
    ends = cluster.job("prem").account.window_end
    cluster.tell(cluster.next("prem", phase=JobPhase.SUSPENDED, devices=(), held=True, wants="nothing"))
    cluster.tell(after=9000)
    cluster.tell(cluster.next("prem", held=False, wants="devices"))
    account = cluster.job("prem").account
    assert account.window_end == ends + 9000
    assert (account.hours, account.below) == (0, 0)


def test_a_claim_lapses_when_what_it_waits_for_does_not_stop():
    cluster = running(two_nodes(), "gpt")
    cluster.tell(notice("cnn", 4, "premium"))
    assert cluster.job("cnn").account.claim
    cluster.tell(cluster.next("gpt", generation=Generation(2), phase=JobPhase.RUNNING))
    assert cluster.job("gpt").told is not None, "it is told to stop again, in its new generation"
    assert cluster.job("gpt").told.directive.generation == 2
    assert cluster.stop("gpt")["cnn"].directive.action == "place"


def test_a_claim_outlives_ticks_and_is_whole_only_when_the_last_has_stopped():
    cluster = Cluster(node("node-1", 2), node("node-2", 2))
    running(running(cluster, "one", 2), "two", 2)
    cluster.tell(notice("cnn", 4, "premium"))
    for _ in range(3):
        cluster.tell(after=1)
        assert dict(cluster.job("cnn").account.claim) == {"node-1@1": 2, "node-2@1": 2}
    told = cluster.stop("one")
    assert "cnn" not in told or told["cnn"].directive.action == "wait"
    assert reason(cluster, "one") == (
        "0 of 2 devices free (2 more kept for jobs before it); waits for basic job two (2 devices on node-2) to stop."
    )
    assert cluster.stop("two", after=1)["cnn"].directive.devices == (*device_ids("node-1", 2), *device_ids("node-2", 2))


def test_a_start_that_fails_is_not_repeated_at_once():
    cluster = two_nodes()
    cluster.tell(notice("cnn", 2, "premium"))
    cluster.tell(cluster.next("cnn", phase=JobPhase.STARTING, wants="nothing", devices=device_ids("node-1", 2)))
    cluster.tell(cluster.next("cnn", phase=JobPhase.QUEUED, wants="devices", devices=()))
    assert reason(cluster, "cnn") == "Gave its devices up just now; is placed again in 5 s at the earliest."
    assert cluster.tell(after=COOL_DOWN_S)["cnn"].directive.action == "place"


@pytest.mark.parametrize(("left", "told"), [(0.2, "in 1 s"), (4.8, "in 5 s"), (5.0, "in 5 s")])
def test_what_is_left_of_a_pause_is_never_told_as_nothing(left: float, told: str):
    assert told in cooling(left)


def test_a_node_with_two_models_is_two_rooms():
    both = node("node-1", 2)
    other = tuple((DeviceId(node_id("node-1"), (f"gpu-{index}",)), "H200") for index in range(2))
    cluster = Cluster(replace(both, devices=(*both.devices, *other)))
    assert cluster.tell(notice("gpt", 2, accelerator="h200"))["gpt"].directive.devices == tuple(d for d, _ in other)
    assert cluster.tell(notice("cnn", 2))["cnn"].directive.devices == device_ids("node-1", 2)
    cluster.tell(notice("mixed", 3))
    assert reason(cluster, "mixed") == "Needs 3 devices; the fleet has 2."


def test_process_trees_of_a_gang_over_odd_nodes_are_whole_when_others_give_way():
    cluster = Cluster(node("node-1", 3), node("node-2", 3))
    for name in ("a", "b", "c", "d", "e", "f"):
        running(cluster, name, 1)
    cluster.tell(notice("tree", 4, "premium", group=2))
    assert dict(cluster.job("tree").account.claim) == {"node-1@1": 2, "node-2@1": 2}


def test_two_jobs_that_say_that_they_hold_one_device():
    cluster = two_nodes()
    told = {"phase": JobPhase.RUNNING, "wants": "nothing", "epoch": Epoch(1), "devices": device_ids("node-1", 2)}
    first, second = notice("a", 2, **told), notice("b", 2, **told)
    with pytest.raises(AssertionError, match="twice"):
        cluster.tell(first, second)  # the builder's own check: nobody gave them so
    plan = cluster.plan
    assert plan is not None and not plan.decisions, "nothing is made worse"


def test_a_snapshot_of_the_version_before_is_read_and_a_later_one_is_refused_with_a_sentence():
    cluster = running(two_nodes(), "gpt")
    now = orjson.loads(cluster.state.to_json())
    old = {key: value for key, value in now.items() if key not in ("cordoned", "tenants", "grown_at", "turned_at")}
    old["version"] = 1
    old["jobs"] = [
        {key: value for key, value in job.items() if key != "account"}
        | {"claims": [], "waits_since": None, "changed_at": "2026-01-01T00:00:00Z"}
        for job in now["jobs"]
    ]
    cluster.state = ClusterState.from_json(orjson.dumps(old))
    assert cluster.state.version == 2
    assert cluster.tell(after=1) == {}
    account = cluster.job("gpt").account
    assert account is not None and (State(account.state), account.rate) == (State.RUNNING, 2)
    with pytest.raises(ModelError, match="is of version 99; this build reads 1 and 2"):
        ClusterState.from_json(orjson.dumps(now | {"version": 99}))


# -- operators -------------------------------------------------------------------------------------------------


def test_nothing_new_is_placed_on_a_cordoned_node_and_what_runs_there_runs_on():
    cluster = running(two_nodes(), "gpt")
    cluster.tell(NodeOrder("node-1", "cordon"), NodeOrder("node-2", "cordon"))
    cluster.tell(notice("cnn", 2, "premium"))
    assert reason(cluster, "cnn") == (
        "0 of 2 devices free (2 more on cordoned nodes); nothing of a lower tier to preempt."
    )
    told = cluster.tell(cluster.next("gpt", wants="move", move_to="node-2", request="r"))["gpt"].directive
    assert told.reason == "Node-2 is cordoned: nothing new is placed there until `ergo node uncordon node-2`."
    assert cluster.tell(NodeOrder("node-2", "uncordon"))["cnn"].directive.devices == device_ids("node-2", 2)


def test_the_jobs_of_a_drained_node_move_and_its_next_incarnation_is_drained_too():
    cluster = running(two_nodes(), "gpt")
    told = cluster.tell(NodeOrder("node-1", "drain"))["gpt"].directive
    assert (told.action, told.devices) == ("migrate", device_ids("node-2", 2))
    assert told.reason == "Basic job gpt moves off node-1, which is being emptied: it will have 2 devices on node-2."
    under_way = cluster.next("gpt", wants="move", move_to="node-2", request=told.request)
    assert not cluster.tell(under_way), "it copies ahead: that is no wish of a person"
    assert cluster.job("gpt").told is not None, "and both places are its own"
    cluster.tell(cluster.next("gpt", phase=JobPhase.MOVING, wants="nothing", move_to=None, request=""))
    assert len(cluster.job("gpt").held_devices) == 4
    runs = cluster.next("gpt", phase=JobPhase.RUNNING, devices=told.devices, epoch=Epoch(2))
    assert not cluster.tell(runs)
    assert cluster.job("gpt").held_devices == device_ids("node-2", 2)
    cluster.tell(node("node-1@2"))
    cluster.tell(notice("cnn", 2))
    assert cluster.job("cnn").told is None


def test_a_job_of_a_drained_node_stops_where_there_is_no_room_for_it_elsewhere():
    cluster = running(running(two_nodes(), "gpt"), "cnn")
    told = cluster.tell(NodeOrder("node-1", "drain"))["gpt"].directive
    assert told.action == "preempt"
    assert told.reason == (
        "Basic job gpt is preempted, and waits for a place: node-1 is being emptied, and elsewhere 0 are free, in no "
        "place that suits it."
    )
    cluster.stop("gpt")
    cluster.end("cnn", after=COOL_DOWN_S)
    assert cluster.job("gpt").told.directive.devices == device_ids("node-2", 2)


def test_a_job_on_two_nodes_of_which_one_is_drained_moves_as_a_whole():
    cluster = Cluster(*(node(f"node-{number}") for number in range(1, 5)))
    running(cluster, "gpt", 4)
    told = cluster.tell(NodeOrder("node-1", "drain"))["gpt"].directive
    assert told.action == "migrate"
    assert not set(told.devices) & set(cluster.job("gpt").notice.devices)
    assert len(told.devices) == 4 == len(told.device_of_rank)


def test_a_process_tree_leaves_a_drained_node_for_one_that_has_room_for_all_of_it():
    cluster = Cluster(node("node-1", 2), node("node-2", 1), node("node-3", 1))
    cluster.tell(notice("tree", 2, group=2))
    cluster.run("tree")
    told = cluster.tell(NodeOrder("node-1", "drain"))["tree"].directive
    assert told.action == "preempt"
    assert "elsewhere 2 are free, in no place that suits it." in told.reason

    cluster = Cluster(node("node-1", 2), node("node-2", 1), node("node-3", 3))
    cluster.tell(notice("tree", 2, group=2))
    cluster.run("tree")
    told = cluster.tell(NodeOrder("node-1", "drain"))["tree"].directive
    assert (told.action, told.devices) == ("migrate", device_ids("node-3", 2))


def test_a_job_that_could_not_be_moved_off_a_drained_node_stops_instead():
    cluster = running(two_nodes(), "gpt")
    told = cluster.tell(NodeOrder("node-1", "drain"))["gpt"].directive
    cluster.tell(cluster.next("gpt", wants="move", move_to="node-2", request=told.request))
    again = cluster.tell(cluster.next("gpt", wants="nothing", move_to=None, request=""))["gpt"].directive
    assert (again.action, again.reason) == (
        "preempt",
        "Basic job gpt is preempted, and goes on elsewhere: node-1 is being emptied.",
    )
    cluster.stop("gpt")
    assert cluster.tell(after=COOL_DOWN_S)["gpt"].directive.devices == device_ids("node-2", 2)
    assert not cluster.job("gpt").stuck


def test_a_quota_is_a_right_to_be_promised_a_level():
    cluster = Cluster(node("node-1", 8))
    cluster.tell(QuotaOrder(TenantId("default"), 2.0))
    cluster.tell(notice("one", 2, "premium"), notice("two", 2, "premium", after=1))
    cluster.run("one")
    cluster.run("two")
    assert cluster.job("one").account.admitted is not None
    assert cluster.job("two").account.admitted is None, "it runs on what is left, without a promise"
    cluster.tell(QuotaOrder(TenantId("default"), None))
    assert cluster.job("two").account.admitted is not None
    with pytest.raises(ModelError, match=r"A quota of -1 devices"):
        QuotaOrder(TenantId("default"), -1)


def test_what_ended_jobs_were_given_is_kept_by_tenant_and_tier():
    cluster = running(two_nodes(), "prem", 2, "premium")
    cluster.tell(after=2 * 3600)
    cluster.end("prem")
    running(cluster, "gpt", 2)
    cluster.end("gpt", after=100)
    assert [(str(item.tier), item.jobs, item.hours, item.below) for item in cluster.state.service] == [
        ("basic", 1, 0, 0),
        ("premium", 1, 2, 0),
    ]
    assert cluster.state.service[1].served_s == 2 * (2 * 3600 + COOL_DOWN_S + 1)
