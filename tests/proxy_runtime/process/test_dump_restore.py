"""Real dumps and restores with the machine's CRIU."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from proxy_runtime.process import criu as criu_module
from proxy_runtime.process import inspect, proc, rpc
from proxy_runtime.process.criu import CriuError
from proxy_runtime.process.namespace import ContainerSpec, ExitStatus, Overlay, hold_volume


def numbers(lab) -> list[int]:
    return [int(line) for line in lab.lines()]


def states(container) -> set[str]:
    return {proc.status_field(pid, "State")[:1] for pid in container.processes()}


def test_a_loop_goes_on_in_place_and_elsewhere(lab):
    spec = lab.spec("count", "400")
    container = lab.launch(spec)
    lab.wait_lines(10)
    seen = []

    def on_frozen() -> None:
        seen.append((len(lab.lines()), states(container)))

    report = lab.dump(container, on_frozen=on_frozen)
    assert seen[0][1] == {"t"}
    assert report.pages > 100
    assert report.bytes > report.pages * 4096 * 0.9
    assert 0 < report.memwrite_ms <= report.frozen_ms <= report.wall_ms
    assert stat.S_IMODE(lab.images.stat().st_mode) == 0o700
    lab.wait_lines(seen[0][0] + 10)  # it runs on
    container.kill()
    lab.log.write_text("".join(f"{number}\n" for number in numbers(lab)[: seen[0][0]]))  # the volume at the cut

    restored = lab.restore(spec)
    assert restored.wait(60) == ExitStatus(7)
    assert numbers(lab) == list(range(400))


def test_many_generations(lab):
    spec = lab.spec("count", "2000")
    container = lab.launch(spec)
    for _ in range(4):
        lab.wait_lines(len(lab.lines()) + 3)
        cut = []
        lab.dump(container, on_frozen=lambda cut=cut: cut.append(len(lab.lines())))
        container.kill()
        lab.log.write_text("".join(f"{number}\n" for number in numbers(lab)[: cut[0]]))
        container = lab.restore(spec)
        assert proc.pid_inside(container.rank_pid) == 1000
    lab.wait_lines(len(lab.lines()) + 3)
    assert numbers(lab) == list(range(len(numbers(lab))))


def test_restored_and_paused(lab, until):
    spec = lab.spec("count")
    container = lab.launch(spec)
    lab.wait_lines(5)
    lab.dump(container)
    container.kill()
    before = len(lab.lines())
    seen = []

    def on_paused(paused) -> None:
        status = (paused.rank_pid, paused.poll(), states(paused))
        until(lambda: proc.status_field(paused.rank_pid, "State")[:1] == "t", "stopped")
        seen.append((status, len(lab.lines())))

    restored = lab.restore(spec, on_paused=on_paused)
    assert seen == [((restored.rank_pid, None, {"t"}), before)]
    lab.wait_lines(before + 3)
    assert proc.status_field(restored.rank_pid, "PPid") == str(restored.keeper_pid)
    assert proc.status_field(restored.keeper_pid, "PPid") == str(restored.init_pid)
    restored.signal(signal.SIGTERM)
    assert restored.wait(30) == ExitStatus(143, signal.SIGTERM)


def test_a_veto_when_paused_kills_everything(lab):
    spec = lab.spec("family")
    container = lab.launch(spec)
    lab.wait_lines(1)
    lab.dump(container)
    container.kill()
    pids = []

    def on_paused(paused) -> None:
        pids.extend([paused.init_pid, *proc.in_pid_namespace_of(paused.init_pid)])
        raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        lab.restore(spec, on_paused=on_paused)
    assert len(pids) >= 6  # pid 1, keeper, three of the family, CRIU
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_veto_when_frozen_lets_it_live(lab):
    container = lab.launch(lab.spec("count"))
    lab.wait_lines(5)

    def on_frozen() -> None:
        raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        lab.dump(container, on_frozen=on_frozen)
    lab.wait_lines(len(lab.lines()) + 5)
    assert lab.dump(container).pages > 0


def test_a_tree_held_while_frozen_stays_held(lab, until):
    """The shim stops a job that is to move for good in the hook; the dump must not wake it, nor the image know it."""
    spec = lab.spec("family")
    container = lab.launch(spec)
    lab.wait_lines(1)

    def hold() -> None:
        for pid in container.processes():
            os.kill(pid, signal.SIGSTOP)

    lab.dump(container, on_frozen=hold)
    until(lambda: states(container) == {"T"}, "all stopped")
    container.kill()
    restored = lab.restore(spec)
    until(lambda: states(restored) == {"S"}, "all sleeping")


def test_a_family_and_its_daemons_travel(lab, until):
    spec = lab.spec("family")
    container = lab.launch(spec)
    lab.wait_lines(1)
    inside = sorted(proc.pid_inside(pid) for pid in container.processes())
    assert len(inside) == 3
    lab.dump(container)
    container.kill()
    restored = lab.restore(spec)
    assert sorted(proc.pid_inside(pid) for pid in restored.processes()) == inside
    daemon = next(pid for pid in restored.processes() if proc.pid_inside(pid) == inside[-1])
    assert proc.status_field(daemon, "PPid") == str(restored.keeper_pid)
    # The keeper takes care of later daemons too: the next dump has them.
    restored.signal(signal.SIGUSR2)
    until(lambda: len(restored.processes()) == 4 and len(proc.children(restored.keeper_pid)) == 3, "a new daemon")
    assert inspect.violations(restored) == []
    lab.dump(restored)
    restored.kill()
    restored = lab.restore(spec)
    assert len(restored.processes()) == 4
    restored.signal(signal.SIGUSR1)  # pid 1 learns how the rank ends, after restores too
    assert restored.wait(30) == ExitStatus(128 + signal.SIGUSR1, signal.SIGUSR1)


def ring_words(path: Path | None) -> tuple[int, mmap.mmap]:
    assert path is not None
    fd = os.open(path, os.O_RDWR)
    try:
        return os.fstat(fd).st_size, mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def test_a_mapped_memfd_travels_and_can_be_opened_from_outside(lab, until):
    size = 1 << 20
    fd = os.memfd_create("ergo-ring")
    os.ftruncate(fd, size)
    ours = mmap.mmap(fd, size)
    spec = lab.spec("ring", str(fd), keep_fd=fd)
    container = lab.launch(spec)
    os.close(fd)
    lab.wait_lines(1)
    assert inspect.violations(container) == []
    assert inspect.maps_ring(container.rank_pid)
    assert struct.unpack_from("<Q", ours, size - 8) == (0xC0FFEE,)

    struct.pack_into("<Q", ours, 8, 5)
    until(lambda: ours[0] == 5, "five counted")
    lab.dump(container, on_frozen=lambda: struct.pack_into("<Q", ours, 8, 3))  # after the memory was read: lost
    container.kill()
    found = []

    def on_paused(paused) -> None:
        path = inspect.mapped_memfd(paused.rank_pid, "ergo-ring")
        assert path is not None
        length, words = ring_words(path)
        found.append((length, *struct.unpack_from("<QQ", words), *struct.unpack_from("<Q", words, size - 8)))
        struct.pack_into("<Q", words, 8, 2)  # what is written here is seen when it runs

    restored = lab.restore(replace(spec, keep_fd=None), on_paused=on_paused)
    assert found == [(size, 5, 0, 0xC0FFEE)]
    _, words = ring_words(inspect.mapped_memfd(restored.rank_pid, "ergo-ring"))
    until(lambda: words[0] == 7, "seven counted")
    assert inspect.violations(restored) == []
    ours[0] = 99  # the old ring is another one
    assert words[0] == 7


def test_files_of_the_volume_travel(lab, tmp_path, init_binary, until):
    job = tmp_path / "job"
    (job / "old-directory").mkdir(parents=True)
    (job / "old-directory" / "kept").write_text("kept")
    (job / "lower.bin").write_bytes(bytes(8192))
    victim = lab.spec("files", cwd=job, log=job / "log")
    lab = replace(lab, directory=tmp_path)

    def overlay(generation: int) -> Overlay:
        base = tmp_path / f"layers-{generation}"
        base.mkdir(exist_ok=True)
        for name in ("upper", "work"):
            (base / name).mkdir(exist_ok=True)
        return Overlay(job, base / "upper", base / "work", job)

    def logged(generation: int) -> list[str]:
        path = overlay(generation).upper / "log"
        return path.read_text().splitlines() if path.exists() else []

    with hold_volume(init_binary, overlay(0)) as volume:
        container = lab.launch(victim, mounts_of=volume)
        until(lambda: len(logged(0)) >= 10, "ten numbers")
        upper = overlay(0).upper

        def capture() -> None:
            (tmp_path / "layers-1").mkdir()
            os.system(f"cp -a {upper} {tmp_path / 'layers-1'}")

        lab.dump(container, on_frozen=capture)
        container.kill()
    cut = len(logged(1))
    assert cut >= 10
    with hold_volume(init_binary, overlay(1)) as volume:
        restored = lab.restore(victim, mounts_of=volume)
        until(lambda: len(logged(1)) >= cut + 10, "ten more numbers")
        root = Path(f"/proc/{restored.init_pid}/root{job}")
        assert (root / "new-directory" / "kept").read_text() == "kept"
        assert not (root / "old-directory").exists()
        assert os.system(f"flock -n {root}/journal true") != 0  # the lock came along
        restored.kill()
    counted = [str(number) for number in range(len(logged(1)))]
    assert logged(1) == counted
    journal = (overlay(1).upper / "journal").read_text().splitlines()
    assert journal[: len(counted)] == counted
    assert len(journal) - len(counted) in (0, 1)
    assert (job / "lower.bin").read_bytes() == bytes(8192)


def test_a_volume_mounted_by_the_container_itself(lab, tmp_path, until):
    job = tmp_path / "job"
    overlay = Overlay(job, tmp_path / "upper", tmp_path / "work", job)
    for path in (overlay.lower, overlay.upper, overlay.work):
        path.mkdir()
    spec = lab.spec("count", cwd=job, overlay=overlay, log=job / "log")
    log = overlay.upper / "log"
    container = lab.launch(spec)
    until(lambda: log.exists() and log.read_text().count("\n") > 5, "five numbers")
    lab.dump(container)
    container.kill()
    lab.restore(spec)
    count = log.read_text().count("\n")
    until(lambda: log.read_text().count("\n") > count + 5, "five more")


def test_a_listening_socket_travels(lab, until):
    spec = lab.spec("listener")
    container = lab.launch(spec)
    lab.wait_lines(5)
    shm = Path(f"/proc/{container.init_pid}/root/dev/shm")
    (shm / "hold").touch()
    until((shm / "held").exists, "the client holds still")
    until(lambda: inspect.violations(container) == [], "no connection")
    lab.dump(container)
    container.kill()
    count = len(lab.lines())

    def on_paused(paused) -> None:
        restored_shm = Path(f"/proc/{paused.init_pid}/root/dev/shm")
        assert sorted(os.listdir(restored_shm)) == ["held", "hold"]  # what was in it travelled too
        (restored_shm / "hold").unlink()

    restored = lab.restore(spec, on_paused=on_paused)
    lab.wait_lines(count + 5)
    assert numbers(lab) == list(range(len(numbers(lab))))
    assert [str(found) for found in inspect.inet_sockets(restored.rank_pid) if not found.connected] == [
        "tcp port 5555 to port 0"
    ]


def test_a_connection_is_found_and_refused(lab):
    container = lab.launch(lab.spec("listener", "keep"))
    lab.wait_lines(1)
    found = inspect.violations(container)
    assert len(found) == 2
    assert all("holds a connection" in sentence and "5555" in sentence for sentence in found)
    assert inspect.violations(container, allowed_ports=[5555]) == []
    with pytest.raises(CriuError, match="open TCP connection") as caught:
        lab.dump(container)
    assert caught.value.code == "criu.tcp-connection"
    assert lab.alive(container.rank_pid)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "persistent"), [("fork", "1"), ("fork", "0"), ("spawn", "1")])
def test_data_loader_workers_travel(lab, method, persistent, until):
    spec = lab.spec("loader", method, persistent, "300000")
    reference = lab.launch(replace(spec, log=lab.directory / "reference"))
    assert reference.wait(240) == ExitStatus(0)
    container = lab.launch(spec)
    for at in (3, 20):
        lab.wait_lines(at)
        cut = []
        lab.dump(container, on_frozen=lambda cut=cut: cut.append(lab.log.read_bytes()))
        container.kill()
        lab.log.write_bytes(cut[0])
        container = lab.restore(spec)
    assert container.wait(240) == ExitStatus(0)
    assert lab.log.read_text() == (lab.directory / "reference").read_text()


def test_a_ghost_file_that_is_too_large_says_so(lab):
    code = (
        "import os,sys,time; f=open('/dev/shm/big','wb'); f.write(bytes(3<<20)); f.flush(); "
        "os.unlink('/dev/shm/big'); print('up',flush=True); time.sleep(1000)"
    )
    spec = lab.spec("count", env={})
    container = lab.launch(replace(spec, argv=(spec.argv[0], "-c", code)))
    lab.wait_lines(1)
    with pytest.raises(CriuError) as caught:
        lab.dump(container, ghost_limit=1 << 20)
    assert caught.value.code == "criu.ghost-file"
    lab.dump(container)


def rank_running(lab, code: str):
    """A container whose rank runs a piece of Python that then says `up` and sleeps."""
    spec = lab.spec("count")
    code += "\nimport time; print('up', flush=True); time.sleep(1000)"
    container = lab.launch(replace(spec, argv=(spec.argv[0], "-c", code)))
    lab.wait_lines(1)
    return container


def test_ranks_of_a_job_are_frozen_and_restored_together(lab):
    """The shim's way: all wait for each other in the hooks, from threads that end afterwards."""
    labs = [replace(lab, directory=lab.directory / str(rank)) for rank in range(3)]
    for each in labs:
        each.directory.mkdir()
    specs = [each.spec("count") for each in labs]
    containers = [each.launch(spec) for each, spec in zip(labs, specs, strict=True)]
    for each in labs:
        each.wait_lines(3)
    frozen, paused = threading.Barrier(3), threading.Barrier(3)
    cut: dict[Path, bytes] = {}

    def dump(each, container) -> None:
        def on_frozen() -> None:
            frozen.wait(60)
            cut[each.log] = each.log.read_bytes()
            frozen.wait(60)

        each.dump(container, on_frozen=on_frozen)

    def together(work, *arguments) -> list:
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(work, *arguments))

    together(dump, labs, containers)
    for container in containers:
        container.kill()
    for log, content in cut.items():
        log.write_bytes(content)
    restored = together(lambda each, spec: each.restore(spec, on_paused=lambda _: paused.wait(60)), labs, specs)
    for each in labs:
        each.wait_lines(cut[each.log].count(b"\n") + 3)
        assert numbers(each) == list(range(len(numbers(each))))
    assert [container.poll() for container in restored] == [None] * 3


