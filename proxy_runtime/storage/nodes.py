"""Node records: who is there, under which incarnation, and since when it has not been heard of."""

from __future__ import annotations

from model.ids import NodeId
from model.records import NodeRecord
from proxy_runtime.storage.blobs import Bucket
from proxy_runtime.storage.errors import Fenced
from proxy_runtime.storage.records import Records


class Nodes:
    """The node records of a fleet."""

    def __init__(self, bucket: Bucket) -> None:
        self._records = Records(bucket, "records/nodes", NodeRecord)

    def claim(self, record: NodeRecord) -> NodeRecord:
        """Takes a node's name over under an incarnation that it never had; that of ``record`` is not looked at."""

        def change(current: NodeRecord | None) -> NodeRecord:
            incarnation = 1 if current is None else current.node.incarnation + 1
            beat = 1 if current is None else current.beat + 1
            node = NodeId(record.node.name, incarnation)
            return record.model_copy(update={"node": node, "beat": beat, "lost": False, "left": False})

        return self._records.update(record.node.name, change)

    def renew(self, record: NodeRecord) -> NodeRecord:
        """Writes what a node says of itself, with a higher beat.

        Raises:
            Fenced: its incarnation was given up, or another one has taken the name over.
        """

        def change(current: NodeRecord | None) -> NodeRecord:
            if current is None or current.node != record.node:
                now = "nothing is known of it" if current is None else f"{current.node} has taken over"
                raise Fenced(f"Node {record.node} may not renew its lease: {now}.")
            if current.lost:
                raise Fenced(f"Node {record.node} may not renew its lease: it was given up as lost.")
            return record.model_copy(update={"beat": current.beat + 1, "lost": False})

        return self._records.update(record.node.name, change)

    def mark_lost(self, node: NodeId) -> None:
        """Gives an incarnation up. Nothing happens where a higher one is there already.

        Raises:
            Fenced: nothing is known of such an incarnation.
        """

        def change(current: NodeRecord | None) -> NodeRecord | None:
            if current is None or current.node.incarnation < node.incarnation:
                raise Fenced(f"Node {node} cannot be given up: it never was there.")
            if current.node.incarnation > node.incarnation or current.lost:
                return None
            return current.model_copy(update={"lost": True})

        self._records.update(node.name, change)

    def read(self, name: str) -> NodeRecord | None:
        """A node's record, under whatever incarnation it is now."""
        return self._records.read(name)

    def read_all(self) -> list[NodeRecord]:
        """All nodes, by name."""
        return list(self._records.read_all().values())
