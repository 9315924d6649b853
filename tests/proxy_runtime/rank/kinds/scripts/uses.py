"""Serialization, the object protocol, torch.func, hooks, graphs: prints a digest per step, the same with `--native`."""

import copy
import hashlib
import io
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

DEVICE = "cpu" if "--native" in sys.argv else "cuda"
FOLDER = tempfile.mkdtemp()
x = torch.arange(6.0).reshape(2, 3).to(DEVICE)


def digest(value: Any) -> str:
    """Of sizes, dtype and bits; of numbers and lists as they are."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    plain = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
    data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return f"{tuple(value.shape)} {plain.dtype} {hashlib.sha256(data).hexdigest()[:12]}"


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(DEVICE)


def on_device(value: torch.Tensor) -> torch.Tensor:
    assert value.device.type == DEVICE, value.device
    return value


def serialization() -> Iterator[Any]:
    for made in (x, x.t(), nn.Parameter(x.clone()), x.bfloat16(), torch.view_as_complex(x.reshape(3, 2)).conj()):
        yield on_device(pickle.loads(pickle.dumps(made))), on_device(copy.deepcopy(made.detach()))
    sparse = pickle.loads(pickle.dumps(x.to_sparse()))
    yield on_device(sparse).to_dense(), copy.deepcopy(sparse).to_dense()
    net = model()
    net(x).sum().backward()
    yield pickle.loads(pickle.dumps(net))(x), copy.deepcopy(net)(x), copy.deepcopy(x.untyped_storage()).nbytes()
    path = os.path.join(FOLDER, "a.pt")
    torch.save({"net": net.state_dict(), "x": x, "column": x.t(), "row": x[1], "sparse": x.to_sparse()}, path)
    first = "cuda:0" if DEVICE == "cuda" else "cpu"
    places: list[Any] = [None, "cpu", DEVICE, first, torch.device(DEVICE), {first: "cpu"}, {first: first}]
    places += [lambda storage, _: storage, lambda storage, _: storage.cuda() if DEVICE == "cuda" else storage]
    for place in places:
        for options in ({}, {"weights_only": True}, {"weights_only": False}, {"mmap": True}):
            read = torch.load(path, map_location=place, **options)
            assert read["x"].untyped_storage().data_ptr() == read["row"].untyped_storage().data_ptr()
            yield read["x"], read["column"], read["net"]["0.weight"], read["sparse"].to_dense()

    torch.save(net, path)
    yield torch.load(path, weights_only=False)(x)
    torch.save(x, path, _use_new_zipfile_serialization=False)
    yield torch.load(path), torch.load(path, map_location="cpu")
    memory = io.BytesIO()
    torch.save(net.state_dict(), memory)
    memory.seek(0)
    other = model()
    yield other.load_state_dict(torch.load(memory)), other.load_state_dict(net.state_dict(), assign=True), other(x)


def storages() -> Iterator[Any]:
    y = x.clone()
    typed, untyped = torch.storage.TypedStorage(wrap_storage=y.untyped_storage(), dtype=y.dtype), y.untyped_storage()
    yield typed.size(), typed[2], typed.tolist(), typed.element_size(), typed.nbytes(), untyped.nbytes(), untyped.size()
    typed[1] = 9
    yield y, untyped.cpu().tolist()[:8], untyped.clone().nbytes(), typed.double().tolist(), typed.half().tolist()
    typed.fill_(3)
    yield y
    untyped.copy_(x.cpu().untyped_storage())
    yield y
    z = torch.ones(6, device=DEVICE)
    z.untyped_storage().resize_(0)
    z.untyped_storage().resize_(24)
    yield z.fill_(2), torch.UntypedStorage(8, device=DEVICE).nbytes()
    yield x.share_memory_() is x, model().share_memory() is not None, x.tolist(), x[0, 1].item(), float(x[0, 1])
    if DEVICE == "cuda":
        assert x.is_shared() and x.data_ptr() != 0
        made: Any = torch.cuda
        assert made.FloatTensor(3).shape == (3,) and made.LongTensor([1, 2]).tolist() == [1, 2]
        assert made.FloatStorage([1.0, 2.0]).tolist() == [1, 2] and isinstance(x, made.FloatTensor)
        assert x.type() == "torch.cuda.FloatTensor" and x.double().type("torch.cuda.HalfTensor").dtype == torch.half


def dtypes() -> Iterator[Any]:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        y = x.to(dtype)
        yield y.float(), y.cpu().float(), y.view(torch.uint8), y.clone().float(), y[0].to(torch.bfloat16)
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.complex32):
        yield x.to(dtype), x.to(dtype).clone(), torch.zeros(3, dtype=dtype, device=DEVICE)
    yield torch.empty(3, dtype=torch.uint8, device=DEVICE).fill_(7).view(torch.bits8).cpu().view(torch.uint8)
    c = torch.view_as_complex(x.reshape(3, 2))
    yield (
        c.conj(),
        c.conj().imag,
        c.conj() * 2,
        c.imag.neg(),
        torch.fft.fft(c),
        c.abs(),
        c.conj() @ c,
        c.cpu().conj().to(DEVICE),
    )
    meta = nn.Linear(3, 2, device="meta").to_empty(device=DEVICE)
    yield meta.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)}), meta(x), x.to("meta").device.type


def transforms() -> Iterator[Any]:
    def f(t: torch.Tensor) -> torch.Tensor:
        return (t.sin() ** 2).sum()

    yield vmap(lambda t: t.sum())(x), grad(f)(x), jacrev(torch.sin)(x), jacfwd(torch.sin)(x), hessian(f)(x[0])
    yield *jvp(f, (x,), (x,)), vmap(grad(lambda w, t: (w * t).sum()), (None, 0))(x[0], x), vmap(torch.linalg.norm)(x)
    nets = [model(), model()]
    parameters, buffers = stack_module_state(nets)
    yield vmap(lambda p, b: functional_call(nets[0], (p, b), (x,)))(parameters, buffers)
    with forward_ad.dual_level():
        yield forward_ad.unpack_dual(forward_ad.make_dual(x, torch.ones_like(x)) ** 3).tangent
    t = x.clone().requires_grad_()
    (first,) = torch.autograd.grad((t**3).sum(), t, create_graph=True)
    first.sum().backward()
    yield t.grad, torch.autograd.functional.hvp(lambda v: (v**3).sum(), x, x)[1]


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        ctx.save_for_backward(args[0])
        return args[0].exp()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0].exp()


class _Count(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def graphs() -> Iterator[Any]:
    net = model()
    for reentrant in (True, False):
        t = x.clone().requires_grad_()
        checkpoint(net, t, use_reentrant=reentrant).sum().backward()
        yield t.grad
        dropped = torch.ones(50, device=DEVICE, requires_grad=True)
        y = checkpoint(nn.Dropout(0.5), dropped, use_reentrant=reentrant)
        y.sum().backward()
        assert dropped.grad is not None
        yield torch.equal(y.detach(), dropped.grad)  # the same mask again
    called: list[str] = []
    net.register_forward_hook(lambda *_: called.append("forward"))
    net.register_forward_pre_hook(lambda *_: called.append("before forward"))
    net.register_full_backward_hook(lambda *_: called.append("backward"))
    net[0].weight.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    net[0].weight.register_hook(lambda g: g * 2)
    net.zero_grad()
    net(x.clone().requires_grad_()).sum().backward()
    yield sorted(called), net[0].weight.grad
    for pinned in (False, True) if DEVICE == "cuda" else (False, False):
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            t = x.clone().requires_grad_()
            y = (t**2).sum()
        y.backward()
        yield t.grad
    t = x.clone().requires_grad_()
    _Exp.apply(t).sum().backward()
    yield t.grad
    with _Count() as count:
        model()(x).sum().backward()
    yield count.seen > 5
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield nn.Linear(3, 2).to(DEVICE).double().cpu().weight.dtype
    torch.__future__.set_swap_module_params_on_conversion(False)
    with torch.autograd.detect_anomaly():
        try:
            (-x - 1).requires_grad_().sqrt().sum().backward()
        except RuntimeError as error:
            yield str(error)


def compilers() -> Iterator[Any]:
    net = model()
    compiled: Any = torch.compile
    for options in ({}, {"backend": "eager"}, {"backend": "aot_eager"}, {"fullgraph": True, "dynamic": True}):
        t = x.clone().requires_grad_()
        y = compiled(net, **options)(t) if DEVICE == "cuda" else net(t)
        y.sum().backward()
        yield y, t.grad
    tracing: Any = torch.jit.trace
    y = compiled(net, mode="reduce-overhead")(x) if DEVICE == "cuda" else net(x)
    yield y, torch.export.export(net, (x,)).module()(x), tracing(net, x)(x)
    scripted: Any = torch.jit.script(net)
    for _ in range(4):  # long enough for a fuser to begin
        t = x.clone().requires_grad_()
        scripted(t).sum().backward()
        yield t.grad


def main() -> None:
    for part in (serialization, storages, dtypes, transforms, graphs, compilers):
        for n, values in enumerate(part()):
            for m, value in enumerate(values if isinstance(values, tuple) else (values,)):
                print(f"{part.__name__} {n}.{m}: {digest(value)}")


main()
