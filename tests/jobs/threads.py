"""Two Python threads issue device work at once; each thread's values depend on itself alone."""

import argparse
import threading

import _job
import torch


def work(device: torch.device, seed: int, rounds: int, values: list[float]) -> None:
    host = torch.Generator().manual_seed(seed)
    square = torch.randn(96, 96, generator=host).to(device) / 10
    state = square
    for n in range(rounds):
        state = (state @ square).tanh() + torch.randn(96, 96, generator=host).to(device) * 0.01
        weight = square.clone().requires_grad_()
        (state @ weight).square().mean().backward()  # backward runs in a thread of autograd's own
        assert weight.grad is not None
        state = state - 0.1 * weight.grad
        if n % 5 == 0:
            values.append(state.sum().item())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    job = _job.start()
    results: list[list[float]] = [[], []]
    threads = [
        threading.Thread(target=work, args=(job.device, 10 * job.rank + n, args.rounds, values))
        for n, values in enumerate(results)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if [len(values) for values in results] != [len(range(0, args.rounds, 5))] * 2:
        raise SystemExit("a thread ended early")
    job.see(*results)
    job.result()


if __name__ == "__main__":
    main()
