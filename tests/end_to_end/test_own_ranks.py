"""Scripts that start their own ranks (docs/design/0003): torchrun, spawn, subprocesses, data loaders of every kind."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy_runtime.shim.spec import CutRequest
from tests.end_to_end.harness import DEADLINE_S, JOBS, CutPlan, Outcome, Script, require_equal, run, running, tails
from tests.end_to_end.test_bits import seed_of

TORCHRUN = ("torchrun", "--nproc-per-node=2")
MODULE = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

CUT = [
    Script(JOBS / "spawns.py", ("--steps", "1500"), ranks=2, launcher=("python",)),
    pytest.param(Script(JOBS / "ddp_skew.py", ranks=2, launcher=TORCHRUN), marks=pytest.mark.slow),
    pytest.param(Script(JOBS / "ddp_skew.py", ranks=2, launcher=MODULE), marks=pytest.mark.slow),
    pytest.param(
        Script(JOBS / "spawns.py", ("--steps", "400", "--workers", "2", "--file"), ranks=2, launcher=("python",)),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("script", CUT, ids=str)
def test_cut_at_random_moments(script: Script, untouched: Callable[[Script], Outcome], tmp_path: Path) -> None:
    reference = untouched(script)
    assert {"result of rank 0", "result of rank 1"} <= reference.evidence.keys(), tails(reference)
    cut = run(script, tmp_path / "cut", CutPlan(seed_of(script), count=2))
    require_equal(reference, cut, cuts=1)


@pytest.mark.slow
def test_torchrun_gives_the_bits_of_ranks_that_we_start(untouched: Callable[[Script], Outcome]) -> None:
    ours = untouched(Script(JOBS / "ddp_skew.py", ranks=2))
    theirs = untouched(Script(JOBS / "ddp_skew.py", ranks=2, launcher=TORCHRUN))
    results = [{name: value for name, value in each.evidence.items() if "result" in name} for each in (ours, theirs)]
    assert results[0] == results[1], tails(theirs)


def program(tmp_path: Path, text: str, *, devices: int = 2) -> Script:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return Script(path, ranks=devices, launcher=("python",))


DEVICES = """
    import os, signal, subprocess, sys, time
    import torch
    import torch.multiprocessing as mp

    CHILD = (
        "import torch; t = torch.ones(3, device='cuda') * 2; "
        "print(torch.cuda.device_count(), t.device, t.sum().item())"
    )

    def child(code=CHILD, **env):
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def raises(call, *words):
        try:
            call()
        except Exception as error:
            assert all(word in str(error) for word in words), error
        else:
            raise AssertionError(f"nothing raised, expected {words}")

    def forked(queue, touch):
        try:
            queue.put(touch())
        except Exception as error:
            queue.put(str(error))

    def in_fork(touch):
        context = mp.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=forked, args=(queue, touch))
        process.start()
        found = queue.get()
        process.join()
        return found

    def touch():
        return torch.ones(4, device="cuda:1").sum().item()

    if __name__ == "__main__":
        # Nothing has used a device here: a forked child may, and gets its own.
        assert torch.cuda.device_count() == 2
        found = in_fork(touch)
        assert found == 4.0, found
        assert torch.cuda.is_available()
        torch.manual_seed(5)
        torch.cuda.set_device(1)
        first = torch.rand(4, device="cuda").tolist()
        torch.cuda.manual_seed(5)
        assert torch.rand(4, device="cuda:1").tolist() == first
        assert torch.zeros(2, device="cuda").device == torch.device("cuda:1")
        raises(lambda: torch.ones(1, device="cuda:0"), "one device for life")
        raises(lambda: torch.ones(1).to("cuda:0"), "one device for life")
        raises(lambda: torch.ones(1, device="cuda:2"), "invalid device ordinal")
        assert "Cannot re-initialize CUDA in forked subprocess" in in_fork(touch)
        assert torch.rand(4, device="cuda").device.index == 1
        assert child() == "2 cuda:0 6.0"
        assert child(CUDA_VISIBLE_DEVICES="1") == "1 cuda:0 6.0"
        assert child("import torch; print(torch.cuda.is_available())", CUDA_VISIBLE_DEVICES="") == "False"
        # One after another on one channel; half of them die without a word.
        for n in range(2):
            assert child(CHILD + "; import os; os.kill(os.getpid(), 9) if os.environ['N'] == '1' else 0", N="0")
            killed = subprocess.run([sys.executable, "-c", CHILD + "; import os; os.kill(os.getpid(), 9)"])
            assert killed.returncode == -signal.SIGKILL
        print("ALL GOOD", flush=True)
