"""`ergo doctor`: what this machine has and lacks, one line each, with the remedy."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import orjson
import typer

from cli.console import data


def register(app: typer.Typer) -> None:
    """Adds what this file defines to the command line."""
    app.command("doctor", short_help="What this machine has and lacks.")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    python: Annotated[str, typer.Option(help="Interpreter of the ranks.")] = sys.executable,
) -> None:
    """Checks everything that `ergo run` and a local fleet need; exit code 1 when something is missing."""
    from infra.local import checks as fleet
    from proxy_runtime.process import criu_setup

    checks = [*criu_setup.checks(python=python), *fleet.checks()]
    if as_json:
        sys.stdout.write(orjson.dumps([dataclasses.asdict(check) for check in checks]).decode() + "\n")
    else:
        for check in checks:
            mark = "[green]ok[/]  " if check.ok else "[red]lacks[/]"
            remedy = "" if check.ok or not check.remedy else f"  → {check.remedy}"
            data.print(f"{mark} {check.name}: ", end="")
            data.print(f"{check.detail}{remedy}", markup=False)
    raise typer.Exit(0 if all(check.ok for check in checks) else 1)
