"""Finding a CRIU that works here: the machine's own, or Debian's newest in a private prefix.

Version numbers and `criu check` do not tell (4.1.1 says "Looks good" on kernels where it cannot dump a
listening socket), so that the last word is a real dump and restore: `self_test`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from proxy_runtime.process import debian
from proxy_runtime.process.criu_errors import CriuError
from proxy_runtime.process.namespace import ContainerSpec, launch

Progress = Callable[[str], None]
Version = tuple[int, int, int]

_OLDEST_ANYWHERE: Final[Version] = (4, 0, 0)
# (kernel from, CRIU needed there): vDSO layout, then inet socket options.
_NEEDED: Final[tuple[tuple[tuple[int, int], Version], ...]] = (((6, 16), (4, 2, 0)), ((6, 13), (4, 1, 0)))
_SUITES: Final = ("forky", "sid")


@dataclass(frozen=True, slots=True)
class Criu:
    """A CRIU to use.

    Attributes:
        path: the program.
        version: as it says itself.
        prefix: the private prefix that it lies in, or None for one of the machine's own.
    """

    path: Path
    version: Version
    prefix: Path | None = None

    @property
    def version_text(self) -> str:
        return ".".join(str(part) for part in self.version)


def home() -> Path:
    """`$ERGO_HOME`, by default ~/.local/state/ergosphere."""
    return Path(os.environ.get("ERGO_HOME") or "~/.local/state/ergosphere").expanduser()


def find(progress: Progress = lambda _: None, *, install: bool = True) -> Criu:
    """The CRIU to use: `ERGO_CRIU`, else PATH's, else the private one, which is made if it is missing.

    The machine's own is passed over when its version is too old for the running kernel.

    Args:
        progress: gets one sentence before anything slow.
        install: whether the private one may be made (about 10 s, 20 MB).

    Raises:
        CriuError: `criu.not-found`, `criu.too-old` (of ERGO_CRIU), `criu.install`.
    """
    forced = os.environ.get("ERGO_CRIU")
    if forced:
        criu = probe(Path(forced))
        if criu is None:
            raise CriuError(f"ERGO_CRIU={forced} is not a working criu.", code="criu.not-found",
                            remedy="Correct or unset it.")  # fmt: skip
        require_recent(criu)
        return criu
    own = shutil.which("criu", path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin")
    for path, prefix in ((Path(own) if own else None, None), (home() / "criu" / "criu", home() / "criu")):
        criu = probe(path, prefix) if path else None
        if criu is not None and criu.version >= needed_version():
            return criu
    if not install:
        raise CriuError("no usable CRIU is installed.", code="criu.not-found",
                        remedy="`ergo run` unpacks one into a private prefix; or install CRIU 4.2 or later.")  # fmt: skip
    return install_private(home() / "criu", progress)


def probe(path: Path, prefix: Path | None = None) -> Criu | None:
    """Runs `criu --version`; None when that does not work."""
    try:
        result = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"Version:\s*(\d+)\.(\d+)(?:\.(\d+))?", result.stdout)
    if result.returncode != 0 or match is None:
        return None
    return Criu(path, (int(match[1]), int(match[2]), int(match[3] or 0)), prefix)


def kernel_version(release: str | None = None) -> tuple[int, int]:
    """(major, minor) of a kernel release, by default the running one's."""
    match = re.match(r"(\d+)\.(\d+)", release or platform.release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def needed_version(kernel: tuple[int, int] | None = None) -> Version:
    """The oldest CRIU that works on a kernel, by default the running one."""
    running = kernel or kernel_version()
    return next((criu for since, criu in _NEEDED if running >= since), _OLDEST_ANYWHERE)


def require_recent(criu: Criu) -> None:
    """Raises CriuError `criu.too-old` where the version is known not to work with the running kernel."""
    needed = needed_version()
    if criu.version < needed:
        raise CriuError(
            f"CRIU {criu.version_text} at {criu.path} is too old for kernel {platform.release()}, "
            f"which needs {'.'.join(map(str, needed))}.",
            code="criu.too-old",
            remedy="Unset ERGO_CRIU or install a newer one.",
        )


def install_private(prefix: Path, progress: Progress = lambda _: None) -> Criu:
    """Unpacks Debian's newest CRIU into `prefix`, which appears complete and working or not at all.

    Raises:
        CriuError: `criu.install` with the reason of each suite that was tried.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    reasons: list[str] = []
    for suite in _SUITES:
        progress(f"Unpacking CRIU from Debian {suite} into {prefix} (once, about 20 MB).")
        with tempfile.TemporaryDirectory(dir=prefix.parent, prefix=".criu-") as scratch:
            tree = Path(scratch) / "criu"
            try:
                debian.unpack("criu", suite, tree, Path(scratch) / "apt")
                debian.wrap(tree, prefix, "usr/sbin/criu", tree / "criu")
            except debian.DebianError as error:
                reasons.append(f"{suite}: {error}")
                continue
            previous = Path(scratch) / "previous"
            if prefix.exists():
                prefix.rename(previous)
            tree.rename(prefix)
            criu = probe(prefix / "criu", prefix)
            if criu is not None and criu.version >= needed_version():
                return criu
            # Its wrapper names the final path, so that it could only be tried there.
            prefix.rename(Path(scratch) / "refused")
            if previous.exists():
                previous.rename(prefix)
            reasons.append(f"{suite}: " + (f"only {criu.version_text}" if criu else "it does not run"))
    raise CriuError(f"no usable CRIU could be unpacked ({'; '.join(reasons)}).", code="criu.install",
                    remedy="Install CRIU 4.2 or later yourself and set ERGO_CRIU to it.")  # fmt: skip


_VICTIM: Final = """
import mmap, os, socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
fd = os.memfd_create("ergo-self-test"); os.ftruncate(fd, 4096)
memory = mmap.mmap(fd, 4096); os.close(fd)
memory[0:5] = b"ready"
while memory[8:12] != b"exit":
    time.sleep(0.002)
sys.exit(42)
"""


def self_test(criu: Criu, init_binary: Path | str | None = None, *, cached: bool = True) -> None:
    """Dumps and restores a small process with a listening socket and a mapped memfd, in fresh namespaces.

    A success is remembered under ERGO_HOME per (program, kernel).

    Args:
        criu: what to test.
        init_binary: the compiled `init.c`; without it, it is compiled for the test.
        cached: whether a remembered success counts.

    Raises:
        CriuError: why it cannot be used here.
        ContainerError: no container can be made here.
    """
    memory = home() / "criu-self-test.json"
    key = f"{_digest(criu)} {platform.release()} {platform.version()}"
    if cached and key in _remembered(memory):
        return
    with tempfile.TemporaryDirectory(prefix="ergo-criu-test-") as scratch:
        if init_binary is None:
            from proxy_runtime.process.init_build import build_init

            init_binary = build_init(Path(scratch) / "init")
        _round_trip(criu, init_binary, Path(scratch))
    memory.parent.mkdir(parents=True, exist_ok=True)
    temporary = memory.with_name(f"{memory.name}.{os.getpid()}")
    temporary.write_text(json.dumps([*_remembered(memory)[-31:], key]))
    temporary.replace(memory)


def _round_trip(criu: Criu, init_binary: Path | str, scratch: Path) -> None:
    from proxy_runtime.process.criu import dump, restore

    spec = ContainerSpec(
        argv=(sys.executable, "-I", "-S", "-c", _VICTIM),
        env={"PATH": "/usr/bin:/bin"},
        log=scratch / "log",
        network="private",
    )
    images = scratch / "images"
    with launch(init_binary, spec) as container:
        _poll_memory(container.rank_pid, lambda memory: memory[0:5] == b"ready", b"")
        dump(criu, container, images, deadline_s=30)
    with restore(criu, init_binary, images, spec, deadline_s=30) as container:
        _poll_memory(container.rank_pid, lambda memory: memory[0:5] == b"ready", b"exit")
        status = container.wait(10)
    if status is None or status.code != 42:
        raise CriuError(f"a process restored by CRIU {criu.version_text} did not go on ({status}).",
                        code="criu.self-test", remedy="Install another version and set ERGO_CRIU to it.")  # fmt: skip


def _poll_memory(pid: int, ready: Callable[[bytes], bool], write: bytes) -> None:
    """Waits for the victim's word in the memfd that it maps without a descriptor; then writes one."""
    import mmap
    import time

    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        path = mapped_memfd(pid, "ergo-self-test")
        if path is not None:
            fd = os.open(path, os.O_RDWR)
            try:
                with mmap.mmap(fd, 4096) as memory:
                    if ready(memory[:]):
                        memory[8 : 8 + len(write)] = write
                        return
            finally:
                os.close(fd)
        time.sleep(0.002)
    raise CriuError("the process of the self-test did not come up.", code="criu.self-test")


def mapped_memfd(pid: int, name: str) -> Path | None:
    """The /proc/PID/map_files entry of the first mapping of a memfd, which opens the memfd itself."""
    try:
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if f"/memfd:{name} (deleted)" in line:
                start, end = line.split(maxsplit=1)[0].split("-")
                return Path(f"/proc/{pid}/map_files/{int(start, 16):x}-{int(end, 16):x}")
    except OSError:
        pass
    return None


def _digest(criu: Criu) -> str:
    binary = criu.prefix / "usr/sbin/criu" if criu.prefix else criu.path
    try:
        return hashlib.sha256(binary.read_bytes()).hexdigest()
    except OSError:
        return f"{criu.path} {criu.version_text}"


def _remembered(memory: Path) -> list[str]:
    try:
        found = json.loads(memory.read_text())
        return [str(key) for key in found] if isinstance(found, list) else []
    except (OSError, ValueError):
        return []
