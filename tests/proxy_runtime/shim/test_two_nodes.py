"""A job on two nodes: cut while it runs, moved to the next epoch, and equal to the bit to one that nobody touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from model.runtime import Outcome
from proxy_runtime.shim.part import Phase
from tests.proxy_runtime.shim.fleet import JOBS, Fleet, until

Make = Callable[..., Fleet]


def test_cut_moved_and_bit_identical(fleet: Make) -> None:
    untouched = fleet("ddp_skew.py", "--epochs", "2")
    untouched.start(devices=((0, 1), ()))
    assert [result.outcome for result in untouched.wait()] == [Outcome.COMPLETED]
    expected = untouched.results()
    assert set(expected) == {0, 1}

    moved = fleet("ddp_skew.py", "--epochs", "2")
    moved.start()
    moved.until_step(3)
    first = moved.cut("live")
    assert all(each.parts.volume and each.parts.ranks[0].process for each in first)
    assert [status.phase for status in moved.statuses()] == [Phase.RUNNING] * 2
    checkpoint = moved.commit(moved.cut("full"))
    assert [status.phase for status in moved.statuses()] == [Phase.FROZEN] * 2
    restored = moved.restore(checkpoint, devices=((1,), (0,)))  # each rank on the other node
    assert [status.phase for status in moved.statuses()] == [Phase.PAUSED] * 2
    assert [[state.rank for state in each.ranks] for each in restored] == [[1], [0]]
    moved.go()
    assert [result.outcome for result in moved.wait()] == [Outcome.COMPLETED] * 2
    assert moved.results() == expected


LEAVES_EARLY = """
import os, sys, time
sys.path.insert(0, JOBS)
import _job, torch, torch.distributed as dist
job = _job.start()
value = torch.ones(8, device=job.device) * (job.rank + 1)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2, device=job.device))], lr=0.1)
for n in range(5):
    dist.all_reduce(value)
    optimizer.step()
if job.rank == 0:  # what it has asked for waits in its ring when it is gone
    dist.all_reduce(value, async_op=True)
    last = value * 3
    dist.broadcast(last, 0, async_op=True)
else:
    other = value.clone()
    for n in range(4000):
        other = other * 1.0001
        job.see(other.sum().item())
        optimizer.step()
        time.sleep(0.001)
    dist.all_reduce(value)
    last = torch.zeros_like(value)
    dist.broadcast(last, 0)
    job.see(last)
print("RESULT", job._digest.hexdigest(), "rank", job.rank, flush=True)
if job.rank == 0:
    os._exit(0)  # an interpreter that ends waits for its results
"""


@pytest.mark.slow
def test_what_a_rank_that_has_ended_left_behind_is_restored_twice(fleet: Make, tmp_path: Path) -> None:
    program = tmp_path / "leaves_early.py"
    program.write_text(LEAVES_EARLY.replace("JOBS", repr(str(JOBS))))
    untouched = fleet(str(program))
    untouched.start()
    untouched.wait()
    expected = untouched.results()
    assert set(expected) == {0, 1}

    moved = fleet(str(program))
    moved.start()
    until(lambda: moved.parts[0].status().phase is Phase.ENDED, "rank 0 has left")
    for _ in range(2):
        checkpoint = moved.commit(moved.cut("full"))
        restored = moved.restore(checkpoint)
        assert [state.rank for each in restored for state in each.ranks] == [0, 1]
        moved.go()
    assert [result.outcome for result in moved.wait()] == [Outcome.COMPLETED] * 2
    assert moved.results() == expected


@pytest.mark.slow
def test_four_ranks_on_two_nodes_squeezed_and_spread_again(fleet: Make) -> None:
    untouched = fleet("subgroups.py", "--epochs", "120")
    untouched.start((0, 1, 2, 3), ((0, 1), (2, 3)))
    assert [result.outcome for result in untouched.wait()] == [Outcome.COMPLETED] * 2
    expected = untouched.results()
    assert set(expected) == {0, 1, 2, 3}

    moved = fleet("subgroups.py", "--epochs", "120")
    moved.start((0, 1, 2, 3), ((0, 1), (2, 3)))
    moved.until_progress(1)
    for _ in range(3):
        moved.cut("live")
    moved.restore(moved.commit(moved.cut("full")), (0, 0, 1, 1), ((0,), (1,)))
    moved.go()
    moved.until_progress(1)
    moved.cut("live", prefer_step_s=0.2)
    moved.restore(moved.commit(moved.cut("full")), (0, 1, 2, 3), ((2, 3), (0, 1)))
    moved.go()
    assert [result.outcome for result in moved.wait()] == [Outcome.COMPLETED] * 2
    assert moved.results() == expected
