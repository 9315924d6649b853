"""Checkpoints between nodes and the bucket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from model.ids import CheckpointId, NodeId
from proxy_runtime.checkpoint import CheckpointError, Part, Store
from proxy_runtime.storage import Bucket, FleetStore, StorageError
from proxy_runtime.storage.checkpoints import Pushed, assemble, pull, push
from proxy_runtime.storage.sources import BucketSource, PeerSource, Source, resolve
from tests.proxy_runtime.storage.builders import make_header, node_record, noise, write_parts


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


# -- what goes wrong ----------------------------------------------------------------------------------------------


class Cut:
    """A source that ends in the middle of every pack, or changes a byte of it."""

    def __init__(self, source: Source, *, after: int | None = None, flip: int | None = None) -> None:
        self.name = f"bad {source.name}"
        self.asked: list[int] = []
        self._source, self._after, self._flip = source, after, flip

    def pack(self, tenant: str, pack: str, start: int, end: int) -> Iterator[bytes | memoryview]:
        self.asked.append(start)
        data = b"".join(self._source.pack(tenant, pack, start, end))
        if self._flip is not None:
            at = self._flip - start
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        yield data if self._after is None else data[: self._after]
        if self._after is not None:
            raise StorageError(f"{self.name} does not answer.")

    def manifest(self, tenant: str, job: str, checkpoint: str) -> None:
        return None


@pytest.fixture
def checkpoint(fleet: FleetStore, node_store: Callable[[str], Store]) -> CheckpointId:
    """One pack of about 3 MB, in the bucket and on node a."""
    part, written = write_parts(node_store("a"), "a", {0: noise(3_000_000)})
    push(fleet, node_store("a"), part, written.packs)
    return assemble(fleet, node_store("a"), "job", 1, make_header(), [part]).root


def test_a_damaged_pack_of_a_peer_is_had_from_the_next_source(
    fleet: FleetStore, node_store: Callable[[str], Store], serve: Callable[..., str], checkpoint: CheckpointId
) -> None:
    (pack,) = node_store("a").read(checkpoint, "job").manifest.packs
    path = node_store("a").exchange.path(pack)
    data = bytearray(path.read_bytes())
    data[1_000_000] ^= 1
    path.write_bytes(data)
    peer = PeerSource("a@1", serve(node_store("a")), fleet.peer_token)
    told: list[tuple[int, int]] = []
    bucket = BucketSource(fleet.bucket)
    pull(fleet, node_store("b"), checkpoint, [peer, bucket], progress=lambda *at: told.append(at))
    assert node_store("b").read(checkpoint, "job").verify().files == 1
    assert told[-1][0] == told[-1][1] == len(data), "what was thrown away does not count"
    with pytest.raises(StorageError, match="damaged") as caught:
        pull(fleet, node_store("c"), checkpoint, [peer])
    assert caught.value.code == "storage.damaged"
    assert not node_store("c").exchange.has(pack)


def test_a_peer_that_dies_in_the_middle_is_continued_elsewhere(
    fleet: FleetStore, node_store: Callable[[str], Store], checkpoint: CheckpointId
) -> None:
    dying = Cut(BucketSource(fleet.bucket), after=1_000_000)
    whole = Cut(BucketSource(fleet.bucket))
    assert pull(fleet, node_store("b"), checkpoint, [dying, whole]).packs == 1
    assert (dying.asked, whole.asked) == ([0], [1_000_000])
    assert node_store("b").read(checkpoint, "job").verify().files == 1
    with pytest.raises(StorageError, match="does not answer"):
        pull(fleet, node_store("c"), checkpoint, [dying])
    assert pull(fleet, node_store("c"), checkpoint, [whole]).packs == 1
    assert whole.asked == [1_000_000, 1_000_000], "the next pull goes on where the last one ended"


def test_what_a_bad_peer_has_begun_is_not_blamed_on_the_next_one(
    fleet: FleetStore, node_store: Callable[[str], Store], checkpoint: CheckpointId
) -> None:
    bad = Cut(BucketSource(fleet.bucket), after=1_000_000, flip=500_000)
    good = Cut(BucketSource(fleet.bucket))
    pull(fleet, node_store("b"), checkpoint, [bad, good])
    assert good.asked == [1_000_000, 0]
    assert node_store("b").read(checkpoint, "job").verify().files == 1


def test_a_pack_in_which_damage_was_found_here_is_brought_again(
    fleet: FleetStore, node_store: Callable[[str], Store], checkpoint: CheckpointId
) -> None:
    store = node_store("b")
    pull(fleet, store, checkpoint, [BucketSource(fleet.bucket)])
    (pack,) = store.read(checkpoint, "job").manifest.packs
    with open(store.exchange.path(pack), "r+b") as file:
        file.seek(2_000_000)
        file.write(b"damage")
    with pytest.raises(CheckpointError, match="damaged"):
        store.read(checkpoint, "job").verify()
    assert pull(fleet, store, checkpoint, [BucketSource(fleet.bucket)]).packs == 1
    assert store.read(checkpoint, "job").verify().files == 1


def test_a_wrong_token_is_refused(
    fleet: FleetStore, node_store: Callable[[str], Store], serve: Callable[..., str], checkpoint: CheckpointId
) -> None:
    address = serve(node_store("a"))
    stranger = PeerSource("a@1", address, "0" * 64)
    with pytest.raises(StorageError) as caught:
        pull(fleet, node_store("b"), checkpoint, [stranger])
    assert caught.value.code == "storage.permission"
    with httpx.Client(base_url=f"http://{address}/v1", trust_env=False) as client:
        pack = "0" * 40
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": fleet.peer_token}):
            assert client.get(f"/packs/acme/{pack}", headers=headers).status_code == 401
        good = {"authorization": f"Bearer {fleet.peer_token}"}
        for path in (f"packs/acme/{pack}", "packs/acme/..%2f..%2fkeyring", "packs/A!/x", "manifests/acme/job/nothing"):
            assert client.get(f"/{path}", headers=good).status_code == 404


def test_a_peer_tells_manifests_and_ranges(
    fleet: FleetStore, node_store: Callable[[str], Store], serve: Callable[..., str], checkpoint: CheckpointId
) -> None:
    manifest = node_store("a").read(checkpoint, "job").manifest
    peer = PeerSource("a@1", serve(node_store("a")), fleet.peer_token)
    assert peer.manifest("acme", "job", checkpoint) == manifest
    assert peer.manifest("acme", "job", "ck-" + "0" * 40) is None
    content = node_store("a").exchange.path(manifest.packs[0]).read_bytes()
    assert b"".join(peer.pack("acme", manifest.packs[0], 1234, len(content))) == content[1234:]
    with pytest.raises(FileNotFoundError):
        list(peer.pack("acme", "0" * 40, 0, 1))


def test_a_peer_that_is_gone_is_passed_over(
    fleet: FleetStore, node_store: Callable[[str], Store], checkpoint: CheckpointId
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    gone = PeerSource("a@1", address, fleet.peer_token)
    assert pull(fleet, node_store("b"), checkpoint, [gone, BucketSource(fleet.bucket)]).packs == 1
    with pytest.raises(StorageError, match="does not answer"):
        pull(fleet, node_store("c"), checkpoint, [gone])


def test_a_pack_that_is_nowhere_is_told(
    fleet: FleetStore, node_store: Callable[[str], Store], checkpoint: CheckpointId
) -> None:
    fleet.bucket.delete(fleet.bucket.list("tenants/acme/packs")[0])
    with pytest.raises(StorageError, match="nowhere") as caught:
        pull(fleet, node_store("b"), checkpoint, [BucketSource(fleet.bucket)])
    assert caught.value.code == "storage.missing"
    with pytest.raises(StorageError, match="not in"):
        pull(fleet, node_store("b"), "ck-" + "0" * 40, [BucketSource(fleet.bucket)])


def test_a_commit_needs_the_packs_of_all_nodes_in_the_bucket(
    fleet: FleetStore, node_store: Callable[[str], Store]
) -> None:
    part, written = write_parts(node_store("a"), "a", {0: noise(100_000)})
    with pytest.raises(StorageError, match="What node a@1 has written"):
        assemble(fleet, node_store("a"), "job", 1, make_header(), [part])
    push(fleet, node_store("a"), part, written.packs)
    fleet.bucket.delete(fleet.bucket.list("tenants/acme/packs")[0])
    with pytest.raises(StorageError, match=r"Pack .* is not in"):
        assemble(fleet, node_store("a"), "job", 1, make_header(), [part])
    assert fleet.bucket.list("tenants/acme/manifests") == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], check=False).returncode:
        pytest.skip("cannot mount a file system here")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_is_told_and_nothing_is_half_done(
    fleet: FleetStore, node_store: Callable[[str], Store], checkpoint: CheckpointId, small_disk: Path
) -> None:
    store = fleet.node_store(small_disk / "store", "acme")
    with pytest.raises(StorageError, match="is full") as caught:
        pull(fleet, store, checkpoint, [BucketSource(fleet.bucket)] * 2)
    assert caught.value.code == "storage.full"
    with pytest.raises(CheckpointError):
        store.read(checkpoint, "job")
    full = Bucket.open(f"file://{small_disk}/bucket")
    pack = node_store("a").read(checkpoint, "job").manifest.packs[0]
    with pytest.raises(StorageError, match="is full"):
        full.put_file("x", node_store("a").exchange.path(pack))
    assert full.list("") == [] and list((small_disk / "bucket/.writing").iterdir()) == []


_PULLER = """
import sys
from pathlib import Path
from proxy_runtime.storage import Bucket, FleetStore
from proxy_runtime.storage.checkpoints import pull
from proxy_runtime.storage.sources import BucketSource

