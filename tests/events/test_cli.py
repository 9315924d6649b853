"""`ergo events` on a real broker."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from events.producer import EventProducer
from events.types import CheckpointCommitted, CheckpointCommittedData
from model.ids import CheckpointId, Step
from tests.events.test_kafka import context, decided, queued

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); from cli.main import main; main()"]


@pytest.fixture
def command(kafka_broker, monkeypatch, tmp_path):
    monkeypatch.setenv("ERGO_KAFKA_BOOTSTRAP_SERVERS", str(kafka_broker))
    monkeypatch.setenv("ERGO_FLEET_DIR", str(tmp_path))
    producer = EventProducer(kafka_broker)
    data = CheckpointCommittedData(
        checkpoint=CheckpointId("ck-" + "0" * 40),
        kind="live",
        step=Step(9),
        stored_bytes=1 << 20,
        total_bytes=3 << 20,
        duration_ms=5,
        stopped_ms=40,
    )
    for job in ("cli-a", "cli-b"):
        producer.publish([queued(job, 1), decided(job, 2), CheckpointCommitted(**context(job, 3), data=data)])
    yield producer
    producer.close()


def ergo(*words):
    return subprocess.run([*LAUNCH, "events", *words], capture_output=True, text=True, timeout=60, cwd="/")


def test_the_story_of_a_job_in_order(command):
    done = ergo("--job", "cli-a")
    assert (done.returncode, done.stderr) == (0, "")
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["TIME", "JOB", "EPOCH", "WHAT", "REASON"]
    assert len(lines) == 3
    assert "cli-a" in lines[0] and "queued" in lines[0] and "Number 1." in lines[0]
    assert "decision: admit" in lines[1]
    assert "checkpoint live" in lines[2] and "1.0 of 3.0 MiB" in lines[2]


def test_columns_fit_from_the_head_on(command):
    job = "cli-with-a-name-that-is-long"
    command.publish([queued(job, 1)])
    head, line = ergo("--job", job).stdout.splitlines()
    assert head.index("EPOCH") == line.index(job) + len(job) + 2


def test_a_job_without_events(command):
    done = ergo("--job", "cli-nobody")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "ergo: no events of job cli-nobody; `ergo ps -a` lists all jobs\n"


def test_machine_readable_limited_and_by_topic(command):
    done = ergo("--json", "--job", "cli-b", "--limit", "2")
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["cli-b/run/0/2", "cli-b/run/0/3"]
    done = ergo("--json", "--job", "cli-b", "--topic", "decisions")
    assert [json.loads(line)["type"] for line in done.stdout.splitlines()] == ["ergosphere.decision.made.v1"]


def test_following_shows_what_comes_and_ends_with_ctrl_c(command):
    process = subprocess.Popen([*LAUNCH, "events", "-f", "--job", "cli-f", "--json"], stdout=subprocess.PIPE, text=True)
    try:
        command.publish([queued("cli-f", 1)])
        assert json.loads(process.stdout.readline())["subject"] == "cli-f"
        command.publish([queued("cli-f", 2)])
        assert json.loads(process.stdout.readline())["id"] == "cli-f/run/0/2"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--job", "Not A Job"), 2, "'Not A Job' is not the id of a job"),
        (("--topic", "weather"), 2, "weather"),
        (("--limit", "0"), 2, "Error"),
    ],
)
def test_wrong_words(command, words, code, message):
    done = ergo(*words)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_no_broker_is_one_sentence(command, monkeypatch):
    monkeypatch.setenv("ERGO_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:9")
    done = ergo()
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "does not answer" in done.stderr


def test_no_fleet_is_one_sentence(command, monkeypatch):
    monkeypatch.delenv("ERGO_KAFKA_BOOTSTRAP_SERVERS")
    done = ergo()
    assert (done.returncode, done.stderr) == (1, "ergo: no fleet is up: `ergo up`\n")
