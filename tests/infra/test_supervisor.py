"""The supervisor with small processes, its lock and its leash; logs."""

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.fleet import DETACH, STAY, Leash
from infra.local import processes
from infra.local.health import last_words
from infra.local.lock import FleetLock, held
from infra.local.ports import accepts, free_port, is_free
from infra.local.status import FleetStatus
from infra.local.supervisor import trim_log
from tests.infra.fixtures import until

ROOT = Path(__file__).resolve().parents[2]
# A supervisor is a process: its signal mask, and the death of its children with it, are part of what it does.
PROGRAM = """
import os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from infra.local.supervisor import Child, Supervisor
directory = Path({directory!r})
environment = dict(os.environ)
def child(name, code, **more):
    return Child(name, [sys.executable, "-c", code], environment, **more)
Supervisor(directory, {children}).run()
"""


@pytest.fixture
def supervise(tmp_path):
    (tmp_path / "logs").mkdir()
    started = []

    def start(children):
        program = PROGRAM.format(root=str(ROOT), directory=str(tmp_path), children=children)
        started.append(subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def child(directory, name):
    found = FleetStatus.read(directory)
    return found.child(name) if found else None


SLEEP = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"


def test_what_ends_is_started_again_ever_more_slowly(supervise, tmp_path):
    supervise("[child('bad', 'import time; print(time.time(), flush=True); raise SystemExit(3)')]")
    log = tmp_path / "logs" / "bad.log"
    until(lambda: log.exists() and log.read_text().count("\n") >= 4, 60)
    assert child(tmp_path, "bad").last_end == "exit code 3"
    times = [float(line) for line in log.read_text().splitlines()[:4]]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps[2] > 0.6  # the third wait is 1 s; the start of an interpreter varies by less


def test_a_program_that_is_not_there_is_told_and_disturbs_no_other(supervise, tmp_path):
    supervise(f"[Child('none', ['/not/there'], environment), child('good', {SLEEP!r})]")
    until(lambda: (found := child(tmp_path, "none")) and found.last_end, 30)
    assert "could not be started" in child(tmp_path, "none").last_end
    assert until(lambda: child(tmp_path, "good").process(), 30)


def test_a_child_waits_for_the_port_that_it_needs(supervise, tmp_path):
    port = free_port()
    server = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(600)"
    supervise(f"[child('late', {SLEEP!r}, needs=({port},))]")
    until(lambda: child(tmp_path, "late") is not None, 30)
    assert child(tmp_path, "late").starts == 0
    other = subprocess.Popen([sys.executable, "-c", server])
    try:
        until(lambda: child(tmp_path, "late").starts == 1, 30)
        assert accepts(port) and not is_free(port)
    finally:
        other.kill()
        other.wait()


def test_the_end_goes_by_stages_and_spares_nobody(supervise, tmp_path):
    note = "import signal, sys, time\ndef end(*_):\n    open({path!r}, 'a').write({name!r}); sys.exit()\n"
    note += "signal.signal(15, end); print('ready', flush=True); time.sleep(600)"
    order = str(tmp_path / "order")
    first, last = note.format(path=order, name="agent "), note.format(path=order, name="service ")
    supervisor = supervise(
        f"[child('service', {last!r}), child('agent', {first!r}, stage=2),"
        f" child('stubborn', {STUBBORN!r}, stage=1, grace_s=0.2)]"
    )
    logs = [tmp_path / "logs" / f"{name}.log" for name in ("service", "agent", "stubborn")]
    until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs), 30)
    children = FleetStatus.read(tmp_path).children
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(30) == 0
    assert Path(order).read_text() == "agent service "
    assert all(found.process() is None for found in children)
    assert FleetStatus.read(tmp_path).phase == "stopping"


def test_children_die_with_a_killed_supervisor(supervise, tmp_path):
    supervisor = supervise(f"[child('one', {SLEEP!r})]")
    found = until(lambda: (one := child(tmp_path, "one")) and one.process(), 30)
    supervisor.kill()
    until(lambda: not found.is_running() or found.status() == "zombie", 30)


