"""Every way to name a device that is not there raises what CUDA raises, and allocates nothing."""

import io

import torch
from expect import raises

ORDINAL = "invalid device ordinal"
x = torch.ones(3, device="cuda:0")
assert torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]


def under_default() -> None:
    torch.set_default_device("cuda:5")
    try:
        torch.ones(3)
    finally:
        torch.set_default_device(None)


def under_context() -> None:
    with torch.device("cuda:5"):
        torch.zeros(2)


def under_guard() -> None:
    with torch.cuda.device(5):
        pass


like = torch.ones(2)
for action in (
    lambda: torch.ones(3, device="cuda:5"),
    lambda: torch.empty(3, device="cuda:1"),
    lambda: torch.empty_strided((2, 2), (2, 1), device="cuda:1"),
    lambda: torch.zeros(0, device="cuda:1"),
    lambda: torch.arange(3, device="cuda:5"),
    lambda: torch.linspace(0, 1, 3, device="cuda:5"),
    lambda: torch.randn(3, device="cuda:5"),
    lambda: torch.randperm(3, device="cuda:5"),
    lambda: torch.eye(3, device="cuda:5"),
    lambda: torch.full((3,), 1.0, device="cuda:5"),
    lambda: torch.tril_indices(3, 3, device="cuda:5"),
    lambda: torch.tensor([1.0, 2.0], device="cuda:5"),
    lambda: torch.as_tensor([1.0, 2.0], device="cuda:5"),
    lambda: torch.ones_like(like, device="cuda:5"),
    lambda: torch.empty_like(x, device="cuda:5"),
    lambda: x.new_zeros(3, device="cuda:5"),
    lambda: torch.hann_window(4, device="cuda:5"),
    lambda: like.to("cuda:5"),
    lambda: like.to(torch.device("cuda", 5)),
    lambda: x.to("cuda:5"),
    lambda: x.to("cuda:5", torch.float64),
    lambda: like.cuda(5),
    lambda: x.cuda(5),
    lambda: torch.nn.Linear(2, 2, device="cuda:5"),
    lambda: torch.nn.Linear(2, 2).to("cuda:5"),
    lambda: torch.nn.Linear(2, 2).cuda(5),
    lambda: torch.UntypedStorage(4, device="cuda:5"),
    lambda: torch.cuda.set_device(5),
    lambda: torch.cuda.set_device("cuda:1"),
    lambda: torch.cuda.synchronize(5),
    lambda: torch.cuda.mem_get_info(5),
    under_default,
    under_context,
    under_guard,
):
    raises(torch.AcceleratorError, ORDINAL, action)
raises(RuntimeError, ORDINAL, lambda: torch.Generator(device="cuda:5"))
raises(RuntimeError, "", lambda: torch.cuda.Stream(device="cuda:5"))
raises((RuntimeError, AssertionError), "nvalid device", lambda: torch.cuda.get_device_properties(5))
raises((RuntimeError, AssertionError), "nvalid device", lambda: torch.cuda.get_device_name(5))
raises((RuntimeError, AssertionError), "nvalid device", lambda: torch.cuda.get_device_capability(5))

file = io.BytesIO()
torch.save({"x": x}, file)
file.seek(0)
raises(RuntimeError, "device 5", lambda: torch.load(file, map_location="cuda:5"))

assert torch.cuda.memory_stats()["allocated_bytes.all.allocated"] == before, "something was allocated"
assert torch.cuda.current_device() == 0
torch.cuda.set_device(0)
with torch.cuda.device(-1), torch.cuda.device_of(x), torch.cuda.device(None):
    assert torch.ones(2, device="cuda").device == torch.device("cuda:0")
assert x.cuda(0) is x and x.to("cuda:0") is x and x.to("cuda") is x and x.get_device() == 0

properties = torch.cuda.get_device_properties(0)
free, total = torch.cuda.mem_get_info()
assert properties.total_memory == total >= free > 0
assert properties.name == torch.cuda.get_device_name() and torch.cuda.get_device_capability("cuda:0") >= (7, 0)
assert torch.cuda.is_bf16_supported() and torch.accelerator.current_accelerator() == torch.device("cuda")
print("ok")
