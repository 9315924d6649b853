"""The supervisor of a local fleet: `python -m infra.fleet`, started by `ergo up`, which has prepared the directory.

Its standard input is a pipe from there. Until `up` has let it go, the fleet ends with it, however it ends.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import structlog

from infra import kafka, logs, temporal
from infra.fleet_file import FleetFile
from infra.local.processes import python_environment
from infra.local.status import Phase
from infra.local.supervisor import Child, Supervisor

DETACH = b"d"
"""What `up` writes when the fleet is up and may outlive it."""
STAY = b"s"
"""What it writes when the fleet is up and ends with it."""
AGENT = "infra.node_agent"


def children(fleet_dir: Path, fleet: FleetFile) -> list[Child]:
    """The processes of a fleet. Services first, as workers need them; node agents end before all others."""
    environment = python_environment(fleet_dir)
    services: list[Child] = []
    if fleet.temporal_port and fleet.temporal_ui_port:
        line = temporal.command(fleet_dir / "temporal", fleet.temporal_port, fleet.temporal_ui_port)
        services.append(Child("temporal", line, environment))
    if fleet.kafka_port:
        line = kafka.command(kafka.java(), kafka.jars(), fleet_dir / "kafka")
        services.append(Child("kafka", line, environment))
    # Kafka they find when it is there: nothing waits for it but events.
    needs = (fleet.temporal_port,) if fleet.temporal_port else ()

    def python(name: str, *words: str, stage: int, grace_s: float) -> Child:
        return Child(name, [sys.executable, "-m", *words], environment, needs, stage, grace_s)

    def agent(name: str) -> Child:
        words = ("--name", name, "--dir", str(fleet_dir / "nodes" / name), "--devices", str(fleet.devices))
        return python(name, AGENT, *words, stage=2, grace_s=20.0)

    return [
        *services,
        python("cluster-worker", "infra.cluster_worker", stage=1, grace_s=10.0),
        python("job-worker", "infra.job_worker", stage=1, grace_s=10.0),
        *(agent(name) for name in fleet.node_names),
    ]


class Leash:
    """Whether whoever has started this process still wants it, and takes the fleet for up."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._detached = False
        self._up = False
        os.set_blocking(descriptor, False)

    def phase(self) -> Phase | None:
        """None as soon as the other end of the pipe is closed without a word, or after `STAY`."""
        try:
            word = b"" if self._detached else os.read(self._descriptor, 1)
        except BlockingIOError:
            return "running" if self._up else "starting"
        self._detached |= word == DETACH
        self._up |= word in (DETACH, STAY)
        return "running" if self._detached or word == STAY else None


def main() -> None:
    """Runs until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m infra.fleet")
    parser.add_argument("--fleet-dir", type=Path, required=True)
    fleet_dir: Path = parser.parse_args().fleet_dir
    logs.configure("supervisor")
    fleet = FleetFile.read(fleet_dir)
    if fleet is None:
        sys.exit(f"{fleet_dir} holds no fleet: use `ergo up`")
    try:
        Supervisor(fleet_dir, children(fleet_dir, fleet)).run(Leash(sys.stdin.fileno()).phase)
    except Exception:
        structlog.get_logger(__name__).exception("the supervisor has failed")
        raise
    structlog.get_logger(__name__).info("the fleet is down")


if __name__ == "__main__":
    main()
