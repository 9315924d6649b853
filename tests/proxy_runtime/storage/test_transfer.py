"""Checkpoints between nodes and the bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from proxy_runtime.checkpoint import Part, Store
from proxy_runtime.storage import FleetStore
from proxy_runtime.storage.checkpoints import Pushed, assemble, pull, push
from proxy_runtime.storage.sources import BucketSource, PeerSource
from tests.proxy_runtime.storage.builders import make_header, noise, write_parts


def test_a_checkpoint_of_two_nodes_is_had_by_a_third_one(
    fleet: FleetStore, node_store: Callable[[str], Store], serve: Callable[..., str], tmp_path: Path
) -> None:
    a, b, c = node_store("a"), node_store("b"), node_store("c")
    content = {rank: noise(3_000_000) for rank in range(2)}
    folder = tmp_path / "volume"
    folder.mkdir()
    (folder / "hello.txt").write_text("hello")
    parts = []
    for store, rank in ((a, 0), (b, 1)):
        part, written = write_parts(store, "ab"[rank], {rank: content[rank]}, volume=folder if rank == 0 else None)
        told: list[tuple[int, int]] = []
        pushed = push(fleet, store, part, written.packs, progress=lambda *at, told=told: told.append(at))
        assert pushed.packs == 1 and pushed.bytes > 3_000_000 and told[-1] == (pushed.bytes, pushed.bytes)
        assert push(fleet, store, part, written.packs) == Pushed(0, 0)
        parts.append(part)
    manifest = assemble(fleet, a, "job", 1, make_header(2), parts)
    peer = PeerSource("a@1", serve(a), fleet.peer_token)
    pulled = pull(fleet, c, manifest.root, [peer, BucketSource(fleet.bucket)])
    assert pulled.packs == 2 and pulled.bytes > 6_000_000
    assert pull(fleet, c, manifest.root, [peer]).bytes == 0
    reader = c.read(manifest.root, "job")
    for rank, data in content.items():
        assert reader.read_file(Part.device(rank), "storages") == data
    assert reader.read_file(Part.volume(), "hello.txt") == b"hello"
    assert reader.verify().files == 3
