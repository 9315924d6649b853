"""Records that several processes write: compare-and-swap by numbered versions.

The next version of a record is written by creating its key if absent, the one conditional write that every store has.
The highest version counts. Old ones are removed, and that must not deceive anybody: a writer that has read version 5
and then slept until 6 is written, used and removed would create 6 again and believe that it counts. So every version
names the write before it, and a writer looks once more after it has created: if its version is the highest, it counts,
because the highest is never removed; if a higher one is there, it counts only if the next one was built on it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Generic, Literal, TypeVar

import stamina
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proxy_runtime.storage.blobs import Bucket
from proxy_runtime.storage.errors import BUSY, StorageError, damaged

_KEPT = 4
_DIGITS = 20
_SUFFIX = ".json"

R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")


class _Contended(Exception):
    """Another writer was faster."""


class Envelope(BaseModel):
    """A version of a record as it is stored.

    Attributes:
        write: names this write.
        previous: names the write that this one was made from; empty for the first.
        record: the record's JSON.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["ergosphere/record"] = "ergosphere/record"
    version: Literal[1] = 1
    write: str
    previous: str = ""
    number: Annotated[int, Field(ge=1)]
    record: dict[str, object]


class Records(Generic[R]):
    """Records of one kind below one prefix. Thread-safe.

    Args:
        bucket: where they are.
        prefix: without a slash at its end.
        shape: of the records.
    """

    def __init__(self, bucket: Bucket, prefix: str, shape: type[R]) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._shape = shape
        self._seen: dict[str, tuple[int, R]] = {}

    def read(self, name: str) -> R | None:
        """The newest version of a record; None where it was never written.

        Raises:
            StorageError: it is damaged, or the store does not answer.
        """
        found = self._retry(name, lambda: self._newest(name))
        return None if found is None else self._parse(name, found)

    def read_all(self) -> dict[str, R]:
        """The newest versions of all records, by name."""
        newest: dict[str, int] = {}
        for key in self._bucket.list(self._prefix):
            name, _, version = key[len(self._prefix) + 1 :].rpartition("/")
            if name and "/" not in name and (number := _number(version)):
                newest[name] = max(number, newest.get(name, 0))
        self._seen = {name: seen for name, seen in self._seen.items() if name in newest}
        changed = [name for name, number in newest.items() if self._seen.get(name, (0,))[0] != number]
        if changed:
            with ThreadPoolExecutor(min(16, len(changed)), "ergo-records") as pool:
                list(pool.map(self._look, changed))
        return {name: seen[1] for name, seen in sorted(self._seen.items())}

    def update(self, name: str, change: Callable[[R | None], R | None]) -> R:
        """Changes a record.

        Args:
            name: of the record.
            change: the new record from the current one; None to leave it as it is. It may be called several times,
                also when a call before has been written, so that it must be right to apply it again.

        Returns:
            The record as it is now.

        Raises:
            StorageError: others have changed it all the time, or the store does not answer.
        """
        return self._retry(name, lambda: self._attempt(name, change))

    def _attempt(self, name: str, change: Callable[[R | None], R | None]) -> R:
        before = self._newest(name)
        current = None if before is None else self._parse(name, before)
        fresh = change(current)
        if fresh is None:
            if current is None:
                raise ValueError(f"The record {name} does not exist and was not made.")
            return current
        after = Envelope(
            write=secrets.token_hex(8),
            previous="" if before is None else before.write,
            number=1 if before is None else before.number + 1,
            record=fresh.model_dump(mode="json"),
        )
        if not self._bucket.create(self._key(name, after.number), after.model_dump_json().encode()):
            raise _Contended
        numbers = self._numbers(name)
        if max(numbers, default=0) != after.number:
            following = self._load(name, after.number + 1)
            if following is None or following.previous != after.write:
                raise _Contended
        for number in numbers:
            if number <= after.number - _KEPT:
                self._bucket.delete(self._key(name, number))
        return fresh

    def _newest(self, name: str) -> Envelope | None:
        numbers = self._numbers(name)
        if not numbers:
            return None
        found = self._load(name, max(numbers))
        if found is None:  # removed since, as newer ones came
            raise _Contended
        return found

    def _look(self, name: str) -> None:
        found = self._retry(name, lambda: self._newest(name))
        if found is not None:
            self._seen[name] = (found.number, self._parse(name, found))

    def _numbers(self, name: str) -> list[int]:
        keys = self._bucket.list(f"{self._prefix}/{name}")
        return sorted(n for key in keys if (n := _number(key.rpartition("/")[2])))

    def _load(self, name: str, number: int) -> Envelope | None:
        data = self._bucket.get(self._key(name, number))
        if data is None:
            return None
        try:
            found = Envelope.model_validate_json(data)
        except ValidationError as error:
            raise damaged(f"Version {number} of the record {self._prefix}/{name}", error.errors()[0]["msg"]) from None
        if found.number != number:
            raise damaged(f"Version {number} of the record {self._prefix}/{name}", f"it says version {found.number}")
        return found

    def _parse(self, name: str, found: Envelope) -> R:
        try:
            return self._shape.model_validate(found.record)
        except ValidationError as error:
            raise damaged(f"The record {self._prefix}/{name}", error.errors()[0]["msg"]) from None

    def _key(self, name: str, number: int) -> str:
        return f"{self._prefix}/{name}/{number:0{_DIGITS}}{_SUFFIX}"

    def _retry(self, name: str, attempt: Callable[[], T]) -> T:
        try:
            for trial in stamina.retry_context(
                on=_Contended, attempts=200, timeout=60.0, wait_initial=0.002, wait_max=0.2, wait_jitter=0.02
            ):
                with trial:
                    return attempt()
        except _Contended:
            pass
        raise StorageError(
            f"The record {self._prefix}/{name} was changed by others all the time.",
            code=BUSY,
            remedy="Repeat the call.",
        )


def _number(file_name: str) -> int:
    stem = file_name.removesuffix(_SUFFIX)
    return int(stem) if len(stem) == _DIGITS and stem.isdigit() else 0
