"""A library that is loaded after the interposer: its CUDA kernels never run in the rank, and the device gets it too."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from launcher import SCRIPTS, Launcher
from torch.utils.cpp_extension import include_paths

# Its CUDA kernels would silently return something wrong, as one does that ignores a refused launch.
_SOURCE = """
#include <ATen/ATen.h>
#include <torch/library.h>
using at::Tensor;
static Tensor wrong(const Tensor& x) { return at::empty({0}, x.options()); }
TORCH_LIBRARY(late, m) {
  m.def("both(Tensor x) -> Tensor");
  m.def("positive(Tensor x) -> Tensor");
  m.def("cuda_only(Tensor x) -> Tensor");
  m.def("cpu_only(Tensor x) -> Tensor");
  m.def("composite(Tensor x) -> Tensor", [](const Tensor& x) { return x * 3; });
}
TORCH_LIBRARY_IMPL(late, CUDA, m) {
  m.impl("both", &wrong);
  m.impl("positive", &wrong);
  m.impl("cuda_only", &wrong);
}
TORCH_LIBRARY_IMPL(late, CPU, m) {
  m.impl("both", [](const Tensor& x) { return x * 2; });
  m.impl("positive", [](const Tensor& x) { return x.index({x > 0}); });
  m.impl("cpu_only", [](const Tensor& x) { return x + 1; });
}
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "late", nullptr, -1, nullptr, nullptr, nullptr, nullptr,
                                 nullptr};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit_late() { return PyModule_Create(&definition); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("late")
    (folder / "late.cpp").write_text(_SOURCE)
    includes = [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    links = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", *includes, "late.cpp", "-o", "late.so", *links]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "late.so"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ctypes", "torch", "import"])
def test_its_kernels_run_on_the_device(launcher: Launcher, library: Path, how: str) -> None:
    (result,) = launcher.run(SCRIPTS / "late_libraries.py", str(library), how)
    assert (result.code, result.out) == (0, "ok\n"), result.err


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts are root's")
def test_a_file_that_only_the_rank_sees_goes_through_the_channel(launcher: Launcher, library: Path) -> None:
    """As in a container, whose folders are not the device's."""
    program = f"""
import ctypes, shutil, tempfile, torch
libc = ctypes.CDLL(None, use_errno=True)
folder = tempfile.mkdtemp().encode()
assert libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/", None, 0x44000, None) == 0  # a private copy of mounts
assert libc.mount(b"tmpfs", folder, b"tmpfs", 0, None) == 0
path = shutil.copy({str(library)!r}, folder.decode() + "/hidden.so")
torch.ops.load_library(path)
print(torch.ops.late.both(torch.ones(2, device="cuda")).tolist())
"""
    launcher.ring_bytes = 1 << 16
    (result,) = launcher.run(program)
    assert (result.code, result.out) == (0, "[2.0, 2.0]\n"), result.err


def test_an_operator_from_python_without_a_kernel_says_what_is_missing(launcher: Launcher) -> None:
    program = """
import torch
library = torch.library.Library("mine", "DEF")
library.define("f(Tensor x) -> Tensor")
library.impl("f", lambda x: x + 1, "CPU")
try:
    torch.ops.mine.f(torch.ones(2, device="cuda"))
except NotImplementedError as error:
    print("mine::f" in str(error), "Register" in str(error))
"""
    (result,) = launcher.run(program)
    assert (result.code, result.out) == (0, "True True\n"), result.err
