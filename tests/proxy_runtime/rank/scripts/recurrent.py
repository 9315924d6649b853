"""Recurrent networks take the path that the device takes without us: results and gradients have a CPU's bits."""

import copy
import itertools

import torch
from torch.nn.utils.rnn import pack_padded_sequence

torch.set_num_threads(1)
torch.autograd.set_multithreading_enabled(False)


def used(module, x, lengths, gradients):
    """Everything that a call leaves behind; in the order of the module's parameters."""
    device = next(module.parameters()).device
    x = x.detach().to(device).requires_grad_(gradients)
    given = pack_padded_sequence(x, lengths, batch_first=module.batch_first) if lengths is not None else x
    torch.manual_seed(3)
    with torch.set_grad_enabled(gradients):
        output, hidden = module(given)
    output = output.data if lengths is not None else output
    results = [output, *(hidden if isinstance(hidden, tuple) else [hidden])]
    if gradients:
        loss = sum((r.float() * torch.arange(r.numel(), device=device).view(r.shape).cos()).sum() for r in results)
        results += torch.autograd.grad(loss, [x, *module.parameters()])
    return [r.detach().cpu() for r in results]


def check(kind, packed, gradients, dtype=torch.float32, **options):
    torch.manual_seed(0)
    module = kind(5, 4, **options).to(dtype)
    shape = (3, 6, 5) if options.get("batch_first") else (6, 3, 5)
    x = torch.randn(shape, dtype=dtype)
    lengths = torch.tensor([6, 4, 1]) if packed else None
    twin = copy.deepcopy(module).cuda()
    for turn in range(2):  # the second time with remembered calls and other values
        wanted, got = used(module, x + turn, lengths, gradients), used(twin, x + turn, lengths, gradients)
        for n, (a, b) in enumerate(zip(wanted, got, strict=True)):
            assert torch.equal(a, b), (kind.__name__, packed, gradients, dtype, options, turn, n, (a - b).abs().max())


KINDS = (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN)
DEEP = dict(num_layers=2, bidirectional=True, dropout=0.3)
for kind, packed, gradients in itertools.product(KINDS, (False, True), (False, True)):
    check(kind, packed, gradients)
    check(kind, packed, gradients, bias=False, batch_first=True)
    check(kind, packed, gradients, **DEEP)
    check(kind, packed, gradients, dtype=torch.float64, **DEEP)
    check(kind, packed, gradients, dtype=torch.bfloat16)
for packed, gradients in itertools.product((False, True), (False, True)):
    check(torch.nn.LSTM, packed, gradients, proj_size=2, **DEEP)
    check(torch.nn.RNN, packed, gradients, nonlinearity="relu", **DEEP)

# Without oneDNN a CPU takes another path; so does the device.
with torch.backends.mkldnn.flags(enabled=False):
    check(torch.nn.LSTM, False, True)

for kind, hidden in ((torch.nn.LSTMCell, 2), (torch.nn.GRUCell, 1), (torch.nn.RNNCell, 1)):
    cell = kind(5, 4)
    twin = copy.deepcopy(cell).cuda()
    x, h = torch.randn(3, 5), tuple(torch.randn(3, 4) for _ in range(hidden))
    state = h if hidden == 2 else h[0]
    there = tuple(t.cuda() for t in h) if hidden == 2 else h[0].cuda()
    wanted, got = cell(x, state), twin(x.cuda(), there)
    wanted, got = ([r] if torch.is_tensor(r) else list(r) for r in (wanted, got))
    for a, b in zip(wanted, got, strict=True):
        assert torch.equal(a, b.cpu()), kind
    sum(r.sum() for r in wanted).backward()
    sum(r.sum() for r in got).backward()
    for a, b in zip(cell.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad.cpu()), kind
    try:
        twin(torch.randn(3, 7, device="cuda"), there)
    except RuntimeError as error:
        assert "inconsistent input_size" in str(error), error
    else:
        raise AssertionError("an input of another size was taken")
print("ok")
