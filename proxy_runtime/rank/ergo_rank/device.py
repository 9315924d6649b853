"""Makes torch's CUDA device the one behind the channel."""

from __future__ import annotations

import atexit
import os
import sys

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
    """Forwards the operators of libraries that are loaded later (a library's definitions are noticed anyway)."""
    import torch

    from ergo_rank import _interposer

    load_library = torch.ops.load_library

    def load_and_sweep(path: object) -> object:
        result = load_library(path)
        _interposer.sweep()
        return result

    torch.ops.load_library = load_and_sweep


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