def test_the_leash():
    def leash():
        read, write = os.pipe()
        return Leash(read), write

    held_one, end = leash()
    assert held_one.phase() == "starting"
    os.close(end)
    assert held_one.phase() is None

    gone, end = leash()
    os.write(end, DETACH)
    os.close(end)
    assert [gone.phase(), gone.phase()] == ["running", "running"]

    stays, end = leash()
    os.write(end, STAY)
    assert [stays.phase(), stays.phase()] == ["running", "running"]
    os.close(end)
    assert stays.phase() is None


def test_the_lock_is_of_one_and_goes_with_its_descriptor(tmp_path):
    assert not held(tmp_path)
    lock = FleetLock.take(tmp_path)
    assert FleetLock.take(tmp_path) is None and held(tmp_path)
    heir = subprocess.Popen(["sleep", "600"], pass_fds=(lock.descriptor,))
    lock.release()
    assert held(tmp_path)
    heir.kill()
    heir.wait()
    assert not held(tmp_path)


def test_processes_of_a_fleet_are_known_by_their_environment_only(tmp_path):
    marked = subprocess.Popen(["sleep", "600"], env={**os.environ, processes.MARK: str(tmp_path)})
    named = subprocess.Popen(["tail", "-f", "/dev/null", str(tmp_path / "nodes" / "log")], stderr=subprocess.DEVNULL)
    try:
        found = until(lambda: processes.of_fleet(tmp_path), 10)
        assert [process.pid for process in found] == [marked.pid]
        assert processes.end(found, grace_s=5) == []
        assert marked.poll() is not None
        assert named.poll() is None
    finally:
        for process in (marked, named):
            process.kill()
            process.wait()


def test_free_ports_are_not_those_of_outgoing_connections():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {free_port() for _ in range(20)}
    assert all(port < lowest for port in ports) or lowest < 11_000


def test_a_log_keeps_its_newest_part(tmp_path):
    log = tmp_path / "x.log"
    with log.open("ab") as writer:
        writer.write(b"a" * 100)
        writer.flush()
        trim_log(log, limit=50)
        writer.write(b"b")
    assert (log.read_bytes(), (tmp_path / "x.1.log").read_bytes()) == (b"b", b"a" * 100)
    trim_log(log, limit=50)
    assert log.read_bytes() == b"b"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("one\nlast line.\n\n", "last line"),
        ('{"event": "it failed", "error": "no disk."}\n', "no disk"),
        ('{"event": "x", "exception": "Traceback\\n  File\\nValueError: bad"}\n', "ValueError: bad"),
        ("[1]\n", "[1]"),
    ],
)
def test_last_words(tmp_path, text, words):
    (tmp_path / "log").write_text(text)
    assert last_words(tmp_path / "log") == words
    assert last_words(tmp_path / "none") == ""


def test_all_logs_are_json_lines_with_the_job():
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import logging, structlog\nfrom infra.logs import configure\nconfigure('test')\n"
        "structlog.contextvars.bind_contextvars(job='j', epoch=2)\n"
        "structlog.get_logger('a').info('ours', node='n@1')\n"
        "more = {'temporal_workflow': {'workflow_id': 'k', 'workflow_type': 'Job', 'run_id': 'r'}}\n"
        "structlog.contextvars.clear_contextvars()\n"
        "logging.getLogger('temporalio.workflow').warning('theirs %d', 1, extra=more)\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    logging.getLogger('b').exception('failed')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ours, theirs, failed = map(json.loads, done.stderr.splitlines())
    assert (ours["event"], ours["job"], ours["epoch"], ours["node"], ours["process"]) == ("ours", "j", 2, "n@1", "test")
    assert (theirs["event"], theirs["job"], theirs["workflow_run"]) == ("theirs 1", "k", "r")
    assert failed["level"] == "error" and "ZeroDivisionError" in failed["exception"]
    assert done.stdout == "" and logging.getLevelName(logging.INFO) == "INFO"
