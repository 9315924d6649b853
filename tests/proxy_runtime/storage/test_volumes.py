"""Job directories: uploaded, materialized, joined and downloaded."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy_runtime.checkpoint import CheckpointError, Store
from proxy_runtime.storage import FleetStore, StorageError
from proxy_runtime.storage.checkpoints import assemble, push
from proxy_runtime.storage.volumes import (
    download,
    join_volumes,
    list_files,
    materialize,
    read_file,
    upload_directory,
)
from tests.proxy_runtime.storage.builders import make_header, noise, write_parts


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A job directory with everything that one may hold."""
    root = tmp_path / "project"
    for name, content in {
        "train.py": b"print('hello')\n",
        "data/big.bin": noise(600_000),
        "data/keep.log": b"keep",
        "data/drop.log": b"drop",
        ".git/config": b"secret",
        "pkg/__pycache__/x.pyc": b"cache",
        ".venv/bin/python": b"venv",
        ".ergoignore": b"*.log\n!keep.log\n/only-here\n",
        "only-here/x": b"x",
        "sub/only-here/x": b"y",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "link").symlink_to("train.py")
    (root / "train.py").chmod(0o755)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(root / "sock"))
    return root


def names(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_symlink() or not p.is_dir()}


def test_an_uploaded_directory_comes_back_without_what_is_ignored(
    fleet: FleetStore, project: Path, tmp_path: Path
) -> None:
    told: list[tuple[int, int]] = []
    checkpoint = upload_directory(fleet, "acme", project, progress=lambda *at: told.append(at))
    assert told[-1][0] == told[-1][1] > 600_000
    assert upload_directory(fleet, "acme", project) == checkpoint
    dest = materialize(fleet, "acme", checkpoint, tmp_path / "node" / "base")
    expected = {"train.py", "data/big.bin", "data/keep.log", ".ergoignore", "sub/only-here/x", "link"}
    assert names(dest) == expected == {e.path for e in list_files(fleet, "acme", checkpoint) if e.kind != "directory"}
    assert (dest / "data/big.bin").read_bytes() == (project / "data/big.bin").read_bytes()
    assert os.readlink(dest / "link") == "train.py"
    before, after = (project / "train.py").stat(), (dest / "train.py").stat()
    assert (before.st_mode, before.st_mtime_ns) == (after.st_mode, after.st_mtime_ns)
    assert read_file(fleet, "acme", checkpoint, "train.py") == b"print('hello')\n"
    with pytest.raises(FileNotFoundError):
        read_file(fleet, "acme", checkpoint, "data")
    (dest / "train.py").write_bytes(b"mine")
    assert materialize(fleet, "acme", checkpoint, dest) == dest
    assert (dest / "train.py").read_bytes() == b"mine", "it was there and is left alone"
    assert [p.name for p in dest.parent.iterdir()] == ["base"]


