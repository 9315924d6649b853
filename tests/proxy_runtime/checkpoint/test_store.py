"""The store's life: write, read, share, fence, list, collect, export."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3

from model.manifest import ManifestHeader
from proxy_runtime.checkpoint import CheckpointError, FencedError, Part, Store, open_checkpoint
from proxy_runtime.checkpoint.errors import (
    BUSY,
    MISSING,
    NOT_A_CHECKPOINT,
    OTHER_BUILD,
    OTHER_CLASS,
    UNSUPPORTED,
    WRONG_KEY,
)

Header = Callable[..., ManifestHeader]


def save(store: Store, header: ManifestHeader, data: bytes, *, job: str = "job", epoch: int = 1) -> str:
    with store.begin(job, epoch) as writer:
        writer.add_bytes(Part.device(0), "storages", data)
        return writer.commit(header)


def noise(size: int, seed: int = 0) -> bytes:
    return blake3(seed.to_bytes(4, "little")).digest(size)


def packs(store: Store) -> list[Path]:
    return sorted(store.path.glob("tenants/*/packs/*.pack"))


def test_round_trip_of_all_parts(store: Store, make_header: Header, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / "pages-1.img").write_bytes(noise(20 << 20))
    (images / "core.img").write_bytes(b"core")
    volume = tmp_path / "upper"
    (volume / "out").mkdir(parents=True)
    (volume / "out" / "loss.txt").write_text("1.5\n")
    with store.begin("job", 1) as writer:
        for rank in range(2):
            writer.add_tree(Part.process(rank), images)
            writer.add_bytes(Part.device(rank), "meta", b"{}")
            writer.add_file(Part.device(rank), "storages/0", images / "pages-1.img")
        writer.add_tree(Part.volume(), volume)
        checkpoint = writer.commit(make_header(2, 7))

    reader = Store.open(store.path).read(checkpoint)
    assert reader.id == checkpoint
    assert [str(p) for p in reader.parts()] == [
        "the process part of rank 0",
        "the device part of rank 0",
        "the process part of rank 1",
        "the device part of rank 1",
        "the volume",
    ]
    reader.restore_part(Part.process(1), tmp_path / "p1")
    reader.restore_part(Part.device(1), tmp_path / "d1")
    reader.restore_part(Part.volume(), tmp_path / "v")
    assert (tmp_path / "p1" / "pages-1.img").read_bytes() == noise(20 << 20)
    assert (tmp_path / "p1" / "core.img").read_bytes() == b"core"
    assert (tmp_path / "d1" / "storages" / "0").read_bytes() == noise(20 << 20)
    assert reader.read_file(Part.device(1), "meta") == b"{}"
    assert (tmp_path / "v" / "out" / "loss.txt").read_text() == "1.5\n"
    assert reader.verify().bytes < (21 << 20), "the same bytes in four files must be stored once"


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_compression_changes_no_byte(tmp_path: Path, make_header: Header, compression: str) -> None:
    store = Store.open(tmp_path / "s", compression=compression)  # type: ignore[arg-type]
    data = b"abcdefgh" * 100_000 + noise(100_000)
    save(store, make_header(), data)
    assert store.read().read_file(Part.device(0), "storages") == data
    stored = store.read().manifest.stored_bytes
    assert (stored < 200_000) == (compression == "zstd") or compression == "none"
    store.read().verify()


def test_unchanged_pages_are_not_stored_again(store: Store, make_header: Header) -> None:
    data = noise(8 << 20)
    save(store, make_header(step=1), data)
    shifted = noise(3 * 4096, 1) + data[: 4 << 20] + noise(4096, 2) + data[4 << 20 :]
    second = save(store, make_header(step=2), shifted)
    assert store.read(second).manifest.stored_bytes < 2 << 20
    assert store.read(second).read_file(Part.device(0), "storages") == shifted
    third = save(store, make_header(step=3), shifted)
    assert store.read(third).manifest.stored_bytes == 0


def test_zeros_and_holes_cost_nothing_and_stay_holes(store: Store, make_header: Header, tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(200 << 20)
        file.seek(100 << 20)
        file.write(noise(4096) + bytes(1 << 20) + b"end")
    with store.begin("job", 1) as writer:
        writer.add_file(Part.device(0), "sparse", path)
        writer.add_bytes(Part.device(0), "zeros", bytes(5 << 20))
        writer.commit(make_header())
    assert sum(p.stat().st_size for p in packs(store)) < 20_000
    store.read().restore_part(Part.device(0), tmp_path / "out")
    restored = tmp_path / "out" / "sparse"
    assert restored.read_bytes() == path.read_bytes()
    assert restored.stat().st_blocks * 512 < 1 << 20
    assert (tmp_path / "out" / "zeros").read_bytes() == bytes(5 << 20)


def test_packs_are_about_64_mib(store: Store, make_header: Header, tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(noise(150 << 20))
    with store.begin("job", 1) as writer:
        writer.add_file(Part.process(0), "big", path)
        writer.commit(make_header())
    sizes = sorted(p.stat().st_size >> 20 for p in packs(store))
    assert len(sizes) == 3
    assert sizes[-1] <= 80
    store.read().restore_part(Part.process(0), tmp_path / "out")
    assert (tmp_path / "out" / "big").read_bytes() == path.read_bytes()


def test_parts_may_be_added_from_many_threads(store: Store, make_header: Header, tmp_path: Path) -> None:
    for i in range(8):
        (tmp_path / str(i)).write_bytes(noise(3 << 20, i) + noise(1 << 20))
    with store.begin("job", 1) as writer, ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(writer.add_file, Part.process(i), "f", tmp_path / str(i)) for i in range(8)]
        for job in jobs:
            job.result()
        writer.commit(make_header(8))
    reader = store.read()
    for i in range(8):
        assert reader.read_file(Part.process(i), "f") == (tmp_path / str(i)).read_bytes()


def test_everything_is_private(store: Store, make_header: Header) -> None:
    save(store, make_header(), b"x")
    for path in store.path.rglob("*"):
        assert not path.stat().st_mode & 0o077, path
    assert stat.S_IMODE((store.path / "keyring").stat().st_mode) == 0o600


def test_keys_separate_tenants(tmp_path: Path, make_header: Header) -> None:
    data = noise(1 << 20)
    ids = set[bytes]()
    for tenant in ("one", "two"):
        store = Store.open(tmp_path / "s", tenant)
        save(store, make_header(), data)
        entry = store.read().tree(Part.device(0)).entries[0]
        ids.add(entry.chunks.encode())
    assert len(ids) == 2, "the same bytes must have other ids under another key"
    with pytest.raises(CheckpointError) as caught:
        Store.open(tmp_path / "s", "three", create=False)
    assert caught.value.code == WRONG_KEY


def test_a_higher_epoch_fences_a_lower_one(store: Store, make_header: Header) -> None:
    old = store.begin("job", 1)
    old.add_bytes(Part.device(0), "f", b"old")
    winner = save(store, make_header(step=5), b"new", epoch=2)
    with pytest.raises(FencedError) as caught:
        old.commit(make_header(step=9))
    old.abort()
    assert "epoch 2 has taken over" in str(caught.value)
    assert store.read().id == winner
    with pytest.raises(FencedError):
        store.begin("job", 1)
    save(store, make_header(), b"other job", job="other")  # fences nobody else


def test_without_a_head_the_epoch_of_manifests_still_fences(store: Store, make_header: Header) -> None:
    save(store, make_header(), b"x", epoch=5)
    next(store.path.rglob("HEAD")).unlink()
    with pytest.raises(FencedError):
        store.begin("job", 4)
    store.begin("job", 5).abort()


def test_parents_chain_and_list_shows_what_is_committed(store: Store, make_header: Header) -> None:
    ids = [save(store, make_header(step=s), noise(100, s)) for s in range(3)]
    assert [c.id for c in store.list("job")] == ids[::-1]
    assert [c.step for c in store.list()] == [2, 1, 0]
    assert [c.head for c in store.list("job")] == [True, False, False]
    assert store.read(ids[2]).manifest.header.parent == ids[1]
    assert store.list("nobody") == []


def test_abort_leaves_nothing_visible(store: Store, make_header: Header) -> None:
    first = save(store, make_header(), b"first")
    with store.begin("job", 1) as writer:
        writer.add_bytes(Part.device(0), "f", noise(1 << 20))
    assert store.read().id == first
    assert list(store.path.glob("tenants/local/writing/*")) == []
    with pytest.raises(CheckpointError, match="before"):
        writer.commit(make_header())


def test_gc_keeps_what_is_reachable_and_frees_the_rest(store: Store, make_header: Header) -> None:
    shared = noise(1 << 20)
    ids = [save(store, make_header(step=step), shared + noise(2 << 20, step + 1)) for step in range(4)]
    save(store, make_header(), noise(1 << 20, 99), job="other")
    with store.begin("job", 1) as writer:
        writer.add_bytes(Part.device(0), "f", noise(1 << 20, 50))
    before = sum(p.stat().st_size for p in packs(store))
    result = store.gc(keep=[ids[0]], last=2)
    after = sum(p.stat().st_size for p in packs(store))
    assert before - after == pytest.approx(result.freed_bytes, abs=10_000)
    assert result.checkpoints == 1
    assert result.freed_bytes > 1.9 * (1 << 20)
    for at in (0, 2, 3):
        data = store.read(ids[at]).read_file(Part.device(0), "storages")
        assert data == shared + noise(2 << 20, at + 1)
    assert Store.open(store.path).read(job="other").verify().bytes == 1 << 20
    with pytest.raises(CheckpointError) as caught:
        store.read(ids[1])
    assert caught.value.code == MISSING


def test_gc_repacks_a_pack_that_is_mostly_dead(store: Store, make_header: Header) -> None:
    small = noise(1 << 20)
    save(store, make_header(step=1), small + noise(6 << 20, 1))
    save(store, make_header(step=2), small)
    result = store.gc()
    assert result.freed_bytes > 5 << 20
    assert store.read().read_file(Part.device(0), "storages") == small
    assert Store.open(store.path).read().verify().bytes == 1 << 20
    assert save(store, make_header(step=3), small)
    assert store.read().manifest.stored_bytes == 0


def test_gc_waits_for_a_writer(store: Store, make_header: Header) -> None:
    save(store, make_header(), b"x")
    with store.begin("job", 1), pytest.raises(CheckpointError) as caught:
        store.gc(deadline_s=0)
    assert caught.value.code == BUSY
    store.gc(deadline_s=0)


def test_export_is_self_contained_and_keyed_anew(store: Store, make_header: Header, tmp_path: Path) -> None:
    data = noise(3 << 20) + bytes(1 << 20)
    save(store, make_header(step=1), b"earlier")
    save(store, make_header(step=2), data)
    copy = store.export(store.read(), tmp_path / "carried")
    moved = tmp_path / "moved"
    os.rename(tmp_path / "carried", moved)
    for reader in (open_checkpoint(moved), store.read(moved), store.read(str(moved))):
        assert reader.read_file(Part.device(0), "storages") == data
        assert reader.manifest.header.ranks[0].step == 2
        assert reader.manifest.key_id != store.read().manifest.key_id
        reader.verify()
    assert copy.id != store.read().id
    with pytest.raises(CheckpointError, match="not an empty directory"):
        store.export(store.read(), moved)


def test_a_restore_needs_an_empty_place(store: Store, make_header: Header, tmp_path: Path) -> None:
    save(store, make_header(), b"x")
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "mine").write_text("keep")
    with pytest.raises(CheckpointError, match="not an empty directory"):
        store.read().restore_part(Part.device(0), tmp_path / "busy")
    assert (tmp_path / "busy" / "mine").read_text() == "keep"


def test_require_refuses_another_build_and_class(store: Store, make_header: Header) -> None:
    save(store, make_header(), b"x")
    reader = store.read()
    reader.require(
        build_id="build-1", numerics=reader.manifest.header.numerics, cpu_features=["avx", "avx2", "avx512f"]
    )
    with pytest.raises(CheckpointError, match="made by build build-1") as caught:
        reader.require(build_id="build-2")
    assert caught.value.code == OTHER_BUILD
    other = reader.manifest.header.numerics.model_copy(update={"threads_per_device": 2})
    with pytest.raises(CheckpointError, match="threads_per_device 1, here 2") as caught:
        reader.require(numerics=other)
    assert caught.value.code == OTHER_CLASS
    with pytest.raises(CheckpointError, match="lacks: avx2"):
        reader.require(cpu_features=["avx"])


def test_what_is_not_there_is_said_in_one_sentence(store: Store, make_header: Header, tmp_path: Path) -> None:
    def code_of(call: Callable[[], object]) -> str:
        with pytest.raises(CheckpointError) as caught:
            call()
        return caught.value.code

    assert code_of(lambda: store.read()) == NOT_A_CHECKPOINT
    save(store, make_header(), b"x", job="a")
    save(store, make_header(), b"x", job="b")
    assert code_of(lambda: store.read()) == NOT_A_CHECKPOINT
    assert code_of(lambda: store.read("rubbish")) == NOT_A_CHECKPOINT
    assert code_of(lambda: store.read("ck-" + "0" * 40)) == MISSING
    assert code_of(lambda: store.read(job="a").restore_part(Part.volume(), tmp_path / "x")) == MISSING
    assert code_of(lambda: open_checkpoint(tmp_path / "nowhere")) == NOT_A_CHECKPOINT
    assert code_of(lambda: Store.open(Path(__file__).parent)) == NOT_A_CHECKPOINT
    assert code_of(lambda: store.begin("../escape", 1)) == UNSUPPORTED
    assert code_of(lambda: Store.open(store.path, "../escape")) == UNSUPPORTED


def test_a_part_of_a_stranger_is_refused(store: Store, make_header: Header) -> None:
    with store.begin("job", 1) as writer:
        writer.add_bytes(Part.device(3), "f", b"x")
        with pytest.raises(CheckpointError, match="rank 3 does not exist"):
            writer.commit(make_header(2))
    with pytest.raises(CheckpointError):
        store.read()


def test_the_same_name_twice_is_refused(store: Store) -> None:
    with store.begin("job", 1) as writer:
        writer.add_bytes(Part.device(0), "f", b"x")
        with pytest.raises(CheckpointError, match="added twice"):
            writer.add_bytes(Part.device(0), "f", b"y")


def test_parts_may_be_restored_from_many_threads(store: Store, make_header: Header, tmp_path: Path) -> None:
    with store.begin("job", 1) as writer:
        for rank in range(6):
            writer.add_bytes(Part.process(rank), "pages", noise(5 << 20) + noise(1 << 20, rank))
        writer.commit(make_header(6))
    reader = Store.open(store.path).read()
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(reader.restore_part, Part.process(r), tmp_path / str(r)) for r in range(6)]
        for job in jobs:
            job.result()
    for rank in range(6):
        assert (tmp_path / str(rank) / "pages").read_bytes() == noise(5 << 20) + noise(1 << 20, rank)


def test_no_descriptor_and_no_thread_is_left(store: Store, make_header: Header, tmp_path: Path) -> None:
    def here() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = here()
    save(store, make_header(), noise(1 << 20))
    store.begin("job", 1).abort()
    with store.begin("job", 1) as writer:
        writer.add_bytes(Part.device(0), "f", noise(1 << 20, 1))
    store.read().restore_part(Part.device(0), tmp_path / "out")
    store.read().verify()
    store.gc()
    assert here() == before


def test_a_file_that_is_not_there_is_named(store: Store, tmp_path: Path) -> None:
    with store.begin("job", 1) as writer, pytest.raises(CheckpointError, match=r"pages-1\.img: No such file"):
        writer.add_file(Part.process(0), "pages-1.img", tmp_path / "pages-1.img")


def test_a_rank_without_a_process_is_committed_only_where_it_has_exited_with_0(
    store: Store, make_header: Header, tmp_path: Path
) -> None:
    def commit(exits: dict[int, int]) -> str:
        with store.begin("job", 1) as writer:
            writer.add_bytes(Part.process(0), "core", b"image")
            return writer.commit(make_header(2), exits)

    for exits in ({}, {1: 1}, {1: 137}):
        with pytest.raises(CheckpointError, match="rank 1 has no process in it"):
            commit(exits)
    with pytest.raises(CheckpointError, match="is missing"):
        store.read("HEAD", "job")
    kept = store.read(commit({1: 0}), "job")
    assert [rank.exit_code for rank in kept.manifest.ranks] == [None, 0]
    copy = store.export(kept, tmp_path / "copy")
    assert [rank.exit_code for rank in copy.manifest.ranks] == [None, 0]
