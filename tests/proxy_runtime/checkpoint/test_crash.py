"""The process or the power ends at any write: what was committed before stays good, and the rest is garbage."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from model.manifest import ManifestHeader
from proxy_runtime.checkpoint import CheckpointError, Part, Store
from proxy_runtime.checkpoint.errors import NO_SPACE
from proxy_runtime.checkpoint.files import Files

Header = Callable[..., ManifestHeader]
OLD = random.Random(1).randbytes(500_000)
NEW = OLD[:250_000] + random.Random(2).randbytes(500_000)


class Crash(BaseException):
    """The machine is gone: nothing may handle this."""


class CrashingFiles(Files):
    """A file system that ends at its ``limit``-th change, and forgets what was not synced.

    Files that were not synced are cut to half; renames whose directory was not synced are undone or not, by the
    random generator. An ``error`` is raised once instead, and then all goes on.
    """

    def __init__(self, limit: int, error: OSError | None = None) -> None:
        self.changes = 0
        self._limit = limit
        self._error = error
        self._lock = threading.Lock()
        self._open: dict[int, Path] = {}
        self._unsynced: set[Path] = set()
        self._renames: list[tuple[Path, Path, bytes | None]] = []

    def _change(self) -> None:
        with self._lock:
            self.changes += 1
            if self._error is not None and self.changes == self._limit:
                raise self._error
            if self._error is None and self.changes >= self._limit:
                raise Crash

    def lose_power(self, rng: random.Random, path: Path, copy: Path) -> Path:
        """What of the store at ``path`` may be left after the power is back, in ``copy``."""
        shutil.copytree(path, copy)
        for file in (copy / f.relative_to(path) for f in self._unsynced):
            if file.exists():
                os.truncate(file, file.stat().st_size // 2)
        for source, target, before in reversed(self._renames):
            here, there = copy / source.relative_to(path), copy / target.relative_to(path)
            if there.exists() and rng.random() < 0.5:
                there.rename(here)
                if before is not None:
                    there.write_bytes(before)
        return copy

    def make_dir(self, path: Path) -> None:
        if not path.is_dir():
            self._change()
        super().make_dir(path)

    def create(self, path: Path) -> int:
        self._change()
        fd = super().create(path)
        self._open[fd] = path
        self._unsynced.add(path)
        return fd

    def write_at(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        self._change()
        super().write_at(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self._change()
        super().sync(fd)
        self._unsynced.discard(self._open[fd])

    def rename(self, source: Path, target: Path) -> None:
        self._change()
        before = target.read_bytes() if target.exists() else None
        super().rename(source, target)
        if source in self._unsynced:
            self._unsynced.remove(source)
            self._unsynced.add(target)
        self._renames.append((source, target, before))

    def sync_dir(self, path: Path) -> None:
        self._change()
        super().sync_dir(path)
        self._renames = [r for r in self._renames if r[1].parent != path]

    def unlink(self, path: Path) -> None:
        self._change()
        super().unlink(path)


@pytest.fixture
def base(tmp_path: Path, make_header: Header) -> Path:
    path = tmp_path / "base"
    save(Store.open(path), make_header(step=1), OLD)
    return path


def save(store: Store, header: ManifestHeader, data: bytes) -> None:
    with store.begin("job", 1) as writer:
        writer.add_bytes(Part.device(0), "storages", data)
        writer.add_bytes(Part.process(0), "pages", data[::-1])
        writer.commit(header)


def content(path: Path) -> bytes:
    reader = Store.open(path).read()
    reader.verify()
    return reader.read_file(Part.device(0), "storages")


def test_a_crash_at_any_write_leaves_the_previous_checkpoint(base: Path, tmp_path: Path, make_header: Header) -> None:
    limit = 1
    outcomes: set[bytes] = set()
    while True:
        path = shutil.copytree(base, tmp_path / str(limit))
        files = CrashingFiles(limit)
        try:
            save(Store.open(path, files=files), make_header(step=2), NEW)
            finished = True
        except Crash:
            finished = False
        for seed in range(3):
            left = files.lose_power(random.Random(seed), path, tmp_path / f"{limit}-{seed}")
            found = content(left)
            outcomes.add(found)
            assert found == NEW if finished else found in (OLD, NEW)
            Store.open(left).gc()
            assert content(left) == found
            assert list(left.glob("tenants/local/writing/*")) == []
            save(Store.open(left), make_header(step=3), NEW)
            assert content(left) == NEW
            shutil.rmtree(left)
        shutil.rmtree(path)
        if finished:
            break
        limit += 1
    assert limit > 12, "the seam must be used for every change"
    assert outcomes == {OLD, NEW}


def test_a_crash_in_a_collection_loses_nothing(tmp_path: Path, make_header: Header) -> None:
    base = tmp_path / "base"
    store = Store.open(base)
    save(store, make_header(step=1), OLD + random.Random(3).randbytes(2_000_000))
    save(store, make_header(step=2), OLD)
    limit = 1
    while True:
        path = shutil.copytree(base, tmp_path / str(limit))
        files = CrashingFiles(limit)
        try:
            Store.open(path, files=files).gc()
            finished = True
        except Crash:
            finished = False
        for seed in range(3):
            left = files.lose_power(random.Random(seed), path, tmp_path / f"{limit}-{seed}")
            assert content(left) == OLD
            Store.open(left).gc()
            assert content(left) == OLD
            shutil.rmtree(left)
        shutil.rmtree(path)
        if finished:
            break
        limit += 1
    assert limit > 5


def test_a_crash_while_a_store_is_made_can_be_repeated(tmp_path: Path, make_header: Header) -> None:
    limit = 1
    while True:
        path = tmp_path / str(limit)
        files = CrashingFiles(limit)
        try:
            Store.open(path, files=files)
            finished = True
        except Crash:
            finished = False
        for seed in range(3 if path.exists() else 0):
            left = files.lose_power(random.Random(seed), path, tmp_path / f"{limit}-{seed}")
            save(Store.open(left), make_header(), NEW)
            assert content(left) == NEW
        if finished:
            break
        limit += 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_write_is_one_sentence(number: int, base: Path, tmp_path: Path, make_header: Header) -> None:
    limit = 1
    while True:
        path = shutil.copytree(base, tmp_path / str(limit))
        files = CrashingFiles(limit, OSError(number, os.strerror(number)))
        store = Store.open(path, files=files)
        try:
            save(store, make_header(step=2), NEW)
        except CheckpointError as error:
            assert "\n" not in error.message
            assert str(path) in error.message
            assert (error.code == NO_SPACE) == (number == errno.ENOSPC)
        else:
            assert files.changes < limit
            break
        assert content(path) in (OLD, NEW)
        save(store, make_header(step=3), NEW)
        assert content(path) == NEW
        shutil.rmtree(path)
        limit += 1


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from tests_header import header
from proxy_runtime.checkpoint import Part, Store
store = Store.open(Path({store!r}))
data = Path({data!r}).read_bytes()
step = 0
while True:
    step += 1
    with store.begin({job!r}, 1) as writer:
        writer.add_bytes(Part.device(0), "storages", step.to_bytes(8, "little") * 512 + data)
        writer.commit(header(step))
    print(step, flush=True)
"""


