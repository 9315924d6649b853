"""Generates the stub libraries of a rank from the installed torch wheel.

A rank runs no CUDA code, but torch's libraries are linked against NVIDIA's. One small ELF file per NVIDIA
soname takes their place: same soname, same symbol versions, all exports of the real library. Functions with a
body in ``bodies/`` answer (device properties, streams, events, versions); every other call is refused. The
real libraries would cost every rank about 120 MB of private memory.

A stub's file is called ``ergo_<name>``: torch looks for ``libcudart.so`` in ``/proc/self/maps`` and, where it
finds that, loads the real libraries by their absolute paths. The soname inside the file is what the dynamic
linker matches.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from proxy_runtime.rank.stubs import elf
from proxy_runtime.rank.stubs.wheel import DRIVER_SONAME, Library, StubError, Wheel

_HERE = Path(__file__).parent
_BODIES = _HERE / "bodies"
# Stand-ins for headers of the NVIDIA compiler that the runtime's headers include.
HEADERS = _HERE / "include"
_NOT_SUPPORTED = 801  # cudaErrorNotSupported and CUDA_ERROR_NOT_SUPPORTED
_CUPTI_NOT_SUPPORTED = 27
_ABORT = ("-DERGO_ABORT",)
_POLICY: dict[str, tuple[str, ...]] = {
    "cudart": ("-DERGO_RECORD", f"-DERGO_CODE={_NOT_SUPPORTED}"),
    "cuda": ("-DERGO_RECORD", f"-DERGO_CODE={_NOT_SUPPORTED}"),
    "cupti": ("-DERGO_DECLINE", f"-DERGO_CODE={_CUPTI_NOT_SUPPORTED}"),
}
_OWN_PREFIX, _OWN_NODE, _OWN_LIBRARY = "ergo_stub_", "ERGO_STUB_1", "cudart"
# Defined by the static linker or by crt files in every shared object.
_LINKER_NAMES = frozenset({"_init", "_fini", "_end", "_edata", "__bss_start"})
_SYSTEM_LIBRARIES = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1")
# Variants of a function for the per-thread default stream; here they do the same.
_STREAM_VARIANTS = ("_ptsz", "_ptds")
_COMPILE = ("-std=gnu11", "-Os", "-g0", "-fPIC", "-Wall", "-Wextra")
_LINK = (
    "-shared",
    "-nostartfiles",
    "-s",
    "-Wl,-Bsymbolic",
    "-Wl,--hash-style=gnu",
    "-Wl,--build-id=sha1",
    "-Wl,-z,now",
    "-Wl,-z,relro",
    "-Wl,-z,noseparate-code",
    "-Wl,-z,max-page-size=4096",
    "-Wl,--as-needed",
)


@dataclass(frozen=True, slots=True)
class Stub:
    """One generated library.

    Attributes:
        functions: exported functions, those with a body included.
        bodies: exported functions that have a body.
        objects: exported data objects.
    """

    soname: str
    path: Path
    functions: int
    bodies: int
    objects: int


def generate(
    wheel: Wheel,
    out: Path,
    *,
    compiler: str = "gcc",
    jobs: int = 2,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Stub]:
    """Makes one stub per NVIDIA soname of `wheel`, and one for the driver, in the folder `out`.

    Returns:
        The stubs in the order in which they should be loaded; none for a CPU-only wheel, which `progress` is told.

    Raises:
        StubError: a library uses what the generator does not know, or the compiler failed.
    """
    if wheel.is_cpu_only:
        progress(f"The torch wheel in {wheel.torch.parent} is CPU-only: no NVIDIA library to stub.")
        return []
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ergo-stubs-") as scratch:
        maker = _Maker(wheel, out, Path(scratch), compiler)
        libraries = [*wheel.libraries, maker.driver()]
        # The runtime first: the driver's stub finds it among the loaded libraries.
        libraries.sort(key=lambda lib: (lib.stem != _OWN_LIBRARY, lib.soname != DRIVER_SONAME, lib.soname))
        with ThreadPoolExecutor(jobs) as pool:
            stubs = list(pool.map(maker.make, libraries))
    # Triton links its driver module against a file of this name; loaded, it is the stub by its soname.
    link = out / "link"
    link.mkdir(exist_ok=True)
    (link / DRIVER_SONAME).symlink_to(f"../{file_name(DRIVER_SONAME)}")
    return stubs


def file_name(soname: str) -> str:
    """The name of a stub's file: ``ergo_cudart.so.13`` for ``libcudart.so.13``."""
    return "ergo_" + soname.removeprefix("lib")


