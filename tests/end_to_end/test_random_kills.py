"""Any process of `ergo run` killed at any moment: the rest ends in seconds, with one sentence, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.harness import JOBS, ROOT
from tests.end_to_end.test_processes import until

# A run starts, works and is cut within so many seconds.
LATEST_S = 10.0
ENDS_WITHIN_S = 30.0
TRIALS = int(os.environ.get("ERGO_KILL_TRIALS", "4"))  # of each kind


@dataclass(frozen=True)
class Process:
    """One process of a run, told from a later one of the same number by when it started."""

    pid: int
    started: str
    parent: int
    command: str

    @property
    def alive(self) -> bool:
        now = look(self.pid)
        return now is not None and now.started == self.started

    def kind(self, all_of_it: dict[int, Process]) -> str:
        if "--hold" in self.command:
            return "helper"  # keeps the mounts for ranks that are still to come: nobody misses it before that
        if "proxy_runtime.device.zygote" in self.command:
            above = all_of_it.get(self.parent)
            return "proxy" if above is not None and "device.zygote" in above.command else "zygote"
        for words, kind in (
            ("proxy_runtime.shim", "shim"),
            ("cli.main", "run"),
            ("ergo-init", "init"),
            ("jobs/", "rank"),
        ):
            if words in self.command:
                return kind
        return "helper"  # CRIU, a mount: for moments


def look(pid: int) -> Process | None:
    """None: it is gone, or has ended and waits for its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    return None if fields[0] in "ZX" else Process(pid, fields[19], int(fields[1]), command)


def below(root: int) -> dict[int, Process]:
    """A process and all of its descendants."""
    everything = [p for entry in os.listdir("/proc") if entry.isdigit() and (p := look(int(entry)))]
    found = {p.pid: p for p in everything if p.pid == root}
    while more := [p for p in everything if p.parent in found and p.pid not in found]:
        found |= {p.pid: p for p in more}
    return found


@pytest.fixture
def mounts() -> Iterator[None]:
    before = Path("/proc/mounts").read_text()
    yield
    assert Path("/proc/mounts").read_text() == before


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["rank", "proxy", "zygote", "shim", "init", "run"])
def test_a_kill_at_any_moment_ends_all_of_it(kind: str, tmp_path: Path, home: Path, mounts: None) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"{kind}: seed {seed}")
    draw = random.Random(seed)
    for trial in range(TRIALS):
        kill_one(kind, draw, tmp_path / str(trial), home)


def kill_one(kind: str, draw: random.Random, directory: Path, home: Path) -> None:
    directory.mkdir()
    cuts = ("--cut-every", "1500ms") if draw.random() < 0.5 else ()
    moment, choice = draw.random() * LATEST_S, draw.random()
    errors = directory / "errors.txt"
    with errors.open("w") as sink:
        run = subprocess.Popen(
            [sys.executable, "-m", "cli.main", "run", "--nproc", "2", "--devices", "2", *cuts, "--dir", str(directory),
             str(JOBS / "ends.py"), "--step", "1000000", "--steps", "1000000"],
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=sink,
        )  # fmt: skip
    try:
        time.sleep(moment)
        candidates: list[Process] = []

        def there() -> bool:
            everything = below(run.pid)
            candidates[:] = [p for p in everything.values() if p.kind(everything) == kind]
            return bool(candidates)

        until(there, f"a process of kind {kind}")
        victim, seen = candidates[int(choice * len(candidates))], below(run.pid)
        os.kill(victim.pid, signal.SIGKILL)
        killed = time.monotonic()
        what = f"{kind} {victim.pid} killed after {moment:.2f} s, {'with' if cuts else 'without'} cuts"
        code = run.wait(ENDS_WITHIN_S)
        until(lambda: not [p for p in seen.values() if p.alive], f"{what}: all have ended", ENDS_WITHIN_S)
        until(lambda: not list(home.glob("runs/*")), f"{what}: nothing is left in {home}", ENDS_WITHIN_S)
        print(f"{what}: code {code}, all gone after {time.monotonic() - killed:.1f} s")
        said = errors.read_text()
        print(said)
        assert "Traceback" not in said, f"{what}: {said}"
        if kind == "run":
            assert code == -signal.SIGKILL
        else:
            assert code != 0, what
            # The last line says why.
            assert said.strip().splitlines()[-1].startswith("ergo: "), f"{what}: {said}"
    finally:
        for process in below(run.pid).values():
            os.kill(process.pid, signal.SIGKILL)
        run.wait()
