"""Volumes: what an overlay's upper directory says survives a checkpoint, and comes back to the user's directory."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from model.manifest import ManifestHeader
from proxy_runtime.checkpoint import CheckpointError, Part, Store, volume
from proxy_runtime.checkpoint.errors import UNSUPPORTED

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs device nodes, trusted attributes and mounts")


def describe(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything that a checkpoint must keep of a tree, by path."""
    result: dict[str, tuple[object, ...]] = {}
    inodes: dict[int, str] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        info = path.lstat()
        name = str(path.relative_to(root))
        content: object = None
        if stat.S_ISREG(info.st_mode):
            content = path.read_bytes()
        elif path.is_symlink():
            content = os.readlink(path)
        link = inodes.setdefault(info.st_ino, name)
        xattrs = {n: os.getxattr(path, n, follow_symlinks=False) for n in os.listxattr(path, follow_symlinks=False)}
        xattrs = {n: v for n, v in xattrs.items() if not n.endswith((".origin", ".impure"))}
        result[name] = (info.st_mode, info.st_uid, info.st_gid, info.st_rdev, info.st_mtime_ns, content, link, xattrs)
    return result


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    """An upper directory with one of everything."""
    root = tmp_path / "upper"
    (root / "dir" / "deep").mkdir(parents=True)
    (root / "file").write_text("content")
    os.utime(root / "file", ns=(1, 1_234_567_890_123_456_789))
    (root / "script").write_text("#!/bin/sh\n")
    os.chown(root / "script", 12, 34)
    (root / "script").chmod(0o4755)
    (root / "empty").touch()
    (root / "dir" / "link").symlink_to("../file")
    (root / "dangling").symlink_to("/nowhere/at/all")
    os.lchown(root / "dangling", 5, 6)
    os.link(root / "file", root / "dir" / "same")
    os.link(root / "file", root / "also")
    os.mknod(root / "gone", stat.S_IFCHR, os.makedev(0, 0))
    os.setxattr(root / "dir" / "deep", "trusted.overlay.opaque", b"y")
    os.setxattr(root / "file", "user.note", b"\x00\xff")
    os.mkfifo(root / "fifo")
    with (root / "sparse").open("wb") as file:
        file.truncate(10 << 20)
        file.seek(5 << 20)
        file.write(b"middle")
    (root / os.fsdecode(b"not-utf8-\xff\xfe")).write_text("x")
    (root / "Größe π").write_text("y")
    (root / "dir").chmod(0o1770)
    os.utime(root / "dir", ns=(1, 987_654_321))
    return root


def test_a_copy_is_equal(upper: Path, tmp_path: Path) -> None:
    tree = volume.copy(upper, tmp_path / "copy")
    assert describe(tmp_path / "copy") == describe(upper)
    assert (tmp_path / "copy" / "sparse").stat().st_blocks * 512 < 1 << 20
    assert tree.bytes > 10 << 20


def test_a_checkpoint_of_it_is_equal(
    upper: Path, tmp_path: Path, store: Store, make_header: Callable[..., ManifestHeader]
) -> None:
    with store.begin("job", 1) as writer:
        writer.add_tree(Part.volume(), upper)
        writer.commit(make_header())
    store.read().restore_part(Part.volume(), tmp_path / "back")
    assert describe(tmp_path / "back") == describe(upper)
    copy = store.export(store.read(), tmp_path / "carried")
    copy.restore_part(Part.volume(), tmp_path / "again")
    assert describe(tmp_path / "again") == describe(upper)


def test_stale_references_to_inodes_are_left_out(upper: Path) -> None:
    os.setxattr(upper / "file", "trusted.overlay.origin", b"handle of an inode elsewhere")
    node = next(n for n in volume.capture(upper).nodes if n.path == b"also")
    assert node.xattrs == {"user.note": b"\x00\xff"}


