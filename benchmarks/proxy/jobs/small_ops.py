"""Small operators on the accelerator if there is one: the time until a call returns; see `_serving.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from _serving import serve
from torch.nn import functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_operators() -> dict[str, Callable[[int], None]]:
    a, b = torch.rand(8, 8, device=DEVICE), torch.rand(8, 8, device=DEVICE)
    weight, bias = torch.rand(8, device=DEVICE), torch.rand(8, device=DEVICE)
    many = [torch.rand(8, 8, device=DEVICE) for _ in range(100)]
    one = torch.rand((), device=DEVICE)

    def add(n: int) -> None:
        for _ in range(n):
            a + b

    def mul_scalar(n: int) -> None:
        for _ in range(n):
            a * 1.5

    def add_(n: int) -> None:
        for _ in range(n):
            a.add_(b)

    def mm(n: int) -> None:
        for _ in range(n):
            a.mm(b)

    def layer_norm(n: int) -> None:
        for _ in range(n):
            functional.layer_norm(a, (8,), weight, bias)

    def view(n: int) -> None:
        for _ in range(n):
            a.view(64)

    def empty(n: int) -> None:
        for _ in range(n):
            torch.empty(8, 8, device=DEVICE)

    def foreach_add_(n: int) -> None:
        for _ in range(n):
            torch._foreach_add_(many, 1.0)

    def relu(n: int) -> None:
        for _ in range(n):
            a.relu()

    def item(n: int) -> None:
        for _ in range(n):
            one.item()

    def item_of_fresh(n: int) -> None:
        for _ in range(n):
            one.add_(1.0)
            one.item()

    timed = (add, mul_scalar, add_, mm, layer_norm, view, empty, foreach_add_, relu, item, item_of_fresh)
    return {f.__name__: f for f in timed}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    operators = make_operators()
    base, one, seen = torch.rand(1 << 20, device=DEVICE), torch.rand((), device=DEVICE), 1

    def timed(operator: str, calls: int) -> dict[str, Any]:
        """The queue is empty before and has room for all of it."""
        one.item()
        call = operators[operator]
        began, cpu = time.perf_counter(), time.thread_time()
        call(calls)
        return {"seconds": time.perf_counter() - began, "cpu_s": time.thread_time() - cpu}

    def unseen(calls: int) -> dict[str, Any]:
        """Calls of a shape that was never there before, so that the proxy has to be asked about each."""
        nonlocal seen
        views = [base[:size] for size in range(seen, seen + calls)]
        seen += calls
        one.item()
        began = time.perf_counter()
        for each in views:
            each.neg()
        return {"seconds": time.perf_counter() - began}

    serve({"timed": timed, "unseen": unseen})


main()
