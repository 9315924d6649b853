"""Real device proxies, forked from one zygote for all tests of this folder."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from proxy_runtime.channel.ring import Ring
from proxy_runtime.device.client import DeviceProxyClient, NativeBuild, Zygote, connect_fabric
from tests.proxy_runtime.device.producer import Producer


@dataclass(frozen=True)
class DevelopmentBuild:
    """A device side built by hand; `ERGO_TEST_DEVICE_DIR` names its folder."""

    device_dir: Path
    id: str = "1" * 32
    torch_version: str = torch.__version__
    abi: str = str(sysconfig.get_config_var("SOABI"))


@pytest.fixture(scope="session")
def device_build() -> NativeBuild:
    if by_hand := os.environ.get("ERGO_TEST_DEVICE_DIR"):
        return DevelopmentBuild(Path(by_hand))
    from proxy_runtime import build

    return build.ensure()


@pytest.fixture(scope="session")
def zygote(device_build: NativeBuild, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote.start(device_build, "cpu", log=tmp_path_factory.mktemp("zygote") / "log") as started:
        yield started


@dataclass
class Job:
    """Proxies that are connected, and a producer in the place of every rank."""

    zygote: Zygote
    directory: Path
    placement: list[int]
    transport: str = "shm"
    proxies: list[DeviceProxyClient] = field(default_factory=list)
    ranks: list[Producer] = field(default_factory=list)
    cuts: int = 0

    def start(self) -> Job:
        self._fork()
        for rank in range(len(self.placement)):
            ring = Ring.create(rank, ring_bytes=1 << 18, response_bytes=1 << 16)
            self.ranks.append(Producer(ring))
            self.proxy_of(rank).attach(rank, ring.fd)
        for proxy in self.proxies:
            proxy.run()
        return self

    def proxy_of(self, rank: int) -> DeviceProxyClient:
        return self.proxies[self.placement[rank]]

    def stop(self) -> dict[int, dict]:
        reports: dict[int, dict] = {}
        for proxy in self.proxies:
            reports |= {int(rank): report for rank, report in proxy.stop()["ranks"].items()}
        return reports

    def targets(self, reports: dict[int, dict]) -> dict[str, int]:
        """The smallest contributed count per sequence; a member that does not list one counts 0."""
        sequences = {text: counts["members"] for report in reports.values() for text, counts in report["comms"].items()}
        return {
            text: min(reports[member]["comms"].get(text, {"contributed": 0})["contributed"] for member in members)
            for text, members in sequences.items()
        }

    def cut(self) -> list[dict]:
        """Stops, finishes and dumps; the replies of finish."""
        targets = self.targets(self.stop())
        finished = [proxy.finish(targets) for proxy in self.proxies]
        self.cuts += 1
        for rank in range(len(self.placement)):
            self.proxy_of(rank).dump(rank, *self.files(rank))
        return finished

    def files(self, rank: int) -> tuple[Path, Path]:
        return self.directory / f"{self.cuts}-{rank}.meta", self.directory / f"{self.cuts}-{rank}.storages"

    def move(self, placement: list[int] | None = None, *, run: bool = True) -> None:
        """Kills all proxies after a cut and goes on in fresh ones. Not `run`: those have loaded, and wait."""
        for proxy in self.proxies:
            proxy.kill()
        self.placement = placement or self.placement
        self._fork()
        for rank, producer in enumerate(self.ranks):
            self.proxy_of(rank).attach(rank, producer.ring.fd)
        for rank in range(len(self.ranks)):
            self.proxy_of(rank).load(rank, *self.files(rank))
        for proxy in self.proxies if run else ():
            proxy.run()

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.kill()
        for rank in self.ranks:
            rank.close()
            rank.ring.close()

    def _fork(self) -> None:
        self.proxies = [self.zygote.fork(self.directory / f"proxy-{i}.log") for i in range(max(self.placement) + 1)]
        connect_fabric(self.proxies, self.placement, transport=self.transport)


@pytest.fixture
def job(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs: `job([0, 0, 1])` has three ranks on two proxies."""
    jobs: list[Job] = []

    def start(placement: list[int], transport: str = "shm") -> Job:
        directory = tmp_path / f"job-{len(jobs)}"
        directory.mkdir()
        jobs.append(Job(zygote, directory, placement, transport))
        return jobs[-1].start()

    yield start
    for one in jobs:
        one.close()


@pytest.fixture
def rank(job: Callable[..., Job]) -> Producer:
    """The only rank of a job with one proxy."""
    return job([0]).ranks[0]
