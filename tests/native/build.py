"""Builds the native test modules and programs, once per contents of their sources, outside the checkout."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "proxy_runtime" / "device" / "native"
HERE = Path(__file__).resolve().parent
# What of device/native is the fabric and the collectives: free of torch.
FABRIC_SOURCES = [
    NATIVE / name
    for name in (
        "streams.cpp",
        "board.cpp",
        "fabric.cpp",
        "handshake.cpp",
        "collective_plan.cpp",
        "collectives.cpp",
        "collectives_cut.cpp",
        "collectives_fold.cpp",
        "default_kernels.cpp",
    )
]
SHIMS = HERE / "shims"
RANK_NATIVE = ROOT / "proxy_runtime" / "rank" / "native"
# The two ends of a ring: free of torch and Python, with the shims.
RING_SOURCES = [
    RANK_NATIVE / "channel.cpp",
    NATIVE / "ring_consumer.cpp",
    NATIVE / "fabric.cpp",
    NATIVE / "board.cpp",
    NATIVE / "streams.cpp",
]
RING_FLAGS = [f"-I{SHIMS}", f"-I{RANK_NATIVE}"]
# What a program is built with, by the sanitizer that watches it.
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
_WARNINGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror"]


def cache_folder() -> Path:
    path = Path(tempfile.gettempdir()) / f"ergosphere-tests-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _digest(parts: Sequence[str], sources: Sequence[Path]) -> str:
    digest = hashlib.sha256("\0".join(parts).encode())
    folders = {source.parent for source in sources}
    files = {*sources, *(header for folder in folders for header in folder.glob("*.hpp"))}
    files.update((ROOT / "proxy_runtime" / "channel").glob("*.hpp"))
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def compile_native(name: str, sources: Sequence[Path], flags: Sequence[str], compiler: str | None = None) -> Path:
    """Compiles and links `sources` to a file called `name`; returns its path. Safe to call from several processes."""
    compiler = compiler or os.environ.get("CXX", "g++")
    channel = ROOT / "proxy_runtime" / "channel"
    arguments = [*_WARNINGS, *flags, f"-I{NATIVE}", f"-I{channel}"]
    folder = cache_folder() / _digest([compiler, *arguments], sources)
    target = folder / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        objects = []
        for source in sources:
            objects.append(folder / f"{source.stem}.o")
            _run([compiler, *arguments, "-c", str(source), "-o", str(objects[-1])])
        unfinished = target.with_suffix(".part")
        _run([compiler, *map(str, objects), *arguments, "-pthread", "-o", str(unfinished)])
        unfinished.rename(target)
    return target


def run_native(program: Path, *arguments: str) -> None:
    """Runs a program, which must find nothing wrong and say ``ok``."""
    done = subprocess.run(
        # setarch: the thread sanitizer cannot place its shadow under some kernels' address randomisation.
        ["setarch", "-R", str(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def fabric_module() -> ModuleType:
    """The pybind11 module around Fabric and CollectiveEngine."""
    import pybind11

    name = "_fabric_under_test"
    if name in sys.modules:
        return sys.modules[name]
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    path = compile_native(
        f"{name}.so",
        [HERE / "fabric_binding.cpp", *FABRIC_SOURCES],
        ["-O1", "-fPIC", "-shared", "-fvisibility=hidden", *includes],
    )
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
