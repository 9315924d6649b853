"""The policy by example: two nodes with two devices each, unless said otherwise."""

from __future__ import annotations

from datetime import timedelta

import pytest

from model.control import JobClosed
from model.ids import Epoch, Generation, JobId
from model.job_state import JobPhase
from scheduling import reasons
from scheduling.constants import COOL_DOWN_S, DRAIN_S, PLACES_AT_ONCE, SETTLE_S, TELL_AGAIN_S
from scheduling.ledger import restored
from tests.scheduling.builders import CPU, OTHER, Cluster, demand, device_ids, node, notice


def two_nodes() -> Cluster:
    return Cluster(node("node-1"), node("node-2"))


def running(cluster: Cluster, name: str, ranks: int = 2, tier: str = "basic", **fields) -> Cluster:
    cluster.tell(notice(name, ranks, tier, **fields))
    cluster.run(name)
    cluster.tell(after=COOL_DOWN_S + 1)
    return cluster


def reason(cluster: Cluster, name: str) -> str:
    return cluster.job(name).waiting


def test_a_level_that_no_width_can_keep_has_its_sentence():
    cluster = running(Cluster(node("node-1", 8)), "small", 2, "premium")
    cluster.tell(notice("wide", 7, "standard"))
    assert reason(cluster, "wide").startswith(
        "Its 70 % is not promised yet: premium jobs would leave 6 devices, and a standard job needs 7 together; "
    )


def test_a_job_is_placed_on_one_node():
    told = two_nodes().tell(notice("gpt", 2))["gpt"].directive
    assert told.action == "place"
    assert told.devices == device_ids("node-1", 2)
    assert told.device_of_rank == (0, 1)
    assert told.reason == "Basic job gpt starts: it has 2 devices on node-1; 4 are free."
    assert (told.generation, told.notice) == (1, 1)


def test_the_tightest_node_is_taken():
    cluster = Cluster(node("node-1", 4), node("node-2", 2))
    assert cluster.tell(notice("gpt", 2))["gpt"].directive.devices == device_ids("node-2", 2)


def test_a_gang_over_nodes_has_contiguous_ranks():
    told = two_nodes().tell(notice("cnn", 4))["cnn"].directive
    assert told.devices == (*device_ids("node-1", 2), *device_ids("node-2", 2))
    assert told.device_of_rank == (0, 1, 2, 3)


def test_a_process_tree_stays_on_one_node():
    cluster = Cluster(node("node-1", 3), node("node-2", 3))
    told = cluster.tell(notice("tree", 4, group=2))["tree"].directive
    assert [device.node.name for device in told.devices] == ["node-1", "node-1", "node-2", "node-2"]


def test_a_process_tree_that_no_node_can_hold_waits_with_the_reason():
    cluster = two_nodes()
    cluster.tell(notice("tree", 4, group=4))
    assert reason(cluster, "tree") == ("Needs 4 devices on one node for each process tree; no node has more than 2.")


def test_devices_that_are_free_apart_are_too_few_for_a_process_tree():
    cluster = running(running(running(two_nodes(), "a", 1), "b", 1), "c", 1)
    cluster.end("b")  # it was on node-1 with `a`
    cluster.tell(notice("tree", 2, group=2), after=COOL_DOWN_S + 1)
    assert reason(cluster, "tree") == (
        "2 of 2 devices free, at most 1 on one node, which is too few for a process tree; "
        "nothing of a lower tier to preempt."
    )
    told = cluster.end("c", after=COOL_DOWN_S + 1)["tree"].directive
    assert told.devices == device_ids("node-2", 2)


def test_a_process_tree_takes_its_devices_on_one_node():
    cluster = running(running(running(running(two_nodes(), "a", 1), "b", 1), "c", 1), "d", 1)
    told = cluster.tell(notice("tree", 2, "premium", group=2))
    gone = [name for name, item in told.items() if item.directive.action == "preempt"]
    assert sorted(gone) in (["a", "b"], ["c", "d"])
    cluster.stop(gone[0])
    (node_name,) = {device.node.name for device in cluster.stop(gone[1])["tree"].directive.devices}
    cluster.run("tree")
    told = cluster.tell(node(node_name, alive=False))
    assert told["tree"].directive.action == "lost"


