"""`fleet.json`: where a local fleet's services are and how large it is. `ergo up` writes it; every process reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from model.codec import faults_of
from model.errors import ModelError

NAME = "fleet.json"

Port = Annotated[int, Field(ge=1, le=65535)]


class FleetFile(BaseModel):
    """A local fleet. Ports stay what they are over restarts; a service that is outside has none.

    Attributes:
        temporal_address: ``host:port`` of the workflow service, ours or an outside one.
        temporal_ui: its address for a browser; empty where it is outside.
        kafka_bootstrap_servers: comma-separated ``host:port``.
        nodes: how many node agents run here, called node-1, node-2, ...
        devices: CPU accelerators of each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["ergosphere/fleet"] = "ergosphere/fleet"
    version: Literal[1] = 1
    cluster: str = "local"
    temporal_address: str
    temporal_namespace: str = "default"
    temporal_port: Port | None = None
    temporal_ui: str = ""
    temporal_ui_port: Port | None = None
    kafka_bootstrap_servers: str
    kafka_port: Port | None = None
    kafka_controller_port: Port | None = None
    store_url: str
    secret_file: Path
    nodes: Annotated[int, Field(ge=0)] = 2
    devices: Annotated[int, Field(ge=1)] = 2

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of the node agents that this fleet runs itself."""
        return tuple(f"node-{index}" for index in range(1, self.nodes + 1))

    def workflow_url(self, job: str | None = None) -> str:
        """Where a browser shows a job's workflow, or all; empty where nobody has said where the UI is."""
        if not self.temporal_ui:
            return ""
        workflows = f"{self.temporal_ui.rstrip('/')}/namespaces/{self.temporal_namespace}/workflows"
        return workflows if job is None else f"{workflows}/{job}"

    @classmethod
    def read(cls, fleet_dir: Path) -> Self | None:
        """Reads the file of a fleet; None where there is none.

        Raises:
            ModelError: ``fleet.file``: it is there and not readable as what this build writes.
        """
        path = fleet_dir / NAME
        try:
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ModelError.of_faults(str(path), faults_of(error), code="fleet.file") from None

    def write(self, fleet_dir: Path) -> None:
        """Replaces the file at once, so that no reader sees half of it."""
        draft = fleet_dir / f".{NAME}.new"
        draft.write_text(self.model_dump_json(indent=2) + "\n")
        draft.replace(fleet_dir / NAME)
