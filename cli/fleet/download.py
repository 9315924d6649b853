"""`ergo download`: files that a job has written."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from cli.console import say
from cli.fleet.options import AnyJob
from proxy_runtime.errors import ErgoError

if TYPE_CHECKING:
    from cli.fleet.client import Fleet
    from model.control import JobView
    from model.job_spec import JobSpec


def register(app: typer.Typer) -> None:
    """Adds what this file defines to the command line."""
    app.command("download", short_help="Fetch files that a job has written.")(download)


def download(
    job: AnyJob,
    path: Annotated[str, typer.Argument(metavar="PATH", help="In the job directory; . for all of it.")],
    dest: Annotated[
        Path, typer.Argument(metavar="DEST", help="A new file or directory, or a directory to put it into.")
    ],
) -> None:
    """Fetches PATH of JOB's directory: as it was at the job's end, or else at its newest checkpoint."""
    from cli.fleet.client import Fleet, call, interruptible

    place = inside(path)
    target = destination(place, dest)

    async def look(fleet: Fleet) -> tuple[JobView, JobSpec]:
        return await fleet.view(job), await fleet.spec(job)

    view, spec = call(look)
    with interruptible():
        fetch(Fleet.load(), view, spec, place, target)
    say(f"{place} of job {job} is at {target}")


def inside(path: str) -> PurePosixPath:
    """The path within the job directory.

    Raises:
        ErgoError: ``download.path``: it leads out of it.
    """
    place = PurePosixPath(path)
    if place.is_absolute() or ".." in place.parts:
        raise ErgoError(
            f"{path} is not a path within the job directory.",
            code="download.path",
            remedy="Give it relative to that directory, e.g. results/weights.pt.",
        )
    return place


def destination(place: PurePosixPath, dest: Path) -> Path:
    """Where the copy will be: in `dest` where that is a directory, else at it.

    Raises:
        ErgoError: ``download.dest``: something is there, or its parent is not.
    """
    target = dest / place.name if dest.is_dir() and place.name else dest
    if target.exists() or target.is_symlink():
        if target.is_dir() and not any(target.iterdir()):
            return target
        raise ErgoError(f"{target} is there already.", code="download.dest", remedy="Name another place, or remove it.")
    if not target.absolute().parent.is_dir():
        raise ErgoError(f"The directory {target.absolute().parent} does not exist.", code="download.dest")
    return target


def fetch(fleet: Fleet, view: JobView, spec: JobSpec, place: PurePosixPath, target: Path) -> None:
    """Fetches one path.

    Raises:
        ErgoError: ``download.nothing``: no volume is kept yet; ``download.missing``: it has no such path;
            ``download.dest``: it cannot be put there.
    """
    from cli.fleet.progress import transferring
    from cli.fleet.remote import newest_volume
    from cli.fleet.volume import JobDirectory

    checkpoint = newest_volume(fleet, view)
    if checkpoint is None:
        raise ErgoError(
            f"Nothing of job {view.id} is kept yet.",
            code="download.nothing",
            remedy=f"`ergo checkpoint {view.id} --wait` keeps what it has written so far.",
        )
    parts = tuple(part.encode() for part in place.parts)
    directory = JobDirectory(fleet.store, spec, checkpoint)
    try:
        if target.is_dir():
            target.rmdir()  # empty: `destination` has looked
        with transferring(f"fetching {place}") as progress:
            found = directory.fetch(parts, target, progress)
    except OSError as error:
        raise ErgoError(f"{target} cannot be written: {error.strerror}.", code="download.dest") from error
    if not found:
        raise _missing(view, place, directory.names(parts[:-1]))


def _missing(view: JobView, place: PurePosixPath, near: list[str]) -> ErgoError:
    import difflib

    guess = difflib.get_close_matches(place.name, near, 1)
    shown = ", ".join(near[:10]) + (", …" if len(near) > 10 else "")
    hint = f"Did you mean {place.with_name(guess[0])}? " if guess else ""
    remedy = f"{hint}Beside it there are {shown}." if near else "`ergo download JOB . DEST` fetches everything."
    return ErgoError(f"Job {view.id} has no {place}.", code="download.missing", remedy=remedy)
