"""One checkpoint to restore from, verify or copy."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from model.ids import CheckpointId
from model.manifest import Manifest, NumericsClass, PartRef, Tree, TreeEntry, encode_path
from proxy_runtime.checkpoint import locks, volume
from proxy_runtime.checkpoint.chunkreader import ChunkReader, Wanted, free_path, workers
from proxy_runtime.checkpoint.errors import (
    OTHER_BUILD,
    OTHER_CLASS,
    CheckpointError,
    damaged,
    from_os_error,
    missing,
    no_space,
)
from proxy_runtime.checkpoint.files import Files, free_bytes
from proxy_runtime.checkpoint.layout import Layout
from proxy_runtime.checkpoint.merkle import CHUNK_REF, ZERO_ID
from proxy_runtime.checkpoint.pack import Location
from proxy_runtime.checkpoint.parts import Part, node_of, parse_tree

_FILES = Files()
_ZEROS = bytes(1 << 20)


@dataclass(frozen=True, slots=True)
class Verified:
    """What :meth:`CheckpointReader.verify` has read and proved.

    Attributes:
        files: regular files of all parts.
        chunks: distinct chunks.
        bytes: length of those chunks.
    """

    files: int
    chunks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Earlier:
    """Files that :meth:`CheckpointReader.restore_part` has made of an earlier checkpoint's part, and what they hold."""

    directory: Path
    tree: Tree


