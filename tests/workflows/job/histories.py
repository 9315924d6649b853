"""Writes the golden histories: `python -m tests.workflows.job.histories`, from the root of the repository.

A history that is committed stays: workflows that began with an older build must go on with a newer one. After a change
that needs `workflow.patched`, add histories beside the old ones, do not write these again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from temporalio.client import WorkflowFailureError, WorkflowUpdateFailedError, WorkflowUpdateStage
from temporalio.testing import WorkflowEnvironment

from infra.converter import DATA_CONVERTER
from infra.temporal import binary
from model.ids import DeviceId
from model.job_state import JobPhase
from model.names import Signal, Update
from model.requests import (
    MigrateRequest,
    PreemptRequest,
    ResizeRequest,
)
from model.runtime import Outcome, RuntimeCode
from tests.workflows.job.fleet import Fleet, Handle, reset, until

GOLDEN = Path(__file__).parents[2] / "golden" / "histories" / "job"


async def _move(job: Handle) -> None:
    target = job.fleet.nodes[2]
    request = MigrateRequest("node-2", wait=True)
    asked = await job.workflow.start_update(Update.MIGRATE, request, wait_for_stage=WorkflowUpdateStage.ACCEPTED)
    notice = await job.notice(lambda notice: notice.wants == "move")
    await job.direct("migrate", target.device(0), target.device(1), request=notice.request)
    await asked.result()


async def life(fleet: Fleet) -> Handle:
    """start → preempt → resume → migrate → complete"""
    job = await fleet.submit(ranks=2, job="life")
    first, second, _ = fleet.nodes
    await job.run_on(first.device(0), first.device(1))
    await job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True))
    await job.workflow.execute_update(Update.RESUME)
    await job.run_on(second.device(0), second.device(1))
    await _move(job)
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    return job


async def node_lost(fleet: Fleet) -> Handle:
    """A node is lost; the job goes on from a checkpoint."""
    job = await fleet.submit(ranks=2, job="node-lost")
    first, second, third = fleet.nodes
    await job.run_on(first.device(0), second.device(0))
    await job.workflow.execute_update(Update.CHECKPOINT, {"wait": True})
    await job.direct("lost", nodes=[second.id])
    await job.run_on(first.device(0), third.device(0))
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    return job


async def failure(fleet: Fleet) -> Handle:
    """A cut fails, a move fails, then the program."""
    job = await fleet.submit(ranks=2, job="failure", retries={"failure": 1})
    first, second, _ = fleet.nodes
    await job.run_on(first.device(0), second.device(0))
    for step in ("barrier.finish", "restore"):
        fleet.troubles.want(step, RuntimeCode.UNSUITABLE, times=1)
        with contextlib.suppress(Exception):
            await (
                _move(job)
                if step == "restore"
                else job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True))
            )
    await job.end(Outcome.FAILED, 3)
    await job.run_on(first.device(0), second.device(0))
    await job.end(Outcome.FAILED, 3)
    with contextlib.suppress(WorkflowFailureError):
        await job.workflow.result()
    return job


async def renewed(fleet: Fleet) -> Handle:
    """The run after a continue-as-new, cancelled."""
    job = await fleet.submit(job="renewed")
    await job.run_on(fleet.nodes[0].device(0))
    before = (await job.workflow.describe()).run_id
    await job.workflow.signal(Signal.RENEW)

    async def again() -> bool:
        return (await job.workflow.describe()).run_id != before

    await until(again, "a new run")
    await job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True))
    await job.workflow.cancel()
    with contextlib.suppress(WorkflowFailureError):
        await job.workflow.result()
    first = await fleet.client.get_workflow_handle("renewed", run_id=before).fetch_history()
    _write("renewed-first-run", first.to_json_dict())
    return job


async def resized(fleet: Fleet) -> Handle:
    """To fewer devices for a person, a resize that fails, to more for the scheduler, complete."""
    job = await fleet.submit(ranks=4, job="resized")
    devices = [node.device(index) for node in fleet.nodes[:2] for index in range(2)]
    await job.run_on(*devices)

    async def narrower() -> None:
        before = {notice.request for notice in fleet.notices}
        request = ResizeRequest(2, wait=True)
        asked = await job.workflow.start_update(Update.RESIZE, request, wait_for_stage=WorkflowUpdateStage.ACCEPTED)
        notice = await job.notice(lambda notice: notice.wants == "resize" and notice.request not in before)
        await job.direct("resize", *devices[:2], request=notice.request, ranks=4)
        await asked.result()

    fleet.troubles.want("restore", RuntimeCode.UNSUITABLE, times=1)
    with contextlib.suppress(Exception):
        await narrower()
    await narrower()
    notice = await job.notice(lambda notice: len(notice.devices) == 2 and notice.wants == "nothing")
    await job.direct("resize", *devices, ranks=4, notice=notice.number)

    async def wide() -> bool:
        return (await job.show()).width == 4

    await until(wide, "four devices")
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    return job


async def kept(fleet: Fleet) -> Handle:
    """Every rank stays on its node: a resize that fails, one that cannot keep processes, one that does, a move back."""
    job = await fleet.submit(ranks=4, job="kept")
    devices = [node.device(index) for node in fleet.nodes[:2] for index in range(2)]
    await job.run_on(*devices)

    async def to(width: int, *on: DeviceId) -> None:
        before = {notice.request for notice in fleet.notices}
        request = ResizeRequest(width, wait=True)
        asked = await job.workflow.start_update(Update.RESIZE, request, wait_for_stage=WorkflowUpdateStage.ACCEPTED)
        notice = await job.notice(lambda notice: notice.wants == "resize" and notice.request not in before)
        await job.direct("resize", *on, request=notice.request, ranks=4)
        await asked.result()

    fleet.troubles.want("restore.kept", "device-proxy.gone", times=4)
    with contextlib.suppress(Exception):
        await to(2, devices[0], devices[2])
    fleet.troubles.none()
    fleet.troubles.want("transfer.keeps", RuntimeCode.UNSUITABLE, times=1)
    await to(2, devices[0], devices[2])
    await to(4, *devices)
    await to(2, devices[1], devices[3])
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    return job


async def some_stay(fleet: Fleet) -> Handle:
    """Half of the ranks change their node: it fails, the others' processes cannot be kept, they are; and a move."""
    job = await fleet.submit(ranks=4, job="some-stay")
    first, second, third = fleet.nodes
    four = [node.device(index) for node in (first, second) for index in range(2)]
    await job.run_on(*four)

    async def to(width: int, *on: DeviceId) -> None:
        before = {notice.request for notice in fleet.notices}
        request = ResizeRequest(width, wait=True)
        asked = await job.workflow.start_update(Update.RESIZE, request, wait_for_stage=WorkflowUpdateStage.ACCEPTED)
        notice = await job.notice(lambda notice: notice.wants == "resize" and notice.request not in before)
        await job.direct("resize", *on, request=notice.request, ranks=4)
        await asked.result()

    fleet.troubles.want("restore.come", "device-proxy.gone", times=4)
    with contextlib.suppress(Exception):
        await to(2, *four[:2])
    fleet.troubles.none()
    fleet.troubles.want("restore.come", RuntimeCode.UNSUITABLE, times=1)
    await to(2, *four[:2])
    await to(4, *four)
    fleet.troubles.want("transfer.keeps", RuntimeCode.UNSUITABLE, times=1)
    await to(2, *four[:2])
    await to(4, *four)
    moved = (await job.show()).epoch
    await job.direct("migrate", *four[:2], third.device(0), third.device(1), ranks=4)

    async def there() -> bool:
        view = await job.show()
        return view.epoch > moved and view.phase is JobPhase.RUNNING

    await until(there, "it has moved")
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    return job


