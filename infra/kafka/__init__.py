"""The broker of a local fleet: Apache Kafka, one KRaft node, its jars from Maven Central."""

from __future__ import annotations

from infra.kafka.install import JAVA_RELEASE, installed, jars, java
from infra.kafka.server import command, prepare

__all__ = ["JAVA_RELEASE", "command", "installed", "jars", "java", "prepare"]
