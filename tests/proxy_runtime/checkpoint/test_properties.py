"""Properties of chunking, round trips and histories, on random inputs."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from model.ids import Step
from model.manifest import HostClass, ManifestHeader, NumericsClass, RankState
from proxy_runtime.checkpoint import CheckpointError, FencedError, Part, Store, chunking
from proxy_runtime.checkpoint.chunking import MAX_CHUNK, PAGE, split


def page(number: int) -> bytes:
    """A page of content that the number decides; 0 is zeros, and 1 to 3 are not random."""
    if number == 0:
        return bytes(PAGE)
    return bytes([number]) * PAGE if number < 4 else blake3(number.to_bytes(4, "little")).digest(PAGE)


pages = st.lists(st.integers(0, 40), max_size=300)


@settings(deadline=None, max_examples=60)
@given(pages, st.binary(max_size=5000))
def test_spans_cover_a_buffer_and_tell_the_truth(numbers: list[int], tail: bytes) -> None:
    data = b"".join(page(n) for n in numbers) + tail
    end = 0
    for span in split(memoryview(data)):
        assert span.start == end < span.end
        assert span.zero == (not any(data[span.start : span.end]))
        assert span.zero or span.end - span.start <= MAX_CHUNK
        assert span.end % PAGE == 0 or span.end == len(data)
        end = span.end
    assert end == len(data)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(4, 10_000), min_size=200, max_size=400), st.lists(st.integers(4, 10_000), max_size=5))
def test_pages_put_in_front_change_only_the_first_chunks(numbers: list[int], front: list[int]) -> None:
    def chunks(data: bytes) -> list[bytes]:
        return [data[s.start : s.end] for s in split(memoryview(data))]

    body = b"".join(page(n) for n in numbers)
    first, second = chunks(body), chunks(b"".join(page(n) for n in front) + body)
    fresh = [c for c in second if c not in set(first)]
    # Up to the first boundary that content makes; without one within 64 pages the limit makes others.
    natural = [i for i, n in enumerate(numbers) if _ends(page(n))]
    if natural and natural[0] < 50 and all(b - a < 60 for a, b in itertools.pairwise(natural)):
        assert sum(map(len, fresh)) <= (natural[0] + 1 + len(front)) * PAGE


def _ends(data: bytes) -> bool:
    # A page that ends a chunk ends one also when it is alone in front of another.
    spans = list(split(memoryview(data + page(20_000))))
    return spans[0].end == PAGE


def test_a_sum_that_wraps_to_zero_is_not_zeros() -> None:
    data = bytearray(PAGE)
    data[7] = data[15] = 0x80  # two words of 2**63
    assert [s.zero for s in split(memoryview(bytes(data)))] == [False]
    assert chunking.PAGE == 4096


names = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda n: n not in (".", "..") and len(n.encode()) < 200
)
trees: st.SearchStrategy[dict[str, object]] = st.recursive(
    st.one_of(st.binary(max_size=300), pages.map(lambda ns: b"".join(map(page, ns[:40])))),  # type: ignore[arg-type]
    lambda children: st.dictionaries(names, children, max_size=4),
    max_leaves=12,
)


def plant(root: Path, tree: object) -> None:
    if isinstance(tree, bytes):
        root.write_bytes(tree)
        return
    root.mkdir()
    assert isinstance(tree, dict)
    for name, child in tree.items():
        plant(root / name, child)


def gather(root: Path) -> object:
    return root.read_bytes() if root.is_file() else {p.name: gather(p) for p in root.iterdir()}


@settings(deadline=None, max_examples=30)
@given(st.dictionaries(names, trees, max_size=4), st.sampled_from(["none", "zstd"]))
def test_any_tree_comes_back(tree: dict[str, object], compression: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        plant(base / "in", tree)
        store = Store.open(base / "s", compression=compression)  # type: ignore[arg-type]
        with store.begin("job", 1) as writer:
            writer.add_tree(Part.volume(), base / "in")
            writer.commit(header(0))
        reader = Store.open(base / "s").read()
        reader.verify()
        reader.restore_part(Part.volume(), base / "out")
        assert gather(base / "out") == tree


def header(step: int) -> ManifestHeader:
    return ManifestHeader(
        world_size=1,
        placement=("cpu:0",),
        argv=("x",),
        cwd="/job",
        build_id="b",
        numerics=NumericsClass(torch="2", device_model="cpu", instruction_set="AVX2", threads_per_device=1),
        host=HostClass(cpu_features=(), kernel_release="6"),
        created_at_ns=step,
        ranks=(RankState(rank=0, step=Step(step)),),
    )


class History(RuleBasedStateMachine):
    """Commits, aborts, old epochs, collections and reopenings in any order, against a model of what must be there."""

    contents = Bundle("contents")

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.store = Store.open(Path(self.folder.name) / "s")
        self.chain: dict[str, list[tuple[str, bytes]]] = {"a": [], "b": []}
        self.epoch = {"a": 1, "b": 1}
        self.step = 0

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(target=contents, numbers=st.lists(st.integers(0, 12), min_size=1, max_size=60))
    def content(self, numbers: list[int]) -> bytes:
        return b"".join(map(page, numbers))

    @rule(job=st.sampled_from("ab"), data=contents, later=st.booleans())
    def commit(self, job: str, data: bytes, later: bool) -> None:
        self.epoch[job] += later
        self.step += 1
        with self.store.begin(job, self.epoch[job]) as writer:
            writer.add_bytes(Part.device(0), "f", data)
            checkpoint = writer.commit(header(self.step))
        self.chain[job].insert(0, (checkpoint, data))

    @rule(job=st.sampled_from("ab"), data=contents)
    def abort(self, job: str, data: bytes) -> None:
        with self.store.begin(job, self.epoch[job]) as writer:
            writer.add_bytes(Part.device(0), "f", data)

    @rule(job=st.sampled_from("ab"))
    def late(self, job: str) -> None:
        if self.chain[job] and self.epoch[job] > 1:
            # Fenced only once the higher epoch has committed.
            committed = self.store.read(self.chain[job][0][0]).manifest.epoch
            if committed > 1:
                with pytest.raises(FencedError):
                    self.store.begin(job, committed - 1)

    @rule(last=st.integers(1, 3))
    def collect(self, last: int) -> None:
        self.store.gc(last=last)
        for job, chain in self.chain.items():
            for gone, _ in chain[last:]:
                with pytest.raises(CheckpointError):
                    self.store.read(gone, job)
            del chain[last:]

    @rule()
    def reopen(self) -> None:
        self.store = Store.open(self.store.path)

    @invariant()
    def all_there(self) -> None:
        if not hasattr(self, "store"):
            return
        for job, chain in self.chain.items():
            assert [c.id for c in self.store.list(job)] == [checkpoint for checkpoint, _ in chain]
            for checkpoint, data in chain:
                reader = self.store.read(checkpoint)
                assert reader.read_file(Part.device(0), "f") == data
                reader.verify()


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=12, stateful_step_count=15, deadline=None)


def test_many_distinct_chunks_and_files(tmp_path: Path, make_header: Callable[..., ManifestHeader]) -> None:
    """A volume of a few thousand small files: more than any batch or buffer limit inside."""
    root = tmp_path / "in"
    for i in range(3000):
        path = root / f"{i % 50}" / f"{i}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(i % 200))
    store = Store.open(tmp_path / "s")
    with store.begin("job", 1) as writer:
        writer.add_tree(Part.volume(), root)
        writer.commit(make_header())
    store.read().restore_part(Part.volume(), tmp_path / "out")
    assert gather(tmp_path / "out") == gather(root)
