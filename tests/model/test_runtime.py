from collections.abc import Callable
from dataclasses import replace

import pytest

from model import runtime
from model.codec import from_json
from model.errors import ModelError
from model.ids import Epoch, JobId, NodeId, Step
from model.runtime import AttendInput, AttendResult, NodeRuntime, Outcome, Progress, RankExit, StopInput


@pytest.fixture
def attend(golden):
    return from_json(AttendInput, (golden / "runtime" / "AttendInput.json").read_bytes())


def test_a_node_must_be_one_of_the_placement(attend):
    with pytest.raises(ModelError, match="Node other@1 has no rank in this placement"):
        replace(attend, node=NodeId("other", 1))


def test_another_incarnation_is_another_node(attend):
    with pytest.raises(ModelError, match="has no rank"):
        replace(attend, node=NodeId(attend.node.name, attend.node.incarnation + 1))


def test_the_placement_must_be_of_the_epoch(attend):
    with pytest.raises(ModelError, match="The placement is of epoch 3, but epoch 4 was named"):
        replace(attend, epoch=Epoch(4))


def test_the_placement_must_fit_the_job(attend):
    with pytest.raises(ModelError, match="places 4 ranks, but the job has 2"):
        replace(attend, spec=attend.spec.model_copy(update={"ranks": 2, "max_width": 2}))


def test_a_commit_needs_every_rank_once(golden):
    commit = from_json(runtime.CheckpointInput, (golden / "runtime" / "CheckpointInput.json").read_bytes())
    for parts in ((), commit.commit[1:], (commit.commit[0], commit.commit[0])):
        with pytest.raises(ModelError, match="every rank, each once"):
            replace(commit, commit=parts)


def test_targets_belong_to_finish(golden):
    barrier = from_json(runtime.BarrierInput, (golden / "runtime" / "BarrierInput.json").read_bytes())
    with pytest.raises(ModelError, match="Targets were given for the phase stop"):
        replace(barrier, phase="stop")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["BarrierInput", "CheckpointInput", "TransferInput", "RestoreInput"])
def test_every_wait_has_an_end(golden, name, seconds):
    request = from_json(getattr(runtime, name), (golden / "runtime" / f"{name}.json").read_bytes())
    with pytest.raises(ModelError, match="`deadline_s` is"):
        replace(request, deadline_s=seconds)


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_grace_ends_too(seconds):
    with pytest.raises(ModelError, match="`grace_s` is"):
        StopInput(JobId("j"), Epoch(1), "test", seconds)


def test_a_rank_ends_in_one_way():
    for arguments in ({}, {"exit_code": 0, "signal": 9}):
        with pytest.raises(ModelError, match="by an exit code or by a signal"):
            RankExit(0, **arguments)


def test_an_outcome_agrees_with_the_exits():
    progress = Progress(Step(1), 0)
    AttendResult(Outcome.FAILED, progress, (RankExit(0, signal=15), RankExit(1, exit_code=2)))
    AttendResult(Outcome.COMPLETED, progress, (RankExit(0, exit_code=0),))
    with pytest.raises(ModelError, match="exit code is not 0"):
        AttendResult(Outcome.FAILED, progress, (RankExit(0, signal=9),))
    with pytest.raises(ModelError, match="has exit code 0"):
        AttendResult(Outcome.COMPLETED, progress, (RankExit(0, signal=9),))


def test_the_interface_can_be_implemented():
    class Nothing:
        def attend(self, request: AttendInput, report: Callable[[Progress], None]) -> AttendResult:
            report(Progress(Step(0), 0))
            return AttendResult(Outcome.STOPPED, Progress(Step(0), 0))

        def barrier(self, request):
            raise NotImplementedError

        checkpoint = transfer = restore = stop = barrier

    node: NodeRuntime = Nothing()
    told = []
    assert node.attend(None, told.append).outcome is Outcome.STOPPED
    assert told == [Progress(Step(0), 0)]
