"""One entry under test: what was compared, and what differed."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from typing import Any

import torch

from ergo_rank import _interposer
from in_rank.comparing import Difference, difference
from in_rank.entries import Task
from in_rank.moving import DEVICE, copies, tensors

_SEED = 3
_UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
FAILED = object()


class Progress:
    """Says in a file what is being done, so that whoever watches knows what it was when this process has ended."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._steps = 0

    def say(self, task: str, phase: str, sample: int) -> None:
        self._steps += 1
        line = f"{self._steps}\t{task}\t{phase}\t{sample}\n".encode()
        os.pwrite(self._file, line.ljust(256), 0)


class Case:
    """Compares the results of one task.

    Attributes:
        counts: phase -> comparisons that were made.
        failures: (phase, kind) -> (first sample, its text, how many samples).
        cpu_errors: comparisons that could not be made because the CPU raised.
    """

    def __init__(self, task: Task, progress: Progress) -> None:
        self.task = task
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: dict[tuple[str, str], tuple[int, str, int]] = {}
        self.cpu_errors = 0
        self._progress = progress
        self._contents = task.name not in _UNINITIALISED

    def fail(self, phase: str, kind: str, text: str, sample: int) -> None:
        first, words, n = self.failures.get((phase, kind), (sample, " ".join(text.split())[:400], 0))
        self.failures[phase, kind] = (first, words, n + 1)

    def say(self, phase: str, sample: int) -> None:
        self._progress.say(self.task.key, phase, sample)

    def check(
        self, phase: str, sample: int, reference: Callable[[], Any], proxied: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """Calls both, the generators seeded alike, and compares.

        Returns their results, `FAILED` where there is none.
        """
        return self._check(phase, sample, reference, proxied, None)

    def compare(
        self, phase: str, sample: int, function: Callable[[Any], Any], ours: Any, theirs: Any
    ) -> tuple[Any, Any]:
        """`check` of a function of arguments; where results differ, the CPU is asked again about a copy of them.

        Some CPU kernels read what nobody wrote.
        """
        versions = _versions(ours)

        def again() -> Any:
            return function(copies(ours)) if _versions(ours) == versions else FAILED

        return self._check(phase, sample, lambda: function(ours), lambda: function(theirs), again)

    def _check(
        self,
        phase: str,
        sample: int,
        reference: Callable[[], Any],
        proxied: Callable[[], Any],
        again: Callable[[], Any] | None,
    ) -> tuple[Any, Any]:
        self.say(phase, sample)
        torch.manual_seed(_SEED)
        try:
            wanted = reference()
        except Exception:
            self.cpu_errors += 1
            return FAILED, FAILED
        self.counts[phase] += 1
        torch.manual_seed(_SEED)
        launches = refused_launches()
        try:
            got = proxied()
            found = difference(wanted, got, contents=self._contents)
        except Exception as error:
            self.fail(phase, kind_of(error), f"{type(error).__name__}: {error}", sample)
            return wanted, FAILED
        finally:
            if refused_launches() != launches:
                self.fail(phase, "launch", "a native CUDA call was made in the rank", sample)
        if found and found.kind in ("wrong", "tolerance") and again is not None:
            torch.manual_seed(_SEED)
            repeated = again()
            if repeated is not FAILED:
                unstable = difference(wanted, repeated, contents=self._contents, device="cpu")
                found = Difference("cpu_unstable", f"on the CPU too: {unstable.text}") if unstable else found
        if found:
            self.fail(phase, found.kind, found.text, sample)
        return wanted, got

    def probe(self, n: int) -> bool:
        """Whether the channel still works, for a template that it has not seen too."""
        self.say("probe", n)
        try:
            torch.cuda.synchronize()
        except Exception as error:
            self.fail("probe", "error", f"{type(error).__name__}: {error}", n)
        try:
            torch.zeros(2000 + n, device=DEVICE)[0].item()
        except Exception as error:
            self.fail("probe", "poison", f"{type(error).__name__}: {error}", n)
            return False
        return True


def _versions(value: Any) -> list[int]:
    return [t._version for t in tensors(value)]


def refused_launches() -> int:
    return _interposer.channel_stats()["refused"]


def kind_of(error: Exception) -> str:
    """Whether we refuse, in words that name the operator and the way out, or something fails."""
    return "refused" if "ergosphere:" in str(error) and isinstance(error, NotImplementedError) else "error"
