"""Values read one by one: a round trip where something was sent since, none where nothing was."""

import threading

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ergo_rank import _interposer


def responses() -> int:
    return _interposer.channel_stats()["responses"]


x = torch.arange(8, dtype=torch.float32, device="cuda")
assert x[3].item() == 3
before = responses()
assert [x[i].item() for i in range(8)] == list(range(8))
assert responses() == before, "a small storage is fetched once"

# Whatever may have changed it makes it fetched again.
y = torch.full((8,), 7.0)
changes = [
    (lambda: x.add_(1), [i + 1 for i in range(8)]),
    (lambda: x.copy_(y), [7] * 8),
    (lambda: x[2:4].zero_(), [7, 7, 0, 0, 7, 7, 7, 7]),
    (lambda: torch._foreach_mul_([x], 2.0), [14, 14, 0, 0, 14, 14, 14, 14]),
    (lambda: torch.neg(y.cuda(), out=x), [-7] * 8),
    (lambda: x.untyped_storage().copy_(y.untyped_storage()), [7] * 8),
    (lambda: x.set_(torch.arange(8.0).cuda()), list(range(8))),
    (lambda: setattr(x, "data", (y + 1).cuda()), [8] * 8),
]
for change, expected in changes:
    change()
    assert [x[i].item() for i in range(8)] == expected, expected

# Each dtype, also where elements do not lie at multiples of eight bytes; lazy conjugation and negation.
for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.half, torch.bfloat16, torch.double):
    here = torch.tensor([0, 1, 3, 5, 1]).to(dtype)
    there = here.cuda()
    assert [there[i].item() for i in range(5)] == here.tolist(), dtype
z = torch.tensor([1 + 2j, 3 - 4j])
for there in (z.cuda(), z.cuda().conj(), z.cuda().to(torch.complex128)):
    assert there[1].item() == there.cpu()[1].item()
assert z.cuda().conj().imag[0].item() == -2
large = torch.arange(1000.0, device="cuda")
assert [large[i].item() for i in (0, 999, 500)] == [0, 999, 500]
assert torch.zeros((), device="cuda").item() == 0

# Sizes of what is indexed by numbers need no answer, those of a mask do; other numbers of the host are no new template.
source = torch.arange(12.0, device="cuda").reshape(6, 2)
rows = torch.tensor([4, 1], device="cuda")
others, mask = rows + 1, rows.new_tensor([1, 0, 0, 0, 0, 0]) > 0
rest = ~mask
for index in (rows, mask, torch.tensor([4, 1])):
    source[index]
before = _interposer.channel_stats()
taken, answered = source[others], responses()
assert answered == before["responses"], "an index of numbers is waited for"
assert taken.tolist() == [[10, 11], [4, 5]]
assert source[rest].shape == (5, 2) and source[mask].tolist() == [[0, 1]]
assert source[torch.tensor([2, 0])].tolist() == [[4, 5], [0, 1]]
assert source[torch.tensor([True, False] * 3)].tolist() == [[0, 1], [4, 5], [8, 9]]
assert _interposer.channel_stats()["templates"] == before["templates"]

meta = torch.empty(0, device="cuda")
try:
    meta.item()
except RuntimeError:
    pass
else:
    raise AssertionError("an empty tensor has no item")


# What torch's own item() asks below autograd is asked here too: modes, functorch, fake tensors.
class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


one = torch.ones((), device="cuda", requires_grad=True)
with Seen() as seen:
    assert one.item() == 1
assert seen.names == ["aten::_local_scalar_dense"], seen.names
with torch.inference_mode():
    assert torch.full((1, 1), 2.0, device="cuda").item() == 2
assert torch.func.grad(lambda v: v * v.detach().item())(one.detach() * 3).item() == 3
for refused in (
    lambda: torch.func.vmap(lambda v: v.item())(torch.ones(3, device="cuda")),
    lambda: torch.ones(2, device="cuda").item(),
):
    try:
        refused()
    except RuntimeError:
        pass
    else:
        raise AssertionError("there is no one element")
sparse = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), torch.tensor([4.0]), (1,)).cuda()
assert sparse.item() == 4
plain = one.detach()
with FakeTensorMode() as mode:
    fake = mode.from_tensor(plain)
    try:
        fake.item()
    except DataDependentOutputException:
        pass
    else:
        raise AssertionError("a fake tensor has no value")

# Threads, each with its own tensor, so that each throws out what the others have fetched.
wrong = []


def count(n: int) -> None:
    mine = torch.zeros(4, device="cuda")
    for i in range(300):
        mine.add_(n)
        found = [mine[j].item() for j in range(4)]
        if found != [n * (i + 1)] * 4:
            wrong.append((n, i, found))


threads = [threading.Thread(target=count, args=(n,)) for n in (1, 2, 3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong, wrong[:3]
print("ok")
