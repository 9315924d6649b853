"""Sparse COO tensors: prints a digest per step. `--native` runs it on the CPU, whose digests must be the same."""

from collections.abc import Iterator
from typing import Any

import torch
from digests import DEVICE, write

torch.manual_seed(3)


def random_sparse(rows: int = 5, columns: int = 7, dense: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """With repeated indices, on the device."""
    indices = torch.randint(0, min(rows, columns), (2, 9))
    values = torch.randn((9, dense) if dense else (9,), dtype=dtype)
    shape = (rows, columns, dense) if dense else (rows, columns)
    return torch.sparse_coo_tensor(indices, values, shape).to(DEVICE)


def empty_sparse(*shape: int) -> torch.Tensor:
    make: Any = torch.sparse_coo_tensor  # by size alone, which its type does not know
    return make(shape, device=DEVICE)


def construction() -> Iterator[Any]:
    i, v = torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.tensor([3.0, 4.0, 5.0])
    yield torch.sparse_coo_tensor(i, v, device=DEVICE)
    yield torch.sparse_coo_tensor(i.to(DEVICE), v.to(DEVICE), (2, 4))
    yield torch.sparse_coo_tensor(i, v, (2, 4), device=DEVICE, dtype=torch.float64, is_coalesced=True)
    yield torch.sparse_coo_tensor(i, v, (2, 4), device=DEVICE, check_invariants=True)
    yield empty_sparse(3, 4)
    yield torch.sparse_coo_tensor(torch.tensor([[0, 1]]), [[1.0, 2], [3, 4]], (2, 2), device=DEVICE)
    x = random_sparse()
    yield x
    yield x.to(DEVICE), x.cpu(), x.to(torch.float64), x.clone(), x.detach()
    yield x._indices(), x._values(), x._nnz(), x.sparse_dim(), x.dense_dim(), x.is_coalesced(), x.shape, x.layout
    yield torch.empty_like(x)._nnz(), torch.zeros_like(x), torch.zeros(2, 3, layout=torch.sparse_coo, device=DEVICE)
    assert x.device.type == DEVICE and x.is_sparse and x.is_cuda == (DEVICE == "cuda") and str(x)


def conversion() -> Iterator[Any]:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        dense = torch.randn(4, 5).mul(3).round().to(dtype).to(DEVICE)
        for made in (dense.to_sparse(), dense.to_sparse(1), dense.to_sparse_coo()):
            yield made, made.to_dense(), made.indices(), made.values()
    x = random_sparse()
    yield x.to_dense(), x.coalesce(), x.coalesce().coalesce().is_coalesced(), x.coalesce().indices()
    for _ in range(2):
        y = random_sparse(dense=3)
        yield y.coalesce(), y.to_dense(), y.coalesce().values()
    yield x.coalesce().half(), x.double(), x.int()
    yield torch.randn(5, 7).to(DEVICE).sparse_mask(x.coalesce())


def arithmetic() -> Iterator[Any]:
    x, y, dense = random_sparse(), random_sparse(), torch.randn(5, 7).to(DEVICE)
    yield x + y, x - y, x * y, x * 2.5, x / 3, -x, dense + x, dense * x, x * dense, x.mul(torch.tensor(2.0))
    for name in ("neg", "abs", "sqrt", "sin", "tanh", "sign", "floor", "expm1", "relu", "log1p", "isnan", "erf"):
        yield getattr(x.abs() if name in ("sqrt", "log1p") else x, name)()
    yield x.pow(2), x.coalesce().pow(2), torch.square(x), x.t(), x.transpose(0, 1), x.unsqueeze(1), x.permute(1, 0)
    yield x.index_select(0, torch.tensor([2, 0, 2]).to(DEVICE)), x[1], x[1].to_dense(), x.narrow_copy(0, 1, 2)
    yield torch.cat([x, y]), torch.stack([x, y]), x.sum(), torch.sparse.sum(x, 0), torch.sparse.sum(x, [0, 1]), x.norm()
    yield torch.sparse.softmax(x, 1), torch.sparse.log_softmax(x, 0), x.any() if x.dtype == torch.bool else None
    yield x.size(), x.numel(), x.is_same_size(y), torch.is_nonzero(x.sum()), x.sum(0), x.sum((0, 1))


def in_place() -> Iterator[Any]:
    x, y, dense = random_sparse(), random_sparse(), torch.randn(5, 7).to(DEVICE)
    alias = x._values()
    yield x.mul_(2), alias
    yield x.add_(y), x._nnz(), alias
    yield x.sub_(y, alpha=0.5), x.neg_(), x.div_(2)
    yield x.coalesce().abs_(), x.zero_(), x._nnz()
    yield x.copy_(y), x, dense.add_(y), dense.add_(y, alpha=-0.25), dense.copy_(dense)
    yield y.mul_(y), y.is_coalesced(), y._coalesced_(True).is_coalesced()
    z = empty_sparse(2, 2)
    yield z.sparse_resize_((5, 7), 2, 0), z.copy_(x), z.resize_as_(x), z.sparse_resize_and_clear_((3, 3), 2, 0)
    out = empty_sparse(5, 7)
    yield torch.add(x, y, out=out), out, torch.sin(y, out=out), out, torch.mul(x, y, out=out), out


def products() -> Iterator[Any]:
    x, dense, vector = random_sparse(), torch.randn(7, 4).to(DEVICE), torch.randn(7).to(DEVICE)
    base = torch.randn(5, 4).to(DEVICE)
    yield torch.sparse.mm(x, dense), x @ dense, x.mm(dense), x.matmul(vector), x.mv(vector)
    yield torch.sparse.addmm(base, x, dense, beta=0.5, alpha=2), torch.addmm(base, x, dense), base.addmm_(x, dense)
    yield torch.sparse.mm(x, random_sparse(7, 5)), torch.hspmm(x, dense)
    batch = torch.stack([random_sparse().to_dense(), random_sparse().to_dense()]).to_sparse()
    yield torch.bmm(batch, torch.randn(2, 7, 3).to(DEVICE))


def gradients() -> Iterator[Any]:
    x = random_sparse().coalesce().requires_grad_()
    dense = torch.randn(7, 4).to(DEVICE).requires_grad_()
    torch.sparse.mm(x, dense).square().sum().backward()
    yield x.grad, dense.grad
    v = torch.randn(3).to(DEVICE).requires_grad_()
    made = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [2, 0, 2]]).to(DEVICE), v, (2, 3))
    (made.to_dense() ** 2).sum().backward()
    yield v.grad
    w = torch.randn(4, 5).to(DEVICE).requires_grad_()
    torch.sparse.sum(w.to_sparse() * 3).backward()
    yield w.grad
    p = random_sparse().coalesce().requires_grad_()
    torch.sparse.softmax(p, 1).to_dense().square().sum().backward()
    yield p.grad
    q = random_sparse(7, 5).coalesce().requires_grad_()
    torch.sparse.sum(torch.sparse.mm(x.detach(), q)).backward()
    yield q.grad


