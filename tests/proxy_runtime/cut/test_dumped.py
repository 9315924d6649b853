"""Files of a cut that are at hand for a restore."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.manifest import PartRef
from proxy_runtime.checkpoint.parts import Part
from proxy_runtime.cut.dumped import AtHand, device_files, note_packed, process_files

PROCESS = Part.process(0)


def ref(digest: str) -> PartRef:
    return PartRef(digest=digest * 64, chunks=(), tree_bytes=0, entries=1, bytes=4)


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """Of rank 0: images, and what its device held."""
    for folder, name in ((process_files(tmp_path / "cut", 0), "core.img"), (device_files(tmp_path / "cut", 0), "meta")):
        folder.mkdir(parents=True)
        (folder / name).write_bytes(b"data")
    return tmp_path / "cut"


def test_a_part_is_taken_by_its_hash(cut: Path, tmp_path: Path) -> None:
    note_packed(cut, {PROCESS: ref("a"), Part.device(0): ref("b"), Part.volume(): ref("c")})
    at_hand = AtHand([tmp_path / "missing", cut])
    assert at_hand.take(PROCESS, ref("a"), tmp_path / "process")
    assert at_hand.take(Part.device(0), ref("b"), tmp_path / "device")
    assert (tmp_path / "process" / "core.img").samefile(process_files(cut, 0) / "core.img")
    assert (tmp_path / "device" / "meta").samefile(device_files(cut, 0) / "meta")


def test_another_hash_or_rank_is_not_at_hand(cut: Path, tmp_path: Path) -> None:
    note_packed(cut, {PROCESS: ref("a")})
    at_hand = AtHand([cut])
    assert not at_hand.take(PROCESS, ref("b"), tmp_path / "out")
    assert not at_hand.take(Part.process(1), ref("a"), tmp_path / "out")
    assert not at_hand.take(Part.device(0), ref("a"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_no_store_has_is_not_at_hand(cut: Path, tmp_path: Path) -> None:
    assert not AtHand([cut]).take(PROCESS, ref("a"), tmp_path / "out")


def test_what_goes_meanwhile_leaves_nothing(cut: Path, tmp_path: Path) -> None:
    note_packed(cut, {PROCESS: ref("a")})
    at_hand = AtHand([cut])
    (process_files(cut, 0) / "core.img").unlink()
    process_files(cut, 0).rmdir()
    assert not at_hand.take(PROCESS, ref("a"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
