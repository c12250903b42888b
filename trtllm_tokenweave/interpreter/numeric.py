"""Arithmetic of a strongly typed network: low-precision values are computed in float32 and rounded once per layer.

``exact`` variants compute in float64 and round once, in a way that does not depend on how many rows there are:
the same token gives the same bits in a batch of one and of thousands.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: Rows that an exact matrix product hands to BLAS at a time; always this many, so that BLAS always does the same.
_EXACT_ROWS = 8

_sum: Callable[..., Array] = np.add.reduce


def is_low(dtype: np.dtype[Any]) -> bool:
    """True for float types below float32 (float16, bfloat16)."""
    return dtype.itemsize == 2 and dtype.kind not in "iu"


def widen(x: Array) -> Array:
    """float16 and bfloat16 as float32; everything else as it is."""
    return x.astype(np.float32) if is_low(x.dtype) else x


def rounded(x: Array, dtype: np.dtype[Any]) -> Array:
    """``x`` in ``dtype``; no copy where it has that dtype already."""
    return x.astype(dtype, copy=False)


def matmul(a: Array, b: Array, exact: bool) -> Array:
    """Matrix product of float32 operands (rank 2 or more, broadcasting leading dimensions) as float32.

    Args:
        exact: Accumulate in float64 and round once, independently of the number of rows of ``a``.
    """
    return _exact_matmul(a, b) if exact else np.matmul(a, b)


def _exact_matmul(a: Array, b: Array) -> Array:
    wide_b = b.astype(np.float64)
    rows = a.shape[-2]
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    out = np.empty((*lead, rows, b.shape[-1]), np.float32)
    block = np.zeros((*a.shape[:-2], _EXACT_ROWS, a.shape[-1]))
    for start in range(0, rows, _EXACT_ROWS):
        count = min(_EXACT_ROWS, rows - start)
        block[..., :count, :] = a[..., start : start + count, :]
        block[..., count:, :] = 0.0
        out[..., start : start + count, :] = np.matmul(block, wide_b)[..., :count, :]
    return out


def total(x: Array, axes: tuple[int, ...], keep_dims: bool, exact: bool) -> Array:
    """Sum over axes: float32 in (pairwise within a row), float32 out."""
    if exact:
        return _sum(x, axis=axes, dtype=np.float64, keepdims=keep_dims).astype(np.float32)
    return _sum(x, axis=axes, keepdims=keep_dims)


def mean(x: Array, axes: tuple[int, ...], keep_dims: bool, exact: bool) -> Array:
    """Mean over axes of a float32 array, as float32."""
    count = np.float32(math.prod(x.shape[i] for i in axes))
    result: Array = np.true_divide(total(x, axes, keep_dims, exact), count, dtype=np.float32)
    return result


def square(x: Array) -> Array:
    """``x`` to the power 2, exactly as a POW layer with exponent 2 gives it."""
    return x * x


def normalised(x: Array, eps: np.float32, exact: bool) -> Array:
    """Rows of a float32 array [m, hidden] over their root mean square: the layers POW, REDUCE, SUM, SQRT and DIV."""
    return np.true_divide(x, np.sqrt(mean(square(x), (-1,), True, exact) + eps))


def rank_sum(parts: Sequence[Array]) -> Array:
    """Sum of the ranks' arrays in float32, added in rank order."""
    out = parts[0].astype(np.float32)
    for part in parts[1:]:
        out += widen(part)
    return out


def in_double(function: Callable[..., Any]) -> Callable[..., Array]:
    """Evaluate an element-wise function of float32 arrays in float64 and round: independent of vector tails."""

    def run(*arrays: Array) -> Array:
        out: Array = np.asarray(function(*(a.astype(np.float64) for a in arrays)))
        return out.astype(np.float32)

    return run


class Float32Copy:
    """Float32 copy of a low-precision constant, made at first use."""

    def __init__(self, source: Array) -> None:
        # Holding the source keeps its address from being reused while the copy can be found.
        self.source = source
        self._copy: Array | None = None

    def get(self) -> Array:
        """Return the copy."""
        if self._copy is None:
            self._copy = self.source.astype(np.float32)
        return self._copy


_copies: weakref.WeakValueDictionary[tuple[Any, ...], Float32Copy] = weakref.WeakValueDictionary()


def shared_float32_copy(array: Array) -> Float32Copy:
    """The copy of a constant, shared by all that hold one for the same memory, shape, strides and dtype."""
    key = (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.name)
    found = _copies.get(key)
    if found is None:
        found = Float32Copy(array)
        found = _copies.setdefault(key, found)
    return found
