"""`ergo up` and `ergo down`, all of it real: each part killed, bad input, interruptions, and nothing left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infra.fleet_file import FleetFile
from infra.local.lock import held
from infra.local.ports import accepts, free_port
from infra.local.processes import identity, of_fleet
from infra.local.status import FleetStatus
from tests.infra.fixtures import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); from cli.main import main; main()"]
SMALL = ["--nodes", "1", "--devices", "1"]
CHILDREN = ["temporal", "kafka", "cluster-worker", "job-worker", "node-1"]


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ERGO_FLEET", "TEMPORAL_"))}
    return {**kept, **changes}


def start(*words, **changes):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*LAUNCH, *map(str, words)], env=environment(**changes), cwd="/", **pipes)


def ergo(*words, **changes):
    process = start(*words, **changes)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def up(directory, *words, **changes):
    return ergo("up", "--fleet-dir", directory, *SMALL, *words, **changes)


def status(directory):
    return FleetStatus.read(directory)


def all_up(directory):
    found = status(directory)
    return found is not None and all(child.process() is not None for child in found.children) and found


def gone(directory):
    until(lambda: not of_fleet(directory), 60, "every process to end")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fleet") / "f"
    done = up(directory, "--json")
    assert done.returncode == 0, done.stderr
    yield directory
    ergo("down", "--fleet-dir", directory)
    gone(directory)


def test_it_says_where_everything_is(fleet):
    found = json.loads(up(fleet, "--json").stdout)
    assert found["already_up"] is True
    assert (found["nodes"], found["devices"], found["cluster"]) == (1, 1, "local")
    for port in (found["temporal_port"], found["temporal_ui_port"], found["kafka_port"]):
        assert accepts(port)
    assert {path.stem for path in (fleet / "logs").glob("*.log")} == {*CHILDREN, "supervisor"}


def test_up_again_is_success_and_other_options_are_refused(fleet):
    for again in (up(fleet), ergo("up", "--fleet-dir", fleet)):
        assert (again.returncode, "is up already: 1 node, 1 device each" in again.stderr) == (0, True)
    other = ergo("up", "--fleet-dir", fleet, "--nodes", 2, "--devices", 1)
    assert other.returncode == 1
    assert other.stderr.count("\n") == 1 and "with other options: --nodes 1 --devices 1, Temporal" in other.stderr


def test_idle_it_is_small_and_no_process_has_torch(fleet):
    processes = of_fleet(fleet)
    assert sum(process.memory_full_info().pss for process in processes) < 2 << 30
    for process in processes:
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize("name", CHILDREN)
def test_what_is_killed_comes_back_at_its_place(fleet, name):
    before = until(lambda: all_up(fleet), 60, "all to be up").child(name)
    os.kill(before.pid, signal.SIGKILL)

    def back():
        found = all_up(fleet)
        return found and found.child(name).starts > before.starts and found.child(name)

    after = until(back, 60, f"{name} to come back")
    assert "SIGKILL" in after.last_end
    again = up(fleet)
    assert again.returncode == 0, again.stderr
    file = FleetFile.read(fleet)
    until(lambda: accepts(file.temporal_port) and accepts(file.kafka_port), 60, "both servers at their ports")


def test_a_crash_of_all_is_mended_by_up(fleet):
    before, file = status(fleet), FleetFile.read(fleet)
    for pid in (before.pid, *(child.pid for child in before.children if child.pid)):
        if identity(pid):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not held(fleet), 30, "the lock to be free")
    done = ergo("up", "--fleet-dir", fleet)  # the fleet that it was, not the default one
    assert done.returncode == 0, done.stderr
    assert FleetFile.read(fleet) == file
    assert status(fleet).pid != before.pid


def test_what_a_killed_supervisor_leaves_ends_by_itself_or_by_up(fleet):
    before = until(lambda: all_up(fleet), 60, "all to be up")
    os.kill(before.pid, signal.SIGKILL)
    done = up(fleet)
    assert done.returncode == 0, done.stderr
    assert all(child.process() is None for child in before.children)


def test_down_leaves_no_process_and_up_finds_what_was_stored(fleet):
    file = FleetFile.read(fleet)
    down = ergo("down", "--fleet-dir", fleet)
    assert (down.returncode, down.stderr) == (0, "ergo: The fleet is down.\n")
    assert of_fleet(fleet) == []
    assert not any(accepts(port) for port in (file.temporal_port, file.temporal_ui_port, file.kafka_port))
    again = ergo("down", "--fleet-dir", fleet)
    assert (again.returncode, again.stderr) == (0, "ergo: No fleet is up.\n")
    asked = ergo("events", ERGO_FLEET_DIR=str(fleet))
    assert asked.returncode == 1 and "does not answer" in asked.stderr
    assert up(fleet).returncode == 0
    assert FleetFile.read(fleet) == file
    assert ergo("events", ERGO_FLEET_DIR=str(fleet)).returncode == 0


def test_a_damaged_part_is_one_sentence_with_its_last_words(tmp_path):
    directory = tmp_path / "f"
    assert up(directory).returncode == 0
    assert ergo("down", "--fleet-dir", directory).returncode == 0
    (directory / "temporal" / "temporal.db").write_bytes(b"not a database, and long enough to be taken for one" * 100)
    for path in (directory / "temporal").glob("*-*"):
        path.unlink()
    done = up(directory)
    assert done.returncode == 1
    assert "The Temporal ends again and again" in done.stderr
    assert of_fleet(directory) == []
    assert (directory / "store").is_dir()  # what was there before stays
    purged = ergo("down", "--purge", "--fleet-dir", directory)
    assert (purged.returncode, directory.exists()) == (0, False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_up_leaves_nothing(tmp_path, number):
    directory = tmp_path / "f"
    process = start("up", "--fleet-dir", directory, *SMALL)
    until(lambda: (found := status(directory)) and found.child("kafka").pid, 120, "Kafka to be started")
    busy = up(directory)
    assert busy.returncode == 1 and "just bringing the fleet" in busy.stderr
    process.send_signal(number)
    process.communicate(timeout=120)
    gone(directory)
    if number == signal.SIGKILL:  # nobody was left to clear away the files; the next one does
        assert not held(directory)
        assert process.returncode == -9
    else:
        assert process.returncode == 128 + number
        assert not directory.exists()


def test_in_the_foreground_it_ends_with_its_command(tmp_path):
    directory = tmp_path / "f"
    process = start("up", "--foreground", "--json", "--fleet-dir", directory, *SMALL)
    assert json.loads(process.stdout.readline())["nodes"] == 1
    assert len(of_fleet(directory)) >= len(CHILDREN)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 143
    assert of_fleet(directory) == []
    assert FleetFile.read(directory) is not None  # it was up: what it has stored stays


def test_without_java_nothing_is_begun(tmp_path):
    (tmp_path / "bin").mkdir()
    done = up(tmp_path / "f", PATH=str(tmp_path / "bin"), JAVA_HOME="")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "Kafka needs Java" in done.stderr and "apt-get install" in done.stderr
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("option", ["--temporal-port", "--ui-port", "--kafka-port"])
def test_a_port_that_is_taken_is_told(tmp_path, option):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        done = up(tmp_path / "f", option, port)
    assert done.returncode == 1
    assert f"Port {port}, asked for" in done.stderr and option in done.stderr
    assert not (tmp_path / "f").exists()


def test_a_directory_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    done = up(tmp_path)
    assert done.returncode == 1 and "it holds 'thesis.tex'" in done.stderr
    purged = ergo("down", "--purge", "--fleet-dir", tmp_path)
    assert purged.returncode == 1 and "it holds 'thesis.tex'" in purged.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_secret_that_is_gone_is_not_replaced(tmp_path):
    directory = tmp_path / "f"
    (directory / "store" / "records").mkdir(parents=True)
    (directory / "store" / "records" / "1.json").write_text("{}")
    done = up(directory)
    assert done.returncode == 1 and "secret" in done.stderr and "--purge" in done.stderr
    assert (directory / "store" / "records" / "1.json").exists()


def test_an_outside_temporal_is_used_and_not_ended(tmp_path, temporal_server):
    directory = tmp_path / "f"
    done = up(directory, TEMPORAL_ADDRESS=temporal_server)
    try:
        assert done.returncode == 0, done.stderr
        file = FleetFile.read(directory)
        assert (file.temporal_address, file.temporal_port) == (temporal_server, None)
        assert status(directory).child("temporal") is None
    finally:
        assert ergo("down", "--fleet-dir", directory).returncode == 0
    assert accepts(int(temporal_server.rpartition(":")[2]))
