"""The promise: whatever is done to a job, every loss and the final weights are those of the untouched run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.harness import EXAMPLES, JOBS, CutPlan, Outcome, Script, require_equal, run

GPT = EXAMPLES / "char_gpt.py"
SMALL = ("--d-model", "64", "--layers", "2", "--context", "32", "--batch", "4", "--log-every", "20")

QUICK = [
    Script(GPT, (*SMALL, "--steps", "150", "--dropout", "0.1"), ranks=2),
    Script(EXAMPLES / "digits_cnn.py", ("--steps", "80"), ranks=1),
    Script(EXAMPLES / "mlp_sgd.py", ("--steps", "150"), ranks=4, devices=2),
    Script(JOBS / "evaluation.py"),
    Script(JOBS / "copies.py", ("--rounds", "40")),
    Script(JOBS / "async_error.py", ("--rounds", "20", "--pause", "0.06")),
    Script(JOBS / "ddp_skew.py", ranks=2),
]
SLOW = [
    Script(GPT, (*SMALL, "--steps", "150", "--dropout", "0.1"), ranks=1),
    Script(GPT, (*SMALL, "--steps", "150", "--dropout", "0.1"), ranks=4),
    Script(GPT, (*SMALL, "--steps", "150", "--dropout", "0.1", "--optimizer", "adamw-fused"), ranks=2),
    Script(GPT, (*SMALL, "--steps", "150", "--dropout", "0.1", "--bf16"), ranks=2),
    Script(GPT, (*SMALL, "--steps", "100", "--eval-every", "10"), ranks=2),
    Script(EXAMPLES / "digits_cnn.py", ("--steps", "120"), ranks=2),
    Script(EXAMPLES / "digits_cnn.py", ("--steps", "120"), ranks=4),
    Script(EXAMPLES / "mlp_sgd.py", ("--steps", "3000", "--log-every", "500"), ranks=1),
    Script(EXAMPLES / "mlp_sgd.py", ("--steps", "1500", "--log-every", "500"), ranks=2),
    Script(EXAMPLES / "generate_text.py"),
    Script(JOBS / "loader_fork.py"),
    Script(JOBS / "copies.py", ("--child",)),
    Script(JOBS / "threads.py", ("--rounds", "1000")),
    Script(JOBS / "volume.py", ("--rounds", "1500"), ranks=2),
    Script(JOBS / "subgroups.py", ranks=3),
    Script(JOBS / "ring.py", ("--rounds", "300"), ranks=3),
    Script(JOBS / "fsdp2.py", ranks=2),
    Script(JOBS / "subprocesses.py"),
]


def seed_of(script: Script) -> int:
    return random.SystemRandom().randrange(1 << 30)


@pytest.mark.parametrize(
    "script", [*QUICK, *(pytest.param(script, marks=pytest.mark.slow) for script in SLOW)], ids=str
)
def test_cut_at_random_moments(script: Script, untouched: Callable[[Script], Outcome], tmp_path: Path) -> None:
    reference = untouched(script)
    cut = run(script, tmp_path / "cut", CutPlan(seed_of(script)))
    require_equal(reference, cut, cuts=1)


@pytest.mark.slow
@pytest.mark.parametrize("script", [SLOW[1], Script(JOBS / "subgroups.py", ("--epochs", "40"), ranks=4)], ids=str)
def test_cut_and_resized(script: Script, untouched: Callable[[Script], Outcome], tmp_path: Path) -> None:
    reference = untouched(script)
    cut = run(script, tmp_path / "cut", CutPlan(seed_of(script), count=4, live_share=0.0, resize=True))
    require_equal(reference, cut, cuts=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_cuts_in_a_row(untouched: Callable[[Script], Outcome], tmp_path: Path) -> None:
    script = Script(GPT, (*SMALL, "--steps", "6000", "--dropout", "0.1", "--log-every", "500"), ranks=2)
    reference = untouched(script)
    plan = CutPlan(seed_of(script), count=100, longest_pause_s=0.2, live_share=0.1)
    require_equal(reference, run(script, tmp_path / "cut", plan), cuts=100)


@pytest.mark.parametrize("transport", ["tcp"])
def test_proxies_connected_by_tcp(transport: str, untouched: Callable[[Script], Outcome], tmp_path: Path) -> None:
    reference = untouched(QUICK[0])
    cut = run(QUICK[0], tmp_path / "cut", CutPlan(seed_of(QUICK[0]), count=1, live_share=0.0), transport=transport)
    require_equal(reference, cut, cuts=1)
