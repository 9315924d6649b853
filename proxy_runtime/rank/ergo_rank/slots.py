"""How a process of a tree gets a channel: it claims a free one of the device that it uses (docs/design/0003)."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable

from ergo_rank import boot
from ergo_rank.boot import Tree

__all__ = ["connect_for_group", "connector", "lives", "slot", "when_connected"]

# channel/ring.hpp, shared_ring.hpp: where the header has the pid of the process that uses the ring.
_CLAIMANT, _PROXY_GONE = 4100, 2496

_lock = threading.RLock()
_slot: int | None = None
_waiting: list[Callable[[int], None]] = []


def slot() -> int | None:
    """The slot that this process has, counted over all devices; the number by which others address it."""
    return _slot


def when_connected(call: Callable[[int], None]) -> None:
    """Calls with the slot, now or as soon as this process has one."""
    with _lock:
        if _slot is None:
            _waiting.append(call)
            return
    call(_slot)


def connector(tree: Tree) -> Callable[[int], None]:
    """What the interposer calls with a device's index when this process first uses it."""
    # Forked before it had a channel: the child gets its own.
    os.register_at_fork(after_in_child=_forget)

    def connect(index: int) -> None:
        if not 0 <= index < len(tree.visible):
            raise RuntimeError(
                f"CUDA error: invalid device ordinal: cuda:{index} of {len(tree.visible)} visible devices"
            )
        _connect(tree, tree.visible[index], index)

    return connect


def _connect(tree: Tree, device: int, index: int) -> None:
    global _slot
    from ergo_rank import _interposer

    with _lock:
        if _slot is not None:
            return
        base, claimed = _claim(tree, device)
        _interposer.bind_device(base, index)
        _slot = claimed
        _settle_with_multiprocessing()
        waiting = _waiting.copy()
        _waiting.clear()
    for call in waiting:
        call(claimed)


def connect_for_group(rank: int) -> int:
    """The slot of this process, which is about to take part in a collective as `rank`.

    If it has chosen no device yet: the current one if that was set, else that of its ``LOCAL_RANK``, else that of its
    rank, as torch guesses.
    """
    import torch

    from ergo_rank import _interposer

    tree = boot.tree
    assert tree is not None
    if _slot is None:
        local = os.environ.get("LOCAL_RANK", "")
        guess = int(local) if local.isdigit() else rank
        if tree.visible:
            chosen = torch.cuda.current_device() or guess % len(tree.visible)
            torch.cuda.set_device(chosen)
            _interposer.use_device(chosen)
        else:  # collectives of CPU tensors need a channel too
            _connect(tree, guess % tree.devices, 0)
    assert _slot is not None
    return _slot


def _claim(tree: Tree, device: int) -> tuple[int, int]:
    library = boot.load_library()
    library.ergo_channel_claim.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)
    mine = os.getpid()
    for slot in range(device * tree.slots, (device + 1) * tree.slots):
        try:
            fd = os.open(f"/proc/{tree.keeper}/fd/{tree.descriptors[slot]}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(
                f"The channels of this job cannot be opened ({error}): a process that uses CUDA must run as the user "
                "that started the job."
            ) from error
        try:
            (holder,) = struct.unpack("=I", os.pread(fd, 4, _CLAIMANT))
            (gone,) = struct.unpack("=I", os.pread(fd, 4, _PROXY_GONE))
            # Its own pid: this program replaced another one that had a channel.
            if gone or (holder not in (0, mine) and lives(holder)):
                continue
            base = boot.map_channel(fd, close=False)
            if library.ergo_channel_claim(base, holder, mine):
                return base, slot
            library.ergo_channel_unmap(ctypes.c_void_p(base), ctypes.c_size_t(os.fstat(fd).st_size))
        finally:
            os.close(fd)
    raise RuntimeError(
        f"All {tree.slots} channels of device {device} are in use: so many processes of a job may use one at a time."
    )


def lives(pid: int) -> bool:
    """Whether the tree has a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _settle_with_multiprocessing() -> None:
    """Children of multiprocessing that are forked end without exit handlers."""
    import multiprocessing.process
    import multiprocessing.util

    if multiprocessing.process.parent_process() is not None:
        from ergo_rank import device

        multiprocessing.util.Finalize(None, device.settle, exitpriority=-1000)


def _forget() -> None:
    global _lock, _slot
    _lock = threading.RLock()
    _slot = None
    _waiting.clear()
