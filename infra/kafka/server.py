"""One broker that is its own controller, small enough to idle beside jobs. It may be killed at any moment."""

from __future__ import annotations

import base64
import shutil
import subprocess
import uuid
from pathlib import Path

from infra.local.ports import HOST
from proxy_runtime.errors import ErgoError

_FORMAT_S = 120.0
# 340 MB resident with the broker's own defaults; the compiler's first tier and one collector thread are enough here.
_JVM = (
    "-Xms64m",
    "-Xmx384m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:ReservedCodeCacheSize=48m",
    "-Djava.awt.headless=true",
)

_PROPERTIES = """\
# Written anew at every start.
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller_port}
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller_port}
advertised.listeners=PLAINTEXT://{host}:{port}
inter.broker.listener.name=PLAINTEXT
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={data}
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
group.initial.rebalance.delay.ms=0
# There is no replica to bring back what the kernel had not written when the machine lost power.
log.flush.interval.messages=1
# After a SIGKILL the broker's former self must be given up before it may register again: 9 s by default.
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
# Defaults are for big machines.
num.network.threads=2
num.io.threads=2
background.threads=2
num.recovery.threads.per.data.dir=1
log.cleaner.threads=1
log.cleaner.dedupe.buffer.size=8388608
log.segment.bytes=67108864
log.index.size.max.bytes=1048576
"""


def command(java: Path, jars: Path, directory: Path) -> list[str]:
    """Command line of the broker whose `prepare` has been called."""
    return [*_java(java, jars), "kafka.Kafka", str(directory / "server.properties")]


def prepare(java: Path, jars: Path, directory: Path, port: int, controller_port: int) -> None:
    """Writes the configuration, and formats the log directory if that was never done.

    Ports may be others than the last time: nothing in the logs depends on them.

    Raises:
        ErgoError: ``kafka.format``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / "data"
    if not data.is_dir():
        _format(java, jars, directory, data)
    _write(directory / "server.properties", data, port, controller_port)


def _format(java: Path, jars: Path, directory: Path, data: Path) -> None:
    # Under another name, so that a directory which is there is whole.
    draft = directory / "data.new"
    shutil.rmtree(draft, ignore_errors=True)
    properties = directory / "format.properties"
    _write(properties, draft, 1, 2)
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    cluster = f"x{cluster[1:]}" if cluster.startswith("-") else cluster  # the tool would take it for an option
    words = ["kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(properties)]
    try:
        done = subprocess.run([*_java(java, jars), *words], capture_output=True, text=True, timeout=_FORMAT_S)
        why = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
        failed = done.returncode != 0
    except subprocess.TimeoutExpired:
        failed, why = True, [f"it took more than {_FORMAT_S:.0f} s"]
    properties.unlink()
    if failed:
        shutil.rmtree(draft, ignore_errors=True)
        raise ErgoError(
            f"Kafka's log directory {data} could not be made: {why[0][:300]}.",
            code="kafka.format",
            remedy="Check that the disk has room and that the directory can be written.",
        )
    draft.rename(data)


def _java(java: Path, jars: Path) -> list[str]:
    configuration = Path(__file__).with_name("log4j2.properties")
    return [str(java), *_JVM, f"-Dlog4j2.configurationFile={configuration}", "-cp", f"{jars}/*"]


def _write(path: Path, data: Path, port: int, controller_port: int) -> None:
    text = _PROPERTIES.format(host=HOST, port=port, controller_port=controller_port, data=data)
    path.write_text(text)
