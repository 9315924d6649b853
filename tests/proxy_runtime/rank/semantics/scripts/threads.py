"""Sums whose bits depend on the number of threads. Prints them; the same script runs natively with `--native`."""

import hashlib
import sys

import torch

device = "cpu" if "--native" in sys.argv else "cuda"
torch.manual_seed(3)
host = torch.randn(1 << 20)
data = host.to(device)
for threads in (1, 2, 3, 1, 4):
    torch.set_num_threads(threads)
    assert torch.get_num_threads() == threads
    results = [data.sum(), (data * 1.5).mean(), data.view(1024, 1024).softmax(0).sum(1), data.norm()]
    digest = hashlib.sha256(b"".join(r.cpu().numpy().tobytes() for r in results)).hexdigest()[:16]
    print(threads, digest)
