"""Publishes events. Done means done: every one is on all in-sync replicas, or the call raises and may be repeated."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from events import envelope
from events.connection import KafkaConnection
from events.errors import EventsError
from events.types import Event

if TYPE_CHECKING:
    from kafka import KafkaProducer


class EventProducer:
    """A producer for one process. Thread-safe; connects at the first publication, and again after a failure.

    Events of one key (a job, a node) that are published one call after another arrive in that order. A call that is
    repeated publishes events again under the same ids: readers count each once.
    """

    def __init__(self, connection: KafkaConnection, *, client_id: str = "ergosphere", deadline_s: float = 20.0) -> None:
        """Connects to nothing yet.

        Args:
            connection: where Kafka is.
            client_id: how the broker's logs call this process.
            deadline_s: seconds after which `publish` gives up.
        """
        self._connection = connection
        self._client_id = client_id
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._producer: KafkaProducer | None = None

    def publish(self, events: Sequence[Event]) -> int:
        """Blocks until every event is acknowledged; returns their number.

        Raises:
            EventsError: ``events.unreachable``, ``events.unpublished``, ``events.no-topic`` or ``events.refused``. Some
                of the events may have been published.
        """
        if not events:
            return 0
        deadline = time.monotonic() + self._deadline_s
        producer = self._get()
        try:
            # All are under way before the first answer is waited for: a batch costs one round trip.
            sent = [self._send(producer, event) for event in events]
            for future in sent:
                future.get(timeout=max(0.0, deadline - time.monotonic()))
        except Exception as error:
            # Numbers of an idempotent producer may have a gap now. A new one starts from none, and what this one still
            # has under way can no longer come after what a repeated call sends.
            self._drop(producer)
            raise self._failed(len(events), error) from error
        return len(events)

    def close(self) -> None:
        """Ends the connection. Nothing is lost: `publish` leaves nothing under way."""
        with self._lock:
            producer, self._producer = self._producer, None
        if producer is not None:
            producer.close(timeout=1.0)

    def _get(self) -> KafkaProducer:
        from kafka import KafkaProducer

        with self._lock:
            if self._producer is None:
                milliseconds = int(self._deadline_s * 1000)
                self._producer = self._connection.open(
                    KafkaProducer,
                    self._client_id,
                    timeout_s=self._deadline_s,
                    acks="all",
                    enable_idempotence=True,
                    linger_ms=2,
                    delivery_timeout_ms=milliseconds,
                    request_timeout_ms=max(1000, milliseconds // 2),
                    max_block_ms=milliseconds,
                    allow_auto_create_topics=False,
                )
            return self._producer

    def _send(self, producer: KafkaProducer, event: Event) -> Any:
        message = envelope.to_kafka(event)
        return producer.send(message.topic, value=message.value, key=message.key, headers=list(message.headers))

    def _drop(self, producer: KafkaProducer) -> None:
        with self._lock:
            if self._producer is producer:
                self._producer = None
        producer.close(timeout=0)

    def _failed(self, count: int, error: Exception) -> EventsError:
        from kafka.errors import (
            KafkaTimeoutError,
            MessageSizeTooLargeError,
            TopicAuthorizationFailedError,
            UnknownTopicOrPartitionError,
        )

        where = f"{count} events to Kafka at {self._connection}"
        if isinstance(error, UnknownTopicOrPartitionError):
            return EventsError(
                f"A topic for {where} is missing.",
                code="events.no-topic",
                remedy="Make the topics: `ergo up` does, or events.topics.ensure_topics.",
            )
        if isinstance(error, MessageSizeTooLargeError | TopicAuthorizationFailedError):
            return EventsError(
                f"Kafka at {self._connection} refuses an event: {error}.",
                code="events.refused",
                remedy="Correct the broker's limits, or the rights of this user.",
            )
        late = isinstance(error, KafkaTimeoutError)
        why = f"no answer within {self._deadline_s:g} s" if late else f"{type(error).__name__}: {error}"[:200]
        return EventsError(
            f"Not all of {where} were acknowledged ({why}).",
            code="events.unpublished",
            remedy="Publish the same events again; readers count each once.",
        )
