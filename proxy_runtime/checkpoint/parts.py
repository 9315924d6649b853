"""Names of the parts of a checkpoint, and trees built up file by file."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Literal, Self

import orjson
from pydantic import ValidationError

from model.manifest import PartRef, Tree, TreeEntry, decode_path, encode_path
from proxy_runtime.checkpoint.errors import NOT_A_CHECKPOINT, CheckpointError, damaged, newer_format
from proxy_runtime.checkpoint.merkle import Hasher
from proxy_runtime.checkpoint.volume import Node


@dataclass(frozen=True, slots=True)
class Part:
    """One part: the process or device part of a rank, or the job's volume."""

    kind: Literal["process", "device", "volume"]
    rank: int | None = None

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.kind == "volume"):
            raise ValueError(f"A {self.kind} part {'needs a' if self.rank is None else 'has no'} rank.")

    @classmethod
    def process(cls, rank: int) -> Self:
        """The CRIU images of a rank."""
        return cls("process", rank)

    @classmethod
    def device(cls, rank: int) -> Self:
        """The device dump of a rank: meta and storages."""
        return cls("device", rank)

    @classmethod
    def volume(cls) -> Self:
        """The upper directory of the job's overlay."""
        return cls("volume")

    def __str__(self) -> str:
        return "the volume" if self.rank is None else f"the {self.kind} part of rank {self.rank}"


class TreeBuilder:
    """Entries of one part, in the order they came, directories in between filled in."""

    def __init__(self) -> None:
        self._entries: dict[str, TreeEntry] = {}

    def add(self, entry: TreeEntry) -> None:
        """Adds an entry.

        Raises:
            ValueError: its path is there already.
        """
        if entry.path in self._entries:
            raise ValueError(f"{entry.path!r} was added twice.")
        raw = decode_path(entry.path)
        at = -1
        while (at := raw.find(b"/", at + 1)) >= 0:
            parent = encode_path(raw[:at])
            if parent not in self._entries:
                self._entries[parent] = TreeEntry(path=parent, kind="directory", mode=0o755)
        self._entries[entry.path] = entry

    def get(self, path: str) -> TreeEntry | None:
        """An entry that was added."""
        return self._entries.get(path)

    def build(self) -> Tree:
        """The tree.

        Raises:
            pydantic.ValidationError: the entries contradict each other.
        """
        return Tree(entries=tuple(self._entries.values()))


def entry_of(node: Node, *, digest: str | None = None, refs: bytes = b"") -> TreeEntry:
    """The entry of a captured node; a regular file needs its digest and packed chunk list."""
    return TreeEntry(
        path=encode_path(node.path),
        kind=node.kind,
        mode=node.mode,
        uid=node.uid,
        gid=node.gid,
        mtime_ns=node.mtime_ns,
        xattrs={name: base64.b64encode(value).decode() for name, value in node.xattrs.items()},
        target=None if node.target is None else encode_path(node.target),
        size=node.size,
        digest=digest,
        chunks=base64.b64encode(refs).decode(),
    )


def node_of(entry: TreeEntry) -> Node:
    """The node that an entry describes."""
    return Node(
        path=decode_path(entry.path),
        kind=entry.kind,
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        mtime_ns=entry.mtime_ns,
        xattrs={name: base64.b64decode(value) for name, value in entry.xattrs.items()},
        target=None if entry.target is None else decode_path(entry.target),
        size=entry.size,
    )


def parse_tree(ref: PartRef, data: bytes, hasher: Hasher, where: str = "the list of files of a part") -> Tree:
    """The entries of a part from the bytes of its chunks, proved.

    Raises:
        CheckpointError: they are not what the reference says.
    """
    found = hasher.tree(data)
    if found != ref.digest or len(data) != ref.tree_bytes:
        raise damaged(where, f"of hash {ref.digest[:16]}", found[:16])
    document = orjson.loads(data)
    if document.get("version") != 1:
        raise newer_format(where, document.get("version"), 1)
    try:
        return Tree.model_validate(document)
    except ValidationError as error:
        raise CheckpointError(f"{where} is not valid: {error}", code=NOT_A_CHECKPOINT) from None
