"""Each layer kind against numpy in higher precision, in float32, float16 and bfloat16, with zero rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.comm import SingleComm
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.interpreter import ExecutionContext

Array = NDArray[Any]
Build = Callable[..., Any]
E = trt.ElementWiseOperation
U = trt.UnaryOperation
R = trt.ReduceOperation
M = trt.MatrixOperation

BF16 = np.dtype(ml_dtypes.bfloat16)
#: Half a unit in the last place, relative, with some room for float32 on the way.
TOLERANCE = {np.dtype(np.float32): 2e-6, np.dtype(np.float16): 2**-10, BF16: 2**-7}
FLOATS = list(TOLERANCE)


def run(build: Build, *arrays: Array, exact: bool = False) -> list[Array]:
    """Build a network with one dynamic input per array and run it; ``build`` returns a layer or a tensor."""
    network = trt.RecordedNetwork()
    inputs = [network.add_input(f"i{n}", trt.dtype_of(a), (-1,) * a.ndim) for n, a in enumerate(arrays)]
    built = build(network, *inputs)
    outputs = built.outputs if isinstance(built, trt.ILayer) else [built]
    for tensor in outputs:
        network.mark_output(tensor)
    context = ExecutionContext(network, SingleComm(), exact=exact)
    results = context.run({f"i{n}": a for n, a in enumerate(arrays)})
    found = [results[t.name] for t in outputs]
    for tensor, array in zip(outputs, found, strict=True):
        assert trt.dtype_of(array) is tensor.dtype
        assert array.ndim == len(tensor.shape)
    return found


def floats(dtype: np.dtype[Any], *shape: int, seed: int = 0, low: float = -2.0) -> Array:
    return np.random.default_rng(seed).uniform(low, 2.0, shape).astype(np.float32).astype(dtype)


def check(found: Array, wanted: Array, dtype: np.dtype[Any]) -> None:
    assert found.dtype == dtype
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("op", "oracle"),
    [
        (E.SUM, np.add),
        (E.SUB, np.subtract),
        (E.PROD, np.multiply),
        (E.DIV, np.divide),
        (E.MAX, np.maximum),
        (E.MIN, np.minimum),
        (E.POW, np.power),
        (E.FLOOR_DIV, np.floor_divide),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_elementwise_floats(op: E, oracle: Callable[..., Array], dtype: np.dtype[Any], exact: bool) -> None:
    a, b = floats(dtype, 5, 7, low=0.5), floats(dtype, 1, 7, seed=1, low=0.5)
    (out,) = run(lambda n, x, y: n.add_elementwise(x, y, op), a, b, exact=exact)
    check(out, oracle(a.astype(np.float64), b.astype(np.float64)), dtype)


@pytest.mark.parametrize("exact", [False, True])
def test_low_precision_is_rounded_once(exact: bool) -> None:
    """1 + 2**-8 lies half way between bfloat16 neighbours: it ties to even, and so it must do in every layer."""
    one, small = np.array([1.0], BF16), np.array([2.0**-8], BF16)
    (out,) = run(lambda n, x, y: n.add_elementwise(x, y, E.SUM), one, small, exact=exact)
    assert float(out[0]) == 1.0
    # Two layers round twice; a sum kept in float32 would give 1 + 2**-7.
    (out,) = run(
        lambda n, x, y: n.add_elementwise(n.add_elementwise(x, y, E.SUM).get_output(0), y, E.SUM),
        one,
        small,
        exact=exact,
    )
    assert float(out[0]) == 1.0


def test_pow_two_is_an_exact_square() -> None:
    x = floats(np.dtype(np.float32), 200, 3)
    (out,) = run(lambda n, t, e: n.add_elementwise(t, e, E.POW), x, np.full((1, 1), 2, np.float32))
    assert np.array_equal(out, x * x)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_elementwise_integers_are_exact(dtype: type) -> None:
    a: Array = np.array([7, -7, 2**31 - 1, 0], dtype)
    b: Array = np.array([2, 2, 3, -5], dtype)
    for op, wanted in {
        E.SUM: a[:2] + b[:2],
        E.SUB: a[:2] - b[:2],
        E.PROD: a[:2] * b[:2],
        E.MAX: np.maximum(a, b)[:2],
        E.MIN: np.minimum(a, b)[:2],
        E.FLOOR_DIV: np.array([3, -4], dtype),
        E.DIV: np.array([3, -3], dtype),
    }.items():
        (out,) = run(lambda n, x, y, op=op: n.add_elementwise(x, y, op), a[:2], b[:2])
        assert out.dtype == dtype
        assert np.array_equal(out, wanted), op
    (out,) = run(lambda n, x, y: n.add_elementwise(x, y, E.FLOOR_DIV), a, b)
    assert out.tolist() == [3, -4, (2**31 - 1) // 3, 0]


def test_integer_division_by_zero_names_the_layer() -> None:
    def build(n: Any, x: Any, y: Any) -> Any:
        layer = n.add_elementwise(x, y, E.FLOOR_DIV)
        layer.name = "halves"
        return layer

    with pytest.raises(UserError, match="layer halves: ZeroDivisionError"):
        run(build, np.array([1], np.int32), np.array([0], np.int32))


def test_comparisons_logic_and_select() -> None:
    a, b = np.array([1, 2, 3], np.int32), np.array([2, 2, 2], np.int32)
    for op, wanted in {
        E.EQUAL: [False, True, False],
        E.GREATER: [False, False, True],
        E.LESS: [True, False, False],
    }.items():
        (out,) = run(lambda n, x, y, op=op: n.add_elementwise(x, y, op), a, b)
        assert out.dtype == np.bool_
        assert out.tolist() == wanted
    p, q = np.array([True, True, False]), np.array([True, False, False])
    for op, logic in {E.AND: [True, False, False], E.OR: [True, True, False], E.XOR: [False, True, False]}.items():
        (out,) = run(lambda n, x, y, op=op: n.add_elementwise(x, y, op), p, q)
        assert out.tolist() == logic
    (out,) = run(lambda n, x: n.add_unary(x, U.NOT), p)
    assert out.tolist() == [False, False, True]
    (out,) = run(lambda n, c, x, y: n.add_select(c, x, y), q, a, b)
    assert out.tolist() == [1, 2, 2]
    low = np.array([1.0, 2.0], BF16)
    (out,) = run(lambda n, x, y: n.add_elementwise(x, y, E.GREATER), low, low[::-1].copy())
    assert out.tolist() == [False, True]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("exact", [False, True])
def test_unary_and_activations(dtype: np.dtype[Any], exact: bool) -> None:
    x = floats(dtype, 3, 9, low=0.25)
    wide = x.astype(np.float64)
    oracles: dict[U, Array] = {
        U.EXP: np.exp(wide),
        U.LOG: np.log(wide),
        U.SQRT: np.sqrt(wide),
        U.RECIP: 1 / wide,
        U.ABS: abs(wide),
        U.NEG: -wide,
        U.SIN: np.sin(wide),
        U.COS: np.cos(wide),
        U.FLOOR: np.floor(wide),
        U.ERF: np.vectorize(math.erf)(wide),
    }
    for op, wanted in oracles.items():
        (out,) = run(lambda n, t, op=op: n.add_unary(t, op), x, exact=exact)
        check(out, wanted, dtype)
    y = floats(dtype, 4, 5)
    wide = y.astype(np.float64)
    for kind, wanted in {
        trt.ActivationType.RELU: np.maximum(wide, 0),
        trt.ActivationType.SIGMOID: 1 / (1 + np.exp(-wide)),
        trt.ActivationType.TANH: np.tanh(wide),
    }.items():
        (out,) = run(lambda n, t, kind=kind: n.add_activation(t, kind), y, exact=exact)
        check(out, wanted, dtype)


def test_sigmoid_of_large_values_saturates() -> None:
    x = np.array([-1e4, 1e4], np.float32)
    (out,) = run(lambda n, t: n.add_activation(t, trt.ActivationType.SIGMOID), x)
    assert out.tolist() == [0.0, 1.0]


def over_last_axis(n: Any, x: Any) -> Any:
    layer = n.add_softmax(x)
    layer.axes = 1 << (len(x.shape) - 1)
    return layer


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("exact", [False, True])
def test_reduce_and_softmax(dtype: np.dtype[Any], exact: bool) -> None:
    x = floats(dtype, 2, 3, 40)
    wide = x.astype(np.float64)
    oracles: dict[R, Callable[..., Array]] = {
        R.SUM: np.sum,
        R.AVG: np.mean,
        R.MAX: np.max,
        R.MIN: np.min,
        R.PROD: np.prod,
    }
    for op, oracle in oracles.items():
        for keep in (False, True):
            (out,) = run(lambda n, t, op=op, keep=keep: n.add_reduce(t, op, 0b100, keep), x, exact=exact)
            check(out, oracle(wide, axis=2, keepdims=keep), dtype)
    (out,) = run(lambda n, t: n.add_reduce(t, R.SUM, 0b101, False), x, exact=exact)
    check(out, wide.sum(axis=(0, 2)), dtype)
    (out,) = run(over_last_axis, x, exact=exact)
    weights = np.exp(wide - wide.max(-1, keepdims=True))
    check(out, weights / weights.sum(-1, keepdims=True), dtype)


def test_reduce_integers_and_empty_rows() -> None:
    (out,) = run(lambda n, t: n.add_reduce(t, R.SUM, 1, True), np.array([2**30, 5, -2], np.int32))
    assert out.dtype == np.int32
    assert out.tolist() == [2**30 + 3]
    (out,) = run(lambda n, t: n.add_reduce(t, R.AVG, 0b10, True), np.zeros((0, 8), np.float32))
    assert out.shape == (0, 1)
    (out,) = run(over_last_axis, np.zeros((0, 8), np.float32))
    assert out.shape == (0, 8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("flips", [(M.NONE, M.NONE), (M.NONE, M.TRANSPOSE), (M.TRANSPOSE, M.NONE)])
def test_matmul(dtype: np.dtype[Any], exact: bool, flips: tuple[M, M]) -> None:
    a, b = floats(dtype, 19, 24), floats(dtype, 24, 17, seed=1)
    left = np.ascontiguousarray(a.T) if flips[0] is M.TRANSPOSE else a
    right = np.ascontiguousarray(b.T) if flips[1] is M.TRANSPOSE else b
    (out,) = run(lambda n, x, y: n.add_matrix_multiply(x, flips[0], y, flips[1]), left, right, exact=exact)
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(out.astype(np.float64), wanted, rtol=TOLERANCE[dtype], atol=2e-5)
    (out,) = run(lambda n, x, y: n.add_matrix_multiply(x, M.NONE, y, M.NONE), a[:0], b, exact=exact)
    assert out.shape == (0, 17)


def test_matmul_broadcasts_and_uses_a_constant_in_low_precision() -> None:
    a, w = floats(BF16, 3, 4, 8), floats(BF16, 1, 5, 8, seed=1)

    def build(n: Any, x: Any) -> Any:
        weight = n.add_constant(w.shape, w).get_output(0)
        return n.add_matrix_multiply(x, M.NONE, weight, M.TRANSPOSE)

    (out,) = run(build, a)
    check(out, a.astype(np.float64) @ w.astype(np.float64).swapaxes(-1, -2), BF16)


def test_exact_mode_gives_each_row_the_same_bits_in_any_batch() -> None:
    x, w = floats(np.dtype(np.float32), 33, 96), floats(np.dtype(np.float32), 50, 96, seed=1)

    def build(n: Any, t: Any, weight: Any) -> Any:
        y = n.add_matrix_multiply(t, M.NONE, weight, M.TRANSPOSE).get_output(0)
        y = n.add_activation(y, trt.ActivationType.SIGMOID).get_output(0)
        mean = n.add_reduce(y, R.AVG, 0b10, True).get_output(0)
        y = n.add_elementwise(y, mean, E.DIV).get_output(0)
        return over_last_axis(n, y)

    (whole,) = run(build, x, w, exact=True)
    for cut in (0, 1, 7, 8, 20, 32, 33):
        parts = [run(build, part, w, exact=True)[0] for part in (x[:cut], x[cut:])]
        assert np.array_equal(np.concatenate(parts), whole), cut


@pytest.mark.parametrize("largest", [True, False])
def test_topk_values_indices_and_ties(largest: bool) -> None:
    op = trt.TopKOperation.MAX if largest else trt.TopKOperation.MIN
    x = np.array([[3, 1, 3, 2], [0, -1, -2, -(2**31)]], np.int32)
    values, indices = run(lambda n, t: n.add_topk(t, op, 2, 0b10), x)
    if largest:
        assert values.tolist() == [[3, 3], [0, -1]]
        assert indices.tolist() == [[0, 2], [0, 1]]
    else:
        assert values.tolist() == [[1, 2], [-(2**31), -2]]
    assert indices.dtype == np.int32
    low = floats(BF16, 4, 6)
    values, indices = run(lambda n, t: n.add_topk(t, op, 3, 0b10), low)
    wanted = np.sort(low.astype(np.float32), axis=1)
    wanted = wanted[:, ::-1][:, :3] if largest else wanted[:, :3]
    assert np.array_equal(values.astype(np.float32), wanted)
    assert np.array_equal(np.take_along_axis(low, indices.astype(np.int64), 1), values)
    with pytest.raises(UserError, match="k = 5 is above the axis size 4"):
        run(lambda n, t: n.add_topk(t, op, 5, 0b10), x)


def test_gather_along_axes() -> None:
    data, indices = np.arange(24).reshape(4, 3, 2).astype(np.float32), np.array([[2, 0]], np.int32)
    for axis in (0, 1):
        (out,) = run(lambda n, d, i, axis=axis: n.add_gather(d, i, axis), data, indices)
        assert np.array_equal(out, np.take(data, indices, axis=axis))
    (out,) = run(lambda n, d, i: n.add_gather(d, i, 0), data, np.zeros((0,), np.int32))
    assert out.shape == (0, 3, 2)
    for bad in (4, -1):
        with pytest.raises(UserError, match=rf"index {bad} is outside 0\.\.3"):
            run(lambda n, d, i: n.add_gather(d, i, 0), data, np.array([bad], np.int32))


def test_cast_between_all_pairs() -> None:
    x = np.array([-1.75, 0.0, 2.5, 3.0], np.float32)
    for dtype in (*FLOATS, np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.bool_)):
        for target in (*FLOATS, np.dtype(np.int32), np.dtype(np.int64)):
            source = x.astype(dtype)
            kind = trt.dtype_of(np.empty(0, target))
            (out,) = run(lambda n, t, kind=kind: n.add_cast(t, kind), source)
            wanted = source.astype(np.float64)
            assert np.array_equal(out.astype(np.float64), np.trunc(wanted) if target.kind == "i" else wanted)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 9),
    start=st.integers(0, 9),
    size=st.integers(0, 9),
    stride=st.integers(1, 3),
    by_tensor=st.booleans(),
)
def test_slice(rows: int, start: int, size: int, stride: int, by_tensor: bool) -> None:
    x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)

    def build(n: Any, t: Any, *shape: Any) -> Any:
        if not by_tensor:
            return n.add_slice(t, (start, 1), (size, 2), (stride, 1))
        layer = n.add_slice(t, (0, 0), (0, 0), (1, 1))
        for position, tensor in enumerate(shape):
            layer.set_input(position + 1, tensor)
        return layer

    def build_shapes(n: Any, t: Any, *scalars: Any) -> Any:
        parts = []
        for scalar, fixed in zip(scalars, (1, 2, 1), strict=True):
            constant = n.add_constant((1,), np.array([fixed], np.int64)).get_output(0)
            layer = n.add_concatenation([scalar, constant])
            layer.axis = 0
            parts.append(layer.get_output(0))
        return build(n, t, *parts)

    def go() -> Array:
        if not by_tensor:
            return run(build, x)[0]
        network = trt.RecordedNetwork()
        inputs = [network.add_input("x", trt.float32, (-1, 3))]
        inputs += [network.add_input(f"s{i}", trt.int64, (1,)) for i in range(3)]
        layer = build_shapes(network, *inputs)
        network.mark_output(layer.get_output(0))
        sizes = {f"s{i}": np.array([v], np.int64) for i, v in enumerate((start, size, stride))}
        out: Array = ExecutionContext(network, SingleComm()).run({"x": x, **sizes})[layer.get_output(0).name]
        return out

    if size and start + (size - 1) * stride >= rows:
        with pytest.raises(UserError, match="leaves axis 0"):
            go()
    else:
        assert np.array_equal(go(), x[start : start + size * stride : stride, 1:3][:size])


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.integers(0, 4), min_size=1, max_size=4), axis=st.integers(0, 1))
def test_concatenation_with_empty_parts(parts: list[int], axis: int) -> None:
    arrays = [floats(BF16, *((p, 3) if axis == 0 else (3, p)), seed=i) for i, p in enumerate(parts)]

    def build(n: Any, *tensors: Any) -> Any:
        layer = n.add_concatenation(tensors)
        layer.axis = axis
        return layer

    (out,) = run(build, *arrays)
    assert np.array_equal(out.astype(np.float32), np.concatenate(arrays, axis=axis).astype(np.float32))


def test_shuffle_shape_and_identity() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

    def transposed(n: Any, t: Any) -> Any:
        layer = n.add_shuffle(t)
        layer.first_transpose, layer.reshape_dims, layer.second_transpose = (2, 0, 1), (0, -1), (1, 0)
        return layer

    (out,) = run(transposed, x)
    assert np.array_equal(out, x.transpose(2, 0, 1).reshape(4, 6).T)

    def split_heads(n: Any, t: Any) -> Any:
        """[rows, 12] to [rows, 3, 4], the rows read from the shape, as the model builder does."""
        dims = n.add_shape(t).get_output(0)
        rows = n.add_slice(dims, (0,), (1,), (1,)).get_output(0)
        rest = n.add_constant((2,), np.array([3, 4], np.int64)).get_output(0)
        target = n.add_concatenation([rows, rest])
        target.axis = 0
        layer = n.add_shuffle(t)
        layer.set_input(1, target.get_output(0))
        return layer

    for rows in (2, 0):
        (out,) = run(split_heads, np.zeros((rows, 12), np.float32))
        assert out.shape == (rows, 3, 4)

    def flat(n: Any, t: Any) -> Any:
        layer = n.add_shuffle(t)
        layer.reshape_dims = (-1, 5)
        return layer

    with pytest.raises(UserError, match=r"shape \(2, 3, 4\) does not reshape to \(-1, 5\)"):
        run(flat, x)
    (out,) = run(lambda n, t: n.add_shape(t), x)
    assert out.dtype == np.int64
    assert out.tolist() == [2, 3, 4]
    (out,) = run(lambda n, t: n.add_identity(t), x)
    assert np.array_equal(out, x)