@pytest.mark.parametrize("accepted", [True, False])
def test_a_connection_to_the_outside_is_refused(lab, tmp_path, accepted):
    with socket.socket(socket.AF_UNIX) as server:
        path = os.path.relpath(tmp_path / "s")  # a short name
        server.bind(path)
        server.listen()
        container = rank_running(
            lab, f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(tmp_path / 's')!r})"
        )
        peer = server.accept()[0] if accepted else None
        with pytest.raises(CriuError) as caught:
            lab.dump(container)
        if peer is not None:
            peer.close()
    assert caught.value.code == "criu.unix-connection"
    assert lab.alive(container.rank_pid)


def test_io_uring_is_found_and_refused(lab):
    code = "import ctypes; l = ctypes.CDLL(None); fd = l.syscall(425, 4, (ctypes.c_char * 120)()); assert fd > 0"
    container = rank_running(lab, code)
    (sentence,) = inspect.violations(container)
    assert "uses io_uring" in sentence
    with pytest.raises(CriuError) as caught:
        lab.dump(container)
    assert caught.value.code in ("criu.io-uring", "criu.unsupported-file")
    assert lab.alive(container.rank_pid)


def test_a_full_disk_is_said_and_the_tree_lives(lab, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], check=True)
    try:
        container = lab.launch(lab.spec("memory", "20"))
        lab.wait_lines(2)
        with pytest.raises(CriuError) as caught:
            criu_module.dump(lab.tool, container, small / "images", deadline_s=60)
        assert caught.value.code == "criu.disk-full", caught.value
        lab.wait_lines(len(lab.lines()) + 3)
        container.kill()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_images_that_the_container_cannot_see(lab, tmp_path):
    hidden = tmp_path / "hidden"
    for name in ("hidden", "cover"):
        (tmp_path / name).mkdir()
    container = lab.launch(lab.spec("count", binds=((tmp_path / "cover", hidden),)))
    with pytest.raises(CriuError) as caught:
        criu_module.dump(lab.tool, container, hidden)
    assert caught.value.code == "criu.images-hidden"


