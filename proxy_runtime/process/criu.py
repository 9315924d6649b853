"""Dump and restore of a container's process tree with CRIU."""

from __future__ import annotations

import os
import signal
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from proxy_runtime.process import kept, proc, shm
from proxy_runtime.process.criu_errors import CriuError, error_lines, explain
from proxy_runtime.process.inodes import inode_violations
from proxy_runtime.process.namespace import Container, ContainerSpec, Volume, launch_empty
from proxy_runtime.process.rpc import (
    CgroupMode,
    Request,
    RequestType,
    Session,
    SessionLostError,
    SessionTimeoutError,
    read_dump_stats,
)

__all__ = ["CriuError", "DumpReport", "dump", "restore"]

_LOG: Final = {RequestType.DUMP: "dump.log", RequestType.RESTORE: "restore.log"}
_WARNINGS: Final = 2  # CRIU's log level: errors and warnings


class Binary(Protocol):
    """What is needed of `criu_setup.Criu`."""

    @property
    def path(self) -> Path: ...


@dataclass(frozen=True, slots=True)
class DumpReport:
    """What a dump took.

    Attributes:
        frozen_ms: how long the tree stood still by CRIU's own account, `on_frozen` included.
        memdump_ms, memwrite_ms: parts of it: reading memory, writing it.
        pages: memory pages written.
        bytes: size of all files of the dump.
        wall_ms: of the whole call.
    """

    frozen_ms: float
    memdump_ms: float
    memwrite_ms: float
    pages: int
    bytes: int
    wall_ms: float


def dump(
    criu: Binary,
    container: Container,
    directory: Path,
    *,
    on_frozen: Callable[[], None] | None = None,
    deadline_s: float = 60.0,
    grace_s: float = 30.0,
    ghost_limit: int = 2 << 30,
    link_remap: bool = True,
) -> DumpReport:
    """Writes the images of the rank and its children to `directory`; then they run on.

    Args:
        criu: the CRIU to use.
        container: must be running.
        directory: made if missing, mode 0700 (images hold all memory); must have the same path inside.
        on_frozen: called when everything is written and the tree still stands still. Raising vetoes the
            dump: the tree runs on and the exception is raised here. Its time does not count for the deadline.
        deadline_s: seconds for the rest.
        grace_s: how much longer a late dump may take to end by itself. It is then undone, at no risk; only
            a CRIU that hangs even longer is killed, which in rare cases takes a process of the tree with it.
        ghost_limit: largest deleted but open file (a data loader's batch in /dev/shm) that is taken along, bytes.
        link_remap: take along files that are open, linked elsewhere, but deleted under their own name.

    Raises:
        CriuError: `criu.deadline`, `criu.died`, `criu.images-hidden`, or the cause from CRIU's log. The tree runs on.
    """
    started = time.perf_counter()
    _private(directory)
    request = _request(RequestType.DUMP, directory, link_remap)
    request.opts.pid = proc.pid_inside(container.keeper_pid)
    request.opts.leave_running = True
    request.opts.ghost_limit = ghost_limit
    request.opts.timeout = max(1, int(deadline_s))  # for freezing the tree
    if request.opts.pid == 0:
        raise _gone(container)

    def at_stage(script: str, _: int) -> None:
        if script == "post-dump":
            found = [sentence for pid in container.processes() for sentence in inode_violations(pid)]
            if found:  # opened since whoever asked for the dump has looked
                raise CriuError(f"{_doing(container)}: {'; '.join(found)}.", code="criu.inode")
            shm.save(container, directory)
            kept.save(container, directory)
            if on_frozen is not None:
                on_frozen()

    _require_visible(container, directory)
    limit = time.monotonic() + deadline_s
    try:
        _dump_once(criu, container, request, directory, at_stage, limit, grace_s)
    except CriuError as error:
        if error.code != "criu.exiting":
            raise
        # A thread group that was just being taken down: a moment later it is gone.
        _dump_once(criu, container, request, directory, at_stage, limit, grace_s)
    stats = read_dump_stats(directory)
    return DumpReport(
        frozen_ms=stats.frozen_time / 1e3 if stats else 0.0,
        memdump_ms=stats.memdump_time / 1e3 if stats else 0.0,
        memwrite_ms=stats.memwrite_time / 1e3 if stats else 0.0,
        pages=stats.pages_written if stats else 0,
        bytes=sum(entry.stat().st_size for entry in directory.iterdir() if entry.is_file()),
        wall_ms=(time.perf_counter() - started) * 1e3,
    )


def restore(
    criu: Binary,
    init_binary: Path | str,
    directory: Path,
    spec: ContainerSpec,
    *,
    on_paused: Callable[[Container], None] | None = None,
    deadline_s: float = 60.0,
    mounts_of: Volume | None = None,
    link_remap: bool = True,
) -> Container:
    """Restores a dumped tree into a fresh container.

    Args:
        criu: the CRIU to use.
        init_binary: the compiled `init.c`.
        directory: of the dump, complete and verified: CRIU checks nothing.
        spec: of the container; `argv`, `env`, `cwd`, `log` and `keep_fd` come from the images.
        on_paused: called with the container when all memory is in place and nothing runs yet. It runs when
            that returns; when it raises, everything is killed and the exception is raised here.
            Its time does not count for the deadline.
        deadline_s: seconds for the rest.
        mounts_of: the volume whose mounts the container starts from.
        link_remap: as at the dump.

    Raises:
        CriuError: `criu.deadline`, `criu.died`, or the cause from CRIU's log. Nothing is left behind.
        ContainerError: no container could be made.
    """
    limit = time.monotonic() + deadline_s
    request = _request(RequestType.RESTORE, directory, link_remap)
    try:
        before = shm.devices(directory)
    except (OSError, ValueError) as error:
        raise CriuError(f"{_undone(directory)}: /dev/shm: {error}.", code="criu.shm") from error
    container = launch_empty(init_binary, spec, mounts_of=mounts_of, deadline_s=deadline_s, shm_before=before)
    try:
        _restore_into(criu, container, request, directory, on_paused, limit, spec.no_aslr)
    except BaseException:
        container.kill()
        raise
    return container


