"""What a container is made of, and how its rank ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from proxy_runtime.errors import ErgoError

Network = Literal["host", "none", "private"]


class ContainerError(ErgoError):
    """A container cannot be made, or does not do what it must."""

    code = "container"


@dataclass(frozen=True, slots=True)
class Overlay:
    """An overlay of a job directory. `upper` and `work` lie on one file system, outside `lower`.

    Two overlays must never share `upper`: ranks of one job share one mount (see `hold_volume`).
    What the job changed is in `upper`; its `trusted.overlay.*` attributes belong to it.
    """

    lower: Path
    upper: Path
    work: Path
    mountpoint: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """What a container is made of.

    Attributes:
        argv: the rank's program; looked up in `env`'s PATH.
        env: its whole environment.
        cwd: its working directory, a path inside.
        log: a file inside that its stdout and stderr are appended to; None for /dev/null.
        overlay: an overlay to mount, before `binds`.
        binds: (source, destination) pairs that are bind mounted.
        network: `host`, or a network namespace in which only loopback is up (`none`, `private`).
        keep_fd: a descriptor that the rank gets under the same number.
        keeper_fds: descriptors that the rank's keeper holds under the same numbers; in no process of the rank.
        no_aslr: address space randomization off, so that images of ranks share pages.
        first_pid: pid of the rank inside (its keeper's is one less); above the pids that CRIU takes when it restores.
    """

    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | str = "/"
    log: Path | str | None = None
    overlay: Overlay | None = None
    binds: tuple[tuple[Path, Path], ...] = ()
    network: Network = "host"
    keep_fd: int | None = None
    keeper_fds: tuple[int, ...] = ()
    no_aslr: bool = True
    first_pid: int = 1000

    def __post_init__(self) -> None:
        if self.network not in ("host", "none", "private"):
            raise ValueError(f"network must be host, none or private, not {self.network!r}")
        if self.keep_fd is not None and self.keep_fd < 3:
            raise ValueError("keep_fd must not be a standard stream")
        if not 3 <= self.first_pid < 4_000_000:
            raise ValueError("first_pid must be between 3 and the largest pid")


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a rank ended.

    Attributes:
        code: its exit code, 128 + signal when it was killed.
        signal: the signal that killed it, or 0.
        lost: pid 1 was killed, and the rank with it; its own status is not known.
    """

    code: int
    signal: int = 0
    lost: bool = False
