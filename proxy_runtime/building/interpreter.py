"""What a build must know of the Python interpreter that a job runs with."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from proxy_runtime.building.errors import BuildError

PYTHON_VERSIONS = ((3, 11), (3, 12))
TORCH_OLDEST, TORCH_NEWEST = (2, 11), (2, 15)
_TIMEOUT_S = 60

# Runs in the other interpreter, without importing torch (a second and 300 MB): it has no code of ours. `-I` is not
# used: the user's PYTHONPATH decides which torch the job finds. Our own rank directory must not be on it.
_QUERY = """
import importlib.util, json, sys, sysconfig
spec = importlib.util.find_spec("torch")
torch = spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else None
version = {}
if torch:
    try:
        with open(torch + "/version.py") as file:
            exec(file.read(), version)
    except OSError:
        pass
print(json.dumps({
    "executable": sys.executable, "version": sys.version_info[:3], "abi": sysconfig.get_config_var("SOABI") or "",
    "implementation": sys.implementation.name, "include": sysconfig.get_path("include"), "path": sys.path,
    "torch": torch, "torch_version": str(version.get("__version__", "")), "cuda": version.get("cuda") or "",
}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter that can run ranks.

    Attributes:
        abi: its extension suffix without the dots, e.g. ``cpython-311-x86_64-linux-gnu``.
        include: folder of ``Python.h``.
        path: the existing folders of its ``sys.path``.
        torch: folder of the torch package.
        torch_version: e.g. ``2.15.0+cu132``.
        cuda: CUDA version of the wheel, e.g. ``13.2``.
    """

    executable: Path
    version: tuple[int, int, int]
    abi: str
    include: Path
    path: tuple[Path, ...]
    torch: Path
    torch_version: str
    cuda: str


def query(python: str) -> Interpreter:
    """Asks the interpreter `python` (a path or a name on PATH).

    Raises:
        BuildError: it cannot be run, or its version, its torch or the lack of one rules it out.
    """
    executable = shutil.which(python)
    if executable is None:
        raise BuildError(
            f"There is no executable Python interpreter at {python}.",
            code="build.python-missing",
            remedy="Name one with --python.",
        )
    executable = os.path.abspath(executable)  # it runs elsewhere, and what it answers is what it was called as
    try:
        done = subprocess.run(
            [executable, "-c", _QUERY], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True, cwd="/"
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        raise BuildError(
            f"{executable} could not be asked for its version and its torch: {_why(error)}.",
            code="build.python-missing",
            remedy="Check that it is a working Python interpreter.",
        ) from None
    return _checked(answer)


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or "").strip().splitlines()
        return lines[-1] if lines else f"exit code {error.returncode}"
    return str(error) or type(error).__name__


def _checked(answer: dict) -> Interpreter:
    where = answer["executable"]
    version = tuple(answer["version"])
    if answer["implementation"] != "cpython" or version[:2] not in PYTHON_VERSIONS:
        raise BuildError(
            f"{where} is {answer['implementation']} {'.'.join(map(str, version))}; ranks need CPython "
            f"{' or '.join(f'{a}.{b}' for a, b in PYTHON_VERSIONS)}.",
            code="build.python-version",
            remedy="Make the job's virtual environment with one of these.",
        )
    if not answer["torch"] or not answer["torch_version"]:
        raise BuildError(
            f"{where} has no torch.", code="build.torch-missing", remedy=f"Run {where} -m pip install torch."
        )
    found = answer["torch_version"]
    numbers = re.match(r"(\d+)\.(\d+)", found)
    release = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not TORCH_OLDEST <= release <= TORCH_NEWEST:
        raise BuildError(
            f"{where} has torch {found}; ranks need {TORCH_OLDEST[0]}.{TORCH_OLDEST[1]} to "
            f"{TORCH_NEWEST[0]}.{TORCH_NEWEST[1]}.",
            code="build.torch-version",
            remedy=f'Run {where} -m pip install "torch>={TORCH_OLDEST[0]}.{TORCH_OLDEST[1]},'
            f'<{TORCH_NEWEST[0]}.{TORCH_NEWEST[1] + 1}".',
        )
    if not answer["cuda"]:
        raise BuildError(
            f"{where} has the CPU-only torch {found}; ranks need the CUDA build, which also runs without a GPU.",
            code="build.torch-cpu-only",
            remedy="Reinstall torch from the Python package index, without an extra index.",
        )
    return Interpreter(
        executable=Path(where),
        version=(version[0], version[1], version[2]),
        abi=answer["abi"],
        include=Path(answer["include"]),
        path=tuple(dict.fromkeys(Path(p) for p in answer["path"] if p and Path(p).is_dir())),
        torch=Path(answer["torch"]),
        torch_version=found,
        cuda=answer["cuda"],
    )
