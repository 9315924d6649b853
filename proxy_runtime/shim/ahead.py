"""Files of ranks that come to a node, brought while they still run elsewhere.

They are of an earlier checkpoint than the one that the ranks will be restored from. A process's image is as long as the
one before, and most pages are what they were: when the ranks stand, only the rest is read and written.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from model.manifest import Tree
from proxy_runtime.checkpoint.parts import Part
from proxy_runtime.checkpoint.reader import CheckpointReader, Earlier
from proxy_runtime.cut.dumped import files_of


def bring(reader: CheckpointReader, ranks: Collection[int], scratch: Path) -> None:
    """Makes the files of some ranks in `scratch`.

    Raises:
        CheckpointError: the checkpoint is damaged, or the disk is full. What is there by then can be used.
    """
    for part in reader.parts():
        if part.rank in ranks:
            dest = files_of(scratch, part)
            reader.restore_part(part, dest)
            # Last, so that a part which has it is whole.
            _tree(dest).write_text(reader.tree(part).model_dump_json())


def earlier(scratch: Path, part: Part) -> Earlier | None:
    """What `bring` has made of a part."""
    directory = files_of(scratch, part)
    with suppress(OSError, ValueError):
        return Earlier(directory, Tree.model_validate_json(_tree(directory).read_bytes()))
    return None


def _tree(directory: Path) -> Path:
    return directory.with_suffix(".tree")