"""


def test_devices_processes_and_forks(tmp_path: Path) -> None:
    outcome = run(program(tmp_path, DEVICES), tmp_path / "job")
    assert outcome.result.code == 0 and "ALL GOOD" in outcome.logs[0], tails(outcome)


LIMITED = """
    import subprocess, sys
    import torch

    CHILD = "import torch; print(torch.cuda.get_device_properties(1).total_memory)"

    def fails():
        try:
            torch.empty(65 << 20, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            return True
        return False

    assert torch.cuda.mem_get_info()[1] == 64 << 20, torch.cuda.mem_get_info()
    assert fails()
    torch.empty(60 << 20, dtype=torch.uint8, device="cuda")
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert child.stdout == f"{64 << 20}\\n", child
    print("ALL GOOD", flush=True)
"""


def test_every_process_has_the_memory_that_the_job_gives_a_device(tmp_path: Path) -> None:
    outcome = run(program(tmp_path, LIMITED), tmp_path / "job", device_memory=64 << 20)
    assert outcome.result.code == 0 and "ALL GOOD" in outcome.logs[0], tails(outcome)


LOADERS = """
    import torch
    from torch.utils.data import DataLoader, Dataset, TensorDataset

    class Touches(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.ones(1, device="cuda") * index

    if __name__ == "__main__":
        data = TensorDataset(torch.arange(24.0))
        anchor = torch.ones(1, device="cuda")
        for context in ("fork", "spawn", "forkserver"):
            for persistent in (False, True):
                loader = DataLoader(
                    data, 4, num_workers=2, pin_memory=True,
                    multiprocessing_context=context, persistent_workers=persistent,
                )
                for epoch in range(2):
                    total = sum((x.cuda(non_blocking=True) * anchor).sum().item() for (x,) in loader)
                    assert total == 276.0, (context, total)
                del loader
        try:
            list(DataLoader(Touches(), num_workers=1, multiprocessing_context="fork"))
        except RuntimeError as error:
            assert "Cannot re-initialize CUDA in forked subprocess" in str(error), error
        else:
            raise AssertionError("a forked worker has used the device of its parent")
        print("ALL GOOD", anchor.item(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False], ids=["tree", "rank"])
def test_data_loaders_of_every_kind(tmp_path: Path, own: bool) -> None:
    script = program(tmp_path, LOADERS, devices=1)
    outcome = run(script if own else Script(script.path), tmp_path / "job")
    assert outcome.result.code == 0 and "ALL GOOD 1.0" in outcome.logs[0], tails(outcome)


def test_its_width_is_for_life(tmp_path: Path) -> None:
    script = program(tmp_path, "import time\nfor _ in range(600): time.sleep(0.1)")
    with running(script, tmp_path / "job") as job:
        report = job.cut(CutRequest(devices=1))
        assert report.outcome == "called-off" and "for life" in report.error
        assert job.status()["alive"]


STEPLESS = """
    import torch
    import torch.multiprocessing as mp

    def train(rank):
        model = torch.nn.Linear(4, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        while True:
            model(torch.ones(1, 4, device="cuda")).sum().backward()
            optimizer.step()
            torch.cuda.synchronize()

    if __name__ == "__main__":
        anchor = torch.ones(1, device="cuda")
        mp.spawn(train, nprocs=1)
"""


@pytest.mark.slow
def test_a_process_that_takes_no_step_is_not_waited_for(tmp_path: Path) -> None:
    with running(program(tmp_path, STEPLESS, devices=1), tmp_path / "job") as job:
        limit = time.monotonic() + DEADLINE_S
        while max(job.status()["step"]) < 5:
            assert time.monotonic() < limit, job.logs(0)
            time.sleep(0.05)
        report = job.cut(CutRequest(move=False, at_step=max(job.status()["step"]) + 1, step_deadline_s=20))
        assert report.outcome == "checkpointed" and report.reached_step, report


BARRIERS = """
    import os
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def train(rank, port, first):
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
        dist.init_process_group("nccl", rank=rank, world_size=2)
        if first:  # no device yet: that of the rank, as torch guesses
            dist.barrier()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).to(rank), device_ids=[rank])
        model(torch.ones(1, 2)).sum().backward()
        dist.barrier()  # the current device is still cuda:0 in both
        assert model.module.weight.grad.device.index == rank
        dist.destroy_process_group()
        print("RANK GOOD", flush=True)

    if __name__ == "__main__":
        for first in (False, True):
            mp.spawn(train, args=(12355 + first, first), nprocs=2)
"""


@pytest.mark.slow
def test_barriers_of_ranks_that_set_no_device(tmp_path: Path) -> None:
    """As in PyTorch's tutorial of DistributedDataParallel."""
    outcome = run(program(tmp_path, BARRIERS), tmp_path / "job")
    assert outcome.result.code == 0 and outcome.logs[0].count("RANK GOOD") == 4, tails(outcome)


def test_more_ranks_than_devices_is_an_error_of_the_script(tmp_path: Path) -> None:
    text = "import torch; torch.cuda.set_device(3)"
    outcome = run(program(tmp_path, text), tmp_path / "job")
    assert outcome.result.code == 1 and "invalid device ordinal" in outcome.logs[0]
