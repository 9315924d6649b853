"""The life of parts: cuts that are called off, agents that go, ranks and shims that die, ends that leave nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import psutil
import pytest

from model.runtime import Outcome, RuntimeCode
from proxy_runtime.shim import remains
from proxy_runtime.shim.part import Endpoint, Limits, Phase
from proxy_runtime.shim.part_client import PartClient
from proxy_runtime.shim.spec import NodePart, RunError, RunSpec
from tests.proxy_runtime.shim.fleet import Fleet, until

Make = Callable[..., Fleet]
ALONE = {"placement": (0,), "devices": ((0,), ())}


def events(part: PartClient) -> list[dict]:
    return [orjson.loads(line) for line in part.layout.events.read_bytes().splitlines()]


def named(part: PartClient, name: str) -> list[dict]:
    return [event for event in events(part) if event["event"] == name]


def kill_shim(part: PartClient) -> None:
    pidfd = remains.shim_of(part.layout)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
    until(lambda: not part.alive, "the shim is dead")


@pytest.mark.slow
def test_a_cut_that_nobody_goes_on_with_is_called_off(fleet: Make) -> None:
    job = fleet("ends.py", "--steps", "100000", "--rank", "9", limits=Limits(stopped=0.5, frozen=0.5))
    job.start()
    part = job.parts[0]
    job.until_step_is_moving()

    goal = job.stop()
    assert [status.phase for status in job.statuses()] == [Phase.STOPPED] * 2
    before = part.status().device_ms
    until(lambda: len(named(part, "watchdog")) == 1 and part.status().phase is Phase.RUNNING, "it was resumed")
    with pytest.raises(RunError) as caught:
        part.finish(job.cut_number, goal)
    assert caught.value.code == RuntimeCode.DEADLINE
    with pytest.raises(RunError, match="over"):
        part.stop_queues(job.cut_number)

    job.cut("full")
    assert part.status().phase is Phase.FROZEN
    until(lambda: len(named(part, "watchdog")) == 2, "it was resumed")
    job.each(lambda one: until(lambda: one.status().phase is Phase.RUNNING, "it runs"))
    job.until_step_is_moving()
    assert part.status().device_ms > before


@pytest.mark.slow
def test_repeated_calls_join_and_a_new_client_takes_over(fleet: Make) -> None:
    job = fleet("ends.py", "--steps", "100000", "--rank", "9")
    job.start()
    job.until_step_is_moving()
    part = PartClient(job.parts[0].layout)  # an agent that has been restarted knows the run directory only
    goal = job.stop(prefer_step_s=0.2)
    assert part.stop_queues(1) == job.parts[0].stop_queues(1)
    first = part.finish(1, goal)
    assert part.finish(1, goal) == first
    job.parts[1].finish(1, goal)
    written = job.each(lambda one: one.write(1, "live"))
    assert part.write(1, "live") == written[0]
    assert part.prepare("127.0.0.1", fresh=True) == job.parts[0].prepare("127.0.0.1", fresh=True)
    part.connect((), "whatever")
    part.resume(1)
    part.resume(1)
    assert part.status().phase is Phase.RUNNING
    job.until_step_is_moving()
    job.stop()
    part.resume(2)
    assert part.status().phase is Phase.RUNNING


@pytest.mark.slow
def test_a_part_outlives_the_process_that_started_it(fleet: Make, tmp_path: Path) -> None:
    job = fleet("ends.py", "--steps", "30", "--step", "1000000", "--rank", "0")
    job.start_elsewhere()
    part = job.parts[0]
    result = part.wait(120)
    assert result is not None
    assert result.outcome is Outcome.COMPLETED
    assert part.status().phase is Phase.ENDED
    final = part.write(0, "final")
    assert final.parts.volume is not None
    assert final.parts.states[0].log_offset > 0
    assert part.result() == result
    kill_shim(part)
    assert part.result() == result
    with pytest.raises(RunError) as caught:
        part.status()
    assert caught.value.code == "run.shim-gone"
    assert part.end() == result
    assert part.end() is None


@pytest.mark.slow
def test_what_shims_and_proxies_have_logged_is_kept_with_the_id_of_the_job(fleet: Make) -> None:
    job = fleet("ends.py", "--steps", "3", "--rank", "9")
    job.start(**ALONE)
    part = job.parts[0]
    assert part.wait(120) is not None
    with open(part.layout.root / "zygote.log", "a") as log:
        log.write("Traceback of a library\n")
    part.end()
    zombies = [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]
    assert not zombies, "its shim was a child of this process, and is reaped"
    lines = [orjson.loads(line) for line in part.layout.kept_log.read_bytes().splitlines()]
    assert {line["job"] for line in lines} == {part.layout.job_id}
    assert {line["epoch"] for line in lines} == {1}
    told = {(line["process"], line["event"]) for line in lines}
    assert {("shim", "ended"), ("device-proxy", "began"), ("device-proxy", "attach")} <= told
    assert ("zygote", "Traceback of a library") in told


@pytest.mark.slow
def test_a_rank_that_fails_is_told_with_its_last_words_and_others_are_not_blamed(fleet: Make) -> None:
    job = fleet("raises.py", "--rank", "1", "--step", "3")
    job.start()
    result = job.parts[1].wait(120)
    assert result is not None
    assert result.outcome is Outcome.FAILED
    assert [(end.rank, end.exit_code) for end in result.exits] == [(1, 1)]
    assert "DeliberateError" in result.exits[0].last_words
    with pytest.raises(RunError) as caught:
        job.parts[1].stop_queues(1)
    assert caught.value.code == "run.ended"
    # The other one is told that nobody comes any more, and fails; but the blame is not its.
    until(lambda: not job.parts[0].status().living, "rank 0 has ended too")
    assert "rank 0 waits in AllReduce" in job.log(0) and "for rank 1, which has ended without it" in job.log(0)
    assert job.parts[0].status().result is None
    assert job.parts[0].end(grace_s=2.0).outcome is Outcome.STOPPED  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_killed_shim_takes_all_with_it_and_the_other_node_says_lost(fleet: Make) -> None:
    job = fleet("ends.py", "--steps", "100000", "--rank", "9")
    job.start()
    job.until_step_is_moving()
    kill_shim(job.parts[1])
    remains.require_gone(job.parts[1].layout, deadline())
    result = job.parts[0].wait(60)
    assert result is not None
    assert result.outcome is Outcome.LOST
    with pytest.raises(RunError, match="another epoch"):
        PartClient.spawn(job.specs[1], job.build.root, job.nodes[1].runs)


def test_a_command_that_fails_at_once_is_told_whenever_it_fails(fleet: Make) -> None:
    job = fleet("no-such-script.py")
    job.spawn(**ALONE)
    part = job.parts[0]
    part.prepare("127.0.0.1", fresh=True)
    result = part.wait(60)
    part.connect((), "token")
    assert result is not None
    assert result.outcome is Outcome.FAILED
    assert [(end.rank, end.exit_code) for end in result.exits] == [(0, 2)]
    assert "no-such-script.py" in result.exits[0].last_words
    status = part.status()
    assert status.phase is Phase.ENDED
    assert status.device_ms == 0
    assert part.write(0, "final").parts.volume is not None


@pytest.mark.slow
def test_a_rank_that_is_killed_is_lost(fleet: Make) -> None:
    job = fleet("ends.py", "--signal", "SIGKILL", "--rank", "0", "--step", "3")
    job.start(**ALONE)
    result = job.parts[0].wait(120)
    assert result is not None
    assert result.outcome is Outcome.LOST
    assert [(end.rank, end.signal) for end in result.exits] == [(0, signal.SIGKILL)]


@pytest.mark.slow
def test_a_node_that_does_not_come_fails_the_connection_for_this_epoch(fleet: Make) -> None:
    job = fleet("ends.py")
    job.spawn((0, 1), ((0,), (1,)))
    part = job.parts[0]
    with pytest.raises(RunError, match="not prepared"):
        part.connect((), "token")
    (endpoint,) = part.prepare("127.0.0.1", fresh=False)
    assert (endpoint.low, endpoint.high) == (0, 1)
    with pytest.raises(RunError, match="device 0 listens for device 1"):
        part.connect([Endpoint(0, 2, "127.0.0.1", 1)], "token", deadline_s=2.0)
    with pytest.raises(RunError, match="device 0 listens for device 1"):  # it was final, and is told again
        part.connect([endpoint], "token", deadline_s=2.0)
    job.parts[1].prepare("127.0.0.1", fresh=False)
    with pytest.raises(RunError, match="proxy 0"):
        job.parts[1].connect([endpoint], "token", deadline_s=1.0)


def test_specifications_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    def spec(device_of_rank: tuple[int, ...], local: tuple[int, ...]) -> RunSpec:
        part = NodePart("node-1@1", 1, device_of_rank, local, "default")
        return RunSpec("j", ("true",), "/run/ergo/j.d", {}, 2, 2, str(tmp_path), part=part)

    assert RunSpec.from_json(orjson.loads(orjson.dumps(spec((0, 1), (1,)).to_json()))) == spec((0, 1), (1,))
    for placement, local in (((0,), (0,)), ((0, 2), (0,)), ((0, 1), ()), ((0, 1), (2,))):
        with pytest.raises(RunError) as caught:
            spec(placement, local)
        assert caught.value.code == "run.bad-spec"
    whole = RunSpec("j", ("true",), "/", {}, 1, 1, str(tmp_path))
    with pytest.raises(RunError, match="no part"):
        PartClient.spawn(whole, tmp_path, tmp_path)


def deadline() -> float:
    return time.monotonic() + 20
