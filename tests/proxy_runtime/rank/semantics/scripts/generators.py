"""Generators of the device: seeds, states, copies, and what shares a state."""

import os

import torch
from expect import raises

cuda = torch.cuda


def draw(generator: torch.Generator | None = None) -> torch.Tensor:
    return torch.randn(5, device="cuda", generator=generator).cpu()


torch.manual_seed(7)
first = draw()
torch.manual_seed(7)
assert torch.equal(draw(), first) and cuda.initial_seed() == 7
cuda.manual_seed_all(8)
assert cuda.initial_seed() == 8 and not torch.equal(draw(), first)
cuda.manual_seed(7)
assert torch.equal(draw(), first)
cuda.seed()
assert not torch.equal(draw(), first)
cuda.seed_all()

state = cuda.get_rng_state()
states = cuda.get_rng_state_all()
a = draw()
cuda.set_rng_state(state)
assert torch.equal(draw(), a)
cuda.set_rng_state_all(states)
assert torch.equal(draw(), a)
cuda.set_rng_state(state, "cuda:0")
with torch.random.fork_rng(devices=[0]):
    assert torch.equal(draw(), a)
assert torch.equal(draw(), a)
raises((RuntimeError, TypeError), "", lambda: cuda.set_rng_state(state[:10]))

g = torch.Generator(device="cuda")
assert isinstance(g, torch.Generator) and g.device.type == "cuda"
g.manual_seed(3)
assert g.initial_seed() == 3
kept = g.get_state()
b = draw(g)
g.set_state(kept)
assert torch.equal(draw(g), b)
copy = g.clone_state()
c = draw(g)
assert torch.equal(draw(copy), c), "a copy goes its own way from the same place"
g.set_state(kept)
shared = g.graphsafe_get_state()
draw(shared)
g.graphsafe_set_state(shared)
d = draw(g)
assert not torch.equal(d, b), "who shares a state moves it on"
other = torch.Generator(device="cuda")
other.graphsafe_set_state(g.graphsafe_get_state())
e = draw(other)
assert not torch.equal(e, d)
raises(RuntimeError, "", lambda: torch.randn(3, device="cuda", generator=torch.Generator()))

for i in range(70_000):  # more than a device keeps at a time
    torch.Generator(device="cuda").manual_seed(i)

dropout = torch.nn.Dropout(0.5)
ones = torch.ones(100, device="cuda")
torch.manual_seed(1)
mask = dropout(ones)
torch.manual_seed(1)
assert torch.equal(dropout(ones), mask) and not torch.equal(dropout(ones), mask)
print(os.environ["RANK"], mask.sum().item())
# Offsets are of generators that count; those of a CPU accelerator do not.
for call in (
    torch.Generator("cuda").get_offset,
    lambda: torch.Generator("cuda").set_offset(8),
    lambda: torch.cuda._get_rng_state_offset(),
):
    try:
        call()
    except RuntimeError as error:
        assert "CPU Generator does not use offset" in str(error) and "CPU accelerator" in str(error), error
    else:
        raise AssertionError("no error")
print("ok")
