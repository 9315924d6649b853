"""The Python view of a ring agrees with ring.hpp, and finds the ring of a process."""

from __future__ import annotations

import mmap
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from proxy_runtime.channel import ring as ring_module
from proxy_runtime.channel.ring import HEADER_BYTES, Ring, RingError, build_word

HEADER = Path(ring_module.__file__).with_name("ring.hpp").read_text()

MAPPER = """
import mmap, os, sys, time
fd = int(sys.argv[1])
mapping = mmap.mmap(fd, os.fstat(fd).st_size)
os.close(fd)
print("mapped", flush=True)
time.sleep(600)
"""


def test_constants_are_those_of_the_header_file() -> None:
    assert f"kRingMagic = 0x{ring_module.MAGIC:X}ull" in HEADER
    assert f"kProtocolVersion = {ring_module.PROTOCOL_VERSION};" in HEADER
    assert f"kHeaderBytes = {ring_module.HEADER_BYTES};" in HEADER
    offsets = {name: int(value) for name, value in re.findall(r"offsetof\(RingHeader, (\w+)\) == (\d+)", HEADER)}
    assert offsets == {
        "head": 64,
        "tail": 128,
        "error_flag": 384,
        "proxy_gone": 2496,
        "step": 2560,
        "pinned_bytes": 2576,
    }
    shared = Path(ring_module.__file__).with_name("shared_ring.hpp").read_text()
    assert f"kSharedWordsOffset = {ring_module._SHARED};" in shared
    assert ring_module._CLAIMANT == ring_module._SHARED + 4
    assert (ring_module._HEAD, ring_module._TAIL, ring_module._ERROR_FLAG) == (64, 128, 384)
    assert (ring_module._PROXY_GONE, ring_module._STEP, ring_module._PINNED_BYTES) == (2496, 2560, 2576)


def test_a_new_ring_is_empty() -> None:
    sizes = {"ring_bytes": 1 << 16, "response_bytes": 1 << 13, "pinned_bytes": 1 << 14}
    with Ring.create(3, "0123456789abcdef" * 2, **sizes) as ring:
        assert ring.fields.rank == 3
        assert (
            ring.fields.build
            == build_word("0123456789abcdef")
            == int.from_bytes(bytes.fromhex("0123456789abcdef"), "little")
        )
        assert (ring.head, ring.tail, ring.step, ring.step_done) == (0, 0, 0, 0)
        assert not ring.rank_attached and not ring.proxy_gone and ring.error is None
        assert os.fstat(ring.fd).st_size == 8192 + (1 << 16) + (1 << 13) + (1 << 14)
        ring.mark_proxy_gone()
        assert ring.proxy_gone


@pytest.mark.parametrize("sizes", [{"ring_bytes": 1000}, {"ring_bytes": 5000}, {"response_bytes": 8}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Ring.create(0, **sizes)
    with pytest.raises(ValueError, match="a page"):
        Ring.create(0, response_bytes=5000)


def test_pinned_memory_takes_none_before_it_is_used_and_shared_rings_have_none() -> None:
    with Ring.create(0) as ring, Ring.create(0, shared=True) as shared:
        assert os.fstat(ring.fd).st_size > ring_module.DEFAULT_PINNED_BYTES
        assert os.fstat(ring.fd).st_blocks * 512 < 1 << 20
        assert os.fstat(shared.fd).st_size == HEADER_BYTES + shared.fields.ring_bytes + shared.fields.response_bytes


def test_what_is_no_ring_is_refused() -> None:
    fd = os.memfd_create("x")
    for size in (10, 1 << 16):
        os.ftruncate(fd, size)
        with pytest.raises(RingError) as error:
            Ring(fd)
        assert error.value.code == "ring.invalid"
    os.close(fd)


def test_the_ring_of_a_process_is_found_without_its_descriptor() -> None:
    with Ring.create(5) as ring:
        command = [sys.executable, "-c", MAPPER, str(ring.fd)]
        process = subprocess.Popen(command, pass_fds=[ring.fd], stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None and process.stdout.readline() == b"mapped\n"
            with Ring.of_process(process.pid) as found:
                assert found.fields.rank == 5
                found.mark_proxy_gone()
                assert ring.proxy_gone  # the same memory
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


def test_a_process_without_a_ring() -> None:
    with pytest.raises(RingError) as error:
        Ring.of_process(os.getppid())
    assert error.value.code == "ring.missing"
    with pytest.raises(RingError) as error:
        Ring.of_process(2**22 - 1)
    assert error.value.code == "ring.missing"


def test_what_an_ended_rank_had_left_is_in_its_new_ring() -> None:
    with Ring.create(3, ring_bytes=4096) as old:
        size = old.fields.ring_bytes
        with mmap.mmap(old.fd, 0) as whole:
            whole[HEADER_BYTES + size - 16 : HEADER_BYTES + size] = b"a" * 16
            whole[HEADER_BYTES : HEADER_BYTES + 8] = b"b" * 8
            struct.pack_into("=Q", whole, 64, size + 8)  # head: once around the ring
            struct.pack_into("=Q", whole, 128, size - 16)  # tail
        left = old.unread()
        assert left == b"a" * 16 + b"b" * 8
    with Ring.of_ended(3, 17, left) as ring:
        assert (ring.step, ring.step_done, ring.tail, ring.head) == (17, 17, 0, 32)
        assert ring.unread()[:24] == left
        length, kind, _ = struct.unpack("=IHH", ring.unread()[24:])
        assert (length, kind) == (8, 18)
