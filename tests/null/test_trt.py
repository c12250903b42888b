"""The seam to the object model: on the recorded one, and on a small double of TensorRT's."""

from __future__ import annotations

import ctypes
import gc
import types
import weakref
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave import trt as seam
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.recorder.tensor import NetworkError
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


class FakeTensorRT(types.ModuleType):
    """The names of TensorRT's module that the seam touches, with TensorRT's habits that recorded networks lack."""

    def __init__(self) -> None:
        super().__init__("tensorrt")
        self.created: list[tuple[str, dict[str, Any], bool]] = []
        self.refuse = False
        self.DataType, self.PluginFieldType, self.TensorRTPhase = trt.DataType, trt.PluginFieldType, trt.TensorRTPhase
        self.ILayer = _Layer
        self.IActivationLayer, self.IPluginV3Layer, self.IConstantLayer = _Activation, _PluginV3, _Constant
        self.PluginField = lambda name, data, kind: (name, data, kind)
        self.PluginFieldCollection = list

    def get_plugin_registry(self) -> Any:
        def create(name: str, fields: list[Any], phase: Any = None) -> Any:
            self.created.append((name, {f[0]: f[1] for f in fields}, phase is not None))
            return None if self.refuse else object()

        known = ("AllReduce", "AllReduceRmsNorm", "StreamJoin")
        creator = SimpleNamespace(create_plugin=create)
        return SimpleNamespace(get_creator=lambda name, *_: creator if name in known else None)

    class Weights:
        """By address: keeps nothing alive."""

        def __init__(self, dtype: Any, address: int, size: int) -> None:
            self.dtype, self.address, self.size = dtype, address, size


class _Layer:
    """A layer as ``get_layer`` returns it: of the base class, whatever its kind."""

    def __init__(self, kind: str, name: str = "") -> None:
        self.kind, self.name = kind, name

    @property
    def type(self) -> Any:
        return SimpleNamespace(name=self.kind)

    def get_output(self, index: int) -> Any:
        return SimpleNamespace(name=f"{self.name}/{index}", dtype=trt.int32, shape=(1,))


class _Activation(_Layer):
    @property
    def type(self) -> Any:
        return SimpleNamespace(name="RELU")


class _PluginV3(_Layer):
    plugin = object()


class _Constant(_Layer):
    weights: Any = None


class _Network:
    """An ``INetworkDefinition`` that adds constants and plugins."""

    def __init__(self, *layers: _Layer) -> None:
        self.layers = list(layers)

    def get_layer(self, index: int) -> _Layer:
        return self.layers[index]

    def add_constant(self, _shape: tuple[int, ...], weights: Any) -> _Layer:
        layer = _Layer("CONSTANT", f"(Unnamed Layer* {len(self.layers)})")
        layer.weights = weights  # type: ignore[attr-defined]
        self.layers.append(layer)
        return layer

    def add_plugin_v3(self, inputs: list[Any], _shapes: list[Any], _plugin: Any) -> _Layer | None:
        if not inputs:
            return None
        self.layers.append(_Layer("PLUGIN_V3"))
        return self.layers[-1]


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    fake = FakeTensorRT()
    monkeypatch.setattr(seam, "tensorrt", lambda: fake)
    return fake


@pytest.mark.usefixtures("tensorrt")
def test_layers_of_tensorrt_get_the_class_of_their_kind() -> None:
    network = _Network(_Layer("ACTIVATION"), _Layer("CONVOLUTION"))
    layer, kind = seam.get_layer(network, 0)
    assert (type(layer), kind) == (_Activation, "ACTIVATION")
    assert seam.get_layer(network, 0)[1] == "ACTIVATION"  # The typed layer's own ``type`` is its function.
    assert type(seam.get_layer(network, 1)[0]) is _Layer


@pytest.mark.usefixtures("tensorrt")
def test_weights_of_tensorrt_are_kept_alive_and_read_back() -> None:
    network, array = _Network(), np.arange(6, dtype=ml_dtypes.bfloat16)
    held = weakref.ref(array)
    seam.constant(network, array, name="w")
    seam.constant(network, array[::2])
    del array
    gc.collect()
    assert held() is not None
    values = seam.constant_values(network, network.layers[0])
    assert values is not None
    assert values.tolist() == [0, 1, 2, 3, 4, 5]
    every_second = network.layers[1].weights  # type: ignore[attr-defined]
    assert (every_second.size, ctypes.cast(every_second.address, ctypes.POINTER(ctypes.c_uint16))[1]) == (3, 0x4000)
    del network, values
    gc.collect()
    assert held() is None


@pytest.mark.usefixtures("tensorrt")
def test_a_constant_of_tensorrt_needs_values() -> None:
    with pytest.raises(UserError, match="constant 'w': has no values"):
        seam.constant(_Network(), None, (2, 2), trt.bfloat16, "w")


