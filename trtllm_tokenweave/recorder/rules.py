"""Shape and dtype rules of the recorded layers: what TensorRT accepts in a strongly typed network."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from trtllm_tokenweave.recorder.enums import (
    FLOATS,
    INTEGERS,
    DataType,
    ElementWiseOperation,
    GatherMode,
    MatrixOperation,
    ReduceOperation,
)
from trtllm_tokenweave.recorder.tensor import MAX_SHAPE_TENSOR_ELEMENTS, Shape, TensorDesc, Values, volume

if TYPE_CHECKING:
    from trtllm_tokenweave.recorder import layers as L  # noqa: N812

_COMPARE = {ElementWiseOperation.EQUAL, ElementWiseOperation.GREATER, ElementWiseOperation.LESS}
_LOGIC = {ElementWiseOperation.AND, ElementWiseOperation.OR, ElementWiseOperation.XOR}
_INT_OPS: dict[ElementWiseOperation, Callable[[int, int], int]] = {
    ElementWiseOperation.SUM: operator.add,
    ElementWiseOperation.SUB: operator.sub,
    ElementWiseOperation.PROD: operator.mul,
    ElementWiseOperation.MAX: max,
    ElementWiseOperation.MIN: min,
    ElementWiseOperation.FLOOR_DIV: operator.floordiv,
    ElementWiseOperation.DIV: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
}


def values_as(dtype: DataType, values: Values | None) -> Values | None:
    """Keep known values only where the dtype can hold a shape."""
    return values if dtype in INTEGERS else None


def _same_dtype(layer: L.ILayer, first: TensorDesc, second: TensorDesc) -> DataType:
    if first.dtype is not second.dtype:
        layer.fail(
            f"operands have dtypes {first.dtype.name} and {second.dtype.name}; strongly typed networks need equal ones"
        )
    return first.dtype


def _broadcast(layer: L.ILayer, a: Shape, b: Shape) -> Shape:
    if len(a) != len(b):
        layer.fail(f"operands have ranks {len(a)} and {len(b)}; they must be equal")
    out = []
    for x, y in zip(a, b, strict=True):
        if x != y and 1 not in (x, y) and -1 not in (x, y):
            layer.fail(f"shapes {a} and {b} do not broadcast")
        # A dynamic dimension against a fixed one above 1 must turn out equal to it.
        out.append(y if x == 1 else x if y in (1, -1) else y)
    return tuple(out)


def constant(layer: L.IConstantLayer) -> TensorDesc:
    """A constant's values are looked at only where it may take part in a shape."""
    weights, shape = layer.weights, layer.shape
    if volume(shape) != weights.size:
        layer.fail(f"{weights.size} weights do not fill shape {shape}")
    known: Values | None = None
    if weights.dtype in INTEGERS and len(shape) <= 1 and weights.size <= MAX_SHAPE_TENSOR_ELEMENTS:
        array = weights.array
        known = (None,) * weights.size if array is None else tuple(int(v) for v in np.ravel(array))
    return TensorDesc(weights.dtype, shape, known)


def float_like(layer: L.ILayer) -> TensorDesc:
    """Output equals input, which must be a float tensor."""
    source = layer.desc(0)
    if source.dtype not in FLOATS:
        layer.fail(f"input has dtype {source.dtype.name}, expected a float type")
    return TensorDesc(source.dtype, source.shape)


def elementwise(layer: L.IElementWiseLayer) -> TensorDesc:
    """Binary operation: equal dtypes, equal ranks, broadcasting of ones."""
    a, b = layer.desc(0), layer.desc(1)
    dtype = _same_dtype(layer, a, b)
    shape = _broadcast(layer, a.shape, b.shape)
    if layer.op in _LOGIC and dtype is not DataType.BOOL:
        layer.fail(f"{layer.op.name} needs BOOL operands, got {dtype.name}")
    if layer.op in _COMPARE | _LOGIC:
        return TensorDesc(DataType.BOOL, shape)
    if layer.op is ElementWiseOperation.POW and dtype not in FLOATS:
        layer.fail(f"POW needs float operands, got {dtype.name}")
    values: Values | None = None
    op = _INT_OPS.get(layer.op)
    if op is not None and a.values is not None and b.values is not None and len(shape) <= 1:
        size = max(len(a.values), len(b.values))
        left = a.values * size if len(a.values) == 1 else a.values
        right = b.values * size if len(b.values) == 1 else b.values
        if layer.op in (ElementWiseOperation.FLOOR_DIV, ElementWiseOperation.DIV) and 0 in right:
            layer.fail("divides by zero")
        values = tuple(None if x is None or y is None else op(x, y) for x, y in zip(left, right, strict=True))
    return TensorDesc(dtype, shape, values)


