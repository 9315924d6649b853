"""The fixture for native runs: DDP with our tree has the bits of DDP's default path where order cannot matter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.tree import tree_reduce
from tests.support.tree_ddp import tree_sum

ROOT = Path(__file__).resolve().parents[2]


def train(tmp_path: Path, world: int, *mode: str) -> str:
    """Runs the job with `world` processes; the hash that all of them print."""
    file = tmp_path / "-".join(("rendezvous", *mode))
    command = [sys.executable, "-m", "tests.support.tree_ddp_job"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(file), *mode],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        results = [(process, *process.communicate(timeout=120)) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    for process, _, stderr in results:
        assert process.returncode == 0, stderr
    hashes = {out.split()[-1] for _, out, _ in results}
    assert len(hashes) == 1, "the ranks ended with different weights"
    return hashes.pop()


@pytest.mark.slow
@pytest.mark.parametrize("clearing", ["none", "zero"])
@pytest.mark.parametrize("layout", ["copy", "view"])
def test_two_ranks_have_the_bits_of_default_ddp(tmp_path: Path, layout: str, clearing: str) -> None:
    """A sum of two has one order: all bits must agree."""
    mode = (layout, clearing, "all")
    assert train(tmp_path, 2, "tree", *mode) == train(tmp_path, 2, "default", *mode)


@pytest.mark.slow
@pytest.mark.parametrize("clearing", ["none", "zero"])
@pytest.mark.parametrize("layout", ["copy", "view"])
def test_three_ranks_divide_as_default_ddp_does(tmp_path: Path, layout: str, clearing: str) -> None:
    """At 3, x * (1/3) and x / 3 differ; with one gradient that is not zero the order of the sum is no matter."""
    mode = (layout, clearing, "one")
    assert train(tmp_path, 3, "tree", *mode) == train(tmp_path, 3, "default", *mode)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_torch_and_numpy_trees_are_one(count: int) -> None:
    values = [np.random.default_rng(i).standard_normal(1000).astype(np.float32) * 10.0 ** (i % 3) for i in range(count)]
    ours = tree_sum([torch.from_numpy(v.astype(np.float32)) for v in values])
    theirs = tree_reduce([v.astype(np.float32) for v in values])
    assert ours.numpy().tobytes() == theirs.tobytes()


def test_the_tree_splits_at_the_largest_power_of_two_below() -> None:
    """((0+1)+(2+3))+(4+5) for six: magnitudes that make every other order visible."""
    rng = np.random.default_rng(0)
    v = [(rng.standard_normal(5000) * 10.0 ** rng.integers(-4, 5, 5000)).astype(np.float32) for _ in range(6)]
    expected = ((v[0] + v[1]) + (v[2] + v[3])) + (v[4] + v[5])
    assert tree_reduce(v).tobytes() == expected.tobytes()
    assert tree_reduce(v[:3]).tobytes() == ((v[0] + v[1]) + v[2]).tobytes()
    assert tree_reduce(v[::-1]).tobytes() != expected.tobytes()
