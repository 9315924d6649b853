"""What a node tells of itself every few seconds. Nobody waits for it and nothing depends on it: while Kafka is away
reports are dropped, and the agent does not notice.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import structlog

from events.connection import KafkaConnection
from events.errors import EventsError
from events.producer import EventProducer
from events.types import DeviceReport, HostReport, JobReport, NodeReported, NodeReportedData
from model.ids import DeviceId, NodeId
from model.records import JobOnNode, NodeDevice

log = structlog.stdlib.get_logger(__name__)

_DEADLINE_S = 5.0
_REST_S = 15.0


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """What a device's driver says: share of time in use, 0 to 1, and bytes of memory."""

    busy: float
    memory_used_bytes: int
    memory_total_bytes: int


def host_report(directory: Path) -> HostReport:
    """The host as it is now; the disk is that of `directory`."""
    memory = psutil.virtual_memory()
    return HostReport(
        cores=os.cpu_count() or 1,
        load_1m=os.getloadavg()[0],
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        disk_free_bytes=shutil.disk_usage(directory).free,
    )


def cuda_loads() -> list[DeviceLoad]:
    """What NVML says of the CUDA devices, by their index; nothing where there is no driver."""
    import pynvml  # pyright: ignore[reportMissingTypeStubs]

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        return [_load(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        log.warning("NVML does not tell the load of the devices", error=str(error))
        return []
    finally:
        nvml.nvmlShutdown()


def node_report(
    node: NodeId,
    devices: Sequence[NodeDevice],
    jobs: Sequence[JobOnNode],
    directory: Path,
    loads: Sequence[DeviceLoad] = (),
) -> NodeReportedData:
    """A report of a node.

    Args:
        node: whose.
        devices: as in its record.
        jobs: as in its record.
        directory: whose disk counts.
        loads: of the devices, by index; of those that nobody measures, none.
    """
    measured = dict(enumerate(loads))
    return NodeReportedData(
        node=node,
        devices=tuple(_device(device.id, device, measured.get(index)) for index, device in enumerate(devices)),
        jobs=tuple(
            JobReport(job=part.job, epoch=part.epoch, step=part.step, device_ms=part.device_ms) for part in jobs
        ),
        host=host_report(directory),
    )


class Telemetry:
    """Sends reports of one node from a thread of its own. No method blocks or raises."""

    def __init__(
        self,
        connection: KafkaConnection,
        cluster: str,
        node: NodeId,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._source = f"/clusters/{cluster}"
        self._node = node
        self._clock = clock
        self._start_ms = int(clock() * 1000)
        self._number = 0
        self._producer = EventProducer(connection, client_id=f"telemetry-{node}", deadline_s=_DEADLINE_S)
        # One: a report that could not be sent in time is worth less than the next one.
        self._waiting: queue.Queue[NodeReportedData | None] = queue.Queue(maxsize=1)
        self._away = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="telemetry", daemon=True)
        self._thread.start()

    def report(self, make: Callable[[], NodeReportedData]) -> bool:
        """Hands a report over; returns whether it will be tried. It is not made where the last one still waits."""
        if self._closed.is_set() or self._waiting.full():
            return False
        try:
            self._waiting.put_nowait(make())
        except queue.Full:
            return False
        except Exception as error:
            log.warning("a report of the node could not be made", error=repr(error))
            return False
        return True

    def close(self, patience_s: float = 1.0) -> None:
        """Ends the thread, after the report that it is at if that takes no longer than `patience_s`."""
        self._closed.set()
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            pass  # it looks at the flag after that one
        self._thread.join(patience_s)

    def _send_all(self) -> None:
        while not self._closed.is_set():
            data = self._waiting.get()
            if data is None:
                break
            self._send(data)
        self._producer.close()

    def _send(self, data: NodeReportedData) -> None:
        self._number += 1
        try:
            event = NodeReported(
                id=f"{self._node}/{self._start_ms}/{self._number}",
                source=self._source,
                subject=self._node,
                time=datetime.fromtimestamp(self._clock(), UTC),
                data=data,
            )
            self._producer.publish([event])
        except Exception as error:
            if not self._away:  # once an outage
                log.warning("telemetry is not sent", error=str(error))
            self._away = True
            if not isinstance(error, EventsError):
                log.debug("telemetry failed", exc_info=True)
            self._closed.wait(_REST_S)
        else:
            if self._away:
                log.info("telemetry is sent again")
            self._away = False


def _load(nvml: Any, index: int) -> DeviceLoad:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    return DeviceLoad(busy, int(memory.used), int(memory.total))


def _device(id: DeviceId, device: NodeDevice, load: DeviceLoad | None) -> DeviceReport:
    return DeviceReport(
        id=id,
        accelerator=device.accelerator,
        busy=load.busy if load else None,
        memory_used_bytes=load.memory_used_bytes if load else None,
        memory_total_bytes=load.memory_total_bytes if load else device.memory_bytes or None,
    )
