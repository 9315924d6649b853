"""What a machine has and lacks to run, cut and restore ranks. Each check tries the thing itself where it can."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from proxy_runtime.errors import ErgoError
from proxy_runtime.home import ergo_home
from proxy_runtime.process import proc
from proxy_runtime.process.criu_binary import Criu, kernel_version, require_recent
from proxy_runtime.process.init_build import build_init
from proxy_runtime.process.namespace import Overlay, hold_volume
from proxy_runtime.process.self_test import self_test

OLDEST_KERNEL: Final = (5, 16)  # futex_waitv
TORCH_VERSIONS: Final = ((2, 11), (2, 15))
PYTHON_VERSIONS: Final = ((3, 11), (3, 12))
FREE_BYTES: Final = 5 << 30  # a build, and a few process images
# Numbers of linux/capability.h.
_CAPABILITIES: Final = {"SYS_ADMIN": 21, "SYS_PTRACE": 19, "NET_ADMIN": 12, "CHECKPOINT_RESTORE": 40}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `ergo doctor`.

    Attributes:
        name: what was looked at.
        ok: whether it will do.
        detail: what was found.
        remedy: what to do when it will not do; else empty.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""


def all_checks(python: str, usable_criu: Callable[[], Criu], init_binary: Path | str | None) -> list[Check]:
    """Every check, in the order in which one depends on the other."""
    with tempfile.TemporaryDirectory(prefix="ergo-doctor-") as scratch:
        found = [privileges(), kernel(), compilers(), disk(ergo_home()), *interpreter(python)]
        try:
            binary = Path(init_binary) if init_binary is not None else build_init(Path(scratch) / "init")
        except ErgoError as error:
            return [*found, _failed("pid 1", error)]
        return [*found, overlayfs(binary), *criu_checks(usable_criu, binary)]


def privileges() -> Check:
    """Root, with the capabilities that namespaces and CRIU need."""
    text = proc.status_field(os.getpid(), "CapEff")
    effective = int(text, 16) if text else 0
    missing = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if os.geteuid() != 0 or missing:
        what = "not root" if os.geteuid() != 0 else "root without CAP_" + ", CAP_".join(missing)
        return Check("privileges", False, what, "Run as root; in a container, add these capabilities (--privileged).")
    return Check("privileges", True, "root with the capabilities that are needed")


def kernel(release: str | None = None) -> Check:
    """A kernel that has the system calls."""
    release = release or platform.release()
    if kernel_version(release) < OLDEST_KERNEL:
        return Check("kernel", False, release, f"Use Linux {OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]} or later.")
    return Check("kernel", True, release)


def compilers() -> Check:
    """The compilers that the runtime's native parts are built with."""
    missing = [name for name in ("gcc", "g++") if shutil.which(name) is None]
    if missing:
        return Check("compiler", False, f"{' and '.join(missing)} not found", "Install build-essential.")
    return Check("compiler", True, "gcc and g++")


def disk(directory: Path) -> Check:
    """Space where builds, process images and checkpoints go."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{free / 2**30:.1f} GiB free in {existing}"
    if free < FREE_BYTES:
        return Check("disk space", False, detail, f"Free {FREE_BYTES >> 30} GiB there, or set ERGO_HOME elsewhere.")
    return Check("disk space", True, detail)


def interpreter(python: str) -> list[Check]:
    """Python's and torch's version as ranks will have them; torch is not imported."""
    question = (
        "import json, sys, importlib.metadata as m\n"
        "torch = [d.version for d in m.distributions() if d.name == 'torch'][:1]\n"
        "print(json.dumps([list(sys.version_info[:3]), torch]))"
    )
    try:
        result = subprocess.run([python, "-c", question], capture_output=True, text=True, timeout=60, check=True)
        version, torch = json.loads(result.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return [Check("Python", False, f"{python} does not run", "Name an interpreter that has torch.")]
    return [_python_check(python, tuple(version)), _torch_check(python, torch[0] if torch else None)]


def overlayfs(init_binary: Path) -> Check:
    """An overlay mount under ERGO_HOME, where the upper directories of jobs will be."""
    ergo_home().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ergo_home(), prefix=".doctor-") as scratch:
        parts = [Path(scratch) / name for name in ("lower", "upper", "work", "merged")]
        for part in parts:
            part.mkdir()
        try:
            with hold_volume(init_binary, Overlay(*parts)):
                pass
        except ErgoError as error:
            remedy = "Load the kernel's overlay module; ERGO_HOME must not itself lie on an overlay or on NFS."
            return Check("overlayfs", False, error.message, remedy)
    return Check("overlayfs", True, f"works in {ergo_home()}")


def criu_checks(usable_criu: Callable[[], Criu], init_binary: Path) -> list[Check]:
    """Which CRIU would be used, and whether it can do what it must."""
    try:
        criu = usable_criu()
        require_recent(criu)
    except ErgoError as error:
        return [_failed("CRIU", error)]
    found = Check("CRIU", True, f"{criu.version_text} at {criu.path}")
    try:
        self_test(criu, init_binary, cached=False)
    except ErgoError as error:
        return [found, _failed("CRIU self-test", error)]
    return [found, Check("CRIU self-test", True, "dump and restore work")]


def _failed(name: str, error: ErgoError) -> Check:
    return Check(name, False, error.message, error.remedy)


def _python_check(python: str, version: tuple[int, ...]) -> Check:
    detail = f"{'.'.join(map(str, version))} at {python}"
    if not PYTHON_VERSIONS[0] <= version[:2] <= PYTHON_VERSIONS[1]:
        return Check("Python", False, detail, "Use Python 3.11 or 3.12.")
    return Check("Python", True, detail)


def _torch_check(python: str, version: str | None) -> Check:
    first, last = (".".join(map(str, edge)) for edge in TORCH_VERSIONS)
    remedy = f"Install torch {first} to {last} for {python}."
    if version is None:
        return Check("torch", False, f"not installed for {python}", remedy)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    return (
        Check("torch", True, version)
        if TORCH_VERSIONS[0] <= numbers <= TORCH_VERSIONS[1]
        else Check("torch", False, version, remedy)
    )
