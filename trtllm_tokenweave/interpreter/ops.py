"""One function per layer, made once when the context is built: arrays of the inputs in, array(s) of the outputs out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.interpreter import numeric, shape_ops
from trtllm_tokenweave.recorder import layers
from trtllm_tokenweave.recorder.enums import (
    INTEGERS,
    ActivationType,
    ElementWiseOperation,
    LayerType,
    MatrixOperation,
    ReduceOperation,
    TopKOperation,
    UnaryOperation,
    numpy_dtype,
)

Array = NDArray[Any]
#: A layer as a function; one array for layers with a single output, a list otherwise.
Op = Callable[..., "Array | list[Array]"]

_SIMPLE: dict[ElementWiseOperation, Callable[[Any, Any], Any]] = {
    ElementWiseOperation.SUM: np.add,
    ElementWiseOperation.SUB: np.subtract,
    ElementWiseOperation.PROD: np.multiply,
    ElementWiseOperation.DIV: np.true_divide,
    ElementWiseOperation.MAX: np.maximum,
    ElementWiseOperation.MIN: np.minimum,
    ElementWiseOperation.AND: np.logical_and,
    ElementWiseOperation.OR: np.logical_or,
    ElementWiseOperation.XOR: np.logical_xor,
    ElementWiseOperation.EQUAL: np.equal,
    ElementWiseOperation.GREATER: np.greater,
    ElementWiseOperation.LESS: np.less,
}

_erf = np.frompyfunc(math.erf, 1, 1)


def _erf_float(x: Array) -> Array:
    return np.asarray(_erf(x.astype(np.float64))).astype(x.dtype)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + np.exp(-x))


_UNARY: dict[UnaryOperation, Callable[[Array], Array]] = {
    UnaryOperation.EXP: np.exp,
    UnaryOperation.LOG: np.log,
    UnaryOperation.SQRT: np.sqrt,
    UnaryOperation.RECIP: np.reciprocal,
    UnaryOperation.ABS: np.abs,
    UnaryOperation.NEG: np.negative,
    UnaryOperation.SIN: np.sin,
    UnaryOperation.COS: np.cos,
    UnaryOperation.FLOOR: np.floor,
    UnaryOperation.ERF: _erf_float,
}
_ACTIVATION: dict[ActivationType, Callable[[Array], Array]] = {
    ActivationType.RELU: lambda x: np.maximum(x, np.float32(0)),
    ActivationType.SIGMOID: sigmoid,
    ActivationType.TANH: np.tanh,
}
_REDUCE: dict[ReduceOperation, Callable[..., Any]] = {
    ReduceOperation.SUM: np.add.reduce,
    ReduceOperation.PROD: np.multiply.reduce,
    ReduceOperation.MAX: np.maximum.reduce,
    ReduceOperation.MIN: np.minimum.reduce,
}


def make_op(layer: layers.ILayer, exact: bool, float32_copy: Callable[[Array], Array]) -> Op:
    """Return the function of a layer that is neither a constant nor a plugin.

    Args:
        exact: See `numeric`.
        float32_copy: Gives the (cached) float32 copy of a constant in float16 or bfloat16.
    """
    return _MAKERS[layer.layer_type](layer, exact, float32_copy)


def _low(layer: layers.ILayer) -> np.dtype[Any] | None:
    """Dtype to round to where the layer computes in float16 or bfloat16."""
    dtype = numpy_dtype(layer.desc(0).dtype)
    return dtype if numeric.is_low(dtype) else None


def _float_op(layer: layers.ILayer, function: Callable[..., Array]) -> Op:
    """Wrap a float32 function for the layer's dtype; transcendental code paths need contiguous memory to repeat."""
    low = _low(layer)
    if low is None:
        return lambda *xs: function(*(np.asarray(x, order="C") for x in xs))
    target = low
    return lambda *xs: function(*(x.astype(np.float32, order="C") for x in xs)).astype(target)


def _elementwise(layer: layers.ILayer, exact: bool, _copy: object) -> Op:
    assert isinstance(layer, layers.IElementWiseLayer)
    op = layer.op
    if op is ElementWiseOperation.POW:
        return _float_op(layer, _power(exact))
    low = _low(layer)
    if op is ElementWiseOperation.DIV and layer.outputs[0].dtype in INTEGERS:
        return _truncated_div
    if op is ElementWiseOperation.FLOOR_DIV:
        function: Callable[[Array, Array], Array] = _floor_div
    else:
        function = _SIMPLE[op]
    if low is None:
        return function
    if op in (ElementWiseOperation.EQUAL, ElementWiseOperation.GREATER, ElementWiseOperation.LESS):
        return lambda a, b: function(numeric.widen(a), numeric.widen(b))
    return lambda a, b: function(a.astype(np.float32), b.astype(np.float32)).astype(low)


def _power(exact: bool) -> Callable[[Array, Array], Array]:
    general = numeric.in_double(np.power) if exact else np.power

    def power(x: Array, exponent: Array) -> Array:
        if exponent.size == 1 and exponent.flat[0] == 2:
            return numeric.square(x)
        return general(x, exponent)

    return power


def _truncated_div(a: Array, b: Array) -> Array:
    """Integer DIV rounds towards zero, as in C."""
    quotient = _floor_div(np.abs(a), np.abs(b))
    return np.where((a < 0) == (b < 0), quotient, -quotient)


