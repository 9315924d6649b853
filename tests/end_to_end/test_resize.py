"""A resize on one machine: only what the devices hold moves; the processes run on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from proxy_runtime.job import Job, JobOptions
from proxy_runtime.process import proc
from proxy_runtime.shim.spec import CutReport, CutRequest
from tests.end_to_end.harness import Outcome, Script, evidence, running
from tests.end_to_end.test_processes import ENDLESS, stepping, until
from tests.end_to_end.test_restore import GPT


def resized(job: Job, devices: int) -> CutReport:
    report = job.cut(CutRequest(devices=devices, keep_processes=True))
    assert report.outcome == "moved", report.error
    assert job.status()["width"] == report.devices == devices
    return report


def require_progress(job: Job) -> None:
    seen = [len(job.logs(rank)) for rank in range(2)]
    until(lambda: all(len(job.logs(rank)) > seen[rank] + 100 for rank in range(2)), "the job runs on")


def test_processes_stay_and_checkpoints_are_good_afterwards(
    untouched: Callable[[Script], Outcome], tmp_path: Path
) -> None:
    reference = untouched(GPT)
    directory, store = tmp_path / "job", tmp_path / "store"
    with running(GPT, directory, checkpoint_dir=store) as job:
        until(lambda: min(job.status().get("step", [0])) >= 5, "the job is at step 5")
        before = job.status()
        report = resized(job, 1)
        after = job.status()
        assert after["rank_pids"] == before["rank_pids"]
        assert not set(after["proxy_pids"]) & set(before["proxy_pids"])
        assert (report.epoch, after["epoch"], report.checkpoint, report.image_bytes) == (1, 1, "", 0)
        assert {"stop", "agree", "device", "connect", "reconnect", "downtime"} <= report.ms.keys()
        assert not list(store.glob("tenants/*/jobs/*/HEAD"))
        moved = job.cut(CutRequest())
        assert moved.outcome == "moved", moved.error  # restored, from files that are where they were
        assert job.status()["rank_pids"] != before["rank_pids"]
        resized(job, 2)
        assert job.cut(CutRequest(stop=True)).outcome == "stopped"
        job.wait(30)
    again = Job.restore("HEAD", JobOptions(argv=(), devices=0, checkpoint_dir=store, keep_run=True))
    result = again.wait(240)
    assert result is not None and result.code == 0, result
    assert evidence(GPT, directory, [again.logs(rank) for rank in range(2)]) == reference.evidence


def test_what_could_not_be_checkpointed_can_be_resized(tmp_path: Path) -> None:
    """A connection to another process, which CRIU does not take, is none of the device's business."""
    path = tmp_path / "connected.py"
    path.write_text(CONNECTED)
    with running(Script(path, (str(tmp_path / "enough"),), ranks=2), tmp_path / "job") as job:
        until(lambda: all("PROGRESS" in job.logs(rank) for rank in range(2)), "the ranks are connected")
        assert job.cut(CutRequest(devices=1)).outcome == "called-off"
        resized(job, 1)
        (tmp_path / "enough").touch()
        result = job.wait(60)
        assert result is not None and result.code == 0, (result, job.logs(0))
        assert all("DONE hello" in job.logs(rank) for rank in range(2))


CONNECTED = """
import os, socket, sys, time
from pathlib import Path

import torch

server = socket.create_server(("127.0.0.1", 0))
pid = os.fork()
if pid == 0:
    peer = socket.create_connection(server.getsockname())
    peer.recv(1)
    peer.sendall(b"hello")
    os._exit(0)
peer, _ = server.accept()
x = torch.zeros(4, device="cuda")
print("PROGRESS", flush=True)
while not Path(sys.argv[1]).exists():
    x += 1
    time.sleep(0.01)
peer.sendall(b"?")
assert float(x.max()) == float(x.min())
print("DONE", peer.recv(5).decode(), flush=True)
os.waitpid(pid, 0)
"""


def test_a_rank_that_has_ended_is_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "leaves.py"
    path.write_text(LEAVES)
    with running(Script(path, (str(tmp_path / "enough"),), ranks=2), tmp_path / "job") as job:
        until(lambda: len(ended(job)) == 1, "rank 1 has ended")
        for devices in (1, 2, 1):
            resized(job, devices)
        (tmp_path / "enough").touch()
        result = job.wait(60)
        assert result is not None and result.code == 0, (result, job.logs(0))
        assert "DONE 3.0 hello" in job.logs(0)


def ended(job: Job) -> list[int]:
    return [pid for pid in job.status()["rank_pids"] if not Path(f"/proc/{pid}").exists()]


LEAVES = """
import sys, time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
x = torch.full((4,), 1.0 + rank, device="cuda")
if rank == 1:
    store.set("word", "hello")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    print("LEFT", flush=True)
else:
    work = dist.all_reduce(x, async_op=True)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
    work.wait()
    print("DONE", float(x[0]), store.get("word").decode(), flush=True)
"""


def test_a_new_proxy_that_dies_leaves_the_job_as_it_was(tmp_path: Path) -> None:
    with running(ENDLESS, tmp_path) as job:
        until(lambda: stepping(job), "the job runs")
        before, reports = job.status(), []
        asked = CutRequest(devices=1, keep_processes=True, at_step=1_000_000, step_deadline_s=4.0)
        cut = threading.Thread(target=lambda: reports.append(job.cut(asked)))
        cut.start()
        zygote = int(proc.status_field(before["proxy_pids"][0], "PPid"))
        fresh: list[int] = []

        def forked() -> list[int]:
            fresh[:] = set(proc.children(zygote)) - set(before["proxy_pids"])
            return fresh

        until(forked, "the new proxy was made")
        log = job.client.layout.current.proxy_log(0)
        until(lambda: f'"began","job":"{job.spec.job_id}","epoch":1' in log.read_text(), "it waits for the ranks' step")
        os.kill(fresh[0], signal.SIGKILL)
        cut.join()
        assert reports[0].outcome == "called-off" and reports[0].error, reports[0]
        after = job.status()
        assert {key: after[key] for key in ("epoch", "width", "rank_pids", "proxy_pids")} == {
            key: before[key] for key in ("epoch", "width", "rank_pids", "proxy_pids")
        }
        require_progress(job)
        assert resized(job, 1).epoch == 1
        require_progress(job)


NO_RESIZES = {
    "no width": CutRequest(keep_processes=True),
    "same width": CutRequest(devices=2, keep_processes=True),
    "stop": CutRequest(devices=1, keep_processes=True, stop=True),
    "stay": CutRequest(devices=1, keep_processes=True, move=False),
}


def test_what_keeps_processes_but_is_no_resize_is_refused(tmp_path: Path) -> None:
    with running(ENDLESS, tmp_path) as job:
        for name, asked in NO_RESIZES.items():
            report = job.cut(asked)
            assert (report.outcome, report.code) == ("called-off", "run.bad-width"), name
            assert job.status()["epoch"] == 0, name