async def lost_in_a_cut(fleet: Fleet) -> Handle:
    """A rank dies while another node is held for a cut; of a script without steps, whose checkpoints are progress."""
    job = await fleet.submit(ranks=2, job="lost-in-a-cut", retries={"no_progress": 1})
    first, second, third = fleet.nodes
    for node in fleet.nodes:
        node.stepless = True
    await job.run_on(first.device(0), second.device(0))
    for _ in range(2):
        await job.workflow.execute_update(Update.CHECKPOINT, {"wait": True})
        held = fleet.troubles.holds["node-0.barrier.finish"] = threading.Event()
        calls = fleet.troubles.calls["node-0.barrier.finish"]
        asked = await job.workflow.start_update(
            Update.CHECKPOINT, {"wait": True}, wait_for_stage=WorkflowUpdateStage.ACCEPTED
        )
        await until(lambda calls=calls: fleet.troubles.calls["node-0.barrier.finish"] > calls, "it is under way")
        await job.end(Outcome.LOST)
        with contextlib.suppress(WorkflowUpdateFailedError):
            await asked.result()
        held.set()
        await job.run_on(first.device(0), third.device(0))
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    return job


async def cold_update(fleet: Fleet) -> Handle:
    """A resize is the first thing that a new worker hears of the job, whose last task had ordered nothing."""
    job = await fleet.submit(ranks=2, job="cold-update")
    first = fleet.nodes[0]
    await job.run_on(first.device(0), first.device(1))
    await job.steps(first)
    await job.quiet()
    await fleet.stop_worker("job")
    asked = asyncio.ensure_future(job.workflow.execute_update(Update.RESIZE, ResizeRequest(1, wait=True)))
    await asyncio.sleep(0.3)
    await fleet.start_job_worker()
    notice = await job.notice(lambda notice: notice.wants == "resize")
    await job.direct("resize", first.device(0), request=notice.request, ranks=2)
    await asked
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    return job


