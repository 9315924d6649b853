"""Real dumps and restores with the machine's CRIU."""

from __future__ import annotations

import mmap
import os
import signal
import stat
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from proxy_runtime.process import inspect, proc
from proxy_runtime.process.criu import CriuError
from proxy_runtime.process.namespace import ExitStatus, Overlay, hold_volume
from tests.proxy_runtime.process.looks import numbers, states, unbroken


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
    assert unbroken(lab)


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
    assert unbroken(lab)
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


def test_no_container_has_a_dev_shm_that_one_before_it_had(lab):
    """Device and inode are what torch.multiprocessing knows a batch of a data loader by."""
    spec = lab.spec("identity")
    container = lab.launch(spec)
    seen, mounts = [], []
    for _ in range(5):
        lab.log.write_bytes(b"")
        lab.wait_lines(2)
        shown = set(lab.lines()[1].split())
        assert len(shown) == 1
        seen.append(shown.pop())
        mounts.append(Path(f"/proc/{container.init_pid}/mountinfo").read_text().count(" /dev/shm "))
        lab.dump(container)
        container.kill()  # its number can be given away
        container = lab.restore(spec)
    assert len(set(seen)) == len(seen)
    assert len(set(mounts)) == 1  # those that had a number that was in use are gone


def test_what_criu_leaves_out_travels(lab):
    """Addresses order sets of objects in children that are started later; processors decide on numbers of threads."""
    spec = lab.spec("machine")
    container = lab.launch(spec)
    seen = []
    for _ in range(3):
        lab.log.write_bytes(b"")
        seen.append(lab.wait_lines(2)[1])
        lab.dump(container)
        container.kill()
        container = lab.restore(spec)
    assert seen[0].startswith("00040000 00040000 ")
    assert len(set(seen)) == 1


def test_a_database_that_is_open_is_not_taken_along(lab, until):
    spec = lab.spec("database", "/dev/shm")
    container = lab.launch(spec)
    lab.wait_lines(1)
    with pytest.raises(CriuError, match=r"has the SQLite database /dev/shm/a.db open") as caught:
        lab.dump(container)
    assert caught.value.code == "criu.inode"
    container.signal(signal.SIGUSR1)  # closes it
    until(lambda: inspect.violations(container) == [], "closed")
    lab.dump(container)


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
        assert unbroken(each)
    assert [container.poll() for container in restored] == [None] * 3