def _floor_div(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iu" and not b.all():
        raise ZeroDivisionError("integer division by zero")
    out: Array = np.floor_divide(a, b) if a.dtype.kind in "iu" else np.floor(a / b)
    return out


def _unary(layer: layers.ILayer, exact: bool, _copy: object) -> Op:
    assert isinstance(layer, layers.IUnaryLayer)
    if layer.op is UnaryOperation.NOT:
        return np.logical_not
    function = _UNARY[layer.op]
    return _float_op(layer, numeric.in_double(function) if exact else function)


def _activation(layer: layers.ILayer, exact: bool, _copy: object) -> Op:
    assert isinstance(layer, layers.IActivationLayer)
    function = _ACTIVATION[layer.activation]
    return _float_op(layer, numeric.in_double(function) if exact else function)


def _reduce(layer: layers.ILayer, exact: bool, _copy: object) -> Op:
    assert isinstance(layer, layers.IReduceLayer)
    axes = tuple(i for i in range(len(layer.desc(0).shape)) if layer.axes >> i & 1)
    keep, dtype = layer.keep_dims, numpy_dtype(layer.desc(0).dtype)
    floats = dtype.kind not in "iu"
    if layer.op is ReduceOperation.AVG:
        return lambda x: numeric.mean(numeric.widen(x), axes, keep, exact).astype(dtype, copy=False)
    if layer.op is ReduceOperation.SUM and floats:
        return lambda x: numeric.total(numeric.widen(x), axes, keep, exact).astype(dtype, copy=False)
    function = _REDUCE[layer.op]
    return lambda x: np.asarray(function(numeric.widen(x), axis=axes, keepdims=keep)).astype(dtype, copy=False)


def _softmax(layer: layers.ILayer, exact: bool, _copy: object) -> Op:
    assert isinstance(layer, layers.ISoftMaxLayer)
    axis, dtype = layer.axes.bit_length() - 1, numpy_dtype(layer.desc(0).dtype)
    work = np.float64 if exact else np.float32

    def softmax(x: Array) -> Array:
        wide = x.astype(work, order="C")
        top = np.max(wide, axis=axis, keepdims=True, initial=-np.inf)
        weights = np.exp(wide - top)
        out: Array = weights / weights.sum(axis=axis, keepdims=True)
        return out.astype(dtype)

    return softmax


def _topk(layer: layers.ILayer, _exact: bool, _copy: object) -> Op:
    assert isinstance(layer, layers.ITopKLayer)
    axis, k, largest = layer.axes.bit_length() - 1, layer.k, layer.op is TopKOperation.MAX

    def topk(x: Array) -> list[Array]:
        if k > x.shape[axis]:
            raise ValueError(f"k = {k} is above the axis size {x.shape[axis]}")
        keys = numeric.widen(x)
        if largest:
            # For integers the complement reverses the order without overflow at the lowest value.
            keys = ~keys if keys.dtype.kind in "iu" else -keys
        order = np.argsort(keys, axis=axis, kind="stable")  # equal values: the lower index first
        best = np.take(order, np.arange(k), axis=axis)
        return [np.take_along_axis(x, best, axis=axis), best.astype(np.int32)]

    return topk


def _matrix_multiply(layer: layers.ILayer, exact: bool, copy: Callable[[Array], Array]) -> Op:
    assert isinstance(layer, layers.IMatrixMultiplyLayer)
    flip0, flip1 = (op is MatrixOperation.TRANSPOSE for op in (layer.op0, layer.op1))
    low = _low(layer)

    def multiply(a: Array, b: Array) -> Array:
        if low is not None:
            a, b = copy(a), copy(b)
        if flip0:
            a = a.swapaxes(-1, -2)
        if flip1:
            b = b.swapaxes(-1, -2)
        out = numeric.matmul(a, b, exact)
        return out if low is None else out.astype(low)

    return multiply


def _cast(layer: layers.ILayer, _exact: bool, _copy: object) -> Op:
    assert isinstance(layer, layers.ICastLayer)
    source, target = numpy_dtype(layer.desc(0).dtype), numpy_dtype(layer.to_type)
    if source == target:
        return lambda x: x
    # float16 and bfloat16 have no direct conversions to each other in numpy; float32 holds both exactly.
    return lambda x: numeric.widen(x).astype(target)


def _identity(_layer: layers.ILayer, _exact: bool, _copy: object) -> Op:
    return lambda x: x


def _select(_layer: layers.ILayer, _exact: bool, _copy: object) -> Op:
    return np.where


def _shape_layer(make: Callable[[Any], Op]) -> Callable[[layers.ILayer, bool, Callable[[Array], Array]], Op]:
    return lambda layer, _exact, _copy: make(layer)


_MAKERS: dict[LayerType, Callable[[layers.ILayer, bool, Callable[[Array], Array]], Op]] = {
    LayerType.ELEMENTWISE: _elementwise,
    LayerType.UNARY: _unary,
    LayerType.ACTIVATION: _activation,
    LayerType.REDUCE: _reduce,
    LayerType.SOFTMAX: _softmax,
    LayerType.TOPK: _topk,
    LayerType.MATRIX_MULTIPLY: _matrix_multiply,
    LayerType.CAST: _cast,
    LayerType.IDENTITY: _identity,
    LayerType.SELECT: _select,
    LayerType.SHUFFLE: _shape_layer(shape_ops.shuffle),
    LayerType.SLICE: _shape_layer(shape_ops.slice_),
    LayerType.GATHER: _shape_layer(shape_ops.gather),
    LayerType.CONCATENATION: _shape_layer(shape_ops.concatenation),
    LayerType.SHAPE: _shape_layer(shape_ops.shape),
}