def test_premium_preempts_basic_and_basic_resumes_after_it():
    cluster = running(two_nodes(), "gpt")
    told = cluster.tell(notice("cnn", 4, "premium"), after=5.0)
    assert told["gpt"].directive.action == "preempt"
    assert told["gpt"].directive.reason == (
        "Basic job gpt is preempted: Premium job cnn needs 4 devices, 2 are free. Of the ways through 2 nodes that "
        "were looked at, this one costs others least: 1516 device-seconds."
    )
    assert told["cnn"].directive.action == "wait"
    assert reason(cluster, "cnn") == "2 of 4 devices free; waits for basic job gpt (2 devices on node-1) to stop."

    told = cluster.tell(cluster.next("gpt", phase=JobPhase.SUSPENDING))
    assert not told, "nothing is given away before the devices are"
    assert cluster.stop("gpt")["cnn"].directive.action == "place"
    cluster.run("cnn")
    assert cluster.job("gpt").told is None
    assert reason(cluster, "gpt") == "0 of 2 devices free; nothing of a lower tier to preempt."

    told = cluster.end("cnn", after=COOL_DOWN_S + 1)
    assert told["gpt"].directive.action == "place"
    assert told["gpt"].directive.reason == "Basic job gpt resumes: it has 2 devices on node-1; 4 are free."


def test_devices_given_up_are_kept_for_their_requester():
    cluster = running(two_nodes(), "gpt")
    cluster.tell(notice("cnn", 4, "premium"))
    told = cluster.tell(notice("quick", 1, "standard", after=1), notice("late", 1, "basic", after=1))
    assert told["quick"].directive.action == told["late"].directive.action == "wait"
    assert "(2 more kept for jobs before it)" in told["quick"].directive.reason
    assert cluster.stop("gpt")["cnn"].directive.action == "place"


def test_kept_devices_are_released_when_the_requester_goes_away():
    cluster = running(two_nodes(), "gpt")
    cluster.tell(notice("cnn", 4, "premium"))
    cluster.end("cnn")
    assert not cluster.job("gpt").notice.held
    told = cluster.stop("gpt", after=1)
    assert told["gpt"].directive.action == "wait", "it was preempted just now"
    assert cluster.tell(after=COOL_DOWN_S)["gpt"].directive.action == "place"


def test_what_is_promised_comes_before_what_is_not():
    cluster = running(two_nodes(), "gpt")
    cluster.tell(notice("std", 4, "standard"))
    told = cluster.tell(notice("cnn", 4, "premium"))
    assert told["cnn"].directive.action == "wait", "two levels do not fit into four devices"
    assert reason(cluster, "cnn") == (
        "Its 95 % is not promised yet: 2.8 of the 3.6 devices that may be promised are; 0 of 4 devices free "
        "(2 more kept for jobs before it); waits for basic job gpt (2 devices on node-1) to stop."
    )
    assert cluster.stop("gpt")["std"].directive.action == "place"
    cluster.run("std")
    assert cluster.end("std")["cnn"].directive.action == "place"


def test_a_premium_job_without_a_promise_is_not_told_that_there_is_nothing_below_it():
    cluster = running(two_nodes(), "std", 4, "standard")
    cluster.tell(notice("cnn", 2, "premium"))
    assert reason(cluster, "cnn") == (
        "Its 95 % is not promised yet: 2.8 of the 3.6 devices that may be promised are; 0 of 2 devices free; it may "
        "preempt no standard job before its own level is promised."
    )


def test_a_level_that_the_fleet_is_too_small_for_is_called_so():
    told = reasons.over_cap(0.95, 0.0, 1.8, 1.9)
    assert told == "its 95 % is not promised yet: it takes 1.9 of the 1.8 devices that may be promised; "
    assert not reasons.over_cap(0.95, 0.0, 0.0, 1.9), "all nodes are cordoned: that is told elsewhere"


def test_nothing_is_preempted_in_vain():
    cluster = running(two_nodes(), "cnn", tier="premium")
    running(cluster, "gpt", 1)
    told = cluster.tell(notice("big", 3, "standard"))
    assert "gpt" not in told
    assert reason(cluster, "big") == (
        "Its 70 % is not promised yet: 1.9 of the 3.6 devices that may be promised are; 1 of 3 devices free; with "
        "the 1 device of lower tiers it still does not fit."
    )


