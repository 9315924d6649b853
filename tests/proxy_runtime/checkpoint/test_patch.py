"""A mounted job directory becomes that of a checkpoint while it is in use, and what it was when that is undone."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.manifest import ManifestHeader, Tree, TreeEntry
from proxy_runtime.checkpoint import CheckpointError, Part, Store
from proxy_runtime.checkpoint.errors import DAMAGED, IN_USE
from proxy_runtime.checkpoint.patch import VolumePatch
from proxy_runtime.checkpoint.reader import CheckpointReader
from tests.proxy_runtime.checkpoint.test_volume import describe

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs mounts")


class Side:
    """A node's volume of a job, mounted."""

    def __init__(self, root: Path, lower: Path) -> None:
        self.root, self.volume = root, root / "volume"
        self.upper, self.private = self.volume / "directory", self.volume / "private"
        self.directory, self.work = root / "mounted", root / "work"
        for path in (self.directory, self.work):
            path.mkdir(parents=True)
        if not self.volume.exists():
            for path in (self.upper, self.private / "logs", self.private / "tmp"):
                path.mkdir(parents=True)
        # As init.c mounts it.
        options = f"lowerdir={lower},upperdir={self.upper},workdir={self.work},redirect_dir=on,index=off,metacopy=off"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(self.directory)], check=True)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.directory)], check=True)


class World:
    """A job directory on two nodes, which had the same at first."""

    def __init__(self, root: Path, header: ManifestHeader) -> None:
        self.root, self.header = root, header
        self.store = Store.open(root / "store")
        self.lower = root / "lower"
        self.sides: list[Side] = []

    def submitted(self) -> None:
        (self.lower / "sub" / "deep").mkdir(parents=True)
        (self.lower / "data.txt").write_text("submitted")
        (self.lower / "sub" / "other.txt").write_text("submitted too")
        (self.lower / "sub" / "deep" / "x").write_text("x")

    def side(self, like: Side | None = None) -> Side:
        root = self.root / f"side-{len(self.sides)}"
        if like is not None:
            root.mkdir()
            subprocess.run(["cp", "-a", str(like.volume), str(root / "volume")], check=True)
        self.sides.append(Side(root, self.lower))
        return self.sides[-1]

    def checkpoint(self, side: Side) -> CheckpointReader:
        with self.store.begin("job", 1) as writer:
            writer.add_tree(Part.volume(), side.volume)
            return self.store.read(writer.commit(self.header))

    def patch(self, side: Side, reader: CheckpointReader) -> VolumePatch:
        have = self.checkpoint(side).tree(Part.volume())
        return VolumePatch(
            reader,
            have,
            directory=side.directory,
            upper=side.upper,
            private=side.private,
            journal=side.root / "undo",
        )

    def tree(self, side: Side) -> dict[str, object]:
        return entries(self.checkpoint(side).tree(Part.volume()))

    def close(self) -> None:
        for side in self.sides:
            side.close()


def entries(tree: Tree) -> dict[str, TreeEntry]:
    """By path; that a directory is opaque says nothing where there is none below it, nor does the root's time."""
    found = {}
    for entry in tree.entries:
        xattrs = {k: v for k, v in entry.xattrs.items() if k != "trusted.overlay.opaque"}
        found[entry.path] = entry.model_copy(update={"xattrs": xattrs})
    root = found["."]
    found["."] = root.model_copy(update={"mtime_ns": 0})
    return found


@pytest.fixture
def world(tmp_path: Path, make_header: Callable[..., ManifestHeader]) -> Iterator[World]:
    made = World(tmp_path, make_header())
    made.submitted()
    try:
        yield made
    finally:
        made.close()


def before(side: Side) -> None:
    """What both have before they part."""
    here, private = side.directory, side.private
    (here / "kept").write_text("kept")
    (here / "long").write_bytes(bytes(range(256)) * 4096)
    (here / "out").mkdir()
    (here / "out" / "a").write_text("a")
    (here / "out" / "b").write_text("b")
    (here / "link").symlink_to("kept")
    os.mkfifo(here / "fifo")
    (here / "sub" / "other.txt").write_text("changed by both")
    (private / "logs" / "rank-0.log").write_text("zero\n")
    (private / "logs" / "rank-1.log").touch()
    for path in (here / "kept", here / "out" / "a", private / "logs" / "rank-0.log"):
        os.utime(path, ns=(5, 1_600_000_000_000_000_005))


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(64 << 20)
        file.seek(20 << 20)
        file.write(b"in the middle")


