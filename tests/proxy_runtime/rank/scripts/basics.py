"""Tensors of the device behave as CPU tensors do, bit for bit."""

import copy
import io
import pickle

import torch

assert torch.cuda.is_available() and torch.cuda.device_count() == 1
assert torch.cuda.get_device_name(0)
device = torch.device("cuda")
g = torch.Generator().manual_seed(3)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=g)


def same(name: str, on_device: torch.Tensor, on_cpu: torch.Tensor) -> None:
    assert on_device.device.type == "cuda", name
    assert on_device.shape == on_cpu.shape and on_device.stride() == on_cpu.stride(), name
    got = on_device.cpu()
    assert got.dtype == on_cpu.dtype and torch.equal(got, on_cpu), (name, got, on_cpu)


# Copies: dense, strided, broadcast, other types, larger than a chunk.
for t in (rand(3, 4), rand(4, 3).t(), rand(1, 5).expand(3, 5), rand(8)[::2], torch.arange(10), rand(700_000)):
    same("to", t.cuda(), t) if t.is_contiguous() else same("to", t.cuda().contiguous(), t.contiguous())
    assert torch.equal(t.cuda().cpu(), t)
half = rand(5).cuda()
half.copy_(torch.arange(5))
assert half.tolist() == [0, 1, 2, 3, 4]
target = torch.zeros(3, 4)
target.t().copy_(torch.arange(12.0, device=device).view(4, 3))
assert torch.equal(target, torch.arange(12.0).view(4, 3).t())
assert torch.equal(rand(0, 3).cuda().cpu(), torch.empty(0, 3))
assert rand(4).cuda().to(torch.float64).dtype is torch.float64

# The same programs on both devices, twice, so that cached templates are used with other values.
programs = {
    "arithmetic": lambda a, b: (a * 2 + b - 0.5) / (b.abs() + 1),
    "matmul": lambda a, b: a @ b.t(),
    "reduce": lambda a, b: a.sum(0) + b.mean(0) + a.amax(0),
    "views": lambda a, b: a.view(-1).unfold(0, 3, 2).sum(1),
    "index": lambda a, b: a[torch.tensor([0, 2])] + b[1:3],
    "mask": lambda a, b: a[a > 0],
    "where": lambda a, b: torch.where(a > b, a, b),
    "nonzero": lambda a, b: (a > 0).nonzero(),
    "sort": lambda a, b: a.flatten().sort().values,
    "softmax": lambda a, b: torch.softmax(a, -1).log(),
    "cat": lambda a, b: torch.cat([a, b, a], 1),
    "inplace": lambda a, b: a.clone().add_(b).mul_(3).clamp_(min=0),
    "ldexp": lambda a, b: torch.ldexp(a, torch.arange(6, device=a.device)),
    "mode": lambda a, b: a.round().mode(dim=0).values,
    "complex": lambda a, b: torch.view_as_real(torch.fft.fft(a)),
    "cumsum": lambda a, b: a.cumsum(0),
    "out": lambda a, b: torch.add(a, b, out=torch.empty(0, device=a.device)),
    "arange": lambda a, b: torch.arange(0, 5, 0.5, device=a.device),
    "zeros": lambda a, b: torch.zeros_like(a) + torch.ones(6, device=a.device) * torch.full((6,), 7.0, device=a.device),
    "foreach": lambda a, b: torch.stack(torch._foreach_add([a, b], [1.0, 2.0])),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "norm": lambda a, b: torch.nn.functional.layer_norm(a, (6,)),
    "svd": lambda a, b: torch.linalg.svdvals(a),
    "split": lambda a, b: torch.stack([p.sum() for p in a.split(2, 1)]),
    "scatter": lambda a, b: a.clone().scatter_(1, torch.zeros(4, 1, dtype=torch.int64, device=a.device), 9.0),
    "interpolate": lambda a, b: torch.nn.functional.interpolate(a.view(1, 1, 4, 6), scale_factor=2.0),
}
for _ in range(2):
    a, b = rand(4, 6), rand(4, 6)
    for name, program in programs.items():
        same(name, program(a.cuda(), b.cuda()), program(a, b))

