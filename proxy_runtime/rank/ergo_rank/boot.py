"""What happens in a rank before any user code, and before torch: the channel is taken, the stubs are loaded."""

from __future__ import annotations

import ctypes
import os

__all__ = ["Channel", "channel", "take_channel"]

_KINDS = ("cpu", "cuda")
_BUILD_OFFSET = 32  # bytes from the start of the ring's header to its build word (channel/ring.hpp)


class Channel:
    """The channel of this rank.

    Attributes:
        base: address at which the ring is mapped.
        kind: kind of the device behind it, ``cpu`` or ``cuda``.
        device_bytes: memory that the job gives its device; 0: all that the device has.
    """

    __slots__ = ("base", "device_bytes", "kind")

    def __init__(self, base: int, kind: str, device_bytes: int) -> None:
        self.base = base
        self.kind = kind
        self.device_bytes = device_bytes


channel: Channel | None = None


def take_channel() -> None:
    """Takes ``ERGO_CHANNEL=<fd>:<rank_dir>:<kind>`` out of the environment, maps the ring and closes the descriptor.

    ``ERGO_DEVICE_MEMORY``, bytes, is taken too if it is there.

    Raises:
        RuntimeError: the variable or the ring is not usable; one sentence.
        OSError: a stub library cannot be loaded.
    """
    global channel
    text = os.environ.pop("ERGO_CHANNEL")
    number, _, rest = text.partition(":")
    rank_dir, _, kind = rest.rpartition(":")
    if not number.isdigit() or not rank_dir or kind not in _KINDS:
        raise RuntimeError(f"ERGO_CHANNEL is {text!r}, not <descriptor>:<folder>:<cpu or cuda>.")
    memory = os.environ.pop("ERGO_DEVICE_MEMORY", "0")
    if not memory.isdigit():
        raise RuntimeError(f"ERGO_DEVICE_MEMORY is {memory!r}, not a number of bytes.")
    base = _map(int(number))
    _check_build(base, rank_dir)
    _preload_stubs(os.path.join(rank_dir, "stubs"))
    from ergo_rank import lean

    lean.hide_bindings()
    # The device needs torch's entry point, whatever the job's environment says about other backends.
    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    channel = Channel(base, kind, int(memory))


def _map(descriptor: int) -> int:
    library = ctypes.CDLL(os.path.join(os.path.dirname(os.path.abspath(__file__)), "_channel.so"))
    library.ergo_channel_map.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
    library.ergo_channel_map.restype = ctypes.c_void_p
    error = ctypes.create_string_buffer(256)
    try:
        base = library.ergo_channel_map(descriptor, error, len(error))
    finally:
        # From here on no child can inherit it, and no image of this process depends on it.
        try:
            os.close(descriptor)
        except OSError:
            pass
    if not base:
        raise RuntimeError(error.value.decode() + ".")
    return base


def _check_build(base: int, rank_dir: str) -> None:
    """Handshake: whoever made the ring must have the build that this rank runs (builds/<id>/rank)."""
    theirs = ctypes.c_uint64.from_address(base + _BUILD_OFFSET).value
    name = os.path.basename(os.path.dirname(os.path.abspath(rank_dir)))
    try:
        mine = int.from_bytes(bytes.fromhex(name[:16]), "little")
    except ValueError:
        return  # not in a build directory: under development
    if theirs not in (0, mine):
        raise RuntimeError(
            f"The channel was made by build {theirs.to_bytes(8, 'little').hex()} of the runtime, this rank runs build "
            f"{name[:16]}; start both with one build."
        )


def _preload_stubs(folder: str) -> None:
    """Makes the CUDA libraries that torch will ask for by soname the stubs, which own no memory and no device."""
    names = sorted(n for n in os.listdir(folder) if ".so" in n) if os.path.isdir(folder) else []
    if not names:
        raise RuntimeError(f"There are no stub libraries in {folder}; the build is damaged, make it anew.")
    # They may need each other in an order that names do not show.
    while names:
        failed = []
        for name in names:
            try:
                ctypes.CDLL(os.path.join(folder, name), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                failed.append((name, error))
        if len(failed) == len(names):
            raise failed[0][1]
        names = [name for name, _ in failed]