class CheckpointReader:
    """A checkpoint whose manifest is proved. Made by :meth:`Store.read`; holds nothing open between calls.

    Attributes:
        manifest: the manifest.
    """

    def __init__(self, layout: Layout, manifest: Manifest) -> None:
        self.manifest = manifest
        self._layout = layout

    @property
    def id(self) -> CheckpointId:
        """The checkpoint's id."""
        return self.manifest.root

    def parts(self) -> list[Part]:
        """The parts it has."""
        return list(self.refs())

    def require(
        self,
        *,
        build_id: str | None = None,
        numerics: NumericsClass | None = None,
        cpu_features: Sequence[str] | None = None,
    ) -> None:
        """Checks that the checkpoint can be continued here; what is None is not checked.

        Args:
            build_id: the build that would restore it.
            numerics: the class it would run in.
            cpu_features: what this host's processor has.

        Raises:
            CheckpointError: made by another build, or for another class of host.
        """
        header = self.manifest.header
        if build_id is not None and header.build_id != build_id:
            raise CheckpointError(
                f"Checkpoint {self.id[:15]} of job {self.manifest.job} was made by build {header.build_id}; this is "
                f"build {build_id}.",
                code=OTHER_BUILD,
                remedy=f"Restore it with the build {header.build_id}, whose files its process images map.",
            )
        if numerics is not None and (differs := _difference(header.numerics, numerics)):
            raise CheckpointError(
                f"Checkpoint {self.id[:15]} of job {self.manifest.job} needs another numerics class: {differs}.",
                code=OTHER_CLASS,
                remedy="Restore it on a device of its class, or ask for the change of class by name.",
            )
        if cpu_features is not None and (lacks := sorted(set(header.host.cpu_features) - set(cpu_features))):
            raise CheckpointError(
                f"Checkpoint {self.id[:15]} of job {self.manifest.job} uses processor features that this host lacks: "
                f"{', '.join(lacks)}.",
                code=OTHER_CLASS,
                remedy="Restore it on a host that has them.",
            )

    def tree(self, part: Part) -> Tree:
        """The proved entries of a part.

        Raises:
            CheckpointError: the checkpoint has no such part, or it is damaged.
        """
        with self.chunks() as chunks:
            return self.tree_with(chunks, part)

    def read_file(self, part: Part, name: str) -> bytes:
        """The proved content of one regular file of a part.

        Raises:
            CheckpointError: there is no such file, or it is damaged.
        """
        with self.chunks() as chunks:
            entry = next(
                (e for e in self.tree_with(chunks, part).entries if e.path == encode_path(name.encode())), None
            )
            if entry is None or entry.kind != "file":
                raise missing(f"{name} in {part}", where=self._name())
            return b"".join(
                bytes(length) if chunk == ZERO_ID else chunks.read([(chunk, length)], describe(entry, part))
                for chunk, length in self.refs_of(entry, part)
            )

    def restore_part(self, part: Part, dest: Path, earlier: Earlier | None = None) -> None:
        """Writes a part's files into ``dest``, an empty or missing directory, proved and with their holes.

        On an error the files that were made are removed again.

        Args:
            part: the part.
            dest: on the file system of ``earlier``.
            earlier: its files are taken where those of the part have the same names, and only what is different in
                them is read and written. They are proved already, and nobody has written to them since.

        Raises:
            CheckpointError: the part is damaged or not there, the disk is full, or something is in the way.
        """
        with self.chunks() as chunks:
            entries = self.tree_with(chunks, part).entries
            files = [e for e in entries if e.kind == "file"]
            needed = sum(length for e in files for chunk, length in self.refs_of(e, part) if chunk != ZERO_ID)
            if (free := free_bytes(free_path(dest))) < needed:
                raise no_space(dest, needed, free)
            if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
                raise CheckpointError(f"{part} is to be restored to {dest}, which is not an empty directory.")
            nodes = [node_of(e) for e in entries]
            try:
                volume.create(nodes, dest)
                linked = {e.target for e in entries if e.kind == "hardlink"}
                held = _Held(earlier, dest, linked) if earlier else None
                root = os.fsencode(dest)
                self._fill(chunks, part, [(e, os.path.join(root, node_of(e).path)) for e in files], held)
                volume.finish(nodes, dest)
            except BaseException:
                _clear(dest)
                raise

    def fill(self, part: Part, files: Iterable[tuple[TreeEntry, Path]]) -> None:
        """Writes the proved contents of regular files of a part into files that are there, at their size and empty.

        Raises:
            CheckpointError: the part is damaged, or the disk is full.
        """
        with self.chunks() as chunks:
            self._fill(chunks, part, [(entry, os.fsencode(path)) for entry, path in files])

    def verify(self) -> Verified:
        """Reads and proves everything.

        Raises:
            CheckpointError: something is damaged or missing; names it.
        """
        seen: set[bytes] = set()
        files = size = 0
        with self.chunks() as chunks, workers() as pool:
            jobs: list[Future[None]] = []
            for part in self.parts():
                for entry in self.tree_with(chunks, part).entries:
                    if entry.kind != "file":
                        continue
                    files += 1
                    wanted: list[Wanted] = []
                    for chunk, length in self.refs_of(entry, part):
                        if chunk != ZERO_ID and chunk not in seen:
                            seen.add(chunk)
                            wanted.append(Wanted(chunk, length, size))
                            size += length
                    where = describe(entry, part)
                    jobs += [pool.submit(_prove, chunks, run, where) for run in chunks.runs(wanted, where)]
            _join(pool, jobs)
        return Verified(files, len(seen), size)

    @contextmanager
    def chunks(self) -> Iterator[ChunkReader]:
        """Access to the chunks, under the store's lock."""
        layout = self._layout
        with locks.held(layout.lock, shared=True):
            layout.index.refresh()
            with ChunkReader(layout.index, layout.hasher, self.manifest.packs) as chunks:
                yield chunks

    def _name(self) -> str:
        return f"checkpoint {self.id[:15]} of job {self.manifest.job}"

    def refs(self) -> dict[Part, PartRef]:
        """The parts it has, with where their trees lie."""
        refs: dict[Part, PartRef] = {}
        for rank in self.manifest.ranks:
            if rank.process is not None:
                refs[Part.process(rank.rank)] = rank.process
            if rank.device is not None:
                refs[Part.device(rank.rank)] = rank.device
        if self.manifest.volume is not None:
            refs[Part.volume()] = self.manifest.volume
        return refs

    def tree_with(self, chunks: ChunkReader, part: Part) -> Tree:
        """:meth:`tree` for one who holds the store's lock already."""
        ref = self.refs().get(part)
        if ref is None:
            raise missing(str(part), where=self._name())
        where = f"the list of files of {part}"
        data = b""
        for chunk in ref.chunks:
            at = chunks.index.get(bytes.fromhex(chunk))
            data += chunks.read([(bytes.fromhex(chunk), at.length if at else 0)], where)
        return parse_tree(ref, data, self._layout.hasher, where)

    def refs_of(self, entry: TreeEntry, part: Part) -> list[tuple[bytes, int]]:
        """The proved (chunk id, length) pairs of a regular file."""
        raw = base64.b64decode(entry.chunks)
        found = self._layout.hasher.file(entry.size, raw)
        refs = list(CHUNK_REF.iter_unpack(raw)) if len(raw) % CHUNK_REF.size == 0 else []
        if found != entry.digest or sum(length for _, length in refs) != entry.size:
            raise damaged(describe(entry, part), f"of hash {(entry.digest or '')[:16]}", found[:16])
        return refs

    def _fill(
        self,
        chunks: ChunkReader,
        part: Part,
        files: Iterable[tuple[TreeEntry, bytes]],
        held: _Held | None = None,
    ) -> None:
        with workers() as pool:
            jobs: list[Future[None]] = []
            for entry, path in files:
                refs = self.refs_of(entry, part)
                where = describe(entry, part)
                wanted: list[Wanted] = []
                there = held.take(entry, lambda old: self.refs_of(old, part)) if held else {}
                offset = 0
                for chunk, length in refs:
                    if there.get(offset) != (chunk, length):
                        if chunk != ZERO_ID:
                            wanted.append(Wanted(chunk, length, offset))
                        elif there:
                            _write_zeros(path, offset, length, where)
                    offset += length
                runs = list(chunks.runs(wanted, where))
                jobs += [
                    pool.submit(_write_runs, chunks, runs[i : i + 16], path, where) for i in range(0, len(runs), 16)
                ]
            _join(pool, jobs)


