"""Compiles the C++ of the runtime: one shared library per target, object files cached by content."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from proxy_runtime.building.errors import BuildError
from proxy_runtime.building.interpreter import Interpreter

_SHARED = "channel"  # headers that rank and device share
_NO_COMPILER_REMEDY = "Install it (apt-get install g++)."
_COMMON = ("-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
_CXX = (*_COMMON, "-std=c++20", "-D_GLIBCXX_USE_CXX11_ABI=1")
_C = (*_COMMON, "-std=gnu11")
_LINK = ("-shared", "-Wl,--build-id=sha1", "-Wl,--hash-style=gnu", "-Wl,-z,relro", "-Wl,--no-undefined-version")
_TORCH_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch_python", "-ltorch_cuda", "-lc10_cuda")
_ERROR_LINE = re.compile(r"\b(error|undefined reference)\b")
_TORCH_HEADER = re.compile(r"^\s*#\s*include\s*<(?:torch|ATen)/", re.MULTILINE)
_LOCAL_HEADER = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
# The headers that nearly all of our files with tensors need. Measured per file: 8.4 s of CPU without, 3.1 s with,
# 13.6 s to precompile. All of torch/extension.h is no gain: every file then pays for what it does not use.
_PRECOMPILED = "#include <ATen/core/dispatch/Dispatcher.h>\n#include <ATen/core/Tensor.h>\n"
_PRECOMPILE_FROM = 4  # files


@dataclass(frozen=True, slots=True)
class Compiler:
    """The C++ compiler of this machine; its C twin is asked for by the same driver."""

    path: str
    version: str


@dataclass(frozen=True, slots=True)
class Target:
    """One library to make.

    Attributes:
        sources: its ``.cpp`` and ``.c`` files, in any order.
        output: where it goes, below the folder of the build.
        torch: whether it is linked against torch.
    """

    name: str
    sources: tuple[Path, ...]
    output: str
    torch: bool = True


def find_compiler() -> Compiler:
    """The compiler named by ``CXX``, or g++.

    Raises:
        BuildError: there is none, or it does not run.
    """
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise BuildError(
            f"The C++ compiler {name} is not installed.", code="build.no-compiler", remedy=_NO_COMPILER_REMEDY
        )
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(
            f"The C++ compiler {path} does not run: {error}.", code="build.no-compiler", remedy=_NO_COMPILER_REMEDY
        ) from None
    return Compiler(path, done.stdout.splitlines()[0].strip())


class NativeBuild:
    """Compiles targets for one interpreter.

    Args:
        root: the package ``proxy_runtime``; debug information shows it as ``.``.
        includes: folders of further headers (NVIDIA's).
        cache: folder of object files by content; what is there is not compiled again.
        strict: warnings are errors.
        report: called with one line per finished step.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        compiler: Compiler,
        *,
        root: Path,
        includes: Iterable[Path],
        cache: Path,
        jobs: int,
        strict: bool,
        report: Callable[[str], None],
    ) -> None:
        self._interpreter = interpreter
        self._compiler = compiler
        self._root = root
        self._cache = cache
        self._jobs = jobs
        self._report = report
        torch = interpreter.torch / "include"
        system = (torch, torch / "torch/csrc/api/include", interpreter.include, *includes)
        self._flags = (
            *(f"-I{folder}" for folder in (root.parent, root, root / _SHARED)),
            *(f"-isystem{folder}" for folder in system),
            f"-ffile-prefix-map={root}=.",
            *(("-Werror",) if strict else ()),
        )

    def compile(self, targets: Sequence[Target], out: Path) -> None:
        """Compiles and links `targets` into `out`.

        Raises:
            BuildError: a file does not compile; the message holds the compiler's first error.
        """
        self._cache.mkdir(parents=True, exist_ok=True)
        objects = {source: self._object(source, target) for target in targets for source in target.sources}
        todo = [(s, t) for t in targets for s in t.sources if not objects[s].exists()]
        # The longest first, so that no core waits at the end for one file.
        todo.sort(key=lambda pair: pair[0].stat().st_size, reverse=True)
        uses_torch = {s for s, t in todo if t.torch and _uses_torch(s, self._root)}
        header = self._precompiled(make=len(uses_torch) >= _PRECOMPILE_FROM)
        self._all(
            lambda pair=pair: self._compile(*pair, objects[pair[0]], header if pair[0] in uses_torch else None)
            for pair in todo
        )
        self._all(lambda t=t: self._link(t, [objects[s] for s in t.sources], out / t.output) for t in targets)

    def _all(self, work: Iterable[Callable[[], None]]) -> None:
        with ThreadPoolExecutor(self._jobs) as pool:
            futures = [pool.submit(step) for step in work]
            done, pending = wait(futures, return_when=FIRST_EXCEPTION)
            for future in pending:
                future.cancel()
            for future in done:
                future.result()

    def _object(self, source: Path, target: Target) -> Path:
        """Where its object file is: named by what it is made of, wherever the tree and the interpreter lie."""
        includes = ("-I", "-isystem", "-ffile-prefix-map")
        flags = [flag for flag in self._command(source, target)[1:] if not flag.startswith(includes)]
        ours = digest(_with_headers(source, self._root))
        return self._cache / f"{self._key(*flags, ours)[:32]}.o"

    def _key(self, *parts: str) -> str:
        """A hash of the parts and of what compiles them."""
        key = hashlib.sha256()
        for part in (self._compiler.version, self._interpreter.abi, self._interpreter.torch_version, *parts):
            key.update(part.encode() + b"\0")
        return key.hexdigest()

    def _command(self, source: Path, target: Target) -> list[str]:
        is_cpp = source.suffix == ".cpp"
        flags = _CXX if is_cpp else _C
        name = [f"-DTORCH_EXTENSION_NAME={target.name}"] if target.torch else []
        return [self._compiler.path, "-x", "c++" if is_cpp else "c", *flags, *name, *self._flags]

    def _precompiled(self, *, make: bool) -> Path | None:
        """Torch's headers, precompiled: those of an earlier build, or made where that is worth it."""
        kept = self._cache / f"precompiled-{self._key(*_CXX, _PRECOMPILED)[:16]}.hpp"
        ready = Path(f"{kept}.gch")
        if ready.exists() or not make:
            return kept if ready.exists() else None
        started = time.monotonic()
        kept.write_text(_PRECOMPILED)
        command = [self._compiler.path, "-x", "c++-header", *_CXX, *self._flags]
        partial = f"{kept}.{os.getpid()}.tmp"
        self._run([*command, str(kept), "-o", partial], "torch's headers")
        Path(partial).replace(ready)
        self._report(f"precompiled torch's headers ({time.monotonic() - started:.1f} s)")
        return kept

    def _compile(self, source: Path, target: Target, out: Path, header: Path | None) -> None:
        started = time.monotonic()
        partial = out.with_suffix(f".{os.getpid()}.tmp")
        before = ["-include", str(header)] if header else []
        self._run([*self._command(source, target), *before, "-c", str(source), "-o", str(partial)], source.name)
        partial.replace(out)
        where = source.relative_to(self._root) if source.is_relative_to(self._root) else source
        self._report(f"compiled {where} ({time.monotonic() - started:.1f} s)")

    def _link(self, target: Target, objects: Sequence[Path], output: Path) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        # Torch is loaded when ours is: no path to it is written into the file, so that it fits every environment.
        torch = (f"-L{self._interpreter.torch / 'lib'}", "-Wl,--as-needed", *_TORCH_LIBRARIES) if target.torch else ()
        command = [self._compiler.path, *_LINK, *map(str, objects), *torch, "-ldl", "-o", str(output)]
        self._run(command, target.output)
        self._report(f"linked {target.output}")

    def _run(self, command: Sequence[str], what: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        text = done.stderr.strip()
        if "No space left on device" in text:
            raise no_space(self._cache)
        first = next((line for line in text.splitlines() if _ERROR_LINE.search(line)), text[:400])
        raise BuildError(
            f"{what} does not compile: {first.strip()}.",
            code="build.compile",
            remedy=f"It was compiled with {self._compiler.version}; report it with this line.",
        )


def no_space(where: Path) -> BuildError:
    """The error for a full disk at `where`."""
    return BuildError(
        f"There is not enough disk space for a build in {where}.",
        code="build.no-space",
        remedy="Free about 1 GB there, or set ERGO_HOME to a folder on another disk.",
    )


def _uses_torch(source: Path, root: Path) -> bool:
    """Whether `source` or a header of ours that it includes needs the headers that are precompiled."""
    return any(_TORCH_HEADER.search(path.read_text()) for path in _with_headers(source, root))


def _with_headers(source: Path, root: Path) -> list[Path]:
    """`source` and the headers of ours that it includes, at any depth, sorted."""
    seen: set[Path] = set()
    todo = [source]
    while todo:
        path = todo.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        for name in _LOCAL_HEADER.findall(path.read_text()):
            todo += [(folder / name).resolve() for folder in (path.parent, root / _SHARED, root, root.parent)]
    return sorted(seen)


def digest(paths: Iterable[Path]) -> str:
    """A hash of the names and contents of files."""
    key = hashlib.sha256()
    for path in paths:
        key.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return key.hexdigest()
