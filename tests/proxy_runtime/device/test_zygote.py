"""Processes: forks are warm, nothing outlives its owner, errors name their cause."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from proxy_runtime.channel.ring import Ring
from proxy_runtime.device.client import DeviceProxyClient, DeviceProxyError, NativeBuild, Zygote
from tests.proxy_runtime.device.producer import Producer


def ended(pidfd: int, deadline_s: float = 20.0) -> bool:
    return bool(select.select([pidfd], [], [], deadline_s)[0])


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def test_a_fork_is_a_process_of_its_own(zygote: Zygote, tmp_path: Path) -> None:
    assert threads_of(zygote.pid) == 1
    with zygote.fork(tmp_path / "1.log") as one, zygote.fork(tmp_path / "2.log", threads=2) as two:
        assert one.pid != two.pid and one.alive and two.alive
        assert one.hello().pid == one.pid
        inherited = [os.readlink(f"/proc/{one.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{one.pid}/fd")]
        assert sum(target.startswith("socket:") for target in inherited) == 1, inherited
    assert not one.alive and not two.alive


def test_a_proxy_ends_when_its_client_closes_the_socket(zygote: Zygote, tmp_path: Path) -> None:
    client = zygote.fork(tmp_path / "log")
    watch = os.pidfd_open(client.pid)
    client._frames.close()
    assert ended(watch)
    os.close(watch)


def test_a_proxy_that_was_asked_to_exit_is_gone(zygote: Zygote, tmp_path: Path) -> None:
    client = zygote.fork(tmp_path / "log")
    client.exit()
    assert not client.alive
    with pytest.raises(DeviceProxyError):
        client.stats()


def test_a_killed_proxy_is_an_error_with_a_code(zygote: Zygote, tmp_path: Path) -> None:
    client = zygote.fork(tmp_path / "log")
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(DeviceProxyError) as error:
        client.stats()
    assert error.value.code == "device-proxy.gone"
    assert str(client.pid) in error.value.message
    client.kill()


def test_a_zygote_that_closes_takes_its_proxies_along(device_build: NativeBuild, tmp_path: Path) -> None:
    zygote = Zygote.start(device_build, log=tmp_path / "zygote.log")
    client = zygote.fork(tmp_path / "log")
    watch = os.pidfd_open(client.pid)
    zygote.close()
    assert ended(watch)
    os.close(watch)
    client.kill()
    with pytest.raises(DeviceProxyError) as error:
        zygote.fork(tmp_path / "log")
    assert error.value.code == "device-proxy.start"


OWNER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from proxy_runtime.device.client import Zygote
build = SimpleNamespace(id=sys.argv[1], device_dir=Path(sys.argv[2]), torch_version=sys.argv[4], abi=sys.argv[5])
zygote = Zygote.start(build, log=sys.argv[3])
proxy = zygote.fork(sys.argv[3])
print(zygote.pid, proxy.pid, flush=True)
time.sleep(600)
"""


def test_nothing_outlives_a_killed_owner(device_build: NativeBuild, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", OWNER, device_build.id, str(device_build.device_dir), str(tmp_path / "log")]
    command += [device_build.torch_version, device_build.abi]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, text=True)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    watches = [os.pidfd_open(pid) for pid in pids]
    owner.kill()
    owner.wait()
    assert all(ended(watch) for watch in watches)
    for watch in watches:
        os.close(watch)


def test_a_zygote_that_cannot_start_says_so(device_build: NativeBuild, tmp_path: Path) -> None:
    broken = SimpleNamespace(
        id="0" * 32, device_dir=tmp_path / "nothing", torch_version=device_build.torch_version, abi=device_build.abi
    )
    with Zygote.start(broken, log=tmp_path / "zygote.log") as zygote, pytest.raises(DeviceProxyError) as error:
        zygote.fork(tmp_path / "log")
    assert error.value.code == "device-proxy.start"
    assert "_ergo_device" in (tmp_path / "zygote.log").read_text()


@pytest.mark.parametrize("other", [{"torch_version": "2.13.0+cu130"}, {"abi": "cpython-399-x86_64-linux-gnu"}])
def test_an_interpreter_with_another_torch_or_python_is_refused(
    device_build: NativeBuild, tmp_path: Path, other: dict[str, str]
) -> None:
    about = {name: getattr(device_build, name) for name in ("id", "device_dir", "torch_version", "abi")} | other
    with (
        Zygote.start(SimpleNamespace(**about), log=tmp_path / "log") as zygote,
        pytest.raises(DeviceProxyError) as error,
    ):
        zygote.fork(tmp_path / "log")
    assert error.value.code == "device-proxy.torch"
    assert torch.__version__ in error.value.message and next(iter(other.values())) in error.value.message


