"""A cut that failed says why, however often it is asked for: activities are tried again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest

from model.ids import Step
from model.runtime import AttendResult, Outcome, Progress, RuntimeCode
from proxy_runtime.errors import ErgoError
from proxy_runtime.shim.part import Limits, Phase
from proxy_runtime.shim.parts import cuts
from proxy_runtime.shim.spec import RankExit, RunError

LEFT = "; no checkpoint is made of what is left."
FULL = ErgoError("the disk is full.", code="criu.disk-full", remedy="Free space there.")


class Cutter:
    """Fails where it is told to."""

    fails = ""
    meanwhile: ClassVar[dict[str, Callable[[], None]]] = {}
    exits: ClassVar[dict[int, int]] = {}

    def __init__(self, *_: object) -> None:
        self.counts: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        def step(*_: object, **__: object) -> None:
            if name in self.meanwhile:
                self.meanwhile[name]()
            if name == self.fails:
                raise FULL

        return step


class Job(MagicMock):
    """A part whose ranks run."""

    def operation(self) -> AbstractContextManager[None]:
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
    job.generation.claimants.killed = None
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


def ended(exit: RankExit | None) -> SimpleNamespace:
    return SimpleNamespace(exit=exit, bereft=False, has_tree=True, ring=SimpleNamespace(step_done=0))


@pytest.mark.parametrize(
    ("dead", "exits", "sentence"),
    [
        (1, [RankExit(0, -9, 9)], "the device proxy of device 1 has died" + LEFT),
        (None, [RankExit(0, 0), RankExit(1, -9, 9)], "rank 1 was killed by SIGKILL" + LEFT),
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
    monkeypatch.setattr(Cutter, "fails", "dump")
    taken.stop_queues(1, at_step=None, prefer_step_s=0, deadline_s=1)
    taken.finish(1, {}, deadline_s=1)
    generation.dead_proxy.return_value = dead
    generation.ranks = [ended(exit) for exit in exits]
    for _ in range(2):
        with pytest.raises(ErgoError) as caught:
            taken.write(1, "full", deadline_s=1)
        assert caught.value.message == sentence


KILLED, FAILED = RankExit(1, 137, 9), RankExit(1, 3)
AT = ["before", "stop", "between stop and finish", "finish", "between finish and write", "dump"]


@pytest.mark.parametrize("kind", ["live", "full"])
@pytest.mark.parametrize("when", AT)
@pytest.mark.parametrize("how", [KILLED, FAILED], ids=["killed", "failed"])
def test_a_rank_that_dies_at_any_moment_calls_the_cut_off(
    taken: cuts.PartCuts, monkeypatch: pytest.MonkeyPatch, how: RankExit, when: str, kind: cuts.Kind
) -> None:
    generation: Any = taken._job.generation
    generation.ranks = [ended(None), ended(None)]

    def dies() -> None:
        generation.ranks[1].exit = how

    moments = {"stop": "stop", "finish": "finish", "dump": "dump"}
    monkeypatch.setattr(Cutter, "meanwhile", {moments.get(when, ""): dies})

    def cut() -> None:
        for moment, call in (
            ("before", lambda: taken.stop_queues(1, at_step=None, prefer_step_s=0, deadline_s=1)),
            ("between stop and finish", lambda: taken.finish(1, {}, deadline_s=1)),
            ("between finish and write", lambda: taken.write(1, kind, deadline_s=1)),
        ):
            if moment == when:
                dies()
            call()

    with pytest.raises(RunError, match=f"^{how.sentence}{LEFT}") as caught:
        cut()
    assert caught.value.code == "run.lost"
    assert generation.release.called
    assert not taken._written


def test_a_cut_of_a_part_that_was_given_up_meanwhile_is_called_off(
    taken: cuts.PartCuts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        taken._job.result = AttendResult(Outcome.LOST, Progress(Step(0), 0))  # type: ignore[misc]

    monkeypatch.setattr(Cutter, "meanwhile", {"stop": lost})
    with pytest.raises(RunError, match="the part has ended") as caught:
        taken.stop_queues(1, at_step=None, prefer_step_s=0, deadline_s=1)
    assert caught.value.code == "run.ended"


def test_a_step_is_not_waited_for_where_none_is_likely(taken: cuts.PartCuts, monkeypatch: pytest.MonkeyPatch) -> None:
    generation, asked, now = taken._job.generation, [], [1000.0]
    generation.ranks = [ended(None)]  # type: ignore[union-attr]
    monkeypatch.setattr(cuts.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Cutter, "stop", lambda _, at_step, **__: asked.append(at_step), raising=False)

    def cut(steps: int) -> object:
        generation.step.return_value = [steps]  # type: ignore[union-attr]
        generation.ranks[0].ring.step_done = steps  # type: ignore[union-attr]
        taken.watch()
        number = taken.number + 1
        taken.stop_queues(number, at_step=None, prefer_step_s=30, deadline_s=1)
        taken.resume(number)
        return asked[-1]

    assert cut(0) is None, "it has never ended one"
    assert cut(5) == 6
    now[0] += 29
    assert cut(5) == 6
    now[0] += 2
    assert cut(5) is None, "the last one is longer ago than one is waited for"
    assert cut(6) == 7
