"""Large copies both ways in flight, pageable and pinned, with the buffer of the host changed right after each.

With `--child`, a child that was forked has the pinned buffers too, before a cut and after it.
"""

import argparse
import os
from collections.abc import Callable

import _job
import torch


def child_that_looks(buffer: torch.Tensor) -> Callable[[float], bool]:
    """Forks a child that has the buffer; the answer asks it, once, whether it sees a value in all of it."""
    (asked, ask), (answered, answer) = os.pipe(), os.pipe()
    if os.fork() == 0:
        wanted = float(os.read(asked, 64))
        os.write(answer, b"yes" if bool((buffer == wanted).all()) else b"no")
        os._exit(0)

    def sees(value: float) -> bool:
        os.write(ask, str(value).encode())
        os.wait()
        return os.read(answered, 64) == b"yes"

    return sees


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--size", type=int, default=4_000_000, help="elements of a buffer, 4 bytes each")
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    job = _job.start()
    host = torch.Generator().manual_seed(1 + job.rank)
    pinned = torch.cuda.is_available()
    sources = [torch.randn(args.size, generator=host) for _ in range(3)]
    if pinned:
        sources[2] = sources[2].pin_memory()
    target = torch.zeros(args.size, device=job.device)
    landings = [torch.empty(args.size), torch.empty(args.size, pin_memory=pinned)]
    sees = child_that_looks(landings[1]) if args.child else None
    for n in range(args.rounds):
        source, landing = sources[n % 3], landings[n % 2]
        target.copy_(source, non_blocking=False)
        source.mul_(1.01)  # the copy must have taken the old values
        target.mul_(1.5).add_(n)
        other = target.sin()
        strided = (target[::7] + other[::7]).cpu()
        other.copy_(sources[(n + 1) % 3])
        sources[(n + 1) % 3].add_(0.5)
        landing.copy_(other)
        other.zero_()  # the landing buffer must hold what was there before
        job.see(strided, landing[-1000:], landing.sum().item())
        job.progress(n)
    landings[1].fill_(7.0)
    assert sees is None or sees(7.0) == pinned, "pinned memory is the child's too"
    job.see(*sources, target)
    job.result()


if __name__ == "__main__":
    main()
