"""ExecutionContext: input checks, live layers only, folding, shared copies, errors that name the layer, the ledger."""

from __future__ import annotations

import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.comm import SingleComm
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.interpreter import ExecutionContext, Schedule, numeric

Array = NDArray[Any]
E = trt.ElementWiseOperation
M = trt.MatrixOperation


def out(layer: trt.ILayer) -> trt.ITensor:
    return layer.outputs[0]


def constant(network: trt.RecordedNetwork, values: Array) -> trt.ITensor:
    return out(network.add_constant(values.shape, values))


def adder() -> trt.RecordedNetwork:
    """y = a + b with named token dimensions."""
    network = trt.RecordedNetwork("adder")
    a = network.add_input("a", trt.float32, (-1, 4))
    b = network.add_input("b", trt.float32, (-1, 4))
    a.set_dimension_name(0, "num_tokens")
    b.set_dimension_name(0, "num_tokens")
    y = out(network.add_elementwise(a, b, E.SUM))
    y.name = "y"
    network.mark_output(y)
    return network


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


def test_runs_and_checks_inputs() -> None:
    context = ExecutionContext(adder(), SingleComm())
    assert context.run({"a": ones(3, 4), "b": ones(3, 4)})["y"].tolist() == [[2.0] * 4] * 3
    assert context.run({"a": ones(0, 4), "b": ones(0, 4)})["y"].shape == (0, 4)
    good = {"a": ones(2, 4), "b": ones(2, 4)}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"a": ones(2, 4)}, "input b: is missing"),
        ({**good, "c": ones(1)}, "input c: the network has no such input. Fix: inputs: a, b"),
        ({**good, "a": ones(2, 4, dtype=np.float16)}, "input a: has dtype HALF, expected FLOAT"),
        ({**good, "a": ones(2, 4, 1)}, "input a: has rank 3, expected 2"),
        ({**good, "a": ones(2, 5)}, r"input a: has shape \(2, 5\), expected \(-1, 4\)"),
        ({**good, "b": ones(3, 4)}, "input b: dimension 'num_tokens' has 3 elements, but 2 in input a"),
        ({**good, "a": [1.0]}, "input a: is a list, not a numpy array"),
        (
            {**good, "a": ones(2, 4, dtype=np.float64)},
            r"^input a: numpy dtype float64 has no TensorRT DataType\. Fix: give FLOAT$",
        ),
    ]
    for inputs, message in bad:
        with pytest.raises(UserError, match=message):
            context.run(inputs)
    # A refused step leaves the context usable.
    assert context.run(good)["y"].shape == (2, 4)


def test_a_network_without_outputs_or_values_or_kernel_is_refused() -> None:
    with pytest.raises(UserError, match="network 'n': has no outputs"):
        ExecutionContext(trt.RecordedNetwork("n"), SingleComm())
    network = adder()
    planned = network.add_constant((1, 4), trt.Weights(trt.float32, 4))
    planned.name = "gamma"
    with_shapes = network.add_elementwise(network.get_output(0), out(planned), E.PROD)
    ExecutionContext(network, SingleComm())  # dangling: never looked at
    network.mark_output(out(with_shapes))
    with pytest.raises(UserError, match=r"layer gamma: .* built from shapes only"):
        ExecutionContext(network, SingleComm())
    network = trt.RecordedNetwork()
    x = network.add_input("x", trt.float32, (-1,))
    spec = trt.PluginSpec("Nobody", "1", "x", False, (), lambda _f, d: [d[0]])
    layer = network.add_plugin_v3([x], [], trt.PluginCreator(spec).create_plugin("p", []))
    layer.name = "strange"
    network.mark_output(out(layer))
    with pytest.raises(UserError, match=r"layer strange: the interpreter cannot run plugin 'Nobody'.*AllReduce"):
        ExecutionContext(network, SingleComm())


def test_only_live_layers_run() -> None:
    network = adder()
    a = network.get_input(0)
    zero = constant(network, np.zeros((1, 1), np.int32))
    dangling = network.add_elementwise(zero, zero, E.FLOOR_DIV)  # would fail
    del dangling
    network.add_elementwise(a, a, E.PROD)
    context = ExecutionContext(network, SingleComm(), trace=True)
    context.run({"a": ones(2, 4), "b": ones(2, 4)})
    assert [e.layer for e in context.ledger.events] == [network.get_layer(0).name]


def test_rewired_layers_run_in_topological_order() -> None:
    """A pass adds layers at the end and makes earlier ones read them."""
    network = adder()
    first = network.get_layer(0)
    a = network.get_input(0)
    doubled = network.add_elementwise(a, a, E.SUM)
    first.set_input(0, out(doubled))
    result = ExecutionContext(network, SingleComm()).run({"a": ones(1, 4), "b": ones(1, 4)})
    assert result["y"].tolist() == [[3.0] * 4]


