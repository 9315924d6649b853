"""A job's directory out of two lists of files, against what a real overlay shows."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cli.fleet.layers import Layer, names, select
from model.manifest import TreeEntry, encode_path
from proxy_runtime.checkpoint import volume


def tree_of(root, prefix=b""):
    """The list of files as a checkpoint has it."""
    entries = []
    for found in volume.capture(root).nodes:
        path = b"/".join(part for part in (prefix, b"" if found.path == b"." else found.path) if part) or b"."
        target = found.target
        if found.kind == "hardlink" and prefix:
            target = prefix + b"/" + target
        entries.append(
            TreeEntry(
                path=encode_path(path),
                kind=found.kind,
                mode=found.mode,
                xattrs=dict.fromkeys(found.xattrs, "eQ=="),
                target=None if target is None else encode_path(target),
                digest="0" * 64 if found.kind == "file" else None,
                size=found.size,
            )
        )
    return tuple(entries)


def shown(root):
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob("*"))


def listed(found):
    return sorted(b"/".join(one.path).decode() for one in found if one.path)


@pytest.fixture
def overlay(tmp_path):
    """A real overlay: what a job is submitted with, its changes, and both together."""
    lower, upper, work, merged = (tmp_path / name for name in ("lower", "upper", "work", "merged"))
    for path in (lower, upper, work, merged):
        path.mkdir()
    for name in ("keep/a", "keep/deep/b", "gone/c", "replaced/d", "remade/e", "file", "turned"):
        (lower / name).parent.mkdir(parents=True, exist_ok=True)
        (lower / name).write_text(name)
    options = f"lowerdir={lower},upperdir={upper},workdir={work},redirect_dir=on,metacopy=off"
    done = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no overlay can be mounted here: {done.stderr}")
    yield lower, upper, merged
    subprocess.run(["umount", str(merged)], check=True)


def change(merged):
    """What a job might do to its directory."""
    (merged / "new" / "results").mkdir(parents=True)
    (merged / "new" / "results" / "weights").write_bytes(b"w" * 10)
    os.link(merged / "new" / "results" / "weights", merged / "new" / "again")
    (merged / "new" / "latest").symlink_to("results/weights")
    (merged / "keep" / "deep" / "b").write_text("changed")
    (merged / "keep" / "more").write_text("more")
    (merged / "gone" / "c").unlink()
    (merged / "gone").rmdir()
    (merged / "replaced" / "d").unlink()
    (merged / "replaced").rmdir()
    (merged / "replaced").write_text("a file now")
    (merged / "remade" / "e").unlink()
    (merged / "remade").rmdir()
    (merged / "remade").mkdir()
    (merged / "remade" / "f").write_text("f")
    (merged / "turned").unlink()
    (merged / "turned").symlink_to("file")


@pytest.mark.parametrize("place", ["", "new", "keep", "remade", "gone", "replaced", "new/results"])
def test_as_the_job_saw_it(overlay, place):
    lower, upper, merged = overlay
    change(merged)
    parts = tuple(part.encode() for part in place.split("/") if part)
    found = select(tree_of(lower), tree_of(upper, b"directory"), parts)
    assert found is not None
    assert listed(found) == shown(merged / place)
    assert bool(found) == (merged / place).exists()
    kinds = {b"/".join(one.path).decode(): one for one in found}
    if place == "new":
        assert kinds["again"].entry.kind == "file"
        assert kinds["again"].entry.size == 10
        assert kinds["latest"].entry.target == "results/weights"
    if place == "keep":
        assert kinds["deep/b"].layer is Layer.CHANGED
        assert kinds["a"].layer is Layer.SUBMITTED


def test_parents_come_first(overlay):
    lower, upper, merged = overlay
    change(merged)
    seen = {()}
    for one in select(tree_of(lower), tree_of(upper, b"directory"), ()):
        assert one.path == () or one.path[:-1] in seen
        seen.add(one.path)


def test_a_renamed_directory_is_left_to_the_whole_layers(overlay):
    lower, upper, merged = overlay
    (merged / "keep").rename(merged / "kept")
    if not any("redirect" in name for name in os.listxattr(upper / "kept")):
        pytest.skip("this kernel copies renamed directories")
    assert select(tree_of(lower), tree_of(upper, b"directory"), ()) is None


def test_one_layer_alone(tmp_path):
    (tmp_path / "a").write_text("a")
    tree = tree_of(tmp_path)
    assert [one.path for one in select(tree, (), (b"a",))] == [()]
    assert select((), tree_of(tmp_path, b"directory"), (b"b",)) == []
    assert select((), (), ()) == []
    assert names(tree, (), ()) == ["a"]
