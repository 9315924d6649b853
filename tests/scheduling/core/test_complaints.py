"""What users of today's schedulers complain of (facts/scheduling.md §5), each as a scenario that ends well here.

Named after the threads: project, number, and what happens instead. `World.plan` checks all laws in every round besides.
"""

from __future__ import annotations

from model.job_spec import Tier
from scheduling.core.model import Job, State
from scheduling.core.reasons import standing
from scheduling.simulator.engine import simulate
from scheduling.simulator.workload import FleetShape, TraceJob
from tests.scheduling.core.world import World


def job(world: World, name: str) -> Job:
    return world.book.jobs[name]


def kinds(world: World, name: str) -> list[str]:
    """What a job was told, in order."""
    return [action.kind for _, action in world.log if action.job.id == name]


def runs(world: World, *names: str) -> bool:
    return all(job(world, name).state is State.RUNNING for name in names)


def full_of(world: World, ranks: int, count: int, tier: str = "basic", seconds: float = 200.0, **more) -> list[str]:
    """So many jobs that run, for some time already."""
    names = [f"{tier}-{index}" for index in range(count)]
    for name in names:
        world.submit(name, ranks, tier, **more)
    world.settle()
    world.run(seconds)
    assert runs(world, *names)
    return names


def test_kueue_13662_freed_devices_are_held_until_the_gang_is_whole():
    """Victims stop at different times; what the first of them frees goes to nobody else, and nobody is taken twice."""
    world = World(2)
    full_of(world, 8, 2, rigid=True)
    world.submit("gang", 16, "premium", rigid=True)
    world.plan()
    world.submit("eager", 4)
    world.now += 20
    world.acknowledge("basic-0")
    for _ in range(5):
        world.now += 100
        world.plan()
    assert job(world, "gang").missing == 8 and not job(world, "eager").width
    assert kinds(world, "basic-0") == ["place", "preempt"]
    world.acknowledge("basic-1")
    assert [action.job.id for action in world.plan()] == ["gang"]
    assert kinds(world, "basic-1") == ["place", "preempt"]


def test_kueue_2821_nobody_takes_turns_at_another_s_expense():
    """Two jobs of one tier that both want all: the order of admission is the order of who gives way."""
    world = World(1)
    for name in ("a", "b"):
        world.submit(name, 8, "premium", rigid=True)
    world.run(8 * 3600.0, 60.0)
    assert kinds(world, "a") == ["place"] and kinds(world, "b") == []
    for name in ("c", "d", "e"):
        world.submit(name, 8, "basic", rigid=True)
    world.finish("a")
    world.finish("b")
    world.run(24 * 3600.0, 60.0)
    # Among equals turns are taken, but a turn is half an hour at least.
    assert len(world.log) < 2 * 24 * 3600 / world.book.settings.quantum_s + 10


def test_kueue_6947_nobody_is_evicted_for_a_job_that_cannot_be_placed():
    world = World(2)
    names = full_of(world, 4, 4, rigid=True)
    world.submit("huge", 24, "premium", rigid=True)
    world.submit("tree", 16, "premium", unit=16)
    world.run(3600.0)
    assert all(kinds(world, name) == ["place"] for name in names)
    assert "never fits" in standing(job(world, "huge"), world.now)


def test_kueue_2596_one_slow_preemption_blocks_nobody_else():
    """Of two gangs of the same shape the first one's victim never stops; the second one does not wait for that."""
    world = World(2)
    full_of(world, 8, 2, rigid=True)
    for name in ("first", "second"):
        world.submit(name, 8, "premium", rigid=True)
    world.plan()
    slow, quick = (next(iter(job(world, name).claim)).jobs for name in ("first", "second"))
    assert slow.keys().isdisjoint(quick.keys())
    world.acknowledge(next(iter(quick)).id)
    world.plan()
    world.acknowledge("second")
    assert runs(world, "second") and job(world, "first").claim


def test_kueue_4809_idle_quota_is_lent_though_its_owner_waits():
    """A job that waits for more than there is does not keep its tenant's idle devices from others."""
    world = World(2)
    world.book.set_quota("owner", 16)
    world.submit("big", 24, "standard", tenant="owner", rigid=True)
    world.submit("borrower", 16, "basic", tenant="other")
    world.settle()
    assert job(world, "borrower").width == 16
    world.run(200)
    world.submit("own", 8, "standard", tenant="owner")
    world.settle()
    assert job(world, "own").width == 8 and job(world, "own").admitted is not None


