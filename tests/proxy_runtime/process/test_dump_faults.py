"""Dumps and restores that fail: what is said, what lives on, and that nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

from proxy_runtime.process import criu as criu_module
from proxy_runtime.process import inspect, proc, rpc
from proxy_runtime.process.criu import CriuError
from proxy_runtime.process.namespace import ContainerSpec
from tests.proxy_runtime.process.looks import rank_running, unbroken


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
        self.files: list[BinaryIO] = []  # open: else another test's container may get the number of one that is gone
        original = criu_module.launch_empty

        def launch_empty(*args, **kwargs):
            container = original(*args, **kwargs)
            self.files.append(open(f"/proc/{container.init_pid}/ns/pid", "rb"))  # noqa: SIM115  closed with the test
            self.namespaces.add(os.stat(self.files[-1].fileno()).st_ino)
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
    """Kills CRIU, or somebody else, as soon as something is so during a session."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        moment: Callable[[], bool],
        kill: Callable[[rpc.Session], object] = rpc.Session.kill,
    ) -> None:
        original = rpc.Session.call

        def call(session, request, on_notify=None):
            ended = threading.Event()

            def watch() -> None:
                while not ended.wait(0.001):
                    if moment():
                        kill(session)
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

    for megabytes in (10, 30, 60):  # not earlier: a process that CRIU only begins with may go with it
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
    assert unbroken(lab)


def test_a_rank_that_ends_in_mid_dump(lab, monkeypatch):
    container = lab.launch(lab.spec("memory", "200"))
    lab.wait_lines(5)

    def written() -> bool:
        return sum(path.stat().st_size for path in lab.images.glob("pages-*.img")) > 10 << 20

    KillCriu(monkeypatch, written, lambda _: os.kill(container.init_pid, signal.SIGKILL))
    with pytest.raises(CriuError, match="the process has ended before it could be dumped") as caught:
        lab.dump(container)
    assert caught.value.code == "criu.gone"


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
