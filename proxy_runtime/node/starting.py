"""How parts come to be on a node: fresh, from a checkpoint, or from the processes of the epoch before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

from model.ids import CheckpointId, Epoch, JobId
from model.job_spec import JobSpec
from model.manifest import Manifest, NumericsClass
from model.placement import Placement
from model.runtime import AttendInput, RestoreInput, RestoreResult, TransferInput
from proxy_runtime import build
from proxy_runtime.errors import ErgoError
from proxy_runtime.node import launch
from proxy_runtime.node.clock import Clock
from proxy_runtime.node.environment import command
from proxy_runtime.node.errors import fenced, of_one_alone, unknown
from proxy_runtime.node.launch import NodeProfile
from proxy_runtime.node.ledger import Ledger
from proxy_runtime.node.parts import Part, Parts
from proxy_runtime.node.peers import Peers
from proxy_runtime.node.storage import Storage
from proxy_runtime.node.volumes import BaseVolumes
from proxy_runtime.shim import ahead
from proxy_runtime.shim.header import numerics_class
from proxy_runtime.storage.fleet import FleetStore

START_S = 120.0
"""How long the nodes of a job may take, from one another's view, to prepare and connect a fresh start."""
CONNECT_S = 60.0
"""How long proxies that are there on all nodes may take to meet; one that is gone is never met."""


