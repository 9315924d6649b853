"""Many threads on one channel, and processes forked in the middle of it."""

import multiprocessing
import os
import subprocess
import sys
import threading

import torch

N = 300
failures = []


def guarded(work):
    def run():
        try:
            work()
        except BaseException as error:
            failures.append(error)
            raise

    return run


def count():
    """Enqueues, defines and waits on tensors of its own."""
    x = torch.zeros(64, device="cuda")
    for i in range(N):
        x.add_(1)
        if i % 10 == 0:
            assert x[3].item() == i + 1
            torch.ones(1 + i % 37, device="cuda").neg_()
    assert x.sum().item() == 64 * N


def differentiate():
    """Backward runs on the engine's device thread, which all of these share."""
    for i in range(N // 10):
        w = torch.full((32, 32), 2.0, device="cuda", requires_grad=True)
        (w * w).sum().backward()
        assert w.grad.sum().item() == 32 * 32 * 4, i


def upload():
    y = torch.arange(1 << 16, dtype=torch.float32)  # four rings' worth
    for _ in range(5):
        assert torch.equal(y.cuda().cpu(), y)


def fork():
    """A child can neither use the device nor free what is its parent's; it ends like any other."""
    x = torch.ones(8, device="cuda")
    for _ in range(12):
        pid = os.fork()
        if pid == 0:
            try:
                x.add_(1)
            except RuntimeError as error:
                code = 0 if "forked subprocess" in str(error) else 2
            else:
                code = 3
            del x
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert x.sum().item() == 8


def spawn():
    for _ in range(4):
        assert subprocess.run(["true"], check=True).returncode == 0
        subprocess.run([sys.executable, "-S", "-c", "pass"], check=True, preexec_fn=os.getpid)


threads = [
    threading.Thread(target=guarded(work)) for work in (count, count, differentiate, differentiate, upload, fork, spawn)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, failures


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        return torch.tensor([float(i)])


def exits_in_order():
    """A worker that ends through Python's own exit runs no handler of ours."""
    sys.exit(5)


keep = torch.ones(4, device="cuda")
for _ in range(2):
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    total = torch.zeros((), device="cuda")
    for batch in loader:
        total += batch.cuda().sum()
    assert total.item() == sum(range(32))
worker = multiprocessing.get_context("fork").Process(target=exits_in_order)
worker.start()
worker.join()
assert worker.exitcode == 5
assert keep.tolist() == [1, 1, 1, 1]
print("ok")
