"""A disk that is full: a real small one."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from model.manifest import ManifestHeader
from proxy_runtime.checkpoint import CheckpointError, Part, Store
from proxy_runtime.checkpoint.errors import NO_SPACE

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", path], check=True)
    yield path
    subprocess.run(["umount", path], check=True)


def test_writing_names_the_place_and_the_bytes(
    small: Path, tmp_path: Path, make_header: Callable[..., ManifestHeader]
) -> None:
    store = Store.open(small / "store")
    with store.begin("job", 1) as writer:
        writer.add_bytes(Part.device(0), "storages", b"first")
        writer.commit(make_header())
    big = tmp_path / "big"
    big.write_bytes(random.Random(0).randbytes(20 << 20))
    with store.begin("job", 1) as writer:
        with pytest.raises(CheckpointError) as caught:
            writer.add_file(Part.process(0), "pages-1.img", big)
        assert caught.value.code == NO_SPACE
        assert str(small / "store") in caught.value.message
        assert str(20 << 20) in caught.value.message
    with pytest.raises(CheckpointError) as caught:
        store.begin("job", 1, expected_bytes=9 << 20)
    assert caught.value.code == NO_SPACE
    assert store.read().read_file(Part.device(0), "storages") == b"first"
    assert list(store.path.glob("tenants/local/writing/*")) == [], "the space must be given back"


def test_restoring_checks_the_space_beforehand(
    small: Path, tmp_path: Path, make_header: Callable[..., ManifestHeader]
) -> None:
    store = Store.open(tmp_path / "store")
    with store.begin("job", 1) as writer:
        writer.add_bytes(Part.device(0), "storages", random.Random(0).randbytes(10 << 20))
        writer.add_bytes(Part.device(0), "zeros", bytes(30 << 20))
        writer.commit(make_header())
    with pytest.raises(CheckpointError) as caught:
        store.read().restore_part(Part.device(0), small / "out")
    assert caught.value.code == NO_SPACE
    assert str(10 << 20) in caught.value.message
    assert list(small.iterdir()) == []
