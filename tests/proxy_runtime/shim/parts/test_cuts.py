"""A cut that failed says why, however often it is asked for: activities are tried again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from model.runtime import RuntimeCode
from proxy_runtime.errors import ErgoError
from proxy_runtime.shim.part import Limits, Phase
from proxy_runtime.shim.parts import cuts
from proxy_runtime.shim.spec import RankExit, RunError

FULL = ErgoError("the disk is full.", code="criu.disk-full", remedy="Free space there.")


class Cutter:
    """Fails where it is told to."""

    fails = ""

    def __init__(self, *_: object) -> None:
        self.counts: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        def step(*_: object, **__: object) -> None:
            if name == self.fails:
                raise FULL

        return step


class Job(MagicMock):
    """A part whose ranks run."""

    def operation(self, _: str) -> AbstractContextManager[None]:
        return nullcontext()

    def set_phase(self, phase: Phase) -> None:
        self.phase = phase


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> cuts.PartCuts:
    monkeypatch.setattr(cuts, "Cutter", Cutter)
    monkeypatch.setattr(cuts.PartCuts, "_barrier", lambda *_: SimpleNamespace())
    job = Job(phase=Phase.RUNNING, result=None, over=False)
    job.generation.step.return_value = [0]
    job.generation.dead_proxy.return_value = None
    job.generation.ranks = []
    return cuts.PartCuts(job, Limits())


@pytest.mark.parametrize("kind", ["live", "full"])
@pytest.mark.parametrize("where", ["stop", "finish", "dump", "pack"])
def test_a_cut_that_is_asked_for_again_tells_why_it_failed(
    taken: cuts.PartCuts, monkeypatch: pytest.MonkeyPatch, where: str, kind: cuts.Kind
) -> None:
    def cut(number: int) -> None:
        taken.stop_queues(number, at_step=None, prefer_step_s=0, deadline_s=1)
        taken.finish(number, {}, deadline_s=1)
        taken.write(number, kind, deadline_s=1)

    monkeypatch.setattr(Cutter, "fails", where)
    with pytest.raises(ErgoError) as first:
        cut(1)
    assert first.value is FULL
    again = (
        lambda: taken.stop_queues(1, at_step=None, prefer_step_s=0, deadline_s=1),
        lambda: taken.finish(1, {}, deadline_s=1),
        lambda: taken.write(1, kind, deadline_s=1),
    )
    for call in again:
        with pytest.raises(RunError) as later:
            call()
        assert (later.value.message, later.value.remedy) == (FULL.message, FULL.remedy)
        assert later.value.code == RuntimeCode.DEADLINE
    monkeypatch.setattr(Cutter, "fails", "")
    taken.stop_queues(2, at_step=None, prefer_step_s=0, deadline_s=1)
    with pytest.raises(RunError, match=r"cut 1 is over.*Ask for another"):
        taken.finish(1, {}, deadline_s=1)


@pytest.mark.parametrize(
    ("dead", "exits", "sentence"),
    [
        (1, [RankExit(0, -9, 9)], "the device proxy of device 1 has died."),
        (None, [RankExit(0, 0), RankExit(1, -9, 9)], "rank 1 was killed by SIGKILL."),
        (None, [RankExit(0, 0)], FULL.message),
    ],
)
def test_who_has_died_is_why_it_failed(
    taken: cuts.PartCuts,
    monkeypatch: pytest.MonkeyPatch,
    dead: int | None,
    exits: list[RankExit],
    sentence: str,
) -> None:
    generation: Any = taken._job.generation
    generation.dead_proxy.return_value = dead
    generation.ranks = [SimpleNamespace(exit=exit, ring=SimpleNamespace(step_done=0)) for exit in exits]
    monkeypatch.setattr(Cutter, "fails", "dump")
    taken.stop_queues(1, at_step=None, prefer_step_s=0, deadline_s=1)
    taken.finish(1, {}, deadline_s=1)
    for _ in range(2):
        with pytest.raises(ErgoError) as caught:
            taken.write(1, "full", deadline_s=1)
        assert caught.value.message == sentence
