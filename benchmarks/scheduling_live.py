"""The scheduler's workflow at the size of a cluster, on the local Temporal server, while its worker is killed.

    make bench ONLY=scheduling.live                              # twenty minutes of the log
    python -m benchmarks.scheduling_live --minutes 3             # less; --nodes, --jobs, --kills

Real are Temporal, the scheduler's workflow and worker (`infra.cluster_worker`), its observer and its store; nodes and
jobs are those of `benchmarks.standins`. First all jobs are submitted as fast as Temporal takes them; then jobs of the
log arrive at its own rate: as many of its busiest stretches at once as the fleet is larger than the log's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.snapshots import Snapshots
from benchmarks.harness import BenchmarkError, Condition, Context, Figure, benchmark
from benchmarks.live_history import History, read_history
from benchmarks.live_processes import CLUSTER, Processes, connect
from benchmarks.scheduling import LARGEST, SEED, nodes, workload
from benchmarks.standins import FLOOR, StandInInput, StandInJob, StandInNodes
from model.ids import JobId
from model.job_spec import Tier
from model.names import cluster_workflow_id
from proxy_runtime.errors import ErgoError
from scheduling.simulator.measures import quantile
from scheduling.simulator.workload import TraceJob

DEVICES = 8
LEASE_S = 60.0
QUEUE = "standins"
TICK_S = 5.0
AWAY_S = 2.0
"""After its death the worker is started again so much later; a supervisor does it at once."""
_AT_ONCE = 24  # submissions under way
_QUIET_S = 120.0
_LOOK_S = 3.0


@dataclass(frozen=True, slots=True)
class Load:
    """How much of everything. Kills are spread evenly over the minutes; one more falls into the filling."""

    minutes: float = 20.0
    nodes: int = 1000
    jobs: int = 5000
    kills: int = 12


@dataclass(slots=True)
class Seen:
    """What was seen from outside.

    Attributes:
        kills: times, in seconds since 1970.
        fill_s: until all of the first jobs had been submitted, and until each had heard of the scheduler.
        lengths: (events, bytes) of the scheduler's history, sampled.
    """

    began: float = 0.0
    filled: float = 0.0
    ended: float = 0.0
    fill_s: tuple[float, float] = (0.0, 0.0)
    arrivals: int = 0
    kills: list[float] = field(default_factory=list[float])
    lengths: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    snapshot_bytes: int = 0
    store_bytes: int = 0
    repeated: int = 0
    lost: list[str] = field(default_factory=list[str])
    doubled: list[str] = field(default_factory=list[str])
    contradictions: list[str] = field(default_factory=list[str])


def first_jobs(load: Load) -> list[TraceJob]:
    """Jobs of the log, in any order, each with a part of its work left."""
    rng = random.Random(SEED)
    log = workload(LARGEST).jobs
    chosen = rng.sample(log, load.jobs) if load.jobs <= len(log) else rng.choices(log, k=load.jobs)
    return [replace(job, duration_s=max(60.0, job.duration_s * rng.random())) for job in chosen]


def arrivals(load: Load) -> list[TraceJob]:
    """What the log's busiest stretches of `minutes` bring, as many at once as the fleet is larger than the log's."""
    span = load.minutes * 60
    by_stretch: dict[int, list[TraceJob]] = {}
    for job in workload(LARGEST).jobs:
        by_stretch.setdefault(int(job.submit_s // span), []).append(job)
    copies = max(1, round(load.nodes / nodes(LARGEST, 0.99)))
    busiest = sorted(by_stretch.values(), key=len, reverse=True)[:copies]
    found = [replace(job, submit_s=job.submit_s % span) for jobs in busiest for job in jobs]
    return sorted(found, key=lambda job: job.submit_s)


# -- the run ---------------------------------------------------------------------------------------------------


class Live:
    """One run."""

    def __init__(self, client: Client, processes: Processes, load: Load, say: Any) -> None:
        self.client, self.processes, self.load, self.say = client, processes, load, say
        self.store = processes.fleet_store()
        self.snapshots = Snapshots(self.store, CLUSTER)
        self.seen = Seen()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._submitted: list[JobId] = []

    @property
    def handle(self) -> WorkflowHandle[Any, Any]:
        return self.client.get_workflow_handle(cluster_workflow_id(CLUSTER))

    async def run(self) -> History:
        """Fills the fleet, lets jobs arrive and the worker die, and looks at what has come of it."""
        load, seen = self.load, self.seen
        FLOOR.__init__()
        agents = StandInNodes(self.store, CLUSTER, load.nodes, DEVICES, LEASE_S)
        await agents.begin()
        async with _background(agents.run(), self._sample()):
            await self._until(self._knows_nodes, "the scheduler knows all nodes", 120 + load.nodes / 10)
            seen.began = time.time()
            await self._fill()
            seen.filled = time.time()
            self.say(f"filled in {seen.filled - seen.began:.0f} s, {len(FLOOR.owner)} devices taken")
            async with _background(self._kill(load.kills, load.minutes * 60)):
                await self._arrive()
            seen.ended = time.time()
            self.say(f"over; {sum(FLOOR.told.values())} decisions told")
            last = await self._tick()

            async def recovered() -> bool:
                return await self._tick() > last

            await self._until(recovered, "the scheduler has decided once more", _QUIET_S)
            history = await self._check()
        agents.close()
        self.say(f"renewals {agents.renewals}, at most {agents.late_s:.1f} s late")
        return history

    async def _fill(self) -> None:
        begun = time.monotonic()
        jobs = first_jobs(self.load)
        half = len(jobs) // 2
        await asyncio.gather(*(self._submit(f"first-{n}", job) for n, job in enumerate(jobs[:half])))
        await self._kill_once()
        await asyncio.gather(*(self._submit(f"first-{half + n}", job) for n, job in enumerate(jobs[half:])))
        submitted = time.monotonic() - begun
        await self._until(self._heard, "all jobs have heard of the scheduler", 600)
        self.seen.fill_s = submitted, time.monotonic() - begun

    async def _submit(self, name: str, job: TraceJob) -> None:
        input = StandInInput(CLUSTER, job.tenant, job.tier or Tier.BASIC, job.devices, 1, job.duration_s)
        async with self._slots:
            await self.client.start_workflow(StandInJob.run, input, id=name, task_queue=QUEUE)
        self._submitted.append(JobId(name))

    async def _arrive(self) -> None:
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number, job in enumerate(arrivals(self.load)):
                await asyncio.sleep(max(0.0, begun + job.submit_s - time.monotonic()))
                group.create_task(self._submit(f"later-{number}", job))
                self.seen.arrivals += 1
        await asyncio.sleep(max(0.0, begun + self.load.minutes * 60 - time.monotonic()))

    async def _kill(self, times: int, span_s: float) -> None:
        rng, begun = random.Random(SEED), time.monotonic()
        for number in range(times):
            at = span_s * (number + 0.2 + 0.6 * rng.random()) / times
            await asyncio.sleep(max(0.0, begun + at - time.monotonic()))
            await self._kill_once()

    async def _kill_once(self) -> None:
        self.seen.kills.append(time.time())
        self.processes.kill_worker()
        await asyncio.sleep(AWAY_S)
        self.processes.start_worker()

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(2.0)
            try:
                info = (await self.handle.describe()).raw_description.workflow_execution_info
                self.seen.lengths.append((info.history_length, info.history_size_bytes))
            except RPCError:
                pass

    # -- what is waited for -----------------------------------------------------------------------------------------

    async def _until(self, condition: Any, what: str, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        while not await condition():
            if time.monotonic() > until:
                raise BenchmarkError(f"{deadline_s:g} s have not been enough until {what}.")
            await asyncio.sleep(_LOOK_S)

    async def _knows_nodes(self) -> bool:
        state = await asyncio.to_thread(self.snapshots.newest)
        return state is not None and len(state.nodes) == self.load.nodes

    async def _tick(self) -> int:
        state = await asyncio.to_thread(self.snapshots.newest)
        return state.tick if state is not None else 0

    async def _heard(self) -> bool:
        missing = set(self._submitted) - {job for job, _ in FLOOR.told}
        if not missing:
            return True
        # Some wait whose turn it was not yet; it is enough that the scheduler knows of them.
        state = await asyncio.to_thread(self.snapshots.newest)
        return state is not None and missing <= {job.notice.job for job in state.jobs}

    # -- what has come of it ----------------------------------------------------------------------------------------

    async def _check(self) -> History:
        seen = self.seen
        state = await asyncio.to_thread(self.snapshots.newest)
        seen.contradictions = [item.text for item in state.findings if item.counts] if state else []
        seen.snapshot_bytes = len(state.to_json()) if state else 0
        seen.store_bytes = sum(found.bytes for found in self.store.bucket.find(f"clusters/{CLUSTER}"))
        history = await read_history(self.client, cluster_workflow_id(CLUSTER))
        # The rest is being delivered, or was decided for a job that has ended since.
        delivered = [item for tick in history.ticks if tick.delivered for item in tick.directives]
        ids = {(item.job, item.directive.decision) for item in delivered}

        def missing() -> list[str]:
            return [f"{job}: {decision}" for job, decision in ids - set(FLOOR.told) if not FLOOR.phases[job].ended]

        until = time.monotonic() + _QUIET_S
        while (lost := missing()) and time.monotonic() < until:  # Temporal has them; the stand-ins are behind
            await asyncio.sleep(1.0)
        seen.lost = lost
        seen.repeated = sum(count - 1 for count in FLOOR.told.values())
        seen.doubled = [*FLOOR.doubled, *_twice(history)]
        return history


def _twice(history: History) -> list[str]:
    """Jobs that were given devices by two decisions on one notice."""
    found: dict[tuple[JobId, int], set[str]] = {}
    for tick in history.ticks:
        for item in tick.directives:
            if item.directive.action in ("place", "migrate", "resize"):
                found.setdefault((item.job, item.directive.notice), set()).add(item.directive.decision)
    return [f"{job}, notice {number}: {sorted(ids)}" for (job, number), ids in found.items() if len(ids) > 1]


@asynccontextmanager
async def _background(*work: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


async def play(directory: Path, load: Load, say: Any) -> tuple[Seen, History]:
    """One run in a directory of its own.

    Raises:
        BenchmarkError: it came to no end.
    """
    processes = Processes(directory)
    try:
        processes.start_server()
        client = await connect(processes.address)
        processes.start_worker()
        jobs = Worker(
            client,
            task_queue=QUEUE,
            workflows=[StandInJob],
            workflow_runner=UnsandboxedWorkflowRunner(),
            max_cached_workflows=2 * load.jobs + 1000,
            max_concurrent_workflow_tasks=64,
        )
        live = Live(client, processes, load, say)
        async with jobs:
            history = await live.run()
        return live.seen, history
    except ErgoError:
        say(processes.tail("worker.log"))
        raise
    finally:
        processes.close()


# -- figures ---------------------------------------------------------------------------------------------------


def figures(load: Load, seen: Seen, history: History) -> Iterator[Figure]:
    """What a run has shown."""
    name = "scheduling.live"
    whole = history.whole(seen.kills)
    steady = [tick for tick in whole if tick.begun >= seen.filled]
    lengths = [tick.seconds for tick in whole]
    details = {
        "nodes": load.nodes,
        "jobs": load.jobs,
        "minutes": load.minutes,
        "kills": len(seen.kills),
        "arrivals": seen.arrivals,
        "log": LARGEST,
        "tiers": workload(LARGEST).tiers_sentence(),
        "lease_s": LEASE_S,
        "runs": history.runs,
        "actions": history.actions(),
        "fill_s": [round(value, 1) for value in seen.fill_s],
        "lost": seen.lost[:5],
        "doubled": seen.doubled[:5],
        "contradictions": seen.contradictions[:5],
    }
    if not steady:
        raise BenchmarkError("No tick was seen after the filling.")
    yield Figure(f"{name}.tick.longest", "s", lengths, Condition("<=", TICK_S), value=max(lengths), details=details)
    for which, ticks in (("filling", [t for t in whole if t.begun < seen.filled]), ("steady", steady)):
        found = sorted(tick.seconds for tick in ticks)
        yield Figure(f"{name}.tick.{which}.median", "s", found)
        yield Figure(f"{name}.tick.{which}.p99", "s", found, value=quantile(found, 0.99))
    words = sorted(tick.waited_s for tick in steady if tick.waited_s is not None)
    if words:
        yield Figure(f"{name}.word_to_decision.p99", "s", words, value=quantile(words, 0.99))
    if after := history.recoveries(seen.kills):
        yield Figure(f"{name}.recovery", "s", after, value=max(after))
    yield Figure(f"{name}.decisions.lost", "", [len(seen.lost)], Condition("<=", 0))
    yield Figure(f"{name}.decisions.doubled", "", [len(seen.doubled)], Condition("<=", 0))
    yield Figure(f"{name}.contradictions", "", [len(seen.contradictions)], Condition("<=", 0))
    yield Figure(f"{name}.decisions.repeated", "", [seen.repeated])
    filled = [t for t in history.ticks if t.begun < seen.filled]
    yield Figure(f"{name}.decisions.filling", "/s", [sum(len(t.directives) for t in filled) / seen.fill_s[1]])
    yield Figure(
        f"{name}.decisions.steady", "/s", [sum(len(t.directives) for t in steady) / (seen.ended - seen.filled)]
    )
    events, size = max(n for n, _ in seen.lengths), max(n for _, n in seen.lengths)
    yield Figure(f"{name}.history.events", "", [max(events, history.events)], Condition("<", 51_200))
    yield Figure(f"{name}.history.size", "MB", [max(size, history.bytes) / 1e6], Condition("<", 50.0))
    yield Figure(f"{name}.payload.largest", "MB", [history.largest_payload / 1e6], Condition("<", 2.0))
    yield Figure(f"{name}.snapshot", "MB", [seen.snapshot_bytes / 1e6])
    yield Figure(f"{name}.snapshots_kept", "MB", [seen.store_bytes / 1e6])


@benchmark("scheduling.live")
def live(context: Context) -> Iterator[Figure]:
    """Twenty minutes of 1,000 nodes and 5,000 jobs."""
    load = Load()
    yield from figures(load, *asyncio.run(play(context.directory(), load, context.say)))


def main(arguments: Sequence[str] | None = None) -> int:
    """A run of another size: figures on stdout, nothing is recorded."""
    default = Load()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduling_live")
    parser.add_argument("--minutes", type=float, default=default.minutes)
    parser.add_argument("--nodes", type=int, default=default.nodes)
    parser.add_argument("--jobs", type=int, default=default.jobs)
    parser.add_argument("--kills", type=int, default=default.kills)
    parser.add_argument("--keep", type=Path, help="a directory for the store and the logs, kept; a new one else")
    given = parser.parse_args(arguments)
    load = Load(given.minutes, given.nodes, given.jobs, given.kills)

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="ergo-live-") as scratch:
        directory = given.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        found = list(figures(load, *asyncio.run(play(directory, load, say))))
    for figure in found:
        print(figure.line())
    print(json.dumps(found[0].details))
    return int(not all(figure.holds for figure in found))


if __name__ == "__main__":
    raise SystemExit(main())
