"""Which nodes are there: told from the beats of their records by our own clock, so that no two clocks are compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from model.control import NodeNotice
from model.ids import NodeId
from model.records import NodeRecord

MARGIN_S = 2.0
"""Added to a lease: its node counts the lease from when it began to renew it, we from when we saw that."""

GAP_S = 3.0
"""Looks further apart than this have a gap between them in which nobody watched; it counts against no lease."""

SAY_AGAIN_S = 60.0
"""Everything is told again after this long: a scheduler that has lost its snapshots learns its nodes by it."""


@dataclass(slots=True)
class _Seen:
    record: NodeRecord
    since: float
    """When its beat was seen to change, or when it was first watched."""
    renewed: bool = False
    """Its beat has changed while we watched: only then it is known to live."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one look has shown.

    Attributes:
        notices: to be told; `NodeWatch.told` says that they were.
        lost: leases that are over: their incarnations are to be given up, and told by `NodeWatch.given_up`.
        holding: so many leases are over at once that it is an outage of the control plane: nothing is given up.
    """

    notices: tuple[NodeNotice, ...]
    lost: tuple[NodeId, ...]
    holding: tuple[NodeId, ...] = ()


@dataclass(slots=True)
class NodeWatch:
    """Follows the node records of one cluster."""

    cluster: str
    _seen: dict[NodeId, _Seen] = field(default_factory=dict[NodeId, _Seen])
    _over: dict[NodeId, NodeNotice] = field(default_factory=dict[NodeId, NodeNotice])
    _told: dict[NodeId, tuple[NodeNotice, float]] = field(default_factory=dict[NodeId, tuple[NodeNotice, float]])
    _looked: float | None = None

    def look(self, records: Iterable[NodeRecord], now: float) -> Look:
        """One look at all records, at `now` seconds of a monotonic clock."""
        if self._looked is not None and now - self._looked > GAP_S:
            for seen in self._seen.values():
                seen.since += now - self._looked
        self._looked = now
        current = {record.node: record for record in records if record.cluster == self.cluster}
        for node, record in current.items():
            self._see(node, record, now)
        for node in [node for node in self._seen if node not in current]:
            # Another incarnation has the name, or somebody has removed the record: this one never renews again.
            self._over[node] = notice_of(self._seen.pop(node).record, alive=False)
        expired = tuple(node for node, seen in self._seen.items() if self._late(seen, now) > MARGIN_S)
        return Look(self._notices(now), *self._judge(expired, now))

    def given_up(self, node: NodeId, now: float) -> tuple[NodeNotice, ...]:
        """The incarnation is marked as lost in the store; what is to be told now."""
        seen = self._seen.pop(node, None)
        if seen is not None:
            self._over[node] = notice_of(seen.record, alive=False)
        return self._notices(now)

    def told(self, notices: Sequence[NodeNotice], now: float) -> None:
        """The scheduler has these."""
        for notice in notices:
            self._told[notice.node] = (notice, now)
            if not notice.alive:
                self._over.pop(notice.node, None)
        # What is over and told is told again only while its record is there.
        gone = [node for node, (notice, _) in self._told.items() if not notice.alive and node not in self._seen]
        for node in gone:
            self._told.pop(node)

    def _see(self, node: NodeId, record: NodeRecord, now: float) -> None:
        seen = self._seen.get(node)
        if seen is None:
            self._seen[node] = _Seen(record, now)
            return
        if record.beat != seen.record.beat:
            seen.since, seen.renewed = now, True
        seen.record = record

    def _late(self, seen: _Seen, now: float) -> float:
        """Seconds since a lease was over; negative while it is valid."""
        if seen.record.lost or seen.record.left:
            return float("-inf")
        return now - seen.since - seen.record.lease_s

    def _judge(self, expired: tuple[NodeId, ...], now: float) -> tuple[tuple[NodeId, ...], tuple[NodeId, ...]]:
        """Leases that are over: given up, or, where most nodes are silent, held."""
        here = [seen for seen in self._seen.values() if not (seen.record.lost or seen.record.left)]
        # In an outage the first lease to end is not the last: others have been silent for most of theirs.
        silent = [seen for seen in here if self._late(seen, now) > -seen.record.lease_s / 2]
        if len(here) >= 3 and len(silent) * 2 > len(here):
            return (), expired
        return expired, ()

    def _notices(self, now: float) -> tuple[NodeNotice, ...]:
        found = list(self._over.values())
        for seen in self._seen.values():
            gone = seen.record.lost or seen.record.left
            if gone or seen.renewed:
                found.append(notice_of(seen.record, alive=not gone))
        return tuple(notice for notice in found if self._is_news(notice, now))

    def _is_news(self, notice: NodeNotice, now: float) -> bool:
        known = self._told.get(notice.node)
        return known is None or known[0] != notice or now - known[1] > SAY_AGAIN_S


def notice_of(record: NodeRecord, *, alive: bool) -> NodeNotice:
    """What the scheduler is told of a record."""
    return NodeNotice(
        record.node,
        alive,
        tuple((device.id, device.accelerator) for device in record.devices),
        record.numerics,
        tuple((part.job, part.epoch) for part in record.jobs),
        tuple(part.device_ms for part in record.jobs),
    )
