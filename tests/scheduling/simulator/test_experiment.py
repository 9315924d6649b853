"""What an experiment tells of itself, and what it makes of a workload."""

from __future__ import annotations

import json

import orjson
import pytest

from model.errors import ModelError
from model.job_spec import Tier
from scheduling.simulator.experiment import Experiment, Workload
from scheduling.simulator.synthetic import Kind
from scheduling.simulator.tiers import TierShares
from scheduling.simulator.traces import Trace
from scheduling.simulator.workload import Costs, Failures, FleetShape, TraceJob
from tests.scheduling.simulator.outcomes import small

SHARES = TierShares.parse("20,40,40")


def workload(*jobs, **fields):
    trace = Trace(list(jobs), files=["log.csv"], lines=len(jobs), **fields)
    return Workload.of_trace(trace, SHARES, seed=7)


def trace_job(name, submit, devices=1, duration=100.0, tier=None):
    return TraceJob(name, submit, duration, devices, tier=tier)


def experiment(work, nodes=2, devices=4, failures=None):
    return Experiment(work, FleetShape(nodes, devices), Costs(), failures or Failures(), seed=7)


def test_where_tiers_come_from_is_told():
    made_up = workload(trace_job("a", 0), trace_job("b", 1)).tiers_sentence()
    assert made_up.startswith("Tiers are synthetic") and "seed 7" in made_up and "20 % premium" in made_up
    assert workload(trace_job("a", 0, tier=Tier.BASIC)).tiers_sentence() == "Tiers are those of the trace."
    some = workload(trace_job("a", 0, tier=Tier.BASIC), trace_job("b", 0)).tiers_sentence()
    assert some.startswith("Tiers of 1 of 2 jobs are synthetic")


def test_load():
    work = workload(trace_job("a", 0, 3), trace_job("b", 100, 5))
    assert work.load(8) == pytest.approx(1.0)
    twice = work.at_load(8, 2.0)
    assert [job.submit_s for job in twice.jobs] == [0, 50] and twice.load(8) == pytest.approx(2.0)
    assert [job.tier for job in twice.jobs] == [job.tier for job in work.jobs]
    assert workload(trace_job("a", 0)).load(8) is None


@pytest.mark.parametrize("load", [0, -1, float("nan"), 101])
def test_loads_that_are_none(load):
    with pytest.raises(ModelError, match="load") as caught:
        workload(trace_job("a", 0), trace_job("b", 1)).at_load(8, load)
    assert caught.value.code == "simulate.load"


def test_all_jobs_at_one_moment_have_no_load():
    with pytest.raises(ModelError, match="one moment"):
        workload(trace_job("a", 0), trace_job("b", 0)).at_load(8, 0.5)


def test_the_engine_gets_what_fits_and_the_settings_say_what_did_not():
    seen = []

    def engine(jobs, fleet, policy, **options):
        seen.append(([job.id for job in jobs], fleet.devices, policy, options["seed"], options["costs"]))
        assert all(job.tier for job in jobs)
        return small(policy)

    work = workload(trace_job("a", 0, 8), trace_job("b", 1, 9), damaged=3)
    tried = experiment(work, failures=Failures(seed=7, node_mtbf_s=86.4e6))
    report = tried.report([tried.run("fifo", engine)])
    assert seen == [(["a"], 8, "fifo", 7, Costs())]
    told = dict(report.settings.told())
    assert told["jobs"] == "2 from log.csv" and told["too large"].startswith("1 of the jobs")
    assert told["left out"] == "3 of 2 lines, which were damaged"
    assert "every 1000 days" in told["failures"] and told["seed"] == "7"
    assert {"python", "ergosphere", "scheduling"} <= report.settings.versions.keys()


def test_made_up_jobs_say_so():
    work = Workload.made_up(Kind.LLM, 50, 256, 0.9, SHARES, seed=1)
    assert work.synthetic and work.source == ("synthetic llm",) and work.tiers_made_up == 50


def test_the_json_document_keeps_its_fields():
    tried = experiment(workload(trace_job("a", 0)))
    found = json.loads(orjson.dumps(tried.report([tried.run("ours", lambda *_, **__: small())])))
    assert found["version"] == 1
    assert set(found["settings"]) == {
        "source", "synthetic", "jobs", "lines", "damaged", "cut_off", "too_large", "tiers", "tiers_made_up", "load",
        "span_s", "seed", "fleet", "costs", "failures", "versions", "clusters",
    }  # fmt: skip
    (policy,) = found["policies"]
    assert set(policy) == {
        "policy", "jobs", "ended", "never_started", "completion", "from_admission", "from_submission", "tiers", "sizes",
        "allocation", "allocation_while_asked", "allocation_over_time", "preemptions_per_job", "resizes_per_job",
        "moves_per_job", "restarts_per_job", "preempted", "lost_device_hours", "overhead", "decisions",
        "decision_all_us", "decision_mean_us", "decision_p99_us", "decision_quantiles_us", "span_s", "cpu_s",
        "policy_cpu_s", "waiting_for", "clusters", "levels", "moves_between_clusters",
    }  # fmt: skip
    assert policy["from_submission"] == {"hours": 11, "below": 2, "excused": 0, "short": 0, "missed": 2 / 11}
    assert policy["completion"].keys() == {"count", "mean_s", "median_s", "p99_s"}
    assert policy["tiers"][0].keys() == {
        "tier", "jobs", "ended", "completion", "admission", "never_admitted", "from_admission", "from_submission",
        "gpu_fraction", "gpu_fraction_since_submission", "fractions",
    }  # fmt: skip
    assert policy["sizes"][0].keys() == {"devices", "jobs", "never_started", "waiting"}
