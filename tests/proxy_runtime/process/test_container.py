"""Containers: what is inside, how a rank ends, and that nothing is ever left."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from proxy_runtime.process import proc
from proxy_runtime.process.namespace import (
    ContainerError,
    ContainerSpec,
    ExitStatus,
    Overlay,
    hold_volume,
    launch,
)

ROOT = Path(__file__).parents[3]


def described(lab, **changes):
    container = lab.launch(lab.spec("describe", **changes))
    assert container.wait(30) == ExitStatus(0)
    return json.loads(lab.lines()[0])


def test_a_rank_sees_only_its_container(lab, tmp_path):
    reader, writer = os.pipe()
    leaked = os.open("/etc/hostname", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    try:
        seen = described(lab, keep_fd=writer, cwd=tmp_path, env={"COLOUR": "blue"})
    finally:
        for fd in (reader, writer, leaked):
            os.close(fd)
    assert (seen["pid"], seen["ppid"], seen["session"]) == (1000, 999, 999)
    assert seen["pids"] == [1, 999, 1000]
    assert seen["cwd"] == str(tmp_path)
    assert seen["env"]["COLOUR"] == "blue"
    assert "HOME" not in seen["env"]
    assert seen["shm"] == []
    assert seen["interfaces"] == ["lo"]
    assert int(seen["personality"], 16) & 0x0040000
    descriptors = {int(fd): target for fd, target in seen["descriptors"].items()}
    assert descriptors.pop(writer).startswith("pipe:")
    assert descriptors == {0: "/dev/null", 1: str(lab.log), 2: str(lab.log)}


def test_address_randomization_and_host_network_are_options(lab):
    seen = described(lab, no_aslr=False, network="host", first_pid=77)
    assert int(seen["personality"], 16) & 0x0040000 == 0
    assert seen["pid"] == 77
    host = {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}
    assert set(seen["interfaces"]) == host


def test_the_log_is_appended_to(lab):
    lab.log.write_text("before\n")
    assert lab.launch(lab.spec("count", "2")).wait(30) == ExitStatus(7)
    assert lab.lines() == ["before", "0", "1"]


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 0", ExitStatus(0)),
        ("exit 3", ExitStatus(3)),
        ("kill -9 $$", ExitStatus(137, signal.SIGKILL)),
        ("kill -11 $$", ExitStatus(139, signal.SIGSEGV)),
    ],
)
def test_how_a_rank_ends(lab, script, status):
    container = lab.launch(ContainerSpec(argv=("/bin/sh", "-c", script)))
    assert container.wait(30) == status
    assert container.poll() == status
    container.kill()
    assert container.poll() == status


def test_signals_reach_the_rank_and_the_status_can_be_selected(lab):
    container = lab.launch(lab.spec("count"))
    lab.wait_lines(1)
    assert container.poll() is None
    assert container.wait(0.01) is None
    with selectors.DefaultSelector() as selector:
        selector.register(container, selectors.EVENT_READ)
        assert selector.select(0) == []
        container.signal(signal.SIGTERM)
        assert selector.select(30) != []
    assert container.wait(5) == ExitStatus(143, signal.SIGTERM)
    with pytest.raises(ProcessLookupError):
        container.signal(signal.SIGTERM)


def test_what_the_launcher_ignores_and_blocks_is_its_own(lab):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        command = ("/bin/sh", "-c", "grep -E '^Sig(Ign|Blk)' /proc/self/status")
        assert lab.launch(ContainerSpec(argv=command, log=lab.log, env={"PATH": "/bin"})).wait(30) == ExitStatus(0)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGINT, before)
    # Signals 32 and 33 are the C library's own: it lets nobody set them, and a test runner may have passed one on.
    reserved = 1 << 31 | 1 << 32
    assert [int(line.split()[1], 16) & ~reserved for line in lab.lines()] == [0, 0]


def test_sigterm_to_pid_one_is_forwarded(lab):
    container = lab.launch(lab.spec("count"))
    lab.wait_lines(1)
    os.kill(container.init_pid, signal.SIGTERM)
    assert container.wait(30) == ExitStatus(143, signal.SIGTERM)


def test_kill_ends_the_whole_family(lab):
    container = lab.launch(lab.spec("family"))
    lab.wait_lines(1)
    family = container.processes()
    assert len(family) == 3
    assert container.rank_pid in family
    assert container.init_pid not in family
    container.kill()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in [container.init_pid, *family])
    assert container.poll() == ExitStatus(137, signal.SIGKILL, lost=True)
    container.kill()


def test_when_the_rank_ends_so_do_its_daemons(lab, until):
    container = lab.launch(lab.spec("family"))
    lab.wait_lines(1)
    family = container.processes()
    container.signal(signal.SIGKILL)
    assert container.wait(30) == ExitStatus(137, signal.SIGKILL)
    until(lambda: not any(lab.alive(pid) for pid in family), "the daemons are gone")


def test_death_of_pid_one_is_reported(lab):
    container = lab.launch(lab.spec("count"))
    os.kill(container.init_pid, signal.SIGKILL)
    assert container.wait(30) == ExitStatus(137, signal.SIGKILL, lost=True)


LAUNCHER = """
    import sys, threading, time
    from proxy_runtime.process.namespace import ContainerSpec, launch
    spec = ContainerSpec(argv=("/bin/sh", "-c", "sleep 1000 & sleep 1000"))
    def work():
        container = launch(sys.argv[1], spec)
        containers.append(container)
        print(container.init_pid, container.rank_pid, container._first_stage.pid, flush=True)
    containers = []
    thread = threading.Thread(target=work); thread.start(); thread.join()
    {then}
