"""Errors of the checkpoint store: one class, stable codes."""

from __future__ import annotations

import errno
import os

from proxy_runtime.errors import ErgoError

DAMAGED = "checkpoint.damaged"
MISSING = "checkpoint.missing"
OTHER_BUILD = "checkpoint.other-build"
OTHER_CLASS = "checkpoint.other-class"
NEWER_FORMAT = "checkpoint.newer-format"
NO_SPACE = "checkpoint.no-space"
FENCED = "checkpoint.fenced"
NOT_A_CHECKPOINT = "checkpoint.not-a-checkpoint"
WRONG_KEY = "checkpoint.wrong-key"
BUSY = "checkpoint.busy"
UNSUPPORTED = "checkpoint.unsupported"
IN_USE = "checkpoint.in-use"
IO = "checkpoint.io"


class CheckpointError(ErgoError):
    """A checkpoint cannot be written, read or found. ``code`` is one of this module's constants."""

    code = IO


class FencedError(CheckpointError):
    """A higher epoch has committed: what this one has is void."""

    code = FENCED


def damaged(what: str, expected: object, found: object, *, where: str = "") -> CheckpointError:
    """Something stored is not what was written.

    Args:
        what: the file (and place in it) that is wrong.
        expected: what it should be.
        found: what it is.
        where: what of the checkpoint lies there, e.g. ``pages-1.img in the process part of rank 0``.
    """
    holds = f", which holds {where}," if where else ""
    return CheckpointError(
        f"The checkpoint is damaged: {what}{holds} should be {expected} but is {found}.",
        code=DAMAGED,
        remedy="Restore an earlier checkpoint of the job (`ergo show JOB` lists them) and check the disk.",
    )


def missing(what: str, *, where: str = "") -> CheckpointError:
    """A file that a checkpoint needs is not there."""
    needs = f", needed for {where}" if where else ""
    return CheckpointError(
        f"The checkpoint is incomplete: {what} is missing{needs}.",
        code=MISSING,
        remedy="Put the file back, or restore an earlier checkpoint of the job.",
    )


def newer_format(what: str, version: object, known: int) -> CheckpointError:
    """Written by a later Ergosphere."""
    return CheckpointError(
        f"{what} has format version {version}; this Ergosphere reads up to version {known}.",
        code=NEWER_FORMAT,
        remedy="Install a newer Ergosphere.",
    )


def no_space(path: str | os.PathLike[str], needed: int, free: int | None = None) -> CheckpointError:
    """The disk is full, or would be."""
    has = "" if free is None else f", {free} bytes are free"
    return CheckpointError(
        f"No space for the checkpoint: {os.fspath(path)} needs {needed} more bytes{has}.",
        code=NO_SPACE,
        remedy="Free disk space or choose another checkpoint directory.",
    )


def from_os_error(error: OSError, action: str, *, path: str | os.PathLike[str], needed: int = 0) -> CheckpointError:
    """The one sentence for an error of the operating system while doing ``action``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        if needed:
            return no_space(path, needed)
        words = f"Could not {action}: there is no space left for {os.fspath(path)}."
        return CheckpointError(words, code=NO_SPACE, remedy="Free disk space.")
    return CheckpointError(f"Could not {action}: {os.fspath(path)}: {error.strerror or error}.", code=IO)
