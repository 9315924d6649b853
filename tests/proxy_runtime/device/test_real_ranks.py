"""Ordinary scripts on real ranks, whose device proxies are cut and replaced under them while they run.

The rank processes stay where they are, so that no CRIU is needed: what is shown is that all device state, and
everything between the proxies, goes through a dump. Moves of whole jobs are tested in tests/end_to_end.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy_runtime.channel.ring import Ring
from proxy_runtime.device.client import NativeBuild, Zygote
from proxy_runtime.shim.spec import rank_variables
from tests.proxy_runtime.device.conftest import Job

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SCRIPT = [str(EXAMPLES / "char_gpt.py"), "--steps", "25", "--dropout", "0.1"]


@pytest.fixture(scope="module")
def rank_dir(device_build: NativeBuild) -> Path:
    by_hand = os.environ.get("ERGO_TEST_RANK_DIR")
    return Path(by_hand) if by_hand else device_build.rank_dir  # type: ignore[attr-defined]


class RealJob(Job):
    """A job whose producers are processes."""

    def __init__(self, zygote: Zygote, directory: Path, placement: list[int], rank_dir: Path) -> None:
        super().__init__(zygote, directory, placement)
        self._rank_dir = rank_dir
        self.rings: list[Ring] = []
        self.processes: list[subprocess.Popen[str]] = []

    def start(self) -> RealJob:
        self._fork()
        for rank in range(len(self.placement)):
            ring = Ring.create(rank)
            self.rings.append(ring)
            self.proxy_of(rank).attach(rank, ring.fd)
            self.processes.append(self._launch(rank, ring.fd))
        for proxy in self.proxies:
            proxy.run()
        return self

    def move(self, placement: list[int] | None = None) -> None:
        for proxy in self.proxies:
            proxy.kill()
        self.placement = placement or self.placement
        self._fork()
        for rank, ring in enumerate(self.rings):
            self.proxy_of(rank).attach(rank, ring.fd)
            self.proxy_of(rank).load(rank, *self.files(rank))
        for proxy in self.proxies:
            proxy.run()

    def results(self) -> list[tuple[str, str]]:
        """Per rank the hashes of its losses and of its weights."""
        found = []
        for process in self.processes:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            match = re.search(r"losses sha256 (\w+) weights sha256 (\w+)", out)
            assert match, out
            found.append((match[1], match[2]))
        return found

    @property
    def running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for proxy in self.proxies:
            proxy.kill()
        for ring in self.rings:
            ring.close()

    def _launch(self, rank: int, ring_fd: int) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            **rank_variables(rank, len(self.placement)),
            "PYTHONHASHSEED": "0",
            "TORCH_DISABLE_NATIVE_JIT": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(self._rank_dir),
            "ERGO_CHANNEL": f"{ring_fd}:{self._rank_dir}:cpu",
        }
        command = [sys.executable, *SCRIPT]
        return subprocess.Popen(
            command,
            cwd=self.directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[ring_fd],
        )


@pytest.fixture
def real_job(zygote: Zygote, tmp_path: Path, rank_dir: Path) -> Any:
    jobs: list[RealJob] = []

    def start(placement: list[int]) -> RealJob:
        directory = tmp_path / f"real-{len(jobs)}"
        directory.mkdir()
        jobs.append(RealJob(zygote, directory, placement, rank_dir))
        return jobs[-1].start()

    yield start
    for one in jobs:
        one.close()


def steps(job: RealJob) -> int:
    return min(ring.step_done for ring in job.rings)


@pytest.mark.slow
@pytest.mark.parametrize("placements", [[[0]], [[0, 1], [0, 0], [0, 1]]], ids=["one-rank", "two-ranks"])
def test_replacing_the_proxies_of_a_running_job_changes_no_bit(
    real_job: Callable[[list[int]], RealJob], placements: list[list[int]]
) -> None:
    untouched = real_job(placements[0]).results()
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    chooser = random.Random(seed)
    job = real_job(placements[0])
    cuts = 0
    for target in sorted(chooser.sample(range(1, 24), 6)):
        deadline = time.monotonic() + 120
        while job.running and steps(job) < target:
            assert time.monotonic() < deadline, "the job makes no progress"
            time.sleep(0.002 * chooser.random())
        if not job.running:
            break
        job.cut()
        if chooser.random() < 0.3:  # called off: it goes on where it is
            for proxy in job.proxies:
                proxy.resume()
        else:
            job.move(chooser.choice(placements))
        cuts += 1
    assert job.results() == untouched
    assert cuts >= 3
