"""A library that is loaded after the interposer must not run its own CUDA kernels in the rank."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from launcher import Launcher
from torch.utils.cpp_extension import include_paths

# A kernel that would silently return nothing, as one does that ignores a refused launch.
_SOURCE = """
#include <ATen/ATen.h>
#include <torch/library.h>
static at::Tensor filter(const at::Tensor& x) { return at::empty({0}, x.options()); }
TORCH_LIBRARY_FRAGMENT(late, m) { m.def("filter(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(late, CUDA, m) { m.impl("filter", &filter); }
"""

_PROGRAM = """
import ctypes, sys, torch
x = torch.ones(3, device="cuda")
{load}({path!r})
try:
    print("ran in the rank:", torch.ops.late.filter(x))
except NotImplementedError as error:
    print("forwarded" if "late::filter" in str(error) else error)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("late")
    (folder / "late.cpp").write_text(_SOURCE)
    includes = [f"-isystem{path}" for path in include_paths()]
    links = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", *includes, "late.cpp", "-o", "late.so", *links]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "late.so"


@pytest.mark.slow
@pytest.mark.parametrize("load", ["torch.ops.load_library", "ctypes.CDLL"])
def test_its_kernels_are_forwarded(launcher: Launcher, library: Path, load: str) -> None:
    (result,) = launcher.run(_PROGRAM.format(load=load, path=str(library)))
    assert (result.code, result.out) == (0, "forwarded\n"), result.err
