"""Temporal and Kafka as the fleet runs them: killed at any moment, they come back with all that was acknowledged."""

import asyncio
import os
import uuid
from datetime import UTC, datetime

import pytest
from temporalio.client import Client

from events.connection import KafkaConnection
from events.consumer import EventReader
from events.producer import EventProducer
from events.topics import TOPICS, ensure_topics
from events.types import JobPhaseChanged, JobPhaseChangedData, Topic
from infra import kafka, temporal
from infra.local.ports import free_port
from model.ids import Epoch, EventId, Generation, JobId, Sequence, Step, TenantId
from model.job_state import JobPhase
from proxy_runtime.errors import ErgoError
from tests.infra.fixtures import new_kafka, new_temporal, until


def event(job, number):
    return JobPhaseChanged(
        id=EventId(JobId(job), "run", Generation(0), Sequence(number)),
        source="/clusters/test",
        subject=JobId(job),
        time=datetime.now(UTC),
        tenant=TenantId("t"),
        epoch=Epoch(0),
        data=JobPhaseChangedData(before=None, after=JobPhase.QUEUED, reason=f"Number {number}.", step=Step(0)),
    )


def test_temporal_keeps_workflows_and_search_attributes_over_kill_9(tmp_path):
    server = new_temporal(tmp_path / "temporal")
    server.start()

    async def start():
        client = await Client.connect(server.address)
        assert await temporal.healthy(client)
        await client.start_workflow("Nothing", id="kept", task_queue="nobody")

    async def look():
        client = await Client.connect(server.address)
        await temporal.register_search_attributes(client)  # all are there: nothing to do
        return (await client.get_workflow_handle("kept").describe()).status

    try:
        asyncio.run(start())
        server.kill()
        server.start()
        assert asyncio.run(look()).name == "RUNNING"
    finally:
        server.kill()


def test_jobs_can_be_found_by_every_search_attribute(temporal_server):
    async def search():
        client = await Client.connect(temporal_server)
        query = "ErgoTenant='t' AND ErgoTier='basic' AND ErgoPhase='running'"
        query += " AND ErgoEpoch>1 AND ErgoWidth=2 AND ErgoNodes='n'"
        return [found async for found in client.list_workflows(query)]

    assert asyncio.run(search()) == []


def test_a_worker_is_seen_when_it_polls(temporal_server):
    from temporalio import activity
    from temporalio.worker import Worker

    @activity.defn
    async def nothing() -> None: ...

    async def look():
        client = await Client.connect(temporal_server)
        queue = f"queue-{uuid.uuid4()}"
        assert not await temporal.has_workers(client, queue, since=0)
        async with Worker(client, task_queue=queue, activities=[nothing]):
            async with asyncio.timeout(30):
                while not await temporal.has_workers(client, queue, since=0):
                    await asyncio.sleep(0.05)
        assert not await temporal.has_workers(client, queue, since=datetime.now(UTC).timestamp() + 60)

    asyncio.run(look())


@pytest.mark.slow
def test_kafka_keeps_every_acknowledged_event_over_kill_9(tmp_path):
    server = new_kafka(tmp_path / "kafka")
    server.start()
    connection = KafkaConnection((server.address,))
    try:
        assert set(ensure_topics(connection)) == set(TOPICS)
        producer = EventProducer(connection)
        assert producer.publish([event("kept", number) for number in range(1, 201)]) == 200
        server.kill()
        kafka.prepare(kafka.java(), kafka.jars(), server.directory, server.port, free_port({server.port}))
        server.start()  # at another controller port: nothing stored depends on it
        assert ensure_topics(connection) == ()
        producer.publish([event("kept", 201)])  # the same producer finds the broker again
        producer.close()
        numbers = [int(record.event.id.seq) for record in EventReader(connection).read()]
        assert numbers == list(range(1, 202))
    finally:
        server.kill()


def test_no_topic_is_made_by_asking_for_it(kafka_broker):
    from kafka import KafkaAdminClient

    admin = kafka_broker.open(KafkaAdminClient, "test", timeout_s=10)
    try:
        assert set(admin.list_topics()) >= {topic.value for topic in Topic}
        admin.describe_topics(["not-there"])
        assert "not-there" not in admin.list_topics()
    finally:
        admin.close()


def test_java_that_is_missing_or_old_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ErgoError, match="there is none on the path") as caught:
        kafka.java()
    assert caught.value.code == "kafka.no-java" and "apt-get install" in caught.value.remedy
    script = tmp_path / "java"
    script.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    script.chmod(0o755)
    with pytest.raises(ErgoError, match="is Java 11, and Kafka needs 17"):
        kafka.java()


def test_jars_are_whole_or_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("ERGO_HOME", str(tmp_path / "home"))
    java = kafka.java()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(java)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    broken = tmp_path / "bin" / "mvn"
    broken.write_text("#!/bin/sh\necho '[ERROR] no route to the repository'\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(ErgoError, match="no route to the repository") as caught:
        kafka.jars()
    assert caught.value.code == "kafka.download"
    assert not kafka.installed()
    assert list((tmp_path / "home" / "kafka").iterdir()) == []
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    broken.unlink()
    with pytest.raises(ErgoError, match="no `mvn` on the path") as caught:
        kafka.jars()
    assert caught.value.code == "kafka.no-maven"


def test_a_half_made_log_directory_is_made_anew(tmp_path):
    directory = tmp_path / "kafka"
    (directory / "data.new").mkdir(parents=True)
    (directory / "data.new" / "half").write_text("")
    kafka.prepare(kafka.java(), kafka.jars(), directory, 1, 2)
    assert (directory / "data" / "meta.properties").is_file()
    assert not (directory / "data.new").exists() and not (directory / "data" / "half").exists()


def test_a_log_directory_that_cannot_be_made(tmp_path):
    blocked = tmp_path / "kafka"
    blocked.mkdir()
    (blocked / "data.new").write_text("a file where a directory should be")
    with pytest.raises(ErgoError) as caught:
        kafka.prepare(kafka.java(), kafka.jars(), blocked, 1, 2)
    assert caught.value.code == "kafka.format"
    assert not (blocked / "data").exists()


def test_the_jars_of_this_machine_are_used_again():
    assert kafka.jars(pytest.fail) == kafka.jars(pytest.fail)
    assert until(lambda: os.listdir(kafka.jars()))
