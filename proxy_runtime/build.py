"""Builds of the native runtime: one per (sources, torch, Python ABI, compiler), kept for as long as they are needed.

    python -m proxy_runtime.build [--python PYTHON]

A build is a directory ``$ERGO_HOME/builds/<id>`` that is written under another name, renamed when it is complete
and never changed afterwards: images of processes map its files by path, size and build id. It holds no path of the
interpreter that it was made for, so environments with the same torch share it.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from proxy_runtime.building.errors import BuildError
from proxy_runtime.building.interpreter import Interpreter, query
from proxy_runtime.building.locks import build_lock
from proxy_runtime.building.native import Compiler, NativeBuild, Target, digest, find_compiler, no_space
from proxy_runtime.building.sources import Sources
from proxy_runtime.home import ergo_home

__all__ = ["Build", "BuildError", "by_id", "ensure", "list_builds", "load", "prune"]

Progress = Callable[[str], None]

_FORMAT = 1
_DESCRIPTION = "build.json"
_FREE_BYTES = 1 << 30
_JOBS = max(1, min(4, os.cpu_count() or 1))
_PARTS = ("", ".so", ".py")  # suffixes of the files without which a build is damaged
_DIST_INFO = "ergo_rank-1.dist-info"
_ENTRY_POINTS = "[torch.backends]\nergo_rank = ergo_rank:autoload\n"
_METADATA = "Metadata-Version: 2.1\nName: ergo_rank\nVersion: 1\n"


@dataclass(frozen=True, slots=True)
class Build:
    """One complete build.

    Attributes:
        id: 32 hexadecimal digits; checkpoints name it.
        root: its directory.
        torch_version: the torch that it is for, e.g. ``2.15.0+cu132``.
        abi: the Python that it is for, e.g. ``cpython-311-x86_64-linux-gnu``.
    """

    id: str
    root: Path
    torch_version: str
    abi: str

    @property
    def rank_dir(self) -> Path:
        """What goes on a rank's ``PYTHONPATH``: the start-up hook, ``ergo_rank`` and the stub libraries."""
        return self.root / "rank"

    @property
    def device_dir(self) -> Path:
        """The folder of ``_ergo_device.so``."""
        return self.root / "device"

    @property
    def init_binary(self) -> Path:
        """The minimal pid 1 of a rank's container."""
        return self.root / "ergo-init"


