"""Applying an overlay's upper directory to its lower one, so that the lower one shows what the overlay showed."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path

from proxy_runtime.checkpoint import sparse
from proxy_runtime.checkpoint.errors import UNSUPPORTED, CheckpointError, from_os_error

_OPAQUE = "trusted.overlay.opaque"
_REFUSED = ("trusted.overlay.redirect", "trusted.overlay.metacopy")


def merge_back(upper: Path, lower: Path) -> None:
    """Applies ``upper`` to ``lower``: changed files replaced atomically, whiteouts and opaque directories obeyed.

    Files keep their hard links among each other, modes, owners, times and user attributes. Nothing outside of
    ``lower`` is touched: a symbolic link in the way is replaced, never followed. Running it again after a failure
    goes on where it ended.

    Args:
        upper: the upper directory, unmounted, of an overlay with ``redirect_dir=off,metacopy=off``.
        lower: the lower directory.

    Raises:
        CheckpointError: a directory was renamed by redirect, or the file system refuses.
    """
    links: dict[tuple[int, int], bytes] = {}
    try:
        _merge_dir(os.fsencode(upper), os.fsencode(lower), links)
    except OSError as error:
        path = os.fsdecode(error.filename) if error.filename else lower
        raise from_os_error(error, "bring the job's files back", path=path) from error


def _merge_dir(upper: bytes, lower: bytes, links: dict[tuple[int, int], bytes]) -> None:
    xattrs = set(os.listxattr(upper, follow_symlinks=False))
    if _OPAQUE in xattrs and os.getxattr(upper, _OPAQUE, follow_symlinks=False) == b"y":
        for name in os.listdir(lower):
            _remove(os.path.join(lower, name))
    for name in sorted(os.listdir(upper)):
        source, target = os.path.join(upper, name), os.path.join(lower, name)
        info = os.lstat(source)
        _check(source)
        if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
            _remove(target)
        elif stat.S_ISDIR(info.st_mode):
            if not _is_dir(target):
                _remove(target)
                os.mkdir(target)
            _merge_dir(source, target, links)
        elif not stat.S_ISSOCK(info.st_mode):
            _replace(source, target, info, links)
    _copy_metadata(upper, lower, os.lstat(upper))


def _replace(source: bytes, target: bytes, info: os.stat_result, links: dict[tuple[int, int], bytes]) -> None:
    scratch = os.path.join(os.path.dirname(target), b".ergo-" + secrets.token_hex(8).encode())
    first = links.setdefault((info.st_dev, info.st_ino), target)
    try:
        if first != target:
            os.link(first, scratch, follow_symlinks=False)
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(source), scratch)
        elif stat.S_ISREG(info.st_mode):
            _copy_file(source, scratch, info.st_size)
        else:
            os.mknod(scratch, info.st_mode, info.st_rdev)
        if first == target:
            _copy_metadata(source, scratch, info)
        if _is_dir(target):
            _remove(target)
        os.replace(scratch, target)
        if first != target and os.path.lexists(scratch):
            os.unlink(scratch)  # rename between two names of one file does nothing
    except BaseException:
        if os.path.lexists(scratch):
            os.unlink(scratch)
        raise


def _copy_file(source: bytes, target: bytes, size: int) -> None:
    read = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        write = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            sparse.copy(read, write, size)
        finally:
            os.close(write)
    finally:
        os.close(read)


def _copy_metadata(source: bytes, target: bytes, info: os.stat_result) -> None:
    if os.geteuid() == 0:
        os.chown(target, info.st_uid, info.st_gid, follow_symlinks=False)
    for name in os.listxattr(source, follow_symlinks=False):
        if not name.startswith("trusted."):
            os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode):
        os.chmod(target, stat.S_IMODE(info.st_mode))
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)


def _check(path: bytes) -> None:
    for name in os.listxattr(path, follow_symlinks=False):
        if name in _REFUSED:
            raise CheckpointError(
                f"{os.fsdecode(path)} was moved or copied by reference ({name}), so the overlay's files cannot be "
                "brought back.",
                code=UNSUPPORTED,
                remedy="Mount the overlay with redirect_dir=off,metacopy=off.",
            )


def _is_dir(path: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _remove(path: bytes) -> None:
    if _is_dir(path):
        shutil.rmtree(path)
    else:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
