"""A rank refuses a channel of another build, and a device with another torch or Python, naming both."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import pytest

from proxy_runtime.channel.ring import build_word
from proxy_runtime.rank.ergo_rank import boot

OURS, THEIRS = "0123456789abcdef" * 2, "fedcba9876543210" * 2


def check(build: str) -> None:
    header = (ctypes.c_uint64 * 8)()
    header[4] = build_word(build)  # ring.hpp: magic, version and rank, two sizes, build
    boot._check_build(ctypes.addressof(header), f"/builds/{OURS}/rank")


def test_another_build_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=f"made by build {THEIRS[:16]} .* runs build {OURS[:16]}"):
        check(THEIRS)


@pytest.mark.parametrize("build", [OURS, ""])
def test_the_same_build_and_none_are_accepted(build: str) -> None:
    check(build)


@pytest.mark.parametrize(
    ("torch", "abi", "named"),
    [("2.13.0+cu130", "cpython-311", "torch 2.13.0"), ("2.15.0+cu132", "cpython-312", "on cpython-312")],
)
def test_another_torch_or_python_is_refused_by_name(tmp_path: Path, torch: str, abi: str, named: str) -> None:
    description = tmp_path / "build.json"
    description.write_text(json.dumps({"torch": "2.15.0+cu132", "abi": "cpython-311"}))
    boot.require_torch("2.15.0+cu132", "cpython-311", str(description))
    with pytest.raises(RuntimeError, match=f"{named}.* device of this job has torch 2.15.0.* on cpython-311"):
        boot.require_torch(torch, abi, str(description))


def test_without_a_description_nothing_is_known(tmp_path: Path) -> None:
    boot.require_torch("1", "2", str(tmp_path / "none.json"))
