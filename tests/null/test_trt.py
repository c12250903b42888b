"""The seam to the object model, on the recorded one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave import trt as seam
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.recorder.trtllm_plugins import ALL_REDUCE

FIELDS: dict[str, Any] = dict.fromkeys(("type_id", "strategy", "fusion_op", "affine", "bias", "scale"), 0)
FIELDS |= {"group": np.arange(2), "eps": 0.0}


def test_constant_keeps_the_array() -> None:
    network, array = trt.RecordedNetwork(), np.arange(6, dtype=np.float32)
    tensor = seam.constant(network, array, (2, 3), name="w")
    assert tensor.shape == (2, 3)
    assert tensor.producer.weights.array is array
    assert seam.constant(network, None, (4, 5), trt.bfloat16).shape == (4, 5)


def test_fields_that_a_release_adds_are_passed_on() -> None:
    plugin = seam.create_plugin(
        trt.RecordedNetwork(), ALL_REDUCE, "x", {**FIELDS, "counter": 3, "tag": b"a", "rate": 0.5}
    )
    assert (plugin.fields["counter"], plugin.fields["tag"], plugin.fields["rate"]) == (3, b"a", 0.5)


def test_unknown_creator() -> None:
    with pytest.raises(UserError, match="no plugin creator 'Nothing'"):
        seam.create_plugin(trt.RecordedNetwork(), ("Nothing", "1", "x"), "n", {})


def test_redirect_moves_readers_and_outputs() -> None:
    network = trt.RecordedNetwork()
    x = network.add_input("x", trt.float32, (-1, 8))
    old = network.add_identity(x).outputs[0]
    kept, moved = network.add_identity(old), network.add_identity(old)
    kept.name = "kept"
    first = network.add_identity(x).outputs[0]
    old.name, first.name = "y", "first"
    network.mark_output(first)
    network.mark_output(old)
    for number, layer in enumerate((kept, moved)):
        layer.outputs[0].name = f"reader{number}"
        network.mark_output(layer.outputs[0])
    new = network.add_identity(x).outputs[0]
    seam.redirect(network, Graph(network), "y", new, frozenset({"kept"}))
    assert kept.inputs == [old]
    assert moved.inputs == [new]
    assert [network.get_output(i).name for i in range(4)] == ["first", "y", "reader0", "reader1"]
    assert network.get_output(1) is new


def test_graph_refuses_two_tensors_of_one_name() -> None:
    network = trt.RecordedNetwork()
    x = network.add_input("x", trt.float32, (-1, 8))
    network.add_identity(x).outputs[0].name = "x"
    with pytest.raises(UserError, match="two tensors have this name"):
        Graph(network)


def test_graph_refuses_a_cycle() -> None:
    network = trt.RecordedNetwork()
    x = network.add_input("x", trt.float32, (-1, 8))
    a = network.add_identity(x)
    b = network.add_identity(a.outputs[0])
    a.set_input(0, b.outputs[0])
    network.mark_output(b.outputs[0])
    with pytest.raises(UserError, match="cycle"):
        Graph(network).ordered()


def test_constants_and_scalars_are_seen_through_reshapes() -> None:
    network = trt.RecordedNetwork()
    x = network.add_input("x", trt.float32, (-1, 8))
    eps = seam.constant(network, np.array([1e-5], np.float32))
    shuffle = network.add_shuffle(eps)
    shuffle.reshape_dims = (1, 1)
    total = network.add_elementwise(x, shuffle.outputs[0], trt.ElementWiseOperation.SUM).outputs[0]
    graph = Graph(network)
    assert graph.scalar(shuffle.outputs[0].name) == pytest.approx(1e-5)
    assert graph.is_constant(shuffle.outputs[0].name)
    assert not graph.is_constant(total.name)
    assert graph.scalar(total.name) is None
    static = network.add_shape(eps).outputs[0]
    dynamic = network.add_shape(x).outputs[0]
    graph = Graph(network)
    assert graph.is_constant(static.name)
    assert not graph.is_constant(dynamic.name)
