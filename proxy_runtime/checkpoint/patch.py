"""Making a job's directory that is in use, by processes that stand still, that of a checkpoint; it can be undone.

A regular file that stays one is written in place, so that who has it open or mapped sees the new bytes, as after a
restore. Whatever else has to go is put aside under another name in its directory, so that it can come back as it was.
All is done through the mount: what becomes of a mounted overlay when somebody writes into its upper directory is
undefined. So what only an upper directory can say (that a directory is opaque, or another one renamed) cannot be
brought, and is refused before anything is touched.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from model.manifest import Tree, TreeEntry, decode_path
from proxy_runtime.checkpoint import sparse, volume
from proxy_runtime.checkpoint.errors import IN_USE, CheckpointError, from_os_error, no_space
from proxy_runtime.checkpoint.files import free_bytes
from proxy_runtime.checkpoint.parts import Part, node_of
from proxy_runtime.checkpoint.reader import CheckpointReader

_OVERLAY = "trusted.overlay."
_OPAQUE = {f"{_OVERLAY}opaque": "eQ=="}


class VolumePatch:
    """One change of a job's directory to that of a checkpoint."""

    def __init__(
        self, reader: CheckpointReader, have: Tree, *, directory: Path, upper: Path, private: Path, journal: Path
    ) -> None:
        """Nothing is done yet.

        Args:
            reader: the checkpoint.
            have: the volume as it was captured here; nobody has run since.
            directory: the job directory, mounted, as we reach it.
            upper: its upper directory, which is only looked at.
            private: what is beside it in the volume; no mount.
            journal: a missing directory, on the file system of `private`, for what is overwritten.
        """
        self._reader = reader
        self._have = {entry.path: entry for entry in have.entries}
        self._tops = {b"directory": os.fsencode(directory), b"private": os.fsencode(private)}
        self._upper = os.fsencode(upper)
        self._journal = journal
        self._back: list[Callable[[], None]] = []  # in reverse, what undoes it
        self._aside: list[bytes] = []
        self._made: set[bytes] = set()  # directories
        self._times: dict[bytes, int] = {}  # of directories that are touched, as they were
        self._new_times: dict[bytes, int] = {}

    def apply(self) -> None:
        """Makes the change: all of it, or nothing.

        Raises:
            CheckpointError: it cannot be made in a directory that is in use (``checkpoint.in-use``); the checkpoint is
                damaged, or the disk is full.
        """
        wanted = {entry.path: entry for entry in self._reader.tree(Part.volume()).entries}
        gone = [path for path in self._have if path not in wanted]
        changed = [entry for path, entry in wanted.items() if not _same(entry, self._have.get(path))]
        if not gone and not changed:
            return
        self._require_possible(gone, changed, wanted)
        self._require_space(changed)
        path = b""
        try:
            self._journal.mkdir(mode=0o700)
            for path in map(decode_path, gone):
                self._put_aside(path)
                if self._hides(path):
                    raise _in_use(os.fsdecode(path), "is again what was submitted")
            for entry in changed:
                path = decode_path(entry.path)
                self._make(entry)
            files = [(entry, Path(os.fsdecode(self._place(decode_path(entry.path))))) for entry in changed
                     if entry.kind == "file"]  # fmt: skip
            self._reader.fill(Part.volume(), files)
            for entry in reversed(changed):
                path = decode_path(entry.path)
                self._finish(entry)
            folders = ((self._place(decode_path(e.path)), e) for e in wanted.values() if _is_folder(e))
            self._new_times = {at: e.mtime_ns for at, e in folders if at in self._times or at in self._made}
            _set_times(self._new_times)
        except BaseException as error:
            self.undo()
            if isinstance(error, OSError):
                where = os.fsdecode(path)
                raise from_os_error(error, "bring files of other nodes into the job's directory", path=where) from error
            raise

    def undo(self) -> None:
        """Makes it what it was. Idempotent; nothing after `close`.

        Raises:
            CheckpointError: something cannot be put back.
        """
        failed: OSError | CheckpointError | None = None
        while self._back:
            try:
                self._back.pop()()
            except (OSError, CheckpointError) as error:  # the rest goes back all the same
                failed = failed or error
        self._aside.clear()
        _set_times(self._times)
        self.close()
        if isinstance(failed, OSError):
            raise from_os_error(failed, "put back the job's directory", path=failed.filename or "it") from failed
        if failed is not None:
            raise failed

    def close(self) -> None:
        """There is no way back from now on; what was put aside is removed, before anybody may see it."""
        self._back.clear()
        for place in self._aside:
            if _is_dir(place):
                shutil.rmtree(place, ignore_errors=True)
            else:
                with suppress(OSError):
                    os.unlink(place)
        if self._aside:
            _set_times(self._new_times)
        self._aside.clear()
        self._times.clear()
        self._new_times.clear()
        shutil.rmtree(self._journal, ignore_errors=True)

    # ------------------------------------------------------------------ what can be done

    def _require_possible(self, gone: list[str], changed: list[TreeEntry], wanted: dict[str, TreeEntry]) -> None:
        for path in gone:
            if self._have[path].kind == "whiteout":
                raise _in_use(path, "was removed here, and has come back")
            if any(entry.kind == "hardlink" and entry.target == path for entry in wanted.values()):
                raise _in_use(path, "is linked otherwise")
        for entry in changed:
            old = self._have.get(entry.path)
            place = self._place(decode_path(entry.path))
            # A directory that is made gets its mark by itself, if it needs one.
            made = not _is_dir(place) and _marks(entry) == _OPAQUE
            if entry.kind == "directory" and _marks(entry) != _marks(old) and not made:
                raise _in_use(entry.path, "hides or renames what was submitted")
            if "hardlink" in (entry.kind, old.kind if old else "") and old is not None:
                raise _in_use(entry.path, "is linked otherwise")
            if entry.kind == "directory" and old is not None and old.kind == "whiteout":
                raise _in_use(entry.path, "hides what was submitted")
            if entry.kind == "whiteout" and (_is_dir(place) or not os.path.lexists(place)):
                raise _in_use(entry.path, "is a directory that was submitted, or nothing, and was removed")

    def _require_space(self, changed: list[TreeEntry]) -> None:
        old = [self._have[entry.path].size for entry in changed if entry.kind == "file" and entry.path in self._have]
        needed = sum(entry.size for entry in changed if entry.kind == "file") + sum(old)
        free = free_bytes(self._journal.parent)
        if free < needed:
            raise no_space(self._journal.parent, needed, free)

    # ------------------------------------------------------------------ changing it

    def _make(self, entry: TreeEntry) -> None:
        path = decode_path(entry.path)
        place = self._place(path)
        if entry.kind == "whiteout":
            self._put_aside(path)
            if not self._hides(path):
                raise _in_use(entry.path, "is not there, and was removed")
            return
        kind = _kind(place)
        if kind == entry.kind and kind in ("directory", "file"):
            self._keep(place)
            if kind == "file":
                self._overwrite(place, entry.size)
            return
        if kind is not None:
            self._put_aside(path)
        self._touch(path)
        node = replace(node_of(entry), path=os.path.basename(place))
        if entry.kind == "hardlink":
            target = self._place(decode_path(entry.target or ""))
            os.link(target, place, follow_symlinks=False)
        else:
            volume.create([node], Path(os.fsdecode(os.path.dirname(place))))
        if entry.kind == "directory":
            self._made.add(place)
        self._back.append(lambda: os.rmdir(place) if entry.kind == "directory" else os.unlink(place))

    def _overwrite(self, place: bytes, size: int) -> None:
        kept = os.fsencode(self._journal / str(len(self._back)))
        length = os.lstat(place).st_size
        _copy(place, kept, length, os.O_CREAT | os.O_EXCL)
        self._back.append(lambda: _copy(kept, place, length, os.O_TRUNC))
        fd = os.open(place, os.O_WRONLY | os.O_NOFOLLOW | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)

    def _keep(self, place: bytes) -> None:
        """Owner, mode, attributes and, of a file, times come back last."""
        old = volume.read_node(os.path.dirname(place), os.path.basename(place), os.lstat(place))
        parent = Path(os.fsdecode(os.path.dirname(place)))
        self._back.append(lambda: _finish(old, parent))
        if old.kind == "directory":
            self._times.setdefault(place, old.mtime_ns)

    def _finish(self, entry: TreeEntry) -> None:
        if entry.kind in ("whiteout", "hardlink"):
            return
        place = self._place(decode_path(entry.path))
        _finish(replace(node_of(entry), path=os.path.basename(place)), Path(os.fsdecode(os.path.dirname(place))))

    def _put_aside(self, path: bytes) -> None:
        place = self._place(path)
        if not os.path.lexists(place):
            return  # with the directory that it was in
        self._touch(path)
        aside = os.path.join(os.path.dirname(place), b".ergo-" + secrets.token_hex(8).encode())
        try:
            os.rename(place, aside)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise _in_use(os.fsdecode(path), "is a directory that was submitted, and was removed") from error
        self._aside.append(aside)
        self._back.append(lambda: os.rename(aside, place))

    def _hides(self, path: bytes) -> bool:
        """Whether something that was submitted is hidden there now."""
        top, _, rest = path.partition(b"/")
        try:
            return top == b"directory" and volume.is_whiteout(os.lstat(os.path.join(self._upper, rest)))
        except FileNotFoundError:
            return False

    def _touch(self, path: bytes) -> None:
        """The time of the directory that it is in changes."""
        parent = os.path.dirname(self._place(path))
        if parent not in self._made:
            self._times.setdefault(parent, os.lstat(parent).st_mtime_ns)

    def _place(self, path: bytes) -> bytes:
        """Where an entry is.

        Raises:
            CheckpointError: a symbolic link is on the way, or it is none of the volume's two directories.
        """
        top, _, rest = path.partition(b"/")
        if top not in self._tops:
            raise _in_use(os.fsdecode(path), "is beside the job's directory")
        place = self._tops[top]
        for name in filter(None, rest.split(b"/")):
            if place != self._tops[top] and os.path.islink(place):
                raise _in_use(os.fsdecode(path), "is behind a symbolic link")
            place = os.path.join(place, name)
        return place