async def updates_at_once(fleet: Fleet) -> Handle:
    """A preemption and its end come in one task."""
    job = await fleet.submit(ranks=2, job="updates-at-once")
    first, second, _ = fleet.nodes
    await job.run_on(first.device(0), first.device(1))
    await job.steps(first)
    await job.quiet()
    await fleet.stop_worker("job")
    asked = []
    for update, request in ((Update.PREEMPT, PreemptRequest(wait=True)), (Update.RESUME, None)):
        asked.append(asyncio.ensure_future(job.workflow.execute_update(update, request)))
        await asyncio.sleep(0.3)
    await fleet.start_job_worker()
    await asyncio.gather(*asked)
    await job.run_on(second.device(0), second.device(1))
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    return job


async def reset_early(fleet: Fleet) -> Handle:
    """Set back to where it was placed first: what that task told had other words in the run before."""
    job = await fleet.submit(job="reset-early")
    first, second, _ = fleet.nodes
    await job.run_on(first.device(0))
    await job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True))
    await job.workflow.execute_update(Update.RESUME)
    await job.run_on(second.device(0))
    await reset(fleet.client, job, task=3)
    job = Handle(fleet, fleet.client.get_workflow_handle(job.id))
    await job.notice(lambda notice: notice.generation == 2 and notice.wants == "devices")
    await job.run_on(first.device(0))
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    return job


SCENARIOS: dict[str, Callable[[Fleet], Awaitable[Handle]]] = {
    "life": life,
    "node-lost": node_lost,
    "failure": failure,
    "renewed": renewed,
    "resized": resized,
    "kept": kept,
    "some-stay": some_stay,
    "cold-update": cold_update,
    "updates-at-once": updates_at_once,
    "lost-in-a-cut": lost_in_a_cut,
    "reset-early": reset_early,
}


def _write(name: str, history: object) -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    (GOLDEN / f"{name}.json").write_text(json.dumps(_anonymous(history), separators=(",", ":")) + "\n")


def _anonymous(value: object) -> object:
    """Without what tells of the machine and does not matter to a replay: stack traces, names of workers."""
    if isinstance(value, dict):
        return {key: _anonymous(item) for key, item in value.items() if key not in ("stackTrace", "identity")}
    if isinstance(value, str):
        return re.sub(rf"[0-9]+@{re.escape(socket.gethostname())}", "worker", value)
    return [_anonymous(item) for item in value] if isinstance(value, list) else value


async def main(names: list[str]) -> None:
    """Plays the scenarios."""
    env = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(binary()), data_converter=DATA_CONVERTER, dev_server_log_level="error"
    )
    async with env:
        for name in names or list(SCENARIOS):
            with tempfile.TemporaryDirectory() as store:
                async with Fleet(env.client, Path(store)).up() as fleet:
                    job = await SCENARIOS[name](fleet)
                    history = await fleet.client.get_workflow_handle(job.id).fetch_history()
                    _write(name, history.to_json_dict())
                    print(f"{name}: {len(history.events)} events")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
