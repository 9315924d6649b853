"""The files of a cut: on their way into a store, and at hand for whoever goes on from it on the same node.

    <scratch>/rank-<R>/device/    meta, storages; ring, where the rank had let go of it
    <scratch>/rank-<R>/process/   images of its processes
    <scratch>/packed.json         of each part, once a store has all of it, the hash that a manifest names it by

A rank's images are hundreds of megabytes. Whoever restores them where they were dumped a moment ago links the files
instead of reading them back from the store, hashing them and writing them anew: the hash, which covers every byte, name
and time, says that they are the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import orjson

from model.manifest import PartRef
from proxy_runtime.checkpoint.parts import Part

_PACKED = "packed.json"


def files_of(scratch: Path, part: Part) -> Path:
    """Directory of a rank's part."""
    return scratch / f"rank-{part.rank}" / part.kind


def device_files(scratch: Path, rank: int) -> Path:
    """Directory of a rank's device part."""
    return files_of(scratch, Part.device(rank))


def process_files(scratch: Path, rank: int) -> Path:
    """Directory of a rank's process part."""
    return files_of(scratch, Part.process(rank))


def note_packed(scratch: Path, refs: Mapping[Part, PartRef]) -> None:
    """Says that a store has what is in `scratch`, which is not changed any more."""
    digests = {str(files_of(Path(), part)): ref.digest for part, ref in refs.items() if part.rank is not None}
    fresh = scratch / f"{_PACKED}.new"
    fresh.write_bytes(orjson.dumps(digests))
    fresh.rename(scratch / _PACKED)


class AtHand:
    """Parts of checkpoints that are at hand as files. They may go at any moment.

    Args:
        scratches: directories of cuts; those that are not there, or not packed, have nothing.
    """

    def __init__(self, scratches: Iterable[Path] = ()) -> None:
        self._found: dict[tuple[str, str], Path] = {}
        for scratch in scratches:
            with suppress(OSError, ValueError):
                for name, digest in orjson.loads((scratch / _PACKED).read_bytes()).items():
                    self._found[name, digest] = scratch / name

    def take(self, part: Part, ref: PartRef, dest: Path) -> bool:
        """Links a part's files into `dest`, which is missing or empty. False, and `dest` is missing: they are gone."""
        source = self._found.get((str(files_of(Path(), part)), ref.digest))
        if source is None:
            return False
        try:
            shutil.copytree(source, dest, symlinks=True, copy_function=_link, dirs_exist_ok=True)
        except OSError:  # shutil.Error too: the cut was called off meanwhile
            shutil.rmtree(dest, ignore_errors=True)
            return False
        return True


def _link(source: str, dest: str) -> None:
    os.link(source, dest, follow_symlinks=False)
