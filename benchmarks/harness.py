"""Names, conditions, figures and records of benchmarks; how a comparison is timed on a noisy machine."""

from __future__ import annotations

import fnmatch
import operator
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from proxy_runtime.errors import ErgoError


class BenchmarkError(ErgoError):
    """A benchmark could not measure; it has no figure."""

    code = "benchmark.failed"


@dataclass(frozen=True, slots=True)
class Condition:
    """What a figure must fulfil, for example ``<= 1.1``."""

    relation: str
    bound: float

    RELATIONS: ClassVar[dict[str, Callable[[float, float], bool]]] = {
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
    }

    def __post_init__(self) -> None:
        if self.relation not in self.RELATIONS:
            raise ValueError(f"{self.relation!r} is none of the relations {', '.join(self.RELATIONS)}.")

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Reads a relation and a number, separated by a space."""
        relation, _, bound = text.partition(" ")
        return cls(relation, float(bound))

    def holds(self, value: float) -> bool:
        return self.RELATIONS[self.relation](value, self.bound)

    def __str__(self) -> str:
        return f"{self.relation} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that a benchmark found: the median of its samples unless `value` says otherwise.

    Attributes:
        name: full name, as printed; begins with the benchmark's.
        unit: ``ms``, ``s``, ``MB`` (10^6 bytes), ``x`` for a ratio.
        samples: what was measured, in order; at least one.
        must: the condition, or None for a figure that only explains another.
        details: more to record (JSON values).
    """

    name: str
    unit: str
    samples: Sequence[float]
    must: Condition | None = None
    value: float = float("nan")
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.samples:
            raise BenchmarkError(f"{self.name} has no samples.")
        if self.value != self.value:  # not given
            object.__setattr__(self, "value", statistics.median(self.samples))

    @property
    def holds(self) -> bool:
        return self.must is None or self.must.holds(self.value)

    def line(self) -> str:
        """``NAME VALUE UNIT must CONDITION holds|short`` and the spread."""
        must = str(self.must) if self.must is not None else "-"
        verdict = "holds" if self.holds else "short"
        return f"{self.name} {self.value:.4g} {self.unit} must {must} {verdict}  ({self.spread()})"

    def spread(self) -> str:
        """Range of the samples, and the quartiles where there are enough for them."""
        text = f"{min(self.samples):.4g}..{max(self.samples):.4g}"
        if len(self.samples) >= 4:
            low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
            text += f", quartiles {low:.4g}..{high:.4g}"
        return f"{text}, n={len(self.samples)}"

    def record(self) -> dict[str, Any]:
        """The figure as it goes into the results file."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "must": str(self.must) if self.must is not None else None,
            "holds": self.holds,
            "spread": self.spread(),
            "samples": list(self.samples),
            **({"details": self.details} if self.details else {}),
        }


@dataclass(frozen=True, slots=True)
class Context:
    """What a benchmark gets: how often to repeat, a directory that is removed afterwards, a place for remarks."""

    repeat: int
    scratch: Path
    say: Callable[[str], None]

    def directory(self) -> Path:
        """A fresh directory inside the scratch directory."""
        return Path(tempfile.mkdtemp(dir=self.scratch))


Benchmark = Callable[[Context], Iterable[Figure]]
_REGISTRY: dict[str, Benchmark] = {}


def benchmark(name: str) -> Callable[[Benchmark], Benchmark]:
    """Registers a benchmark; names are dotted and begin with the part that is measured."""

    def register(function: Benchmark) -> Benchmark:
        if name in _REGISTRY:
            raise ValueError(f"There are two benchmarks called {name}.")
        _REGISTRY[name] = function
        return function

    return register


def select(pattern: str, registry: Mapping[str, Benchmark] | None = None) -> dict[str, Benchmark]:
    """Benchmarks whose name contains `pattern` or matches it as a shell pattern; all for an empty one."""
    known = _REGISTRY if registry is None else registry
    return {name: function for name, function in known.items() if pattern in name or fnmatch.fnmatchcase(name, pattern)}


def alternate(pairs: int) -> Iterator[tuple[bool, int]]:
    """The order A B, B A, A B, …: (is it A, pair). Slow drift of the machine favours neither side."""
    for pair in range(pairs):
        first = pair % 2 == 0
        yield first, pair
        yield not first, pair


@dataclass(frozen=True, slots=True)
class Paired:
    """Measurements of two sides, taken in turns; index i of both belongs to one pair."""

    a: tuple[float, ...]
    b: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """For every pair b / a: neighbours in time share what the machine's other users did."""
        return tuple(b / a for a, b in zip(self.a, self.b, strict=True))


def paired(a: Callable[[], float], b: Callable[[], float], pairs: int) -> Paired:
    """Measures both sides alternately.

    Raises:
        BenchmarkError: fewer than one pair asked for, or a measurement that is not positive.
    """
    if pairs < 1:
        raise BenchmarkError("A comparison needs at least one pair.")
    values: tuple[list[float], list[float]] = ([], [])
    for is_a, pair in alternate(pairs):
        value = a() if is_a else b()
        if not value > 0:
            raise BenchmarkError(f"Pair {pair} of a comparison measured {value}, which is not a duration.")
        values[0 if is_a else 1].append(value)
    return Paired(tuple(values[0]), tuple(values[1]))
