"""The fixed reduction tree in numpy: what every collective's bits are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Combine = Callable[[Array, Array], Array]


def _add(a: Array, b: Array) -> Array:
    # Of truth values the sum is "or", as torch has it.
    return np.logical_or(a, b) if a.dtype == np.bool_ else np.add(a, b)


def _multiply(a: Array, b: Array) -> Array:
    return np.logical_and(a, b) if a.dtype == np.bool_ else np.multiply(a, b)


# Indexed by ReduceOp (channel/messages.hpp): Sum, Avg, Product, Min, Max, BAnd, BOr, BXor.
COMBINE: tuple[Combine, ...] = (
    _add,
    _add,
    _multiply,
    np.minimum,
    np.maximum,
    np.bitwise_and,
    np.bitwise_or,
    np.bitwise_xor,
)


def tree_reduce(values: Sequence[Array], op: int = 0) -> Array:
    """Reduces `values` (in group-rank order) along the tree, split at the largest power of two below the count."""
    if len(values) == 1:
        return values[0].copy()
    half = 1 << ((len(values) - 1).bit_length() - 1)
    with np.errstate(all="ignore"):
        return COMBINE[op](tree_reduce(values[:half], op), tree_reduce(values[half:], op))
