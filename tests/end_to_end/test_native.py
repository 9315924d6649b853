"""A proxied run has the bits of a native one: of plain torchrun up to two ranks, above that of our tree on gloo.

Only where the script draws no random numbers on the device: like CUDA, the device has a generator of its own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.harness import EXAMPLES, ROOT, Outcome, Script, evidence, tails
from tests.end_to_end.test_bits import QUICK, SMALL

GPT = EXAMPLES / "char_gpt.py"
SCRIPTS = [
    Script(GPT, (*SMALL, "--steps", "60"), ranks=2),
    *(script for script in QUICK if script.path.parent == EXAMPLES and script.path != GPT),  # whose runs there are
]
SLOW = [
    Script(EXAMPLES / "mlp_sgd.py", ("--steps", "100"), ranks=4),
    Script(GPT, (*SMALL, "--steps", "60"), ranks=1),
    Script(GPT, (*SMALL, "--steps", "60", "--optimizer", "adamw-fused"), ranks=2),
    Script(GPT, (*SMALL, "--steps", "60", "--bf16"), ranks=1),
    Script(GPT, (*SMALL, "--steps", "60", "--bf16"), ranks=2),
    Script(GPT, (*SMALL, "--steps", "60"), ranks=4),
    Script(EXAMPLES / "digits_cnn.py", ("--steps", "60"), ranks=2),
    Script(EXAMPLES / "digits_cnn.py", ("--steps", "60"), ranks=4),
    Script(EXAMPLES / "mlp_sgd.py", ("--steps", "100"), ranks=1),
    Script(EXAMPLES / "mlp_sgd.py", ("--steps", "100"), ranks=2),
]


def run_natively(script: Script, directory: Path) -> dict[str, str]:
    """Under torchrun on the CPU, one thread a rank; digests as of a proxied run."""
    directory.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    wrapped = [str(ROOT / "tests" / "support" / "with_tree.py")] if script.ranks > 2 else []
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(script.ranks), "--master-port",
         str(port), *wrapped, str(script.path), *script.arguments],
        cwd=directory, env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return evidence(script, directory, [])


@pytest.mark.parametrize(
    "script", [*SCRIPTS, *(pytest.param(script, marks=pytest.mark.slow) for script in SLOW)], ids=str
)
def test_the_bits_of_a_native_run(script: Script, untouched: Callable[[Script], Outcome], tmp_path: Path) -> None:
    native = run_natively(script, tmp_path / "native")
    proxied = untouched(script)
    assert proxied.result.code == 0, tails(proxied)
    mine = {name: value for name, value in proxied.evidence.items() if name in native}
    assert len(native) >= 3 * script.ranks
    assert mine == native