def _is_folder(entry: TreeEntry) -> bool:
    return entry.kind == "directory" and entry.path != "."


def _same(entry: TreeEntry, old: TreeEntry | None) -> bool:
    """Times of directories say when something was removed from them, and are no difference; nor is the root's own."""
    if entry.path == ".":
        return True
    if old is not None and entry.kind == "directory":
        return entry.model_copy(update={"mtime_ns": 0}) == old.model_copy(update={"mtime_ns": 0})
    if old is not None and entry.kind == "whiteout":
        return old.kind == "whiteout"
    return entry == old


def _marks(entry: TreeEntry | None) -> dict[str, str]:
    found = entry.xattrs if entry is not None else {}
    return {name: value for name, value in found.items() if name.startswith(_OVERLAY)}


def _kind(place: bytes) -> str | None:
    try:
        mode = os.lstat(place).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    return "directory" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def _is_dir(place: bytes) -> bool:
    return _kind(place) == "directory"


def _finish(node: volume.Node, parent: Path) -> None:
    """Owner, mode, attributes and time, of which those that only the overlay may set are its own."""
    mine = {name: value for name, value in node.xattrs.items() if not name.startswith(_OVERLAY)}
    place = os.path.join(os.fsencode(parent), node.path)
    with suppress(OSError):
        for name in os.listxattr(place, follow_symlinks=False):
            if name.startswith(("user.", "security.capability", "system.posix_acl_")) and name not in mine:
                os.removexattr(place, name, follow_symlinks=False)
    volume.finish([replace(node, xattrs=mine)], parent)


def _copy(source: bytes, target: bytes, size: int, flags: int) -> None:
    read = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        write = os.open(target, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
        try:
            sparse.copy(read, write, size)
        finally:
            os.close(write)
    finally:
        os.close(read)


def _set_times(times: dict[bytes, int]) -> None:
    for place in sorted(times, reverse=True):
        with suppress(FileNotFoundError, NotADirectoryError):
            os.utime(place, ns=(times[place], times[place]), follow_symlinks=False)


def _in_use(path: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"The files of other nodes cannot be brought into the job's directory while it is in use: {path} {why}.",
        code=IN_USE,
        remedy="All ranks are restored instead.",
    )
