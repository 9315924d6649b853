"""Processes that for a while have less than a core, whatever the machine has to spare."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness import BenchmarkError

_PERIOD_US = 4000  # in which the share is given: shorter than a step


@contextlib.contextmanager
def limited_cpu(pids: Sequence[int], share: float) -> Iterator[None]:
    """Processes that meanwhile have no more than this share of a core together, in a control group of their own.

    Raises:
        BenchmarkError: the machine has no such groups, or lets nobody make one.
    """
    try:
        before = [_group_of(pid) for pid in pids]
        group = before[0] / f"ergosphere-benchmark-{os.getpid()}-{pids[0]}"
        group.mkdir()
    except OSError as error:
        raise BenchmarkError(
            f"A device cannot be slowed down here: {error}. Run the benchmark as root, where control groups limit CPU."
        ) from error
    try:
        _limit(group, round(share * _PERIOD_US))
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for pid, home in zip(pids, before, strict=True):
            with contextlib.suppress(ProcessLookupError):
                (home / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def _limit(group: Path, quota_us: int) -> None:
    if (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")


def _group_of(pid: int) -> Path:
    """Where the process's control group for CPU lies.

    Raises:
        FileNotFoundError: it has none.
    """
    groups = dict(line.split(":", 2)[1:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines())
    for mount in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = mount.split()
        if kind == "cgroup" and "cpu" in options.split(",") and "cpu" in groups:
            return Path(point) / groups["cpu"].lstrip("/")
        if kind == "cgroup2" and "cpu" in _controllers(Path(point)):
            return Path(point) / groups[""].lstrip("/")
    raise FileNotFoundError("no control group limits CPU time")


def _controllers(point: Path) -> list[str]:
    try:
        return (point / "cgroup.controllers").read_text().split()
    except OSError:
        return []
