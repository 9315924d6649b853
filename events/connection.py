"""Where Kafka is and how to speak to it: what every client of ours is made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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

    def options(self, client_id: str) -> dict[str, Any]:
        """Options that producers, consumers and administrators share."""
        return {"bootstrap_servers": list(self.bootstrap_servers), "client_id": client_id, **self.security}
