import pytest

from model.errors import ModelError
from model.job_state import TRANSITIONS, JobPhase, check_transition


def reachable(start):
    seen, new = set(), {start}
    while new:
        seen |= new
        new = {after for before in new for after in TRANSITIONS[before]} - seen
    return seen


def test_every_phase_has_its_row_and_can_be_reached():
    assert set(TRANSITIONS) == set(JobPhase)
    assert reachable(JobPhase.QUEUED) == set(JobPhase)


def test_three_phases_are_the_end():
    assert {phase for phase in JobPhase if phase.ended} == {JobPhase.COMPLETED, JobPhase.FAILED, JobPhase.CANCELLED}


@pytest.mark.parametrize("phase", [phase for phase in JobPhase if not phase.ended])
def test_a_living_job_can_always_be_cancelled_and_always_reach_completion(phase):
    assert JobPhase.CANCELLED in TRANSITIONS[phase]
    assert JobPhase.COMPLETED in reachable(phase)


@pytest.mark.parametrize("phase", list(JobPhase))
def test_no_phase_follows_itself(phase):
    with pytest.raises(ModelError):
        check_transition(phase, phase)


def test_a_job_without_ranks_cannot_complete():
    for phase in (JobPhase.QUEUED, JobPhase.SUSPENDED):
        with pytest.raises(ModelError, match="cannot become completed: only"):
            check_transition(phase, JobPhase.COMPLETED)


def test_nothing_follows_an_end():
    with pytest.raises(ModelError, match="A job that is failed cannot become queued: nothing may follow"):
        check_transition(JobPhase.FAILED, JobPhase.QUEUED)
