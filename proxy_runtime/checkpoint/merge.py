"""Applying an overlay's upper directory to its lower one, so that the lower one shows what the overlay showed."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from proxy_runtime.checkpoint import sparse
from proxy_runtime.checkpoint.errors import UNSUPPORTED, CheckpointError, from_os_error

_OPAQUE = "trusted.overlay.opaque"
_REDIRECT = "trusted.overlay.redirect"
_METACOPY = "trusted.overlay.metacopy"
_JOURNAL = b".ergo-merge"
_ALL_ASIDE = b"all-aside"


def merge_back(upper: Path, lower: Path) -> None:
    """Applies ``upper`` to ``lower``: changed files replaced atomically, whiteouts and opaque directories obeyed.

    Files keep their hard links among each other, modes, owners, times and user attributes. Directories that the job
    renamed are moved. Mode and owner of ``lower`` itself stay. Nothing outside of ``lower`` is touched: a symbolic
    link in the way is replaced, never followed. After a failure it may be run again until it succeeds, and goes on
    where it ended.

    Args:
        upper: the upper directory, unmounted, of an overlay with ``metacopy=off``.
        lower: the lower directory.

    Raises:
        CheckpointError: a file is there by reference only, or the file system refuses.
    """
    top, bottom = os.fsencode(upper), os.fsencode(lower)
    try:
        redirects: dict[bytes, bytes] = {}
        _find_redirects(top, b"", b"", bottom, redirects)
        journal = os.path.join(bottom, _JOURNAL)
        if redirects:
            _set_aside(bottom, journal, set(redirects.values()))
        aside = {place: os.path.join(journal, source.hex().encode()) for place, source in redirects.items()}
        _Merge(top, bottom, aside).directory(b"")
        if redirects:
            shutil.rmtree(journal)
    except OSError as error:
        path = os.fsdecode(error.filename) if error.filename else lower
        raise from_os_error(error, "bring the job's files back", path=path) from error


def _find_redirects(upper: bytes, path: bytes, origin: bytes | None, lower: bytes, found: dict[bytes, bytes]) -> None:
    """Finds which renamed directories were which directories of the lower layer.

    Args:
        upper: the upper directory.
        path: the directory to look at, in the upper one.
        origin: where its lower part is in the lower directory; None where it has none.
        lower: the lower directory.
        found: gets lower places by upper ones.
    """
    for name in sorted(os.listdir(os.path.join(upper, path))):
        child = os.path.join(path, name)
        full = os.path.join(upper, child)
        if not _is_dir(full):
            continue
        xattrs = os.listxattr(full, follow_symlinks=False)
        below: bytes | None = None
        if _REDIRECT in xattrs:
            value = os.getxattr(full, _REDIRECT, follow_symlinks=False)
            below = value.lstrip(b"/") if value.startswith(b"/") else os.path.join(origin or b"", value)
            if not below or any(part in (b"", b".", b"..") for part in below.split(b"/")):
                raise _refuse(full, _REDIRECT)
            found[child] = below
        elif origin is not None and not _is_opaque(full, xattrs):
            below = os.path.join(origin, name)
        _find_redirects(upper, child, below, lower, found)


def _set_aside(lower: bytes, journal: bytes, sources: set[bytes]) -> None:
    """Moves the lower parts of renamed directories out of the way, inner ones first."""
    os.makedirs(journal, mode=0o700, exist_ok=True)
    if os.path.exists(os.path.join(journal, _ALL_ASIDE)):
        return  # done by a run that failed later; what is at those places now is new
    for source in sorted(sources, key=lambda s: s.count(b"/"), reverse=True):
        parts = source.split(b"/")
        parents = [os.path.join(lower, *parts[:n]) for n in range(1, len(parts) + 1)]
        if all(map(_is_dir, parents)):  # no symbolic link on the way
            os.rename(parents[-1], os.path.join(journal, source.hex().encode()))
    os.close(os.open(os.path.join(journal, _ALL_ASIDE), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


class _Merge:
    """One merge.

    Args:
        upper: the upper directory.
        lower: the lower directory.
        aside: where the lower parts of renamed directories are, by their place in the upper one.
    """

    def __init__(self, upper: bytes, lower: bytes, aside: dict[bytes, bytes]) -> None:
        self._upper = upper
        self._lower = lower
        self._aside = aside
        self._links: dict[tuple[int, int], bytes] = {}

    def directory(self, path: bytes) -> None:
        """Merges one directory, which is one in the lower directory too, with everything below."""
        upper, lower = os.path.join(self._upper, path), os.path.join(self._lower, path)
        if _is_opaque(upper, os.listxattr(upper, follow_symlinks=False)):
            for name in os.listdir(lower):
                if path or name != _JOURNAL:
                    _remove(os.path.join(lower, name))
        for name in sorted(os.listdir(upper)):
            child = os.path.join(path, name)
            source, target = os.path.join(upper, name), os.path.join(lower, name)
            info = os.lstat(source)
            if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
                _remove(target)
            elif stat.S_ISDIR(info.st_mode):
                aside = self._aside.get(child)
                if aside is not None and _is_dir(aside):
                    _remove(target)
                    os.rename(aside, target)
                elif not _is_dir(target):
                    _remove(target)
                    os.mkdir(target)
                self.directory(child)
            elif not stat.S_ISSOCK(info.st_mode):
                if _METACOPY in os.listxattr(source, follow_symlinks=False):
                    raise _refuse(source, _METACOPY)
                _replace(source, target, info, self._links)
        if path:  # the top one is the user's and not the job's to change
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


def _refuse(path: bytes, attribute: str) -> CheckpointError:
    return CheckpointError(
        f"{os.fsdecode(path)} is there by reference only ({attribute}), so the job's files cannot be brought back.",
        code=UNSUPPORTED,
        remedy="Mount the overlay with metacopy=off.",
    )


def _is_opaque(path: bytes, xattrs: Sequence[str]) -> bool:
    return _OPAQUE in xattrs and os.getxattr(path, _OPAQUE, follow_symlinks=False) == b"y"


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
