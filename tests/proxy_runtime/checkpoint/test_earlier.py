"""A part restored over the files of an earlier one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.manifest import ManifestHeader
from proxy_runtime.checkpoint import CheckpointError, Part, Store
from proxy_runtime.checkpoint.errors import DAMAGED, MISSING
from proxy_runtime.checkpoint.reader import CheckpointReader, Earlier
from tests.proxy_runtime.checkpoint.test_properties import gather, header, plant
from tests.proxy_runtime.checkpoint.test_store import Header, noise, packs

PROCESS = Part.process(0)
PAGE = 4096

files = st.dictionaries(
    st.sampled_from(["pages-1.img", "core.img", "other"]),
    st.tuples(st.lists(st.integers(0, 5), max_size=60), st.binary(max_size=5)).map(
        lambda made: b"".join(n.to_bytes(2, "little") * (PAGE // 2) for n in made[0]) + made[1]
    ),
    max_size=3,
)


def saved(store: Store, made: ManifestHeader, tree: Path) -> CheckpointReader:
    with store.begin("job", 1) as writer:
        writer.add_tree(PROCESS, tree)
        return store.read(writer.commit(made))


def restored(reader: CheckpointReader, dest: Path) -> Earlier:
    reader.restore_part(PROCESS, dest)
    return Earlier(dest, reader.tree(PROCESS))


@settings(deadline=None, max_examples=60)
@given(files, files)
def test_whatever_was_there_before_the_files_are_those_of_the_checkpoint(
    old: dict[str, object], new: dict[str, object]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        plant(base / "old", old)
        plant(base / "new", new)
        store = Store.open(base / "s")
        earlier = restored(saved(store, header(1), base / "old"), base / "earlier")
        saved(store, header(2), base / "new").restore_part(PROCESS, base / "out", earlier)
        assert gather(base / "out") == new


def pair(store: Store, make_header: Header, tmp_path: Path) -> tuple[Earlier, CheckpointReader, bytes]:
    """8 MiB of which a later checkpoint has 64 KiB that are new."""
    tree = tmp_path / "tree"
    tree.mkdir()
    image = bytearray(noise(8 << 20))
    (tree / "pages-1.img").write_bytes(image)
    earlier = restored(saved(store, make_header(step=1), tree), tmp_path / "earlier")
    image[2 << 20 : (2 << 20) + (64 << 10)] = noise(64 << 10, seed=1)
    (tree / "pages-1.img").write_bytes(image)
    return earlier, saved(store, make_header(step=2), tree), bytes(image)


def test_what_is_there_is_not_read_again(store: Store, make_header: Header, tmp_path: Path) -> None:
    earlier, later, image = pair(store, make_header, tmp_path)
    first = min(packs(store), key=lambda path: path.stat().st_mtime_ns)
    assert first.stat().st_size > 8 << 20
    first.unlink()
    later = Store.open(store.path).read(later.id)
    with pytest.raises(CheckpointError) as without:
        later.restore_part(PROCESS, tmp_path / "without")
    assert without.value.code == MISSING
    later.restore_part(PROCESS, tmp_path / "out", earlier)
    assert (tmp_path / "out" / "pages-1.img").read_bytes() == image


def test_what_is_read_is_proved(store: Store, make_header: Header, tmp_path: Path) -> None:
    earlier, later, _ = pair(store, make_header, tmp_path)
    last = max(packs(store), key=lambda path: path.stat().st_mtime_ns)
    with last.open("r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    with pytest.raises(CheckpointError) as caught:
        Store.open(store.path).read(later.id).restore_part(PROCESS, tmp_path / "out", earlier)
    assert caught.value.code == DAMAGED
    assert gather(tmp_path / "out") == {}


def test_without_the_earlier_files_all_is_read(store: Store, make_header: Header, tmp_path: Path) -> None:
    earlier, later, image = pair(store, make_header, tmp_path)
    (earlier.directory / "pages-1.img").unlink()
    later.restore_part(PROCESS, tmp_path / "out", earlier)
    assert (tmp_path / "out" / "pages-1.img").read_bytes() == image


def test_names_that_share_a_file_still_share_it(store: Store, make_header: Callable[..., ManifestHeader],
                                                tmp_path: Path) -> None:  # fmt: skip
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_bytes(noise(PAGE))
    earlier = restored(saved(store, make_header(step=1), tree), tmp_path / "earlier")
    os.link(tree / "a", tree / "b")
    saved(store, make_header(step=2), tree).restore_part(PROCESS, tmp_path / "out", earlier)
    assert (tmp_path / "out" / "a").samefile(tmp_path / "out" / "b")
    assert (tmp_path / "out" / "b").read_bytes() == noise(PAGE)
