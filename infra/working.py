"""What the workers of a fleet have in common: their main, and working until they are told to end."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from infra import logs
from infra.settings import Settings
from model.errors import ModelError
from proxy_runtime.errors import ErgoError

if TYPE_CHECKING:
    from temporalio.worker import Worker


def run(process: str, work: Callable[[Settings, asyncio.Event], Awaitable[None]]) -> int:
    """Main of a worker's process: an error of ours is one sentence on stderr and exit code 1.

    Args:
        process: what its logs call it.
        work: works until the event, which SIGTERM and SIGINT set.
    """
    logs.configure(process)

    async def until_told() -> None:
        over = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, over.set)
        await work(Settings.load(), over)

    try:
        asyncio.run(until_told())
    except (ErgoError, ModelError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


async def until_over(over: asyncio.Event, worker: Worker, *vital: asyncio.Task[None]) -> None:
    """Runs a worker until `over`, or until it or one of the tasks that it is nothing without has ended.

    Raises:
        Exception: of the worker, or of the task that has failed.
    """
    working = asyncio.create_task(worker.run())
    ending = asyncio.create_task(over.wait())
    done, _ = await asyncio.wait((working, ending, *vital), return_when=asyncio.FIRST_COMPLETED)
    for task in (ending, *vital):
        task.cancel()
    await asyncio.gather(*vital, return_exceptions=True)
    if working not in done:
        await worker.shutdown()
    await working
    for task in done.intersection(vital):
        task.result()
