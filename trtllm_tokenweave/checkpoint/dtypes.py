"""Numpy dtypes of the model dtypes, and checked conversion between them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.errors import UserError

Array = NDArray[Any]

# Values looked at together: small enough to stay in a core's cache.
_CHUNK = 2**16


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype of "float32", "float16" or "bfloat16" (bfloat16 through ml_dtypes)."""
    if dtype == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(dtype)


def convert(array: Array, dtype: np.dtype[Any], *, name: str, source: str) -> Array:
    """``array`` in ``dtype``, itself where it already is.

    Raises UserError when a value does not fit ``dtype``, or is NaN or infinite: such weights are damaged.
    """
    result = _cast(array, dtype, name, source)
    if all_finite(result):
        return result
    if all_finite(array):
        raise UserError(
            f"tensor {name} has values beyond {dtype}'s range", where=source, fix="choose dtype float32 or bfloat16"
        )
    raise UserError(
        f"tensor {name} holds NaN or infinite values", where=source, fix="download or convert the checkpoint again"
    )


def all_finite(array: Array) -> bool:
    """Whether no value is NaN or infinite; a single pass or two over memory, since it is done for every weight."""
    if array.size == 0:
        return True
    if array.dtype.itemsize == 2:
        # numpy compares 16-bit floats one by one; as integers it goes ten times as fast. All bits of the exponent set
        # mean NaN or infinity: those of float16 are 0x7c00, those of bfloat16 0x7f80.
        infinity = np.uint16(0x7C00 if array.dtype == np.float16 else 0x7F80)
        bits = array.reshape(-1).view(np.uint16)
        return all((bits[i : i + _CHUNK] & np.uint16(0x7FFF)).max() < infinity for i in range(0, bits.size, _CHUNK))
    with np.errstate(invalid="ignore"):
        # NaN goes through both.
        return bool(np.isfinite(array.max()) and np.isfinite(array.min()))


def _cast(array: Array, dtype: np.dtype[Any], name: str, source: str) -> Array:
    if array.dtype == dtype:
        return array
    if dtype == np.float16:
        # bfloat16 goes through float32 so that an overflow is seen there and not lost in a cast.
        wide = array.astype(np.float32, copy=False)
        try:
            with np.errstate(over="raise"):
                return wide.astype(dtype)
        except FloatingPointError as error:
            raise UserError(
                f"tensor {name} has values beyond float16's range", where=source, fix="choose dtype bfloat16 or float32"
            ) from error
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype)
