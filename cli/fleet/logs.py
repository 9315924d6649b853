"""`ergo logs`: what the ranks of a job have written, from the nodes while it runs, else from its volume."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from cli.console import say
from cli.fleet.options import AnyJob
from cli.usage import MOST_RANKS
from proxy_runtime.errors import ErgoError

if TYPE_CHECKING:
    import httpx

    from cli.fleet.client import Fleet
    from model.control import JobView

_LOOK_S = 0.4
_VIEW_EVERY = 5
"""Every so many looks at the logs, the workflow is asked where the job is."""


def register(app: typer.Typer) -> None:
    """Adds what this file defines to the command line."""
    app.command("logs", short_help="What the ranks of a job have written.")(logs)


def logs(
    job: AnyJob,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    rank: Annotated[int | None, typer.Option(metavar="N", help="Only this rank's.", min=0, max=MOST_RANKS - 1)] = None,
) -> None:
    """Prints standard output and error of the ranks of JOB; of several ranks each line says whose it is.

    A script that starts its own ranks has one log. While the job runs they come from its nodes; else from its newest
    checkpoint, or as they were at its end.
    """
    from cli.fleet.client import call
    from cli.fleet.remote import http_client

    async def main(fleet: Fleet) -> None:
        view = await fleet.view(job)
        if rank and view.pack == "node":
            raise ErgoError(
                f"Job {job} starts its own ranks: their output is one log.",
                code="logs.rank",
                remedy="Leave out --rank.",
            )
        if rank is not None and rank >= view.ranks:
            raise ErgoError(
                f"Job {job} has no rank {rank}.", code="logs.rank", remedy=f"Its ranks are 0 to {view.ranks - 1}."
            )
        ranks = range(view.ranks) if rank is None else (rank,)
        async with http_client(fleet) as http:
            await Printer(fleet, http, view, ranks).run(follow=follow)

    call(main)


class Lines:
    """Bytes of several logs as whole lines on stdout, each with its rank; one log alone as it comes.

    Nothing can get in between the parts of a line there, and a bar of progress is one line for minutes.
    """

    def __init__(self, *, many: bool) -> None:
        self._many = many
        self._open = False
        self._rest: dict[int, bytes] = {}

    def add(self, rank: int, fresh: bytes) -> bytes:
        """What can be printed now: up to the last end of a line."""
        if not self._many:
            self._open = not fresh.endswith(b"\n") if fresh else self._open
            return fresh
        text = self._rest.pop(rank, b"") + fresh
        whole, end, rest = text.rpartition(b"\n")
        if rest:
            self._rest[rank] = rest
        return self._marked(rank, whole) if end else b""

    def flush(self) -> bytes:
        """What is left, with the end of line that it did not have."""
        if self._open:
            self._open = False
            return b"\n"
        left = b"".join(self._marked(rank, rest) for rank, rest in sorted(self._rest.items()))
        self._rest.clear()
        return left

    def _marked(self, rank: int, text: bytes) -> bytes:
        mark = b"[rank%d] " % rank
        return b"".join(mark + line + b"\n" for line in text.split(b"\n"))


class Printer:
    """Prints the logs of a job.

    A log grows with the job over all its epochs: after a move it goes on where it was, and after a job had to go back
    to a checkpoint it is written again up to where it was. So one offset for each rank is all that is remembered.
    """

    def __init__(self, fleet: Fleet, http: httpx.AsyncClient, view: JobView, ranks: Iterable[int]) -> None:
        self._fleet = fleet
        self._http = http
        self._view = view
        self._ranks = tuple(ranks)
        self._offsets = dict.fromkeys(self._ranks, 0)
        self._lines = Lines(many=len(self._ranks) > 1)
        self._told = ""

    async def run(self, *, follow: bool) -> None:
        """Prints what is there, and with `follow` what comes, until the job has ended."""
        from cli.fleet.client import NoAnswer

        looks = 0
        while True:
            complete = await self._live() if self._view.placement else False
            if not follow or self._view.phase.ended:
                break
            if not self._view.placement:
                self._tell(
                    f"job {self._view.id} is {self._view.phase}: {self._view.waiting or 'waiting for it to go on'}"
                )
            elif complete:
                self._told = ""
            await asyncio.sleep(_LOOK_S)
            looks += 1
            if not complete or looks % _VIEW_EVERY == 0:
                try:
                    self._view = await self._fleet.view(self._view.id)
                except NoAnswer as error:
                    self._tell(str(error))
        if not complete:
            await self._stored()
        self._write(self._lines.flush())

    async def _live(self) -> bool:
        """What the nodes have; False where one of them does not answer for its ranks."""
        from cli.fleet.remote import read_log

        try:
            nodes = {record.node: record.address for record in await self._fleet.nodes()}
        except ErgoError as error:
            self._tell(str(error))
            return False
        answers = await asyncio.gather(
            *(read_log(self._http, nodes, self._view, rank, self._offsets[rank]) for rank in self._ranks)
        )
        for rank, fresh in zip(self._ranks, answers, strict=True):
            self._take(rank, fresh or b"")
        return all(answer is not None for answer in answers)

    async def _stored(self) -> None:
        """What the volume of the job's end, or of its newest checkpoint, has beyond what was printed."""
        from cli.fleet.remote import stored_logs

        found: Mapping[int, bytes] = await stored_logs(self._fleet, self._view, self._ranks)
        for rank, whole in found.items():
            self._take(rank, whole[self._offsets[rank] :])
        if not found and not any(self._offsets.values()):
            say(f"job {self._view.id} ({self._view.phase}) has written nothing that is kept yet")
        elif not self._view.phase.ended and self._view.checkpoints:
            step = int(self._view.checkpoints[-1].step)
            say(f"as of its checkpoint at step {step}; job {self._view.id} is {self._view.phase}")

    def _take(self, rank: int, fresh: bytes) -> None:
        self._offsets[rank] += len(fresh)
        self._write(self._lines.add(rank, fresh))

    def _write(self, text: bytes) -> None:
        if text:
            sys.stdout.buffer.write(text)
            sys.stdout.flush()

    def _tell(self, text: str) -> None:
        if text != self._told:
            say(text)
        self._told = text