def test_kueue_8309_one_accelerator_type_does_not_block_another_nor_small_jobs_a_gang():
    world = World()
    for pool in ("a100", "h100"):
        world.node(f"{pool}-node", pool=pool)
    world.submit("old", 8, "standard", pools=("a100",), rigid=True)
    world.settle()
    world.submit("waits", 8, "standard", pools=("a100",), rigid=True)
    world.submit("other", 8, "standard", pools=("h100",), rigid=True)
    world.settle()
    assert runs(world, "other") and not job(world, "waits").width
    # A stream of small short jobs, each of which frees one device only, does not starve a gang of the basic tier.
    world = World(2)
    for number in range(16):
        world.submit(f"small-{number}", 1)
    world.settle()
    world.submit("gang", 16, rigid=True)
    began, number = world.now, 16
    while not runs(world, "gang"):
        assert world.now - began < 24 * 3600
        world.run(120.0, 120.0)
        small = [one for one in world.book.jobs.values() if one.id.startswith("small") and one.state is State.RUNNING]
        for oldest in sorted(small, key=lambda one: (one.changed, one.id))[:2]:
            world.finish(oldest.id)
        for _ in range(2):
            world.submit(f"small-{number}", 1)
            number += 1
    assert world.now - began > 12 * 3600 and number > 400


def test_kueue_2270_jobs_that_wait_for_something_else_hide_nobody():
    world = World(1)
    full_of(world, 6, 1, "premium", rigid=True)
    for name in range(3):
        world.submit(f"four-{name}", 4, "standard", rigid=True)
    for name in range(2):
        world.submit(f"one-{name}", 1, "standard")
    world.settle()
    assert runs(world, "one-0", "one-1")


def test_kueue_4329_admission_decides_a_place_and_not_a_count():
    """Eight devices are free, four on each of two nodes: a job that needs eight on one is not promised anything yet."""
    world = World(2)
    names = full_of(world, 4, 2, "premium", rigid=True)
    world.submit("x", 4, "premium", rigid=True)
    world.submit("y", 4, "premium", rigid=True)
    world.settle()
    nodes = {name: next(iter(job(world, name).given)).name for name in (*names, "x", "y")}
    for place in ("node-0", "node-1"):
        world.finish(next(name for name, node in nodes.items() if node == place))
    world.submit("tree", 8, "premium", unit=8)
    world.plan()
    assert world.book.pools["h100"].free == 8
    assert job(world, "tree").admitted is None and not job(world, "tree").claim
    assert "together" in standing(job(world, "tree"), world.now)


def test_kueue_5243_victims_are_on_the_nodes_that_are_needed():
    """A job of eight devices takes one node from one tenant of it, not one device from each of four nodes."""
    world = World(4)
    full_of(world, 4, 8, rigid=True)
    world.submit("eight", 8, "premium", unit=8)
    told = world.plan()
    assert {action.kind for action in told} == {"preempt"} and len(told) == 2
    assert len({action.job.waits_since for action in told}) == 1 and len(job(world, "eight").claim) == 1
    world.settle()
    assert len(job(world, "eight").given) == 1


def test_kueue_3756_the_tightest_node_is_taken():
    world = World()
    for name, size in (("a", 8), ("b", 4), ("c", 2)):
        world.node(name, size)
    for name, ranks, where in (("two", 2, "c"), ("three", 3, "b"), ("five", 5, "a"), ("one", 1, "b")):
        world.submit(name, ranks, rigid=True)
        world.settle()
        assert [node.name for node in job(world, name).given] == [where]


def test_kueue_10406_racks_are_packed():
    """One-device jobs fill one rack before the next, and a gang takes the rack that it leaves least of."""
    world = World(8, racks=4)
    for name in range(12):
        world.submit(f"one-{name}", 1)
    world.settle()
    racks = {node.rack.name for name in range(12) for node in job(world, f"one-{name}").given}
    assert racks == {"rack-0"}
    world.submit("gang", 16, rigid=True)
    world.settle()
    assert {node.rack.name for node in job(world, "gang").given} == {"rack-0"}


def test_kueue_15399_a_resize_that_is_cut_short_strands_nobody():
    """In the middle of a resize the job is preempted by a lost node: it goes on from any step."""
    world = World(2)
    full_of(world, 16, 1)
    world.submit("prem", 4, "premium")
    world.plan()
    assert job(world, "basic-0").state is State.CHANGING
    world.lose(next(node.name for node in job(world, "basic-0").given if node not in job(world, "prem").claim))
    world.run(1200.0)
    assert runs(world, "basic-0", "prem")


def test_kueue_15661_devices_are_free_only_when_the_job_says_that_it_has_stopped():
    world = World(1)
    full_of(world, 8, 1, rigid=True)
    world.submit("prem", 8, "premium", rigid=True)
    world.plan()
    for _ in range(10):
        world.now += 30
        assert world.plan() == []
        assert job(world, "basic-0").taken == 8 and not job(world, "prem").given
    world.acknowledge("basic-0")
    assert [action.kind for action in world.plan()] == ["place"]


def test_kueue_6969_growing_takes_from_others_where_starting_would():
    """A premium job that was left narrow by a failure grows at the expense of the basic tier, as if it started."""
    world = World(2)
    full_of(world, 16, 1, "premium")
    world.lose("node-1")
    world.run(60.0)
    assert job(world, "premium-0").width == 8
    world.node("node-1")
    world.submit("basic", 8, rigid=True)
    world.run(3600.0)
    assert job(world, "premium-0").width == 16
    assert not job(world, "premium-0").below


