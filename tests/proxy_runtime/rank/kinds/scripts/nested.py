"""Strided nested tensors: a digest per step. `--native` runs it on the CPU, whose digests must be the same."""

from collections.abc import Iterator
from typing import Any

import torch
from digests import DEVICE, write
from torch.nn import functional as F

torch.manual_seed(3)


def nested(*lengths: int, width: int = 6, requires_grad: bool = False) -> torch.Tensor:
    parts = [torch.randn(length, width) for length in lengths or (2, 5, 3)]
    return torch.nested.nested_tensor(parts, device=DEVICE, requires_grad=requires_grad)


def construction() -> Iterator[Any]:
    x = nested()
    yield x, x.clone(), x.cpu(), x.to(torch.float64), x.size(0), x.size(2), x.dim(), x.numel(), x.is_nested
    yield (
        torch.nested.nested_tensor([], device=DEVICE).dim(),
        torch.nested.nested_tensor([torch.ones(2, 0)], device=DEVICE),
    )
    parts = [torch.randn(2, 3).to(DEVICE), torch.randn(4, 3).to(DEVICE)]
    yield torch.nested.as_nested_tensor(parts), torch.nested.nested_tensor(parts, dtype=torch.float64)
    yield x._nested_tensor_size(), x._nested_tensor_strides(), x._nested_tensor_storage_offsets()
    yield torch.nested.to_padded_tensor(x, 1.5), x.to_padded_tensor(0.0, (4, 6, 7)), torch.empty_like(x).size(0)
    assert str(x) and x.is_cuda == (DEVICE == "cuda")


def views() -> Iterator[Any]:
    x = nested()
    yield x[1], x.select(0, 2), x.transpose(1, 2), x.transpose(1, 2).contiguous(), x.unsqueeze(2), x.values()
    yield x.narrow(0, 0, 2), x.narrow(0, 1, 2).contiguous(), x.detach(), x.view(3, -1, 2, 3), x.reshape(3, -1, 2, 3)
    yield torch.cat([x, nested()]), *x.chunk(2, -1), *x.split_with_sizes([2, 4], -1)
    x[0].fill_(7.0)
    yield x


def arithmetic() -> Iterator[Any]:
    x, y = nested(), nested()
    yield x + y, x - y, x * y, x * 2.5, x / 3, -x, x * torch.tensor(2.0).to(DEVICE), x == 0, x > 0, x.isnan()
    for name in ("abs", "sqrt", "sin", "cos", "tanh", "relu", "sgn", "isinf", "logical_not"):
        yield getattr(x, name)()
    yield F.gelu(x), F.silu(x), F.softmax(x, -1), F.softmax(x, 2)
    yield x.add_(y), x.mul_(2), x.relu_(), x.fill_(3.0), x.zero_(), x.copy_(y), x
    yield torch.ones_like(x), torch.zeros_like(x), x.masked_fill(x > 0, 4.0)
    torch.manual_seed(5)
    yield F.dropout(y, 0.5)
    torch.manual_seed(6)  # one generator serves host and device on the CPU


def layers() -> Iterator[Any]:
    x = nested()
    yield torch.nn.Linear(6, 4).to(DEVICE)(x), torch.nn.LayerNorm(6).to(DEVICE)(x), torch.matmul(x, x.transpose(1, 2))
    yield torch.bmm(x, x.transpose(1, 2))
    tokens = torch.nested.nested_tensor([torch.tensor([1, 2, 3]), torch.tensor([4, 0])], device=DEVICE)
    yield F.embedding(tokens, torch.randn(5, 6).to(DEVICE))
    heads = torch.nested.nested_tensor([torch.randn(2, 4, 8), torch.randn(2, 6, 8)], device=DEVICE)
    yield F.scaled_dot_product_attention(heads, heads, heads)
    layer = torch.nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, dropout=0.0).to(DEVICE)
    encoder = torch.nn.TransformerEncoder(layer, 2).to(DEVICE).eval()
    mask = torch.tensor([[False, False, True], [False, True, True]]).to(DEVICE)
    with torch.no_grad():
        yield (
            layer.eval()(x),
            layer(x.to_padded_tensor(0.0)),
            encoder(torch.randn(2, 3, 6).to(DEVICE), src_key_padding_mask=mask),
        )


def gradients() -> Iterator[Any]:
    x = nested(requires_grad=True)
    layer = torch.nn.Linear(6, 4).to(DEVICE)
    layer(x).to_padded_tensor(0.0).square().sum().backward()
    yield x.grad, layer.weight.grad, layer.bias.grad
    parts = [torch.randn(2, 3).to(DEVICE).requires_grad_(), torch.randn(4, 3).to(DEVICE).requires_grad_()]
    (torch.nested.as_nested_tensor(parts) * 3).to_padded_tensor(0.0).sum().backward()
    yield parts[0].grad, parts[1].grad
    y = nested(requires_grad=True)
    F.softmax(y, -1).matmul(y.transpose(1, 2)).to_padded_tensor(0.0).square().sum().backward()
    yield y.grad
    heads = torch.nested.nested_tensor([torch.randn(2, 4, 8), torch.randn(2, 6, 8)], device=DEVICE, requires_grad=True)
    F.scaled_dot_product_attention(heads, heads, heads).to_padded_tensor(0.0).sum().backward()
    yield heads.grad


write(construction, views, arithmetic, layers, gradients)
