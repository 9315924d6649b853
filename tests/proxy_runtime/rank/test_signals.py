"""Signals, forks and threads in a rank: Python's promises hold while it waits for its device."""

from __future__ import annotations

import os
import signal
import time

from launcher import SCRIPTS, Job, Launcher


def answer(job: Job) -> None:
    stdin = job.ranks[0].stdin
    assert stdin is not None
    print(file=stdin, flush=True)


def test_signals_in_the_middle_of_waits(launcher: Launcher) -> None:
    launcher.ring_bytes = 1 << 16

    def play(job: Job) -> None:
        proxy, rank = job.proxies[0].pid, job.ranks[0].pid
        while (line := job.line()) == "stop\n":
            os.kill(proxy, signal.SIGSTOP)
            before = job.head()
            answer(job)
            _wait_for_block(job, before)
            os.kill(rank, signal.SIGINT)
            assert job.line() == "interrupted\n"
            os.kill(proxy, signal.SIGCONT)
            answer(job)
        assert line == "terminate\n"
        os.kill(proxy, signal.SIGSTOP)
        before = job.head()
        answer(job)
        _wait_for_block(job, before)
        os.kill(rank, signal.SIGTERM)
        _wait_for_signal_taken(rank, signal.SIGTERM)
        os.kill(proxy, signal.SIGCONT)

    (result,) = launcher.run(SCRIPTS / "signals.py", meanwhile=play)
    assert result.code == 0, result.err
    assert result.out == "ok\n"


def test_forks_and_threads(launcher: Launcher) -> None:
    launcher.ring_bytes = 1 << 16
    (result,) = launcher.run(SCRIPTS / "forks_and_threads.py")
    assert result.code == 0, result.err
    assert result.out.endswith("ok\n")


def _wait_for_block(job: Job, before: int) -> None:
    """Until the rank has sent something since `before`, and sends nothing more."""
    until = time.monotonic() + 60
    last = before
    while (head := job.head()) == before or head != last:
        assert time.monotonic() < until, "the rank sent nothing"
        last = head
        time.sleep(0.2)


def _wait_for_signal_taken(pid: int, number: int) -> None:
    until = time.monotonic() + 60
    while True:
        with open(f"/proc/{pid}/status") as status:
            masks = [int(line.split()[1], 16) for line in status if line.startswith(("SigPnd", "ShdPnd"))]
        if not any(mask >> (number - 1) & 1 for mask in masks):
            return
        assert time.monotonic() < until
        time.sleep(0.01)