def test_a_missing_file_is_named(lab, tmp_path):
    needed = tmp_path / "needed"
    needed.write_text("x")
    code = f"import time; f=open({str(needed)!r}); print('up',flush=True); time.sleep(1000)"
    spec = lab.spec("count")
    spec = replace(spec, argv=(spec.argv[0], "-c", code))
    container = lab.launch(spec)
    lab.wait_lines(1)
    lab.dump(container)
    container.kill()
    needed.unlink()
    with pytest.raises(CriuError, match="needed") as caught:
        lab.restore(spec)
    assert caught.value.code == "criu.file-missing"
    needed.write_text("longer")
    with pytest.raises(CriuError, match="needed") as caught:
        lab.restore(spec)
    assert caught.value.code == "criu.file-differs"


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_damaged_images_end_in_an_error_and_nothing_is_left(lab, damage, monkeypatch):
    spec = lab.spec("count")
    container = lab.launch(spec)
    lab.wait_lines(1)
    lab.dump(container)
    container.kill()
    pages = next(lab.images.glob("pages-*.img"))
    if damage == "truncate":
        os.truncate(pages, pages.stat().st_size // 2)  # CRIU itself would loop for ever
    else:
        next(lab.images.glob("core-*.img")).unlink()
    restored = Restored(monkeypatch)
    with pytest.raises(CriuError) as caught:
        lab.restore(spec, deadline_s=3)
    assert caught.value.code in ("criu.deadline", "criu.image-damaged", "criu.file-missing", "criu.failed")
    assert restored.namespaces
    assert restored.left() == []


def test_a_rank_that_has_ended_cannot_be_dumped(lab):
    container = lab.launch(ContainerSpec(argv=("/bin/true",)))
    container.wait(30)
    with pytest.raises(CriuError) as caught:
        lab.dump(container)
    assert caught.value.code == "criu.gone"


def test_a_tool_that_is_none(lab, tmp_path):
    container = lab.launch(lab.spec("count"))
    for content, code in (("#!/bin/sh\nexit 1\n", "criu.died"), ("#!/bin/sh\nexec sleep 1000\n", "criu.deadline")):
        fake = tmp_path / "criu"
        fake.write_text(content)
        fake.chmod(0o755)
        with pytest.raises(CriuError) as caught:
            replace(lab, tool=replace(lab.tool, path=fake)).dump(container, deadline_s=0.5, grace_s=0.5)
        assert caught.value.code == code
    assert len(proc.in_pid_namespace_of(container.init_pid)) == 3
    lab.wait_lines(len(lab.lines()) + 3)


class Restored:
    """Records the pid namespaces that restores make, to find what is left in them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.namespaces: set[int] = set()
        original = criu_module.launch_empty

        def launch_empty(*args, **kwargs):
            container = original(*args, **kwargs)
            self.namespaces.add(os.stat(f"/proc/{container.init_pid}/ns/pid").st_ino)
            return container

        monkeypatch.setattr(criu_module, "launch_empty", launch_empty)

    def left(self) -> list[int]:
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if os.stat(f"/proc/{pid}/ns/pid").st_ino in self.namespaces:
                    found.append(int(pid))
        return found


class KillCriu:
    """Kills CRIU as soon as something is so during a session."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, moment: Callable[[], bool]) -> None:
        original = rpc.Session.call

        def call(session, request, on_notify=None):
            ended = threading.Event()

            def watch() -> None:
                while not ended.wait(0.001):
                    if moment():
                        session.kill()
                        return

            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                return original(session, request, on_notify)
            finally:
                ended.set()
                watcher.join()

        monkeypatch.setattr(rpc.Session, "call", call)


def test_criu_killed_in_mid_dump_leaves_the_tree_running(lab, monkeypatch):
    """Killed while it writes pages, for which it has stopped the tree and put its own code into it."""
    spec = lab.spec("memory", "200")
    container = lab.launch(spec)
    lab.wait_lines(5)

    def written() -> int:
        return sum(path.stat().st_size for path in lab.images.glob("pages-*.img"))

    for megabytes in (0, 20, 60):
        with monkeypatch.context() as patch:
            KillCriu(patch, lambda megabytes=megabytes: written() > megabytes << 20)
            with pytest.raises(CriuError) as caught:
                lab.dump(container)
        assert caught.value.code == "criu.died"
        assert proc.status_field(container.rank_pid, "TracerPid") == "0"
        assert len(proc.in_pid_namespace_of(container.init_pid)) == 3
        lab.wait_lines(len(lab.lines()) + 3)
    cut = []
    lab.dump(container, on_frozen=lambda: cut.append(lab.log.read_bytes()))
    container.kill()
    lab.log.write_bytes(cut[0])
    lab.restore(spec)
    lab.wait_lines(len(cut[0].splitlines()) + 3)
    assert numbers(lab) == list(range(len(numbers(lab))))


@pytest.mark.slow
def test_criu_killed_in_mid_restore_leaves_nothing(lab, monkeypatch):
    spec = lab.spec("memory", "300")
    container = lab.launch(spec)
    lab.wait_lines(5)
    lab.dump(container)
    container.kill()
    made = Restored(monkeypatch)
    killed = 0
    for attempt in range(8):
        with monkeypatch.context() as patch:
            moment = time.monotonic() + 0.15 + 0.03 * attempt
            KillCriu(patch, lambda moment=moment: time.monotonic() > moment)
            try:
                restored = lab.restore(spec)
                restored.kill()
            except CriuError as error:
                assert error.code == "criu.died"
                killed += 1
    assert killed >= 3
    assert len(made.namespaces) > 1
    assert made.left() == []


@pytest.mark.parametrize("times", [1, 2])
def test_a_process_that_was_just_exiting_is_tried_once_more(lab, monkeypatch, times):
    container = lab.launch(lab.spec("count"))
    original, calls = criu_module._call, []

    def call(*arguments, **options):
        calls.append(arguments)
        if len(calls) <= times:
            raise CriuError("zombies with threads", code="criu.exiting")
        original(*arguments, **options)

    monkeypatch.setattr(criu_module, "_call", call)
    if times == 1:
        assert lab.dump(container).pages > 0
    else:
        with pytest.raises(CriuError):
            lab.dump(container)
    assert len(calls) == 2


LAUNCHER = """
import sys, time
from pathlib import Path
from proxy_runtime.process import criu, proc
from proxy_runtime.process.criu_binary import probe
from proxy_runtime.process.namespace import ContainerSpec, launch
init, tool, images, moment = sys.argv[1], probe(Path(sys.argv[2])), Path(sys.argv[3]), sys.argv[4]
spec = ContainerSpec(argv=("/bin/sh", "-c", "sleep 1000 & sleep 1000; true"), env={"PATH": "/bin:/usr/bin"})
def tell(container):
    print(*proc.in_pid_namespace_of(container.init_pid), flush=True)
    time.sleep(1000)
container = launch(init, spec)
while len(container.processes()) < 3:
    time.sleep(0.001)
criu.dump(tool, container, images, on_frozen=lambda: tell(container) if moment == "dump" else None)
container.kill()
criu.restore(tool, init, images, spec, on_paused=tell)
"""


@pytest.mark.parametrize("moment", ["dump", "restore"])
def test_a_launcher_killed_in_the_middle_leaves_nothing(lab, moment, until):
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(lab.init), str(lab.tool.path), str(lab.images), moment],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    process.kill()
    process.wait()
    process.stdout.close()
    assert len(pids) >= 6  # pid 1, keeper, three of the shell, CRIU
    until(lambda: not any(lab.alive(pid) for pid in pids), "all are gone")


def test_the_deadline_of_a_dump_lets_the_tree_live(lab):
    container = lab.launch(lab.spec("memory", "300"))
    lab.wait_lines(5)
    with pytest.raises(CriuError) as caught:
        lab.dump(container, deadline_s=0.06)
    assert caught.value.code == "criu.deadline"
    assert proc.status_field(container.rank_pid, "TracerPid") == "0"
    lab.wait_lines(len(lab.lines()) + 3)
    shutil.rmtree(lab.images)
    assert lab.dump(container).pages > 70_000
