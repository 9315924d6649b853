"""Producer, reader and telemetry on a real broker."""

import signal
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from events import telemetry as telemetry_module
from events.connection import KafkaConnection
from events.consumer import EventReader
from events.errors import EventsError
from events.producer import EventProducer
from events.telemetry import DeviceLoad, Telemetry, cuda_loads, host_report, node_report
from events.topics import TOPICS, ensure_topics
from events.types import DecisionData, DecisionMade, JobPhaseChanged, JobPhaseChangedData, NodeReported, Topic
from infra.local.ports import free_port
from model.ids import DeviceId, Epoch, EventId, Generation, JobId, NodeId, Sequence, Step, TenantId
from model.job_state import JobPhase
from model.records import JobOnNode, NodeDevice
from tests.infra.fixtures import new_kafka, until

START = datetime(2026, 1, 31, 12, tzinfo=UTC)
NODE = NodeId("node-1", 1)
DEVICE = NodeDevice(id=DeviceId(NODE, ("cpu-0",)), accelerator="cpu", memory_bytes=0)


def context(job, number, *, epoch=0, generation=0):
    return {
        "id": EventId(JobId(job), "run", Generation(generation), Sequence(number)),
        "source": "/clusters/test",
        "subject": JobId(job),
        "time": START + timedelta(seconds=number),
        "tenant": TenantId("t"),
        "epoch": Epoch(epoch),
    }


def queued(job, number, **more):
    data = JobPhaseChangedData(before=None, after=JobPhase.QUEUED, reason=f"Number {number}.", step=Step(0))
    return JobPhaseChanged(**context(job, number, **more), data=data)


def decided(job, number, **more):
    data = DecisionData(action="admit", reason=f"Number {number}.", policy="p", state_digest="0" * 64)
    return DecisionMade(**context(job, number, **more), data=data)


@pytest.fixture
def producer(kafka_broker):
    made = EventProducer(kafka_broker)
    yield made
    made.close()


def read(connection, job, topics=(Topic.JOB_EVENTS, Topic.DECISIONS)):
    return [record.event for record in EventReader(connection, topics).read() if str(record.event.subject) == job]


def test_what_is_published_is_read_in_order_and_once(kafka_broker, producer):
    batch = [queued("in-order", number) for number in range(1, 301)]
    assert producer.publish(batch) == 300
    assert producer.publish(batch) == 300  # an activity that was tried again
    assert producer.publish([]) == 0
    assert read(kafka_broker, "in-order") == batch


def test_an_epoch_that_is_over_is_not_shown(kafka_broker, producer):
    events = [
        queued("fenced", 1, epoch=1),
        queued("fenced", 2, epoch=2),
        queued("fenced", 3, epoch=1),
        decided("fenced", 4, epoch=1),  # in another topic: nothing orders it against the others
        queued("fenced", 1, epoch=2, generation=1),
    ]
    for event in events:
        producer.publish([event])
    seen = {(int(event.id.generation), int(event.id.seq)) for event in read(kafka_broker, "fenced")}
    assert seen == {(0, 1), (0, 2), (0, 4), (1, 1)}


def test_following_goes_on_where_reading_has_ended(kafka_broker, producer):
    producer.publish([queued("followed", 1)])
    reader = EventReader(kafka_broker)
    assert [found.event.id.seq for found in reader.read() if str(found.event.subject) == "followed"] == [1]
    sender = threading.Thread(target=producer.publish, args=([queued("followed", 2), queued("followed", 3)],))
    sender.start()
    deadline = time.monotonic() + 30
    seen = []
    for found in reader.follow(lambda: len(seen) < 2 and time.monotonic() < deadline):
        if found is not None and str(found.event.subject) == "followed":
            seen.append(int(found.event.id.seq))  # noqa: PERF401  the loop looks at it
    sender.join()
    assert seen == [2, 3]


def test_what_is_no_event_is_counted_and_skipped(kafka_broker, producer):
    from kafka import KafkaProducer

    raw = kafka_broker.open(KafkaProducer, "stranger", timeout_s=10)
    raw.send(Topic.USAGE.value, value=b"hello").get(10)
    raw.close()
    reader = EventReader(kafka_broker, (Topic.USAGE,))
    assert list(reader.read()) == []
    assert reader.skipped == {"events.not-an-event": 1}


def test_reading_from_a_time(kafka_broker, producer):
    producer.publish([queued("dated", 1)])
    later = datetime.now(UTC) + timedelta(hours=1)
    assert list(EventReader(kafka_broker).read(since=later)) == []
    found = EventReader(kafka_broker).read(since=datetime.now(UTC) - timedelta(hours=1))
    assert "dated" in {str(record.event.subject) for record in found}


def test_topics_have_their_partitions_and_are_made_once(kafka_broker):
    from kafka import KafkaAdminClient

    assert ensure_topics(kafka_broker) == ()
    admin = kafka_broker.open(KafkaAdminClient, "test", timeout_s=10)
    found = {topic["name"]: len(topic["partitions"]) for topic in admin.describe_topics([*map(str, Topic)])}
    admin.close()
    assert found == {topic.value: config.partitions for topic, config in TOPICS.items()}


