"""Compressed sparse tensors: a digest per step. `--native` runs it on the CPU, whose digests must be the same."""

import io
from collections.abc import Iterator
from typing import Any

import torch
from digests import DEVICE, write

LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
torch.manual_seed(3)


def dense(rows: int = 4, columns: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Half zeros."""
    return torch.randn(rows, columns).mul(2).relu().to(dtype).to(DEVICE)


def made(layout: torch.layout, of: torch.Tensor | None = None) -> torch.Tensor:
    block = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return (dense() if of is None else of).to_sparse(layout=layout, **block)


def conversion() -> Iterator[Any]:
    for layout in LAYOUTS:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            x = made(layout, dense(dtype=dtype))
            yield x, x.to_dense(), x.values(), x.layout, x._nnz(), x.sparse_dim(), x.dense_dim()
        x = made(layout)
        yield x.to_sparse(), x.to(torch.float64), x.clone(), x.detach(), x.cpu().to(DEVICE), x.transpose(0, 1)
        yield made(layout, torch.stack([dense(), dense()]).to_sparse().to_dense()[0])
        for other in LAYOUTS:
            try:
                yield x.to_sparse(layout=other, **({"blocksize": (2, 2)} if "bs" in str(other) else {}))
            except RuntimeError:
                yield f"no way from {layout} to {other}"
        assert str(x) and x.is_cuda == (DEVICE == "cuda")


def construction() -> Iterator[Any]:
    rows, columns, values = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1]), torch.tensor([1.0, 2, 3, 4])
    yield torch.sparse_csr_tensor(rows, columns, values, device=DEVICE)
    yield torch.sparse_csr_tensor(rows.to(DEVICE), columns.to(DEVICE), values.to(DEVICE), (2, 3))
    yield torch.sparse_csc_tensor(rows, columns, values, (2, 2), device=DEVICE, check_invariants=True)
    yield torch.sparse_csr_tensor(rows.int(), columns.int(), values, device=DEVICE)
    yield torch.empty(3, 4, layout=torch.sparse_csr, device=DEVICE)._nnz()
    batch = torch.sparse_csr_tensor(
        torch.stack([rows, rows]), torch.stack([columns, columns]), torch.stack([values, values + 1]), device=DEVICE
    )
    yield batch, batch[1], batch.to_dense()
    try:
        torch.sparse_csr_tensor(rows + 1, columns, values, device=DEVICE, check_invariants=True)
    except RuntimeError as error:
        yield str(error)
    file = io.BytesIO()
    torch.save(made(torch.sparse_csr), file)
    file.seek(0)
    yield torch.load(file)


def arithmetic() -> Iterator[Any]:
    x, y = made(torch.sparse_csr), made(torch.sparse_csr)
    yield x + y, x * y, x * 2.5, -x, x * dense(), x.sum()
    for name in ("abs", "sqrt", "sin", "tanh", "sign", "floor", "expm1", "relu", "log1p", "isnan", "erf"):
        yield getattr(x, name)()
    alias = x.values()
    yield x.mul_(2), alias, x.add_(y), x.neg_(), x.zero_(), x
    yield x.resize_as_sparse_(y), x.copy_(y), y.sin_(), y.fill_(2.0)
    out = made(torch.sparse_csr)
    yield torch.add(x, y, out=out), out, torch.sin(y, out=out), out


def products() -> Iterator[Any]:
    base, right, vector = torch.randn(4, 3).to(DEVICE), torch.randn(6, 3).to(DEVICE), torch.randn(6).to(DEVICE)
    for layout in LAYOUTS[:3]:  # of BSC there is no product
        x = made(layout)
        yield x @ right, torch.sparse.mm(x, right), torch.addmm(base, x, right, beta=0.5, alpha=2)
    x = made(torch.sparse_csr)
    yield x.mv(vector), torch.addmv(torch.ones(4, device=DEVICE), x, vector), x.matmul(right)
    yield torch.sparse.mm(x, made(torch.sparse_csr, dense(6, 4)))
    yield torch.sparse.sampled_addmm(x, torch.ones(4, 2, device=DEVICE), torch.randn(2, 6).to(DEVICE))


def gradients() -> Iterator[Any]:
    for layout in (torch.sparse_csr, torch.sparse_csc):
        w = dense().requires_grad_()
        (made(layout, w).to_dense() ** 2).sum().backward()
        yield w.grad
    x, right = made(torch.sparse_csr).requires_grad_(), torch.randn(6, 3).to(DEVICE).requires_grad_()
    (x @ right).square().sum().backward()
    yield x.grad, right.grad


write(conversion, construction, arithmetic, products, gradients)
