"""Rings that a container's keeper holds for all of its processes are the same ones after a restore."""

from __future__ import annotations

import os
import struct

from proxy_runtime.channel.ring import Ring
from proxy_runtime.process import inspect

WORD = 1100  # in the message area of a ring


def counter(ring: Ring) -> int:
    return struct.unpack("=Q", os.pread(ring.fd, 8, 8 * WORD))[0]


def test_shared_rings_survive_a_dump(lab, until):
    rings = [Ring.create(rank=rank, ring_bytes=1 << 16, response_bytes=4096, shared=True) for rank in range(3)]
    spec = lab.spec(
        "tree",
        env={"RINGS": f"{rings[0].fd},{rings[2].fd}"},
        keeper_fds=tuple(ring.fd for ring in rings),
    )
    container = lab.launch(spec)
    until(lambda: counter(rings[0]) > 3 and counter(rings[2]) > 3, "both processes count")
    seen = Ring.shared_of(container.keeper_pid)
    assert [ring.fields.rank for ring in seen] == [0, 1, 2]
    assert inspect.violations(container, shared_rings=True) == []
    assert [text for text in inspect.violations(container) if "maps the channel" in text]
    at_cut: list[int] = []
    lab.dump(container, on_frozen=lambda: at_cut.extend(map(counter, rings)))
    container.kill()
    for ring in (*seen, *rings):
        ring.close()

    paused: list[int] = []

    def on_paused(restored) -> None:
        found = Ring.shared_of(restored.keeper_pid)
        paused.extend(map(counter, found))
        for ring in found:
            ring.close()

    restored = lab.restore(spec, on_paused=on_paused)
    assert paused == at_cut
    again = Ring.shared_of(restored.keeper_pid)
    until(
        lambda: counter(again[0]) > at_cut[0] + 3 and counter(again[2]) > at_cut[2] + 3,
        "they count on, in the same rings",
    )
    assert counter(again[1]) == at_cut[1] == 0
    for ring in again:
        ring.close()
