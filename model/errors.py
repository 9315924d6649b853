"""The error of this package: what was given does not make sense."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with an input.

    Attributes:
        where: the place, as a path of field names, e.g. ``checkpoint.keep``.
        what: the rest of the sentence that `where` begins, without the full stop.
        remedy: what to do, as a sentence.
    """

    where: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"`{self.where}` {self.what}. {self.remedy}"


class ModelError(ValueError):
    """An input is invalid.

    It has the attributes of `proxy_runtime.errors.ErgoError`, which this package may not import, and is a
    `ValueError`, so that pydantic reports one raised in a constructor together with its other findings.

    Attributes:
        code: stable identifier, e.g. ``model.job-id``.
        message: whole sentences: what is wrong, and where.
        remedy: what to do about it; empty where `message` says it already.
        faults: all that is wrong, where several things may be.
    """

    def __init__(self, message: str, *, code: str, remedy: str = "", faults: Iterable[Fault] = ()) -> None:
        super().__init__(f"{message} {remedy}" if remedy else message)
        self.code = code
        self.message = message
        self.remedy = remedy
        self.faults = tuple(faults)

    @classmethod
    def of_faults(cls, subject: str, faults: Iterable[Fault], *, code: str) -> ModelError:
        """Puts all that is wrong with `subject` into one error."""
        found = tuple(faults)
        if len(found) == 1:
            return cls(f"{subject}: {found[0]}", code=code, faults=found)
        lines = "".join(f"\n- {fault}" for fault in found)
        return cls(f"{subject} has {len(found)} faults:{lines}", code=code, faults=found)