def turned(path: Path, make: Callable[[Path], object]) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    make(path)


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "nothing": lambda d, p: None,
    "a new file": lambda d, p: (d / "new").write_text("new"),
    "a longer log": lambda d, p: (p / "logs" / "rank-1.log").write_text("one\n" * 1000),
    "a new temporary directory": lambda d, p: filled(p / "tmp" / "pymp-1"),
    "a shorter file": lambda d, p: (d / "long").write_bytes(b"short"),
    "an empty file": lambda d, p: (d / "long").write_bytes(b""),
    "bytes in the middle": lambda d, p: poke(d / "long"),
    "a submitted file": lambda d, p: (d / "data.txt").write_text("changed"),
    "a submitted file in a directory": lambda d, p: (d / "sub" / "deep" / "x").write_text("changed"),
    "a new file in a submitted directory": lambda d, p: (d / "sub" / "deep" / "y").write_text("y"),
    "a submitted file is removed": lambda d, p: (d / "data.txt").unlink(),
    "a changed submitted file is removed": lambda d, p: (d / "sub" / "other.txt").unlink(),
    "a file is removed": lambda d, p: (d / "kept").unlink(),
    "a directory is removed": lambda d, p: shutil.rmtree(d / "out"),
    "new directories": lambda d, p: ((d / "n" / "m").mkdir(parents=True), (d / "n" / "m" / "f").write_text("f")),
    "a file is renamed": lambda d, p: (d / "kept").rename(d / "out" / "moved"),
    "modes and owners": lambda d, p: modes(d),
    "the directory's mode": lambda d, p: d.chmod(0o700),
    "a time only": lambda d, p: os.utime(d / "kept", ns=(7, 1_600_000_000_000_000_007)),
    "attributes": lambda d, p: (os.setxattr(d / "kept", "user.note", b"\0x"), os.setxattr(d / "out", "user.n", b"y")),
    "another link": lambda d, p: turned(d / "link", lambda path: path.symlink_to("/nowhere")),
    "a link becomes a file": lambda d, p: turned(d / "link", lambda path: path.write_text("file")),
    "a file becomes a link": lambda d, p: turned(d / "kept", lambda path: path.symlink_to("out")),
    "a file becomes a directory": lambda d, p: turned(d / "kept", filled),
    "a directory becomes a file": lambda d, p: turned(d / "out", lambda path: path.write_text("file")),
    "a new fifo": lambda d, p: os.mkfifo(d / "out" / "pipe"),
    "holes": lambda d, p: sparse(d / "sparse"),
    "holes in a file that is there": lambda d, p: sparse(d / "long"),
    "a new hard link": lambda d, p: (p / "tmp" / "z").hardlink_to(p / "logs" / "rank-0.log"),
}  # fmt: skip


def filled(path: Path) -> None:
    path.mkdir(0o700)
    (path / "in").touch()


def modes(directory: Path) -> None:
    (directory / "kept").chmod(0o4711)
    os.chown(directory / "out" / "a", 7, 8)
    (directory / "out").chmod(0o1770)


