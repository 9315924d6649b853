"""How long the files of a cut are kept when a store has them."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from proxy_runtime.shim.parts import cuts
from tests.proxy_runtime.shim.parts import test_cuts

taken = test_cuts.taken


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What cutters were asked to do with their files."""
    asked: list[str] = []
    monkeypatch.setattr(test_cuts.Cutter, "keep", lambda *_: asked.append("keep"), raising=False)
    monkeypatch.setattr(test_cuts.Cutter, "discard", lambda _: asked.append("discard"), raising=False)
    monkeypatch.setattr(cuts, "in_background", lambda call, *arguments: call(*arguments))
    monkeypatch.setattr(cuts, "free_bytes", lambda _: 1 << 40)
    return asked


def packed(taken: cuts.PartCuts, number: int, kind: cuts.Kind) -> None:
    """A cut, as `write` goes through it."""
    taken.stop_queues(number, at_step=None, prefer_step_s=0, deadline_s=1)
    cut = taken._cut
    assert cut is not None
    cut.report.image_bytes, cut.packing = 100, True
    if kind == "live":
        taken._call_off("")
    taken._pack(cut, MagicMock(), kind)


def test_of_a_live_cut_until_the_next_one_begins(taken: cuts.PartCuts, done: list[str]) -> None:
    packed(taken, 1, "live")
    assert done == []
    taken.stop_queues(2, at_step=None, prefer_step_s=0, deadline_s=1)
    assert done == ["discard"]


def test_of_a_live_cut_for_some_seconds(taken: cuts.PartCuts, done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(cuts.time, "monotonic", lambda: now[0])
    packed(taken, 1, "live")
    now[0] += cuts.WARM_S - 1
    taken.watch()
    assert done == []
    now[0] += 1
    taken.watch()
    taken.watch()
    assert done == ["discard"]


def test_not_where_the_disk_is_nearly_full(
    taken: cuts.PartCuts, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "free_bytes", lambda _: 100 * cuts.ROOMY - 1)
    packed(taken, 1, "live")
    assert done == ["discard"]


def test_of_a_full_cut_while_the_ranks_are_held(taken: cuts.PartCuts, done: list[str]) -> None:
    packed(taken, 1, "full")
    assert done == ["keep"]
    taken.resume(1)
    assert done == ["keep", "discard"]


def test_of_a_full_cut_that_is_called_off_while_it_is_written_as_of_a_live_one(
    taken: cuts.PartCuts, done: list[str]
) -> None:
    taken.stop_queues(1, at_step=None, prefer_step_s=0, deadline_s=1)
    cut = taken._cut
    assert cut is not None
    cut.report.image_bytes, cut.packing = 100, True
    writer = MagicMock()
    writer.finish_parts.side_effect = lambda: taken.resume(1) or MagicMock()
    taken._pack(cut, writer, "full")
    assert "discard" not in done
    taken.stop_queues(2, at_step=None, prefer_step_s=0, deadline_s=1)
    assert done[-1] == "discard"
