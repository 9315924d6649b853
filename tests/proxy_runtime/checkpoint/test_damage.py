"""A flipped byte, a cut or a loss in every kind of file: one clear sentence, never a wrong byte."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from model.manifest import ManifestHeader
from proxy_runtime.checkpoint import CheckpointError, Part, Store, merkle
from proxy_runtime.checkpoint.errors import (
    DAMAGED,
    FENCED,
    MISSING,
    NEWER_FORMAT,
    NOT_A_CHECKPOINT,
    WRONG_KEY,
)

CONTENT = random.Random(5).randbytes(300_000) + bytes(50_000) + b"end"
KINDS = ("format", "keyring", "HEAD", "manifests/*", "packs/*.pack")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, make_header: Callable[..., ManifestHeader]) -> Path:
    path = tmp_path_factory.mktemp("original") / "store"
    with Store.open(path).begin("job", 3) as writer:
        writer.add_bytes(Part.device(0), "storages", CONTENT)
        writer.add_bytes(Part.process(0), "core-1.img", b"core")
        writer.commit(make_header())
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    """A copy of a good store, to be damaged."""
    return shutil.copytree(original, tmp_path / "store")


def victim(path: Path, kind: str) -> Path:
    (file,) = path.rglob(kind)
    return file


def restore_all(path: Path, dest: Path) -> dict[str, bytes]:
    reader = Store.open(path, create=False).read()
    reader.restore_part(Part.device(0), dest / "d")
    reader.restore_part(Part.process(0), dest / "p")
    reader.verify()
    return {"storages": (dest / "d/storages").read_bytes(), "core": (dest / "p/core-1.img").read_bytes()}


def refused(path: Path, dest: Path) -> CheckpointError:
    """Restores, which must fail in one sentence and leave nothing."""
    with pytest.raises(CheckpointError) as caught:
        restore_all(path, dest)
    text = caught.value.message
    assert text.endswith("."), text
    assert "\n" not in text
    assert not any(p.is_file() for p in (dest / "d").rglob("*")) or (dest / "d/storages").read_bytes() == CONTENT
    return caught.value


def test_the_undamaged_store_restores(path: Path, tmp_path: Path) -> None:
    assert restore_all(path, tmp_path / "out") == {"storages": CONTENT, "core": b"core"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte(kind: str, path: Path, tmp_path: Path) -> None:
    file = victim(path, kind)
    data = file.read_bytes()
    places = range(len(data)) if len(data) < 400 else sorted(random.Random(kind).sample(range(len(data)), 120))
    for at in places:
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])
        error = refused(path, tmp_path / str(at))
        assert error.code == DAMAGED, (at, str(error))
        assert file.name in error.message, (at, str(error))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_truncated_file(kind: str, keep: float, path: Path, tmp_path: Path) -> None:
    file = victim(path, kind)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    error = refused(path, tmp_path / "out")
    assert error.code == DAMAGED, str(error)
    assert file.name in error.message


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_file(kind: str, path: Path, tmp_path: Path) -> None:
    file = victim(path, kind)
    file.unlink()
    error = refused(path, tmp_path / "out")
    assert error.code == (NOT_A_CHECKPOINT if kind == "format" else MISSING), str(error)
    assert str(path) in error.message


def test_a_damaged_chunk_says_what_it_holds(path: Path, tmp_path: Path) -> None:
    file = victim(path, "packs/*.pack")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    error = refused(path, tmp_path / "out")
    assert "storages in the device part of rank 0" in error.message
    assert "offset 64" in error.message


def test_a_pack_exchanged_for_another_is_noticed(path: Path, tmp_path: Path, make_header: object) -> None:
    other = Store.open(tmp_path / "other")
    with other.begin("job", 1) as writer:
        writer.add_bytes(Part.device(0), "storages", CONTENT)
        writer.commit(make_header())  # type: ignore[operator]
    shutil.copy(victim(other.path, "packs/*.pack"), victim(path, "packs/*.pack"))
    assert refused(path, tmp_path / "out").code == DAMAGED


def test_the_keyring_of_another_store(path: Path, tmp_path: Path) -> None:
    other = Store.open(tmp_path / "other")
    shutil.copy(other.path / "keyring", path / "keyring")
    error = refused(path, tmp_path / "out")
    assert error.code == WRONG_KEY
    assert "keyring" in str(error)


def test_a_forged_manifest_with_a_right_checksum(path: Path, tmp_path: Path) -> None:
    file = victim(path, "manifests/*")
    document = orjson.loads(file.read_bytes().splitlines()[0])
    document["header"]["cwd"] = "/elsewhere"
    rewrite(file, document)
    assert refused(path, tmp_path / "out").code == DAMAGED


@pytest.mark.parametrize("kind", ["format", "keyring", "HEAD", "manifests/*"])
def test_a_newer_format_is_not_guessed_at(kind: str, path: Path, tmp_path: Path) -> None:
    file = victim(path, kind)
    document = orjson.loads(file.read_bytes().splitlines()[0])
    rewrite(file, {**document, "version": 2, "news": True})
    error = refused(path, tmp_path / "out")
    assert error.code == NEWER_FORMAT
    assert "version 2" in error.message


def test_a_newer_pack_is_not_guessed_at(path: Path, tmp_path: Path) -> None:
    file = victim(path, "packs/*.pack")
    data = bytearray(file.read_bytes())
    data[8] = 2
    file.write_bytes(data)
    assert refused(path, tmp_path / "out").code in (DAMAGED, NEWER_FORMAT)


def test_damage_stops_collection_before_anything_is_removed(path: Path) -> None:
    before = sorted(path.rglob("*"))
    file = victim(path, "packs/*.pack")
    data = file.read_bytes()
    for bad in (data[:-1], data[:-40] + b"x" + data[-39:]):
        file.write_bytes(bad)
        with pytest.raises(CheckpointError):
            Store.open(path).gc()
        assert sorted(p for p in path.rglob("*") if p.name != "lock") == [p for p in before if p.name != "lock"]


def test_new_checkpoints_do_not_build_on_a_damaged_index(
    path: Path, make_header: Callable[..., ManifestHeader]
) -> None:
    file = victim(path, "packs/*.pack")
    file.write_bytes(file.read_bytes()[:-1])
    store = Store.open(path)
    with store.begin("job", 3) as writer:
        writer.add_bytes(Part.device(0), "storages", CONTENT)
        writer.commit(make_header(step=9))
    assert Store.open(path).read().read_file(Part.device(0), "storages") == CONTENT


def test_a_new_checkpoint_does_not_build_on_a_damaged_chunk(
    path: Path, tmp_path: Path, make_header: Callable[..., ManifestHeader]
) -> None:
    file = victim(path, "packs/*.pack")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    refused(path, tmp_path / "out")
    store = Store.open(path)
    with store.begin("job", 3) as writer:
        writer.add_bytes(Part.device(0), "storages", CONTENT)
        writer.commit(make_header(step=9))
    assert store.read().read_file(Part.device(0), "storages") == CONTENT
    first = Store.open(path).list("job")[-1].id
    assert Store.open(path).read(first).read_file(Part.device(0), "storages") == CONTENT, "the old one is healed"
    store.gc(last=2)
    assert Store.open(path).read(first).verify()


def test_a_damaged_head_does_not_unfence(path: Path) -> None:
    file = victim(path, "HEAD")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError) as caught:
        Store.open(path).begin("job", 1)
    assert caught.value.code == DAMAGED
    file.unlink()
    with pytest.raises(CheckpointError) as caught:
        Store.open(path).begin("job", 2)
    assert caught.value.code == FENCED


def rewrite(file: Path, document: dict[str, object]) -> None:
    """Writes a document with a checksum that fits."""
    body = orjson.dumps(document, option=orjson.OPT_SORT_KEYS)
    file.write_bytes(body + b"\n" + merkle.plain(body).encode() + b"\n")
