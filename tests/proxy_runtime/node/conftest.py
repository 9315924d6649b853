"""Nodes that leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from model.job_spec import JobSpec
from proxy_runtime.shim import remains
from proxy_runtime.shim.layout import RunLayout
from tests.proxy_runtime.node.nodes import Driver, Machine, make_fleet


class World:
    """Two nodes, more on demand, and the jobs that a test drives on them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fleet = make_fleet(root)
        self.machines: list[Machine] = []
        self.drivers: list[Driver] = []
        self.one, self.two = self.machine("node-1"), self.machine("node-2")

    def machine(self, name: str) -> Machine:
        self.machines.append(Machine(name, self.root / name, self.fleet))
        return self.machines[-1]

    def job(self, spec: JobSpec) -> Driver:
        self.drivers.append(Driver(self.fleet, spec))
        return self.drivers[-1]

    def begun(self, spec: JobSpec, *places: tuple[Machine, int], step: int = 0) -> Driver:
        """A job that has been started at these places, and has done so many steps."""
        job = self.job(spec)
        job.next_epoch(*places)
        job.attend("fresh")
        if step:
            job.until_step(step)
        return job

    def processes(self) -> list[int]:
        """Of all jobs on all nodes."""
        runs = [RunLayout(path, "") for machine in self.machines for path in (machine.root / "runs").glob("*")]
        return [pid for layout in runs for pid in remains.processes(layout)]

    def close(self) -> None:
        for machine in self.machines:
            machine.close()
        for driver in self.drivers:
            driver.pool.shutdown(wait=True)
            for name in (str(driver.job), f"{driver.job}.d"):
                with suppress(OSError):
                    (Path("/run/ergo") / name).rmdir()
        assert self.processes() == []
        assert not [path for machine in self.machines for path in (machine.root / "runs").glob("*")]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    try:
        yield made
    finally:
        made.close()


Make = Callable[[JobSpec], Driver]