def test_sockets_are_left_out_and_devices_refused(tmp_path: Path) -> None:
    root = tmp_path / "v"
    root.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(root, os.O_RDONLY)
        try:
            server.bind(f"/proc/self/fd/{here}/s")
        finally:
            os.close(here)
    assert [n.path for n in volume.capture(root).nodes] == [b"."]
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with pytest.raises(CheckpointError, match="null, a device node") as caught:
        volume.capture(root)
    assert caught.value.code == UNSUPPORTED


class Overlay:
    """A mounted overlay."""

    def __init__(self, base: Path, lower: Path) -> None:
        self.lower, self.upper, self.merged = lower, base / "u", base / "m"
        for folder in (self.upper, base / "w", self.merged):
            folder.mkdir(exist_ok=True)
        options = f"lowerdir={lower},upperdir={self.upper},workdir={base / 'w'},redirect_dir=on,index=off,metacopy=off"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", self.merged], check=True)

    def unmount(self) -> None:
        subprocess.run(["umount", self.merged], check=True)


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Overlay]:
    base = tmp_path / "overlay"
    lower = base / "l"
    (lower / "keep").mkdir(parents=True)
    (lower / "keep" / "a").write_text("a")
    (lower / "changed").write_text("before")
    (lower / "changed").chmod(0o640)
    (lower / "removed").write_text("x")
    (lower / "removed_dir" / "sub").mkdir(parents=True)
    (lower / "removed_dir" / "sub" / "f").write_text("x")
    (lower / "again").mkdir()
    (lower / "again" / "old").write_text("old")
    (lower / "dir_to_file").mkdir()
    (lower / "dir_to_file" / "x").write_text("x")
    (lower / "file_to_dir").write_text("x")
    (lower / "outside").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    mounted = Overlay(base, lower)
    yield mounted
    if os.path.ismount(mounted.merged):
        mounted.unmount()


def change(root: Path) -> None:
    """What a job may do to its directory."""
    (root / "changed").write_text("after")
    (root / "removed").unlink()
    subprocess.run(["rm", "-r", root / "removed_dir"], check=True)
    subprocess.run(["rm", "-r", root / "again"], check=True)
    (root / "again").mkdir()
    (root / "again" / "new").write_text("new")
    subprocess.run(["rm", "-r", root / "dir_to_file"], check=True)
    (root / "dir_to_file").write_text("now a file")
    (root / "file_to_dir").unlink()
    (root / "file_to_dir").mkdir()
    (root / "file_to_dir" / "f").write_text("f")
    (root / "outside").unlink()
    (root / "outside").mkdir()
    (root / "outside" / "f").write_text("must not leave the directory")
    (root / "keep" / "b").write_text("b")
    (root / "keep" / "b").chmod(0o755)
    (root / "keep").chmod(0o700)
    os.link(root / "keep" / "b", root / "hard")
    (root / "soft").symlink_to("keep/b")
    (root / "new" / "deep").mkdir(parents=True)
    (root / "new" / "deep" / "f").write_bytes(b"z" * 100_000)


def test_merging_back_shows_what_the_overlay_showed(overlay: Overlay, tmp_path: Path) -> None:
    change(overlay.merged)
    shown = describe(overlay.merged)
    overlay.unmount()
    overlay.upper.chmod(0o700)  # as made by whoever mounted it
    for _ in range(2):  # the second time changes nothing
        volume.merge_back(overlay.upper, overlay.lower)
        found = describe(overlay.lower)
        assert found.keys() == shown.keys()
        for name, what in shown.items():
            assert found[name][:4] == what[:4], name
            assert found[name][5] == what[5], name
            if name != "." and not stat.S_ISDIR(what[0]):  # type: ignore[arg-type]
                assert found[name][4] == what[4], name
    assert overlay.lower.joinpath("hard").stat().st_ino == overlay.lower.joinpath("keep/b").stat().st_ino
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert not list(overlay.lower.rglob(".ergo-*"))


