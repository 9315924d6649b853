"""What a rank's processes hold, as /proc shows it, and what they must not hold at a cut.

CRIU would dump a leaked ring without any error, as a private copy: only this look at every process finds it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from proxy_runtime.process import proc
from proxy_runtime.process.inodes import inode_violations
from proxy_runtime.process.namespace import Container

RING_NAME: Final = "ergo-ring"  # name of the channel's memfd
_DEVICE_PREFIXES: Final = ("/dev/nvidia", "/dev/dri/", "/dev/kfd")
_LISTEN: Final = 0x0A


@dataclass(frozen=True, slots=True)
class InetSocket:
    """A line of /proc/PID/net/tcp and its kin. Addresses as the kernel writes them, in hexadecimal."""

    protocol: str
    local: str
    remote: str
    state: int

    @property
    def connected(self) -> bool:
        """Whether it has a peer."""
        return int(self.remote.split(":")[0], 16) != 0 and self.state != _LISTEN

    @property
    def ports(self) -> tuple[int, int]:
        """Local and remote port."""
        return int(self.local.rsplit(":", 1)[1], 16), int(self.remote.rsplit(":", 1)[1], 16)

    def __str__(self) -> str:
        local, remote = self.ports
        return f"{self.protocol} port {local} to port {remote}"


def violations(
    container: Container,
    *,
    ring_name: str = RING_NAME,
    allowed_ports: Collection[int] = (),
    shared_rings: bool = False,
) -> list[str]:
    """Sentences about what forbids a cut; empty when there is nothing.

    Args:
        container: its rank may map the ring, and nobody else.
        ring_name: name of the channel's memfd.
        allowed_ports: connections to or from these ports do not count.
        shared_rings: the keeper holds all rings, and any process may open and map one: they are the same ones after
            a restore.
    """
    found = [f"process {pid} is not below the rank's keeper and would be lost" for pid in container.strangers()]
    for pid in container.processes():
        found += descriptor_violations(pid, ring_name, allowed_ports, may_open_ring=shared_rings)
        found += mapping_violations(pid, ring_name, may_map_ring=shared_rings or pid == container.rank_pid)
        found += inode_violations(pid)
    return found


def maps_ring(pid: int, ring_name: str = RING_NAME) -> bool:
    """Whether a process maps the channel's memfd."""
    return any(_is_ring(path, ring_name) for path, _ in _mapped(pid))


def mapped_memfd(pid: int, name: str) -> Path | None:
    """The /proc/PID/map_files entry of the first mapping of a memfd, which opens the memfd itself."""
    try:
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if f"/memfd:{name} (deleted)" in line:
                start, end = line.split(maxsplit=1)[0].split("-")
                return Path(f"/proc/{pid}/map_files/{int(start, 16):x}-{int(end, 16):x}")
    except OSError:
        pass
    return None


def descriptor_violations(
    pid: int, ring_name: str, allowed_ports: Collection[int], *, may_open_ring: bool = False
) -> list[str]:
    """A channel descriptor, a device, an io_uring or a connected inet socket among the open files."""
    found: list[str] = []
    inodes: set[str] = set()
    for number, target in proc.descriptors(pid):
        if _is_ring(target, ring_name) and not may_open_ring:
            found.append(f"process {pid} holds descriptor {number} of the channel")
        elif target.startswith(_DEVICE_PREFIXES):
            found.append(f"process {pid} has opened the device {target}")
        elif target.startswith("anon_inode:[io_uring]"):
            found.append(f"process {pid} uses io_uring, which cannot be checkpointed (TCPStore: use_libuv=False)")
        elif target.startswith("socket:["):
            inodes.add(target[8:-1])
    if inodes:
        for inode, connection in _inet_sockets(pid):
            if inode in inodes and connection.connected and not set(connection.ports) & set(allowed_ports):
                found.append(f"process {pid} holds a connection ({connection})")
    return found


def mapping_violations(pid: int, ring_name: str, *, may_map_ring: bool) -> list[str]:
    """The ring mapped by another than the rank, or device memory mapped.

    The pinned memory behind the ring does not count: children have that of their parent, before a restore and after.
    """
    found: list[str] = []
    for path, offset in sorted(set(_mapped(pid))):
        if path.startswith(_DEVICE_PREFIXES):
            found.append(f"process {pid} maps the device {path}")
        elif _is_ring(path, ring_name) and offset == 0 and not may_map_ring:
            found.append(f"process {pid} maps the channel, which only the rank itself may")
    return found


def inet_sockets(pid: int) -> list[InetSocket]:
    """The inet sockets that a process holds, listening ones included."""
    inodes = {target[8:-1] for _, target in proc.descriptors(pid) if target.startswith("socket:[")}
    return [connection for inode, connection in _inet_sockets(pid) if inode in inodes]


def _is_ring(path: str, ring_name: str) -> bool:
    return path.removesuffix(" (deleted)") == f"/memfd:{ring_name}"


def _mapped(pid: int) -> Iterator[tuple[str, int]]:
    """Files that are mapped, and from which byte on."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            yield fields[5], int(fields[2], 16)


def _inet_sockets(pid: int) -> Iterator[tuple[str, InetSocket]]:
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{protocol}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            yield fields[9], InetSocket(protocol, fields[1], fields[2], int(fields[3], 16))