"""


def launcher(init_binary, then):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LAUNCHER.format(then=then)), str(init_binary)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def test_a_killed_launcher_leaves_nothing(init_binary, until):
    process, pids = launcher(init_binary, "time.sleep(1000)")
    until(lambda: len(proc.descendants(pids[0])) >= 2, "the shell has started a child")
    pids += proc.descendants(pids[0])
    process.kill()
    process.wait()
    until(lambda: not any(proc.status_field(pid, "State")[:1] not in ("", "Z") for pid in pids), "all are gone")


def test_the_end_of_the_launching_thread_ends_nothing(init_binary):
    process, pids = launcher(init_binary, "print(containers[0].wait(1.0), flush=True); containers[0].kill()")
    assert process.communicate()[0].strip() == "None"
    assert process.returncode == 0
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_launcher_that_forgets_leaves_nothing(init_binary, until):
    process, pids = launcher(init_binary, "pass")
    process.wait()
    until(lambda: not any(proc.status_field(pid, "State")[:1] not in ("", "Z") for pid in pids), "all are gone")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"argv": ("no-such-program",)}, "cannot execute no-such-program: No such file"),
        ({"cwd": "/no/such/directory"}, "cannot enter the directory /no/such/directory"),
        ({"log": "/no/such/log"}, "cannot open the log /no/such/log"),
        ({"binds": ((Path("/no/such"), Path("/mnt")),)}, "cannot bind on /mnt"),
        ({"overlay": Overlay(Path("/no/a"), Path("/no/b"), Path("/no/c"), Path("/mnt"))}, "overlay on /mnt"),
    ],
)
def test_what_cannot_be_made_says_why(init_binary, changes, words):
    with pytest.raises(ContainerError, match=words) as caught:
        launch(init_binary, ContainerSpec(**{"argv": ("/bin/true",), **changes}))
    assert caught.value.code == "container.setup"


def test_a_missing_init_says_so(tmp_path):
    with pytest.raises(ContainerError) as caught:
        launch(tmp_path / "init", ContainerSpec(argv=("/bin/true",)))
    assert caught.value.code == "container.no-init"


def test_without_privileges_it_says_so(init_binary):
    script = f"""
        import os
        from proxy_runtime.process.namespace import ContainerError, ContainerSpec, launch
        os.setgid(65534); os.setuid(65534)
        try:
            launch({str(init_binary)!r}, ContainerSpec(argv=("/bin/true",)))
        except ContainerError as error:
            print(error.code)
    """
    for path in (init_binary, *init_binary.parents):
        path.chmod(0o755)
        if path.name.startswith("pytest-of-"):
            break
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "container.not-permitted", result.stderr


@pytest.mark.parametrize("changes", [{"network": "bridge"}, {"keep_fd": 1}, {"first_pid": 2}])
def test_a_spec_is_checked(changes):
    with pytest.raises(ValueError, match="must"):
        ContainerSpec(argv=("/bin/true",), **changes)


def make_overlay(base: Path, mountpoint: Path) -> Overlay:
    for name in ("upper", "work"):
        (base / name).mkdir(parents=True)
    mountpoint.mkdir(exist_ok=True)
    return Overlay(mountpoint, base / "upper", base / "work", mountpoint)


@pytest.mark.parametrize("name", ["job", "odd,na:me\\here"])
def test_an_overlay_at_the_jobs_own_path(lab, tmp_path, name):
    job = tmp_path / name
    job.mkdir()
    (job / "input").write_text("original")
    overlay = make_overlay(tmp_path / f"layers {name}", job)
    container = lab.launch(
        ContainerSpec(argv=("/bin/sh", "-c", "cat input; echo changed >input; echo new >output"), cwd=job,
                      overlay=overlay, log=lab.log, env={"PATH": "/bin:/usr/bin"})
    )  # fmt: skip
    assert container.wait(30) == ExitStatus(0), lab.lines()
    assert lab.lines() == ["original"]
    assert (job / "input").read_text() == "original"
    assert not (job / "output").exists()
    assert (overlay.upper / "input").read_text() == "changed\n"
    assert (overlay.upper / "output").exists()


def test_containers_share_a_held_volume(lab, tmp_path, init_binary):
    job = tmp_path / "job"
    overlay = make_overlay(tmp_path / "layers", job)
    with hold_volume(init_binary, overlay) as volume:
        env = {"PATH": "/bin:/usr/bin"}
        first = ContainerSpec(argv=("/bin/sh", "-c", "echo hello >greeting"), cwd=job, env=env)
        second = ContainerSpec(argv=("/bin/cat", "greeting"), cwd=job, env=env, log=lab.log)
        assert lab.launch(first, mounts_of=volume).wait(30) == ExitStatus(0)
        assert lab.launch(second, mounts_of=volume).wait(30) == ExitStatus(0)
        assert lab.lines() == ["hello"]
        pid = volume.init_pid
    assert not os.path.exists(f"/proc/{pid}")
    assert str(job) not in Path("/proc/self/mounts").read_text()
    assert not (job / "greeting").exists()


def test_many_threads_may_launch_at_once(lab):
    def work() -> None:
        container = lab.launch(ContainerSpec(argv=("/bin/sh", "-c", "exit 5")))
        assert container.init_pid
        assert container.rank_pid
        results.append(container.wait(60))

    results: list[ExitStatus | None] = []
    threads = [threading.Thread(target=work) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [ExitStatus(5)] * 24
