"""`--wait`: while a request is under way, what happens to its job is said as it happens."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from cli.console import say
from proxy_runtime.errors import ErgoError

if TYPE_CHECKING:
    from datetime import datetime

    from cli.fleet.client import Fleet
    from model.control import JobView

T = TypeVar("T")
_LOOK_S = 1.0


async def answered(fleet: Fleet, job: str, asked: Coroutine[Any, Any, T]) -> T:
    """Waits for an answer, whatever it is; says meanwhile what `ergo show` would: new phases, decisions, waits."""
    before = await _look(fleet, job)
    answer = asyncio.ensure_future(asked)
    try:
        while not (await asyncio.wait([answer], timeout=_LOOK_S))[0]:
            now = await _look(fleet, job)
            if now is None:
                continue
            for line in news(before, now) if before is not None else ():
                say(line)
            before = now
        return answer.result()
    finally:
        answer.cancel()
        with suppress(Exception, asyncio.CancelledError):  # temporalio takes a cancelled call for one without an answer
            await answer


def news(before: JobView, now: JobView) -> list[str]:
    """What is known of a job now and was not before, oldest first."""
    from cli.fleet import words

    known = {(one.time, one.phase) for one in before.transitions}
    told: list[tuple[datetime, str, str]] = [
        (one.time, str(one.phase), one.reason) for one in now.transitions if (one.time, one.phase) not in known
    ]
    reasons = {reason for _, _, reason in told}
    decided = {(one.time, one.action) for one in before.decisions}
    told += [
        (one.time, one.action, one.reason)
        for one in now.decisions
        if (one.time, one.action) not in decided and one.reason not in reasons
    ]
    lines = [f"{words.clock(time)} UTC  {what}: {why}" for time, what, why in sorted(told, key=lambda item: item[0])]
    if now.waiting and now.waiting != before.waiting and not any(now.waiting in why for _, _, why in told):
        lines.append(f"the job waits: {now.waiting}")
    return lines


async def _look(fleet: Fleet, job: str) -> JobView | None:
    from temporalio.service import RPCError

    try:
        return await fleet.view(job)
    except (ErgoError, RPCError):
        return None  # the answer tells what is wrong, or the next look finds the job again
