"""Makes torch's CUDA device the one behind the channel."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

from ergo_rank.boot import Channel

__all__ = ["install"]


def install(channel: Channel) -> None:
    """Registers the device with torch. Called once, at the end of ``import torch``."""
    # Registered first, so it runs after every handler that user code registers.
    atexit.register(_finish)
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from ergo_rank import (
        _interposer,
        compiling,
        distributed,
        flags,
        forbidden,
        generators,
        kernels,
        lean,
        memory,
        storages,
    )

    _interposer.start(channel.base, channel.kind, channel.device_bytes)
    flags.install(channel.kind)
    torch.cuda.init()
    generators.install()
    storages.install()
    memory.install()
    forbidden.install()
    kernels.install(channel.kind)
    compiling.install()
    lean.install()
    distributed.install()
    register_optimizer_step_post_hook(_count_step)
    _watch_libraries()
    lean.trim()


def _count_step(optimizer: object, args: object, kwargs: object) -> None:
    from ergo_rank import _interposer

    _interposer.step()


def _watch_libraries() -> None:
    """Forwards the operators of libraries that are loaded later, and has the device load them too.

    The two ways in which Python loads a library, ``torch.ops.load_library`` included. One that C code loads is
    noticed at the next new operation.
    """
    import ctypes
    from importlib.machinery import ExtensionFileLoader

    from ergo_rank import _interposer

    dlopen: Any = ctypes._dlopen  # type: ignore[attr-defined]
    create_module = ExtensionFileLoader.create_module

    def open_and_sweep(*args: Any) -> Any:
        handle = dlopen(*args)
        _interposer.on_library_loaded()
        return handle

    def create_and_sweep(self: ExtensionFileLoader, spec: Any) -> Any:
        module = create_module(self, spec)
        _interposer.on_library_loaded()
        return module

    ctypes._dlopen = open_and_sweep  # type: ignore[attr-defined]
    ExtensionFileLoader.create_module = create_and_sweep  # type: ignore[method-assign]


def _finish() -> None:
    """At the interpreter's normal end: errors that are still on their way are raised here, then nothing follows."""
    if "ergo_rank._interposer" not in sys.modules:
        return
    from ergo_rank import _interposer

    if not _interposer.is_open():
        return
    # Whoever waits for a collective of this rank need not wait any longer.
    _interposer.leaving()
    if getattr(sys, "last_type", None) is not None or _interposer.fault_raised():
        # An exception, or a fault that the script has seen, says what there is to say; results that come are for nobody.
        _interposer.exit()
        return
    try:
        _interposer.require()
        _interposer.synchronize()
    except Exception as error:
        # An exception in an exit handler would be printed and forgotten; the job must fail.
        sys.stdout.flush()
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        _interposer.exit()
        os._exit(1)
    _interposer.exit()
