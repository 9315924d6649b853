"""Hashes of the store: keyed blake3, each kind of node in a domain of its own.

The key is the tenant's: a plain hash would tell one tenant whether another stores the same bytes.
A chunk's id hashes its content, a file's digest the list of its chunks, a tree's digest its entries,
the root all trees and the header. So a root that is right proves every byte below it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import orjson
from blake3 import blake3

from model.ids import CheckpointId
from model.manifest import Manifest

HASH_BYTES = 32
ZERO_ID = bytes(HASH_BYTES)
CHUNK_REF = struct.Struct("<32sI")
"""One chunk of a file: id (zeros: a hole), length."""


class Hasher:
    """All keyed hashes of one tenant. Thread-safe.

    Args:
        key: 32 secret bytes.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != HASH_BYTES:
            raise ValueError(f"A key has {HASH_BYTES} bytes, this one {len(key)}.")
        self._key = key
        self.key_id = blake3(key, derive_key_context="ergosphere checkpoint key id v1").hexdigest()[:16]

    def chunk(self, data: memoryview | bytes) -> bytes:
        """Id of a chunk (32 bytes)."""
        return blake3(data, key=self._key).digest()

    def node(self, domain: str, *fields: bytes) -> bytes:
        """Merkle node (32 bytes) over fields, each preceded by its length so that none can run into the next."""
        hasher = blake3(key=self._key)
        for field in (b"ergosphere/" + domain.encode(), *fields):
            hasher.update(struct.pack("<Q", len(field)))
            hasher.update(field)
        return hasher.digest()

    def file(self, size: int, refs: bytes) -> str:
        """Digest of a regular file: its size and the packed list of its chunks."""
        return self.node("file", struct.pack("<Q", size), refs).hex()

    def tree(self, data: bytes) -> str:
        """Digest of a tree: its JSON as stored."""
        return self.node("tree", data).hex()

    def root(self, manifest: Manifest) -> CheckpointId:
        """Merkle root of a manifest, over all of it but the field ``root`` itself."""
        identity = manifest.model_dump(mode="json", exclude={"root"})
        root = self.node("root", orjson.dumps(identity, option=orjson.OPT_SORT_KEYS)).hex()
        return CheckpointId("ck-" + root[:40])


def plain(data: bytes) -> str:
    """Unkeyed checksum of a document: tells damage before any key is known."""
    return blake3(data, derive_key_context="ergosphere checksum v1").hexdigest()[:32]


def pack_refs(refs: Iterable[tuple[bytes, int]]) -> bytes:
    """Packs (chunk id, length) pairs."""
    return b"".join(CHUNK_REF.pack(chunk, length) for chunk, length in refs)