class _Maker:
    def __init__(self, wheel: Wheel, out: Path, scratch: Path, compiler: str) -> None:
        self._wheel = wheel
        self._out = out
        self._scratch = scratch
        self._compiler = compiler
        self._system = _system_names(compiler)

    def driver(self) -> Library:
        """The CUDA driver library, which no wheel has: its functions are those of the wheel's ``cuda.h``."""
        # The second pass declares the variants that older programs bind to (cuMemAlloc beside cuMemAlloc_v2).
        names: set[str] = set()
        for defines in ((), ("-D__CUDA_API_VERSION_INTERNAL",)):
            text = self._run(["-E", "-P", *defines, *self._includes(), "-include", "cuda.h", "-xc", "/dev/null"]).stdout
            names |= set(re.findall(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(", text))
        if not names:
            raise StubError(f"The cuda.h of the torch wheel in {self._wheel.torch.parent} declares no function.")
        imported = next(iter(self._wheel.libraries)).imported
        known = {s.name for library in self._wheel.libraries for s in library.exports}
        names |= {n for n in imported if re.fullmatch(r"cu[A-Z]\w*", n) and n not in known}
        symbols = (
            elf.Symbol(n, elf.Kind.FUNC, elf.Binding.GLOBAL, 0, defined=True, absolute=False, version="", default=True)
            for n in sorted(names)
        )
        return Library(DRIVER_SONAME, Path("cuda.h"), tuple(symbols), imported)

    def make(self, library: Library) -> Stub:
        """Compiles the stub of one library."""
        folder = self._scratch / library.stem
        folder.mkdir()
        flags = [
            *_COMPILE,
            *_POLICY.get(library.stem, _ABORT),
            f'-DERGO_SONAME="{library.soname}"',
            f'-DERGO_CUDART_SONAME="{self._wheel.cudart}"',
            f"-I{folder}",
            *self._includes(),
        ]
        objects, bodies = self._bodies(library, folder, flags)
        exports = [s for s in library.exports if self._is_ours(s, library)]
        names = {s.name for s in exports}
        if library.stem == _OWN_LIBRARY:
            own = (_own(n) for n in sorted(bodies) if n.startswith(_OWN_PREFIX))
            exports += own
        data = [s for s in exports if s.kind in (elf.Kind.OBJECT, elf.Kind.COMMON)]
        functions = [s for s in exports if s not in data]
        (folder / "stubs.s").write_text(_assembly(functions, data, bodies))
        (folder / "exports.map").write_text(_version_script(library, exports))
        target = self._out / file_name(library.soname)
        names_of_file = (f"-Wl,-soname,{library.soname}", f"-Wl,--version-script={folder / 'exports.map'}")
        self._run([*_LINK, *names_of_file, "-o", target, folder / "stubs.s", *objects, "-ldl"])
        return Stub(library.soname, target, len(functions), len(names & bodies), len(data))

    def _is_ours(self, symbol: elf.Symbol, library: Library) -> bool:
        if symbol.name in self._system or symbol.name in _LINKER_NAMES or not symbol.default:
            return False
        if symbol.kind is elf.Kind.TLS:
            raise StubError(f"{library.path} exports the thread-local {symbol.name}, which cannot be stubbed.")
        # A weak C++ definition is an inline function or a template: whoever uses it has its own copy. Ours must
        # not take its place in other libraries. C names are weak where they are aliases (NCCL).
        is_copy = symbol.name.startswith("_Z") and symbol.binding in (elf.Binding.WEAK, elf.Binding.UNIQUE)
        return not is_copy or (symbol.name in library.imported and not symbol.name.startswith(("_ZNSt", "_ZSt")))

    def _bodies(self, library: Library, folder: Path, flags: Sequence[str]) -> tuple[list[Path], set[str]]:
        objects = [folder / "refuse.o"]
        self._run([*flags, "-c", _BODIES / "refuse.c", "-o", objects[0]])
        source = _BODIES / f"{library.stem}.c"
        if not source.exists():
            return objects, set()
        for header in re.findall(r'#include "defines/(\S+)"', source.read_text()):
            self._extract_defines(header, folder / "defines" / header)
        objects.append(folder / "body.o")
        self._run([*flags, "-c", source, "-o", objects[1]])
        return objects, {s.name for s in elf.read(objects[1]).exports()}

    def _extract_defines(self, header: str, target: Path) -> None:
        """Writes the version numbers that `header` defines to `target`, without what else it declares."""
        found = [p for root in self._wheel.includes for p in sorted(root.rglob(header)) if "cccl" not in p.parts]
        if not found:
            raise StubError(
                f"The header {header} is not among the nvidia packages of {self._wheel.torch.parent}.",
                code="stubs.header-missing",
                remedy="Reinstall torch with its dependencies (pip install --force-reinstall torch).",
            )
        text = found[0].read_text(errors="replace").replace("\\\n", " ")
        text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
        lines = re.findall(r"^\s*#\s*define\s+\w*(?:VER|MAJOR|MINOR|PATCH)\w*[ \t]+[^\n]+$", text, flags=re.MULTILINE)
        # A header may define a name twice, in branches for compilers that are not ours; the first one is for all.
        unique = {line.split("define", 1)[1].split()[0]: line.strip() for line in reversed(lines)}
        target.parent.mkdir(exist_ok=True)
        target.write_text("#pragma once\n" + "\n".join(unique.values()) + "\n")

    def _includes(self) -> list[str]:
        # Ours last: it stands in only for headers that the wheel does not have.
        return [f"-I{p}" for p in (*self._wheel.includes, _BODIES, HEADERS)]

    def _run(self, arguments: Iterable[str | Path]) -> subprocess.CompletedProcess[str]:
        command = [self._compiler, *map(str, arguments)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise StubError(
                f"The compiler {self._compiler} is not installed.",
                code="stubs.no-compiler",
                remedy="Install it (apt-get install g++).",
            ) from None
        if done.returncode != 0:
            first = next((line for line in done.stderr.splitlines() if "rror" in line), done.stderr.strip()[:300])
            raise StubError(f"A stub library could not be compiled: {first}", code="stubs.compile")
        return done


def _assembly(functions: Iterable[elf.Symbol], data: Iterable[elf.Symbol], bodies: set[str]) -> str:
    """Every function without a body: 12 bytes that load their own address and jump to the trampoline."""
    lines = ["\t.text"]
    for name in (s.name for s in functions):
        if name in bodies:
            continue
        base = next((name.removesuffix(v) for v in _STREAM_VARIANTS if name.endswith(v)), name)
        lines += [f'\t.globl "{name}"', f'\t.type "{name}", @function', f'"{name}":']
        if base in bodies:
            lines.append(f'\tjmp "{base}"')
        else:
            lines += [f'\tleaq "{name}"(%rip), %rdi', "\tjmp ergo_refuse_entry"]
        lines.append(f'\t.size "{name}", . - "{name}"')
    lines.append("\t.bss")
    for symbol in data:
        name, size = symbol.name, max(symbol.size, 1)
        lines += [f'\t.globl "{name}"', f'\t.type "{name}", @object', f'\t.size "{name}", {size}', "\t.balign 64"]
        lines += [f'"{name}":', f"\t.zero {size}"]
    lines += ['\t.section .note.GNU-stack, "", @progbits', ""]
    return "\n".join(lines)


def _version_script(library: Library, exports: Iterable[elf.Symbol]) -> str:
    """The version nodes of the real library. Everything else is local."""
    nodes: dict[str, list[str]] = {}
    for symbol in exports:
        nodes.setdefault(symbol.version, []).append(symbol.name)
    if "" in nodes and len(nodes) > 1:
        raise StubError(f"{library.path} has symbols with and without versions, which the stub generator cannot mix.")
    text, local = "", " local: *;"
    for node, names in sorted(nodes.items()):
        text += f"{node} {{ global: " + " ".join(f'"{n}";' for n in names) + f"{local} }};\n"
        local = ""
    return text or "{ local: *; };\n"


def _own(name: str) -> elf.Symbol:
    template = elf.Symbol(
        "", elf.Kind.FUNC, elf.Binding.GLOBAL, 0, defined=True, absolute=False, version=_OWN_NODE, default=True
    )
    return replace(template, name=name)


@cache
def _system_names(compiler: str) -> frozenset[str]:
    """The names that the C and C++ libraries of this machine define: a stub must never take their place."""
    names: set[str] = set()
    for library in _SYSTEM_LIBRARIES:
        try:
            command = [compiler, f"-print-file-name={library}"]
            found = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            raise StubError(
                f"The compiler {compiler} is not installed or does not work.",
                code="stubs.no-compiler",
                remedy="Install it (apt-get install g++).",
            ) from None
        path = Path(found.stdout.strip())
        if path.is_file():
            names |= {s.name for s in elf.read(path.resolve()).exports()}
    return frozenset(names)