class Starter:
    """Makes parts. Thread-safe; whoever calls makes sure that one call at a time makes the same part.

    Args:
        profile: what is the same for all jobs of the node.
        fleet: the fleet's store.
        storage: the node's.
        volumes: base directories of jobs.
        ledger: what the node remembers.
        parts: of the node.
        python: interpreter that ``python`` in a job's command stands for.
    """

    def __init__(
        self,
        profile: NodeProfile,
        fleet: FleetStore,
        storage: Storage,
        volumes: BaseVolumes,
        ledger: Ledger,
        parts: Parts,
        python: str,
    ) -> None:
        self._profile = profile
        self._fleet = fleet
        self._storage = storage
        self._volumes = volumes
        self._ledger = ledger
        self._parts = parts
        self._python = python
        self._peers = Peers(storage.address, storage.token)

    @property
    def numerics(self) -> NumericsClass:
        """See `LocalNodeRuntime.numerics`."""
        return numerics_class(self._build(), self._profile.device_kind, self._profile.threads)

    def start(self, request: AttendInput) -> Part:
        """Starts the job's command anew."""
        job, epoch, spec = request.job, request.epoch, request.spec
        launch.require_devices(self._profile, request.placement)
        made = self._build()
        what = command(spec, python=self._python)
        record = launch.fresh_record(job, epoch, spec, request.placement, what, made, self._first_run(job))
        with self._ended_on_error(self._placed(record, what.whole_env, made)) as part:
            self._connect(part, request.placement, fresh=True, deadline_s=START_S)
            part.mark_started()
            return part

    def make_ready(self, request: TransferInput, spec: JobSpec, placement: Placement) -> None:
        """All of a restore that does not need its checkpoint: the zygote imports torch while the job still runs."""
        job, epoch = request.job, request.epoch
        if request.keeps:
            part = self._to_keep(job, epoch, placement)
        else:
            part, _ = self._to_restore(job, epoch, spec, placement, request.checkpoint)
        with self._ended_on_error(part):
            self._connect(part, placement, fresh=False, deadline_s=request.deadline_s)
            if request.keeps and not request.ranks:
                return
            # Of ranks that are here the next cut has the files at hand.
            places = [old.record.placement for old in self._parts.of_job(job) if old.epoch < epoch]
            here = {rank for place in places for rank in place.ranks_at(self._profile.node)}
            come = {*placement.ranks_at(self._profile.node)} - here
            reader = self._storage.store(spec.tenant).read(request.checkpoint, job)
            with suppress(ErgoError):  # without them everything is read when the ranks stand
                ahead.bring(reader, come, part.client.layout.epoch(part.home).ahead(epoch))

    def restore(self, request: RestoreInput) -> RestoreResult:
        """Makes a part from a checkpoint, paused."""
        clock = Clock()
        job, epoch, spec = request.job, request.epoch, request.spec
        part, manifest = self._to_restore(job, epoch, spec, request.placement, request.checkpoint)
        with self._ended_on_error(part), ThreadPoolExecutor(1, "ergo-base") as beside:
            kept = beside.submit(self._keep_base, job, epoch, spec, manifest)
            if not part.connected:
                self._connect(part, request.placement, fresh=False, deadline_s=request.deadline_s)
            clock.lap("connect")
            result = part.client.restore(request.checkpoint, deadline_s=request.deadline_s)
            kept.result()
            part.mark_started(result.ranks)
            part.look()
        return RestoreResult(result.ranks, {**result.timings_ms, **clock.laps})

    def keep(self, request: RestoreInput) -> RestoreResult:
        """Makes a part from processes of the epoch before, which is held at a cut; they stand still."""
        clock = Clock()
        job, epoch, spec = request.job, request.epoch, request.spec
        part = self._to_keep(job, epoch, request.placement)
        with self._ended_on_error(part):
            if not part.connected:
                self._connect(part, request.placement, fresh=False, deadline_s=request.deadline_s)
            clock.lap("connect")
            come = None
            if request.come:
                come = request.checkpoint
                manifest = self._storage.manifest(spec.tenant, job, come)
                launch.require_fitting(manifest, self.numerics)
                self._keep_base(job, epoch, spec, manifest)
            result = part.client.keep(request.cut, come, deadline_s=request.deadline_s)
            part.mark_started(result.ranks)
            part.look()
        return RestoreResult(result.ranks, {**result.timings_ms, **clock.laps})

    # ------------------------------------------------------------------ what they consist of

    def _keep_base(self, job: JobId, epoch: Epoch, spec: JobSpec, manifest: Manifest) -> None:
        if manifest.volume is not None:
            tree = self._storage.store(spec.tenant).exchange.tree_bytes(manifest.volume)
            self._ledger.put_base(job, epoch, tree)

    def _to_restore(
        self, job: JobId, epoch: Epoch, spec: JobSpec, placement: Placement, checkpoint: CheckpointId
    ) -> tuple[Part, Manifest]:
        """The part that is to go on from a checkpoint which is here, with its shim."""
        launch.require_devices(self._profile, placement)
        manifest = self._storage.manifest(spec.tenant, job, checkpoint)
        made = launch.require_fitting(manifest, self.numerics)
        record = launch.restored_record(epoch, spec, placement, manifest, self._first_run(job))
        part = self._placed(record, record.env, made)
        with self._ended_on_error(part):
            part.become(record)  # where it was made ready ahead, that was for an earlier checkpoint
        return part, manifest

    def _placed(self, record: launch.PartRecord, env: dict[str, str], made: build.Build) -> Part:
        """The part with its shim, which has started nothing yet."""
        job, epoch = record.job, record.epoch
        spec = launch.run_spec(self._profile, record, env, self._volumes.of(record.spec), self._python)
        self._storage.store(record.spec.tenant)  # makes the tenant's key known to the store
        with self._parts.lock(job):  # whoever stops the epoch comes before this, or finds the part
            self._require_open(job, epoch)
            part = self._parts.get(job, epoch)
            if part is not None and not part.client.alive:
                if part.record.started:
                    raise unknown(job, epoch, self._profile.node)
                part.client.end()  # it was killed before anything had begun
            part = part or self._parts.add(record)
            with self._ended_on_error(part):
                part.client.spawn(spec, made.root, self._parts.runs_dir)
        return part

    def _to_keep(self, job: JobId, epoch: Epoch, placement: Placement) -> Part:
        """The part that is to go on with the processes which are here, in their shim."""
        part = self._parts.get(job, epoch)
        if part is not None and part.client.alive:
            return part
        head = self._fleet.head(job)  # the epoch that counts, until this one does
        before = self._parts.get(job, head.epoch) if head is not None and head.epoch < epoch else None
        if before is None or before.ended:
            raise unknown(job, epoch, self._profile.node)
        launch.require_devices(self._profile, placement)
        record = replace(before.record, epoch=epoch, placement=placement, home=before.home, started=False, restored=())
        spec = launch.run_spec(self._profile, record, record.env, self._volumes.of(record.spec), self._python)
        with self._parts.lock(job):
            self._require_open(job, epoch)
            part = self._parts.add(record)
            with self._ended_on_error(part):
                self._ledger.copy_base(job, before.epoch, epoch)
                part.client.succeed(spec, before.epoch)
        return part

    def _require_open(self, job: JobId, epoch: Epoch) -> None:
        known = self._ledger.epochs(job)
        if known.seen > epoch:
            raise fenced(job, epoch, known.seen)
        if known.over(epoch):
            raise unknown(job, epoch, self._profile.node)

    def _connect(self, part: Part, placement: Placement, *, fresh: bool, deadline_s: float) -> None:
        """Proxies of all nodes of the job reach one another."""
        limit = time.monotonic() + deadline_s
        job, epoch = part.job, part.epoch
        part.endpoints = part.client.prepare(self._profile.host, fresh=fresh, deadline_s=deadline_s)
        others = [node for node in placement.nodes if node != self._profile.node]
        found = self._peers.endpoints(
            job, epoch, others, max(1.0, limit - time.monotonic()), over=lambda: self._stopped(part)
        )
        token = self._storage.fabric_token(part.record.spec.tenant, job, epoch)
        left = max(1.0, limit - time.monotonic())
        part.client.connect([*part.endpoints, *found], token, deadline_s=min(left, CONNECT_S))
        part.connected = True

    def _stopped(self, part: Part) -> bool:
        return part.ended or self._ledger.epochs(part.job).over(part.epoch)

    @contextmanager
    def _ended_on_error(self, part: Part) -> Iterator[Part]:
        try:
            yield part
        except BaseException as error:
            with self._parts.lock(part.job):
                if not part.ended:
                    self._parts.end(part, 0.0)
            if isinstance(error, ErgoError) and part.connected and len(part.record.placement.nodes) > 1:
                raise of_one_alone(error) from error
            raise

    def _first_run(self, job: JobId) -> str:
        head = self._fleet.head(job)
        return head.first_execution_run if head else ""

    def _build(self) -> build.Build:
        return build.ensure(self._python)
