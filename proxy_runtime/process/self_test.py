"""The proof that a CRIU works here: a real dump and restore."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from proxy_runtime.home import ergo_home
from proxy_runtime.process.criu import dump, restore
from proxy_runtime.process.criu_binary import Criu
from proxy_runtime.process.criu_errors import CriuError
from proxy_runtime.process.init_build import build_init
from proxy_runtime.process.inspect import mapped_memfd
from proxy_runtime.process.namespace import ContainerSpec, launch

# Mapped by hand: Python's mmap would keep a duplicate of the descriptor, and a rank keeps none.
_VICTIM: Final = """
import ctypes, os, socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
fd = os.memfd_create("ergo-self-test"); os.ftruncate(fd, 4096)
libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
address = libc.mmap(None, ctypes.c_size_t(4096), 3, 1, fd, ctypes.c_long(0)); os.close(fd)
memory = (ctypes.c_char * 4096).from_address(address)
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
    memory = ergo_home() / "criu-self-test.json"
    key = f"{_digest(criu)} {platform.release()} {platform.version()}"
    if cached and key in _remembered(memory):
        return
    with tempfile.TemporaryDirectory(prefix="ergo-criu-test-") as scratch:
        if init_binary is None:
            init_binary = build_init(Path(scratch) / "init")
        _round_trip(criu, init_binary, Path(scratch))
    memory.parent.mkdir(parents=True, exist_ok=True)
    temporary = memory.with_name(f"{memory.name}.{os.getpid()}")
    temporary.write_text(json.dumps([*_remembered(memory)[-31:], key]))
    temporary.replace(memory)


def _round_trip(criu: Criu, init_binary: Path | str, scratch: Path) -> None:
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