def axes_of(layer: L.ILayer, mask: int) -> list[int]:
    """Axes set in a bit mask, checked against the rank of input 0."""
    rank = len(layer.desc(0).shape)
    axes = [i for i in range(rank) if mask >> i & 1]
    if not axes or mask >> rank:
        layer.fail(f"axes mask {mask:#x} does not fit rank {rank}")
    return axes


def reduce(layer: L.IReduceLayer) -> TensorDesc:
    """Reduction over a bit mask of axes."""
    source, axes = layer.desc(0), axes_of(layer, layer.axes)
    if layer.op is ReduceOperation.AVG and source.dtype not in FLOATS:
        layer.fail(f"AVG of {source.dtype.name}")
    shape = [1 if i in axes else d for i, d in enumerate(source.shape)]
    if not layer.keep_dims:
        shape = [d for i, d in enumerate(source.shape) if i not in axes]
    return TensorDesc(source.dtype, tuple(shape))


def topk(layer: L.ITopKLayer) -> list[TensorDesc]:
    """Values and INT32 indices of the k best along one axis."""
    source, axes = layer.desc(0), axes_of(layer, layer.axes)
    if len(axes) != 1:
        layer.fail("top-k works along exactly one axis")
    size = source.shape[axes[0]]
    if layer.k < 1:
        layer.fail(f"k = {layer.k} is below 1")
    if size >= 0 and layer.k > size:
        layer.fail(f"k = {layer.k} is above the axis size {size}")
    shape = tuple(layer.k if i == axes[0] else d for i, d in enumerate(source.shape))
    return [TensorDesc(source.dtype, shape), TensorDesc(DataType.INT32, shape)]


def matrix_multiply(layer: L.IMatrixMultiplyLayer) -> TensorDesc:
    """Matrix product over the last two dimensions of equally ranked operands."""
    a, b = layer.desc(0), layer.desc(1)
    dtype = _same_dtype(layer, a, b)
    if dtype not in FLOATS:
        layer.fail(f"operands have dtype {dtype.name}, expected a float type")
    if len(a.shape) != len(b.shape) or len(a.shape) < 2:
        layer.fail(f"operands have ranks {len(a.shape)} and {len(b.shape)}; equal ranks of at least 2 are needed")
    if MatrixOperation.VECTOR in (layer.op0, layer.op1):
        layer.fail("VECTOR operands are not recorded")
    m, k = a.shape[-2:] if layer.op0 is MatrixOperation.NONE else a.shape[:-3:-1]
    k2, n = b.shape[-2:] if layer.op1 is MatrixOperation.NONE else b.shape[:-3:-1]
    if k != k2 and -1 not in (k, k2):
        layer.fail(f"inner dimensions differ: {k} and {k2}")
    return TensorDesc(dtype, (*_broadcast(layer, a.shape[:-2], b.shape[:-2]), m, n))


def concatenation(layer: L.IConcatenationLayer) -> TensorDesc:
    """Concatenation: equal dtypes and ranks, other dimensions equal.

    TensorRT's axis is set after the layer is added: until then, dimensions that differ are left open.
    """
    descs = [layer.desc(i) for i in range(layer.num_inputs)]
    first = descs[0]
    rank, axis = len(first.shape), layer.axis
    if not 0 <= axis < rank:
        layer.fail(f"axis {axis} is outside rank {rank}")
    shape = list(first.shape)
    for other in descs[1:]:
        _same_dtype(layer, first, other)
        if len(other.shape) != rank:
            layer.fail(f"operands have ranks {rank} and {len(other.shape)}")
        for i, (x, y) in enumerate(zip(shape, other.shape, strict=True)):
            if i == axis:
                shape[i] = -1 if -1 in (x, y) else x + y
            elif x != y and -1 not in (x, y):
                if not layer.axis_given:
                    return TensorDesc(first.dtype, (-1,) * rank)
                layer.fail(f"shapes {first.shape} and {other.shape} differ outside axis {axis}")
            else:
                shape[i] = y if x == -1 else x
    values: Values | None = None
    if rank == 1 and first.dtype in INTEGERS and shape[0] >= 0 and any(d.values is not None for d in descs):
        values = sum((d.values or (None,) * d.shape[0] for d in descs), ())
    return TensorDesc(first.dtype, tuple(shape), values)


def _permuted(layer: L.ILayer, shape: Shape, order: Shape | None) -> Shape:
    if order is None:
        return shape
    if sorted(order) != list(range(len(shape))):
        layer.fail(f"permutation {order} does not fit rank {len(shape)}")
    return tuple(shape[i] for i in order)


