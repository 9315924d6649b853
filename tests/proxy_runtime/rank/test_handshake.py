"""A rank refuses a channel of another build, naming both."""

from __future__ import annotations

import ctypes

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
