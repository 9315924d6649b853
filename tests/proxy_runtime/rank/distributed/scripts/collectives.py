"""Every collective, reduction and dtype, on device tensors; and what must be waited for with host tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as autograd_functions
from same import DEVICE, ON_DEVICE, RANK, WORLD, begin, case, digest, end, values

begin()
NEXT, PREVIOUS = (RANK + 1) % WORLD, (RANK - 1) % WORLD
HOST = dist.new_group(backend="gloo")
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]


@case
def reductions() -> str:
    made = []
    for dtype in [*FLOATS, *INTEGERS]:
        for name in ("SUM", "PRODUCT", "MIN", "MAX"):
            tensor = values(37, dtype=dtype, seed=3)
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
            made.append(tensor)
    for dtype in INTEGERS:
        for name in ("BAND", "BOR", "BXOR"):
            tensor = values(37, dtype=dtype, seed=3)
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
            made.append(tensor)
    for dtype in FLOATS:
        tensor = values(37, dtype=dtype, seed=3)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        made.append(tensor)
    for dtype in (torch.complex64, torch.complex128):
        tensor = values(37, dtype=dtype, seed=3)
        dist.all_reduce(tensor)
        made.append(tensor)
    for name in ("MIN", "MAX"):  # gloo's sum of truth values is a byte that may be 2; ours is "or", as NCCL's
        tensor = values(37, dtype=torch.bool, seed=3)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        made.append(tensor)
    return digest(*made)


@case
def premultiplied_sum() -> str:
    factor = 0.3
    tensor, other = values(37), values(4 * WORLD)
    block, reduced = torch.empty(4, device=DEVICE), values(5)
    if ON_DEVICE:
        op = dist._make_nccl_premul_sum(factor)
        dist.all_reduce(tensor, op=op)
        dist.reduce_scatter_tensor(block, other, op=op)
        before = reduced.clone()
        dist.reduce(reduced, 0, op=op)
        assert RANK == 0 or torch.equal(reduced, before)
    else:
        tensor, other, mine = tensor * factor, other * factor, reduced * factor
        dist.all_reduce(tensor)
        dist.reduce_scatter_tensor(block, other)
        dist.reduce(mine, 0)
        reduced = mine if RANK == 0 else reduced
    return digest(tensor, block, reduced)


@case
def async_handles() -> str:
    first, second = values(100), values(100, seed=1)
    work = dist.all_reduce(first, async_op=True)
    work.wait()
    assert work.is_completed()
    later = dist.all_reduce(second, async_op=True).get_future().then(lambda future: future.value()[0] * 2)
    return digest(first, second, later.wait())


@case
def uneven_all_to_all() -> str:
    sent, received = [(RANK + 1) * (j + 1) for j in range(WORLD)], [(j + 1) * (RANK + 1) for j in range(WORLD)]
    out = torch.zeros(sum(received), 3, device=DEVICE)
    dist.all_to_all_single(out, values(sum(sent), 3), received, sent)
    some = [0 if j == RANK else 3 for j in range(WORLD)]
    other = torch.zeros(sum(some), device=DEVICE)
    dist.all_to_all_single(other, values(sum(some)), some, some)
    return digest(out, other)


@case
def shapes() -> str:
    transposed, scalar, nothing = values(8, 6).t(), values(1).squeeze(), torch.empty(0, device=DEVICE)
    for tensor in (transposed, scalar, nothing):
        dist.all_reduce(tensor)
    dist.broadcast(nothing, 0)
    return digest(transposed, scalar)


@case
def scatters_and_gathers() -> str:
    block, rows = torch.empty(5, device=DEVICE), torch.empty(5, 3, device=DEVICE)
    dist.reduce_scatter_tensor(block, values(5 * WORLD))
    dist.reduce_scatter_tensor(rows, values(5 * WORLD, 3))
    listed = torch.empty(5, device=DEVICE)
    blocks = [values(5, seed=i) for i in range(WORLD)]
    if ON_DEVICE:
        dist.reduce_scatter(listed, blocks)
    else:  # gloo has no lists here
        dist.reduce_scatter_tensor(listed, torch.cat(blocks))
    stacked, joined = torch.empty(WORLD, 4, device=DEVICE), torch.empty(4 * WORLD, device=DEVICE)
    dist.all_gather_into_tensor(stacked if ON_DEVICE else stacked.view(-1), values(4))  # gloo joins, never stacks
    dist.all_gather_into_tensor(joined, values(4))
    parts = [torch.empty(4, device=DEVICE) for _ in range(WORLD)] if RANK == 1 else None
    dist.gather(values(4), parts, dst=1)
    own = torch.empty(4, device=DEVICE)
    dist.scatter(own, [values(4, seed=i) for i in range(WORLD)] if RANK == 0 else None, src=0)
    reduced, sent = values(9), values(9)
    dist.reduce(reduced, 1)
    dist.broadcast(sent, 1)
    return digest(block, rows, listed, stacked, joined, own, sent, *(parts or []), *([reduced] if RANK == 1 else []))


@case
def point_to_point() -> str:
    first, second, third = (torch.zeros(6, device=DEVICE) for _ in range(3))
    pair = [dist.P2POp(dist.irecv, first, PREVIOUS), dist.P2POp(dist.isend, values(6), NEXT)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    works = [dist.irecv(second, PREVIOUS), dist.isend(values(6) * 2, NEXT)]
    for work in works:
        work.wait()
    if RANK == 0:
        dist.send(values(6, seed=2), 1)
    if RANK == 1:
        assert dist.recv(third, 0) == 0
    return digest(first, second, third)


@case
def objects() -> object:
    gathered: list[object] = [None] * WORLD
    dist.all_gather_object(gathered, {"rank": RANK, "below": list(range(RANK))})
    shared = [{"from": RANK}, RANK]
    dist.broadcast_object_list(shared, src=1)
    at_zero: list[object] | None = [None] * WORLD if RANK == 0 else None
    dist.gather_object(("x", RANK), at_zero, dst=0)
    own: list[object] = [None]
    dist.scatter_object_list(own, [i * 2 for i in range(WORLD)] if RANK == 0 else None, src=0)
    received: list[object] = [None, None]
    if RANK == 0:
        dist.send_object_list([1, "a"], dst=1)
    if RANK == 1:
        dist.recv_object_list(received, src=0)
    return gathered, shared, at_zero, own, received


@case
def coalesced() -> str:
    first, second = values(5), values(7, seed=1)
    if ON_DEVICE:
        with dist._coalescing_manager(device=DEVICE, async_ops=True) as manager:
            dist.all_reduce(first)
            dist.all_reduce(second)
        manager.wait()
    else:  # gloo has none
        dist.all_reduce(first)
        dist.all_reduce(second)
    third, fourth = values(5), values(7, seed=1)
    dist.all_reduce_coalesced([third, fourth])
    return digest(first, second, third, fourth)


@case
def functional_collectives() -> str:
    group = dist.group.WORLD
    made = [
        functional.all_reduce(values(5), "sum", group),
        functional.all_reduce(values(5), "avg", group),
        functional.all_gather_tensor(values(3, 4), 0, group),
        functional.all_gather_tensor(values(3, 4), 1, group),
        functional.reduce_scatter_tensor(values(2 * WORLD, 3), "sum", 0, group),
        functional.all_to_all_single(values(2 * WORLD), None, None, group),
        functional.broadcast(values(4), 1, group),
        functional.permute_tensor(values(4), [(i + 1) % WORLD for i in range(WORLD)], group),
        *functional.all_reduce_coalesced([values(2), values(3)], "sum", group),
        *functional.all_gather_into_tensor_coalesced([values(2), values(3)], group),
        *functional.reduce_scatter_tensor_coalesced([values(2 * WORLD), values(3 * WORLD)], "sum", [0, 0], group),
    ]
    for call in (
        lambda x: functional.all_gather_tensor_autograd(x, 0, group),
        lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, group),
        lambda x: functional.all_to_all_single_autograd(x, None, None, group),
        autograd_functions.all_reduce,
        lambda x: torch.cat(autograd_functions.all_gather(x)),
        lambda x: autograd_functions.broadcast(x, 0),
    ):
        leaf = values(2 * WORLD, 3).requires_grad_()
        result = call(leaf)
        (result * result).sum().backward()
        made += [result, leaf.grad]
    return digest(*(tensor + 0 for tensor in made))


@case
def barriers() -> None:
    dist.monitored_barrier(HOST)
    dist.monitored_barrier(HOST, wait_all_ranks=True)
    dist.barrier(async_op=True).wait()


@case
def host_tensors_are_waited_for() -> str:
    """Receive first, then send: whoever waits at the first call would wait for ever."""
    received = torch.zeros(6)
    works = [dist.irecv(received, PREVIOUS, group=HOST), dist.isend(torch.arange(6.0) * RANK, NEXT, group=HOST)]
    for work in works:
        work.wait()
    first, second = values(50, device="cpu"), values(50, device="cpu", seed=1)
    later = dist.all_reduce(first, async_op=True, group=HOST).get_future().then(lambda f: f.value()[0] + 1).wait()
    work = dist.all_reduce(second, async_op=True, group=HOST)
    while not work.is_completed():
        pass
    return digest(received, first, second, later)


@case
def host_groups_in_another_order() -> str:
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    tensors = [values(3, device="cpu", seed=i) for i in range(2)]
    pairs = list(zip(groups, tensors, strict=True))
    works = [
        dist.all_reduce(tensor, group=group, async_op=True) for group, tensor in (pairs if RANK else reversed(pairs))
    ]
    for work in works:
        work.wait()
    return digest(*tensors)


@case
def host_messages_match_by_tag() -> object:
    if RANK == 0:
        for work in [dist.isend(torch.full((3,), float(tag)), 1, tag=tag, group=HOST) for tag in (1, 2)]:
            work.wait()
    if RANK != 1:
        return None
    first, second = torch.empty(3), torch.empty(3)
    dist.recv(second, 0, tag=2, group=HOST)
    dist.recv(first, 0, tag=1, group=HOST)
    return first.tolist(), second.tolist()


end()
