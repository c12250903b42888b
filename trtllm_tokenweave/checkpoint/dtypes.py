"""Numpy dtypes of the model dtypes, and checked conversion between them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.errors import UserError

Array = NDArray[Any]


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype of "float32", "float16" or "bfloat16" (bfloat16 through ml_dtypes)."""
    if dtype == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(dtype)


def convert(array: Array, dtype: np.dtype[Any], *, name: str, source: str) -> Array:
    """``array`` in ``dtype``, itself where it already is. Raises UserError when a value does not fit float16."""
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
    return array.astype(dtype)