def poke(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(500_000)
        file.write(b"poked")


def view(side: Side) -> dict[str, tuple[object, ...]]:
    """What the job sees; attributes that only an upper layer has are no part of it."""
    found = {f"d/{name}": what for name, what in describe(side.directory).items()}
    found |= {f"p/{name}": what for name, what in describe(side.private).items()}
    return {name: (*what[:-2], what[-2].count("/")) for name, what in found.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", CHANGES)
def test_it_becomes_that_of_the_checkpoint_and_what_it_was(world: World, change: str) -> None:
    here = world.side()
    before(here)
    there = world.side(here)
    CHANGES[change](there.directory, there.private)
    reader = world.checkpoint(there)
    had, seen = world.tree(here), view(here)

    patch = world.patch(here, reader)
    patch.apply()
    assert view(there).keys() <= view(here).keys()
    patch.undo()
    assert seen == view(here)
    assert {**had, **submitted(world.tree(here), had)} == world.tree(here)

    patch = world.patch(here, reader)
    patch.apply()
    patch.close()
    assert view(here) == view(there)
    found, wanted = world.tree(here), entries(reader.tree(Part.volume()))
    assert {path: timeless(entry) for path, entry in found.items()} == {
        path: timeless(entry) for path, entry in wanted.items()
    }
    assert sorted(path.name for path in here.root.iterdir()) == ["mounted", "volume", "work"]


def timeless(entry: TreeEntry) -> TreeEntry:
    return entry.model_copy(update={"mtime_ns": 0}) if entry.kind in ("directory", "whiteout") else entry


def submitted(now: dict, had: dict) -> dict:
    """What is in the upper layer now, because it was written to, and is as it was submitted."""
    names = {"directory/data.txt", "directory/sub/deep", "directory/sub/deep/x", "directory/sub"}
    return {path: entry for path, entry in now.items() if path in names - had.keys()}


def test_who_has_a_file_open_sees_the_new_bytes_and_the_old_ones(world: World) -> None:
    here = world.side()
    before(here)
    there = world.side(here)
    poke(there.directory / "long")
    (there.directory / "kept").unlink()
    reader = world.checkpoint(there)
    with (here.directory / "long").open("r+b") as file, (here.directory / "kept").open() as kept:
        mapped = mmap.mmap(file.fileno(), 0)
        patch = world.patch(here, reader)
        inode = os.fstat(kept.fileno()).st_ino
        patch.apply()
        assert mapped[500_000:500_005] == os.pread(file.fileno(), 5, 500_000) == b"poked"
        patch.undo()
        assert mapped[500_000:500_005] == os.pread(file.fileno(), 5, 500_000) != b"poked"
        assert (here.directory / "kept").stat().st_ino == inode
        mapped.close()


REFUSED: dict[str, Callable[[Side, Side], object]] = {
    "a submitted directory is renamed": lambda a, b: (b.directory / "sub").rename(b.directory / "renamed"),
    "a submitted directory is another one": lambda a, b: turned(b.directory / "sub", lambda path: path.mkdir()),
    "a submitted directory is removed": lambda a, b: shutil.rmtree(b.directory / "sub"),
    "a linked file goes": lambda a, b: (
        (a.directory / "kept2").hardlink_to(a.directory / "kept"),
        (b.directory / "kept").unlink(),
        (b.directory / "kept2").write_text("of its own"),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_only_an_upper_layer_can_say_is_refused_before_anything_is_touched(world: World, what: str) -> None:
    here = world.side()
    before(here)
    there = world.side(here)
    REFUSED[what](here, there)
    patch = world.patch(here, world.checkpoint(there))
    seen, had = view(here), world.tree(here)
    with pytest.raises(CheckpointError) as refused:
        patch.apply()
    assert refused.value.code == IN_USE and "while it is in use" in str(refused.value)
    assert (view(here), world.tree(here)) == (seen, had)


def test_a_link_leads_nobody_out_of_the_directory(world: World) -> None:
    here = world.side()
    before(here)
    there = world.side(here)
    outside = world.root / "outside"
    outside.mkdir()
    (there.directory / "out" / "a").write_text("written")
    reader = world.checkpoint(there)
    patch = world.patch(here, reader)
    shutil.rmtree(here.directory / "out")
    (here.directory / "out").symlink_to(outside)
    with pytest.raises(CheckpointError, match="behind a symbolic link"):
        patch.apply()
    assert not list(outside.iterdir())


def test_a_failure_in_the_middle_undoes_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    here = world.side()
    before(here)
    there = world.side(here)
    for name in ("data.txt", "out/a", "new", "kept"):
        (there.directory / name).write_text("changed" * 1000)
    (there.directory / "out" / "b").unlink()
    (there.directory / "link").unlink()
    reader = world.checkpoint(there)
    patch, seen = world.patch(here, reader), view(here)
    path = world.store.exchange.path(reader.manifest.packs[-1])
    data = bytearray(path.read_bytes())
    at = data.find(b"changed" * 100)
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as failed:
        patch.apply()
    assert failed.value.code == DAMAGED
    assert view(here) == seen
    assert not (here.root / "undo").exists()


NAMES = st.sampled_from(["data.txt", "sub/other.txt", "sub/deep/x", "a", "b", "c", "n/a", "n/b", "n/m/a"])
ACTS = st.lists(st.tuples(st.sampled_from(["write", "remove", "link", "chmod", "append"]), NAMES, st.integers(0, 9)))


def act(side: Side, acts: list[tuple[str, str, int]]) -> None:
    for what, name, number in acts:
        path = side.directory / name
        if what in ("write", "link", "append"):
            path.parent.mkdir(parents=True, exist_ok=True)
        if what == "write":
            path.unlink(missing_ok=True)
            path.write_text(str(number) * 50 * number)
        elif what == "append":
            if path.is_symlink():
                path.unlink()
            with path.open("a") as file:
                file.write(str(number))
        elif what == "link":
            path.unlink(missing_ok=True)
            path.symlink_to(f"target-{number}")
        elif path.exists() and not path.is_symlink():
            path.unlink() if what == "remove" else path.chmod(0o600 + number)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=ACTS, second=ACTS, own=ACTS)
def test_any_changes(
    tmp_path_factory: pytest.TempPathFactory, make_header: Callable[..., ManifestHeader], first, second, own
) -> None:  # type: ignore[no-untyped-def]
    world = World(tmp_path_factory.mktemp("world"), make_header())
    world.submitted()
    try:
        here = world.side()
        act(here, first)
        there = world.side(here)
        act(there, second)
        act(here, own)
        reader = world.checkpoint(there)
        patch, seen = world.patch(here, reader), view(here)
        try:
            patch.apply()
        except CheckpointError as error:
            assert error.code == IN_USE, error
            assert view(here) == seen
            return
        patch.undo()
        assert view(here) == seen
        patch = world.patch(here, reader)
        patch.apply()
        patch.close()
        assert contents(here) == contents(there)
    finally:
        world.close()


def contents(side: Side) -> dict[str, object]:
    return {name: (mode, content) for name, (mode, *_, content, _) in view(side).items()}