def _restore_into(
    criu: Binary,
    container: Container,
    request: Any,
    directory: Path,
    on_paused: Callable[[Container], None] | None,
    limit: float,
    no_aslr: bool,
) -> None:
    doing = _undone(directory)
    _require_visible(container, directory)
    try:
        shm.load(container, directory)
    except (OSError, tarfile.TarError) as error:
        raise CriuError(f"{doing}: /dev/shm: {error}.", code="criu.shm", remedy="Is there enough memory?") from error
    keeper = 0

    def at_stage(script: str, pid: int) -> None:
        nonlocal keeper
        if script == "post-restore":
            keeper = pid
        elif script == "pre-resume":  # memory complete, restorer code gone, every thread stopped by ptrace
            container.adopt(keeper)
            kept.load(container, directory)
            if on_paused is not None:
                on_paused(container)

    _call(criu, container, request, directory, at_stage, limit, doing, no_aslr=no_aslr)


def _dump_once(
    criu: Binary,
    container: Container,
    request: Any,
    directory: Path,
    at_stage: Callable[[str, int], None],
    limit: float,
    grace_s: float,
) -> None:
    for entry in directory.iterdir():
        if entry.is_file():
            entry.unlink()
    stopped = {pid for pid in container.processes() if proc.status_field(pid, "State")[:1] == "T"}
    try:
        _call(criu, container, request, directory, at_stage, limit, _doing(container), grace_s)
    except CriuError as error:
        if error.code in ("criu.deadline", "criu.died"):
            _require_released(container, stopped)
        if error.code == "criu.died" and not container.processes():  # CRIU ends with the container that it runs in
            raise _gone(container) from error
        raise


def _call(
    criu: Binary,
    container: Container,
    request: Any,
    directory: Path,
    at_stage: Callable[[str, int], None],
    limit: float,
    doing: str,
    grace_s: float = 0.0,
    no_aslr: bool = False,
) -> None:
    log = directory / _LOG[request.type]
    try:
        with Session(criu.path, container, limit - time.monotonic(), grace_s=grace_s, no_aslr=no_aslr) as session:
            try:
                response = session.call(request, at_stage)
            except SessionTimeoutError:
                session.kill()
                raise
    except SessionTimeoutError:
        raise CriuError(f"{doing}: CRIU did not finish in time.", code="criu.deadline",
                        remedy="Give it more time, or look for a slow disk.") from None  # fmt: skip
    except SessionLostError as error:
        lines = error_lines(log)
        if lines:
            raise explain(lines, doing) from error
        raise CriuError(f"{doing}: {error}.", code="criu.died", remedy="Run `ergo doctor`.") from error
    if not response.success:
        raise explain(error_lines(log), doing)


def _require_visible(container: Container, directory: Path) -> None:
    """CRIU runs inside: the directory's path must lead to the same directory there."""
    inside = Path(f"/proc/{container.init_pid}/root{directory.resolve()}")
    try:
        if os.path.samestat(inside.stat(), directory.stat()):
            return
    except OSError:
        pass
    raise CriuError(
        f"the images' directory {directory} is another one, or missing, inside the container.",
        code="criu.images-hidden",
        remedy="Choose one outside of the job's directory, /dev/shm and what is mounted later.",
    )


def _require_released(container: Container, stopped_before: set[int]) -> None:
    """After CRIU was killed in the middle of a dump: every process must be free and as it was."""
    container.end_strangers()
    limit = time.monotonic() + 5.0
    while True:
        held: list[int] = []
        for pid in container.processes():
            if proc.status_field(pid, "TracerPid") not in ("0", ""):
                held.append(pid)
            elif proc.status_field(pid, "State")[:1] == "T" and pid not in stopped_before:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                held.append(pid)
        if not held:
            return
        if time.monotonic() > limit:
            raise CriuError(f"process {held[0]} was left stopped by a CRIU that was killed.", code="criu.left-stopped",
                            remedy="End the job and restore its last checkpoint.")  # fmt: skip
        time.sleep(0.01)


def _request(kind: RequestType, directory: Path, link_remap: bool) -> Any:
    request = Request(type=kind)
    request.opts.images_dir_fd = -1  # a descriptor of ours means nothing in the container: the path is used
    request.opts.images_dir = str(directory.resolve())
    request.opts.log_file = _LOG[kind]
    request.opts.log_level = _WARNINGS
    request.opts.notify_scripts = True
    request.opts.file_locks = True
    request.opts.link_remap = link_remap
    request.opts.manage_cgroups = True
    request.opts.manage_cgroups_mode = CgroupMode.IGNORE
    return request


def _undone(directory: Path) -> str:
    return f"the processes in {directory} could not be restored"


def _gone(container: Container) -> CriuError:
    return explain(["No such process"], _doing(container))


def _doing(container: Container) -> str:
    return f"process {container.rank_pid} could not be dumped"


def _private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
