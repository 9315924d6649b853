"""`--watch`: looks again every second, on a terminal in place, else one table, or one JSON line, after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from cli.console import data, messages
from cli.fleet import words
from cli.fleet.options import print_json, print_table
from proxy_runtime.errors import ErgoError

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")
_REFRESH_S = 1.0


async def watch(
    look: Callable[[], Awaitable[T]],
    *,
    table: Callable[[T], RenderableType],
    head: Callable[[T], str],
    document: Callable[[T], object] | None,
) -> None:
    """Shows what `look` finds until it is cancelled.

    Args:
        look: what is shown; an error of ours before anything was shown ends it, a later one is shown and tried again.
        table: how people see it.
        head: one line above it.
        document: how programs see it; None for people.
    """
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    seen = await look()
    if document is not None or not data.is_terminal:
        while True:
            if document is not None:
                print_json(document(seen), compact=True)
            else:
                print_table(table(seen))
            await asyncio.sleep(_REFRESH_S)
            seen = await _again(look, seen, lambda text: messages.print(f"ergo: {text}", markup=False))
    trouble = ""
    with Live(console=data, screen=True, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            line = Text(f"{head(seen)} · {words.clock(datetime.now(UTC))} UTC · Ctrl-C ends", style="dim")
            live.update(Group(line, Text(trouble, style="red"), table(seen)), refresh=True)
            await asyncio.sleep(_REFRESH_S)
            told: list[str] = []
            seen = await _again(look, seen, told.append)
            trouble = "".join(told)


async def _again(look: Callable[[], Awaitable[T]], before: T, tell: Callable[[str], None]) -> T:
    from temporalio.service import RPCError

    try:
        return await look()
    except (ErgoError, RPCError) as error:
        tell(str(error).splitlines()[0])
        return before
