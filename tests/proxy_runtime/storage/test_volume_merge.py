"""The three-way merge of volumes, against a model of single paths and by what must always hold."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.manifest import Tree, TreeEntry
from proxy_runtime.storage.volume_merge import merge

Files = dict[str, tuple[str, int]]
"""Content and time by path; directories are made as needed. Content ``!`` is a whiteout."""

DIGESTS = {c: c.encode().hex() * 32 for c in "abcdef"}


def tree(files: Files, *, folder_time: int | Mapping[str, int] = 1) -> Tree:
    def folder(path: str) -> TreeEntry:
        time = folder_time if isinstance(folder_time, int) else folder_time.get(path, 1)
        return TreeEntry(path=path, kind="directory", mode=0o755, mtime_ns=time)

    entries = {".": folder(".")}
    for path, (content, time) in files.items():
        parts = path.split("/")
        for n in range(1, len(parts)):
            parent = "/".join(parts[:n])
            entries.setdefault(parent, folder(parent))
        if content == "!":
            entries[path] = TreeEntry(path=path, kind="whiteout", mtime_ns=time)
        elif content == "/":
            entries[path] = folder(path)
        else:
            size = len(content)
            entries[path] = TreeEntry(path=path, kind="file", size=size, mtime_ns=time, digest=DIGESTS[content[0]])
    return Tree(entries=tuple(entries[p] for p in sorted(entries, key=lambda p: [] if p == "." else p.split("/"))))


def files_of(merged: Tree) -> dict[str, tuple[str, int]]:
    by_digest = {digest: content for content, digest in DIGESTS.items()}
    return {
        e.path: ("!" if e.kind == "whiteout" else by_digest[e.digest or ""], e.mtime_ns)
        for e in merged.entries
        if e.kind != "directory"
    }


def test_what_each_node_has_made_is_in_the_whole() -> None:
    base = tree({"directory/model.py": ("a", 5)})
    merged = merge(
        base,
        {
            "n1": tree({"directory/model.py": ("a", 5), "directory/out/loss.txt": ("b", 9)}),
            "n2": tree({"directory/model.py": ("a", 5), "directory/out/eval.txt": ("c", 8)}),
        },
    )
    assert merged.warnings == ()
    assert files_of(merged.tree) == {
        "directory/model.py": ("a", 5),
        "directory/out/loss.txt": ("b", 9),
        "directory/out/eval.txt": ("c", 8),
    }


@pytest.mark.parametrize(
    ("one", "two", "expected", "warned"),
    [
        (("b", 7), ("c", 9), ("c", 9), True),
        (("c", 9), ("b", 7), ("c", 9), True),
        (("b", 7), ("b", 9), ("b", 9), False),
        (("a", 5), ("b", 3), ("b", 3), False),
        (("!", 0), ("a", 5), ("!", 0), False),
        (None, ("a", 5), None, False),
        (None, ("b", 30), ("b", 30), True),
        (None, ("b", 7), None, True),
        (None, None, None, False),
    ],
)
def test_of_two_changes_of_a_file_the_later_counts(
    one: tuple[str, int] | None, two: tuple[str, int] | None, expected: tuple[str, int] | None, warned: bool
) -> None:
    """Directories were last changed at 20: then a file was removed, where it is not there any more."""
    base = tree({"d/f": ("a", 5), "d/g": ("a", 1)}, folder_time=20)
    nodes = [tree({"d/g": ("a", 1)} | ({"d/f": side} if side else {}), folder_time=20) for side in (one, two)]
    for names in ("ab", "ba"):
        merged = merge(base, dict(zip(names, nodes, strict=True)))
        assert files_of(merged.tree).get("d/f") == expected
        assert bool(merged.warnings) is warned
        assert all("d/f was changed on" in warning for warning in merged.warnings)


def test_a_directory_that_one_node_removed_stays_where_another_has_worked_in_it_later() -> None:
    base = tree({"d/x": ("a", 1), "d/y": ("a", 1)})
    merged = merge(base, {"n1": tree({}, folder_time={".": 5}), "n2": tree({"d/x": ("b", 9), "d/y": ("a", 1)})})
    assert files_of(merged.tree) == {"d/x": ("b", 9), "d/y": ("a", 1)}
    merged = merge(base, {"n1": tree({}, folder_time={".": 50}), "n2": tree({"d/x": ("b", 9), "d/y": ("a", 1)})})
    assert files_of(merged.tree) == {}
    assert len(merged.warnings) == 1


def test_a_directory_that_became_a_file_meets_work_in_it() -> None:
    base = tree({"d/x": ("a", 1)})
    nodes = {"n1": tree({"d": ("f", 7)}), "n2": tree({"d/x": ("a", 1), "d/z": ("b", 9)})}
    assert files_of(merge(base, nodes).tree) == {"d/x": ("a", 1), "d/z": ("b", 9)}
    nodes["n1"] = tree({"d": ("f", 11)})
    assert files_of(merge(base, nodes).tree) == {"d": ("f", 11)}


def test_the_longest_log_of_a_rank_counts_without_a_word() -> None:
    path = "private/logs/rank-1.log"
    merged = merge(None, {"n1": tree({path: ("a", 99)}), "n2": tree({path: ("bbbb", 9)})})
    assert (files_of(merged.tree), merged.warnings) == ({path: ("b", 9)}, ())


def test_an_opaque_directory_stays_opaque() -> None:
    opaque = {"trusted.overlay.opaque": base64.b64encode(b"y").decode()}
    one = tree({"d/x": ("a", 3)})
    one = Tree(entries=tuple(e.model_copy(update={"xattrs": opaque}) if e.path == "d" else e for e in one.entries))
    merged = merge(None, {"n1": one, "n2": tree({"d/y": ("b", 9)}, folder_time=9)})
    assert next(e for e in merged.tree.entries if e.path == "d").xattrs == opaque
    assert files_of(merged.tree) == {"d/x": ("a", 3), "d/y": ("b", 9)}


def test_a_hard_link_whose_target_has_changed_is_a_file_of_its_own() -> None:
    link = TreeEntry(path="z", kind="hardlink", target="a")
    base = Tree(entries=(*tree({"a": ("a", 1)}).entries, link))
    two = Tree(entries=(*tree({"a": ("b", 9)}).entries,))
    same = merge(base, {"n1": base, "n2": base})
    assert same.tree.entries[-1] == link
    merged = merge(base, {"n1": tree({"a": ("c", 5), "z": ("a", 1)}), "n2": base})
    assert files_of(merged.tree) == {"a": ("c", 5), "z": ("a", 1)}
    assert "z" not in files_of(merge(base, {"n1": two, "n2": base}).tree)


# -- any trees ----------------------------------------------------------------------------------------------------

NAMES = ["a", "b", "d/a", "d/b", "d/e/a", "d/e", "d"]


@st.composite
def volumes(draw: st.DrawFn) -> Files:
    chosen = draw(st.dictionaries(st.sampled_from(NAMES), st.tuples(st.sampled_from("abc!"), st.integers(1, 9))))
    return {p: v for p, v in chosen.items() if not any(q.startswith(p + "/") for q in chosen)}


@given(base=st.none() | volumes(), sides=st.lists(volumes(), min_size=1, max_size=3))
def test_any_merge_is_a_tree_of_what_was_given_in_any_order(base: Files | None, sides: list[Files]) -> None:
    before = None if base is None else tree(base)
    nodes = {f"n{i}": tree(side) for i, side in enumerate(sides)}
    merged = merge(before, nodes)
    assert merge(before, dict(reversed(nodes.items()))) == merged
    result = files_of(merged.tree)
    for path, value in result.items():
        assert any(side.get(path) == value for side in sides)
    changed = [side for side in sides if side != (base or {})]
    if len(changed) <= 1:
        assert result == (changed[0] if changed else base or {})
        assert merged.warnings == ()
    for path, value in (base or {}).items():  # nobody has touched it
        if all(side.get(path) == value for side in sides):
            assert result.get(path) == value


FLAT = st.dictionaries(st.sampled_from("pqrst"), st.tuples(st.sampled_from("abc!"), st.integers(1, 9)))


@given(base=FLAT, sides=st.lists(FLAT, min_size=2, max_size=3), removed_at=st.lists(st.integers(1, 9), min_size=3))
def test_every_path_is_decided_as_the_model_says(base: Files, sides: list[Files], removed_at: list[int]) -> None:
    nodes = {f"n{i}": tree(side, folder_time=removed_at[i]) for i, side in enumerate(sides)}
    expected: Files = {}
    for path in set(base).union(*sides):
        changes = []
        for i, side in enumerate(sides):
            value = side.get(path)
            if value != base.get(path):
                gone = value is None or value[0] == "!"
                changes.append((removed_at[i] if gone else value[1], f"n{i}", value))  # type: ignore[index]
        winner = max(changes, key=lambda change: change[:2])[2] if changes else base.get(path)
        if winner is not None:
            expected[path] = winner
    assert files_of(merge(tree(base), nodes).tree) == expected
