"""`make demo`: a DDP job is cut twice, moved, and compared with the run that was never touched.

Each cut checkpoints the job, ends all its processes and restores them from the checkpoint in fresh namespaces,
with fresh device proxies and a copied job directory. Exit code 1 when a single bit differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
ERGO = [sys.executable, "-m", "cli.main"]
STEPS, RANKS = 200, 2
console = Console(highlight=False, soft_wrap=True)


def run(directory: Path, *options: str) -> dict[str, object]:
    """Runs the example under `ergo run` in `directory`; returns its report. Exits when the job fails."""
    report = directory / "report.json"
    command = [*ERGO, "run", "--nproc", str(RANKS), "--devices", str(RANKS), "--dir", str(directory)]
    command += ["--json-report", str(report), *options]
    command += [str(ROOT / "examples" / "char_gpt.py"), "--steps", str(STEPS), "--dropout", "0.1", "--out", "results"]
    command += ["--log-every", "50"]
    shown = " ".join(["ergo run --nproc 2 --devices 2", *options, "examples/char_gpt.py", "--steps", str(STEPS)])
    console.print(f"[bold]$ {shown}[/]")
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # ergo run has had the signal too; it ends everything it owns
        process.wait()
        sys.exit(128 + signal.SIGINT)
    if code != 0:
        console.print(f"[red]ergo run ended with code {code}[/]")
        sys.exit(1)
    return json.loads(report.read_text())


def digests(directory: Path) -> dict[str, str]:
    """sha256 of every loss of every rank, and of the final weights."""
    found: dict[str, str] = {}
    for rank in range(RANKS):
        result = json.loads((directory / "results" / f"losses-rank{rank}.json").read_text())
        losses = result["losses"]
        if len(losses) != STEPS:
            console.print(f"[red]rank {rank} has {len(losses)} losses, not {STEPS}[/]")
            sys.exit(1)
        found[f"losses of rank {rank}"] = hashlib.sha256("\n".join(losses).encode()).hexdigest()
        found[f"final weights, as rank {rank} has them"] = result["weights_sha256"]
    return found


def main() -> int:
    """The scene and the verdict."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ergo-demo-") as temporary:
        untouched, cut = Path(temporary) / "untouched", Path(temporary) / "cut"
        untouched.mkdir()
        cut.mkdir()
        run(untouched)
        console.print()
        report = run(cut, "--cut-at", "50", "--cut-at", "120")
        moved = [entry for entry in report["cuts"] if entry["outcome"] == "moved"]  # type: ignore[index,union-attr]
        before, after = digests(untouched), digests(cut)
    table = Table("", "untouched", "cut and moved", "equal", title="sha256", title_justify="left")
    equal = True
    for name, value in before.items():
        same = after[name] == value
        equal &= same
        table.add_row(name, value[:16], after[name][:16], "yes" if same else "[red]NO[/]")
    console.print(table)
    console.print(f"cuts: {len(moved)} of 2, each into new processes; {time.monotonic() - started:.0f} s in all")
    if len(moved) != 2:
        console.print("[red]the job was not cut twice: no verdict[/]")
        return 1
    console.print(f"bit-identical: {'[bold green]yes[/]' if equal else '[bold red]NO[/]'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
