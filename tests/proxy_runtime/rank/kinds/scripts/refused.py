"""What cannot work on a device in another process raises one sentence that names it; the rank stays usable."""

import importlib.util
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from expect import raises
from torch import nn

x = torch.arange(6.0, device="cuda").reshape(2, 3)
square = torch.ones(4, 4, device="cuda")
nested = torch.nested.nested_tensor([x, x], device="cuda")

KERNEL = """
import triton
import triton.language as tl
@triton.jit
def twice(source, target, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, 2 * tl.load(source + at, mask=at < n), mask=at < n)
"""


def refused(kind: type[BaseException], text: str, action: Callable[[], Any]) -> None:
    raises(kind, text, action)
    assert (x * 1.5).sum().item() == 22.5


def capture() -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x * 2


def triton_kernel() -> None:
    path = Path(tempfile.mkdtemp()) / "kernel.py"
    path.write_text(KERNEL)
    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.twice[(1,)](x, torch.empty_like(x), 6, BLOCK=8)


refused(NotImplementedError, "no kernel of aten::clamp for sparse", lambda: x.to_sparse().clamp(0))
refused(NotImplementedError, "no kernel of aten::cumsum", lambda: x.to_sparse_csr().cumsum(1))
refused(NotImplementedError, "use layout=torch.jagged", lambda: nested.cumsum(1))
refused(RuntimeError, "sspaddmm", lambda: torch.smm(square.to_sparse(), square))

refused(NotImplementedError, "quantized", lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8))
scales, zeros = torch.ones(2, device="cuda"), torch.zeros(2, dtype=torch.long, device="cuda")
refused(NotImplementedError, "quantized", lambda: torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8))
refused(NotImplementedError, "quantized", lambda: torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.quint8).cuda())

refused(TypeError, "can't convert cuda:0", x.numpy)
refused(RuntimeError, "dlpack", lambda: torch.from_dlpack(x))
refused(RuntimeError, "__cuda_array_interface__", lambda: x.__cuda_array_interface__)
queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
refused(RuntimeError, "another process", lambda: queue.put(x))
saved = Path(tempfile.mkdtemp()) / "saved.pt"
torch.save(x.cpu(), saved)
refused(RuntimeError, "device_count() is 1", lambda: torch.load(saved, map_location="cuda:3"))

refused(RuntimeError, "CUDA graphs cannot be captured", capture)
refused(
    RuntimeError,
    "CUDA graphs cannot be captured",
    lambda: torch.cuda.make_graphed_callables(nn.Linear(3, 2).cuda(), (x,)),
)
refused(RuntimeError, "Triton kernel twice", triton_kernel)
source = "template <typename T> T twice(T x) { return 2 * x; }"
refused(RuntimeError, "CUDA source", lambda: torch.cuda.jiterator._create_jit_fn(source)(x))

assert pickle.loads(pickle.dumps(x)).sum().item() == 15.0
sys.stdout.write("ok\n")
