"""Where Kafka is, how to speak to it, and clients that leave nothing behind when nobody answers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from events.errors import EventsError

C = TypeVar("C")

_PROBE_S = 2.0


@dataclass(frozen=True, slots=True)
class KafkaConnection:
    """A Kafka cluster.

    Attributes:
        bootstrap_servers: ``host:port`` each.
        security: the client options for TLS and SASL, by kafka-python's names, such as ``sasl_mechanism``. Empty for
            plain text. Hidden from `repr`: it may hold a password.
    """

    bootstrap_servers: tuple[str, ...]
    security: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)

    def __str__(self) -> str:
        return ",".join(self.bootstrap_servers)

    def open(self, make: Callable[..., C], client_id: str, *, timeout_s: float, **options: Any) -> C:
        """Makes a client of kafka-python.

        Args:
            make: its class, e.g. `kafka.KafkaProducer`.
            client_id: how the broker's logs call it.
            timeout_s: how long the first answer of a broker is waited for.
            options: further options of that class.

        Raises:
            EventsError: ``events.unreachable``.
        """
        from kafka.errors import KafkaError
        from kafka.net.compat import KafkaNetClient  # pyright: ignore[reportMissingTypeStubs]

        if not any(_accepts(server) for server in self.bootstrap_servers):
            # Asked first, because a client that finds a closed port backs off for many seconds.
            raise self._unreachable("no connection")
        parts: list[Any] = []

        def part(**configs: Any) -> Any:
            parts.append(KafkaNetClient(**configs))
            return parts[-1]

        try:
            return make(
                bootstrap_servers=list(self.bootstrap_servers),
                client_id=client_id,
                bootstrap_timeout_ms=int(timeout_s * 1000),
                reconnect_backoff_max_ms=1000,
                kafka_client=part,
                **self.security,
                **options,
            )
        except (KafkaError, OSError) as error:
            for made in parts:
                made.close()  # its thread would go on asking for ever
            raise self._unreachable(f"{type(error).__name__}: {error}"[:200]) from error

    def _unreachable(self, why: str) -> EventsError:
        return EventsError(
            f"Kafka at {self} does not answer ({why}).",
            code="events.unreachable",
            remedy="Check that the fleet is up, or ERGO_KAFKA_BOOTSTRAP_SERVERS and the other ERGO_KAFKA_ settings.",
        )


def _accepts(server: str) -> bool:
    host, _, port = server.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S) as probe:
            # On one machine a connection to a free port in the ephemeral range may meet itself.
            return probe.getsockname() != probe.getpeername()
    except (OSError, ValueError):
        return False