def test_a_job_goes_on_over_a_restored_upper_directory(
    overlay: Overlay, tmp_path: Path, store: Store, make_header: Callable[..., ManifestHeader]
) -> None:
    change(overlay.merged)
    shown = describe(overlay.merged)
    with store.begin("job", 1) as writer:
        writer.add_tree(Part.volume(), overlay.upper)
        writer.commit(make_header())
    overlay.unmount()
    other = tmp_path / "other"
    other.mkdir()
    subprocess.run(["cp", "-a", overlay.lower, other / "l"], check=True)
    store.read().restore_part(Part.volume(), other / "u")
    second = Overlay(other, other / "l")
    try:
        found = describe(other / "m")
        assert {n: (w[0], w[4], w[5]) for n, w in found.items()} == {n: (w[0], w[4], w[5]) for n, w in shown.items()}
    finally:
        second.unmount()


def test_renamed_directories_come_back_renamed(overlay: Overlay) -> None:
    root = overlay.merged
    (root / "keep").rename(root / "moved")  # same parent: a relative reference
    (root / "moved" / "a").write_text("changed after")
    (root / "removed_dir" / "sub").rename(root / "moved" / "sub")  # another parent: an absolute one
    (root / "removed_dir").rename(root / "again" / "outer")
    (root / "keep").mkdir()  # a new one where the old one was
    (root / "keep" / "fresh").write_text("fresh")
    (root / "again").rename(root / "last")
    (root / "again").write_text("a file")
    shown = describe(root)
    overlay.unmount()
    assert any("trusted.overlay.redirect" in os.listxattr(p) for p in overlay.upper.rglob("*") if p.is_dir())
    volume.merge_back(overlay.upper, overlay.lower)
    found = describe(overlay.lower)
    assert {n: (w[0], w[5]) for n, w in found.items()} == {n: (w[0], w[5]) for n, w in shown.items()}


@pytest.mark.parametrize("at", range(1, 30, 3))
def test_a_merge_that_failed_goes_on(overlay: Overlay, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    root = overlay.merged
    change(root)
    (root / "keep").rename(root / "moved")
    (root / "keep").mkdir()
    (root / "keep" / "fresh").write_text("fresh")
    shown = describe(root)
    overlay.unmount()
    left = at
    with monkeypatch.context() as patched:
        for name in ("rename", "replace", "mkdir", "utime", "unlink", "link"):
            call = getattr(os, name)

            def failing(*args: object, _call: Callable[..., object] = call, **kwargs: object) -> object:
                nonlocal left
                left -= 1
                if left == 0:
                    raise OSError(5, "Input/output error")
                return _call(*args, **kwargs)

            patched.setattr(os, name, failing)
        with pytest.raises(CheckpointError, match="Input/output error"):
            volume.merge_back(overlay.upper, overlay.lower)
    volume.merge_back(overlay.upper, overlay.lower)
    found = describe(overlay.lower)
    assert {n: (w[0], w[5]) for n, w in found.items()} == {n: (w[0], w[5]) for n, w in shown.items()}


def test_a_redirect_cannot_lead_outside(tmp_path: Path) -> None:
    upper, lower = tmp_path / "u", tmp_path / "l"
    (upper / "d").mkdir(parents=True)
    lower.mkdir()
    (tmp_path / "secret").mkdir()
    (lower / "link").symlink_to(tmp_path)
    os.setxattr(upper / "d", "trusted.overlay.redirect", b"/../secret")
    with pytest.raises(CheckpointError) as caught:
        volume.merge_back(upper, lower)
    assert caught.value.code == UNSUPPORTED
    os.setxattr(upper / "d", "trusted.overlay.redirect", b"/link/secret")
    volume.merge_back(upper, lower)
    assert (tmp_path / "secret").is_dir()
    assert (lower / "d").is_dir()


def test_a_file_by_reference_is_refused(tmp_path: Path) -> None:
    upper, lower = tmp_path / "u", tmp_path / "l"
    upper.mkdir()
    lower.mkdir()
    (upper / "f").touch()
    os.setxattr(upper / "f", "trusted.overlay.metacopy", b"")
    with pytest.raises(CheckpointError, match="metacopy=off") as caught:
        volume.merge_back(upper, lower)
    assert caught.value.code == UNSUPPORTED
