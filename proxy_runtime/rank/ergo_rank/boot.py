"""What happens in a rank before any user code, and before torch: the channel is taken, the stubs are loaded."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

__all__ = [
    "Channel",
    "Tree",
    "channel",
    "join_tree",
    "load_library",
    "map_channel",
    "require_torch",
    "take_channel",
    "tree",
]

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


class Tree:
    """Where a process finds the devices of a job that starts its own ranks (docs/design/0003).

    Attributes:
        kind: kind of the devices, ``cpu`` or ``cuda``.
        devices: how many the job has.
        slots: channels of each device.
        keeper: pid of the process that holds the channels.
        descriptors: of the channels there, by slot.
        device_bytes: memory that the job gives each process on its device; 0: all that the device has.
        visible: which of the devices this process sees, by its own index.
    """

    __slots__ = ("descriptors", "device_bytes", "devices", "keeper", "kind", "slots", "visible")

    def __init__(
        self, kind: str, devices: int, slots: int, keeper: int, descriptors: tuple[int, ...], device_bytes: int = 0
    ) -> None:
        self.kind = kind
        self.devices = devices
        self.slots = slots
        self.keeper = keeper
        self.descriptors = descriptors
        self.device_bytes = device_bytes
        self.visible = tuple(range(devices))


channel: Channel | None = None
tree: Tree | None = None


def join_tree() -> None:
    """Reads ``ERGO_DEVICES=<kind>:<devices>:<slots>:<keeper>:<descriptors>:<rank_dir>``, which children inherit.

    ``ERGO_DEVICE_MEMORY`` is read too if it is there; children inherit it as well. The stubs are
    loaded when torch is imported: most processes of a tree never do.

    Raises:
        RuntimeError: the variable is not usable; one sentence.
    """
    global tree
    text = os.environ["ERGO_DEVICES"]
    fields = text.split(":", 5)
    numbers = [*fields[1:4], *fields[4].split(",")] if len(fields) == 6 else []
    if not numbers or fields[0] not in _KINDS or not all(number.isdigit() for number in numbers):
        raise RuntimeError(f"ERGO_DEVICES is {text!r}, not <kind>:<devices>:<slots>:<keeper>:<descriptors>:<folder>.")
    kind, rank_dir = fields[0], fields[5]
    devices, slots, keeper, *descriptors = (int(number) for number in numbers)
    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    tree = Tree(kind, devices, slots, keeper, tuple(descriptors), _device_memory(os.environ))
    sys.meta_path.insert(0, _BeforeTorch(tree, rank_dir))


class _BeforeTorch:
    """A finder that finds nothing, but notices the import of torch."""

    def __init__(self, tree: Tree, rank_dir: str) -> None:
        self._tree = tree
        self._rank_dir = rank_dir

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "torch":
            return
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        _preload_stubs(os.path.join(self._rank_dir, "stubs"))
        from ergo_rank import lean

        lean.hide_bindings()
        self._tree.visible = _visible(self._tree.devices)
        ctypes.CDLL(None).ergo_stub_set_devices(len(self._tree.visible))


def _visible(devices: int) -> tuple[int, ...]:
    """What ``CUDA_VISIBLE_DEVICES`` leaves: as with CUDA, the list ends at the first entry that is no device."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return tuple(range(devices))
    found: list[int] = []
    for entry in text.split(","):
        number = entry.strip()
        if not number.isdigit() or int(number) >= devices or int(number) in found:
            break
        found.append(int(number))
    return tuple(found)


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
    memory = _device_memory(os.environ)
    os.environ.pop("ERGO_DEVICE_MEMORY", None)
    base = map_channel(int(number))
    _check_build(base, rank_dir)
    _preload_stubs(os.path.join(rank_dir, "stubs"))
    from ergo_rank import lean

    lean.hide_bindings()
    # The device needs torch's entry point, whatever the job's environment says about other backends.
    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    channel = Channel(base, kind, memory)


def _device_memory(environment: Mapping[str, str]) -> int:
    text = environment.get("ERGO_DEVICE_MEMORY", "0")
    if not text.isdigit():
        raise RuntimeError(f"ERGO_DEVICE_MEMORY is {text!r}, not a number of bytes.")
    return int(text)


def load_library() -> ctypes.CDLL:
    """The native helper that maps channels; it needs no torch."""
    return ctypes.CDLL(os.path.join(os.path.dirname(os.path.abspath(__file__)), "_channel.so"))


def map_channel(descriptor: int, *, close: bool = True) -> int:
    """Maps the ring behind a descriptor and, unless told otherwise, closes that."""
    library = load_library()
    library.ergo_channel_map.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
    library.ergo_channel_map.restype = ctypes.c_void_p
    error = ctypes.create_string_buffer(256)
    try:
        base = library.ergo_channel_map(descriptor, error, len(error))
    finally:
        # From here on no child can inherit it, and no image of this process depends on it.
        try:
            if close:
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


def require_torch(version: str, abi: str, description: str | None = None) -> None:
    """Checks that this process has the torch and the Python that the build is for: its device has them.

    Args:
        version: of this process's torch.
        abi: of its Python, as in ``SOABI``.
        description: the file that says what the build is for; default: the one of this file's build.

    Raises:
        RuntimeError: it has others; one sentence.
    """
    import json

    package = os.path.dirname(os.path.abspath(__file__))
    try:
        with open(description or os.path.join(package, "..", "..", "build.json")) as file:
            about = json.load(file)
    except FileNotFoundError:
        return  # not in a build directory: under development
    if (version, abi) != (about["torch"], about["abi"]):
        raise RuntimeError(
            f"ergosphere: {sys.executable} has torch {version} on {abi}, but the device of this job has torch "
            f"{about['torch']} on {about['abi']}; start the job with this interpreter (ergo run --python)."
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
