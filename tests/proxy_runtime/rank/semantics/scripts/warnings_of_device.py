"""What torch warns of while the device executes a call is a Python warning of that call, as natively."""

import warnings

import torch
from torch.nn.functional import max_unpool1d

MESSAGE = "does not have a deterministic implementation"


def seen(call, times: int = 1) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(times):
            call()
    return [warning for warning in found if "torch" in str(warning.category) or MESSAGE in str(warning.message)]


values, places = torch.ones(1, 1, 2, device="cuda"), torch.tensor([[[0, 3]]], device="cuda")


def unpool() -> None:
    max_unpool1d(values, places, 2)


assert seen(unpool) == []
torch.use_deterministic_algorithms(True, warn_only=True)
first, again = seen(unpool), seen(unpool, 3)
assert len(first) == 1 and len(again) == 3, (first, again)
assert first[0].category is UserWarning and "max_unpooling2d_forward_out" in str(first[0].message), first[0].message
assert first[0].filename == __file__ or "functional" in first[0].filename, first[0].filename

# As an error: raised at the call, and the device goes on.
with warnings.catch_warnings():
    warnings.simplefilter("error")
    for _ in range(2):
        try:
            unpool()
        except UserWarning as error:
            assert MESSAGE in str(error)
        else:
            raise AssertionError("no error")
assert values.sum().item() == 2

# In a backward pass, which another thread runs.
table = torch.ones(4, 3, device="cuda", requires_grad=True)
result = torch.nn.functional.max_pool1d(torch.rand(1, 2, 8, device="cuda", requires_grad=True), 2)
result.sum().backward()

torch.use_deterministic_algorithms(True)
try:
    unpool()
except RuntimeError as error:
    assert MESSAGE in str(error)
else:
    raise AssertionError("no error")
torch.use_deterministic_algorithms(False)
assert seen(unpool, 2) == []

# Others come when the device executes such a call for the first time: it knows no more than that.
out = torch.empty(3, device="cuda")
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    torch.neg(torch.ones(5, device="cuda"), out=out)
assert len(found) == 1 and "was resized" in str(found[0].message), found

print("ok")
