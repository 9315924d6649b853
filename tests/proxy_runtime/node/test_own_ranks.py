"""A job that starts its own ranks, as one process tree on one node: run, kept, moved, lost, right to the bit."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from model.ids import DeviceId, Epoch, JobId, NodeId
from model.job_spec import JobSpec
from model.placement import Placement
from model.runtime import Outcome
from proxy_runtime.channel.ring import _STEP_DONE, Ring
from proxy_runtime.node.launch import NodeProfile, run_spec
from proxy_runtime.node.ledger import PartRecord
from proxy_runtime.shim.generation import Rank
from proxy_runtime.shim.spec import SLOTS_PER_DEVICE, RunError, RunSpec
from tests.proxy_runtime.node.conftest import World
from tests.proxy_runtime.node.nodes import JOBS, Driver, make_spec

TREE = {"pack": "node", "devices_per_rank": 2}
SPAWN = make_spec("spawns.py", "--steps", "2400", ranks=1, **TREE)
TORCHRUN = make_spec("ddp_skew.py", ranks=1, **TREE).model_copy(
    update={"argv": ("torchrun", "--nproc-per-node=2", str(JOBS / "ddp_skew.py"), "--epochs", "12", "--skew", "0.04")}
)


def test_a_tree_has_a_rank_for_each_channel(tmp_path: Path) -> None:
    node = NodeId("node-1", 1)
    devices = tuple(DeviceId(node, (f"cpu-{n}",)) for n in (1, 0))
    placement = Placement(Epoch(3), devices, (0, 1), ranks_per_group=2)
    record = PartRecord(JobId("tree"), Epoch(3), SPAWN, placement, "build", ("python",), "/run/ergo/tree.d")
    profile = NodeProfile(node, ("cpu-0", "cpu-1"), "cpu", 1, tmp_path, "127.0.0.1")
    spec = run_spec(profile, record, {}, tmp_path)
    assert (spec.pack, spec.devices, spec.world_size, spec.processes) == ("node", 2, 2 * SLOTS_PER_DEVICE, 1)
    assert spec.part is not None
    assert spec.part.device_of_rank == (0,) * SLOTS_PER_DEVICE + (1,) * SLOTS_PER_DEVICE
    assert RunSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    with pytest.raises(RunError, match="is on one node as a whole"):
        replace(spec, part=replace(spec.part, local_devices=(0,)))
    with pytest.raises(RunError, match="keeps the number of devices that it began with"):
        replace(spec, devices=1)


def untouched(world: World, spec: JobSpec) -> dict[int, str]:
    job = world.begun(spec, (world.two, 0), (world.two, 1))
    finish(job)
    expected = job.digests()
    job.stop()
    assert set(expected) == {0, 1}
    return expected


def finish(job: Driver) -> None:
    (result,) = job.results()
    assert result.outcome is Outcome.COMPLETED and [end.rank for end in result.exits] == [0], job.tails()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("spec", [SPAWN, TORCHRUN], ids=["spawn", "torchrun"])
def test_kept_and_moved(world: World, spec: JobSpec) -> None:
    expected = untouched(world, spec)
    job = world.begun(spec, (world.one, 0), (world.one, 1), step=3)
    live = job.checkpoint("live")
    head = world.fleet.head(job.job)
    assert head is not None and (head.checkpoint, head.step >= 3) == (live.checkpoint, True)
    job.until_step(int(head.step) + 2)  # it went on
    full = job.checkpoint("full")
    assert full.checkpoint is not None
    job.stop()
    assert world.processes() == []
    job.results()

    job.next_epoch((world.two, 1), (world.two, 0))
    job.transfer(full.checkpoint, [world.one.node])
    (restored,) = job.restore(full.checkpoint)
    assert max(state.step for state in restored.ranks) > head.step
    job.attend("restored")
    finish(job)
    assert job.digests() == expected, job.tails()
    final = job.checkpoint("final")
    assert world.fleet.head(job.job).final == final.checkpoint is not None  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tree_whose_node_is_lost_goes_on_from_its_newest_checkpoint(world: World) -> None:
    expected = untouched(world, SPAWN)
    job = world.begun(SPAWN, (world.one, 0), (world.one, 1), step=3)
    checkpoint = job.checkpoint("live").checkpoint
    assert checkpoint is not None
    job.until_step(8)
    job.next_epoch((world.two, 0), (world.two, 1))
    job.transfer(checkpoint)
    job.restore(checkpoint)
    job.attend("restored")
    world.one.runtime.end_fenced()
    finish(job)
    assert job.digests() == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("how", "outcome"),
    [(signal.SIGKILL, Outcome.LOST), (signal.SIGSEGV, Outcome.LOST), (signal.SIGTERM, Outcome.FAILED)],
    ids=lambda value: value.name,
)
@pytest.mark.parametrize(("spec", "ranks"), [(SPAWN, "spawn_main"), (TORCHRUN, "ddp_skew")], ids=["spawn", "torchrun"])
def test_a_rank_that_is_killed_is_a_loss(
    world: World, spec: JobSpec, ranks: str, how: signal.Signals, outcome: Outcome
) -> None:
    """Launchers end with 1 in any case, and end the other ranks with SIGTERM."""
    job = world.job(spec)
    job.next_epoch((world.one, 0), (world.one, 1))
    job.attend("fresh")
    job.until_step(3)
    part = world.one.runtime.parts.get(job.job, job.epoch)
    assert part is not None
    tree = psutil.Process(part.client.status().rank_pids[0])
    found = [process for process in tree.children(recursive=True) if ranks in " ".join(process.cmdline())]
    assert len(found) == 2, found
    found[1].send_signal(how)
    (result,) = job.results()
    assert result.outcome is outcome and result.exits[0].exit_code == 1, (result, job.tails())
    job.stop()


def test_the_steps_of_a_channel_go_on_when_another_process_has_it() -> None:
    ring = Ring.create(rank=0, shared=True)
    try:
        channel = Rank(0, ring=ring, shared=True, last_step=40)  # of which 30 are of the process that was restored

        def done(steps: int) -> int:
            ring._words64[_STEP_DONE // 8] = steps
            return channel.step

        assert [done(steps) for steps in (30, 31, 35)] == [40, 41, 45]
        assert [done(steps) for steps in (0, 0, 2)] == [45, 45, 47]
        assert [done(steps) for steps in (1, 3)] == [48, 50]
    finally:
        ring.close()
    assert channel.step == 50
