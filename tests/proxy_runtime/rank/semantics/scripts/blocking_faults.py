"""With ERGO_LAUNCH_BLOCKING=1 the error is raised at the line of each kind of operator; one per process."""

import sys

import torch

kind = sys.argv[1]


def call(bad: bool) -> torch.Tensor:
    index = torch.tensor([0, 9 if bad else 1], device="cuda")
    source = torch.ones(4, 2, device="cuda")
    if kind == "embedding":
        return torch.nn.functional.embedding(index, source)
    if kind == "index_select":
        return source.index_select(0, index)
    if kind == "scatter":
        return source.scatter_(0, index[:, None], torch.zeros(2, 1, device="cuda"))
    if kind == "cross_entropy":
        return torch.nn.functional.cross_entropy(source[:2], index)
    return source[index]


call(False)
try:
    call(True)
except torch.AcceleratorError as error:
    assert "device-side assert" in str(error) and "aten::" in str(error), error
    print("ok")