def test_killed_writers_leave_what_they_committed(tmp_path: Path, make_header: Header) -> None:
    """Two real processes write to one store and are killed, three times, somewhere after their first commits."""
    (tmp_path / "tests_header.py").write_text(
        "from model.manifest import ManifestHeader\n"
        f"TEXT = {make_header().model_dump_json()!r}\n"
        "def header(step):\n"
        "    return ManifestHeader.model_validate_json(TEXT).model_copy(update={'created_at_ns': step})\n"
    )
    (tmp_path / "data").write_bytes(NEW * 4)
    path = tmp_path / "store"
    Store.open(path)
    paths = [str(tmp_path), str(Path(__file__).parents[3])]
    for turn in range(3):
        writers = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    WRITER.format(paths=paths, store=str(path), data=str(tmp_path / "data"), job=job),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for job in ("a", "b")
        ]
        last = {}
        for writer, job in zip(writers, ("a", "b"), strict=True):
            assert writer.stdout is not None
            last[job] = int(writer.stdout.readline())
        deadline = time.monotonic() + turn * 0.023  # another moment of a commit each time
        while time.monotonic() < deadline:
            pass
        for writer, job in zip(writers, ("a", "b"), strict=True):
            writer.send_signal(signal.SIGKILL)
            assert writer.stdout is not None
            rest = writer.stdout.read().split()
            last[job] = int(rest[-1]) if rest else last[job]
            writer.wait()
        store = Store.open(path)
        for job in ("a", "b"):
            reader = store.read(job=job)
            reader.verify()
            # The commit may have happened before its line could be printed.
            assert reader.manifest.header.created_at_ns in (last[job], last[job] + 1)
            step = reader.manifest.header.created_at_ns
            expected = step.to_bytes(8, "little") * 512 + NEW * 4
            assert reader.read_file(Part.device(0), "storages") == expected
        store.gc(deadline_s=5)
