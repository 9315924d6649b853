"""What a fleet's supervisor tells of itself and its processes, in `supervisor.json` of the fleet's directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self, TypeAlias

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from infra.local.processes import identity

_NAME = "supervisor.json"

Phase: TypeAlias = Literal["starting", "running", "stopping"]


class ChildStatus(BaseModel):
    """One process.

    Attributes:
        pid: None while it does not run.
        identity: start time of that process, which tells it from a later one of the same id.
        starts: how often it was started.
        last_end: how it ended the last time; empty before.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    pid: int | None
    identity: float
    starts: int
    last_end: str = ""

    def process(self) -> psutil.Process | None:
        """The process, if it is still there."""
        if self.pid is None or identity(self.pid) != self.identity:
            return None
        return psutil.Process(self.pid)


class FleetStatus(BaseModel):
    """The supervisor and its processes; it is ``starting`` until `up` has found all healthy."""

    model_config = ConfigDict(frozen=True)

    pid: int
    identity: float
    phase: Phase
    children: tuple[ChildStatus, ...]

    @classmethod
    def read(cls, fleet_dir: Path) -> Self | None:
        """The last that was written; None where nothing readable is."""
        try:
            return cls.model_validate_json((fleet_dir / _NAME).read_bytes())
        except (OSError, ValidationError):
            return None

    def write(self, fleet_dir: Path) -> None:
        """Replaces the file at once."""
        draft = fleet_dir / f".{_NAME}.new"
        draft.write_text(self.model_dump_json())
        os.replace(draft, fleet_dir / _NAME)

    def child(self, name: str) -> ChildStatus | None:
        """A process by its name."""
        return next((child for child in self.children if child.name == name), None)

    def processes(self) -> list[psutil.Process]:
        """Those that are still there, the supervisor not among them."""
        return [process for child in self.children if (process := child.process()) is not None]
