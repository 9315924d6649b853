"""Uploads a job directory, with a progress bar on a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cli.console import messages

if TYPE_CHECKING:
    from model.ids import CheckpointId, TenantId
    from proxy_runtime.storage.fleet import FleetStore


def upload(fleet: FleetStore, tenant: TenantId, directory: Path) -> CheckpointId:
    """Puts a directory into the fleet's store; returns what a JobSpec names it by. Blocks."""
    from proxy_runtime.storage import volumes

    with messages.status(f"uploading {directory}"):
        return volumes.upload_directory(fleet, tenant, directory)
