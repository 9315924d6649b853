"""Words about time limits grow rarer with a job, whatever becomes of its parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from infra.incidents import FIRST_GAP_S, LONGEST_GAP_S, IncidentTeller
from model.ids import Epoch, JobId, NodeId
from model.sharing import SharingIncidents, SharingNotice


class Jobs:
    """Takes what a teller says, and has a part of one job or none."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []
        self.epoch, self.limits = 1, 0
        self.here = True
        self.teller = IncidentTeller(cast("Any", self), NodeId("a", 1), self.parts)

    def parts(self) -> Any:
        progress = SimpleNamespace(sharing=SharingIncidents(self.limits) if self.limits else None)
        return [SimpleNamespace(job=JobId("job"), epoch=Epoch(self.epoch), progress=progress)] if self.here else []

    def get_workflow_handle(self, _job: str) -> Any:
        return self

    async def signal(self, _name: str, notice: SharingNotice, **_: object) -> None:
        self.heard.append((int(notice.epoch), notice.incidents.time_limits))


async def test_a_limit_in_every_step_is_told_at_doubling_gaps() -> None:
    jobs = Jobs()
    for second in range(3600):
        jobs.limits += 1
        await jobs.teller.look(float(second))
    # At 0, 5, 15, 35, 75, 155, 315, 635 s, then every ten minutes.
    assert [limits - 1 for _, limits in jobs.heard] == [0, 5, 15, 35, 75, 155, 315, 635, 1235, 1835, 2435, 3035]


async def test_a_job_that_is_resized_every_minute_does_not_begin_anew() -> None:
    jobs = Jobs()
    for second in range(3600):
        jobs.epoch, jobs.limits, jobs.here = 1 + second // 60, second % 60, second % 60 < 55
        await jobs.teller.look(float(second))
    assert len(jobs.heard) <= 12, jobs.heard
    assert jobs.heard[0] == (1, 1) and jobs.heard[-1][0] > 40


async def test_a_job_that_comes_back_after_a_long_time_is_heard_soon() -> None:
    jobs = Jobs()
    for second in (1.0, FIRST_GAP_S + 2):
        jobs.limits += 1
        await jobs.teller.look(second)
    jobs.here = False
    await jobs.teller.look(2 * LONGEST_GAP_S)
    jobs.here, jobs.epoch, jobs.limits = True, 2, 1
    await jobs.teller.look(2 * LONGEST_GAP_S + 1)
    jobs.limits = 2
    await jobs.teller.look(2 * LONGEST_GAP_S + 2 + FIRST_GAP_S)
    assert jobs.heard == [(1, 1), (1, 2), (2, 1), (2, 2)]
