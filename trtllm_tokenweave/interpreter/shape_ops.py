"""Layers that move data: shuffle, slice, gather, concatenation, shape. Zero rows are ordinary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.recorder import layers

Array = NDArray[Any]


def reshape_dims(shape: Sequence[int], dims: Sequence[int], zero_is_placeholder: bool) -> tuple[int, ...]:
    """Target dimensions of a reshape, with TensorRT's meaning of 0 (copy, if placeholders are on) and -1 (rest).

    Raises:
        ValueError: when the element counts differ.
    """
    out = [shape[i] if d == 0 and zero_is_placeholder else int(d) for i, d in enumerate(dims)]
    size = math.prod(shape)
    if -1 in out:
        rest = math.prod(d for d in out if d != -1)
        if rest and size % rest == 0:
            out[out.index(-1)] = size // rest
        elif not rest and not size:
            out[out.index(-1)] = 0
    if min(out, default=0) < 0 or math.prod(out) != size:
        raise ValueError(f"shape {tuple(shape)} does not reshape to {tuple(int(d) for d in dims)}")
    return tuple(out)


def shuffle(layer: layers.IShuffleLayer) -> Callable[..., Array]:
    """Transpose, reshape, transpose."""
    first, second, placeholder = layer.first_transpose, layer.second_transpose, layer.zero_is_placeholder
    static = layer.reshape_dims
    dynamic = layer.get_input(1) is not None

    def run(x: Array, target: Array | None = None) -> Array:
        if first is not None:
            x = x.transpose(first)
        dims = target.tolist() if target is not None and dynamic else static
        if dims is not None:
            x = x.reshape(reshape_dims(x.shape, dims, placeholder))
        return x if second is None else x.transpose(second)

    return run


def slice_(layer: layers.ISliceLayer) -> Callable[..., Array]:
    """Strided slice; start, size and stride may be tensors. Strict bounds, as TensorRT's default mode."""
    static = (layer.start, layer.shape, layer.stride)
    given = [layer.get_input(position) is not None for position in (1, 2, 3)]

    def run(x: Array, *tensors: Array) -> Array:
        dynamic = iter(tensors)
        start, size, stride = (
            next(dynamic).tolist() if is_given else values for is_given, values in zip(given, static, strict=True)
        )
        parts = []
        for axis, (s, c, t) in enumerate(zip(start, size, stride, strict=True)):
            if c == 0:
                parts.append(slice(0, 0))
                continue
            last = s + (c - 1) * t
            if s < 0 or c < 0 or not 0 <= last < x.shape[axis] or (t == 0 and c > 1):
                raise ValueError(f"slice of {c} from {s} by {t} leaves axis {axis} of size {x.shape[axis]}")
            end = last + (1 if t >= 0 else -1)
            parts.append(slice(s, end if end >= 0 else None, t or 1))
        return x[tuple(parts)]

    return run


def gather(layer: layers.IGatherLayer) -> Callable[..., Array]:
    """Whole slices along an axis; an index outside the axis is an error (TensorRT leaves it undefined)."""
    axis = layer.axis

    def run(data: Array, indices: Array) -> Array:
        if indices.size == 1:  # shape arithmetic: thousands of these in a step
            low = high = int(indices.item())
        else:
            low, high = (int(indices.min()), int(indices.max())) if indices.size else (0, -1)
        if low < 0 or high >= data.shape[axis]:
            raise ValueError(f"index {low if low < 0 else high} is outside 0..{data.shape[axis] - 1}")
        return data.take(indices, axis=axis)

    return run


def concatenation(layer: layers.IConcatenationLayer) -> Callable[..., Array]:
    """Join along an axis; empty parts are allowed."""
    axis = layer.axis
    return lambda *xs: np.concatenate(xs, axis=axis)


def shape(_layer: layers.IShapeLayer) -> Callable[..., Array]:
    """Dimensions as INT64."""
    return lambda x: np.array(x.shape, np.int64)