def embeddings() -> Iterator[Any]:
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "sparse adam": lambda p: torch.optim.SparseAdam(p, lr=0.05),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    }
    for name, make in makers.items():
        for bag in (False, True):
            if bag:
                layer: Any = torch.nn.EmbeddingBag(20, 6, mode="sum", sparse=True)
            else:
                layer = torch.nn.Embedding(20, 6, sparse=True, padding_idx=2)
            layer = layer.to(DEVICE)
            optimizer = make(list(layer.parameters()))
            for _ in range(4):
                tokens = torch.randint(0, 20, (3, 5)).to(DEVICE)
                optimizer.zero_grad()
                layer(tokens).square().sum().backward()
                layer(tokens[:2]).sum().backward()  # gradients add up
                if name != "adagrad":
                    layer.weight.grad = layer.weight.grad.coalesce()
                optimizer.step()
            yield name, bag, layer.weight, layer.weight.grad
    layer = torch.nn.Embedding(20, 6, sparse=True).to(DEVICE)
    layer(torch.tensor([1, 2, 1]).to(DEVICE)).sum().backward()
    yield layer.weight.grad, layer.weight.grad.norm(), torch.autograd.grad(layer.weight[3].sum(), layer.weight)[0]
    hooked: list[Any] = []
    layer.weight.register_hook(lambda g: hooked.append(g))
    layer(torch.tensor([4, 4]).to(DEVICE)).sum().backward()
    yield hooked[0], layer.weight.grad


write(construction, conversion, arithmetic, in_place, products, gradients, embeddings)
