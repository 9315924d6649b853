"""Point-to-point: every rank passes a tensor to the next one, by plain and by batched sends."""

import argparse

import _job
import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--skew", type=float, default=0.004, help="longest delay of a rank, in seconds")
    args = parser.parse_args()
    job = _job.start(min_ranks=2)
    device, rank, world_size = job.device, job.rank, job.world_size
    skew = _job.Skew(30 + rank, args.skew)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    host = torch.Generator().manual_seed(rank)
    value = torch.randn(64, 64, generator=host).to(device)

    for n in range(args.rounds):
        received = torch.empty_like(value)
        skew()
        if n % 2:
            pair = [dist.P2POp(dist.isend, value, after), dist.P2POp(dist.irecv, received, before)]
            for request in dist.batch_isend_irecv(pair):
                request.wait()
        elif rank == 0:  # somebody has to receive first
            dist.send(value, after)
            dist.recv(received, before)
        else:
            dist.recv(received, before)
            dist.send(value, after)
        value = (received @ value * 0.1).sin() + received * 0.5 + torch.randn(64, 64, generator=host).to(device) * 0.1
        if n % 7 == rank % 7:
            job.see(value.sum().item())
        if n % 10 == 0:
            job.progress(n)
    job.see(value)
    job.result()


if __name__ == "__main__":
    main()
