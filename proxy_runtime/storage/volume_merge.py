"""Joining the volumes of a job's nodes: a three-way merge against the volume that the epoch began with.

A volume is the upper layer of an overlay, and is merged as such: a whiteout is something that a node has put there.
Who has changed or removed something since then wins; of two who did so differently the later one, with a warning. Times
of directories say when something was removed from them; otherwise they are no change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from model.manifest import Tree, TreeEntry, decode_path

_LOGS = (b"private", b"logs")
_OVERLAY = "trusted.overlay."

Path = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """The volume of the whole job, and a sentence for everything that two nodes have changed differently."""

    tree: Tree
    warnings: tuple[str, ...]


def merge(base: Tree | None, trees: Mapping[str, Tree]) -> Merged:
    """Joins the volumes of nodes.

    Args:
        base: the volume that all of them began with; None for an empty one.
        trees: by node; at least one. The result does not depend on their order.
    """
    merging = _Merging(_grow(base), {node: _grow(trees[node]) for node in sorted(trees)})
    out: dict[Path, _Node] = {}
    merging.place((), merging.base, merging.nodes, out)
    return Merged(Tree(entries=tuple(_entries(out))), tuple(merging.warnings))


@dataclass(slots=True)
class _Node:
    """A file-system object with what is below it.

    Attributes:
        entry: None for a directory that no entry names.
        key: what is compared: the entry without the time of a directory, and of a hard link what it leads to.
    """

    entry: TreeEntry | None = None
    key: TreeEntry | None = None
    children: dict[bytes, _Node] = field(default_factory=dict)

    @property
    def is_dir(self) -> bool:
        return self.entry is None or self.entry.kind == "directory"

    @property
    def time(self) -> int:
        return 0 if self.entry is None else self.entry.mtime_ns

    def same(self, other: _Node | None) -> bool:
        """Whether nothing at or below here is different."""
        if other is None or self.is_dir != other.is_dir or self.key != other.key:
            return False
        return self.children.keys() == other.children.keys() and all(
            child.same(other.children[name]) for name, child in self.children.items()
        )


def _grow(tree: Tree | None) -> _Node:
    root = _Node()
    by_path = {entry.path: entry for entry in tree.entries} if tree is not None else {}
    for entry in by_path.values():
        at = root
        for part in decode_path(entry.path).split(b"/") if entry.path != "." else ():
            at = at.children.setdefault(part, _Node())
        at.entry = at.key = entry
        if entry.kind == "hardlink":
            at.key = by_path[entry.target or ""].model_copy(update={"path": entry.path})
        elif entry.kind == "directory":
            at.key = entry.model_copy(update={"mtime_ns": 0})
    return root


class _Merging:
    def __init__(self, base: _Node, nodes: Mapping[str, _Node]) -> None:
        self.base = base
        self.nodes = dict(nodes)
        self.warnings: list[str] = []

    def place(self, path: Path, base: _Node | None, nodes: Mapping[str, _Node | None], out: dict[Path, _Node]) -> None:
        """Decides about a path and everything below it."""
        changed = {n: at for n, at in nodes.items() if not (base is None if at is None else at.same(base))}
        if len(changed) < 2:
            _emit(path, next(iter(changed.values())) if changed else base, out)
            return
        folders = {n: at for n, at in changed.items() if at is not None and at.is_dir}
        if len(folders) < len(changed):
            others = {n: at for n, at in changed.items() if n not in folders}
            winner = self._latest(path, base, changed, warn=bool(folders) or not _agree(others))
            if winner not in folders:
                _emit(path, changed[winner], out)
                return
        self._directory(path, base, folders, out)

    def _directory(self, path: Path, base: _Node | None, folders: Mapping[str, _Node], out: dict[Path, _Node]) -> None:
        entry = self._metadata(path, base, folders)
        if entry is not None:
            out[path] = _Node(entry, entry)
        below = base.children if base is not None and base.is_dir else {}
        names = set(below).union(*(at.children for at in folders.values()))
        for name in sorted(names):
            children = {n: at.children.get(name) for n, at in folders.items()}
            self.place((*path, name), below.get(name), children, out)

    def _metadata(self, path: Path, base: _Node | None, folders: Mapping[str, _Node]) -> TreeEntry | None:
        """Mode, owner and attributes of a directory: of who changed them; its time is the latest."""
        before = base.key if base is not None and base.is_dir else None
        named = {n: at for n, at in folders.items() if at.entry is not None}
        if not named:
            return None
        changed = {n: at for n, at in named.items() if at.key != before} or named
        if not _agree(changed) and before is not None:
            self._warn(path, changed, max(changed, key=lambda n: (changed[n].time, n)))
        winner = changed[max(changed, key=lambda n: (changed[n].time, n))].entry
        assert winner is not None
        # An opaque or renamed directory hides what is below it in the job's own directory: whoever made it so meant it.
        marks = {
            k: v for at in changed.values() if at.entry for k, v in at.entry.xattrs.items() if k.startswith(_OVERLAY)
        }
        update = {"xattrs": winner.xattrs | marks, "mtime_ns": max(at.time for at in named.values())}
        return winner.model_copy(update=update)

    def _latest(self, path: Path, base: _Node | None, changed: Mapping[str, _Node | None], *, warn: bool) -> str:
        if path[: len(_LOGS)] == _LOGS and all(at is not None for at in changed.values()):
            # A rank is on one node, which has the longest of its logs; empty ones elsewhere say nothing.
            return max(changed, key=lambda n: (_size(changed[n]), self._when(path, n, base, changed[n]), n))
        winner = max(changed, key=lambda n: (self._when(path, n, base, changed[n]), n))
        if warn:
            self._warn(path, changed, winner)
        return winner

    def _when(self, path: Path, node: str, base: _Node | None, at: _Node | None) -> int:
        """When a node has changed what is here. Whiteouts share one inode, whose time says nothing."""
        if at is None or (at.entry is not None and at.entry.kind == "whiteout"):
            return self._removed(path, node)
        if not at.is_dir:
            return at.time
        old = base.children if base is not None and base.is_dir else {}
        below = [(name, child) for name, child in at.children.items() if not child.same(old.get(name))]
        return max(at.time, *(self._when((*path, n), node, old.get(n), c) for n, c in below), 0)

    def _removed(self, path: Path, node: str) -> int:
        at, time = self.nodes[node], 0
        for part in path[:-1]:
            time = at.time or time
            if part not in at.children:
                return time
            at = at.children[part]
        return at.time or time

    def _warn(self, path: Path, changed: Mapping[str, object], winner: str) -> None:
        name = b"/".join(path).decode(errors="replace") or "."
        self.warnings.append(
            f"{name} was changed on {' and '.join(changed)} in different ways: that of {winner}, the latest, counts."
        )


def _emit(path: Path, at: _Node | None, out: dict[Path, _Node]) -> None:
    if at is None:
        return
    if at.entry is not None:
        out[path] = at
    for name, child in at.children.items():
        _emit((*path, name), child, out)


def _entries(out: Mapping[Path, _Node]) -> Iterator[TreeEntry]:
    """Entries in order; a hard link whose target has become another one is a file of its own."""
    for path in sorted(out):
        entry, key = out[path].entry, out[path].key
        assert entry is not None
        assert key is not None
        if entry.kind == "hardlink":
            target = out.get(tuple(decode_path(entry.target or "").split(b"/")))
            found = target.entry if target is not None else None
            if found is None or found.model_copy(update={"path": key.path}) != key:
                entry = key
        yield entry


def _agree(nodes: Mapping[str, _Node | None]) -> bool:
    """Whether all have the same there, whatever its time."""
    keys = [
        None if at is None or at.key is None else at.key.model_copy(update={"mtime_ns": 0}) for at in nodes.values()
    ]
    return all(key == keys[0] for key in keys)


def _size(at: _Node | None) -> int:
    return 0 if at is None or at.entry is None else at.entry.size
