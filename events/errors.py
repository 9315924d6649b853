"""The error of this package: Kafka could not be used."""

from __future__ import annotations


class EventsError(Exception):
    """Events could not be published or read.

    It has the attributes of `proxy_runtime.errors.ErgoError`, which this package may not import.

    Attributes:
        code: ``events.unreachable``: no broker answers; ``events.unpublished``: not all were acknowledged in time;
            ``events.no-topic``: the topic is not there; ``events.refused``: the broker does not take it.
        message: one sentence: what is wrong and where.
        remedy: what to do about it.
    """

    def __init__(self, message: str, *, code: str, remedy: str = "") -> None:
        super().__init__(f"{message} {remedy}" if remedy else message)
        self.code = code
        self.message = message
        self.remedy = remedy
