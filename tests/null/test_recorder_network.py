"""RecordedNetwork: shape and dtype inference, refusals, edits that are all or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.recorder import NetworkError, RecordedNetwork

E = trt.ElementWiseOperation
M = trt.MatrixOperation


@pytest.fixture
def net() -> RecordedNetwork:
    return RecordedNetwork("test")


def const(net: RecordedNetwork, values: Any, dtype: Any = np.int64) -> trt.ITensor:
    array = np.asarray(values, dtype)
    return out(net.add_constant(array.shape, array))


def out(layer: trt.ILayer, index: int = 0) -> trt.ITensor:
    tensor = layer.get_output(index)
    assert tensor is not None
    return tensor


def matrix(net: RecordedNetwork, name: str = "x", dtype: Any = trt.float32, width: int = 8) -> trt.ITensor:
    return net.add_input(name, dtype, (-1, width))


def test_inputs_and_outputs(net: RecordedNetwork) -> None:
    x = matrix(net)
    x.set_dimension_name(0, "num_tokens")
    assert (x.shape, x.dtype, x.is_network_input, x.get_dimension_name(0)) == ((-1, 8), trt.float32, True, "num_tokens")
    assert x.get_dimension_name(1) is None
    y = out(net.add_identity(x))
    net.mark_output(y)
    assert (net.num_inputs, net.num_outputs, net.num_layers) == (1, 1, 1)
    net.unmark_output(y)
    assert net.num_outputs == 0
    with pytest.raises(NetworkError, match="not an output"):
        net.unmark_output(y)


def test_refused_inputs_and_outputs(net: RecordedNetwork) -> None:
    x = matrix(net)
    with pytest.raises(NetworkError, match="input of this name"):
        matrix(net)
    with pytest.raises(NetworkError, match="below -1"):
        net.add_input("y", trt.float32, (-2,))
    with pytest.raises(NetworkError, match="outside rank 2"):
        x.set_dimension_name(2, "n")
    y = out(net.add_identity(x))
    with pytest.raises(NetworkError, match="only dimensions of network inputs"):
        y.set_dimension_name(0, "n")
    net.mark_output(y)
    with pytest.raises(NetworkError, match="is an output already"):
        net.mark_output(y)
    other = out(net.add_identity(x))
    other.name = y.name
    with pytest.raises(NetworkError, match="output of this name"):
        net.mark_output(other)


def test_unknown_layer_kinds_are_refused(net: RecordedNetwork) -> None:
    with pytest.raises(NetworkError, match="'convolution_nd' is not recorded"):
        net.add_convolution_nd()
    with pytest.raises(AttributeError):
        _ = net.unknown


def test_a_tensor_of_another_network_is_refused(net: RecordedNetwork) -> None:
    x = matrix(RecordedNetwork("other"))
    with pytest.raises(NetworkError, match="belongs to another network"):
        net.add_identity(x)
    with pytest.raises(NetworkError, match="not a tensor"):
        net.add_identity(None)  # type: ignore[arg-type]
    assert net.num_layers == 0


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [((-1, 8), (-1, 8), (-1, 8)), ((-1, 8), (1, 8), (-1, 8)), ((-1, 1), (3, 8), (3, 8)), ((1, 1), (-1, 8), (-1, 8))],
)
def test_elementwise_broadcast(
    net: RecordedNetwork, left: tuple[int, ...], right: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    a, b = net.add_input("a", trt.float16, left), net.add_input("b", trt.float16, right)
    assert out(net.add_elementwise(a, b, E.SUM)).shape == expected
    compared = out(net.add_elementwise(a, b, E.LESS))
    assert compared.dtype is trt.bool


def test_elementwise_refusals(net: RecordedNetwork) -> None:
    a = matrix(net)
    for name, dtype, shape, message in (
        ("b", trt.float16, (-1, 8), "dtypes FLOAT and HALF"),
        ("c", trt.float32, (8,), "ranks 2 and 1"),
        ("d", trt.float32, (-1, 7), "do not broadcast"),
    ):
        with pytest.raises(NetworkError, match=message):
            net.add_elementwise(a, net.add_input(name, dtype, shape), E.SUM)
    one = const(net, [1])
    with pytest.raises(NetworkError, match="POW needs float"):
        net.add_elementwise(one, one, E.POW)
    with pytest.raises(NetworkError, match="needs BOOL"):
        net.add_elementwise(one, one, E.AND)
    for op in (E.FLOOR_DIV, E.DIV):
        with pytest.raises(NetworkError, match="divides by zero"):
            net.add_elementwise(one, const(net, [0]), op)
    seven, two = const(net, [-7, 7]), const(net, [2])
    assert net.add_elementwise(seven, two, E.DIV).outputs[0].desc.values == (-3, 3), "towards zero"
    assert net.add_elementwise(seven, two, E.FLOOR_DIV).outputs[0].desc.values == (-4, 3)


def test_matrix_multiply(net: RecordedNetwork) -> None:
    x = matrix(net)
    w = const(net, np.zeros((5, 8)), np.float32)
    assert out(net.add_matrix_multiply(x, M.NONE, w, M.TRANSPOSE)).shape == (-1, 5)
    with pytest.raises(NetworkError, match="inner dimensions differ: 8 and 5"):
        net.add_matrix_multiply(x, M.NONE, w, M.NONE)
    with pytest.raises(NetworkError, match="equal ranks"):
        net.add_matrix_multiply(x, M.NONE, const(net, np.zeros(8), np.float32), M.NONE)
    with pytest.raises(NetworkError, match="dtypes FLOAT and HALF"):
        net.add_matrix_multiply(x, M.NONE, const(net, np.zeros((5, 8)), np.float16), M.TRANSPOSE)
    with pytest.raises(NetworkError, match="expected a float type"):
        net.add_matrix_multiply(const(net, [[1]]), M.NONE, const(net, [[1]]), M.NONE)


def test_reduce_softmax_topk(net: RecordedNetwork) -> None:
    x = matrix(net)
    reduced = net.add_reduce(x, trt.ReduceOperation.AVG, 2, True)
    assert out(reduced).shape == (-1, 1)
    reduced.keep_dims = False
    assert out(reduced).shape == (-1,)
    assert net.add_softmax(x).axes == 1, "TensorRT's default: the third axis from the end, at least 0"
    top = net.add_topk(x, trt.TopKOperation.MAX, 2, 2)
    assert [(t.shape, t.dtype) for t in top.outputs] == [((-1, 2), trt.float32), ((-1, 2), trt.int32)]
    for k, axes, message in ((9, 2, "above the axis size"), (0, 2, "below 1"), (1, 3, "exactly one axis")):
        with pytest.raises(NetworkError, match=message):
            net.add_topk(x, trt.TopKOperation.MAX, k, axes)
    with pytest.raises(NetworkError, match="does not fit rank 2"):
        net.add_reduce(x, trt.ReduceOperation.SUM, 4, True)
    with pytest.raises(NetworkError, match="AVG of INT64"):
        net.add_reduce(const(net, [1]), trt.ReduceOperation.AVG, 1, True)


def test_activation_type_shadows_the_layer_type(net: RecordedNetwork) -> None:
    layer = net.add_activation(matrix(net), trt.ActivationType.SIGMOID)
    assert layer.type is trt.ActivationType.SIGMOID
    assert net.layer_kind(layer) is trt.LayerType.ACTIVATION
    with pytest.raises(NetworkError, match="expected a float type"):
        net.add_activation(const(net, [1]), trt.ActivationType.RELU)


def test_concatenation(net: RecordedNetwork) -> None:
    a, b = matrix(net, "a"), matrix(net, "b", width=3)
    layer = net.add_concatenation([a, a])
    assert (layer.axis, out(layer).shape) == (0, (-1, 8))
    layer.axis = 1
    assert out(layer).shape == (-1, 16)
    later = net.add_concatenation([a, b])
    later.axis = 1
    assert out(later).shape == (-1, 11), "the axis is set after the layer is added"
    with pytest.raises(NetworkError, match="differ outside axis 0"):
        later.axis = 0
    with pytest.raises(NetworkError, match="axis 2 is outside"):
        layer.axis = 2
    assert (layer.axis, out(layer).shape) == (1, (-1, 16))
    with pytest.raises(NetworkError, match="needs inputs"):
        net.add_concatenation([])


@pytest.mark.parametrize(
    ("dims", "placeholder", "expected"),
    [
        ((0, 2, 4), True, (-1, 2, 4)),
        ((-1, 4), True, (-1, 4)),
        ((0, -1), True, (-1, -1)),
        ((-1,), True, (-1,)),
        ((0, 8), False, (0, 8)),
    ],
)
def test_shuffle_of_dynamic_rows(
    net: RecordedNetwork, dims: tuple[int, ...], placeholder: bool, expected: tuple[int, ...]
) -> None:
    layer = net.add_shuffle(matrix(net))
    layer.zero_is_placeholder = placeholder
    layer.reshape_dims = dims
    assert out(layer).shape == expected


def test_shuffle_refusals(net: RecordedNetwork) -> None:
    layer = net.add_shuffle(const(net, np.zeros((2, 6)), np.float32))
    for dims, message in (
        ((-1, -1), "more than one -1"),
        ((5, -1), "does not reshape"),
        ((3, 5), "does not reshape"),
        ((2, 6, 0), "does not have"),
    ):
        with pytest.raises(NetworkError, match=message):
            layer.reshape_dims = dims
        assert layer.reshape_dims is None
    with pytest.raises(NetworkError, match=r"permutation \(0, 0\)"):
        layer.first_transpose = (0, 0)
    layer.second_transpose = (1, 0)
    assert out(layer).shape == (6, 2)


def test_values_of_shape_tensors_are_followed(net: RecordedNetwork) -> None:
    """The target of a reshape: [1, hidden] worked out by SHAPE, GATHER, CONCATENATION, as TensorRT-LLM does it."""
    w = const(net, np.zeros(8), np.float32)
    size = out(net.add_gather(out(net.add_shape(w)), const(net, [0], np.int32), 0))
    target = out(net.add_concatenation([const(net, [1]), size]))
    layer = net.add_shuffle(w)
    layer.set_input(1, target)
    assert out(layer).shape == (1, 8)
    x = matrix(net)
    rows = out(net.add_gather(out(net.add_shape(x)), const(net, [0], np.int32), 0))
    half = out(net.add_elementwise(rows, const(net, [2]), E.FLOOR_DIV))
    sliced = net.add_slice(x, (0, 0), (1, 1), (1, 1))
    sliced.set_input(2, out(net.add_concatenation([half, const(net, [8])])))
    assert out(sliced).shape == (-1, 8)
    with pytest.raises(NetworkError, match=r"index 2 is outside 0\.\.1"):
        net.add_gather(out(net.add_shape(x)), const(net, [2], np.int32), 0)


def test_slice_bounds(net: RecordedNetwork) -> None:
    x = matrix(net)
    assert out(net.add_slice(x, (0, 6), (3, 2), (1, 1))).shape == (3, 2)
    assert out(net.add_slice(x, (0, 7), (3, 2), (1, -7))).shape == (3, 2)
    assert out(net.add_slice(x, (0, 8), (3, 0), (1, 1))).shape == (3, 0)
    for start, size in (((0, 7), (3, 2)), ((0, -1), (3, 2)), ((0, 0), (3, -1)), ((0, 0), (-3, 1))):
        with pytest.raises(NetworkError, match="slice of"):
            net.add_slice(x, start, size, (1, 1))
    with pytest.raises(NetworkError, match="entries for rank 2"):
        net.add_slice(x, (0,), (1,), (1,))


def test_gather_and_select(net: RecordedNetwork) -> None:
    table, ids = const(net, np.zeros((10, 4)), np.float32), net.add_input("ids", trt.int32, (-1,))
    assert out(net.add_gather(table, ids, 0)).shape == (-1, 4)
    assert out(net.add_gather(table, ids, 1)).shape == (10, -1)
    with pytest.raises(NetworkError, match="expected INT32 or INT64"):
        net.add_gather(table, table, 0)
    with pytest.raises(NetworkError, match="axis 2 is outside"):
        net.add_gather(table, ids, 2)
    flag = net.add_input("flag", trt.bool, (1, 1))
    assert out(net.add_select(flag, table, const(net, [[1.0]], np.float32))).shape == (10, 4)
    with pytest.raises(NetworkError, match="expected BOOL"):
        net.add_select(table, table, table)


def test_constant_needs_as_many_weights_as_its_shape(net: RecordedNetwork) -> None:
    with pytest.raises(NetworkError, match="6 weights do not fill shape"):
        net.add_constant((2, 2), np.zeros(6, np.float32))
    planned = net.add_constant((2, 3), trt.Weights(trt.bfloat16, 6))
    assert (planned.weights.nbytes, out(planned).dtype) == (12, trt.bfloat16)
    with pytest.raises(NetworkError, match="no values"):
        planned.weights.numpy()
    array = np.zeros(6, np.float32)
    assert net.add_constant((6,), array).weights.array is array


@pytest.mark.parametrize("count", [64, 65])
def test_shape_tensors_hold_at_most_64_elements(net: RecordedNetwork, count: int) -> None:
    """TensorRT goes wrong without an error above 64; the refusal must not wear off at a second try."""
    entry = out(net.add_gather(const(net, np.arange(count)), const(net, [3], np.int32), 0))
    layer = net.add_shuffle(const(net, np.zeros(3), np.float32))
    if count == 64:
        layer.set_input(1, entry)
        assert out(layer).shape == (3,)
        return
    for _ in range(2):
        with pytest.raises(NetworkError, match="at most 64"):
            layer.set_input(1, entry)
        assert layer.num_inputs == 1
        assert not net.shape_tensors


def test_a_large_tensor_cannot_be_put_behind_a_shape_tensor_later(net: RecordedNetwork) -> None:
    gather = net.add_gather(const(net, np.arange(8)), const(net, [3], np.int32), 0)
    layer = net.add_shuffle(const(net, np.zeros(3), np.float32))
    layer.set_input(1, out(gather))
    with pytest.raises(NetworkError, match="at most 64"):
        gather.set_input(0, const(net, np.arange(65)))
    gather.set_input(0, const(net, np.arange(64)))


def test_shape_inputs_must_be_integer_vectors(net: RecordedNetwork) -> None:
    layer = net.add_shuffle(matrix(net))
    with pytest.raises(NetworkError, match="has rank 2, expected 1"):
        layer.set_input(1, const(net, [[1]]))
    with pytest.raises(NetworkError, match="expected INT32 or INT64"):
        layer.set_input(1, const(net, [1.0], np.float32))
    with pytest.raises(NetworkError, match="has no input 2"):
        layer.set_input(2, const(net, [1]))


def test_a_refused_edit_changes_nothing(net: RecordedNetwork) -> None:
    x = matrix(net)
    wide = const(net, np.zeros((5, 8)), np.float32)
    product = net.add_matrix_multiply(x, M.NONE, wide, M.TRANSPOSE)
    bias = const(net, np.zeros((1, 5)), np.float32)
    total = net.add_elementwise(out(product), bias, E.SUM)
    narrow = const(net, np.zeros((4, 8)), np.float32)
    with pytest.raises(NetworkError, match="do not broadcast"):
        product.set_input(1, narrow)
    assert product.get_input(1) is wide
    assert (out(product).shape, out(total).shape) == ((-1, 5), (-1, 5))
    assert (product, 1) in wide.consumers
    assert narrow.consumers == []


def test_a_refused_attribute_is_undone_downstream_too(net: RecordedNetwork) -> None:
    reduced = net.add_reduce(matrix(net), trt.ReduceOperation.SUM, 2, True)
    net.add_elementwise(out(reduced), const(net, np.zeros((1, 4)), np.float32), E.SUM)
    with pytest.raises(NetworkError, match="ranks 1 and 2"):
        reduced.keep_dims = False
    assert reduced.keep_dims
    assert out(reduced).shape == (-1, 1)


def test_an_edit_reaches_everything_downstream(net: RecordedNetwork) -> None:
    cast = net.add_cast(matrix(net), trt.float16)
    last = net.add_identity(out(net.add_unary(out(cast), trt.UnaryOperation.SQRT)))
    cast.to_type = trt.bfloat16
    assert out(last).dtype is trt.bfloat16


def test_consumers_follow_set_input(net: RecordedNetwork) -> None:
    a, b = matrix(net, "a"), matrix(net, "b")
    layer = net.add_elementwise(a, a, E.SUM)
    assert a.consumers == [(layer, 0), (layer, 1)]
    layer.set_input(1, b)
    assert (a.consumers, b.consumers) == ([(layer, 0)], [(layer, 1)])


def test_names(net: RecordedNetwork) -> None:
    layer = net.add_identity(matrix(net))
    assert layer.name == "(Unnamed Layer* 0) [IDENTITY]"
    assert out(layer).name == "(Unnamed Layer* 0) [IDENTITY]_output_0"
    layer.name = "mine"
    assert net.get_layer(0).name == "mine"
    with pytest.raises(NetworkError, match=r"layer mine: .*no input 1"):
        layer.set_input(1, matrix(net, "y"))
