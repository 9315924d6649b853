"""The examples are ordinary scripts: alone, by torchrun, twice over, the same bits."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TINY_GPT = ["--d-model", "32", "--layers", "2", "--context", "16", "--batch", "4", "--text-size", "50000"]
TRAINING = {
    "char_gpt": ["--steps", "8", "--dropout", "0.1", "--eval-every", "4", *TINY_GPT],
    "digits_cnn": ["--steps", "8", "--width", "4"],
    "mlp_sgd": ["--steps", "8", "--dropout", "0.1"],
}
OURS = {"model", "workflows", "activities", "proxy_runtime", "scheduling", "events", "infra", "cli", "ergo_rank"}


def run(cwd: Path, script: str, arguments: list[str], ranks: int = 0) -> str:
    """Output of a script run by plain python (`ranks` 0) or by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    foreign = ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    command = [sys.executable, *launcher, str(EXAMPLES / f"{script}.py"), *arguments]
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def digests(output: str) -> dict[int, tuple[str, str]]:
    """(losses, weights) by rank."""
    found = re.findall(r"rank (\d+) losses sha256 (\w{64}) weights sha256 (\w{64})", output)
    return {int(rank): (losses, weights) for rank, losses, weights in found}


QUICK = "mlp_sgd"  # the others take longer to import than they compute


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in TRAINING]
)
def test_twice_the_same_bits(tmp_path: Path, script: str) -> None:
    first = digests(run(tmp_path, script, TRAINING[script]))
    # How often losses are fetched, and whether steps are timed, must not matter.
    again = digests(run(tmp_path, script, [*TRAINING[script], "--sync-every", "3", "--warm-up", "0", "--time-steps"]))
    assert set(first) == {0}
    assert first == again


@pytest.mark.slow
@pytest.mark.parametrize("script", TRAINING)
def test_two_ranks_by_torchrun(tmp_path: Path, script: str) -> None:
    first = digests(run(tmp_path, script, TRAINING[script], ranks=2))
    assert set(first) == {0, 1}
    assert first[0][0] != first[1][0], "ranks must see different data"
    if script != "digits_cnn":  # running statistics of batch norm are each rank's own
        assert first[0][1] == first[1][1]
    assert digests(run(tmp_path, script, TRAINING[script], ranks=2)) == first


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--optimizer", "adamw-fused"], ["--optimizer", "sgd"], ["--bf16"]], ids=lambda options: options[-1]
)
def test_options_of_char_gpt_change_the_numbers(tmp_path: Path, options: list[str]) -> None:
    plain = ["--steps", "6", *TINY_GPT]
    assert digests(run(tmp_path, "char_gpt", plain)) != digests(run(tmp_path, "char_gpt", [*plain, *options]))


@pytest.mark.slow
def test_results_are_what_was_printed_and_text_can_be_generated(tmp_path: Path) -> None:
    printed = run(tmp_path, "char_gpt", ["--steps", "8", "--log-every", "4", "--out", "here", *TINY_GPT])
    result = json.loads((tmp_path / "here/losses-rank0.json").read_text())
    assert digests(printed)[0] == (result["losses_sha256"], result["weights_sha256"])
    losses = [float.fromhex(value) for value in result["losses"]]
    assert len(losses) == 8
    assert re.findall(r"^step (\d+) loss (\S+)$", printed, re.MULTILINE) == [
        ("4", f"{losses[3]:.6f}"),
        ("8", f"{losses[7]:.6f}"),
    ]
    weights = torch.load(tmp_path / "here/weights.pt", weights_only=True)
    assert weights["position.weight"].shape == (16, 32)

    arguments = ["--weights", "here/weights.pt", "--characters", "20"]
    text = run(tmp_path, "generate_text", arguments)
    assert re.search(r"rank 0 text sha256 \w{64}", text)
    assert run(tmp_path, "generate_text", arguments) == text
    assert run(tmp_path, "generate_text", ["--characters", "20", *TINY_GPT[:6]]) != text


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_imports_nothing_of_ours(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported
    assert not imported & OURS
