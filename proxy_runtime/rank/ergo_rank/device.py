"""Makes torch's CUDA device the one behind the channel."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

from ergo_rank.boot import Channel, Tree

__all__ = ["install", "settle"]

_ENGINE_REST_S = 2.0  # how long the end of a process waits for a backward pass of another thread


def install(channel: Channel | None, tree: Tree | None) -> None:
    """Registers the device, or those of the tree, with torch. Called once, at the end of ``import torch``."""
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

    if channel is not None:
        _interposer.start(channel.base, channel.kind, channel.device_bytes)
        kind = channel.kind
    else:
        from ergo_rank import slots

        assert tree is not None
        _interposer.start(0, tree.kind, tree.device_bytes, slots.connector(tree))
        kind = tree.kind
        # As with NVML: asking how many there are initialises nothing, so that children may be forked afterwards.
        torch.cuda._device_count_nvml = lambda: len(tree.visible)
    flags.install(kind)
    if channel is not None:
        torch.cuda.init()
        generators.install(1)
    else:
        generators.install_later()
    storages.install()
    memory.install()
    forbidden.install()
    kernels.install(kind)
    compiling.install()
    lean.install()
    distributed.install(tree)
    register_optimizer_step_post_hook(_count_step)
    _watch_libraries()
    lean.trim()


def settle() -> None:
    """For a process that ends without exit handlers: errors that are still on their way are raised here."""
    _settle(close=False)


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
    """At the interpreter's normal end: errors that are still on their way are raised here.

    What destructors of global objects do with the device comes after this, and the end of the channel after them.
    """
    _settle(close=True)


def _settle(*, close: bool) -> None:
    if "ergo_rank._interposer" not in sys.modules:
        return
    from ergo_rank import _interposer

    if not _interposer.is_open():
        return
    if close:
        _interposer.rest_engine(_ENGINE_REST_S)
        # Whoever waits for a collective of this rank need not wait any longer.
        _interposer.leaving()
    if close and (getattr(sys, "last_type", None) is not None or _interposer.fault_raised()):
        # The exception, or the fault that the script has seen, says what there is to say; no result is wanted.
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