def shuffle(layer: L.IShuffleLayer) -> TensorDesc:
    """Transpose, reshape, transpose; 0 copies a dimension (if placeholders are on), -1 is worked out."""
    source = layer.desc(0)
    shape = _permuted(layer, source.shape, layer.first_transpose)
    if layer.num_inputs > 1 and layer.inputs[1] is not None:
        target = layer.desc(1)
        dims = [-2 if v is None else v for v in target.values or (None,) * target.shape[0]]
    elif layer.reshape_dims is not None:
        dims = list(layer.reshape_dims)
    else:
        dims = list(shape)
        return TensorDesc(source.dtype, _permuted(layer, tuple(dims), layer.second_transpose), source.values)
    if layer.zero_is_placeholder:
        if any(d == 0 and i >= len(shape) for i, d in enumerate(dims)):
            layer.fail(f"reshape {tuple(dims)} copies a dimension that rank {len(shape)} does not have")
        copied = [d == 0 for d in dims]
        dims = [shape[i] if d == 0 else d for i, d in enumerate(dims)]
        # A copied dynamic dimension stays dynamic; it is not the one to work out.
        dims = [-2 if c and d == -1 else d for c, d in zip(copied, dims, strict=True)]
    if dims.count(-1) > 1:
        layer.fail(f"reshape {tuple(dims)} has more than one -1")
    size = volume(shape)
    known = [d for d in dims if d >= 0]
    if -1 in dims and -2 not in dims and size is not None:
        rest = int(np.prod(known, dtype=np.int64))
        if rest == 0 or size % rest:
            layer.fail(f"shape {shape} does not reshape to {tuple(dims)}")
        dims[dims.index(-1)] = size // rest
    elif -1 not in dims and -2 not in dims and size is not None and size != int(np.prod(known, dtype=np.int64)):
        layer.fail(f"shape {shape} does not reshape to {tuple(dims)}")
    out = tuple(-1 if d < 0 else d for d in dims)
    values = source.values if len(out) <= 1 else None
    return TensorDesc(source.dtype, _permuted(layer, out, layer.second_transpose), values)


def slice_(layer: L.ISliceLayer) -> TensorDesc:
    """Slice with static or run-time start, size and stride; bounds are checked where all is known."""
    source = layer.desc(0)
    rank = len(source.shape)
    parts: list[list[int | None]] = []
    for position, static in ((1, layer.start), (2, layer.shape), (3, layer.stride)):
        tensor = layer.get_input(position)
        if tensor is None:
            given: list[int | None] = list(static)
        else:
            given = list(tensor.desc.values or (None,) * max(tensor.shape[0], 0))
        if len(given) != rank:
            layer.fail(f"slice has {len(given)} entries for rank {rank}")
        parts.append(given)
    start, size, stride = parts
    for axis in range(rank):
        s, c, t, d = start[axis], size[axis], stride[axis], source.shape[axis]
        if c is not None and c < 0:
            layer.fail(f"slice of {c} elements along axis {axis}")
        if s is None or c is None or t is None or d < 0 or c == 0:
            continue
        last = s + (c - 1) * t
        if s < 0 or not 0 <= last < d:
            layer.fail(f"slice of {c} from {s} by {t} leaves axis {axis} of size {d}")
    values: Values | None = None
    s0, c0, t0 = start[0], size[0], stride[0]
    if rank == 1 and source.values is not None and s0 is not None and c0 is not None and t0 is not None:
        values = tuple(source.values[s0 + i * t0] for i in range(c0))
    return TensorDesc(source.dtype, tuple(-1 if c is None else c for c in size), values)


def gather(layer: L.IGatherLayer) -> TensorDesc:
    """Gather along ``axis``: output = data[:axis] + indices + data[axis + 1:]."""
    data, indices = layer.desc(0), layer.desc(1)
    if layer.mode is not GatherMode.DEFAULT or layer.num_elementwise_dims:
        layer.fail(f"gather mode {layer.mode.name} with {layer.num_elementwise_dims} element-wise dims is not recorded")
    if indices.dtype not in INTEGERS:
        layer.fail(f"indices have dtype {indices.dtype.name}, expected INT32 or INT64")
    if not 0 <= layer.axis < len(data.shape):
        layer.fail(f"axis {layer.axis} is outside rank {len(data.shape)}")
    shape = (*data.shape[: layer.axis], *indices.shape, *data.shape[layer.axis + 1 :])
    values: Values | None = None
    if data.values is not None and len(data.shape) == 1 and indices.values is not None and len(shape) <= 1:
        for i in indices.values:
            if i is not None and not 0 <= i < len(data.values):
                layer.fail(f"index {i} is outside 0..{len(data.values) - 1}")
        values = tuple(None if i is None else data.values[i] for i in indices.values)
    return TensorDesc(data.dtype, shape, values)


def select(layer: L.ISelectLayer) -> TensorDesc:
    """Choice by a BOOL condition; all three broadcast."""
    condition, a, b = layer.desc(0), layer.desc(1), layer.desc(2)
    if condition.dtype is not DataType.BOOL:
        layer.fail(f"condition has dtype {condition.dtype.name}, expected BOOL")
    dtype = _same_dtype(layer, a, b)
    return TensorDesc(dtype, _broadcast(layer, condition.shape, _broadcast(layer, a.shape, b.shape)))
