"""`make demo`: on a real local fleet a premium job preempts a basic one, which is later moved; both end bit-identical.

1. A basic job of two ranks (a character GPT, DistributedDataParallel) starts on one node.
2. A premium job of four ranks (digits, convolutional) is submitted: the scheduler preempts the basic job for it.
3. The premium job ends, the basic job resumes, is migrated to the other node while it runs, and finishes.
4. Every loss of every rank and the final weights of both are compared with untouched runs.

Exit code 1 when a single bit differs. On a terminal the fleet stays up until Ctrl-C, so that the Temporal UI can be
looked at; `--leave` ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from model.control import JobView
from model.job_state import JobPhase
from scripts.demo.fleet import Fleet, FleetError
from scripts.demo.memory import PeakMemory, fleet_bytes
from scripts.demo.report import compare, time_line

ROOT = Path(__file__).resolve().parents[2]
console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)

BASIC_RANKS, BASIC_STEPS = 2, 600
PREMIUM_RANKS, PREMIUM_STEPS = 4, 150
BASIC_SCRIPT = [
    "char_gpt.py",
    "--steps",
    str(BASIC_STEPS),
    "--dropout",
    "0.1",
    "--out",
    "results",
    "--log-every",
    "100",
]
PREMIUM_SCRIPT = ["digits_cnn.py", "--steps", str(PREMIUM_STEPS), "--workers", "0", "--out", "results"]
STEPS_BEFORE_PREEMPTION, STEPS_BEFORE_MIGRATION = 60, 60
WAIT_S = 120.0


async def scene(fleet: Fleet, directory: Path, figures: dict[str, Any]) -> bool:
    """Plays the scene on a fleet that is up; returns whether every bit is equal. Fills in `figures`."""
    say("1. a basic job starts on one node")
    basic = await fleet.submit(
        directory / "basic", "--tier", "basic", "--ranks", str(BASIC_RANKS), "--name", "char-gpt",
        "--checkpoint-every", "30", *BASIC_SCRIPT,
    )  # fmt: skip
    await until(lambda: steps_done(fleet, basic, STEPS_BEFORE_PREEMPTION), f"{basic} has made its first steps")

    say("2. a premium job needs all devices: the basic one gives way")
    premium = await fleet.submit(
        directory / "premium", "--tier", "premium", "--ranks", str(PREMIUM_RANKS), "--name", "digits",
        "--checkpoint-every", "30", *PREMIUM_SCRIPT,
    )  # fmt: skip
    await until(lambda: reached(fleet, premium, JobPhase.COMPLETED), f"{premium} is completed")

    say("3. the basic job resumes, and is moved to the other node while it runs")
    await until(lambda: reached(fleet, basic, JobPhase.RUNNING), f"{basic} runs again")
    since = await fleet.step(await fleet.show(basic))
    await until(lambda: steps_done(fleet, basic, since + STEPS_BEFORE_MIGRATION), f"{basic} goes on")
    there = {device.node.name for device in (await fleet.show(basic)).placement}
    target = next(name for name in await fleet.node_names() if name not in there)
    await fleet.ergo("migrate", basic, "--to", target, "--wait")
    await until(lambda: reached(fleet, basic, JobPhase.COMPLETED), f"{basic} is completed")

    say("4. both against untouched runs")
    views = [await fleet.show(basic), await fleet.show(premium)]
    equal = True
    for view, ranks, script, steps in (
        (views[0], BASIC_RANKS, BASIC_SCRIPT, BASIC_STEPS),
        (views[1], PREMIUM_RANKS, PREMIUM_SCRIPT, PREMIUM_STEPS),
    ):
        touched, untouched = directory / f"{view.id}-touched", directory / f"{view.id}-untouched"
        await fleet.ergo("download", view.id, "results", str(touched))
        await fleet.untouched(untouched, ranks, script)
        equal &= compare(console, view, ranks, steps, touched, untouched / "results")
    time_line(console, views)
    moved = next((t for t in reversed(views[0].transitions) if t.down_ms is not None), None)
    happened = views[0].preemptions >= 1 and views[0].moves >= 1 and moved is not None
    if moved is not None:
        figures["migration"] = {"down_ms": moved.down_ms, "parts_ms": moved.parts_ms}
        console.print(f"the job was down for {(moved.down_ms or 0) / 1e3:.2f} s when it was moved to the other node")
    if not happened:
        console.print("[red]the basic job was not preempted and moved as it should have been: no verdict[/]")
    for view in views:
        console.print(f"Temporal UI: {fleet.ui_address(view.id)}")
    console.print(f"bit-identical: {'[bold green]yes[/]' if equal else '[bold red]NO[/]'}")
    return equal and happened


def say(text: str) -> None:
    """A heading of the scene."""
    console.print(f"\n[bold]{text}[/]")


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Polls until the condition holds.

    Raises:
        FleetError: it did not within `WAIT_S` seconds.
    """
    limit = time.monotonic() + WAIT_S
    while not await condition():
        if time.monotonic() > limit:
            raise FleetError(f"waited {WAIT_S:.0f} s in vain until {what}")
        await asyncio.sleep(0.25)