def test_equal_tiers_do_not_preempt_one_another():
    cluster = running(two_nodes(), "one", 4)
    cluster.tell(notice("two", 1))
    assert reason(cluster, "two") == "0 of 1 device free; nothing of a lower tier to preempt."


def test_the_lowest_tier_gives_way_then_the_fewest_devices_then_the_newest():
    cluster = Cluster(node("node-1", 6))
    for name, ranks, tier in (("std", 1, "standard"), ("big", 3, "basic"), ("old", 1, "basic"), ("new", 1, "basic")):
        running(cluster, name, ranks, tier)
    told = cluster.tell(notice("cnn", 1, "premium"))
    assert [name for name, item in told.items() if item.directive.action == "preempt"] == ["new"]
    told = cluster.tell(notice("dnn", 2, "premium"))
    assert [name for name, item in told.items() if item.directive.action == "preempt"] == ["big"] or set(told) == {
        "old"
    }


def test_whole_nodes_are_reclaimed_before_scattered_devices():
    cluster = Cluster(*(node(f"node-{index}", 2) for index in range(1, 4)))
    for name in ("a", "b", "c", "d"):
        running(cluster, name, 1)
    running(cluster, "e", 2)
    assert {device.node.name for device in cluster.job("e").notice.devices} == {"node-3"}
    told = cluster.tell(notice("cnn", 2, "premium", group=2))
    victims = [name for name, item in told.items() if item.directive.action == "preempt"]
    assert victims == ["e"], "two devices on one node, of the newest job"


def test_more_than_the_fleet_has_waits_and_blocks_nobody():
    cluster = two_nodes()
    told = cluster.tell(notice("huge", 8, "premium"), notice("gpt", 2))
    assert told["gpt"].directive.action == "place"
    assert told["huge"].directive.reason == "Needs 8 devices; the fleet has 4."
    cluster.tell(node("node-3", 4), after=6)
    assert cluster.run("gpt")["gpt"].directive.action == "preempt"


def test_an_empty_fleet():
    cluster = Cluster()
    assert cluster.tell(notice("gpt"))["gpt"].directive.reason == "The fleet has no node."
    assert cluster.tell(node("node-1"))["gpt"].directive.action == "place"


def test_a_job_stays_in_its_numerics_class():
    cluster = Cluster(node("node-1", 2, numerics=OTHER), node("node-2", 1))
    cluster.tell(notice("gpt", 2, numerics=CPU))
    assert reason(cluster, "gpt") == "Needs 2 devices; the fleet has 1 of its class."
    assert cluster.tell(node("node-3", 2))["gpt"].directive.devices == device_ids("node-3", 2)


def test_a_job_is_bound_to_the_class_that_it_first_ran_in():
    cluster = Cluster(node("node-1", 2, numerics=OTHER))
    running(cluster, "gpt")
    assert cluster.job("gpt").notice.demand.numerics == OTHER
    cluster.tell(node("node-1", alive=False), node("node-2", 4))
    cluster.tell(cluster.next("gpt", phase=JobPhase.QUEUED, devices=(), wants="devices"))
    assert reason(cluster, "gpt") == "Needs 2 devices; the fleet has 0 of its class."


def test_a_gang_is_of_one_numerics_class():
    cluster = Cluster(node("node-1", 1, numerics=OTHER), node("node-2", 1))
    cluster.tell(notice("gpt", 2))
    assert reason(cluster, "gpt") == "Needs 2 devices; the fleet has 1."


def test_an_accelerator_is_taken_by_its_model():
    cluster = Cluster(node("node-1", 2), node("node-2", 2, model="NVIDIA H200"))
    assert cluster.tell(notice("gpt", accelerator="nvidia h200"))["gpt"].directive.devices == device_ids("node-2", 2)
    cluster.tell(notice("tpu", 1, accelerator="TPU"))
    assert reason(cluster, "tpu") == "Needs 1 device of TPU; the fleet has 0."


def test_priority_and_submission_order_a_tier():
    cluster = two_nodes()
    told = cluster.tell(
        notice("late", 4, after=2), notice("early", 4, after=1), notice("urgent", 4, after=3, priority=5)
    )
    assert [name for name, item in told.items() if item.directive.action == "place"] == ["urgent"]
    assert "early" in cluster.tell(cluster.next("urgent", phase=JobPhase.CANCELLED, wants="nothing"))


