"""Fetches what a job has written, from the fleet's store: a path without the rest. Everything blocks."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cli.fleet import layers
from cli.fleet.layers import Found, Layer
from model.manifest import TreeEntry, encode_path
from proxy_runtime.checkpoint import volume
from proxy_runtime.checkpoint.parts import node_of
from proxy_runtime.storage import volumes

if TYPE_CHECKING:
    from model.ids import CheckpointId
    from model.job_spec import JobSpec
    from proxy_runtime.storage.fleet import FleetStore
    from proxy_runtime.storage.transfers import Progress


class JobDirectory:
    """The directory of a job as it is in a checkpoint: its changes over what it was submitted with.

    Raises:
        StorageError: the checkpoint, or what was submitted, is not in the store.
    """

    def __init__(self, store: FleetStore, spec: JobSpec, checkpoint: CheckpointId) -> None:
        from model.job_spec import UploadedVolume

        self._store, self._tenant = store, spec.tenant
        self._where = {Layer.CHANGED: checkpoint}
        if isinstance(spec.volume, UploadedVolume):
            self._where[Layer.SUBMITTED] = spec.volume.manifest
        lists = {layer: volumes.list_files(store, spec.tenant, id) for layer, id in self._where.items()}
        self._submitted, self._changed = lists.get(Layer.SUBMITTED, ()), lists[Layer.CHANGED]

    def names(self, place: layers.Path) -> list[str]:
        """What is directly in a directory."""
        return layers.names(self._submitted, self._changed, place)

    def fetch(self, place: layers.Path, target: Path, progress: Progress) -> bool:
        """Brings a path to `target`, which is there whole or not at all; False where the job has no such path.

        Raises:
            ErgoError: it cannot be read, or written.
            OSError: the target is taken.
        """
        found = layers.select(self._submitted, self._changed, place)
        if found is None:
            name = os.fsdecode(b"/".join(place)) or "."
            checkpoint, base = self._where[Layer.CHANGED], self._where.get(Layer.SUBMITTED)
            volumes.download(self._store, self._tenant, checkpoint, name, target, base=base, progress=progress)
            return True
        if not found:
            return False
        with _scratch(target) as scratch:
            self._write(found, scratch, progress)
            (scratch / "found").rename(target)
        return True

    def _write(self, found: list[Found], scratch: Path, progress: Progress) -> None:
        """Makes what was found as ``found`` in `scratch`. All of it belongs to who asks; nothing is setuid."""
        entries = [_placed(one) for one in found]
        nodes = [
            replace(node_of(entry), uid=os.geteuid(), gid=os.getegid(), mode=entry.mode & 0o777) for entry in entries
        ]
        volume.create([node for node in nodes if node.kind != "file"], scratch)
        files = [
            (one.layer, entry, scratch / os.fsdecode(node.path))
            for one, entry, node in zip(found, entries, nodes, strict=True)
            if node.kind == "file"
        ]
        total, done = sum(entry.size for _, entry, _ in files), 0
        for layer, checkpoint in self._where.items():
            mine = [(entry, path) for of, entry, path in files if of is layer]
            if mine:
                start = done

                def add(count: int, _: int, start: int = start) -> None:
                    progress(start + count, total)

                volumes.fetch_files(self._store, self._tenant, checkpoint, mine, progress=add)
                done += sum(entry.size for entry, _ in mine)
        volume.finish(nodes, scratch)


def _placed(found: Found) -> TreeEntry:
    user = {key: value for key, value in found.entry.xattrs.items() if key.startswith("user.")}
    path = encode_path(b"/".join((b"found", *found.path)))
    return found.entry.model_copy(update={"path": path, "xattrs": user})


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A directory beside the target, so that the last step is a rename; it never outlives the command."""
    path = target.absolute().parent / f".ergo-download-{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
