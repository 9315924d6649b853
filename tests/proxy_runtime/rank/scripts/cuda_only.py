"""What torch has for CUDA devices only: the parts of SyncBatchNorm, out-of-memory errors, memory reports, graphs."""

import torch

torch.manual_seed(0)

# One member of a synchronised batch norm is a batch norm.
x, grad = torch.randn(6, 4, 5), torch.randn(6, 4, 5)
plain = torch.nn.BatchNorm1d(4)
torch.nn.init.uniform_(plain.weight)
expected_input = x.clone().requires_grad_()
expected = plain(expected_input)
expected.backward(grad)

weight, bias = plain.weight.detach().cuda(), plain.bias.detach().cuda()
running_mean, running_var = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
on_device, grad_on_device = x.cuda(), grad.cuda()
mean, inverse = torch.batch_norm_stats(on_device, plain.eps)
counts = torch.full((2,), 30.0, device="cuda")
mean, inverse = torch.batch_norm_gather_stats_with_counts(
    on_device, torch.stack([mean, mean]), torch.stack([inverse, inverse]), None, None, 0.1, plain.eps, counts
)
mean, inverse = torch.batch_norm_gather_stats_with_counts(
    on_device, mean[None], inverse[None], running_mean, running_var, 0.1, plain.eps, counts[:1]
)
result = torch.batch_norm_elemt(on_device, weight, bias, mean, inverse, plain.eps)
sums = torch.batch_norm_backward_reduce(grad_on_device, on_device, mean, inverse, weight, True, True, True)
counted = torch.tensor([30], dtype=torch.int32, device="cuda")
back = torch.batch_norm_backward_elemt(grad_on_device, on_device, mean, inverse, weight, sums[0], sums[1], counted)
for ours, theirs in (
    (result, expected),
    (running_mean, plain.running_mean),
    (running_var, plain.running_var),
    (sums[2], plain.weight.grad),
    (sums[3], plain.bias.grad),
    (back, expected_input.grad),
):
    assert torch.allclose(ours.cpu(), theirs, atol=1e-5), (ours, theirs)

# Products of narrow matrices with a wide result: the CPU has no such operator, the device proxy makes one of others.
a, b, c = (torch.randn(2, 3, 3).bfloat16() for _ in range(3))
there = [t.cuda() for t in (a, b, c)]
wide = [t.float() for t in (a, b, c)]
for ours, theirs in (
    (torch.mm(there[0][0], there[1][0], out_dtype=torch.float32), wide[0][0] @ wide[1][0]),
    (torch.bmm(there[0], there[1], out_dtype=torch.float32), wide[0] @ wide[1]),
    (torch.baddbmm(there[2], there[0], there[1], out_dtype=torch.float32), torch.baddbmm(wide[2], wide[0], wide[1])),
    (
        torch.addmm(there[2][0], there[0][0], there[1][0], out_dtype=torch.float32, beta=2),
        torch.addmm(wide[2][0], wide[0][0], wide[1][0], beta=2),
    ),
):
    assert ours.dtype == torch.float32 and torch.allclose(ours.cpu(), theirs, atol=1e-5)

# What only a GPU's libraries can do says so, by name.
try:
    image = torch.ones(1, 1, 4, device="cuda")
    torch.cudnn_convolution(image, image, (0,), (1,), (1,), 1, False, False, False)
except NotImplementedError as error:
    assert "ergosphere: aten::cudnn_convolution has no kernel for the device of this job" in str(error), error
else:
    raise AssertionError("cudnn ran on a CPU")

# Where an allocation fails, the script hears of it, by the type and the words that it looks for, and goes on.
try:
    torch.empty(1 << 45, device="cuda")
except torch.cuda.OutOfMemoryError as error:
    assert "out of memory" in str(error), error
else:
    raise AssertionError("more than there is was allocated")
assert torch.ones(3, device="cuda").sum().item() == 3.0

assert "large pool" in torch.cuda.memory_summary()

# A script that tries a graph and does without goes on.
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.cuda()
except RuntimeError as error:
    assert "graphs cannot be captured" in str(error), error
else:
    raise AssertionError("a graph was captured")
torch.cuda.synchronize()
assert (torch.ones(3, device="cuda") * 2).sum().item() == 6.0

# Of two errors the earlier one is raised: the later one may be its consequence.
table = torch.nn.Embedding(4, 2).cuda()
table(torch.tensor([0, 1], device="cuda"))
table(torch.tensor([0, 9], device="cuda"))
try:
    torch.linalg.inv(torch.zeros(2, 2, device="cuda"))
except (RuntimeError, IndexError) as error:
    assert "earlier operation" in str(error), error
else:
    raise AssertionError("nothing was raised")
print("ok")