def test_a_held_job_wants_nothing_and_its_devices_are_counted_on():
    cluster = running(two_nodes(), "gpt", 4)
    cluster.tell(cluster.next("gpt", phase=JobPhase.SUSPENDING, held=True))
    cluster.tell(notice("cnn", 4, "basic", after=1))
    assert reason(cluster, "cnn").startswith("0 of 4 devices free; waits for basic job gpt")
    cluster.tell(cluster.next("gpt", phase=JobPhase.SUSPENDED, devices=(), held=True))
    assert cluster.job("cnn").told is not None
    assert cluster.job("gpt").told is None
    cluster.end("cnn")
    assert cluster.tell(after=60) == {}, "only a person resumes it"
    assert cluster.tell(cluster.next("gpt", held=False, wants="devices"))["gpt"].directive.action == "place"


def test_a_job_that_is_being_started_is_left_alone_until_it_runs():
    cluster = two_nodes()
    cluster.tell(notice("gpt", 4))
    told = cluster.tell(notice("cnn", 4, "premium"))
    assert "gpt" not in told
    assert reason(cluster, "cnn") == "0 of 4 devices free; basic job gpt is being started."
    assert cluster.run("gpt")["gpt"].directive.action == "preempt"


def test_a_storm_of_jobs_is_served_in_several_plans():
    cluster = Cluster(*(node(f"node-{index:02}", 8) for index in range(20)))
    told = cluster.tell(*(notice(f"job-{index:03}", 1, after=index) for index in range(150)))
    assert len(told) == PLACES_AT_ONCE
    assert cluster.plan is not None and cluster.plan.wake_s < 0.2
    assert len(cluster.tell(after=0.2)) == 150 - PLACES_AT_ONCE


# -- persons' moves --------------------------------------------------------------------------------------------


def move(cluster: Cluster, name: str, to: str, request: str = "r1"):
    return cluster.tell(cluster.next(name, wants="move", move_to=to, request=request))[name].directive


def test_a_move_to_a_node_with_room():
    cluster = running(two_nodes(), "gpt")
    told = move(cluster, "gpt", "node-2")
    assert (told.action, told.request, told.devices) == ("migrate", "r1", device_ids("node-2", 2))
    assert told.reason == "A person moves basic job gpt to node-2: needs 2 devices, 2 are free there."
    assert cluster.tell(notice("cnn", 1))["cnn"].directive.action == "wait", "source and target are both taken"
    cluster.tell(cluster.next("gpt", phase=JobPhase.MOVING, wants="nothing", move_to=None))
    cluster.tell(cluster.next("gpt", phase=JobPhase.RUNNING, devices=device_ids("node-2", 2), epoch=Epoch(2)), after=6)
    assert cluster.job("gpt").told is None
    assert cluster.job("cnn").told.directive.devices == device_ids("node-1", 1)


def test_a_move_that_failed_gives_the_target_back():
    cluster = running(two_nodes(), "gpt")
    move(cluster, "gpt", "node-2")
    cluster.tell(cluster.next("gpt", wants="nothing", move_to=None, request=""))
    assert cluster.job("gpt").told is None
    assert cluster.tell(notice("cnn", 2))["cnn"].directive.devices == device_ids("node-2", 2)


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("node-2", "Node-2 has 1 device free, the job needs 2."),
        ("node-9", "There is no node node-9; the fleet has node-1, node-2 and other."),
        ("node-1", "The job is on node-1 already."),
        ("other", "Other does not suit the job: its numerics class is another."),
    ],
)
def test_a_move_that_cannot_be_had_is_refused_with_the_figures(to, why):
    cluster = Cluster(node("node-1"), node("node-2"), node("other", 4, numerics=OTHER))
    running(cluster, "gpt", 2, numerics=CPU)
    running(cluster, "small", 1, numerics=CPU)
    told = move(cluster, "gpt", to)
    assert (told.action, told.request, told.reason) == ("refuse", "r1", why)
    assert cluster.tell(after=1) == {}, "told once"
    told = move(cluster, "gpt", to, "r2")
    assert told.request == "r2", "asked again, answered again"


