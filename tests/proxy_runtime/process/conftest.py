"""A compiled init, a CRIU, and small programs to do things to."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from proxy_runtime.process import criu as criu_module
from proxy_runtime.process import criu_setup, proc
from proxy_runtime.process.criu_setup import Criu
from proxy_runtime.process.init_build import build_init
from proxy_runtime.process.namespace import Container, ContainerSpec, launch

VICTIMS = Path(__file__).with_name("victims")


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = 60.0) -> Any:
    limit = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < limit, f"timed out: {what}"
        time.sleep(0.002)


@pytest.fixture(scope="session")
def init_binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_init(tmp_path_factory.mktemp("init") / "init")


@pytest.fixture(scope="session")
def criu() -> Criu:
    return criu_setup.find()


@dataclass
class Lab:
    """Starts victims whose log is `log`, and ends everything that is left when the test ends."""

    directory: Path
    init: Path
    tool: Criu
    containers: list[Container] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def images(self) -> Path:
        return self.directory / "images"

    def spec(self, victim: str, *args: str, python: str = sys.executable, **changes: Any) -> ContainerSpec:
        env = {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **changes.pop("env", {})}
        argv = (python, str(VICTIMS / f"{victim}.py"), *args)
        defaults: dict[str, Any] = {"argv": argv, "env": env, "log": self.log, "network": "private"}
        return ContainerSpec(**{**defaults, **changes})

    def launch(self, spec: ContainerSpec, **kwargs: Any) -> Container:
        container = launch(self.init, spec, **kwargs)
        self.containers.append(container)
        return container

    def dump(self, container: Container, **kwargs: Any) -> criu_module.DumpReport:
        return criu_module.dump(self.tool, container, self.images, **{"deadline_s": 60.0, **kwargs})

    def restore(self, spec: ContainerSpec, **kwargs: Any) -> Container:
        container = criu_module.restore(self.tool, self.init, self.images, spec, **{"deadline_s": 60.0, **kwargs})
        self.containers.append(container)
        return container

    def lines(self) -> list[str]:
        with suppress(FileNotFoundError):
            return self.log.read_text().splitlines()
        return []

    def wait_lines(self, count: int) -> list[str]:
        def enough() -> list[str] | None:
            lines = self.lines()
            return lines if len(lines) >= count else None

        return wait_until(enough, f"{count} lines in the log, which has {self.lines()[-5:]}")

    def alive(self, pid: int) -> bool:
        return proc.status_field(pid, "State")[:1] not in ("", "Z", "X")


@pytest.fixture
def lab(tmp_path: Path, init_binary: Path, criu: Criu) -> Iterator[Lab]:
    made = Lab(tmp_path, init_binary, criu)
    yield made
    for container in made.containers:
        with suppress(ProcessLookupError):
            os.kill(container.init_pid, signal.SIGCONT)
        container.kill()
        assert proc.in_pid_namespace_of(container.init_pid) == []


@pytest.fixture
def until() -> Callable[..., Any]:
    return wait_until
