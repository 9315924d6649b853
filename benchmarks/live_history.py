"""What a scheduler's workflow has done, read from Temporal's histories of all of its runs."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from temporalio.api.enums.v1 import EventType
from temporalio.client import Client

from model.cluster import DecideResult
from model.codec import from_json
from model.control import AddressedDirective
from model.names import Activity
from workflows.cluster import DIRECTIVES_AT_ONCE

_LOCAL = "core_local_activity"


@dataclass(slots=True)
class Tick:
    """One decision with its delivery. Times in seconds since 1970.

    Attributes:
        begun: when its workflow task was.
        ended: when all was delivered.
        waited_s: how long the oldest of the signals that came since the tick before had waited when it ended.
    """

    begun: float
    decided: float
    ended: float
    directives: tuple[AddressedDirective, ...]
    waited_s: float | None
    undelivered: int = 0

    @property
    def delivered(self) -> bool:
        """Whether Temporal has taken all of it."""
        return not self.undelivered

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.begun


@dataclass(slots=True)
class History:
    """All ticks, in order.

    Attributes:
        events, bytes: of the longest run.
        largest_payload: bytes of the largest signal, marker, input or result.
    """

    ticks: list[Tick] = field(default_factory=list[Tick])
    runs: int = 0
    events: int = 0
    bytes: int = 0
    largest_payload: int = 0

    def actions(self) -> dict[str, int]:
        """How many directives of each kind."""
        return dict(Counter(item.directive.action for tick in self.ticks for item in tick.directives))

    def whole(self, kills: Sequence[float]) -> list[Tick]:
        """Ticks in which no worker was killed, and for which none had to come back first."""
        ends = [tick.ended for tick in self.ticks]
        cut = {bisect_right(ends, kill) for kill in kills}
        return [tick for number, tick in enumerate(self.ticks) if number not in cut]

    def recoveries(self, kills: Sequence[float]) -> list[float]:
        """Of each kill, seconds until the next tick was over."""
        ends = sorted(tick.ended for tick in self.ticks)
        found = [(kill, bisect_right(ends, kill)) for kill in kills]
        return [ends[place] - kill for kill, place in found if place < len(ends)]


async def read_history(client: Client, workflow: str) -> History:
    """The histories of a workflow's newest run and of those before it."""
    runs: list[list[Any]] = []
    run = (await client.get_workflow_handle(workflow).describe()).run_id
    while run:
        fetched = await client.get_workflow_handle(workflow, run_id=run).fetch_history()
        runs.append(list(fetched.events))
        run = runs[-1][0].workflow_execution_started_event_attributes.continued_execution_run_id
    found = History(runs=len(runs))
    for events in reversed(runs):
        found.events = max(found.events, len(events))
        found.bytes = max(found.bytes, sum(event.ByteSize() for event in events))
        _read(events, found)
    return found


def _read(events: Sequence[Any], found: History) -> None:
    started, signals, waiting = 0.0, list[float](), list[float]()
    of_delivery: set[int] = set()
    current: Tick | None = None
    for event in events:
        at = event.event_time.ToMicroseconds() / 1e6
        match event.event_type:
            case EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED:
                given = event.workflow_execution_signaled_event_attributes
                _weigh(found, given.input.payloads)
                if given.signal_name == "inbox":
                    signals.append(at)
            case EventType.EVENT_TYPE_WORKFLOW_TASK_STARTED:
                started = at
                waiting = list(signals)  # it sees what has come until now
            case EventType.EVENT_TYPE_MARKER_RECORDED:
                marker = event.marker_recorded_event_attributes
                if marker.marker_name != _LOCAL or _activity(marker) != Activity.DECIDE:
                    continue
                payloads = marker.details["result"].payloads
                _weigh(found, payloads)
                result = from_json(DecideResult, payloads[0].data)
                current = Tick(started, at, at, result.directives, at - waiting[0] if waiting else None)
                del signals[: len(waiting)]
                waiting = []
                current.undelivered = len(result.directives)
                found.ticks.append(current)
            case EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
                task = event.activity_task_scheduled_event_attributes
                _weigh(found, task.input.payloads)
                if task.activity_type.name == Activity.DELIVER_PLAN:
                    of_delivery.add(event.event_id)
            case EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED:
                done = event.activity_task_completed_event_attributes
                if done.scheduled_event_id in of_delivery and current is not None:
                    if current.waited_s is not None:
                        current.waited_s += at - current.ended
                    current.ended = at
                    current.undelivered = max(0, current.undelivered - DIRECTIVES_AT_ONCE)
            case _:
                pass


def _activity(marker: Any) -> str:
    data = json.loads(marker.details["data"].payloads[0].data)
    return str(data.get("activity_type", ""))


def _weigh(found: History, payloads: Iterable[Any]) -> None:
    found.largest_payload = max([found.largest_payload, *(payload.ByteSize() for payload in payloads)])
