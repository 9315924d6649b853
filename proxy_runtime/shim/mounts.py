"""The shim's own mount namespace and the overlay of the job directory in it.

All ranks of a job on a node share one overlay (two overlays on one upper directory are undefined
behaviour); it lives in the shim's private mount namespace, so it is gone when the shim is, however it ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from proxy_runtime.shim.spec import RunError

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_MNT_DETACH = 2


def enter_private_namespace() -> None:
    """Gives this process mounts of its own. To be called while it has one thread.

    Raises:
        RunError: not permitted (`run.not-root`).
    """
    if _libc.unshare(_CLONE_NEWNS) != 0 or _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
        number = ctypes.get_errno()
        raise RunError(
            f"cannot make a mount namespace: {os.strerror(number)}.",
            code="run.not-root" if number == errno.EPERM else "run.namespace",
            remedy="Run ergo as root (CAP_SYS_ADMIN).",
        )


def mount_overlay(lower: Path, upper: Path, work: Path, target: Path) -> None:
    """Mounts the job directory: `lower` as it was at submission, `upper` what the job changed.

    Raises:
        RunError: overlayfs refused (`run.overlay`), with the paths.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in (lower, upper, work):
        if any(char in str(path) for char in ",:\\"):
            raise RunError(
                f"the path {path} contains a comma, colon or backslash, which overlayfs cannot take.",
                code="run.overlay",
                remedy="Run the job from a directory without these characters.",
            )
    options = f"lowerdir={lower},upperdir={upper},workdir={work}".encode()
    if _libc.mount(b"overlay", os.fsencode(target), b"overlay", 0, options) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise RunError(
            f"cannot mount the job directory {lower} as an overlay at {target}: {reason}.",
            code="run.overlay",
            remedy="`ergo doctor` says whether this kernel has overlayfs; ERGO_HOME must not lie on an overlay or inside the job directory.",
        )


def unmount(target: Path) -> None:
    """Detaches a mount; what still uses it goes on. Not mounted: nothing happens."""
    _libc.umount2(os.fsencode(target), _MNT_DETACH)
