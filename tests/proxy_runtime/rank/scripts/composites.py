"""What torch composes otherwise for a CUDA tensor than for a CPU tensor: results and gradients have the bits of a CPU.

Numbers that hide how something rounds (a probability of a half) are in torch's own tables; here are others.
"""

import copy
import itertools

import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F

torch.set_num_threads(1)
torch.autograd.set_multithreading_enabled(False)
HALF = (torch.bfloat16, torch.float16)


def gradients(result, inputs):
    return torch.autograd.grad(result, inputs, torch.linspace(-1, 1, result.numel()).view(result.shape).to(result))


def check(name, function, *inputs):
    """`function` of the inputs and of their copies on the device, with gradients."""
    found = []
    for device in ("cpu", "cuda"):
        there = [t.detach().to(device).requires_grad_(t.is_floating_point()) for t in inputs]
        torch.manual_seed(3)
        result = function(*there)
        wanted = [t for t in there if t.requires_grad] if result.requires_grad else []
        found.append([t.detach().cpu() for t in (result, *(gradients(result, wanted) if wanted else ()))])
    for n, (a, b) in enumerate(zip(*found, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), (name, n, (a - b).abs().max())


def check_module(name, module, *inputs, autocast=False):
    def used(t, *more):
        twin = copy.deepcopy(module).to(t.device)
        with torch.autocast(t.device.type, torch.bfloat16, enabled=autocast):
            result = twin(t, *more)
        result = result[0] if isinstance(result, tuple) else result
        return torch.cat([result.flatten(), *(g.flatten() for g in gradients(result, list(twin.parameters())))])

    check(name, lambda *there: used(*there).detach(), *inputs)


def summed(function):
    return lambda *a: function(*a).float().square().sum()


torch.manual_seed(0)
for dtype, p in itertools.product((torch.float32, torch.float64, *HALF), (0.025, 1.0)):
    x = torch.randn(40, 30, dtype=dtype)
    heads = [torch.randn(4, 2, 3, 8, 16, dtype=dtype) for _ in range(3)]
    what = f"{dtype} {p}"
    check(f"dropout {what}", lambda t, p=p: F.dropout(t, p), x)
    check(f"attention {what}", lambda *a, p=p: F.scaled_dot_product_attention(*a, dropout_p=p), *(t[0] for t in heads))
    check(f"grad of dropout {what}", lambda t, p=p: grad(summed(lambda u: F.dropout(u, p)))(t.detach()), x)
    different = vmap(lambda t, p=p: F.dropout(t, p), randomness="different")
    check(f"vmap of dropout {what}", lambda t, different=different: different(t.detach()), x)
    check(f"vmap of attention {what}", vmap(F.scaled_dot_product_attention), *heads)

for function, dtype in itertools.product((torch.softmax, torch.log_softmax), HALF):
    x = torch.randn(6, 5, dtype=dtype)
    for wide in (torch.float32, torch.float64, None):
        check(f"{function} {dtype} {wide}", lambda t, f=function, wide=wide: f(t, -1, dtype=wide), x)
        check(f"vmap of {function} {dtype} {wide}", vmap(lambda t, f=function, wide=wide: f(t, -1, dtype=wide)), x)
    out = [torch.empty(0, device=device) for device in ("cpu", "cuda")]
    a, b = (function(x.to(t.device), 1, dtype=torch.float32, out=t) for t in out)
    assert torch.equal(a, b.cpu()) and b is out[1], function

IN_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # else torch asks oneDNN for a cell that it does not have
sequence = torch.randn(7, 3, 16)
layers = {
    "attention": (nn.MultiheadAttention(16, 2, dropout=0.1), 3),
    "encoder": (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1), 1),
    "decoder": (nn.TransformerDecoderLayer(16, 2, 32, dropout=0.1), 2),
    "recurrent": (nn.LSTM(16, 8, 2, dropout=0.1), 1),
}
for name, (module, inputs) in layers.items():
    check_module(name, module, *[sequence] * inputs)
    with torch.backends.mkldnn.flags(enabled=IN_BF16):
        check_module(f"{name} in autocast", module, *[sequence] * inputs, autocast=True)
    check_module(f"{name} in bfloat16", copy.deepcopy(module).bfloat16(), *[sequence.bfloat16()] * inputs)

try:
    F.dropout(torch.ones(2, device="cuda"), 1.5)
except ValueError as error:
    assert "dropout probability has to be between 0 and 1" in str(error), error
else:
    raise AssertionError("a probability above 1 was taken")
print("ok")