@pytest.mark.parametrize(("weights", "expected"), [(np.ones(1), [1.0]), (object(), None)])
@pytest.mark.usefixtures("tensorrt")
def test_values_that_tensorrt_does_not_hand_out(weights: Any, expected: Any) -> None:
    layer = _Constant("CONSTANT", "eps")
    layer.weights = weights
    values = seam.constant_values(_Network(), layer)
    assert expected == (None if values is None else values.tolist())


JOIN = ("StreamJoin", "1", "tokenweave")
JOIN_FIELDS: dict[str, Any] = {"num_aliased": 2, "site": 3, "half": 1}


def test_what_a_plugin_of_tensorrt_runs_is_remembered(tensorrt: FakeTensorRT) -> None:
    network = _Network()
    layer = seam.add_plugin(network, JOIN, "join", JOIN_FIELDS, [object()])
    typed, kind = seam.get_layer(network, 0)
    assert (typed, kind) == (layer, "PLUGIN_V3")
    assert seam.plugin_of(network, layer) == (JOIN, JOIN_FIELDS | {"waits": 0})
    assert seam.plugin_of(_Network(), layer) == (("", "", ""), {})
    assert tensorrt.created[0][2]  # A V3 creator is told the phase.
    seam.note_plugin(network, "other", ALL_REDUCE, {"group": np.arange(2)})
    assert seam.plugin_of(network, _PluginV3("PLUGIN_V2", "other"))[0] == ALL_REDUCE


class _Stubborn(_Layer):
    """A layer that keeps its name, as TensorRT's do when another layer has the new one: a line in the log says so."""

    def __setattr__(self, attribute: str, value: Any) -> None:
        if attribute != "name" or not hasattr(self, "name"):
            super().__setattr__(attribute, value)


def test_a_name_that_tensorrt_refuses_changes_no_notes(tensorrt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    network = _Network()
    layer = seam.add_plugin(network, JOIN, "join", JOIN_FIELDS, [object()])
    monkeypatch.setattr(network, "add_plugin_v3", lambda *_: _Stubborn("PLUGIN_V3", "old"))
    with pytest.raises(UserError, match=r"layer join: another layer has this name: TensorRT keeps 'old'\. Fix: give"):
        seam.add_plugin(network, JOIN, "join", JOIN_FIELDS | {"site": 9}, [object()])
    assert seam.plugin_of(network, layer)[1]["site"] == 3


def test_a_plugin_is_made_once(tensorrt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    typed: list[str] = []
    real = seam.plugin_fields

    def plugin_fields(key: Any, fields: Any) -> Any:
        typed.append(key[0])
        return real(key, fields)

    monkeypatch.setattr(seam, "plugin_fields", plugin_fields)
    seam.add_plugin(_Network(), JOIN, "join", JOIN_FIELDS, [object()])
    assert typed == ["StreamJoin"]
    assert [fields for _, fields, _ in tensorrt.created] == [JOIN_FIELDS]


def test_an_empty_field_is_left_out(tensorrt: FakeTensorRT) -> None:
    fields: dict[str, Any] = dict.fromkeys(("tp_rank", "type_id", "kind", "site", "half", "weave_hash"), 0)
    fields |= {"group": np.arange(2), "eps": 0.0}
    seam.create_plugin(_Network(), ("AllReduceRmsNorm", "1", "tokenweave"), "start", fields | {"table": b""})
    assert "table" not in tensorrt.created[0][1]


def test_refusals_of_tensorrt(tensorrt: FakeTensorRT) -> None:
    with pytest.raises(UserError, match="'StreamJoin' refused its inputs"):
        seam.add_plugin(_Network(), JOIN, "join", JOIN_FIELDS, [])
    with pytest.raises(NetworkError, match="field 'half' = 7 is outside"):
        seam.create_plugin(_Network(), JOIN, "join", JOIN_FIELDS | {"half": 7})
    tensorrt.refuse = True
    with pytest.raises(UserError, match="creator 'StreamJoin' refused the fields of 'join'"):
        seam.create_plugin(_Network(), JOIN, "join", JOIN_FIELDS)
    with pytest.raises(UserError, match="no plugin creator 'Gemm'"):
        seam.create_plugin(_Network(), ("Gemm", "1", "tokenweave"), "gemm", {"type_id": 0, "transb": 1, "kind": 1})


class _Unset:
    """Dims that are not set: their length is negative."""

    def __len__(self) -> int:
        return -1


@pytest.mark.parametrize(
    ("value", "expected"),
    [(_Unset(), None), ([2, 3], (2, 3)), (None, None), (4, 4), (trt.DataType.HALF, trt.DataType.HALF)],
)
def test_attributes_compare(value: Any, expected: Any) -> None:
    assert seam.attribute(SimpleNamespace(x=value), "x") == expected
