"""What a device is to a script must be the same after a cut: limit, peak, flags, generators, events, pinned memory."""

import hashlib

import torch

MIB = 1 << 20
cuda = torch.cuda
total = cuda.mem_get_info()[1]
cuda.set_per_process_memory_fraction(0.5)
peak = torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")
del peak
most = cuda.max_memory_allocated()
assert most >= 24 * MIB

torch.set_num_threads(2)
torch.use_deterministic_algorithms(True)
torch.set_float32_matmul_precision("medium")
values = torch.randn(1 << 18, device="cuda", generator=torch.Generator("cuda").manual_seed(4))
generator = torch.Generator("cuda").manual_seed(5)
matrix = torch.randn(64, 64, device="cuda", generator=generator)
start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
start.record()
pinned = torch.full((1 << 16,), 3.0).pin_memory()


def digest() -> str:
    numbers = [values.sum(), values.softmax(0).max(), (matrix @ matrix).sum()]
    return hashlib.sha256(b"".join(n.cpu().numpy().tobytes() for n in numbers)).hexdigest()


before = digest()
drawn = hashlib.sha256()
for step in range(3000):
    drawn.update(torch.rand(8, device="cuda", generator=generator).cpu().numpy().tobytes())
    if step % 100 == 0:
        print(f"PROGRESS {step}", flush=True)
        assert digest() == before, f"step {step}: the flags are not what they were"
        assert pinned.is_pinned() and pinned.to("cuda", non_blocking=True).sum().item() == 3.0 * (1 << 16)

end.record()
end.synchronize()  # as CUDA does, elapsed_time of an event that is not reached raises
assert 0 < start.elapsed_time(end) < 3_600_000
assert cuda.max_memory_allocated() == most and cuda.mem_get_info()[1] == total == 64 * MIB
try:
    torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    assert "32.00 MiB allowed" in str(error), error
else:
    raise AssertionError("the limit is gone")
try:
    torch.nn.functional.max_unpool1d(
        torch.ones(1, 1, 2, device="cuda"), torch.zeros(1, 1, 2, dtype=torch.long, device="cuda"), [2]
    )
except RuntimeError as error:
    assert "deterministic" in str(error), error
else:
    raise AssertionError("the determinism is gone")
print(f"values sha256 {before}")
print(f"draws sha256 {drawn.hexdigest()}")
