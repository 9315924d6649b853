"""Errors of the fleet's store: one class, stable codes."""

from __future__ import annotations

import errno

from obstore import exceptions

from model.runtime import RuntimeCode
from proxy_runtime.errors import ErgoError

FULL = "storage.full"
PERMISSION = "storage.permission"
UNREACHABLE = "storage.unreachable"
ADDRESS = "storage.address"
DAMAGED = "storage.damaged"
MISSING = "storage.missing"
BUSY = "storage.busy"
KEY = "storage.key"


class StorageError(ErgoError):
    """The fleet's store, or another node's, could not do what was asked. ``code`` is one of this module's constants."""

    code = UNREACHABLE


class Fenced(ErgoError):
    """Whoever asked is out of date: a higher epoch, incarnation or another run of the workflow counts now."""

    code = str(RuntimeCode.FENCED)

    def __init__(self, message: str) -> None:
        super().__init__(message, remedy="End what this one has; another one has taken over.")


def from_os_error(error: OSError, action: str, where: str) -> StorageError:
    """The one sentence for an error of the operating system while doing ``action`` at ``where``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"Could not {action}: the disk of {where} is full.", code=FULL, remedy="Free disk space there."
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorageError(
            f"Could not {action}: {where} refuses access ({error.strerror}).",
            code=PERMISSION,
            remedy="Give the user of this process the right to read and write there.",
        )
    return StorageError(f"Could not {action}: {where}: {error.strerror or error}.")


def from_store_error(error: Exception, action: str, where: str) -> StorageError:
    """The one sentence for an error of an object store while doing ``action`` at ``where``."""
    if isinstance(error, OSError):
        return from_os_error(error, action, where)
    first = str(error).split("\n")[0]
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return StorageError(
            f"Could not {action}: {where} refuses the credentials ({first}).",
            code=PERMISSION,
            remedy="Check the credentials in the environment, and what they may do in the bucket.",
        )
    return StorageError(
        f"Could not {action}: {where} does not answer ({first}).",
        remedy="Check the address of the store and the network; the call may be repeated.",
    )


def damaged(what: str, why: str) -> StorageError:
    """Something stored cannot be read as it was written."""
    return StorageError(f"{what} is damaged: {why}.", code=DAMAGED, remedy="Check the disk of the store.")


def missing(what: str, where: str) -> StorageError:
    """Something that must be there is not."""
    return StorageError(f"{what} is not in {where}.", code=MISSING)
