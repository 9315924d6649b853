"""What the installed torch wheel brings of NVIDIA's libraries, and which of it must be stubbed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from proxy_runtime.errors import ErgoError
from proxy_runtime.rank.stubs import elf

CUDA_MAJOR = 13
_NVIDIA_SONAME = re.compile(r"lib(cu[a-zA-Z]|nv|nccl)\w*\.so\.")
# Not libnvrtc-builtins and the like: NVIDIA's own libraries load them, nobody links against them.
_LINKABLE = re.compile(r"lib\w+\.so\.[0-9.]+")
_NVIDIA_NAME = re.compile(r"_*(cu|nv|p?nccl)", re.IGNORECASE)
_CUDART = re.compile(r"libcudart\.so\.([0-9]+)")
DRIVER_SONAME = "libcuda.so.1"


class StubError(ErgoError):
    """Stub libraries cannot be made for a wheel."""

    code = "stubs"


@dataclass(frozen=True, slots=True)
class Library:
    """One NVIDIA library as it is installed.

    Attributes:
        exports: what a stub may define: C++ names, and C names with a prefix of NVIDIA's or that torch needs.
        imported: the names that torch's libraries take from elsewhere, whatever the library.
    """

    soname: str
    path: Path
    exports: tuple[elf.Symbol, ...]
    imported: frozenset[str]

    @property
    def stem(self) -> str:
        """The bare name: ``cudart`` of ``libcudart.so.13``."""
        return self.soname.removeprefix("lib").split(".so")[0]


@dataclass(frozen=True, slots=True)
class Wheel:
    """The installed wheel.

    Attributes:
        torch: folder of the torch package.
        libraries: the NVIDIA libraries installed beside it, by soname; empty for a CPU-only wheel.
        includes: folders of the headers that belong to them.
        cudart: soname of the CUDA runtime; empty for a CPU-only wheel.
    """

    torch: Path
    libraries: tuple[Library, ...]
    includes: tuple[Path, ...]
    cudart: str

    @property
    def is_cpu_only(self) -> bool:
        """Whether torch was built without CUDA: there is nothing to stub."""
        return not self.cudart


def fingerprint(search: Iterable[Path]) -> str:
    """Text that changes when an NVIDIA library below the folders of `search` is replaced; cheap, for build keys."""
    paths = sorted(p for root in search for p in root.glob("nvidia/*/lib/lib*.so*"))
    return "\n".join(f"{p.name} {p.stat().st_size}" for p in paths)


def inspect(torch: Path, search: Iterable[Path]) -> Wheel:
    """Reads the torch package at `torch` and the ``nvidia`` packages below the folders of `search`.

    Raises:
        StubError: the wheel is for another CUDA major version, or a library that torch needs is not installed.
    """
    users = [elf.read(p) for p in sorted((torch / "lib").glob("*.so*")) if _is_elf(p)]
    if not any((torch / "lib" / name).exists() for name in ("libtorch_cuda.so", "libc10_cuda.so")):
        return Wheel(torch, (), (), "")
    needed = {name for user in users for name in user.needed if _NVIDIA_SONAME.match(name)}
    cudart = _check_major(needed, torch)
    folders = sorted({f for root in search for f in root.glob("nvidia/*") if f.is_dir()})
    # Not what torch's libraries take from each other: a stub must not define their BLAS.
    own = {s.name for user in users for s in user.exports()}
    imported = frozenset(s.name for user in users for s in user.imports()) - own
    libraries = {}
    for path in sorted(p for folder in folders for p in folder.glob("lib/lib*.so.*")):
        if not _is_elf(path):
            continue
        library = elf.read(path)
        exports = tuple(s for s in library.exports() if s.name in imported or is_nvidia_name(s.name))
        # A library without one C function of NVIDIA's is a plug-in, or stands in for somebody else's (cufftw,
        # nvblas): a stub of it would take the place of the real FFTW or BLAS.
        if _LINKABLE.fullmatch(library.soname) and any(not s.name.startswith("_Z") for s in exports):
            libraries.setdefault(library.soname, Library(library.soname, path, exports, imported))
    if missing := sorted(needed - libraries.keys() - {DRIVER_SONAME}):
        raise StubError(
            f"The torch wheel in {torch.parent} needs {', '.join(missing)}, which no installed nvidia package has.",
            code="stubs.library-missing",
            remedy="Reinstall torch with its dependencies (pip install --force-reinstall torch).",
        )
    includes = tuple(f / "include" for f in folders if (f / "include").is_dir())
    return Wheel(torch, tuple(libraries.values()), includes, cudart)


def is_nvidia_name(name: str) -> bool:
    """Whether a symbol is C++ or carries one of NVIDIA's prefixes: other C names may be somebody else's too."""
    return name.startswith("_Z") or bool(_NVIDIA_NAME.match(name))


def _check_major(needed: set[str], torch: Path) -> str:
    found = sorted(name for name in needed if _CUDART.fullmatch(name))
    majors = {name.rsplit(".", 1)[1] for name in found}
    if majors != {str(CUDA_MAJOR)}:
        what = f"CUDA {', '.join(sorted(majors))}" if majors else "a CUDA runtime that is not a shared library"
        raise StubError(
            f"The torch wheel in {torch.parent} is built for {what}; ranks run with wheels for CUDA {CUDA_MAJOR} only.",
            code="stubs.cuda-major",
            remedy="Install torch 2.11 or newer from the Python package index.",
        )
    return found[0]


def _is_elf(path: Path) -> bool:
    if not path.is_file() or path.suffix == ".py":
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"
