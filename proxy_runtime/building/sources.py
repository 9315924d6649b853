"""Which files a build is made of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from proxy_runtime.building.errors import BuildError


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of one tree, sorted by name.

    Attributes:
        root: the package ``proxy_runtime``.
        interposer: C++ of the rank side.
        channel: C of the rank side's first mapping, free of torch.
        device: C++ of the device side.
        rank_package: Python of ``ergo_rank``.
        start_up_hook: the rank's ``sitecustomize.py``.
        init: C of the minimal pid 1.
        others: headers, and what decides how the rest is built.
    """

    root: Path
    interposer: tuple[Path, ...]
    channel: tuple[Path, ...]
    device: tuple[Path, ...]
    rank_package: tuple[Path, ...]
    start_up_hook: Path | None
    init: Path | None
    others: tuple[Path, ...]

    @classmethod
    def of_this_tree(cls) -> Sources:
        """The sources beside this file."""
        return cls.at(Path(__file__).resolve().parent.parent)

    @classmethod
    def at(cls, root: Path) -> Sources:
        """The sources of the package at `root`, whatever of them is there."""
        rank, device = root / "rank", root / "device"
        hook, init = rank / "sitecustomize.py", root / "process" / "init.c"
        stubs = rank / "stubs"
        others = (
            *(root / "channel").glob("*.hpp"),
            *(rank / "native").glob("*.h*"),
            *(device / "native").rglob("*.h*"),
            *(p for p in stubs.rglob("*") if p.suffix in (".c", ".h", ".py")),
            *(root / "building").glob("*.py"),
            *root.glob("build.py"),
        )
        return cls(
            root=root,
            interposer=_sorted((rank / "native").glob("*.cpp")),
            channel=_sorted((rank / "native").glob("channel_map.c")),
            device=_sorted((device / "native").rglob("*.cpp")),
            rank_package=_sorted((rank / "ergo_rank").glob("*.py")),
            start_up_hook=hook if hook.is_file() else None,
            init=init if init.is_file() else None,
            others=_sorted(iter(others)),
        )

    def all_files(self) -> list[Path]:
        """Every file that decides what a build is."""
        single = [p for p in (self.start_up_hook, self.init) if p]
        return sorted((*self.interposer, *self.channel, *self.device, *self.rank_package, *single, *self.others))

    def require_complete(self) -> None:
        """Raises BuildError (``build.sources-missing``) where a part of the runtime is not there."""
        parts = {
            "rank/native/*.cpp": self.interposer,
            "rank/native/channel_map.c": self.channel,
            "device/native/*.cpp": self.device,
            "rank/ergo_rank/*.py": self.rank_package,
            "rank/sitecustomize.py": self.start_up_hook,
            "process/init.c": self.init,
        }
        if missing := [name for name, found in parts.items() if not found]:
            raise BuildError(
                f"The sources of the runtime in {self.root} are incomplete: {', '.join(missing)} missing.",
                code="build.sources-missing",
                remedy="Reinstall Ergosphere, or check out the whole repository.",
            )


def _sorted(paths: Iterator[Path]) -> tuple[Path, ...]:
    return tuple(sorted(paths, key=os.fspath))
