"""A DataLoader with 2 workers, shuffled: prints a checksum of each batch.

Arguments: start method, persistent (0 or 1), floats per sample.
"""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(int(sys.argv[3]), generator=torch.Generator().manual_seed(index)) + torch.rand(1)


def main() -> None:
    torch.manual_seed(5)
    loader = DataLoader(
        Noise(),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=sys.argv[1],
        persistent_workers=sys.argv[2] == "1",
    )
    for epoch in range(3):
        for batch in loader:
            print(epoch, batch.double().sum().item())
            time.sleep(0.02)
    print("done")


if __name__ == "__main__":
    main()