def test_an_unknown_device_kind_is_named_in_the_log(device_build: NativeBuild, tmp_path: Path) -> None:
    with Zygote.start(device_build, "abacus", log=tmp_path / "zygote.log") as zygote, pytest.raises(DeviceProxyError):
        zygote.fork(tmp_path / "log")
    assert "'abacus' cannot be used" in (tmp_path / "log").read_text()


def test_rings_of_others_are_refused(zygote: Zygote, tmp_path: Path) -> None:
    with zygote.fork(tmp_path / "log") as proxy:
        other_build = Ring.create(0, "ff" * 16)
        other_rank = Ring.create(3)
        no_ring = os.memfd_create("nothing")
        os.ftruncate(no_ring, 1 << 16)
        for fd, code in (
            (other_build.fd, "device-proxy.build"),
            (other_rank.fd, "device-proxy.ring"),
            (no_ring, "device-proxy.ring"),
        ):
            with pytest.raises(DeviceProxyError) as error:
                proxy.attach(0, fd)
            assert error.value.code == code
        other_build.close()
        other_rank.close()
        os.close(no_ring)
        assert proxy.stats()["ranks"] == {}


def test_malformed_requests_are_answered(zygote: Zygote, tmp_path: Path) -> None:
    with zygote.fork(tmp_path / "log") as proxy:
        for operation, fields in (("dance", {}), ("attach", {"rank": 0}), ("load", {}), ("finish", {"targets": 5})):
            with pytest.raises(DeviceProxyError) as error:
                proxy._call(operation, 5.0, **fields)
            assert error.value.code == "device-proxy.request"
        for ranks in ([], [-1]):
            with pytest.raises(DeviceProxyError) as error:
                proxy.fabric(0, ranks, "token", [])
            assert error.value.code == "device-proxy.request"
        assert proxy.alive


def busy(client: DeviceProxyClient) -> None:
    """Stops the process, so that nothing answers."""
    os.kill(client.pid, signal.SIGSTOP)


def test_a_proxy_that_does_not_answer_meets_the_deadline(zygote: Zygote, tmp_path: Path) -> None:
    with zygote.fork(tmp_path / "log") as proxy:
        busy(proxy)
        started = time.monotonic()
        with pytest.raises(DeviceProxyError) as error:
            proxy.stats(deadline_s=0.1)
        assert error.value.code == "device-proxy.deadline"
        assert time.monotonic() - started < 30
        os.kill(proxy.pid, signal.SIGCONT)
        assert proxy.stats()["running"] is False  # the late answer is not taken for this one's


def test_an_idle_proxy_sleeps_and_wakes(zygote: Zygote, tmp_path: Path) -> None:
    def ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    with zygote.fork(tmp_path / "log") as proxy, Ring.create(0) as ring:
        rank = Producer(ring)
        proxy.attach(0, ring.fd)
        proxy.run()
        rank.sync()
        before = ticks(proxy.pid)
        select.select([], [], [], 1.0)  # what it does in this time is the subject
        assert ticks(proxy.pid) - before <= 5  # of 100
        rank.sync()
        rank.close()


@pytest.mark.parametrize(
    ("name", "value"), [("ERGO_SPLICE", "no"), ("ERGO_SPLICE_VERIFY", "often"), ("ERGO_SPLICE_VERIFY", "-1")]
)
def test_a_setting_that_a_proxy_cannot_read_is_refused(device_build: NativeBuild, name: str, value: str) -> None:
    """It would be taken for another one: sharing on, nothing compared."""
    with pytest.raises(DeviceProxyError, match=f"{name} is '{value}' .* Correct {name}, or unset it") as error:
        Zygote.start(device_build, "cpu", {**os.environ, name: value})
    assert error.value.code == "device-proxy.setting"


def test_an_empty_setting_is_none(device_build: NativeBuild, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Zygote.start(device_build, "cpu", {**os.environ, "ERGO_SPLICE_VERIFY": ""}, log=log) as zygote:
        assert b"ERGO_SPLICE_VERIFY" not in Path(f"/proc/{zygote.pid}/environ").read_bytes()
