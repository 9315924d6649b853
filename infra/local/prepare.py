"""What must be there before the first process of a fleet is started: programs, room, directories, ports, the secret."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra import kafka, temporal
from infra.fleet_file import FleetFile
from infra.local.ports import HOST, free_port, is_free, require_free
from infra.settings import SECRET_BYTES, Settings, outside_temporal
from proxy_runtime import build
from proxy_runtime.device.launcher import check_settings
from proxy_runtime.errors import ErgoError

_NEEDED_BYTES = 1 << 30
_NODES = _DEVICES = 2
_FOLDERS = ("logs", "temporal", "store", "nodes")
_OURS = {*_FOLDERS, "kafka", "secret", "secret.new", "lock", "stopping", "fleet.json", "supervisor.json"} | {
    ".supervisor.json.new",
    ".fleet.json.new",
}


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What `ergo up` was asked for; None is what it was at the last `up`, else the default, for a port any free one."""

    nodes: int | None = None
    devices: int | None = None
    temporal_port: int | None = None
    ui_port: int | None = None
    kafka_port: int | None = None

    def agree_with(self, fleet: FleetFile) -> bool:
        """Whether a fleet is what was asked for."""
        asked = (
            (self.nodes, fleet.nodes),
            (self.devices, fleet.devices),
            (self.temporal_port, fleet.temporal_port),
            (self.ui_port, fleet.temporal_ui_port),
            (self.kafka_port, fleet.kafka_port),
        )
        return all(wanted in (None, there) for wanted, there in asked)


@dataclass(frozen=True, slots=True)
class Outside:
    """Services that are there already, by their settings; None for those that the fleet runs itself."""

    temporal_address: str | None
    temporal_namespace: str
    kafka: str | None
    store_url: str | None

    @classmethod
    def of(cls) -> Outside:
        """Reads the environment; what an earlier `fleet.json` says does not count."""
        config = outside_temporal()
        return cls(
            config.get("target_host"),
            config.get("namespace") or "default",
            os.environ.get("ERGO_KAFKA_BOOTSTRAP_SERVERS") or None,
            os.environ.get("ERGO_STORE_URL") or None,
        )


def check_directory(fleet_dir: Path) -> None:
    """Checks that a directory is a fleet's, or empty: what is in it may be removed later.

    Raises:
        ErgoError: ``fleet.directory``.
    """
    foreign = sorted({path.name for path in fleet_dir.iterdir()} - _OURS)
    if foreign:
        raise ErgoError(
            f"{fleet_dir} is not the directory of a fleet: it holds {foreign[0]!r}.",
            code="fleet.directory",
            remedy="Give a --fleet-dir that is empty or does not exist.",
        )


def check_machine(fleet_dir: Path, outside: Outside) -> None:
    """Checks what `up` needs before it makes anything.

    Raises:
        ErgoError: a program is missing, the disk is too full, the directory cannot be written, or the environment says
            of device proxies what they cannot read.
    """
    check_settings(os.environ)
    if outside.temporal_address is None:
        temporal.binary()
    if outside.kafka is None:
        kafka.java()
    there = next(path for path in (fleet_dir, *fleet_dir.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ErgoError(
            f"The fleet's directory {fleet_dir} cannot be written.",
            code="fleet.directory",
            remedy="Give another --fleet-dir, or set ERGO_HOME.",
        )
    free = shutil.disk_usage(there).free
    if free < _NEEDED_BYTES:
        raise ErgoError(
            f"{there} has {free >> 20} MiB left, and a fleet needs {_NEEDED_BYTES >> 20} MiB to start.",
            code="fleet.no-space",
            remedy="Free some there, or give a --fleet-dir on another disk.",
        )


def make(settings: Settings, options: UpOptions, outside: Outside, say: Callable[[str], None]) -> FleetFile:
    """Makes the directory of a fleet, or completes that of an earlier one, whose data and ports it keeps.

    Raises:
        ErgoError: a port that was asked for is taken, or a part cannot be made.
    """
    fleet_dir = settings.fleet_dir
    before = FleetFile.read(fleet_dir)
    fleet = _plan(settings, options, outside, before)
    for name in _FOLDERS:
        (fleet_dir / name).mkdir(parents=True, exist_ok=True)
    if before is not None:
        _tell_moved(before, fleet, say)
    _ensure_secret(fleet.secret_file, fleet_dir)
    if fleet.nodes:
        build.ensure(progress=say)  # takes minutes the first time: not while agents are waited for
    if fleet.kafka_port and fleet.kafka_controller_port:
        jars = kafka.jars(say)
        kafka.prepare(kafka.java(), jars, fleet_dir / "kafka", fleet.kafka_port, fleet.kafka_controller_port)
    fleet.write(fleet_dir)
    return fleet


def _size(asked: int | None, last: int | None, default: int) -> int:
    """Sentences that advise `ergo up` after a crash mean the fleet as it was."""
    return next(number for number in (asked, last, default) if number is not None)


def _plan(settings: Settings, options: UpOptions, outside: Outside, before: FleetFile | None) -> FleetFile:
    taken: set[int] = set()

    def port(asked: int | None, last: int | None, what: str, option: str) -> int:
        if asked is not None:
            require_free(asked, what, option)
            chosen = asked
        else:
            chosen = last if last and last not in taken and is_free(last) else free_port(taken)
        taken.add(chosen)
        return chosen

    temporal_port = ui_port = kafka_port = controller_port = None
    if outside.temporal_address is None:
        temporal_port = port(options.temporal_port, before and before.temporal_port, "Temporal", "--temporal-port")
        ui_port = port(options.ui_port, before and before.temporal_ui_port, "Temporal's UI", "--ui-port")
    if outside.kafka is None:
        kafka_port = port(options.kafka_port, before and before.kafka_port, "Kafka", "--kafka-port")
        controller_port = port(None, before and before.kafka_controller_port, "", "")
    return FleetFile(
        cluster=settings.cluster,
        temporal_address=outside.temporal_address or f"{HOST}:{temporal_port}",
        temporal_namespace=outside.temporal_namespace,
        temporal_port=temporal_port,
        temporal_ui=f"http://{HOST}:{ui_port}" if ui_port else "",
        temporal_ui_port=ui_port,
        kafka_bootstrap_servers=outside.kafka or f"{HOST}:{kafka_port}",
        kafka_port=kafka_port,
        kafka_controller_port=controller_port,
        store_url=outside.store_url or f"file://{settings.fleet_dir / 'store'}",
        secret_file=settings.secret_file or settings.fleet_dir / "secret",
        nodes=_size(options.nodes, before and before.nodes, _NODES),
        devices=_size(options.devices, before and before.devices, _DEVICES),
    )


def _tell_moved(before: FleetFile, now: FleetFile, say: Callable[[str], None]) -> None:
    for what, old, new in (
        ("Temporal", before.temporal_port, now.temporal_port),
        ("Temporal's UI", before.temporal_ui_port, now.temporal_ui_port),
        ("Kafka", before.kafka_port, now.kafka_port),
    ):
        if old and new and old != new:
            say(f"{what} moves from port {old} to {new}.")


def _ensure_secret(path: Path, fleet_dir: Path) -> None:
    if path.exists():
        return
    if any((fleet_dir / "store").rglob("*.json")):
        raise ErgoError(
            f"The fleet's secret {path} is gone, and its store holds data that needs it.",
            code="fleet.secret",
            remedy="Bring the file back, or start anew with `ergo down --purge` and `ergo up`.",
        )
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
