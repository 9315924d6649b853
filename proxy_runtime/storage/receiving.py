"""One pack on its way to a node: from the first source that has it undamaged, continued where it was left."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from proxy_runtime.checkpoint import CheckpointError
from proxy_runtime.checkpoint.exchange import Exchange
from proxy_runtime.storage.documents import PackSize
from proxy_runtime.storage.errors import DAMAGED, FULL, MISSING, StorageError, from_os_error
from proxy_runtime.storage.sources import Source


def receive(
    exchange: Exchange,
    tenant: str,
    item: PackSize,
    sources: Sequence[Source],
    count: Callable[[int], None],
    deadline_s: float,
) -> tuple[int, int]:
    """Brings a pack into a store; to be called while the store is held.

    Of several processes that want the same pack one receives it, and the others wait and find it.

    Args:
        exchange: of the store.
        tenant: whose pack it is.
        item: its id and length.
        sources: asked in this order.
        count: told of bytes.
        deadline_s: how long to wait for another process.

    Returns:
        Chunks and bytes; zeros where another process has brought it.

    Raises:
        StorageError: no source has it, or none has it undamaged, or the disk is full.
    """
    pack, size = item
    errors: list[StorageError] = []
    with exchange.receiving(pack, deadline_s):
        if exchange.has(pack):
            count(size)
            return 0, 0
        path = exchange.incoming(pack)
        for source in sources:
            try:
                return _from(source, exchange, tenant, item, path, count), size
            except FileNotFoundError:
                continue
            except StorageError as error:
                if error.code == FULL:
                    raise
                errors.append(error)
    what = f"Pack {pack} of tenant {tenant}"
    asked = ", ".join(source.name for source in sources)
    if not errors:
        raise StorageError(
            f"{what} is nowhere: asked were {asked}.", code=MISSING, remedy="An earlier checkpoint may do."
        )
    worst = next((error for error in errors if error.code == DAMAGED), errors[-1])
    raise StorageError(
        f"{what} could not be had from any of {asked}: {worst.message}", code=worst.code, remedy=worst.remedy
    )


def _from(
    source: Source, exchange: Exchange, tenant: str, item: PackSize, path: Path, count: Callable[[int], None]
) -> int:
    """Receives from one source; what another one has sent before is used, but not blamed on this one."""
    pack, size = item
    for _ in range(2):
        mixed = path.exists() and path.stat().st_size > 0
        _download(source, tenant, pack, size, path, count)
        try:
            return exchange.adopt(pack, path)
        except CheckpointError as error:
            path.unlink(missing_ok=True)
            count(-size)
            if not mixed:
                raise StorageError(
                    f"{source.name} sent a damaged pack {pack}: {error.message}",
                    code=DAMAGED,
                    remedy="Check its disk.",
                ) from error
    raise AssertionError("the second try is not mixed")


def _download(source: Source, tenant: str, pack: str, size: int, path: Path, count: Callable[[int], None]) -> None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise from_os_error(error, "receive a pack", str(path)) from error
    try:
        done = os.fstat(fd).st_size
        if done > size:
            os.ftruncate(fd, 0)
            done = 0
        count(done)
        begun = done
        try:
            if done < size:
                for piece in source.pack(tenant, pack, done, size):
                    _write(fd, piece, done, path)
                    done += len(piece)
                    count(len(piece))
        except BaseException:
            count(-done)
            raise
        if done != size:
            count(-done)
            if done > size or begun == done:
                os.ftruncate(fd, 0)
            raise StorageError(f"{source.name} ended pack {pack} after {done} of {size} bytes.")
    finally:
        os.close(fd)


def _write(fd: int, piece: bytes | memoryview, offset: int, path: Path) -> None:
    view = memoryview(piece)
    try:
        while view:
            count = os.pwrite(fd, view, offset)
            view, offset = view[count:], offset + count
    except OSError as error:
        raise from_os_error(error, "receive a pack", str(path)) from error
