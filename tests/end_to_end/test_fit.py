"""A job is not put on fewer devices than its ranks fit, by what they have used."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy_runtime.shim.spec import CutRequest
from tests.end_to_end.harness import Script, running
from tests.end_to_end.test_processes import until

GRADIENTS = 4 << 20
TRAINING = f"""
import sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.manual_seed(1)
layer = torch.nn.Linear(1024, {GRADIENTS // 4096}, bias=False).cuda()
model = torch.nn.parallel.DistributedDataParallel(layer, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
enough = torch.zeros(1, device="cuda")
step = 0
while not enough.item():
    optimizer.zero_grad()
    model(torch.randn(4, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    enough.fill_(Path(sys.argv[1]).exists())
    dist.all_reduce(enough)
    step += 1
    if step == 3:
        print("PEAK", torch.cuda.max_memory_allocated(), flush=True)
print("DONE", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False], ids=["processes stay", "restored"])
def test_what_does_not_fit_the_devices_of_a_job_is_refused_with_what_was_measured(kept: bool, tmp_path: Path) -> None:
    path = tmp_path / "training.py"
    path.write_text(TRAINING)
    directory = tmp_path / "job"
    enough = tmp_path / "enough"  # the job's own directory is the job's: what appears in it later need not be seen
    # One rank has parameters, gradients, and more gradients while they are made; two would have one sum beside that.
    with running(Script(path, (str(enough),), ranks=2), directory, device_memory=7 * GRADIENTS // 2) as job:
        until(lambda: all("PEAK" in job.logs(rank) for rank in range(2)), "the ranks are training")
        assert 3 * GRADIENTS <= int(job.logs(0).split()[1]) <= 7 * GRADIENTS // 2
        report = job.cut(CutRequest(devices=1, keep_processes=kept))
        assert (report.outcome, report.code) == ("called-off", "run.bad-width")
        assert "It would not fit: 2 ranks on one device need 16.0 MiB" in report.error
        assert report.error.endswith("a device has 14.0 MiB. On 2 devices it would.")
        assert job.status()["width"] == 2
        enough.touch()
        result = job.wait(240)
        assert result is not None and result.code == 0, job.logs(0)
        assert all("DONE" in job.logs(rank) for rank in range(2))
