"""The files of a job as it saw them: its changes, an overlay's upper layer, over what it was submitted with.

Only lists of files are looked at, so that a path can be fetched without the rest of either layer. The rules are those
of the kernel (Documentation/filesystems/overlayfs.rst): a whiteout hides what is below, an opaque directory all that is
below it, any other directory is joined with the one below, and anything else replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from model.manifest import TreeEntry, decode_path

CHANGES = b"directory"
"""Where in a checkpoint's volume the changes are."""
_OPAQUE, _REDIRECT = "trusted.overlay.opaque", "trusted.overlay.redirect"

Path = tuple[bytes, ...]
Entries = Sequence[TreeEntry]


class Layer(StrEnum):
    """Where a file's bytes are."""

    SUBMITTED = "submitted"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Found:
    """A file-system object of the job's directory.

    Attributes:
        path: relative to what was asked for; empty for that itself.
        entry: of a hard link, what it leads to: each is a file of its own here.
    """

    path: Path
    layer: Layer
    entry: TreeEntry


def select(submitted: Entries, changed: Entries, place: Path) -> list[Found] | None:
    """What is at and below a path, parents first; empty where nothing is.

    Returns:
        None where a directory was renamed that was submitted, so that its files are under another name below: then only
        the layers as a whole tell.
    """
    upper = _below(changed, (CHANGES,))
    lower = _below(submitted, ())
    if any(_REDIRECT in entry.xattrs for entry in upper.values()):
        return None
    found: dict[Path, Found] = {}
    for layer, entries in ((Layer.SUBMITTED, lower), (Layer.CHANGED, upper)):
        for path, entry in entries.items():
            if path[: len(place)] != place or entry.kind == "whiteout":
                continue
            if layer is Layer.SUBMITTED and _hidden(path, upper):
                continue
            target = _target(entry, entries, (CHANGES,) if layer is Layer.CHANGED else ())
            if target is not None:
                found[path] = Found(path[len(place) :], layer, target)
    return [found[path] for path in sorted(found)]


def names(submitted: Entries, changed: Entries, place: Path) -> list[str]:
    """What is directly in a directory, for somebody who has mistaken a name."""
    found = select(submitted, changed, place) or []
    return sorted(one.path[0].decode(errors="replace") for one in found if len(one.path) == 1)


def _below(entries: Entries, root: Path) -> dict[Path, TreeEntry]:
    return {path[len(root) :]: entry for path, entry in _paths(entries) if path[: len(root)] == root}


def _paths(entries: Entries) -> Iterator[tuple[Path, TreeEntry]]:
    for entry in entries:
        yield _split(entry.path), entry


def _split(text: str) -> Path:
    return () if text == "." else tuple(decode_path(text).split(b"/"))


def _hidden(path: Path, upper: Mapping[Path, TreeEntry]) -> bool:
    """Whether the upper layer has something at a submitted path, or above it, that hides it."""
    for length in range(len(path) + 1):
        entry = upper.get(path[:length])
        if entry is None:
            continue
        if entry.kind != "directory" or (length < len(path) and _OPAQUE in entry.xattrs):
            return True
    return False


def _target(entry: TreeEntry, entries: Mapping[Path, TreeEntry], root: Path) -> TreeEntry | None:
    """The entry itself, or the file that a hard link of this layer leads to."""
    if entry.kind != "hardlink":
        return entry
    return entries.get(_split(entry.target or "")[len(root) :])
