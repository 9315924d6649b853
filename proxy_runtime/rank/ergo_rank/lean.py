"""Keeps a rank small: the memory of a rank is what every checkpoint of it dumps, moves and restores.

Creating the first optimizer imports ``torch._dynamo``, 910 modules with sympy and more, for calls that do nothing
unless something is being compiled: measured 427 MB resident and 245 MB private instead of 281 and 164. A stand-in
answers these calls; anything else that is asked of it loads the real package, which then takes its place.
"""

from __future__ import annotations

import ctypes
import importlib
import linecache
import re
import sys
import types
from collections.abc import Callable
from typing import Any

__all__ = ["hide_bindings", "install", "load_real", "trim"]

_NAME = "torch._dynamo"
_REGION = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+\s*(.*)")
_MADV_DONTNEED = 4


def hide_bindings() -> None:
    """Lets torch do without what drives a GPU from Python, which a rank has not.

    That is ``cuda.bindings``, 55 modules and 7 MB, and ``pynvml``, 4.6 MB. torch takes them as optional. Whoever else
    imports them gets them.
    """
    sys.meta_path.insert(0, _NO_BINDINGS)


def install() -> None:
    """Puts the stand-in in place, unless the package is loaded already."""
    if _NO_BINDINGS in sys.meta_path:
        sys.meta_path.remove(_NO_BINDINGS)
    if _NAME in sys.modules:
        return
    import torch

    stand_in = _StandIn(_NAME)
    sys.modules[_NAME] = stand_in
    torch._dynamo = stand_in  # type: ignore[attr-defined]


def load_real() -> types.ModuleType:
    """The real package; whoever compiles something needs it."""
    import torch

    if isinstance(sys.modules.get(_NAME), _StandIn):
        del sys.modules[_NAME]
        # Plain functions were handed out undecorated meanwhile; only compiled code could tell the difference.
        torch.__dict__.pop("_dynamo", None)
    return importlib.import_module(_NAME)


def trim() -> None:
    """Lets go of what only loading has needed: pages of libraries, which the kernel brings back if they are used again.

    Measured after a short training: 182 instead of 281 MB resident. Only mappings of files without a private page
    are touched: relocated data would be lost.
    """
    libc = ctypes.CDLL(None)
    linecache.clearcache()  # sources that torch has looked at, 1 MB
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    region: tuple[int, int] | None = None
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            header = _REGION.match(line)
            if header:
                clean_file = header[4].startswith("/") and not header[4].startswith("/memfd:") and "w" not in header[3]
                region = (int(header[1], 16), int(header[2], 16)) if clean_file else None
            elif region and line.startswith("Anonymous:") and line.split()[1] == "0":
                libc.madvise(ctypes.c_void_p(region[0]), ctypes.c_size_t(region[1] - region[0]), _MADV_DONTNEED)


class _NoBindings:
    """A finder that tells torch, and nobody else, that there are no such packages."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in ("cuda", "cuda.bindings", "pynvml") and _importer().startswith("torch."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


_NO_BINDINGS: Any = _NoBindings()


def _importer() -> str:
    """Name of the module whose import statement is being executed."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        (__name__, "importlib", "_frozen_importlib")
    ):
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


class _StandIn(types.ModuleType):
    """What torch's own eager code asks of ``torch._dynamo``."""

    __spec__ = None

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.trace_rules = types.SimpleNamespace(clear_lru_cache=_nothing)
        self.utils = _Utils()

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """Nothing is being traced."""

    @staticmethod
    def disable(fn: Callable[..., Any] | None = None, recursive: bool = True, **_: Any) -> Any:
        """Nothing is being traced, so a function is as good as its undecorated self."""
        return fn if fn is not None else (lambda function: function)

    @staticmethod
    def is_compiling() -> bool:
        """Nothing is being traced."""
        return False

    def __getattr__(self, name: str) -> Any:
        # `__path__` is how the import system asks for a submodule.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(load_real(), name)


class _Utils:
    """What DistributedDataParallel asks of ``torch._dynamo.utils``."""

    @staticmethod
    def get_optimize_ddp_mode() -> str:
        """The default of ``torch._dynamo.config.optimize_ddp``; a script that changes it loads the real package."""
        return "ddp_optimizer"

    def __getattr__(self, name: str) -> Any:
        load_real()
        return getattr(importlib.import_module(f"{_NAME}.utils"), name)


def _nothing(*_: Any, **__: Any) -> None:
    """Takes a call that means nothing here."""
