"""Garbage collection by reachability: what no kept checkpoint needs goes."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Collection
from dataclasses import dataclass

from model.ids import CheckpointId, JobId
from proxy_runtime.checkpoint import locks
from proxy_runtime.checkpoint.chunkreader import ChunkReader
from proxy_runtime.checkpoint.errors import CheckpointError
from proxy_runtime.checkpoint.layout import Layout
from proxy_runtime.checkpoint.merkle import CHUNK_REF, ZERO_ID
from proxy_runtime.checkpoint.pack import SUSPECT_SUFFIX, TARGET_BYTES, Location, PackWriter
from proxy_runtime.checkpoint.reader import CheckpointReader

_REPACK_BELOW = 0.5
"""A pack of which less than this share of bytes is needed is copied to a new one."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did.

    Attributes:
        checkpoints: manifests removed, never committed ones included.
        packs: packs removed.
        freed_bytes: size of the removed packs minus that of the new ones.
    """

    checkpoints: int
    packs: int
    freed_bytes: int


def collect(layout: Layout, keep: Collection[CheckpointId], last: int, deadline_s: float) -> Collected:
    """See :meth:`Store.gc`."""
    with locks.held(layout.lock, shared=False, deadline_s=deadline_s):
        kept, dropped = _choose(layout, keep, last)
        for scratch in layout.leftovers():
            layout.files.unlink(scratch)
        layout.index.refresh()
        live = _reachable(layout, kept)
        doomed = set(layout.index.broken)
        moving: list[tuple[bytes, Location]] = []
        for pack, chunks in layout.index.packs().items():
            needed = [(c, at) for c, at in chunks if c in live]
            total = layout.index.path(pack).stat().st_size
            if sum(at.stored for _, at in needed) < total * _REPACK_BELOW:
                doomed.add(pack)
                moving += needed
        before = sum(layout.index.path(pack).stat().st_size for pack in doomed)
        packs, added = _repack(layout, moving)
        # A collection that crashed here may have made the very same pack, and the index known the old one.
        doomed -= packs
        # Only now, when everything needed is durable elsewhere. A crash in between leaves more, never less.
        for job, checkpoint in dropped:
            layout.files.unlink(layout.manifest(job, checkpoint))
        for folder in {layout.manifest(job, checkpoint).parent for job, checkpoint in dropped}:
            layout.files.sync_dir(folder)
        for pack in doomed:
            layout.files.unlink(layout.index.path(pack))
            layout.files.unlink(layout.index.path(pack).with_suffix(SUSPECT_SUFFIX))
        layout.files.sync_dir(layout.packs)
        layout.index.refresh()
    return Collected(len(dropped), len(doomed), before - added)


def committed(layout: Layout, job: JobId) -> list[CheckpointId]:
    """The committed checkpoints of a job that are still there, newest first: HEAD and its ancestors."""
    head = layout.read_head(job)
    present = set(layout.manifests(job))
    chain: list[CheckpointId] = []
    at = head.checkpoint if head else None
    while at is not None and at not in chain and (at in present or not chain):
        chain.append(at)
        at = layout.read_manifest(job, at).header.parent
    return chain


def _choose(
    layout: Layout, keep: Collection[CheckpointId], last: int
) -> tuple[list[tuple[JobId, CheckpointId]], list[tuple[JobId, CheckpointId]]]:
    kept: list[tuple[JobId, CheckpointId]] = []
    dropped: list[tuple[JobId, CheckpointId]] = []
    for job in layout.jobs():
        chosen = set(committed(layout, job)[: max(last, 1)]) | set(keep)
        for checkpoint in layout.manifests(job):
            (kept if checkpoint in chosen else dropped).append((job, checkpoint))
    return kept, dropped


def _reachable(layout: Layout, kept: Collection[tuple[JobId, CheckpointId]]) -> set[bytes]:
    live: set[bytes] = set()
    for job, checkpoint in kept:
        manifest = layout.read_manifest(job, checkpoint)
        reader = CheckpointReader(layout, manifest)
        with ChunkReader(layout.index, layout.hasher, manifest.packs) as chunks:
            for part, ref in reader.refs().items():
                live.update(bytes.fromhex(chunk) for chunk in ref.chunks)
                for entry in reader.tree_with(chunks, part).entries:
                    live.update(c for c, _ in CHUNK_REF.iter_unpack(base64.b64decode(entry.chunks)))
    live.discard(ZERO_ID)
    for chunk in live:
        if layout.index.get(chunk) is None:
            raise CheckpointError(
                f"Nothing was collected: chunk {chunk.hex()[:12]} of a checkpoint to be kept is missing or its pack is "
                "damaged.",
                code="checkpoint.damaged",
                remedy="Verify the checkpoints; the sentence for the one concerned names the file.",
            )
    return live


def _repack(layout: Layout, moving: list[tuple[bytes, Location]]) -> tuple[set[str], int]:
    """Copies chunks, proved, to new packs. Returns their ids and the bytes written."""
    packs: set[str] = set()
    added = 0
    pack: PackWriter | None = None
    moving.sort(key=lambda item: (item[1].pack, item[1].offset))
    try:
        with ChunkReader(layout.index, layout.hasher) as chunks:
            for at, (chunk, location) in enumerate(moving, 1):
                data = chunks.read([(chunk, location.length)], "repacking")
                if pack is None:
                    pack = PackWriter(layout.writing / secrets.token_hex(8), layout.hasher, layout.files)
                item = [(chunk, data, location.length)]
                pack.write(item, pack.reserve(item))
                if pack.size >= TARGET_BYTES or at == len(moving):
                    added += pack.size
                    packs.add(pack.seal(layout.packs)[0])
                    pack = None
    finally:
        if pack is not None:
            pack.close()
    layout.files.sync_dir(layout.packs)
    return packs, added