class Slow(BucketSource):
    def pack(self, tenant, pack, start, end):
        print("from", start, flush=True)
        data = b"".join(super().pack(tenant, pack, start, end))
        for at in range(0, len(data), 100_000):
            yield data[at:at + 100_000]
            if sys.argv[4] == "wait" and at >= 1_000_000:
                print("waiting", flush=True)
                sys.stdin.read()

fleet = FleetStore(Bucket.open(sys.argv[1]), bytes(range(32)))
pulled = pull(fleet, fleet.node_store(Path(sys.argv[2]), "acme"), sys.argv[3], [Slow(fleet.bucket)])
print("pulled", pulled.packs, flush=True)
"""


def puller(tmp_path: Path, checkpoint: str, mode: str) -> subprocess.Popen[str]:
    arguments = [f"file://{tmp_path}/bucket", str(tmp_path / "b"), checkpoint, mode]
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", _PULLER, *arguments], stdin=pipe, stdout=pipe, text=True)


def test_a_killed_puller_is_continued_and_two_at_once_bring_a_pack_once(
    node_store: Callable[[str], Store], checkpoint: CheckpointId, tmp_path: Path
) -> None:
    killed = puller(tmp_path, checkpoint, "wait")
    assert killed.stdout is not None
    assert [killed.stdout.readline() for _ in range(2)] == ["from 0\n", "waiting\n"]
    killed.kill()
    killed.wait()
    held = puller(tmp_path, checkpoint, "wait")
    assert held.stdout is not None
    first = held.stdout.readline()
    assert int(first.split()[1]) >= 1_000_000, "goes on where the killed one was"
    assert held.stdout.readline() == "waiting\n"
    other = puller(tmp_path, checkpoint, "go")
    out, _ = held.communicate("", timeout=60)
    assert "pulled 1" in out
    out, _ = other.communicate("", timeout=60)
    assert out == "pulled 0\n", "it has waited for the first one"
    assert node_store("b").read(checkpoint, "job").verify().files == 1


def test_only_the_packs_of_the_named_ranks_come(fleet: FleetStore, node_store: Callable[[str], Store]) -> None:
    parts = []
    for rank, name in enumerate("ab"):
        part, written = write_parts(node_store(name), name, {rank: noise(500_000)})
        push(fleet, node_store(name), part, written.packs)
        parts.append(part)
    root = assemble(fleet, node_store("a"), "job", 1, make_header(2), parts).root
    store = node_store("c")
    assert pull(fleet, store, root, [BucketSource(fleet.bucket)], ranks=[1]).packs == 1
    assert len(store.read(root, "job").read_file(Part.device(1), "storages")) == 500_000
    with pytest.raises(CheckpointError, match="missing"):
        store.read(root, "job").read_file(Part.device(0), "storages")
    assert pull(fleet, store, root, [BucketSource(fleet.bucket)]).packs == 1


def test_sources_are_resolved_by_node_records(fleet: FleetStore) -> None:
    record = fleet.claim_node(node_record("a", "127.0.0.1:7"))
    gone, lost = NodeId("a", 2), NodeId("zz", 1)
    names = [source.name for source in resolve(fleet, [record.node, gone, lost])]
    assert names == ["node a@1", fleet.bucket.url]
    assert [s.name for s in resolve(fleet, ["store", record.node])] == [fleet.bucket.url, "node a@1"]
    fleet.mark_lost(record.node)
    assert [s.name for s in resolve(fleet, [record.node])] == [fleet.bucket.url]


def test_a_store_of_another_fleet_is_refused(
    fleet: FleetStore, node_store: Callable[[str], Store], tmp_path: Path
) -> None:
    node_store("a")
    stranger = FleetStore(fleet.bucket, bytes(32))
    with pytest.raises(CheckpointError) as caught:
        stranger.node_store(tmp_path / "a", "acme")
    assert caught.value.code == "checkpoint.wrong-key"