# Gradients, through views, undefined gradients and double backward.
for dev in ("cpu", "cuda"):
    x = torch.arange(6.0, device=dev).view(2, 3).requires_grad_()
    y = (x[0] * x[1].detach()).sum() + (x**3).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    first.pow(2).sum().backward()
    result = x.grad.cpu()
    if dev == "cpu":
        wanted = result
assert torch.equal(result, wanted)

# Scalars and control flow.
assert half.sum().item() == 10.0 and bool((half > 3).any()) and len(half) == 5
assert torch.equal(half, half.clone()) and half.is_cuda and half.get_device() == 0

# Random numbers: a generator of the device has a state that can be taken back.
torch.manual_seed(11)
first = torch.rand(4, device=device)
state = torch.cuda.get_rng_state()
second = torch.rand(4, device=device)
torch.cuda.set_rng_state(state)
assert torch.equal(torch.rand(4, device=device), second) and not torch.equal(first, second)
torch.manual_seed(11)
assert torch.equal(torch.rand(4, device=device), first)
own = torch.Generator(device="cuda").manual_seed(5)
assert isinstance(own, torch.Generator) and own.device.type == "cuda"
drawn = torch.rand(4, device=device, generator=own)
assert torch.equal(torch.rand(4, device=device, generator=own.manual_seed(5)), drawn)
assert not torch.equal(torch.rand(4, device=device), drawn)

# Storages, pickling, saving.
storage = torch.arange(4, dtype=torch.uint8, device=device).untyped_storage()
storage.resize_(8)
assert storage.nbytes() == 8 and storage.data_ptr() != 0
made = torch.UntypedStorage(16, device="cuda")
assert made.device.type == "cuda" and made.nbytes() == 16
buffer = io.BytesIO()
torch.save({"w": half, "view": half[1:]}, buffer)
buffer.seek(0)
loaded = torch.load(buffer)
assert loaded["w"].is_cuda and torch.equal(loaded["w"], half) and torch.equal(loaded["view"].cpu(), half[1:].cpu())
buffer.seek(0)
assert torch.load(buffer, map_location="cpu")["w"].tolist() == half.tolist()
assert torch.equal(pickle.loads(pickle.dumps(half)), half)
assert torch.equal(copy.deepcopy(half), half)
grown = torch.empty(0, device=device)
grown.resize_(3).fill_(2)
assert grown.tolist() == [2, 2, 2] and grown.data_ptr() != 0

# A call may conjugate its out= tensor, which is a flag on the tensor and not in its memory.
torch.manual_seed(0)
lu, pivots = torch.linalg.lu_factor(torch.randn(3, 3, dtype=torch.complex64))
given = torch.randn(4, 3, dtype=torch.complex64)
for turn in (1, 2):
    wanted, written = torch.empty(0, dtype=given.dtype), torch.empty(0, dtype=given.dtype, device=device)
    torch.linalg.lu_solve(lu, pivots, turn * given, left=False, out=wanted)
    torch.linalg.lu_solve(lu.to(device), pivots.to(device), turn * given.to(device), left=False, out=written)
    assert wanted.is_conj() == written.is_conj() and torch.equal(written.cpu(), wanted), turn
assert torch.equal(given.to(device).conj_physical_().cpu(), given.conj())  # its kernel is torch's composite

# More dimensions than most operators take.
assert torch.ones([1] * 70, device=device).add(1).sum().item() == 2

# Streams, events and memory are torch's own interfaces.
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    event = torch.cuda.Event()
    event.record()
event.synchronize()
stream.synchronize()
torch.cuda.synchronize()
before = torch.cuda.memory_allocated()
big = torch.empty(1 << 20, dtype=torch.uint8, device=device)
assert torch.cuda.memory_allocated() - before == 1 << 20
assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated()
del big
assert torch.cuda.memory_allocated() == before
pinned = torch.arange(4.0).pin_memory()
assert torch.equal(pinned.to(device, non_blocking=True).cpu(), torch.arange(4.0))
assert torch.equal(half.to("cpu", non_blocking=True), half.cpu())

from ergo_rank import _interposer  # noqa: E402

stats = _interposer.channel_stats()
assert stats["executed"] > stats["defined"] / 2 > 0 and stats["refused"] == 0, stats
print("ok")
