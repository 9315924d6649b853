"""Several clusters under regions and a fleet: nobody is doubled or lost, whatever is away; what moves cost and buy."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import islice, pairwise

import pytest

from model.errors import ModelError
from model.job_spec import Tier
from scheduling.hierarchy.movement import Phase
from scheduling.simulator import levels
from scheduling.simulator.clusters import Clusters, Outage, parse_clusters, parse_outages
from scheduling.simulator.engine import simulate
from scheduling.simulator.levels import World, simulate_clusters
from scheduling.simulator.measures import measure
from scheduling.simulator.synthetic import Kind, generate
from scheduling.simulator.tiers import TierShares, assign_tiers
from scheduling.simulator.workload import Costs, Failures, TraceJob

HOUR = 3600.0
BREAKING = Failures(seed=1, node_mtbf_s=5 * 86_400.0, spot_lease_s=6 * HOUR)
SIX = parse_clusters("2,4,3/3,2,4", 8, 0, ())


def storm(count=150, seed=3, load=0.95, clusters=SIX):
    """Jobs, most of which come to the first cluster of each region."""
    most = min(one.fleet.devices for one in clusters)
    devices = sum(one.fleet.devices for one in clusters)
    made = generate(Kind.ITP, jobs=count, devices=devices, load=load, seed=seed)
    jobs, _ = assign_tiers([job for job in made if job.devices <= most], TierShares(20, 40, 40), seed)
    homes = [(0, 3, number % len(clusters))[number % 3] for number in range(len(jobs))]
    return jobs, homes


def world(jobs, homes, clusters, policy="fleet", costs=None, failures=None, seed=0):
    parts = [[job for job, home in zip(jobs, homes, strict=True) if home == at] for at in range(len(clusters.members))]
    return World(parts, clusters, policy, costs or Costs(), failures or Failures(), seed, None, None)


def everywhere_once(of):
    """Every job is to come, in one book, on its way in the hands of one level, or has ended."""
    ended = {job.id for member in of.members for job in member.run.out.jobs if job.ended_s is not None}
    places = defaultdict(list)
    for member in of.members:
        assert set(member.run.jobs) == set(member.run.book.jobs)
        for name in member.run.jobs:
            places[name].append(member.name)
    for name, where in places.items():
        assert len(where) == 1 and name not in ended and name not in of.departed, f"{name} is doubled: {where}"
    asking = [*of.regions, *([of.fleet] if of.fleet else [])]
    for name in of.departed:
        hands = [level.state.moves[name].phase for level in asking if name in level.state.moves]
        assert {Phase.LEAVING, Phase.ARRIVING} & set(hands), f"{name} is lost"
    came = {job.id for member in of.members for job in member.run.out.jobs}
    assert came == ended | set(places) | set(of.departed)


@pytest.mark.parametrize(
    ("policy", "failures"), [("region", None), ("fleet", None), ("fleet", BREAKING)], ids=["region", "fleet", "failing"]
)
def test_a_job_is_in_one_place_and_none_is_lost_while_levels_come_and_go(policy, failures):
    clusters = Clusters(parse_clusters("2,4,3/3,2,4", 8, 1 if failures else 0, ()), level_mtbf_s=12 * HOUR)
    jobs, homes = storm(180, load=1.1)
    run = world(jobs, homes, clusters, policy, failures=failures)
    out = run.run(everywhere_once)
    assert sorted(job.id for job in out.jobs) == sorted(job.id for job in jobs)
    assert all(job.ended_s is not None for job in out.jobs)
    assert all(record.away_s > 0 for record in out.levels.values())
    assert {move.level for move in out.moves} >= ({"fleet"} if policy == "fleet" else {"region-1", "region-2"})
    assert sum(job.devices * job.asked_s + job.lost_device_s for job in out.jobs) <= out.busy_device_s * (1 + 1e-9)
    for job in out.jobs:
        assert job.submit_s <= job.started_s and job.ended_s - job.started_s >= job.asked_s - 1e-3


def test_one_cluster_is_asked_at_a_time_and_never_its_own(monkeypatch):
    asked = defaultdict(list)
    answer = levels.Member.answer

    def heard(self, order, now):
        if order.kind == "bid":
            assert order.ask.id not in self.run.jobs
            asked[order.level, order.number].append((self.name, order.ask.id, now))
        return answer(self, order, now)

    monkeypatch.setattr(levels.Member, "answer", heard)
    jobs, homes = storm()
    world(jobs, homes, Clusters(SIX)).run()
    assert len(asked) > 10
    assert all(len(members) == 1 for members in asked.values())
    at_once = defaultdict(set)
    for (level, _), ((_, job, now),) in asked.items():
        assert (level, job) not in at_once[now], "two clusters are asked for one job in a round"
        at_once[now].add((level, job))


def test_what_a_lost_level_had_in_its_hands_goes_on_when_it_is_back_and_the_others_meanwhile():
    jobs, homes = storm(load=1.2)
    probe = world(jobs, homes, Clusters(SIX), "region")
    hands = []
    probe.run(lambda of: hands.append((of.now, sorted(of.departed))))
    begin, held = next((at, names) for at, names in hands if names and at > 4 * HOUR)
    outages = tuple(Outage(name, begin + 1.0, begin + 12 * HOUR) for name in ("region-1", "region-2"))
    run = world(jobs, homes, Clusters(SIX, outages), "region")
    ended = []

    def observe(of):
        everywhere_once(of)
        if begin + 60 < of.now < begin + 12 * HOUR:
            assert sorted(of.departed) == held, "a level that is lost moves nobody"
            ended.append(sum(job.ended_s is not None for member in of.members for job in member.run.out.jobs))

    out = run.run(observe)
    assert all(job.ended_s is not None for job in out.jobs)
    assert ended[-1] > ended[0], "clusters work on"
    assert {move.job for move in out.moves if move.came_s > begin + 12 * HOUR} >= set(held)


def test_clusters_without_levels_are_as_each_by_itself():
    jobs, homes = storm()
    out = simulate_clusters(jobs, homes, Clusters(SIX), "ours")
    found = {job.id: (job.started_s, job.ended_s, job.preemptions, job.below_since_submission) for job in out.jobs}
    alone = {}
    for at, cluster in enumerate(SIX):
        own = [job for job, home in zip(jobs, homes, strict=True) if home == at]
        for job in simulate(own, cluster.fleet, "ours").jobs:
            alone[job.id] = (job.started_s, job.ended_s, job.preemptions, job.below_since_submission)
    assert found == alone and not out.moves


def test_a_round_in_which_nobody_has_waited_long_is_left_out_for_nothing(monkeypatch):
    jobs, homes = storm(80)
    lazy = simulate_clusters(jobs, homes, Clusters(SIX), "fleet")
    monkeypatch.setattr(levels, "ripe", lambda *_: True)
    eager = simulate_clusters(jobs, homes, Clusters(SIX), "fleet")
    assert lazy.moves == eager.moves and lazy.moves
    assert [job.ended_s for job in lazy.jobs] == [job.ended_s for job in eager.jobs]


def test_moves_buy_and_cost():
    jobs, homes = storm(load=0.8)

    def figures(policy, costs=None):
        out = simulate_clusters(jobs, homes, Clusters(SIX), policy, costs=costs)
        return measure(out), out

    (alone, _), (helped, out) = figures("ours"), figures("fleet")
    dear, _ = figures("fleet", Costs(between_clusters_s=3000.0, between_regions_s=6000.0))
    assert helped.completion.mean_s < alone.completion.mean_s
    assert helped.from_submission.missed < alone.from_submission.missed
    assert helped.overhead < dear.overhead
    for one in (alone, helped):
        assert [of.cluster for of in one.clusters] == [cluster.name for cluster in SIX]
        assert sum(of.jobs for of in one.clusters) == len(jobs)
    assert sum(of.came for of in helped.clusters) == sum(of.left for of in helped.clusters) == len(out.moves)
    assert sum(level.moves for level in helped.levels) == len(out.moves)
    assert {(move.origin, move.target) for move in out.moves} == {pair[:2] for pair in helped.moves_between_clusters}
    regions = {cluster.name: cluster.region for cluster in SIX}
    for move in out.moves:
        assert (regions[move.origin] != regions[move.target]) == (move.level == "fleet")


def test_a_checkpoint_has_to_come_before_a_job_goes_on():
    """Two jobs on a full cluster: the one that is made narrow moves to the empty one, and its bytes take minutes."""
    clusters = Clusters(parse_clusters("1,1", 8, 0, ()))
    jobs = [
        TraceJob("narrow", 0.0, 10 * HOUR, 8, tier=Tier.BASIC),
        TraceJob("prem", 600.0, 30 * HOUR, 4, tier=Tier.PREMIUM),
    ]
    ends = {}
    for seconds in (0.0, 600.0):
        out = simulate_clusters(jobs, [0, 0], clusters, "region", costs=Costs(between_clusters_s=seconds))
        (move,) = [move for move in out.moves if move.job == "narrow"]
        assert move.ran and move.running and move.level == "region-1"
        ends[seconds] = next(job.ended_s for job in out.jobs if job.id == "narrow")
    assert 500 < ends[600.0] - ends[0.0] <= 600


def test_clusters_and_what_is_lost_are_read():
    two = parse_clusters("16,21/52", 8, 1, ("a", "b", "c"))
    assert [(one.name, one.region, one.fleet.nodes, one.fleet.spot_nodes) for one in two] == [
        ("a", "region-1", 16, 1), ("b", "region-1", 21, 1), ("c", "region-2", 52, 1)
    ]  # fmt: skip
    assert [one.name for one in parse_clusters("1,1", 8, 0, ("log",))] == ["cluster-1", "cluster-2"]
    assert Clusters(two).levels == ("region-1", "region-2", "fleet") and Clusters(two[:2]).levels == ("region-1",)
    assert parse_outages(["fleet:24-48.5"]) == (Outage("fleet", 24 * HOUR, 48.5 * HOUR),)
    for text in ("16", "", "a,b", "16,0", "16,,2", "1,-2", "3/", "9999999,1"):
        with pytest.raises(ModelError, match="two clusters or more"):
            parse_clusters(text, 8, 0, ())
    with pytest.raises(ModelError, match="leased"):
        parse_clusters("4,2", 8, 3, ())
    for text in ("fleet", "fleet:", "fleet:3", "fleet:a-b", "fleet:-1-2"):
        with pytest.raises(ModelError, match="hours"):
            parse_outages([text])
    for outage in (Outage("fleet", 5, 6), Outage("region-1", 6, 5)):
        with pytest.raises(ModelError, match="levels are region-1"):
            Clusters(two[:2], (outage,))


def test_levels_are_lost_when_somebody_says_so_and_by_chance():
    given = (Outage("fleet", 10.0, 20.0), Outage("fleet", 15.0, 30.0), Outage("region-1", 1.0, 2.0))
    assert list(Clusters(SIX, given).lost("fleet", 0)) == [(10.0, 20.0), (20.0, 30.0)]
    assert list(Clusters(SIX).lost("fleet", 0)) == []
    failing = Clusters(SIX, given, level_mtbf_s=100.0, level_away_s=7.0)
    drawn = list(islice(failing.lost("fleet", 0), 300))
    assert all(a < b for a, b in drawn) and all(one[1] <= other[0] for one, other in pairwise(drawn))
    assert drawn == list(islice(failing.lost("fleet", 0), 300)) != list(islice(failing.lost("fleet", 1), 300))
    assert 60 < drawn[-1][1] / 300 < 160


def test_where_jobs_are_submitted():
    clusters = Clusters(parse_clusters("1,3", 8, 0, ()))
    jobs = [TraceJob(f"j{number}", 0.0, 1.0, 1, log=number % 2) for number in range(400)]
    assert clusters.homes(jobs, 2) == [number % 2 for number in range(400)]
    one_tenant = clusters.homes(jobs, 1)
    assert 60 < one_tenant.count(0) < 140
    teams = [replace(job, tenant=f"team-{number % 9}") for number, job in enumerate(jobs)]
    homes = {}
    for job, home in zip(teams, clusters.homes(teams, 1), strict=True):
        assert homes.setdefault(job.tenant, home) == home
    assert clusters.homes([replace(jobs[0], devices=9)], 2) == [1]  # it does not fit its own