def test_a_cycle_is_reported() -> None:
    network = adder()
    first = network.get_layer(0)
    second = network.add_elementwise(out(first), network.get_input(1), E.SUM)
    first.set_input(0, out(second))
    with pytest.raises(UserError, match="takes part in a cycle"):
        ExecutionContext(network, SingleComm())


def test_errors_inside_a_layer_name_it() -> None:
    network = trt.RecordedNetwork()
    a, b = (network.add_input(n, trt.float32, (-1,)) for n in "ab")
    layer = network.add_elementwise(a, b, E.SUM)
    layer.name = "model/layers/0/add"
    network.mark_output(out(layer))
    for schedule in (None, Schedule(0)):
        context = ExecutionContext(network, SingleComm(), schedule=schedule)
        with pytest.raises(UserError, match="layer model/layers/0/add: operands could not be broadcast"):
            context.run({"a": ones(2), "b": ones(3)})


def test_constants_are_folded_once_and_shared() -> None:
    weight = np.random.default_rng(0).uniform(-1, 1, (8, 4)).astype(np.float32)
    network = trt.RecordedNetwork()
    x = network.add_input("x", trt.float32, (-1, 4))
    flipped = network.add_shuffle(constant(network, weight))
    flipped.first_transpose = (1, 0)
    y = out(network.add_matrix_multiply(x, M.NONE, out(flipped), M.NONE))
    # A scalar worked out from static dimensions, as broadcasts in TensorRT-LLM are.
    dims = out(network.add_shape(x))
    hidden = out(network.add_gather(dims, constant(network, np.array([1], np.int64)), 0))
    target = network.add_concatenation([constant(network, np.array([1], np.int64)), hidden])
    target.axis = 0
    row = network.add_shuffle(constant(network, np.arange(4, dtype=np.float32)))
    row.set_input(1, out(target))
    bias = out(network.add_elementwise(y, y, E.SUM))
    network.mark_output(bias)
    scaled = out(network.add_elementwise(x, out(row), E.PROD))
    network.mark_output(scaled)
    context = ExecutionContext(network, SingleComm(), trace=True)
    result = context.run({"x": ones(2, 4)})
    assert [e.layer.split()[-1] for e in context.ledger.events] == [
        "[MATRIX_MULTIPLY]",
        "[ELEMENTWISE]",
        "[ELEMENTWISE]",
    ]
    np.testing.assert_allclose(result[bias.name], 2 * ones(2, 4) @ weight.T, rtol=1e-6)
    assert result[scaled.name].tolist() == [[0.0, 1.0, 2.0, 3.0]] * 2
    held = [v for v in context.program.initial if v is not None and v.shape == (4, 8)]
    assert len(held) == 1
    assert np.shares_memory(held[0], weight)


def test_contexts_share_float32_copies_of_weights() -> None:
    weight = np.ones((8, 4), ml_dtypes.bfloat16)

    def build() -> ExecutionContext:
        network = trt.RecordedNetwork()
        x = network.add_input("x", trt.bfloat16, (-1, 4))
        w = constant(network, weight)
        network.mark_output(out(network.add_matrix_multiply(x, M.NONE, w, M.TRANSPOSE)))
        return ExecutionContext(network, SingleComm())

    first, second = build(), build()
    for context in (first, second):
        (y,) = context.run({"x": ones(3, 4, dtype=ml_dtypes.bfloat16)}).values()
        assert (y == 4).all()
    (one,), (two,) = first.program.copies.values(), second.program.copies.values()
    assert one is two
    del first, second, context, one, two
    gc.collect()
    assert not any(key[1] == (8, 4) for key in numeric._copies)


def test_ledger_counts_the_peak() -> None:
    """Three layers in a row: two outputs are alive at once, never three."""
    network = trt.RecordedNetwork()
    x = network.add_input("x", trt.float32, (-1, 256))
    y = x
    for _ in range(3):
        y = out(network.add_elementwise(y, x, E.SUM))
    network.mark_output(y)
    inputs = {"x": ones(2, 256)}
    for schedule in (None, Schedule(3), Schedule(3, adversarial=False)):
        context = ExecutionContext(network, SingleComm(), schedule=schedule, trace=True)
        (result,) = context.run(inputs).values()
        assert (result == 4).all()
        assert context.ledger.peak_bytes == 2 * 2 * 256 * 4
        assert [e.start for e in context.ledger.events] == [0, 1, 2]
        assert {e.stream for e in context.ledger.events} == {"main"}


def test_inputs_and_constants_are_not_written_to() -> None:
    network = adder()
    a, b = ones(2, 4), ones(2, 4)
    a.flags.writeable = b.flags.writeable = False
    for seed in range(3):
        ExecutionContext(network, SingleComm(), schedule=Schedule(seed)).run({"a": a, "b": b})
    assert (a == 1).all()
