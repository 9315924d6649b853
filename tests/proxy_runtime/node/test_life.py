"""A job's part from its start to its end, without checkpoints: attended, attended again, stopped, fenced, lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from model.ids import Epoch
from model.job_spec import parse_job_spec
from model.runtime import AttendInput, BarrierInput, Outcome, Progress, StopInput
from proxy_runtime.node.errors import NodeError
from proxy_runtime.storage import volumes
from tests.proxy_runtime.node.conftest import World
from tests.proxy_runtime.node.nodes import DEADLINE_S, make_spec, until

LONG = make_spec("ddp_skew.py", "--epochs", "100")


class LetGoError(Exception):
    """Raised by `report`, as an activity does that is cancelled."""


def test_a_job_of_two_nodes_runs_to_its_end(world: World) -> None:
    job = world.begun(make_spec("ddp_skew.py", "--epochs", "1"), (world.one, 0), (world.two, 1))
    results = job.results()
    assert [result.outcome for result in results] == [Outcome.COMPLETED] * 2
    assert all(result.progress.step == 10 and result.progress.device_ms > 0 for result in results)
    assert set(job.digests()) == {0, 1}
    job.attend("fresh")  # a retry after the end: the same answer
    assert job.results() == results
    job.stop()
    assert world.processes() == []


def test_a_failure_of_the_users_is_told_with_its_last_words(world: World) -> None:
    job = world.begun(make_spec("raises.py", ranks=1), (world.one, 0))
    (result,) = job.results()
    assert result.outcome is Outcome.FAILED
    assert result.exits[0].exit_code not in (0, None)
    assert "Error" in result.exits[0].last_words


@pytest.mark.slow
def test_attend_lets_go_and_finds_the_part_again_as_does_an_agent_that_starts_anew(world: World) -> None:
    job = world.begun(LONG, (world.one, 0), (world.one, 1), step=2)
    part = world.one.runtime.parts.get(job.job, job.epoch)
    assert part is not None
    pids = part.client.status().rank_pids

    def let_go(progress: Progress) -> None:
        raise LetGoError

    assert job.placement is not None
    request = AttendInput(job.job, job.epoch, world.one.node, job.spec, job.placement, "fresh")
    with pytest.raises(LetGoError):
        world.one.runtime.attend(request, let_go)
    world.one.restart_agent()
    job.attend("fresh")
    job.until_step(5)
    part = world.one.runtime.parts.get(job.job, job.epoch)
    assert part is not None and part.client.status().rank_pids == pids
    assert part.unattended_s == 0.0
    until(lambda: [on.step >= 5 for on in world.one.runtime.jobs()] == [True], "the new agent tells of it")


@pytest.mark.slow
def test_stop_ends_every_process_and_nothing_of_the_epoch_starts_any_more(world: World) -> None:
    job = world.begun(LONG, (world.one, 0), (world.two, 0), step=1)
    job.stop()
    assert world.processes() == []
    # The node that is stopped second may have lost the proxy of the first by then.
    assert {result.outcome for result in job.results()} <= {Outcome.STOPPED, Outcome.LOST}
    job.stop()  # again: nothing to end is success
    job.attend("fresh")
    assert [result.outcome for result in job.results()] == [Outcome.STOPPED] * 2
    assert world.processes() == []


@pytest.mark.slow
def test_stop_while_it_starts_leaves_nothing(world: World) -> None:
    job = world.job(LONG)
    job.next_epoch((world.one, 0), (world.two, 0))
    job.machines = [world.one]  # the other node never comes
    job.attend("fresh")
    until(lambda: world.processes(), "the part is being started")
    job.stop([world.one])
    assert [result.outcome for result in job.results()] == [Outcome.STOPPED]
    assert world.processes() == []


@pytest.mark.slow
def test_a_killed_rank_and_a_killed_shim_are_losses(world: World) -> None:
    for kill in ("rank", "shim"):
        job = world.job(LONG)
        job.next_epoch((world.one, 0), (world.one, 1))
        job.attend("fresh")
        job.until_step(1)
        part = world.one.runtime.parts.get(job.job, job.epoch)
        assert part is not None
        if kill == "rank":
            os.kill(part.client.status().rank_pids[1], signal.SIGKILL)
        else:
            shims = [pid for pid in world.processes() if b"proxy_runtime.shim" in _command(pid)]
            os.kill(shims[0], signal.SIGKILL)
        (result,) = job.results()
        assert result.outcome is Outcome.LOST, kill
        job.attend("fresh")  # an epoch does not start twice
        assert job.results()[0].outcome is Outcome.LOST
        job.stop()
        assert world.processes() == []


@pytest.mark.slow
def test_a_higher_head_ends_the_old_part(world: World) -> None:
    job = world.begun(LONG, (world.one, 0), (world.one, 1), step=1)
    old, attends = job.epoch, dict(job.attends)
    job.next_epoch((world.two, 0), (world.two, 1))
    world.one.runtime.end_fenced()
    assert attends["node-1"].result(30).outcome is Outcome.STOPPED
    assert world.processes() == []
    with pytest.raises(NodeError) as caught:
        world.one.runtime.barrier(BarrierInput(job.job, old, 1, "stop", 5.0))
    assert caught.value.code == "runtime.fenced"


@pytest.mark.slow
def test_a_higher_epoch_on_the_same_node_ends_the_lower_one_first(world: World) -> None:
    job = world.begun(LONG, (world.one, 0), (world.one, 1), step=1)
    first = job.attends.pop("node-1")
    job.next_epoch((world.one, 1), (world.one, 0))
    job.attend("fresh")
    job.until_step(1)
    assert first.result(DEADLINE_S).outcome is Outcome.STOPPED
    assert [part.epoch for part in world.one.runtime.parts.of_job(job.job)] == [job.epoch]


def test_what_the_node_does_not_have_is_unknown_and_what_it_cannot_run_unsuitable(world: World) -> None:
    job = world.job(make_spec("ddp_skew.py", volume={"kind": "path", "path": str(world.root / "missing")}))
    job.next_epoch((world.one, 0), (world.one, 1))
    for call in (
        lambda: world.one.runtime.barrier(BarrierInput(job.job, job.epoch, 1, "stop", 5.0)),
        lambda: job.attend("restored") or job.results(),
    ):
        with pytest.raises(NodeError) as caught:
            call()
        assert caught.value.code == "runtime.unknown"
    job.attends.clear()
    job.attend("fresh")
    with pytest.raises(NodeError, match="not a directory of this node") as caught:
        job.results()
    assert caught.value.code == "runtime.unsuitable"
    world.one.runtime.stop(StopInput(job.job, Epoch(99), "never was here"))


def test_a_secret_reaches_the_rank_and_no_file_of_the_nodes_but_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_NODE", "hunter-2")
    spec = parse_job_spec(
        {
            "apiVersion": "ergosphere/v1",
            "argv": ["python", "-c", "import os; print('SECRET', os.environ['WORD'][::-1], os.getcwd())"],
            "secrets": [{"variable": "WORD", "reference": "env:SECRET_OF_NODE"}],
        }
    )
    job = world.begun(spec, (world.one, 0))
    (result,) = job.results()
    assert result.outcome is Outcome.COMPLETED, job.tails()
    assert f"SECRET 2-retnuh /run/ergo/{job.job}.d" in job.log(0)
    assert "hunter-2" not in "".join(path.read_text() for path in (world.one.root / "parts").glob("*.json"))


@pytest.mark.slow
def test_a_job_starts_in_its_uploaded_directory_and_what_it_writes_is_in_its_last_checkpoint(world: World) -> None:
    source = world.root / "project"
    source.mkdir()
    (source / "data.txt").write_text("41\n")
    (source / "main.py").write_text(
        "import os\nrank = os.environ['RANK']\n"
        "open(f'out-{rank}.txt', 'w').write(str(int(open('data.txt').read()) + int(rank)))\n"
    )
    uploaded = volumes.upload_directory(world.fleet, "default", source)
    spec = parse_job_spec(
        {
            "apiVersion": "ergosphere/v1",
            "argv": ["python", "main.py"],
            "ranks": 2,
            "volume": {"kind": "upload", "manifest": str(uploaded)},
        }
    )
    job = world.begun(spec, (world.one, 0), (world.two, 0))
    assert [result.outcome for result in job.results()] == [Outcome.COMPLETED] * 2, job.tails()
    final = job.checkpoint("final").checkpoint
    job.stop()
    assert final is not None
    # One volume of both nodes: each rank has written on its own.
    found = [volumes.read_file(world.fleet, "default", final, f"directory/out-{rank}.txt") for rank in (0, 1)]
    assert found == [b"41", b"42"]
    assert sorted(path.name for path in source.iterdir()) == ["data.txt", "main.py"]


@pytest.mark.slow
def test_frozen_it_stands_still_and_thawed_it_goes_on(world: World) -> None:
    job = world.begun(
        make_spec("ddp_skew.py", "--epochs", "1000", ranks=2, on_lost_lease="freeze"),
        (world.one, 0),
        (world.one, 1),
        step=1,
    )
    part = world.one.runtime.parts.get(job.job, job.epoch)
    assert part is not None

    def state() -> set[str]:
        return {psutil.Process(pid).status() for pid in part.client.status().rank_pids.values()}

    world.one.runtime.freeze(True)
    until(lambda: state() == {psutil.STATUS_STOPPED}, "both ranks stand")  # one that ran has to be told by the kernel
    world.one.runtime.freeze(False)
    assert psutil.STATUS_STOPPED not in state()
    job.until_step(int(part.progress.step) + 2)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