async def steps_done(fleet: Fleet, job: str, steps: int) -> bool:
    """Whether the job has come to this step; a job that ends before has not waited for the scene."""
    view = await fleet.show(job)
    await running(view)
    return await fleet.step(view) >= steps


async def reached(fleet: Fleet, job: str, phase: JobPhase) -> bool:
    """Whether the job is in this phase."""
    view = await fleet.show(job)
    if view.phase is not phase:
        await running(view)
    return view.phase is phase


async def running(view: JobView) -> None:
    """Raises FleetError for a job that has ended."""
    if view.phase.ended:
        raise FleetError(f"{view.id} is {view.phase} too early: {view.failure or view.waiting or 'see its log'}")


async def main() -> int:
    """Brings the fleet up, plays the scene, takes the fleet down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leave", action="store_true", help="take the fleet down at the end, without waiting")
    parser.add_argument("--json-report", type=Path, help="write figures to this file")
    options = parser.parse_args()
    started = time.monotonic()
    main_task = asyncio.current_task()
    assert main_task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, main_task.cancel)
    directory = Path(tempfile.mkdtemp(prefix="ergo-demo-"))
    try:
        for name, script in (("basic", "char_gpt.py"), ("premium", "digits_cnn.py")):
            (directory / name).mkdir()
            for source in (script, "_report.py"):
                shutil.copy(ROOT / "examples" / source, directory / name)
        async with Fleet.up(directory / "fleet", console) as fleet:
            up_s, idle = time.monotonic() - started, await asyncio.to_thread(fleet_bytes, directory / "fleet")
            console.print(f"up after {up_s:.0f} s, {idle / 1e6:.0f} MB; Temporal UI: {fleet.ui_address()}")
            memory = PeakMemory(directory / "fleet")
            figures: dict[str, Any] = {"up_s": up_s, "idle_bytes": idle}
            watchers = [asyncio.create_task(fleet.tell_events()), asyncio.create_task(memory.watch())]
            try:
                equal = await scene(fleet, directory, figures)
            finally:
                for watcher in watchers:
                    watcher.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await watcher
            figures |= {"equal": equal, "peak_bytes": memory.peak_bytes, "seconds": time.monotonic() - started}
            console.print(f"{figures['seconds']:.0f} s in all, at most {memory.peak_bytes / 1e6:.0f} MB of memory")
            if options.json_report:
                options.json_report.write_text(json.dumps(figures))
            if sys.stdout.isatty() and not options.leave:
                console.print("\nThe fleet stays up for you to look around. Ctrl-C ends it.")
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                return 0 if equal else 1
        return 0 if equal else 1
    except FleetError as error:
        console.print(f"[red]{error}[/]")
        return 1
    except asyncio.CancelledError:
        console.print("interrupted: everything was taken down")
        return 130
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
