"""A bucket: named bytes in a directory, in memory, or in S3, Google Cloud Storage or Azure through obstore.

What is written is there whole or not at all. For directories obstore sees to that with a scratch file and link or
rename (traced: ``linkat`` for `create`, so that of several processes one succeeds), but it never calls fsync: after a
crash of the machine a name could be there without its bytes. So writes to directories are done here, in the same way
and durable; everything else is obstore's.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from obstore import exceptions
from obstore.store import ObjectStore, from_url

from proxy_runtime.checkpoint.files import Files, free_bytes
from proxy_runtime.checkpoint.sparse import copy as copy_sparse
from proxy_runtime.storage.errors import ADDRESS, StorageError, from_store_error

_PART_BYTES = 8 << 20
_SCRATCH = ".writing"
_RETRY: Any = {"max_retries": 6, "retry_timeout": timedelta(seconds=60)}


class Found(NamedTuple):
    """One object of a listing; times in seconds since 1970."""

    key: str
    bytes: int
    modified_s: float


class Bucket:
    """Named bytes. Thread-safe; calls block. Keys are relative paths with forward slashes.

    Attributes:
        url: where it is, without credentials.
    """

    def __init__(self, store: ObjectStore, url: str, root: Path | None = None) -> None:
        self.url = url
        self._store: Any = store
        self._root = root
        self._files = Files()

    @classmethod
    def open(cls, url: str) -> Bucket:
        """Opens a bucket: ``file:///directory`` (made if missing), ``memory://``, ``s3://…``, ``gs://…``, ``az://…``.

        Credentials and regions come from the environment, as for the vendor's own tools.

        Raises:
            StorageError: the address is none, or the directory cannot be made.
        """
        parts = urlsplit(url)
        shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
        try:
            if parts.scheme == "file":
                root = Path(unquote(parts.path))
                if not root.is_absolute() or parts.netloc not in ("", "localhost"):
                    raise ValueError("a directory is given by its absolute path, with three slashes")
                Files().make_dir(root / _SCRATCH)
                return cls(from_url(url), shown, root)
            options: dict[str, Any] = {} if parts.scheme == "memory" else {"retry_config": _RETRY}
            return cls(from_url(url, **options), shown)
        except OSError as error:
            raise from_store_error(error, "open the fleet's store", shown) from error
        except (ValueError, exceptions.BaseError) as error:
            first = str(error).split("\n")[0]
            raise StorageError(
                f"{shown!r} is not the address of a store: {first}.",
                code=ADDRESS,
                remedy="Use file:///directory, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix.",
            ) from error

    def get(self, key: str) -> bytes | None:
        """The bytes of an object; None where there is none."""
        try:
            with self._errors(f"read {key}"):
                return bytes(self._store.get(key).bytes())
        except FileNotFoundError:
            return None

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Some bytes of an object, fewer only where it ends.

        Raises:
            FileNotFoundError: there is no such object.
        """
        with self._errors(f"read {key}"):
            return bytes(self._store.get_range(key, start=start, length=length))

    def stream(self, key: str, start: int, length: int) -> Iterator[memoryview]:
        """The bytes of an object from ``start``, piece by piece.

        Raises:
            FileNotFoundError: there is no such object.
        """
        with self._errors(f"read {key}"):
            if self._root is not None:  # fewer copies than through obstore
                with open(self._root / key, "rb", buffering=0) as file:
                    file.seek(start)
                    while length > 0 and (piece := file.read(min(length, _PART_BYTES))):
                        length -= len(piece)
                        yield memoryview(piece)
                return
            result = self._store.get(key, options={"range": (start, start + length)})
            for piece in result.stream(min_chunk_size=_PART_BYTES):
                yield memoryview(piece)

    def free_bytes(self) -> int | None:
        """Bytes that may still be written to a directory; None for what has no bounds that we know."""
        return None if self._root is None else free_bytes(self._root)

    def look(self, key: str) -> Found | None:
        """What is known of an object; None where there is none."""
        try:
            with self._errors(f"look at {key}"):
                meta = self._store.head(key)
        except FileNotFoundError:
            return None
        return Found(key, meta["size"], _seconds(meta["last_modified"]))

    def size(self, key: str) -> int | None:
        """Length of an object; None where there is none."""
        found = self.look(key)
        return None if found is None else found.bytes

    def put(self, key: str, data: bytes) -> None:
        """Writes an object, in place of one that is there."""
        with self._errors(f"write {key}"):
            if self._root is None:
                self._store.put(key, data, mode="overwrite")
                return
            with self._scratch() as (scratch, fd):
                self._files.write_at(fd, [data], 0)
                self._publish(fd, scratch, key)

    def create(self, key: str, data: bytes) -> bool:
        """Writes an object if there is none.

        Returns:
            Whether this call made it. Of several callers, in any processes, exactly one hears True. A call that is
            repeated by the network may hear False about its own object.
        """
        with self._errors(f"create {key}"):
            try:
                if self._root is None:
                    self._store.put(key, data, mode="create")
                    return True
                with self._scratch() as (scratch, fd):
                    self._files.write_at(fd, [data], 0)
                    self._files.sync(fd)
                    target = self._target(key)
                    os.link(scratch, target)
                    self._files.sync_dir(target.parent)
                return True
            except (exceptions.AlreadyExistsError, FileExistsError):
                return False

    def put_file(self, key: str, path: Path) -> None:
        """Writes an object from a file, in pieces."""
        with self._errors(f"write {key}"):
            if self._root is None:
                self._store.put(key, path, chunk_size=_PART_BYTES, max_concurrency=4)
                return
            with self._scratch() as (scratch, fd):
                source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    copy_sparse(source, fd, os.fstat(source).st_size)
                finally:
                    os.close(source)
                self._publish(fd, scratch, key)

    def get_file(self, key: str, path: Path) -> None:
        """Reads an object into a file, in pieces.

        Raises:
            FileNotFoundError: there is no such object.
        """
        with self._errors(f"read {key}"), open(path, "wb") as file:
            for piece in self._store.get(key).stream(min_chunk_size=_PART_BYTES):
                file.write(memoryview(piece))

    def list(self, prefix: str) -> list[str]:
        """Keys below a prefix, which is a whole path without or with its last slash; sorted."""
        return [found.key for found in self.find(prefix)]

    def find(self, prefix: str) -> list[Found]:
        """What is below a prefix, by key."""
        with self._errors(f"list {prefix}"):
            pages = self._store.list(prefix.rstrip("/"))
            found = [Found(m["path"], m["size"], _seconds(m["last_modified"])) for page in pages for m in page]
        return sorted(found)

    def delete(self, key: str) -> None:
        """Removes an object; one that is gone is fine."""
        try:
            with self._errors(f"remove {key}"):
                self._store.delete(key)
        except FileNotFoundError:
            pass

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, exceptions.BaseError) as error:
            raise from_store_error(error, action, self.url) from error

    @contextmanager
    def _scratch(self) -> Iterator[tuple[Path, int]]:
        assert self._root is not None
        scratch = self._root / _SCRATCH / secrets.token_hex(8)
        fd = self._files.create(scratch)
        try:
            yield scratch, fd
        finally:
            os.close(fd)
            self._files.unlink(scratch)

    def _publish(self, fd: int, scratch: Path, key: str) -> None:
        self._files.sync(fd)
        target = self._target(key)
        self._files.rename(scratch, target)
        self._files.sync_dir(target.parent)

    def _target(self, key: str) -> Path:
        assert self._root is not None
        if any(part in ("", ".", "..") for part in key.split("/")):
            raise ValueError(f"{key!r} is not a key.")
        target = self._root / key
        self._files.make_dir(target.parent)
        return target


def _seconds(time: datetime) -> float:
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
