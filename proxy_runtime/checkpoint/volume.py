"""A directory tree as it is: the volume of a job, which is the upper directory of an overlay.

What an upper directory says by other means than names and bytes is kept: whiteouts (character device 0:0),
opaque directories and the rest of ``trusted.overlay.*``, hard links, holes, owners, modes, times to the
nanosecond. Left out are the attributes by which overlayfs finds inodes again on the file system they came from
(``origin``, ``impure``, ``nlink``, ``uuid``): on another one they would point at strangers. The format is that
of the kernel (Documentation/filesystems/overlayfs.rst). Sockets are left out, as nobody listens there any more.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from model.manifest import EntryKind
from proxy_runtime.checkpoint import sparse
from proxy_runtime.checkpoint.errors import UNSUPPORTED, CheckpointError, from_os_error
from proxy_runtime.checkpoint.merge import merge_back

__all__ = ["Node", "VolumeTree", "apply", "capture", "copy", "create", "finish", "merge_back", "read_node"]

_DROPPED = frozenset(f"trusted.overlay.{name}" for name in ("origin", "impure", "nlink", "uuid"))
_KEPT_PREFIXES = ("user.", "trusted.overlay.", "security.capability", "system.posix_acl_")


@dataclass(frozen=True, slots=True)
class Node:
    """One file-system object; fields as in :class:`model.manifest.TreeEntry`, paths as bytes."""

    path: bytes
    kind: EntryKind
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: dict[str, bytes] = field(default_factory=dict)
    target: bytes | None = None
    size: int = 0


@dataclass(frozen=True, slots=True)
class VolumeTree:
    """What :func:`capture` saw. Parents come before children. The bytes of files are still in ``root``."""

    root: Path
    nodes: tuple[Node, ...]

    @property
    def bytes(self) -> int:
        """Sum of the sizes of the regular files."""
        return sum(node.size for node in self.nodes)


def capture(upper: Path) -> VolumeTree:
    """Lists a directory tree, the directory itself (``.``) first.

    Raises:
        CheckpointError: it cannot be read, or holds a device node.
    """
    root = os.fsencode(upper)
    nodes: list[Node] = []
    links: dict[tuple[int, int], bytes] = {}
    pending = [b""]
    try:
        while pending:
            path = pending.pop()
            info = os.lstat(os.path.join(root, path))
            if stat.S_ISSOCK(info.st_mode):
                continue
            node = read_node(root, path or b".", info)
            if info.st_nlink > 1 and node.kind in ("file", "symlink", "fifo"):
                first = links.setdefault((info.st_dev, info.st_ino), path)
                if first != path:
                    node = Node(path, "hardlink", node.mode, node.uid, node.gid, node.mtime_ns, target=first)
            nodes.append(node)
            if node.kind == "directory":
                names = sorted(os.listdir(os.path.join(root, path)), reverse=True)
                pending += [os.path.join(path, name) for name in names]
    except OSError as error:
        raise from_os_error(error, "read the volume", path=error.filename or upper) from error
    return VolumeTree(upper, tuple(nodes))


def read_node(root: bytes, path: bytes, info: os.stat_result) -> Node:
    """The node of one existing object.

    Raises:
        CheckpointError: a device node or another kind that a checkpoint cannot hold.
    """
    full = os.path.join(root, path)
    kind: EntryKind
    target: bytes | None = None
    size = 0
    if stat.S_ISREG(info.st_mode):
        kind, size = "file", info.st_size
    elif stat.S_ISDIR(info.st_mode):
        kind = "directory"
    elif stat.S_ISLNK(info.st_mode):
        kind, target = "symlink", os.readlink(full)
    elif is_whiteout(info):
        kind = "whiteout"
    elif stat.S_ISFIFO(info.st_mode):
        kind = "fifo"
    else:
        raise CheckpointError(
            f"The volume holds {os.fsdecode(full)}, a device node, which a checkpoint cannot hold.",
            code=UNSUPPORTED,
            remedy="Remove it from the job's directory.",
        )
    return Node(
        path, kind, stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns, _xattrs(full), target, size
    )


def is_whiteout(info: os.stat_result) -> bool:
    """Whether it is what says, in an upper directory, that a name of the lower one is gone."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def apply(tree: VolumeTree, dest: Path) -> None:
    """Makes the tree anew in ``dest``, an empty or missing directory, with the bytes that its root has now.

    Raises:
        CheckpointError: something is in the way, or the file system refuses.
    """
    create(tree.nodes, dest)
    for node in tree.nodes:
        if node.kind == "file" and node.size:
            source = os.fsencode(tree.root)
            try:
                _copy_file(os.path.join(source, node.path), os.path.join(os.fsencode(dest), node.path), node.size)
            except OSError as error:
                path = os.fsdecode(node.path)
                raise from_os_error(error, "copy the volume", path=dest / path, needed=node.size) from error
    finish(tree.nodes, dest)


def copy(upper: Path, dest: Path) -> VolumeTree:
    """Captures and applies at once; for the moment in which a job stands still. Returns the copy's tree."""
    tree = capture(upper)
    apply(tree, dest)
    return VolumeTree(dest, tree.nodes)


def create(nodes: Iterable[Node], dest: Path) -> None:
    """Makes all objects of a tree, regular files at their size but empty; :func:`finish` must follow.

    Raises:
        CheckpointError: something is in the way, or the file system refuses.
    """
    root = os.fsencode(dest)
    path = root
    size = 0
    try:
        os.makedirs(root, exist_ok=True)
        for node in nodes:
            path, size = os.path.join(root, node.path), node.size
            if node.kind == "directory":
                if node.path != b".":
                    os.mkdir(path, 0o700)
            elif node.kind == "file":
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    os.ftruncate(fd, node.size)
                finally:
                    os.close(fd)
            elif node.kind == "symlink":
                os.symlink(node.target or b"", path)
            elif node.kind == "hardlink":
                os.link(os.path.join(root, node.target or b""), path, follow_symlinks=False)
            elif node.kind == "whiteout":
                os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(0, 0))
            else:
                os.mkfifo(path, 0o600)
    except OSError as error:
        raise from_os_error(error, "restore", path=os.fsdecode(path), needed=size) from error


def finish(nodes: Iterable[Node], dest: Path) -> None:
    """Sets owners, modes, attributes and times, children before their directories.

    Raises:
        CheckpointError: the file system refuses.
    """
    root = os.fsencode(dest)
    for node in reversed(list(nodes)):
        if node.kind == "hardlink":
            continue
        path = os.path.join(root, node.path)
        try:
            if os.geteuid() == 0:
                os.chown(path, node.uid, node.gid, follow_symlinks=False)
            for name, value in node.xattrs.items():
                os.setxattr(path, name, value, follow_symlinks=False)
            if node.kind != "symlink":
                os.chmod(path, node.mode)  # after chown, which clears setuid
            os.utime(path, ns=(node.mtime_ns, node.mtime_ns), follow_symlinks=False)
        except OSError as error:
            raise from_os_error(error, "set owner, mode and time", path=os.fsdecode(path)) from error


def _xattrs(path: bytes) -> dict[str, bytes]:
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EPERM):
            return {}
        raise
    kept = sorted(n for n in names if n.startswith(_KEPT_PREFIXES) and n not in _DROPPED)
    return {name: os.getxattr(path, name, follow_symlinks=False) for name in kept}


def _copy_file(source: bytes, target: bytes, size: int) -> None:
    read = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        write = os.open(target, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            sparse.copy(read, write, size)
        finally:
            os.close(write)
    finally:
        os.close(read)
