"""A device proxy or a rank that is killed or stands still, at any moment: an error in seconds, never a hang."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from launcher import Job, Launcher

ENDED = "device proxy of this rank has ended"

# What a rank does when its proxy is killed.
READS = "while True: x.sum().item()"
ENQUEUES = "while True: x.add_(1)"
DEFINES = "n = 1\nwhile True: n += 1; torch.zeros(n, device='cuda').neg_()"
UPLOADS = "y = torch.empty(1 << 20)\nwhile True: y.cuda()"
TRAINS = """
model = torch.nn.Linear(64, 64).cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True: model(torch.ones(4, 64, device='cuda')).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize("work", [READS, ENQUEUES, DEFINES, UPLOADS, TRAINS])
def test_a_killed_proxy_ends_its_rank(launcher: Launcher, work: str) -> None:
    launcher.deadline_s = 60
    pause = random.uniform(0, 0.1)

    def kill(job: Job) -> None:
        assert job.line() == "go\n"
        time.sleep(pause)  # which moment is what is being tested
        job.proxies[0].kill()

    (result,) = launcher.run(f"import torch\nx = torch.ones(3).cuda()\nprint('go', flush=True)\n{work}", meanwhile=kill)
    assert result.code == 1, result
    assert ENDED in result.err, result.err


COLLECTIVE = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
x = torch.ones(1000, device="cuda")
print("go", flush=True)
while True:
    dist.all_reduce(x)
    x.sum().item()
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_proxy_ends_the_ranks_that_wait_for_it(launcher: Launcher, victim: int) -> None:
    launcher.deadline_s = 60

    def kill(job: Job) -> None:
        assert {job.line(0), job.line(1)} == {"go\n"}
        job.proxies[victim].kill()

    results = launcher.run(COLLECTIVE, ranks=2, meanwhile=kill)
    assert [result.code for result in results] == [1, 1]
    assert ENDED in results[victim].err
    other = results[1 - victim].err
    assert ENDED in other or "gone" in other, other


def test_a_proxy_that_stands_still_is_waited_for(launcher: Launcher) -> None:
    """Back-pressure without loss, and without the GIL: another thread of the rank counts on."""
    launcher.ring_bytes = 1 << 16
    program = """
import threading, time, torch
x = torch.zeros(3, device='cuda')
x.add_(1)
torch.cuda.synchronize()
beats = 0
def beat():
    global beats
    while True:
        time.sleep(0.005); beats += 1
threading.Thread(target=beat, daemon=True).start()
print('go', flush=True)
input()
for _ in range(20000): x.add_(1)
full = beats
print(x.tolist(), full, flush=True)
"""

    def stop(job: Job) -> None:
        assert job.line() == "go\n"
        proxy = job.proxies[0].pid
        os.kill(proxy, signal.SIGSTOP)
        assert job.ranks[0].stdin is not None
        print(file=job.ranks[0].stdin, flush=True)
        until = time.monotonic() + 60
        before = -1
        while (head := job.head()) != before or head == 0:  # full: no message fits any more
            assert time.monotonic() < until
            before = head
            time.sleep(1.0)
        os.kill(proxy, signal.SIGCONT)

    (result,) = launcher.run(program, meanwhile=stop)
    assert result.code == 0, result.err
    values, _, beats = result.out.strip().rpartition(" ")
    assert values == str([20001.0] * 3)
    assert int(beats) >= 50, "no other thread ran while the rank waited for room"


def test_a_killed_rank_ends_the_others(launcher: Launcher) -> None:
    """With its proxy, as the shim does: whoever waits for it hears of it."""
    launcher.deadline_s = 60

    def kill(job: Job) -> None:
        assert {job.line(0), job.line(1)} == {"go\n"}
        job.ranks[1].kill()
        job.ranks[1].wait()
        job.proxies[1].kill()

    results = launcher.run(COLLECTIVE, ranks=2, meanwhile=kill)
    assert results[1].code == -signal.SIGKILL
    assert results[0].code == 1
    assert ENDED in results[0].err or "gone" in results[0].err
