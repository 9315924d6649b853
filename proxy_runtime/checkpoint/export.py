"""Copying a checkpoint into another store, chunk by chunk, under that store's key."""

from __future__ import annotations

from proxy_runtime.checkpoint.merkle import ZERO_ID
from proxy_runtime.checkpoint.reader import CheckpointReader, describe
from proxy_runtime.checkpoint.writer import CheckpointWriter


def export(checkpoint: CheckpointReader, writer: CheckpointWriter) -> None:
    """Adds all parts of ``checkpoint`` to ``writer``. Every chunk is proved on the way.

    Raises:
        CheckpointError: the source is damaged, or the disk is full.
    """
    copied: dict[bytes, bytes] = {ZERO_ID: ZERO_ID}
    with checkpoint.chunks() as chunks:
        for part in checkpoint.parts():
            for entry in checkpoint.tree_with(chunks, part).entries:
                refs: list[tuple[bytes, int]] = []
                for chunk, length in checkpoint.refs_of(entry, part) if entry.kind == "file" else ():
                    if chunk not in copied:
                        copied[chunk] = writer.put_chunk(chunks.read([(chunk, length)], describe(entry, part)))
                    refs.append((copied[chunk], length))
                writer.add_entry(part, entry, refs)