def ensure(
    python: str | os.PathLike[str] | None = None,
    progress: Progress = lambda line: None,
    *,
    partial: bool = False,
) -> Build:
    """Returns the build for the interpreter `python` (default: this one), making it if it is missing.

    Takes about 0.1 s when it is there, 1 to 2 minutes on two cores when not. Concurrent callers are safe: one
    builds, the others wait.

    Args:
        python: a path, or a name on ``PATH``.
        progress: called with one line per finished step.
        partial: for development: leave out the parts whose sources are not there.

    Raises:
        BuildError: see its codes.
        StubError: no stub libraries can be made for the torch wheel of `python`.
    """
    interpreter = query(os.fspath(python or sys.executable))
    sources = Sources.of_this_tree()
    if not partial:
        sources.require_complete()
    fingerprint = _fingerprint(interpreter, sources)
    try:
        compiler = find_compiler()
    except BuildError:
        # A node without a compiler may have got the build from elsewhere.
        if existing := next((b for b in list_builds() if _description(b.root).get("key") == fingerprint), None):
            return existing
        raise
    build_id = hashlib.sha256(f"{_FORMAT}\0{fingerprint}\0{compiler.version}".encode()).hexdigest()[:32]
    target = _builds() / build_id
    if (target / _DESCRIPTION).is_file():
        return load(target)
    try:
        with build_lock(_builds(), build_id, progress):
            if not (target / _DESCRIPTION).is_file():
                _make(target, fingerprint, interpreter, compiler, sources, progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(_builds()) from None
        raise BuildError(
            f"The build cannot be written to {_builds()}: {error.strerror}.",
            code="build.no-space",
            remedy="Make it writable, or set ERGO_HOME to another folder.",
        ) from error
    return load(target)


def load(root: str | os.PathLike[str]) -> Build:
    """The complete build in the directory `root`.

    Raises:
        BuildError: ``build.damaged``: it is not one, or part of it is gone.
    """
    path = Path(root)
    about = _description(path)
    try:
        build = Build(about["id"], path, about["torch"], about["abi"])
    except KeyError:
        raise BuildError(
            f"{path} is not a complete build.", code="build.damaged", remedy="Remove it; it is made anew."
        ) from None
    if missing := [name for name in about.get("parts", "").split() if not (path / name).exists()]:
        raise BuildError(
            f"The build {path} has lost {missing[0]}.", code="build.damaged", remedy="Remove it; it is made anew."
        )
    return build


def by_id(build_id: str) -> Build:
    """The build called `build_id`, e.g. by a checkpoint.

    Raises:
        BuildError: ``build.unknown``: this node does not have it; or ``build.damaged``.
    """
    path = _builds() / build_id
    if not build_id.isalnum() or not path.is_dir():
        raise BuildError(
            f"This node does not have the build {build_id} of the runtime.",
            code="build.unknown",
            remedy=f"Copy it from the node that made it to {_builds()}.",
        )
    return load(path)


def list_builds() -> tuple[Build, ...]:
    """All complete builds of this node, by id."""
    if not _builds().is_dir():
        return ()
    return tuple(load(p) for p in sorted(_builds().iterdir()) if _description(p).get("id") == p.name)


def prune(keep: Iterable[str]) -> tuple[str, ...]:
    """Removes all builds but those whose ids are in `keep`, and returns the ids of what it removed.

    Never called on its own: a build is needed for as long as a process or a checkpoint was made with it.
    """
    kept = frozenset(keep)
    removed = [b for b in list_builds() if b.id not in kept]
    for build in removed:
        # Out of sight first: a removal that is cut short leaves no incomplete build behind.
        grave = build.root.with_name(f".old-{build.id}-{os.getpid()}")
        build.root.rename(grave)
        shutil.rmtree(grave)
    return tuple(b.id for b in removed)


def _builds() -> Path:
    return ergo_home() / "builds"


def _description(root: Path) -> dict[str, str]:
    try:
        return json.loads((root / _DESCRIPTION).read_text())
    except (OSError, ValueError):
        return {}


def _fingerprint(interpreter: Interpreter, sources: Sources) -> str:
    """What decides a build except the compiler."""
    from proxy_runtime.rank.stubs import wheel

    libraries = wheel.fingerprint(interpreter.path)
    text = "\0".join((interpreter.torch_version, interpreter.abi, digest(sources.all_files()), libraries))
    return hashlib.sha256(text.encode()).hexdigest()


def _make(
    target: Path, key: str, interpreter: Interpreter, compiler: Compiler, sources: Sources, progress: Progress
) -> None:
    for stale in target.parent.glob(f".new-{target.name}-*"):
        shutil.rmtree(stale)  # of a builder that was killed; we hold the lock
    if shutil.disk_usage(target.parent).free < _FREE_BYTES:
        raise no_space(target.parent)
    fresh = target.with_name(f".new-{target.name}-{os.getpid()}")
    fresh.mkdir(parents=True)
    progress(f"building the runtime for torch {interpreter.torch_version}, {interpreter.abi}, with {compiler.version}")
    try:
        stubs = _stubs(interpreter, fresh, progress)
        native = NativeBuild(
            interpreter,
            compiler,
            root=sources.root,
            includes=stubs,
            cache=ergo_home() / "cache" / "objects",
            jobs=_JOBS,
            strict=bool(os.environ.get("ERGO_BUILD_STRICT")),
            report=progress,
        )
        native.compile(_targets(sources), fresh)
        _init(sources, fresh / "ergo-init")
        progress("compiled ergo-init")
        _rank_dir(interpreter, sources, fresh / "rank")
        parts = (p.relative_to(fresh) for p in fresh.rglob("*") if p.is_file() and p.suffix in _PARTS)
        about = {
            "format": str(_FORMAT),
            "id": target.name,
            "key": key,
            "torch": interpreter.torch_version,
            "cuda": interpreter.cuda,
            "abi": interpreter.abi,
            "compiler": compiler.version,
            "parts": " ".join(sorted(map(str, parts))),
        }
        (fresh / _DESCRIPTION).write_text(json.dumps(about, indent=1, sort_keys=True) + "\n")
        fresh.rename(target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    progress(f"build {target.name} is complete")


def _targets(sources: Sources) -> list[Target]:
    targets = [
        Target("_interposer", sources.interposer, "rank/ergo_rank/_interposer.so"),
        Target("_ergo_device", sources.device, "device/_ergo_device.so"),
        Target("_channel", sources.channel, "rank/ergo_rank/_channel.so", torch=False),
    ]
    return [t for t in targets if t.sources]


def _stubs(interpreter: Interpreter, fresh: Path, progress: Progress) -> tuple[Path, ...]:
    """Makes the stub libraries and returns the folders of NVIDIA's headers."""
    from proxy_runtime.rank.stubs import generate, wheel

    found = wheel.inspect(interpreter.torch, interpreter.path)
    made = generate.generate(found, fresh / "rank" / "stubs", jobs=_JOBS)
    progress(f"made {len(made)} stub libraries for CUDA {interpreter.cuda}")
    return (*found.includes, generate.HEADERS)


def _init(sources: Sources, target: Path) -> None:
    from proxy_runtime.process.init_build import build_init

    if sources.init:
        build_init(target)


def _rank_dir(interpreter: Interpreter, sources: Sources, rank: Path) -> None:
    """Adds the Python part: nothing else of ours is importable in a rank."""
    package = rank / "ergo_rank"
    package.mkdir(parents=True, exist_ok=True)
    for path in sources.rank_package:
        shutil.copyfile(path, package / path.name)
    if sources.start_up_hook:
        shutil.copyfile(sources.start_up_hook, rank / "sitecustomize.py")
    info = rank / _DIST_INFO
    info.mkdir()
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    # Now, by content: a rank would otherwise write them into the build when it first imports.
    subprocess.run(
        [interpreter.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", rank, rank],
        check=True,
        capture_output=True,
        cwd="/",
    )


def main(arguments: list[str] | None = None) -> int:
    """Makes the build for an interpreter; its directory goes to stdout, progress and errors to stderr."""
    parser = argparse.ArgumentParser(prog="python -m proxy_runtime.build", description="Build the native runtime.")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the jobs (default: this one)")
    parser.add_argument("--partial", action="store_true", help="for development: build the parts that are there")
    parser.add_argument("--list", action="store_true", help="list the builds of this node instead")
    parser.add_argument("--json", action="store_true", help="with --list: as JSON")
    options = parser.parse_args(arguments)
    if options.list:
        builds = [{**asdict(b), "root": str(b.root)} for b in list_builds()]
        lines = (f"{b['id']}  torch {b['torch_version']}  {b['abi']}" for b in builds)
        print(json.dumps(builds, indent=1) if options.json else "\n".join(lines))
        return 0
    from proxy_runtime.errors import ErgoError

    try:
        print(ensure(options.python, _printer(), partial=options.partial).root)
    except ErgoError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _printer() -> Progress:
    if not sys.stderr.isatty():
        return lambda line: print(line, file=sys.stderr, flush=True)
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    return lambda line: console.print(f"[green]·[/green] {line}")


if __name__ == "__main__":
    raise SystemExit(main())