def test_a_move_of_a_job_that_holds_nothing_is_refused():
    cluster = two_nodes()
    cluster.tell(notice("gpt", 8))
    assert move(cluster, "gpt", "node-2").reason == (
        "The job is queued and holds no devices; it can be moved and resized while it runs."
    )


# -- losses ----------------------------------------------------------------------------------------------------


def test_a_lost_node():
    cluster = running(two_nodes(), "gpt", 2)
    told = cluster.tell(node("node-1", alive=False))["gpt"].directive
    assert (told.action, [str(item) for item in told.nodes]) == ("lost", ["node-1@1"])
    assert told.reason == "Node-1 is lost: basic job gpt goes on elsewhere from its newest checkpoint."
    told = cluster.tell(cluster.next("gpt", phase=JobPhase.QUEUED, devices=(), wants="devices"))["gpt"].directive
    assert told.devices == device_ids("node-2", 2)
    assert [str(item.node) for item in cluster.state.nodes] == ["node-2@1"], "nobody needs the lost one any more"


def test_a_placement_whose_node_is_lost_before_it_was_taken_up():
    cluster = two_nodes()
    cluster.tell(notice("cnn", 4))
    told = cluster.tell(node("node-1", alive=False))["cnn"].directive
    assert told.action == "lost"
    assert cluster.tell(notice("gpt", 2))["gpt"].directive.action == "wait", "cnn may be on node-2 by now"
    assert cluster.tell(cluster.next("cnn", phase=JobPhase.QUEUED))["gpt"].directive.devices == device_ids("node-2", 2)


def test_a_node_that_comes_back_under_a_new_incarnation():
    cluster = running(two_nodes(), "gpt", 2)
    assert cluster.tell(node("node-1@2"))["gpt"].directive.action == "lost"
    assert cluster.tell(node("node-1@1")) == {}, "an old incarnation never comes back"
    told = cluster.tell(cluster.next("gpt", phase=JobPhase.QUEUED, devices=(), wants="devices"))["gpt"].directive
    assert told.devices == device_ids("node-1@2", 2)


def test_a_loss_that_is_not_answered_is_told_again():
    cluster = running(two_nodes(), "gpt", 2)
    first = cluster.tell(node("node-1", alive=False))["gpt"].directive
    assert cluster.tell(after=TELL_AGAIN_S)["gpt"].directive == first
    assert cluster.tell(after=TELL_AGAIN_S) == {}
    assert cluster.tell(after=TELL_AGAIN_S)["gpt"].directive == first


# -- ends ------------------------------------------------------------------------------------------------------


def test_a_terminated_jobs_devices_are_free_when_its_node_says_so():
    cluster = running(two_nodes(), "gpt", 4)
    cluster.tell(node("node-1", jobs=[("gpt", 1)]), node("node-2", jobs=[("gpt", 1)]))
    cluster.tell(notice("cnn", 2))
    cluster.tell(JobClosed(JobId("gpt"), "run-gpt", "TERMINATED"), after=6)
    assert reason(cluster, "cnn") == "0 of 2 devices free; waits for the processes of an ended job to be gone."
    assert cluster.tell(after=DRAIN_S + 1) == {}, "both nodes still have it"
    assert cluster.tell(node("node-2", jobs=[]))["cnn"].directive.devices == device_ids("node-2", 2)
    assert cluster.tell(notice("gpt", 2, number=9)) == {}, "a late notice"
    assert "gpt" in cluster.tell(notice("gpt", 2, number=1, generation=Generation(3))), "its workflow was reset"


def test_a_job_that_is_terminated_before_its_node_has_told_of_it():
    cluster = running(two_nodes(), "gpt", 4)
    cluster.tell(notice("cnn", 2))
    cluster.tell(JobClosed(JobId("gpt"), "run-gpt", "TERMINATED"), after=6)
    assert cluster.tell(node("node-1"), after=1) == {}, "it may have been told too early"
    assert cluster.tell(after=DRAIN_S) == {}
    assert cluster.tell(node("node-1", jobs=[("gpt", 1)])) == {}
    assert cluster.tell(node("node-1"))["cnn"].directive.devices == device_ids("node-1", 2)
    told = cluster.tell(notice("dnn", 2))["dnn"].directive
    assert told.action == "wait"
    assert cluster.tell(node("node-2"))["dnn"].directive.devices == device_ids("node-2", 2)


