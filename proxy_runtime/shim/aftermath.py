"""What is left to do when a job has ended: its files go home, and its run directory goes away."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import orjson

from proxy_runtime.checkpoint.merge import merge_back
from proxy_runtime.errors import ErgoError
from proxy_runtime.home import ergo_home
from proxy_runtime.shim.client import running_jobs
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.spec import RunError, RunSpec


def bring_home(layout: RunLayout, spec: RunSpec) -> None:
    """Applies what the job changed in its directory to the directory itself.

    Raises:
        RunError: it cannot be written (`run.not-brought-home`); the sentence says where the files are.
    """
    upper = layout.current.upper
    if not upper.is_dir():
        return
    try:
        merge_back(upper, Path(spec.lower))
    except (ErgoError, OSError) as error:
        raise RunError(
            f"the job's files could not be brought home to {spec.lower} ({error}); they are in {upper}.",
            code="run.not-brought-home",
            remedy="Copy them from there, then remove the run directory.",
        ) from error


def clean(layout: RunLayout, *, keep_checkpoints: bool = False) -> None:
    """Removes the run directory of an ended job, its mount point, and checkpoints that nobody asked to keep."""
    shutil.rmtree(layout.root, ignore_errors=True)
    if not keep_checkpoints:
        shutil.rmtree(layout.checkpoints, ignore_errors=True)
    remove_mount_point(layout)


def remove_mount_point(layout: RunLayout) -> None:
    """Removes the empty directory on which the ranks' private files were mounted."""
    with suppress(OSError):  # not there any more
        Path(layout.epoch(0).private_mount).rmdir()


def sweep() -> None:
    """Cleans up after runs that were killed together with the command that owned them."""
    alive = {layout.root for layout in running_jobs()}
    for path in (ergo_home() / "runs").glob("*/run.json"):
        layout = RunLayout(path.parent, path.parent.name)
        try:
            data = orjson.loads(path.read_bytes())
            spec, owner = RunSpec.from_json(data["spec"]), int(data["owner"])
        except (OSError, ValueError, KeyError, TypeError, ErgoError):
            continue  # being written, or of another version
        if layout.root in alive or spec.linger or Path(f"/proc/{owner}").exists():
            continue
        with suppress(RunError):  # stays where it is, for whoever looks for it
            bring_home(layout, spec)
            clean(layout)
