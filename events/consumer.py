"""Reads events: from the beginning, in order, each once, and not those of an epoch that is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from events import envelope
from events.connection import KafkaConnection
from events.errors import EventsError
from events.types import Event, JobEvent, Topic
from model.errors import ModelError
from model.ids import JobId

if TYPE_CHECKING:
    from kafka import KafkaConsumer

_POLL_MS = 500


@dataclass(frozen=True, slots=True)
class Record:
    """An event and where it was read."""

    event: Event
    topic: Topic
    partition: int
    offset: int


@dataclass(slots=True)
class Once:
    """The rule of every consumer: an event counts once, and not when a higher epoch of its job was seen before.

    The producer publishes the events of a job in order and repeats whole batches, and a topic keeps that order: of one
    generation, a number that is not above the last was seen already. Nothing else is remembered, so that memory grows
    with jobs and not with events. Topics are apart: nothing orders one against another.
    """

    _sequences: dict[tuple[Topic, str, str, int], int] = field(default_factory=dict[tuple[Topic, str, str, int], int])
    _epochs: dict[tuple[Topic, JobId], int] = field(default_factory=dict[tuple[Topic, JobId], int])
    _reports: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def admit(self, event: Event) -> bool:
        """Whether an event counts. It then has been seen."""
        if not isinstance(event, JobEvent):
            start, _, number = event.id.removeprefix(f"{event.subject}/").partition("/")
            mark = (int(start), int(number))
            if mark <= self._reports.get(str(event.subject), (-1, -1)):
                return False
            self._reports[str(event.subject)] = mark
            return True
        fence = (event.topic, event.subject)
        if event.epoch < self._epochs.get(fence, 0):
            return False
        line = (event.topic, event.subject, event.id.first_execution_run, int(event.id.generation))
        if event.id.seq <= self._sequences.get(line, 0):
            return False
        self._epochs[fence] = int(event.epoch)
        self._sequences[line] = int(event.id.seq)
        return True


@dataclass(slots=True)
class EventReader:
    """Reads topics without a consumer group: every reader sees everything and leaves no trace on the broker.

    Attributes:
        skipped: messages that are no event that this build knows, by the reason's code.
    """

    connection: KafkaConnection
    topics: tuple[Topic, ...] = (Topic.JOB_EVENTS, Topic.DECISIONS)
    client_id: str = "ergosphere-reader"
    timeout_s: float = 15.0
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    _once: Once = field(default_factory=Once)
    _positions: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])

    def read(self, *, since: datetime | None = None) -> Iterator[Record]:
        """All that is there now, each event once; topics and partitions in turn, each in its own order.

        Args:
            since: skips what the broker got before, cheaply; None for everything.

        Raises:
            EventsError: ``events.unreachable``, ``events.no-topic``.
        """
        with self._open() as consumer:
            partitions = self._seek(consumer, since)
            ends: dict[Any, int] = consumer.end_offsets(partitions)
            last_answer = time.monotonic()
            while any(consumer.position(partition) < ends[partition] for partition in partitions):
                found = consumer.poll(timeout_ms=_POLL_MS)
                if found:
                    last_answer = time.monotonic()
                elif time.monotonic() - last_answer > self.timeout_s:
                    raise self._gone()
                for partition, messages in found.items():
                    yield from self._records(message for message in messages if message.offset < ends[partition])

    def follow(self, go_on: Callable[[], bool] = lambda: True) -> Iterator[Record | None]:
        """What comes after the last `read` (or, without one, from the beginning), as it comes.

        Yields None whenever nothing has come for half a second, so that the caller gets to look around. An outage of
        the broker is waited out.

        Args:
            go_on: asked between polls; False ends it.
        """
        with self._open() as consumer:
            self._seek(consumer, None)
            while go_on():
                found = consumer.poll(timeout_ms=_POLL_MS)
                for messages in found.values():
                    yield from self._records(messages)
                if not found:
                    yield None

    @contextmanager
    def _open(self) -> Generator[Any]:
        from kafka import KafkaConsumer
        from kafka.errors import KafkaError

        consumer: KafkaConsumer = self.connection.open(
            KafkaConsumer,
            self.client_id,
            timeout_s=self.timeout_s,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            allow_auto_create_topics=False,
            fetch_max_wait_ms=_POLL_MS,
        )
        try:
            yield consumer
        except KafkaError as error:
            raise self._gone() from error
        finally:
            consumer.close()

    def _seek(self, consumer: Any, since: datetime | None) -> list[Any]:
        from kafka.structs import TopicPartition

        partitions: list[Any] = []
        for topic in self.topics:
            numbers = consumer.partitions_for_topic(topic.value)
            if not numbers:
                raise EventsError(
                    f"Kafka at {self.connection} has no topic {topic.value}.",
                    code="events.no-topic",
                    remedy="Make the topics: `ergo up` does, or events.topics.ensure_topics.",
                )
            partitions += [TopicPartition(topic.value, number) for number in sorted(numbers)]
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        if since is not None:
            times = consumer.offsets_for_times({partition: int(since.timestamp() * 1000) for partition in partitions})
            for partition in partitions:
                at = times.get(partition)
                if at is None:
                    consumer.seek_to_end(partition)
                else:
                    consumer.seek(partition, at.offset)
        for partition in partitions:
            position = self._positions.get((partition.topic, partition.partition))
            if position is not None:
                consumer.seek(partition, position)
        return partitions

    def _records(self, messages: Iterable[Any]) -> Iterator[Record]:
        for message in messages:
            self._positions[message.topic, message.partition] = message.offset + 1
            try:
                event = envelope.from_kafka(message.value, message.headers)
            except ModelError as error:
                self.skipped[error.code] = self.skipped.get(error.code, 0) + 1
                continue
            if self._once.admit(event):
                yield Record(event, Topic(message.topic), message.partition, message.offset)

    def _gone(self) -> EventsError:
        return EventsError(
            f"Kafka at {self.connection} no longer answers.",
            code="events.unreachable",
            remedy="Check that the fleet is up (`ergo up`), and read again.",
        )
