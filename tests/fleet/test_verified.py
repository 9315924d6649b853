"""Nodes that compare what ranks on one device share, and find a difference: an event, and the bits stay."""

from __future__ import annotations

import random
import re

import pytest

from events.types import SharingIncident
from model.job_state import JobPhase
from tests.fleet.sequences import Operated, training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

FLEET_ENV = {"ERGO_SPLICE_VERIFY": "1", "ERGO_SPLICE_ERR": "2"}
"""Every shared result is compared, and the second comparison of each device finds a difference."""


def test_a_mismatch_is_an_incident_and_no_number_is_another_one(fleet, tmp_path):
    """In each epoch in which ranks share a device, on each device: proxies know nothing of those before them."""
    job_of = training(tmp_path, "--clip")
    job = job_of.submit(fleet, tmp_path / "compared", "--checkpoint-every", "0")
    operated = Operated(fleet, job, random.Random(0))
    fleet.until_step(job, 3)

    def mismatches(epoch: int) -> list[SharingIncident]:
        told = [event for event in fleet.events(job) if isinstance(event, SharingIncident) and event.epoch == epoch]
        return [event for event in told if event.data.kind == "mismatch"]

    for width in (1, 2):
        operated.resize(width)
        view = fleet.show(job)
        fleet.until(
            lambda width=width, view=view: sum(one.data.count for one in mismatches(view.epoch)) == width,
            f"{width} devices have told of a mismatch",
        )
        for event in mismatches(view.epoch):
            assert event.data.node in {device.node for device in view.placement}
            assert event.data.unshared and all(name.startswith("aten::") for name in event.data.unshared), event.data
            assert ", ".join(event.data.unshared) in event.data.reason
        assert re.search(r"sharing: mismatch +On node-\d results of ranks that share", fleet.ergo("show", job))
        assert re.search(rf"{job} .* sharing: mismatch +On node-\d results", fleet.ergo("events", "--job", job))
        fleet.until_step(job, fleet.step(job) + 3)
    job_of.require_right(fleet, job, job_of.untouched(tmp_path / "alone"))
    assert fleet.show(job).phase is JobPhase.COMPLETED
    told = [event.data for event in fleet.events(job) if isinstance(event, SharingIncident)]
    assert len([data for data in told if data.kind == "mismatch"]) <= 3, told
