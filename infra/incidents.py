"""A node tells jobs what went wrong where ranks of theirs share a device: a signal each, when there is news."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import structlog
from temporalio.client import Client
from temporalio.service import RPCError

from model.ids import Epoch, JobId, NodeId
from model.names import Signal
from model.runtime import Progress
from model.sharing import SharingIncidents, SharingNotice

LOOK_S = 1.0
FIRST_GAP_S, LONGEST_GAP_S = 5.0, 600.0
"""Seconds between two words about time limits of one job: they may come in every step, and each word is in the job's
history. The gap doubles with each word, over the job's epochs here: a job that is resized or comes back often must not
begin anew each time. A mismatch, which comes once for an operator, is told at once."""

_log = structlog.stdlib.get_logger(__name__)


class OnNode(Protocol):
    """A part of a job; `proxy_runtime.node.parts.Part` is one."""

    @property
    def job(self) -> JobId: ...
    @property
    def epoch(self) -> Epoch: ...
    @property
    def progress(self) -> Progress: ...


@dataclass(slots=True)
class _Gap:
    not_before: float = 0.0
    next_s: float = FIRST_GAP_S

    def told(self, now: float) -> None:
        self.not_before = now + self.next_s
        self.next_s = min(self.next_s * 2, LONGEST_GAP_S)


class IncidentTeller:
    """Tells incidents of the parts on a node. What an agent before has told is told again: jobs know it."""

    def __init__(self, client: Client, node: NodeId, parts: Callable[[], Sequence[OnNode]]) -> None:
        self._client = client
        self._node = node
        self._parts = parts
        self._told: dict[tuple[JobId, Epoch], SharingIncidents] = {}
        self._gaps: dict[JobId, _Gap] = {}

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.look(time.monotonic())
            await asyncio.sleep(LOOK_S)

    async def look(self, now: float) -> None:
        """Tells what is news, or due; what cannot be told now is tried again."""
        parts = self._parts()
        here = {(part.job, part.epoch) for part in parts}
        self._told = {key: told for key, told in self._told.items() if key in here}
        jobs = {job for job, _ in here}
        long_ago = now - LONGEST_GAP_S
        self._gaps = {job: gap for job, gap in self._gaps.items() if job in jobs or gap.not_before > long_ago}
        for part in parts:
            found = part.progress.sharing
            if found is None:
                continue
            key = (part.job, part.epoch)
            told = self._told.get(key, SharingIncidents())
            gap = self._gaps.setdefault(part.job, _Gap())
            late = found.time_limits > told.time_limits and now >= gap.not_before
            if (late or found.mismatches > told.mismatches) and await self._tell(part, found):
                self._told[key] = found
                gap.told(now)

    async def _tell(self, part: OnNode, found: SharingIncidents) -> bool:
        ids = {"job": str(part.job), "epoch": int(part.epoch)}
        notice = SharingNotice(part.epoch, self._node, found)
        handle = self._client.get_workflow_handle(part.job)
        try:
            await handle.signal(Signal.SHARING, notice, rpc_timeout=timedelta(seconds=5))
        except RPCError as error:
            _log.warning("a job is not told of incidents", error=str(error), **ids)
            return False
        _log.warning(
            "ranks that share a device",
            time_limits=found.time_limits,
            mismatches=found.mismatches,
            unshared=list(found.unshared),
            **ids,
        )
        return True
