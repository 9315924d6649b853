"""What a rank must not hold is found, by the look of /proc."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace

import pytest

from proxy_runtime.process import inspect
from tests.proxy_runtime.process.looks import rank_running


@pytest.mark.parametrize(
    ("leak", "sentences"),
    [
        ("", []),
        ("leak-fd", ["holds descriptor", "holds descriptor"]),  # the child has inherited it
        ("leak-map", ["maps the channel, which only the rank itself may"]),
        ("pinned", []),  # what lies behind the ring is the child's too
    ],
)
def test_leaks_of_the_channel(lab, leak, sentences):
    fd = os.memfd_create("ergo-ring")
    os.ftruncate(fd, 1 << 16)
    container = lab.launch(lab.spec("ring", str(fd), *filter(None, [leak]), keep_fd=fd))
    os.close(fd)
    lab.wait_lines(1)
    found = inspect.violations(container)
    assert len(found) == len(sentences)
    assert all(words in sentence for words, sentence in zip(sentences, found, strict=True))
    assert inspect.maps_ring(container.rank_pid)
    assert inspect.violations(container, ring_name="another") == []


def test_a_connected_datagram_socket_is_found(lab):
    code = (
        "import socket,time; s=socket.socket(type=socket.SOCK_DGRAM); t=socket.socket(type=socket.SOCK_DGRAM); "
        "t.bind(('127.0.0.1',0)); s.connect(('127.0.0.1',9)); print('up',flush=True); time.sleep(1000)"
    )
    spec = lab.spec("count")
    container = lab.launch(replace(spec, argv=(spec.argv[0], "-c", code)))
    lab.wait_lines(1)
    (sentence,) = inspect.violations(container)
    assert f"process {container.rank_pid} holds a connection (udp port" in sentence
    assert "to port 9" in sentence


def test_databases_are_found_where_files_get_other_inodes(lab, until):
    inside = lab.launch(lab.spec("database", "/dev/shm"))
    lab.wait_lines(1)
    (sentence,) = inspect.violations(inside)
    assert f"process {inside.rank_pid} has the SQLite database /dev/shm/a.db open" in sentence
    log = lab.directory / "outside"  # a file of the host's is the same one after a restore
    outside = lab.launch(lab.spec("database", str(lab.directory), log=log))
    until(lambda: log.exists() and log.read_text() == "open\n", "the other one is open")
    assert inspect.violations(outside) == []


def test_watches_are_found(lab):
    code = (
        "import ctypes,os,time; libc=ctypes.CDLL(None); os.mkdir('/dev/shm/seen'); watch=libc.inotify_init1(0); "
        "idle=libc.inotify_init1(0); libc.inotify_add_watch(watch,{0},0x100); print('up',flush=True); time.sleep(1000)"
    )
    for directory in ("b'/dev/shm/seen'", "b'/dev/shm/missing'"):
        container = rank_running(lab, code.format(directory))
        found = inspect.violations(container)
        container.kill()
        lab.log.unlink()
        if directory.endswith("seen'"):
            assert [sentence.partition(" watches ")[2] for sentence in found] == [
                "files with inotify, and would miss changes: poll instead"
            ]
        else:
            assert found == []  # nothing is watched


def test_sockets_of_other_processes_do_not_count(lab):
    container = lab.launch(lab.spec("count", network="host"))  # /proc/PID/net/tcp shows the whole host's
    lab.wait_lines(1)
    assert inspect.violations(container) == []


def test_processes_that_are_gone_hold_nothing():
    assert inspect.descriptor_violations(2**22 - 1, "ergo-ring", ()) == []
    assert inspect.mapping_violations(2**22 - 1, "ergo-ring", may_map_ring=False) == []
    assert inspect.mapped_memfd(2**22 - 1, "ergo-ring") is None


def test_a_process_outside_of_the_tree_is_found_and_can_be_ended(lab, until):
    container = lab.launch(lab.spec("count"))
    lab.wait_lines(1)
    # What enters from outside and is left by its parent falls to pid 1, not to the keeper.
    enter = [str(lab.init), "--enter", str(container.init_pid), "--net-too", "--"]
    subprocess.run([*enter, "/bin/sh", "-c", "sleep 1000 &"], stdout=subprocess.DEVNULL, check=True)
    (sentence,) = until(lambda: inspect.violations(container), "the stranger is seen")
    assert "is not below the rank's keeper" in sentence
    container.end_strangers()
    until(lambda: inspect.violations(container) == [], "the stranger is gone")
    assert container.poll() is None