def test_an_empty_directory_is_a_volume_too(fleet: FleetStore, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    checkpoint = upload_directory(fleet, "acme", tmp_path / "empty")
    assert list(materialize(fleet, "acme", checkpoint, tmp_path / "out").iterdir()) == []


def test_a_directory_that_is_too_large_is_refused_by_its_largest_entries(fleet: FleetStore, project: Path) -> None:
    with pytest.raises(StorageError) as caught:
        upload_directory(fleet, "acme", project, limit_bytes=100_000)
    text = str(caught.value)
    assert caught.value.code == "storage.too-large"
    assert "585.9 KiB" in text and "97.7 KiB" in text and "data (585.9 KiB)" in text and ".ergoignore" in text
    assert fleet.bucket.list("tenants") == []


def test_what_cannot_be_read_is_named_as_people_write_it(
    fleet: FleetStore, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(base: bytes, path: bytes, _: os.stat_result) -> None:
        raise PermissionError(13, "Permission denied", os.path.join(base, path))

    monkeypatch.setattr("proxy_runtime.checkpoint.volume.read_node", refuse)
    with pytest.raises(StorageError) as caught:
        upload_directory(fleet, "acme", project)
    assert f"job directory: {project}" in caught.value.message and "b'" not in caught.value.message


def test_a_damaged_volume_is_not_materialized(fleet: FleetStore, project: Path, tmp_path: Path) -> None:
    checkpoint = upload_directory(fleet, "acme", project)
    key = fleet.bucket.list("tenants/acme/packs")[0]
    data = bytearray(fleet.bucket.get(key) or b"")
    data[5000] ^= 1
    fleet.bucket.put(key, bytes(data))
    with pytest.raises(CheckpointError, match="damaged"):
        materialize(fleet, "acme", checkpoint, tmp_path / "out" / "base")
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(StorageError, match="not in"):
        materialize(fleet, "acme", "ck-" + "0" * 40, tmp_path / "other")


def whiteout(path: Path) -> None:
    os.mknod(path, 0o020600, os.makedev(0, 0))


def upper(root: Path, files: dict[str, bytes | None]) -> Path:
    """A job's volume; None is a whiteout."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            whiteout(path)
        else:
            path.write_bytes(content)
    return root


def test_what_two_nodes_have_done_is_downloaded_over_what_was_submitted(
    fleet: FleetStore, node_store: Callable[[str], Store], project: Path, tmp_path: Path
) -> None:
    base = upload_directory(fleet, "acme", project)
    volumes = {
        "a": {"directory/out/loss.txt": b"0.5", "directory/data/big.bin": None, "private/logs/rank-0.log": b"zero"},
        "b": {"directory/out/eval.txt": b"0.9", "private/logs/rank-1.log": b"one"},
    }
    parts = []
    for rank, (name, files) in enumerate(volumes.items()):
        store = node_store(name)
        part, written = write_parts(store, name, {rank: noise(9000)}, volume=upper(tmp_path / f"v{name}", files))
        push(fleet, store, part, written.packs)
        parts.append(part)
    joined, warnings = join_volumes(fleet, node_store("a"), "job", 1, None, parts)
    assert joined is not None and warnings == ()
    checkpoint = assemble(fleet, node_store("a"), "job", 1, make_header(2), parts, volume=joined).root
    assert read_file(fleet, "acme", checkpoint, "private/logs/rank-1.log") == b"one"
    whole = download(fleet, "acme", checkpoint, ".", tmp_path / "whole", base=base)
    assert names(whole) == {
        "train.py", "data/keep.log", ".ergoignore", "sub/only-here/x", "link", "out/loss.txt", "out/eval.txt"
    }  # fmt: skip
    one = download(fleet, "acme", checkpoint, "out/eval.txt", tmp_path / "eval.txt", base=base)
    assert one.read_bytes() == b"0.9"
    for path, code in (("../x", "storage.path"), ("/etc", "storage.path"), ("data/big.bin", "storage.missing")):
        with pytest.raises(StorageError) as caught:
            download(fleet, "acme", checkpoint, path, tmp_path / "nothing", base=base)
        assert caught.value.code == code
    with pytest.raises(StorageError, match="there already"):
        download(fleet, "acme", checkpoint, "out", tmp_path / "eval.txt", base=base)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".ergo")]


def test_a_link_out_of_the_job_directory_is_not_followed(
    fleet: FleetStore, node_store: Callable[[str], Store], tmp_path: Path
) -> None:
    root = upper(tmp_path / "v", {"directory/x": b"x"})
    (root / "directory" / "out").symlink_to("/etc")
    part, written = write_parts(node_store("a"), "a", {0: b"1"}, volume=root)
    push(fleet, node_store("a"), part, written.packs)
    checkpoint = assemble(fleet, node_store("a"), "job", 1, make_header(), [part]).root
    with pytest.raises(StorageError) as caught:
        download(fleet, "acme", checkpoint, "out/hostname", tmp_path / "stolen")
    assert caught.value.code == "storage.missing"
    assert not (tmp_path / "stolen").exists() and Path("/etc/hostname").exists()
