"""What `ergo doctor` says about what a local fleet needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from infra import temporal
from infra.kafka import install
from proxy_runtime.errors import ErgoError
from proxy_runtime.process.checks import Check


def checks() -> list[Check]:
    """One line each for Temporal's server, Java and Kafka's broker; nothing is brought or started."""
    return [
        _found("fleet: Temporal", lambda: str(temporal.binary())),
        _found("fleet: Java", lambda: str(install.java())),
        _kafka(),
    ]


def _found(name: str, find: Callable[[], str]) -> Check:
    try:
        return Check(name, True, find())
    except ErgoError as error:
        return Check(name, False, error.message, error.remedy)


def _kafka() -> Check:
    place = install.folder()
    if place.is_dir():
        return Check("fleet: Kafka", True, str(place))
    if shutil.which("mvn"):
        return Check("fleet: Kafka", True, "its jars are brought by Maven with the first `ergo up`")
    return Check(
        "fleet: Kafka",
        False,
        f"its jars are not in {place}, and there is no Maven to bring them",
        "Install Maven (Debian: apt-get install maven), or set ERGO_KAFKA_BOOTSTRAP_SERVERS.",
    )
