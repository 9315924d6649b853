"""The one base class of every error that a user may see."""

from __future__ import annotations


class ErgoError(Exception):
    """An operation could not be completed.

    Attributes:
        code: stable identifier, e.g. ``criu.too-old``; scripts and tests rely on it.
        message: one sentence: what is wrong and where.
        remedy: what to do about it, or an empty string where nothing can be done.
    """

    code: str = "error"

    def __init__(self, message: str, *, code: str | None = None, remedy: str = "") -> None:
        super().__init__(message if not remedy else f"{message} {remedy}")
        if code is not None:
            self.code = code
        self.message = message
        self.remedy = remedy
