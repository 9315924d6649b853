"""Flags that a script sets take effect on the device, in order, and read back as they were set."""

import threading
from typing import Any

import torch
from expect import raises
from torch.nn.attention import SDPBackend, sdpa_kernel

fill: Any = torch.utils.deterministic
assert torch.backends.cudnn.enabled is True and torch._C._get_cudnn_enabled() is True
# Deterministic algorithms: what has none raises at its line, an operator that the device knows too.


def put() -> torch.Tensor:
    ones = torch.ones(1, 1, 2, device="cuda")
    return torch.nn.functional.max_unpool1d(ones, torch.zeros(1, 1, 2, dtype=torch.long, device="cuda"), [2])


put()
torch.use_deterministic_algorithms(True)
assert torch.are_deterministic_algorithms_enabled()
raises(RuntimeError, "deterministic", put)
fresh = torch.empty(5, device="cuda")
assert fresh.isnan().all(), "uninitialised memory is filled"
fill.fill_uninitialized_memory = False
torch.empty(5, device="cuda")
fill.fill_uninitialized_memory = True
torch.use_deterministic_algorithms(True, warn_only=True)
put()
torch.use_deterministic_algorithms(False)
put()

# Precision of float32: bfloat16 inside, where the CPU has it; never what the other setting gave.
torch.manual_seed(0)
a, b = torch.randn(64, 64), torch.randn(64, 64)
da, db = a.cuda(), b.cuda()
for setting in ("highest", "medium", "high", "highest"):
    torch.set_float32_matmul_precision(setting)
    assert torch.get_float32_matmul_precision() == setting
    assert torch.equal((da @ db).cpu(), a @ b), setting
with torch.backends.mkldnn.flags(enabled=False):
    assert torch.equal((da @ db).cpu(), a @ b)
assert torch.equal((da @ db).cpu(), a @ b)
torch.backends.cuda.matmul.allow_tf32 = True
assert torch.backends.cuda.matmul.allow_tf32 is True
torch.backends.cuda.matmul.fp32_precision = "ieee"
da.mm(db)
torch.backends.cuda.matmul.fp32_precision = "tf32"
da.mm(db)
torch.set_float32_matmul_precision("highest")

# cuDNN's switches read back; on a device that has none they change nothing.
conv = torch.nn.Conv2d(2, 3, 3).cuda()
norm = torch.nn.BatchNorm2d(3).cuda()
image = torch.randn(2, 2, 8, 8, device="cuda")
expected = norm(conv(image))
norm.reset_running_stats()
for name, value in (("benchmark", True), ("deterministic", True), ("allow_tf32", False), ("enabled", False)):
    setattr(torch.backends.cudnn, name, value)
    assert getattr(torch.backends.cudnn, name) is value, name
torch.backends.cudnn.enabled = True
with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=True):
    assert torch.backends.cudnn.deterministic and torch.equal(norm(conv(image)), expected)
    assert torch.nn.LSTM(4, 4).cuda()(torch.ones(3, 2, 4, device="cuda"))[0].shape == (3, 2, 4)
assert torch.backends.cudnn.enabled and torch.backends.cudnn.benchmark and not torch.backends.cudnn.allow_tf32
raises((TypeError, RuntimeError), "", lambda: setattr(torch.backends.cudnn, "enabled", 3))

# Attention: what a script forbids is not taken.
q = torch.randn(1, 2, 16, 8, device="cuda")
attend = torch.nn.functional.scaled_dot_product_attention
with sdpa_kernel(SDPBackend.MATH):
    math = attend(q, q, q)
    host = q.cpu()
    assert torch.equal(math.cpu(), attend(host, host, host))
assert torch.equal(attend(q, q, q).cpu(), attend(q.cpu(), q.cpu(), q.cpu()))
torch.backends.cuda.enable_flash_sdp(False)
assert torch.equal(attend(q, q, q), math) and not torch.backends.cuda.flash_sdp_enabled()
torch.backends.cuda.enable_flash_sdp(True)

# The default dtype decides what an operator on the device makes of integers.
count = torch.tensor([1, 2], device="cuda")
assert (count / 3).dtype == torch.float32
torch.set_default_dtype(torch.float64)
assert (count / 3).dtype == torch.float64 and (count / 3)[0].item() == 1 / 3
torch.set_default_dtype(torch.float32)
assert (count / 3).dtype == torch.float32

# Numbers below the normal ones.
tiny = torch.full((4,), 1e-40, device="cuda")
assert (tiny * 1.0).sum().item() > 0
if torch.set_flush_denormal(True):
    assert (tiny * 1.0).sum().item() == 0
    torch.set_flush_denormal(False)
assert (tiny * 1.0).sum().item() > 0


def sets_in_a_thread() -> None:
    torch.set_num_threads(2)
    torch.backends.cuda.enable_math_sdp(True)


thread = threading.Thread(target=sets_in_a_thread)
thread.start()
thread.join()
assert torch.equal((da @ db).cpu(), a @ b)
print("ok")
