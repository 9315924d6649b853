"""A running job on four devices, two, one and four again: every number of every rank is that of the untouched run."""

from __future__ import annotations

import random

import pytest

from events.types import DecisionMade
from model.job_state import JobPhase
from tests.fleet.harness import LocalFleet, require_right, submit_gpt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RANKS = 4
LAST = 400
"""After this step nothing more is begun: on a slow machine the job would end first."""
LONG = ("--steps", "500", "--d-model", "64", "--layers", "2", "--sync-every", "1", "--log-every", "0")
SUBMIT = ("--tier", "basic", "--ranks", str(RANKS), "--checkpoint-every", "15")


def at_random_steps(fleet: LocalFleet, job: str, draw: random.Random) -> None:
    """Some steps later."""
    fleet.until_step(job, min(fleet.step(job) + draw.randint(1, 15), LAST))


def resize(fleet: LocalFleet, job: str, width: int) -> float:
    """To a width, again where a periodic checkpoint is under way; returns how long no rank ran, in milliseconds."""
    while (done := fleet.run("resize", job, "--devices", str(width), "--wait")).returncode:
        assert "ask again when that is done" in done.stderr, done.stderr
    view = fleet.show(job)
    assert (view.width, view.phase) == (width, JobPhase.RUNNING)
    last = view.transitions[-1]
    assert last.down_ms is not None and len(last.devices) == width
    return last.down_ms


def test_four_two_one_four_at_random_steps(fleet, tmp_path, untouched):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    job = submit_gpt(fleet, tmp_path, "elastic", SUBMIT, LONG)
    fleet.until_step(job, 3)
    down = {}
    for width in (2, 1, 4):
        at_random_steps(fleet, job, draw)
        down[width] = round(resize(fleet, job, width))
    print(f"downtime in ms: {down}; {fleet.show(job).transitions[-1].parts_ms}")
    view = require_right(fleet, job, tmp_path, untouched, RANKS, LONG)
    assert (view.resizes, view.recoveries, view.preemptions) == (3, 0, 0)
    told = [event.data for event in fleet.events(job) if isinstance(event, DecisionMade)]
    assert [data.action for data in told] == ["place", "resize", "resize", "resize"]
    assert [len(data.placement.devices) for data in told] == [4, 2, 1, 4]


def test_a_random_sequence_of_resizes_moves_preemptions_and_checkpoints(fleet, tmp_path, untouched):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    job = submit_gpt(fleet, tmp_path, "anything", SUBMIT, LONG)
    fleet.until_step(job, 3)
    done: list[str] = []
    for _ in range(6):
        view = fleet.until_phase(job, JobPhase.RUNNING, JobPhase.COMPLETED)
        if view.phase.ended or fleet.step(job) >= LAST:
            break
        at_random_steps(fleet, job, draw)
        view = fleet.show(job)
        others = [f"node-{n}" for n in (1, 2) if f"node-{n}" not in {device.node.name for device in view.placement}]
        kinds = ["resize", "resize", "preempt", "checkpoint", *(["migrate"] if others and view.width <= 2 else [])]
        kind = draw.choice(kinds)
        width = draw.choice([one for one in (1, 2, 4) if one != view.width])
        match kind:
            case "resize":
                resize(fleet, job, width)
            case "migrate":
                fleet.run("migrate", job, "--to", others[0], "--wait")
            case "preempt":
                fleet.ergo("preempt", job, "--wait")
                fleet.ergo("resume", job, "--wait")
            case _:
                fleet.ergo("checkpoint", job, "--wait")
        done.append(f"{kind} {width}" if kind == "resize" else kind)
    print(", ".join(done))
    view = require_right(fleet, job, tmp_path, untouched, RANKS, LONG)
    assert view.recoveries == 0
