"""Runs one script natively and under ``ergo run``, and compares what it prints."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.third_party.cases import Case

HERE = Path(__file__).parent
_ROOT = HERE.parent.parent
_DEADLINE_S = 900
_NUMBERS = re.compile(
    r"(loss|weights) -?[\da-fxp.+-]+$|(nms|batched_nms|correct) \S.*|\[\[.*|[\w ]+ \([\d, ]*\) [\da-f]{64}$"
)
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TORCH_DISABLE_NATIVE_JIT": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one case.

    Attributes:
        result: ``equal``, ``other numbers`` or ``fails``.
        digest: sha256 of what the script printed under ``ergo run``.
        detail: the first line that differs, or the last of the error.
    """

    result: str
    digest: str
    detail: str


def run(case: Case, python: str) -> Outcome:
    """Runs `case` with the interpreter `python`, twice."""
    script = HERE / "scripts" / f"{case.script}.py"
    native = _run([python, str(HERE / "native.py"), str(script), *case.arguments])
    if native.returncode != 0:
        return Outcome("fails", "", f"without Ergosphere: {_last_line(native.stderr)}")
    with tempfile.TemporaryDirectory() as folder:
        ours = _run(
            [
                sys.executable,
                "-m",
                "cli.main",
                "run",
                "--quiet",
                "--python",
                python,
                "--dir",
                folder,
                str(script),
                *case.arguments,
            ]
        )
    if ours.returncode != 0:
        return Outcome("fails", "", _last_line(ours.stdout + ours.stderr))
    expected, found = numbers(native.stdout), numbers(ours.stdout)
    digest = hashlib.sha256("\n".join(found).encode()).hexdigest()
    if expected == found:
        return Outcome("equal", digest, "")
    first = next((i for i, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), len(found))
    return Outcome("other numbers", digest, f"line {first + 1} of {len(expected)}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **_ENVIRONMENT}
    return subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )


def numbers(output: str) -> list[str]:
    """What a script says of its numbers (`report.py`); `ergo run` has warnings and progress bars in the same place."""
    # A progress bar ends without a new line, so numbers may begin within one.
    found = (_NUMBERS.search(line) for line in output.splitlines())
    return [match[0] for match in found if match]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
