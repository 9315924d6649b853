"""The topics and how they are kept. Made in order, before the first event: no broker of ours makes one by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from events.connection import KafkaConnection
from events.errors import EventsError
from events.types import Topic

_DAY_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """How a topic is kept.

    Attributes:
        partitions: the events of one job, or node, are in one of them, in order.
        retention_ms: how long; -1 for ever.
    """

    partitions: int
    retention_ms: int

    @property
    def configs(self) -> dict[str, str]:
        """In the broker's words."""
        return {"cleanup.policy": "delete", "retention.ms": str(self.retention_ms)}


TOPICS: dict[Topic, TopicConfig] = {
    Topic.JOB_EVENTS: TopicConfig(partitions=8, retention_ms=365 * _DAY_MS),
    # Audit and bills are made from these: nothing of them expires by itself.
    Topic.DECISIONS: TopicConfig(partitions=8, retention_ms=-1),
    Topic.USAGE: TopicConfig(partitions=8, retention_ms=-1),
    Topic.TELEMETRY: TopicConfig(partitions=8, retention_ms=_DAY_MS),
    Topic.DEAD_LETTERS: TopicConfig(partitions=1, retention_ms=30 * _DAY_MS),
}
"""Every topic. One that is there already is left as its operator has made it."""


def ensure_topics(connection: KafkaConnection, *, timeout_s: float = 30.0) -> tuple[Topic, ...]:
    """Makes the topics that are missing and waits until each has its leaders; returns those that it made.

    Raises:
        EventsError: ``events.unreachable``; ``events.refused``: the broker does not let us.
    """
    from kafka import KafkaAdminClient
    from kafka.errors import KafkaError, TopicAlreadyExistsError

    # The checker's stubs are of an older kafka-python, which spoke of topics in another way.
    admin: Any = connection.open(KafkaAdminClient, "ergosphere-topics", timeout_s=timeout_s)
    try:
        there = set(admin.list_topics())
        missing = tuple(topic for topic in TOPICS if topic.value not in there)
        for topic in missing:
            config = TOPICS[topic]
            try:
                # No replication factor: the cluster's own default is what its operator wants.
                admin.create_topics({topic.value: {"num_partitions": config.partitions, "configs": config.configs}})
            except TopicAlreadyExistsError:
                pass  # somebody else was faster
        admin.wait_for_topics([topic.value for topic in TOPICS], timeout_ms=int(timeout_s * 1000))
    except KafkaError as error:
        raise EventsError(
            f"The topics cannot be made on Kafka at {connection}: {error}.",
            code="events.refused",
            remedy="Make them by hand, or give this user the right to create topics.",
        ) from error
    finally:
        admin.close()
    return missing