class _Held:
    """Files of an earlier checkpoint that take the places of those that are to be made."""

    def __init__(self, earlier: Earlier, dest: Path, but: Collection[str | None]) -> None:
        self._earlier, self._dest = earlier, dest
        self._files = {e.path: e for e in earlier.tree.entries if e.kind == "file" and e.size and e.path not in but}

    def take(
        self, entry: TreeEntry, refs_of: Callable[[TreeEntry], list[tuple[bytes, int]]]
    ) -> dict[int, tuple[bytes, int]]:
        """Puts the one of the same name in a file's place, at its length. By offset, the chunks that it has."""
        old = self._files.get(entry.path)
        if old is None:
            return {}
        name = os.fsdecode(node_of(entry).path)
        refs = refs_of(old)
        source, place = self._earlier.directory / name, self._dest / name
        if not source.is_file():
            return {}
        place.unlink()  # ext4 writes a file to disk at once that takes the name of another
        source.rename(place)
        os.truncate(place, entry.size)
        ends = accumulate(length for _, length in refs)
        return {end - ref[1]: ref for end, ref in zip(ends, refs, strict=True)}


def describe(entry: TreeEntry, part: Part) -> str:
    """What a file is called in an error."""
    return f"{os.fsdecode(node_of(entry).path)} in {part}"


def _write_runs(
    chunks: ChunkReader, runs: Sequence[Sequence[tuple[Wanted, Location]]], path: bytes, where: str
) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for run in runs:
            pieces = chunks.read_run(run, where)
            offset = run[0][0].offset
            _FILES.write_at(fd, pieces, offset)
    except OSError as error:
        raise from_os_error(error, f"restore {where}", path=os.fsdecode(path)) from error
    finally:
        os.close(fd)


def _write_zeros(path: bytes, offset: int, length: int, where: str) -> None:
    """Where an earlier file has had something."""
    try:
        with open(path, "r+b", buffering=0) as file:
            for start in range(offset, offset + length, len(_ZEROS)):
                _FILES.write_at(file.fileno(), [memoryview(_ZEROS)[: offset + length - start]], start)
    except OSError as error:
        raise from_os_error(error, f"restore {where}", path=os.fsdecode(path)) from error


def _prove(chunks: ChunkReader, run: Sequence[tuple[Wanted, Location]], where: str) -> None:
    chunks.read_run(run, where)


def _join(pool: ThreadPoolExecutor, jobs: Sequence[Future[None]]) -> None:
    done, pending = wait(jobs, return_when=FIRST_EXCEPTION)
    if pending:
        pool.shutdown(wait=True, cancel_futures=True)
    for job in done:
        job.result()


def _difference(needs: NumericsClass, has: NumericsClass) -> str:
    left, right = needs.model_dump(), has.model_dump()
    return "; ".join(f"{key} {left[key]}, here {right[key]}" for key in left if left[key] != right[key])


def _clear(dest: Path) -> None:
    for child in dest.iterdir() if dest.is_dir() else ():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child, ignore_errors=True)
        else:
            child.unlink(missing_ok=True)