def test_nobody_there_is_told_at_once_and_leaves_no_thread():
    nowhere = KafkaConnection((f"127.0.0.1:{free_port()}",))
    before = threading.active_count()
    with pytest.raises(EventsError, match="does not answer") as caught:
        EventProducer(nowhere).publish([queued("lost", 1)])
    assert caught.value.code == "events.unreachable"
    with pytest.raises(EventsError):
        list(EventReader(nowhere).read())
    assert threading.active_count() == before


def test_somebody_else_at_the_port_is_told_in_bounded_time_and_leaves_no_thread():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as deaf:
        before = threading.active_count()
        deaf_connection = KafkaConnection((f"127.0.0.1:{deaf.getsockname()[1]}",))
        with pytest.raises(EventsError) as caught:
            EventProducer(deaf_connection, deadline_s=1.0).publish([queued("lost", 1)])
        assert caught.value.code == "events.unreachable"
        until(lambda: threading.active_count() == before, 10, "the client's thread to end")


@pytest.mark.slow
def test_a_broker_that_stops_answering_is_told_and_found_again(tmp_path):
    server = new_kafka(tmp_path / "kafka")
    server.start()
    connection = KafkaConnection((server.address,))
    producer = EventProducer(connection, deadline_s=3.0)
    try:
        with pytest.raises(EventsError) as caught:
            producer.publish([queued("early", 1)])
        assert caught.value.code in ("events.no-topic", "events.unpublished")
        ensure_topics(connection)
        producer.publish([queued("job", 1)])
        server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(EventsError) as caught:
            producer.publish([queued("job", 2)])
        assert caught.value.code in ("events.unpublished", "events.unreachable")
        server.process.send_signal(signal.SIGCONT)
        batch = [queued("job", 2), queued("job", 3)]

        def published():
            try:
                return producer.publish(batch)
            except EventsError:
                return 0

        until(published, 60, "the broker to be found again")
        assert [int(event.id.seq) for event in read(connection, "job")] == [1, 2, 3]
    finally:
        producer.close()
        server.kill()


def reports(connection, node):
    found = EventReader(connection, (Topic.TELEMETRY,)).read()
    return [record.event for record in found if record.event.subject == node]


def test_a_node_reports_itself(kafka_broker, tmp_path):
    node = NodeId("reporting", 3)
    job = JobOnNode(job=JobId("char-gpt"), epoch=Epoch(2), step=Step(7), device_ms=1234)
    device = NodeDevice(id=DeviceId(node, ("cpu-0",)), accelerator="cpu")
    telemetry = Telemetry(kafka_broker, "local", node)
    try:
        assert telemetry.report(lambda: node_report(node, [device], [job], tmp_path))
        (event,) = until(lambda: reports(kafka_broker, node), 30, "a report")
    finally:
        telemetry.close()
    assert isinstance(event, NodeReported)
    assert event.source == "/clusters/local" and event.id.startswith("reporting@3/")
    assert event.data.jobs[0].step == 7 and event.data.jobs[0].device_ms == 1234
    assert event.data.host.cores >= 1 and event.data.host.memory_total_bytes > 0
    assert event.data.devices[0].busy is None


def test_a_lack_of_kafka_neither_blocks_nor_raises(tmp_path):
    telemetry = Telemetry(KafkaConnection((f"127.0.0.1:{free_port()}",)), "local", NODE)
    try:
        assert telemetry.report(lambda: node_report(NODE, [DEVICE], [], tmp_path))
        until(lambda: telemetry._away, 30, "the outage to be noticed")
        telemetry.report(lambda: node_report(NODE, [DEVICE], [], tmp_path))
        assert not telemetry.report(lambda: pytest.fail("made although the last one still waits"))
    finally:
        telemetry.close()
    assert not telemetry._thread.is_alive()
    assert not telemetry.report(lambda: pytest.fail("made after the end"))


def test_a_report_that_cannot_be_made_is_no_ones_failure():
    telemetry = Telemetry(KafkaConnection(("127.0.0.1:9",)), "local", NODE)
    try:
        assert not telemetry.report(lambda: 1 / 0)
    finally:
        telemetry.close()


def test_loads_go_to_their_devices(tmp_path):
    second = NodeDevice(id=DeviceId(NODE, ("gpu-1",)), accelerator="x", memory_bytes=100)
    data = node_report(NODE, [DEVICE, second], [], tmp_path, [DeviceLoad(0.5, 10, 20)])
    assert [device.busy for device in data.devices] == [0.5, None]
    assert [device.memory_total_bytes for device in data.devices] == [20, 100]


def test_the_host_as_the_kernel_tells_it(tmp_path):
    report = host_report(tmp_path)
    assert 0 < report.memory_available_bytes <= report.memory_total_bytes
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert report.memory_total_bytes == int(total.split()[1]) * 1024


def test_a_machine_without_a_driver_has_no_loads():
    if Path("/dev/nvidiactl").exists():
        assert all(0 <= load.busy <= 1 for load in cuda_loads())
    else:
        assert cuda_loads() == []
    assert telemetry_module.cuda_loads is cuda_loads
