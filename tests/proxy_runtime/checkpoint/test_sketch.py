"""Sketches: which files have much in common."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from proxy_runtime.checkpoint.chunking import SEGMENT
from proxy_runtime.checkpoint.sketch import SKETCH, sketch_of


def test_files_that_are_mostly_the_same_have_most_of_their_sketches_in_common(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(SEGMENT + (6 << 20) + 100)
    for name, content in {
        "one": data,
        "equal": data,
        "changed": data[: 1 << 20] + random.Random(2).randbytes(1 << 20) + data[2 << 20 :],
        "other": random.Random(3).randbytes(len(data)),
    }.items():
        (tmp_path / name).write_bytes(content)
    one, equal, changed, other = (set(sketch_of(tmp_path / n)) for n in ("one", "equal", "changed", "other"))
    assert len(one) == SKETCH and one == equal
    assert len(one & changed) > SKETCH / 2
    assert not one & other


def test_zeros_and_holes_are_nothing_to_have_in_common(tmp_path: Path) -> None:
    with open(tmp_path / "holes", "wb") as file:
        file.write(bytes(1 << 16))
        file.truncate(3 * SEGMENT)
    assert sketch_of(tmp_path / "holes") == ()


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sketch_of(tmp_path / "none")
