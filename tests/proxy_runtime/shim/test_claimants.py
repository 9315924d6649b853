"""Which end of a tree's processes was behind its failure."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from proxy_runtime.shim.claimants import Claimants

LINUX = tuple(int(word) for word in os.uname().release.split(".")[:2])
Start = Callable[[], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Processes that exit with the code that they are told, and are waited for only at the end."""
    started: list[subprocess.Popen[str]] = []

    def one() -> subprocess.Popen[str]:
        command = ["sh", "-c", "read code; exit $code"]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True, bufsize=1))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()  # type: ignore[union-attr]


@pytest.fixture
def claimants() -> Iterator[Claimants]:
    found = Claimants()
    yield found
    found.close()


def look(claimants: Claimants, *processes: subprocess.Popen[str] | None) -> None:
    pids = [process.pid if process else 0 for process in processes]
    claimants.look(dict(enumerate(pids)), lambda: [pid for pid in pids if pid])


def end(process: subprocess.Popen[str], how: int | signal.Signals) -> None:
    """By an exit code or by a signal, without waiting for it as its parent would."""
    if isinstance(how, signal.Signals):
        process.send_signal(how)
    else:
        process.stdin.write(f"{how}\n")  # type: ignore[union-attr]
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


KILLED_FIRST = [
    ((signal.SIGKILL,), (signal.SIGTERM,)),
    ((signal.SIGSEGV,), (1,)),
    ((0,), (signal.SIGKILL,), (1,)),
    ((1, signal.SIGKILL),),  # in one look: nobody who was asked to end would have been killed so soon
]
FAILED_FIRST = [
    ((1,), (signal.SIGTERM,)),
    ((3,), (signal.SIGTERM,), (signal.SIGKILL,)),
    ((signal.SIGTERM, 1),),
    ((signal.SIGTERM,), (signal.SIGKILL,)),  # a launcher that ends what it has started, for a reason of its own
    ((0,), (0,)),
]


@pytest.mark.parametrize(
    ("ends", "killed"), [(e, True) for e in KILLED_FIRST] + [(e, False) for e in FAILED_FIRST], ids=str
)
def test_the_first_failing_end_decides(
    claimants: Claimants, start: Start, ends: tuple[tuple[int | signal.Signals, ...], ...], killed: bool
) -> None:
    hows = [how for group in ends for how in group]
    processes = [start() for _ in hows]
    look(claimants, *processes)
    assert claimants.killed is None
    left = iter(zip(processes, hows, strict=True))
    for group in ends:
        for _ in group:
            end(*next(left))
        look(claimants, *processes)
    found = claimants.killed
    assert (found is not None) is killed
    if found is not None:
        victim = processes[[isinstance(how, signal.Signals) for how in hows].index(True)]
        assert found.sentence.startswith(f"process {victim.pid} of its tree was killed by SIG")


@pytest.mark.skipif(LINUX < (6, 15), reason="Linux keeps the status of a process that was waited for since 6.15")
def test_a_parent_that_waits_at_once_takes_nothing_away(claimants: Claimants, start: Start) -> None:
    process = start()
    look(claimants, process)
    process.kill()
    process.wait()
    look(claimants, process)
    assert claimants.killed is not None and claimants.killed.signal == signal.SIGKILL


def test_a_tree_that_has_gone_on_after_it_is_not_excused(claimants: Claimants, start: Start) -> None:
    first, second = start(), start()
    look(claimants, first, None)
    end(first, signal.SIGKILL)
    look(claimants, first, second)  # has begun before that
    killed = claimants.killed
    assert killed is not None
    while time.clock_gettime(time.CLOCK_BOOTTIME) < killed.at + 0.02:  # clock ticks
        time.sleep(0.01)
    third = start()
    look(claimants, third, second)
    assert claimants.killed is None
    end(third, 1)
    end(second, signal.SIGTERM)
    look(claimants, third, second)
    assert claimants.killed is None