def test_a_node_with_parts_of_unknown_jobs_is_not_used():
    cluster = Cluster(node("node-1", jobs=[("stranger", 3)]), node("node-2"))
    assert cluster.tell(notice("gpt", 2))["gpt"].directive.devices == device_ids("node-2", 2)
    cluster.tell(notice("cnn", 2))
    told = cluster.tell(
        notice("stranger", 1, phase=JobPhase.RUNNING, devices=device_ids("node-1", 1), epoch=Epoch(3), wants="nothing"),
        after=6,
    )
    assert "cnn" not in told or told["cnn"].directive.action == "wait"
    cluster.end("stranger", after=6)
    assert cluster.job("cnn").told is not None


def test_an_ended_job_with_the_same_id_may_run_again():
    cluster = running(two_nodes(), "gpt")
    cluster.end("gpt")
    assert cluster.tell(notice("gpt", 2, run="second", demand=demand("gpt")))["gpt"].workflow_run == "second"


# -- what one plan may tell ------------------------------------------------------------------------------------


def test_a_restored_scheduler_asks_a_part_of_its_jobs_in_each_plan_and_settles_after_the_last(monkeypatch):
    monkeypatch.setattr("scheduling.policy.ASKS_AT_ONCE", 2)
    cluster = Cluster(node("node-1", 8))
    cluster.tell(*(notice(f"job-{index}", 8) for index in range(5)))
    cluster.state = restored(cluster.state, cluster.now)
    asked = [len(cluster.tell(after=1)) for _ in range(4)]
    assert asked[:3] == [2, 2, 1]
    settles = cluster.state.settle_until
    assert settles is not None and settles == cluster.now - timedelta(seconds=2) + timedelta(seconds=SETTLE_S)


def stops_at_once(monkeypatch, count: int) -> None:
    monkeypatch.setattr("scheduling.policy.STOPS_AT_ONCE", count)
    monkeypatch.setattr("scheduling.ledger.STOPS_AT_ONCE", count)


def test_more_victims_than_one_plan_tells_are_told_with_the_next_one(monkeypatch):
    stops_at_once(monkeypatch, 3)
    cluster = Cluster(node("node-1", 8))
    cluster.tell(*(notice(f"job-{index}", 1) for index in range(8)))
    for index in range(8):
        cluster.run(f"job-{index}")
    told = cluster.tell(notice("big", 8, "premium"), after=100)
    assert [item.directive.action for item in told.values()].count("preempt") == 3
    assert all(cluster.job(f"job-{index}").told for index in range(8)), "it is decided for all at once"
    assert cluster.plan is not None and cluster.plan.wake_s < 1
    rest = cluster.tell(after=1)
    assert len(rest) == 5 and not set(rest) & set(told)
    assert not cluster.tell(after=1), "each is told once"
    for index in range(8):
        cluster.stop(f"job-{index}")
    assert cluster.job("big").told is not None


def test_jobs_of_more_lost_nodes_than_one_plan_tells_are_told_with_the_next_one(monkeypatch):
    stops_at_once(monkeypatch, 2)
    cluster = Cluster(node("node-1", 4))
    cluster.tell(*(notice(f"job-{index}", 1) for index in range(4)))
    for index in range(4):
        cluster.run(f"job-{index}")
    told = [set(cluster.tell(*words, after=1)) for words in ((node("node-1", 4, alive=False),), (), ())]
    assert [len(names) for names in told] == [2, 2, 0] and len(told[0] | told[1]) == 4


def test_the_more_jobs_wait_the_less_often_each_is_told_a_new_reason(monkeypatch):
    monkeypatch.setattr("scheduling.policy.WAITS_PER_S", 0.1)
    cluster = Cluster(node("node-1", 2))
    cluster.tell(notice("first", 2))
    cluster.run("first")
    assert set(cluster.tell(notice("a", 2), notice("b", 2))) == {"a", "b"}, "the first reason at once"
    changed = cluster.tell(node("node-2", 1), after=10)
    assert not changed, "two wait: each is told every 20 s"
    assert set(cluster.tell(after=11)) == {"a", "b"}
