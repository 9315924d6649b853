"""A node's lease: its record in the fleet's store, renewed for as long as the node is alive.

A lease that cannot be renewed stops nothing by itself: whoever cannot reach the store cannot know whether it is alone.
Only jobs that ask for it are frozen until the store answers again. What ends a node is a record that says so.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import orjson
import structlog

from model.ids import DeviceId, NodeId
from model.records import JobOnNode, NodeRecord
from model.runtime import RuntimeCode
from proxy_runtime.errors import ErgoError

_BEATS = 5  # renewals in the length of a lease

_log = structlog.stdlib.get_logger(__name__)


class NodeStore(Protocol):
    """What is needed of `proxy_runtime.storage.fleet.FleetStore`."""

    def claim_node(self, record: NodeRecord) -> NodeRecord: ...
    def renew_node(self, record: NodeRecord) -> NodeRecord: ...
    def node(self, name: str) -> NodeRecord | None: ...


class LeasedRuntime(Protocol):
    """What a lease looks after."""

    def jobs(self) -> tuple[JobOnNode, ...]: ...
    def end_fenced(self) -> None: ...
    def freeze(self, frozen: bool) -> None: ...


def boot_id() -> str:
    """Of this machine's kernel; another one after every start."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def claim(fleet: NodeStore, record: NodeRecord, directory: Path) -> tuple[NodeRecord, bool]:
    """Takes a node's record.

    Args:
        fleet: the store.
        record: what the node says of itself; the incarnation is filled in.
        directory: the node's; it remembers which incarnation it belongs to.

    Returns:
        The record as it is now, and whether it is the incarnation that was there before: then its jobs may still be
        running. Otherwise everything that is left here must be ended.

    Raises:
        ErgoError: the store does not answer.
    """
    mark = directory / "node.json"
    before = fleet.node(record.node.name)
    if before is not None and _mine(before, record, mark):
        again = _as_node(record, before.node).model_copy(update={"jobs": before.jobs})
        try:
            return fleet.renew_node(again), True
        except ErgoError as error:
            if error.code != RuntimeCode.FENCED:
                raise
    expected = NodeId(record.node.name, before.node.incarnation + 1 if before else 1)
    claimed = fleet.claim_node(_as_node(record, expected))
    if claimed.node != expected:  # somebody else has claimed the name meanwhile
        claimed = fleet.renew_node(_as_node(claimed, claimed.node))
    fresh = mark.with_suffix(".tmp")
    fresh.write_bytes(_mark(claimed))
    fresh.rename(mark)
    return claimed, False


def _as_node(record: NodeRecord, node: NodeId) -> NodeRecord:
    devices = tuple(d.model_copy(update={"id": DeviceId(node, d.id.path)}) for d in record.devices)
    return record.model_copy(update={"node": node, "devices": devices})


def _mark(record: NodeRecord) -> bytes:
    return orjson.dumps({"node": str(record.node), "boot_id": record.boot_id})


def _mine(before: NodeRecord, now: NodeRecord, mark: Path) -> bool:
    if before.lost or before.left or before.boot_id != now.boot_id:
        return False
    try:
        return mark.read_bytes() == _mark(before)
    except OSError:
        return False


class Lease:
    """Renews a node's record in a thread of its own.

    Args:
        fleet: the store.
        record: as `claim` returned it.
        runtime: its jobs go into the record; parts of lower epochs are ended on every renewal.
        superseded: called once, from the thread, where the record says that this incarnation is over.
        renewed: called with every renewed record, such as to publish it.
    """

    def __init__(
        self,
        fleet: NodeStore,
        record: NodeRecord,
        runtime: LeasedRuntime,
        superseded: Callable[[str], None],
        renewed: Callable[[NodeRecord], None] = lambda _record: None,
    ) -> None:
        self._fleet = fleet
        self._runtime = runtime
        self._superseded = superseded
        self._renewed = renewed
        self._over = threading.Event()
        self._frozen = False
        self._record = record
        self._answered = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="lease")
        self._fences = threading.Thread(target=self._fence, daemon=True, name="fences")

    @property
    def node(self) -> NodeId:
        """Whose it is."""
        return self._record.node

    @property
    def record(self) -> NodeRecord:
        """As it was last written."""
        return self._record

    @property
    def overdue_s(self) -> float:
        """Seconds since the store has last answered."""
        return time.monotonic() - self._answered

    def start(self) -> None:
        """Begins to renew."""
        self._thread.start()
        self._fences.start()

    def stop(self, *, left: bool = False) -> None:
        """Ends the renewing; with `left` the record says that the node has gone in order and holds nothing."""
        self._over.set()
        for thread in (self._thread, self._fences):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(self._record.lease_s)
        if left:
            self._fleet.renew_node(self._record.model_copy(update={"left": True, "jobs": ()}))

    def _run(self) -> None:
        pause = self._record.lease_s / _BEATS
        while True:
            began = time.monotonic()
            if not self._renew():
                return
            if self._over.wait(max(0.0, began + pause - time.monotonic())):
                return

    def _renew(self) -> bool:
        """False where the incarnation is over."""
        try:
            self._record = self._fleet.renew_node(self._record.model_copy(update={"jobs": self._runtime.jobs()}))
        except ErgoError as error:
            if error.code == RuntimeCode.FENCED:
                _log.error("this incarnation is over", node=str(self.node), error=str(error))
                self._over.set()
                self._superseded(str(error))
                return False
            _log.warning("the lease is not renewed", node=str(self.node), overdue_s=self.overdue_s, error=str(error))
        except Exception as error:  # whatever it is: the node lives on, and tries again
            _log.exception("the lease is not renewed", node=str(self.node), error=str(error))
        else:
            self._answered = time.monotonic()
            self._notify()
        self._freeze(self.overdue_s > self._record.lease_s)
        return True

    def _notify(self) -> None:
        try:
            self._renewed(self._record)
        except Exception as error:
            _log.warning("a renewed lease was not told", node=str(self.node), error=str(error))

    def _freeze(self, frozen: bool) -> None:
        if frozen != self._frozen:
            self._runtime.freeze(frozen)
            self._frozen = frozen

    def _fence(self) -> None:
        """Not in the thread that renews: ending a part takes a while, and the lease must not wait for it."""
        while not self._over.wait(self._record.lease_s / _BEATS):
            try:
                self._runtime.end_fenced()
            except Exception as error:
                _log.warning("parts of lower epochs were not looked for", node=str(self.node), error=str(error))


def lock_directory(directory: Path) -> int:
    """Holds a node's directory for this process; the descriptor is the lock.

    Raises:
        ErgoError: ``node.running``: another agent has it.
    """
    import fcntl

    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ErgoError(
            f"Another node agent has the directory {directory}.",
            code="node.running",
            remedy="Stop it first, or use another directory.",
        ) from None
    return descriptor
