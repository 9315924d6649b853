"""A running job on other numbers of devices, at random, with all else that may happen to it: its bits stay."""

from __future__ import annotations

import random
import re

import pytest

from events.types import DecisionMade, SharingIncident
from model.job_state import JobPhase
from tests.fleet.harness import require_right, submit_gpt
from tests.fleet.sequences import RANKS, Digests, Operated, drawn, training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

LONG = ("--steps", "1500", "--d-model", "64", "--layers", "2", "--sync-every", "1", "--log-every", "0")
SUBMIT = ("--tier", "basic", "--ranks", str(RANKS), "--checkpoint-every", "15")


def seeded() -> random.Random:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


def test_four_two_one_four_at_random_steps(fleet, tmp_path, untouched):
    job = submit_gpt(fleet, tmp_path, "elastic", SUBMIT, LONG)
    operated = Operated(fleet, job, seeded())
    fleet.until_step(job, 3)
    for width in (2, 1, 4):
        fleet.until_step(job, fleet.step(job) + operated.draw.randint(1, 15))
        operated.resize(width)
    print(f"downtime in ms: {operated.down_ms}; {fleet.show(job).transitions[-1].parts_ms}")
    view = require_right(fleet, job, tmp_path, untouched, RANKS, LONG)
    assert (view.resizes, view.recoveries, view.preemptions) == (3, 0, 0)
    told = [event.data for event in fleet.events(job) if isinstance(event, DecisionMade)]
    assert [data.action for data in told] == ["place", "resize", "resize", "resize"]
    assert [len(data.placement.devices) for data in told] == [4, 2, 1, 4]


def test_a_random_sequence_of_everything(fleet, tmp_path):
    """Losses, parameters, buffers, optimizer state, averages and the state of both generators, of each rank."""
    job_of = training(tmp_path, "--clip", "--gbv", "--ema")
    job = job_of.submit(fleet, tmp_path / "anything", "--checkpoint-every", "5")
    operated = Operated(fleet, job, seeded())
    fleet.until_step(job, 3)
    kinds = drawn(operated.draw)
    operated.go_through(kinds)
    print(", ".join(operated.done))
    view = job_of.require_right(fleet, job, job_of.untouched(tmp_path / "alone"))
    assert view.recoveries == 1 and view.preemptions == 1 and view.resizes >= 2


@pytest.mark.parametrize("mode", ["fsdp", "hsdp", "tp", "pp", "tp_dp", "tp_fsdp"])
def test_shards_and_stages_on_fewer_devices_and_more(fleet, tmp_path, mode):
    hurry = tmp_path / "hurry"
    # Replicas are known by what they have in common: that has to be some chunks.
    job_of = Digests("parallel.py", (mode, "1500", str(hurry), "--width", "4096"), hurry)
    job = job_of.submit(fleet, tmp_path / mode, "--checkpoint-every", "0")
    operated = Operated(fleet, job, seeded())
    fleet.until_step(job, 3)
    for width in operated.draw.choice(((2, 1, 2), (1, 2, 4, 2))):
        fleet.until_step(job, fleet.step(job) + operated.draw.randint(1, 8))
        operated.resize(width)
        view = fleet.show(job)
        each = RANKS // width
        assert sorted(map(view.device_of_rank.count, range(width))) == [each] * width
        if mode in ("hsdp", "tp_dp") and width == 2:
            assert view.device_of_rank == (0, 1, 0, 1), "replicas of one shard share a device"
    operated.resize(4)
    view = job_of.require_right(fleet, job, job_of.untouched(tmp_path / "alone"))
    assert view.resizes >= 3 and view.recoveries == 0


def test_a_host_that_waits_for_another_host_is_an_incident(fleet, tmp_path):
    """The ranks' hosts wait for one another by files: nobody sees that, and time limits end what else would hang."""
    job_of = training(tmp_path, "--host-wait", ranks=2)
    job = job_of.submit(fleet, tmp_path / "waits", "--checkpoint-every", "0")
    fleet.until_step(job, 3)
    Operated(fleet, job, random.Random(0)).resize(1)

    def incidents() -> list[SharingIncident]:
        return [event for event in fleet.events(job) if isinstance(event, SharingIncident)]

    fleet.until(incidents, "an event tells of a time limit")
    data = incidents()[0].data
    assert data.kind == "time-limit" and data.count >= 1
    (node,) = {device.node for device in fleet.show(job).placement}
    assert data.node == node
    assert re.search(r"sharing: time-limit +On node-\d a rank waited for others", fleet.ergo("show", job))
    assert re.search(rf"{job} .* sharing: time-limit +On node-\d", fleet.ergo("events", "--job", job))
    job_of.require_right(fleet, job, job_of.untouched(tmp_path / "alone"))
    assert fleet.show(job).phase is JobPhase.COMPLETED