def test_volcano_4535_a_gang_is_never_immune():
    """A rigid gang stops as a whole; one that can shrink, shrinks."""
    world = World(2)
    full_of(world, 16, 1, rigid=True)
    world.submit("prem", 4, "premium")
    world.settle()
    assert kinds(world, "basic-0")[:2] == ["place", "preempt"] and runs(world, "prem")
    world = World(2)
    full_of(world, 16, 1)
    world.submit("prem", 4, "premium")
    world.settle()
    assert kinds(world, "basic-0") == ["place", "resize"] and job(world, "basic-0").width == 8


def test_volcano_5805_a_gang_heals_after_a_node_is_repaired():
    world = World(2)
    full_of(world, 16, 1, rigid=True)
    world.lose("node-0")
    world.run(600.0)
    assert not job(world, "basic-0").width
    world.node("node-0")
    world.run(60.0)
    assert runs(world, "basic-0")


def test_volcano_5881_only_nodes_of_the_type_that_is_asked_for_are_looked_at():
    world = World()
    world.node("l40s-0", pool="l40s")
    world.node("h20-0", pool="h20")
    full_of(world, 8, 1, rigid=True, pools=("l40s",))
    world.submit("prem", 8, "premium", rigid=True, pools=("h20",))
    world.now += 1
    world.submit("more", 8, "premium", rigid=True, pools=("h20",))
    world.run(300.0)
    assert kinds(world, "basic-0") == ["place"] and runs(world, "prem")
    assert "of h20" in standing(job(world, "more"), world.now)


def test_kai_1934_reclaim_reaches_the_quota_and_the_fair_share():
    """Both targets: what is promised to a tenant comes to it at once; of the rest it gets its share in time."""
    world = World(2)
    world.book.set_quota("late", 8)
    for name in range(4):
        world.submit(f"early-{name}", 4, tenant="early")
    world.settle()
    world.run(3 * 3600.0, 120.0)
    world.submit("quota", 8, "standard", tenant="late")
    world.settle()
    assert job(world, "quota").width == 8 and job(world, "quota").admitted is not None
    for name in range(4):
        world.submit(f"late-{name}", 4, tenant="late")
    world.run(12 * 3600.0, 120.0)
    served = {tenant: sum(job(world, f"{tenant}-{name}").served for name in range(4)) for tenant in ("early", "late")}
    assert served["late"] > 0.4 * (served["early"] - 3 * 3600 * 16)


def test_kueue_9734_who_came_first_does_not_keep_all_that_is_spare():
    """At six in the morning one tenant takes all; at nine another one asks, and has half of it by noon."""
    world = World(2)
    for name in range(8):
        world.submit(f"six-{name}", 4, tenant="early")
    world.run(3 * 3600.0, 120.0)
    for name in range(8):
        world.submit(f"nine-{name}", 4, tenant="late")
    world.run(3 * 3600.0, 120.0)
    used = sum(one.served + one.rate * (world.now - one.at) for one in world.book.jobs.values() if one.id[0] == "n")
    assert used > 0.4 * 3 * 3600 * 16


def test_skypilot_7117_a_lost_worker_is_noticed_and_the_gang_fails_as_one():
    world = World(3)
    full_of(world, 16, 1, rigid=True)
    lost = sorted(node.name for node in job(world, "basic-0").given)[0]
    world.lose(lost)
    assert job(world, "basic-0").state is State.STOPPING and not job(world, "basic-0").rate
    world.run(200.0)
    assert runs(world, "basic-0") and job(world, "basic-0").width == 16


def test_ray_63968_a_warning_is_used_to_move_in_time():
    """A leased node says when it goes: its jobs are elsewhere by then, with nothing lost."""
    world = World(1)
    world.node("spot", until=world.now + 3600.0)
    full_of(world, 8, 2, rigid=True)
    moved = next(job for job in world.book.jobs.values() if any(node.name == "spot" for node in job.given))
    world.node("node-9")
    world.run(3600.0 - 200.0 - 5.0, 5.0)
    assert not world.book.nodes["spot"].jobs
    assert kinds(world, moved.id) == ["place", "move"] and runs(world, moved.id)


def test_mozilla_315_what_preemption_cost_a_job_is_published():
    """Of every job is known what share of the time it was delivered, and how often it was taken from it."""
    trace = [TraceJob(f"j{index}", 600.0 * index, 7200.0, 8, "t", Tier.BASIC) for index in range(6)]
    trace += [TraceJob(f"p{index}", 3000.0 * index + 100.0, 1800.0, 8, "t", Tier.PREMIUM) for index in range(4)]
    outcome = simulate(sorted(trace, key=lambda one: one.submit_s), FleetShape(2, 8), "ours")
    assert sum(one.preemptions + one.resizes for one in outcome.jobs) > 0
    for one in outcome.jobs:
        assert one.completion_s is not None and one.completion_s >= one.asked_s
        if one.tier is Tier.PREMIUM:
            assert one.hours_since_submission > 0 and one.below == 0
    # The worst stretch is a figure of the run, and bounded where every job is of one size.
    assert max(one.completion_s / one.asked_s for one in outcome.jobs if one.completion_s) < 4
