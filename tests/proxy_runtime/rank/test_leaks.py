"""Many operations of every kind leave neither memory, nor descriptors, nor threads behind, in rank and proxy."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from launcher import Launcher

ROUNDS = 14
SETTLED = 5  # caches of torch and of allocators are full after so many rounds
MOST_GROWTH = 2 << 20  # bytes, from then on; 0.1 MB is usual. What a round leaves behind comes up every round

SCRIPT = """
import gc, json, os, sys, torch
from ergo_rank import _interposer

def size():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.LayerNorm(256)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
host = torch.randn(64, 256)
for n in range(int(sys.argv[1])):
    for _ in range(60):
        loss = model(host.cuda(non_blocking=True)).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad(); loss.item()
    for k in range(40):
        large = torch.empty(1 << 20, device="cuda"); large.fill_(k); large.resize_(1 << 19).cpu()
        pinned = torch.empty(3 << 20, pin_memory=True).copy_(torch.ones(3 << 20, device="cuda"))
        pinned.cuda()
        event = torch.cuda.Event(enable_timing=True); event.record(); torch.cuda.Event().record()
        generator = torch.Generator("cuda").manual_seed(k)
        torch.rand(100, device="cuda", generator=generator).nonzero()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.sparse_coo_tensor(torch.arange(4)[None], torch.ones(4), (9,)).cuda().coalesce().to_dense()
        try:
            torch.ones(3, device="cuda") @ torch.ones(4, device="cuda")
        except RuntimeError:
            pass
    del large, pinned, event, generator, stream
    gc.collect(); torch.cuda.synchronize()
    fds, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    device = json.loads(_interposer.device_stats())
    print(json.dumps({"rss": size(), "fds": fds, "threads": threads, "device": device}), flush=True)
    sys.stdin.readline()
"""


def held(proxy: subprocess.Popen[str]) -> dict[str, int]:
    """What a proxy holds but for freed memory, of which it keeps up to what it ever had in use at one time."""
    assert proxy.stdin is not None and proxy.stdout is not None
    proxy.stdin.write("trim\n")
    proxy.stdin.flush()
    assert proxy.stdout.readline() == "trimmed\n"
    pid = proxy.pid
    with open(f"/proc/{pid}/statm") as file:
        rss = int(file.read().split()[1]) * 4096
    return {"rss": rss, "fds": len(os.listdir(f"/proc/{pid}/fd")), "threads": len(os.listdir(f"/proc/{pid}/task"))}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_operations_leave_nothing_behind(launcher: Launcher) -> None:
    rank, proxy = [], []
    with launcher.start(SCRIPT, str(ROUNDS)) as job:
        stdin = job.ranks[0].stdin
        assert stdin is not None
        for _ in range(ROUNDS):
            rank.append(json.loads(job.line()))
            proxy.append(held(job.proxies[0]))
            stdin.write("go on\n")
            stdin.flush()
        assert job.ranks[0].wait(60) == 0
    print(*zip(rank, proxy, strict=True), sep="\n")
    settled = slice(SETTLED, None)
    for name in ("storages", "bytes", "templates", "pending"):
        values = {each["device"][name] for each in rank[settled]}
        assert len(values) == 1, f"{name} on the device: {values}"
    for side, found in (("rank", rank[settled]), ("proxy", proxy[settled])):
        for name in ("fds", "threads"):
            assert found[-1][name] <= found[0][name], f"{name} of the {side}: {[each[name] for each in found]}"
        sizes, half = [each["rss"] for each in found], len(found) // 2
        grown = max(sizes[half:]) - max(sizes[:half])  # it comes and goes with what is freed last
        assert grown < MOST_GROWTH, f"the {side} has grown: {sizes}"
