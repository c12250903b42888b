"""Recorded networks on disk: every kind of layer, weights of every dtype, plugins known and unknown, damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.plugin_specs import BATCH_SPLIT, NAMESPACE, VERSION
from trtllm_tokenweave.recorder import NetworkError, RecordedNetwork, TensorDesc
from trtllm_tokenweave.recorder.plugin import PluginKey, PluginRegistry, PluginSpec
from trtllm_tokenweave.recorder.store import load, save
from trtllm_tokenweave.trt import add_plugin

E = trt.ElementWiseOperation


def out(layer: trt.ILayer, index: int = 0) -> trt.ITensor:
    tensor = layer.get_output(index)
    assert tensor is not None
    return tensor


def const(net: RecordedNetwork, values: Any, dtype: Any = np.int64) -> trt.ITensor:
    array = np.asarray(values, dtype)
    return out(net.add_constant(array.shape, array))


def every_layer() -> RecordedNetwork:
    net = RecordedNetwork("every layer")
    x = net.add_input("x", trt.float32, (-1, 8))
    x.set_dimension_name(0, "num_tokens")
    ids = net.add_input("ids", trt.int32, (-1,))
    rows = out(net.add_gather(out(net.add_shape(x)), const(net, [0], np.int32), 0))
    sizes = out(net.add_concatenation([rows, const(net, [4])]))
    sliced = net.add_slice(x, (0, 0), (1, 1), (1, 2))
    sliced.set_input(2, sizes)
    shuffle = net.add_shuffle(out(sliced))
    shuffle.second_transpose = (1, 0)
    picked = net.add_gather(const(net, np.zeros((9, 8)), np.float32), ids, 0)
    none = trt.MatrixOperation.NONE
    net.add_matrix_multiply(out(sliced), none, out(shuffle), none)
    total = out(net.add_elementwise(x, out(picked), E.SUM))
    active = out(net.add_activation(out(net.add_unary(total, trt.UnaryOperation.ABS)), trt.ActivationType.SIGMOID))
    mean = out(net.add_reduce(active, trt.ReduceOperation.AVG, np.int64(2), True))  # type: ignore[arg-type]
    weights = out(net.add_softmax(out(net.add_topk(active, trt.TopKOperation.MIN, 2, 2))))
    flag = out(net.add_elementwise(mean, const(net, [[0.5]], np.float32), E.GREATER))
    chosen = out(net.add_select(flag, weights, const(net, [[1.0, 2.0]], np.float32)))
    fields = {"group": np.array([0, 1], np.int32), "type_id": trt.float32.value}
    gathered = add_plugin(net, ("AllGather", "1", "tensorrt_llm"), "gather", fields, [chosen])
    net.mark_output(out(net.add_cast(out(net.add_identity(gathered.get_output(0))), trt.bfloat16)))
    return net


def described(net: RecordedNetwork) -> list[Any]:
    return [
        (
            type(layer).__name__,
            layer.name,
            [None if t is None else t.name for t in layer.inputs],
            [(t.name, t.dtype, t.shape) for t in layer.outputs],
            {k: getattr(layer, k) for k in layer.ATTRS},
        )
        for layer in net.layers
    ]


def reload(net: RecordedNetwork, folder: Path) -> RecordedNetwork:
    save(net, folder / "net.json")
    return load(folder / "net.json", trt.get_plugin_registry())


def test_round_trip_of_every_layer(tmp_path: Path) -> None:
    net = every_layer()
    again = reload(net, tmp_path)
    assert described(again) == described(net)
    assert again.name == "every layer"
    assert [again.get_input(i).name for i in range(2)] == ["x", "ids"]
    assert again.get_input(0).get_dimension_name(0) == "num_tokens"
    assert again.get_output(0).dtype is trt.bfloat16
    assert {t.name for t in again.shape_tensors} == {t.name for t in net.shape_tensors}
    save(again, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "net.json").read_text()
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "net.safetensors").read_bytes()
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool", "float8_e4m3fn"]
)
def test_weights_come_back_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype)) if dtype in ("bfloat16", "float8_e4m3fn") else np.dtype(dtype)
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(kind)
    net = RecordedNetwork()
    net.mark_output(out(net.add_constant((2, 3), values)))
    constant = reload(net, tmp_path).get_layer(0)
    assert isinstance(constant, trt.IConstantLayer)
    loaded = constant.weights.numpy()
    assert (loaded.dtype, loaded.shape) == (kind, (2, 3))
    assert loaded.tobytes() == values.tobytes()


def test_shapes_only_need_no_weights_file(tmp_path: Path) -> None:
    net = RecordedNetwork()
    net.mark_output(out(net.add_constant((2, 3), trt.Weights(trt.bfloat16, 6))))
    again = reload(net, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.json"]
    constant = again.get_layer(0)
    assert isinstance(constant, trt.IConstantLayer)
    assert (constant.weights.array, constant.weights.size) == (None, 6)


def test_plugin_fields_come_back(tmp_path: Path) -> None:
    plugin = next(x for x in reload(every_layer(), tmp_path).layers if isinstance(x, trt.IPluginV2Layer)).plugin
    assert (plugin.plugin_type, plugin.plugin_version, plugin.plugin_namespace) == ("AllGather", "1", "tensorrt_llm")
    assert np.array_equal(np.asarray(plugin.fields["group"]), [0, 1])
    assert plugin.fields["type_id"] == 0


KEY: PluginKey = ("Custom", "3", "somewhere")


def network_with_unknown_plugin() -> RecordedNetwork:
    spec = PluginSpec(
        *KEY,
        v2=False,
        fields=(),
        outputs=lambda _fields, inputs: [TensorDesc(trt.float16, inputs[0].shape)],
        token_inputs=lambda _fields, _count: frozenset({0}),
        open_fields=True,
    )
    registry = PluginRegistry()
    registry.register(spec)
    creator = registry.get_creator(*KEY)
    assert creator is not None
    fields = [
        trt.PluginField("blob", b"\x00\xff", trt.PluginFieldType.CHAR),
        trt.PluginField("sizes", np.array([1, 2], np.int32), trt.PluginFieldType.INT32),
        trt.PluginField("eps", np.float32(0.5), trt.PluginFieldType.FLOAT32),
    ]
    net = RecordedNetwork()
    x = net.add_input("x", trt.float32, (-1, 8))
    net.mark_output(out(net.add_plugin_v3([x], [], creator.create_plugin("mine", fields))))
    return net


def test_a_plugin_that_nobody_knows_is_opaque(tmp_path: Path) -> None:
    """It keeps its fields and outputs, is never taken for row-wise, and survives another round trip."""
    first = reload(network_with_unknown_plugin(), tmp_path)
    for net in (first, reload(first, tmp_path)):
        layer = net.get_layer(0)
        assert isinstance(layer, trt.IPluginV3Layer)
        assert layer.plugin.spec.key == KEY
        assert layer.plugin.spec.token_inputs({}, 1) == frozenset()
        assert (out(layer).dtype, out(layer).shape) == (trt.float16, (-1, 8))
        assert layer.plugin.fields["blob"] == b"\x00\xff"
        assert np.array_equal(np.asarray(layer.plugin.fields["sizes"]), [1, 2])
        assert layer.plugin.fields["eps"] == 0.5


def _without_its_field(split: dict[str, Any]) -> None:
    del split["plugin"]["fields"]["max_num_tokens"]


def _with_its_former_inputs(split: dict[str, Any]) -> None:
    split["inputs"].append(split["inputs"][-1])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_without_its_field, "field 'max_num_tokens' is missing"),
        (_with_its_former_inputs, "has 7 inputs, expected 6"),
    ],
)
def test_a_batch_split_as_another_release_wove_it_is_refused(tmp_path: Path, edit: Any, message: str) -> None:
    net = RecordedNetwork()
    inputs = [net.add_input(f"x{i}", trt.int32, (-1,)) for i in range(6)]
    key = (BATCH_SPLIT, VERSION, NAMESPACE)
    for tensor in add_plugin(net, key, "split", {"max_num_tokens": 64}, inputs).outputs:
        net.mark_output(tensor)
    path = tmp_path / "net.json"
    save(net, path)
    assert len(load(path).get_layer(0).outputs) == 4
    change(path, lambda document: edit(_first(document, "PLUGIN_V3")))
    with pytest.raises(NetworkError, match=message):
        load(path)


def change(path: Path, edit: Any) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def _first(document: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(r for r in document["layers"] if r["type"] == kind)
    return found


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(format="other"), "is not a recorded network"),
        (lambda d: d.update(version=99), "format version 99"),
        (lambda d: d.pop("layers"), "is damaged: 'layers' is missing"),
        (lambda d: d["layers"].insert(0, "x"), "is damaged: a value is of another kind"),
        (lambda d: d["inputs"][0].update(dtype="COMPLEX"), "is damaged: 'COMPLEX' is missing or not known"),
        (lambda d: _first(d, "SHAPE").update(type="LOOP"), "layer kind 'LOOP' is not recorded"),
        (lambda d: _first(d, "IDENTITY").update(inputs=[999]), "is damaged: a number refers to nothing"),
        (lambda d: _first(d, "CAST")["outputs"][0].update(shape=[1, 1]), "the file says"),
        (lambda d: _first(d, "ELEMENTWISE")["attrs"].update(op="XOR"), "needs BOOL"),
        (lambda d: _first(d, "CONSTANT")["attrs"].update(shape=[5]), "do not fill shape"),
        (lambda d: _first(d, "PLUGIN_V2")["plugin"]["fields"].pop("group"), "field 'group' is missing"),
        (lambda d: d.update(outputs=d["outputs"] * 2), "is an output already"),
        (lambda d: d.update(outputs=[0]), "is a network input"),
        (lambda d: d.update(outputs=[-1]), "is damaged: output -1 is no tensor"),
        (lambda d: d.pop("version"), "has format version None"),
        (lambda d: d.update(version="x"), "has format version 'x'"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, edit: Any, message: str) -> None:
    path = tmp_path / "net.json"
    save(every_layer(), path)
    change(path, edit)
    with pytest.raises(NetworkError, match=message) as caught:
        load(path, trt.get_plugin_registry())
    assert "Error" not in str(caught.value)


def one_constant(value: float) -> RecordedNetwork:
    net = RecordedNetwork()
    net.mark_output(out(net.add_constant((1,), np.full(1, value, np.float32))))
    return net


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("failing", [".json", ".safetensors"])
def test_a_full_disk_changes_neither_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: bool, failing: str
) -> None:
    path = tmp_path / "net.json"
    if older:
        save(one_constant(1), path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    if failing == ".json":
        monkeypatch.setattr(Path, "write_text", full)
    else:
        monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(UserError, match=rf"net{failing}: cannot be written: No space left on device"):
        save(one_constant(2), path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("content", ["a model", "nothing readable"])
def test_weights_of_something_else_are_not_replaced(tmp_path: Path, content: str) -> None:
    weights = tmp_path / "net.safetensors"
    if content == "a model":
        save_file({"0": np.ones(1, np.float32)}, weights, metadata={"format": "pt"})
    else:
        weights.write_bytes(b"not weights at all")
    before = weights.read_bytes()
    with pytest.raises(NetworkError, match="is not marked as the weights of a recorded network"):
        save(one_constant(2), tmp_path / "net.json")
    assert [file.name for file in tmp_path.iterdir()] == [weights.name]
    assert weights.read_bytes() == before


def test_a_saved_network_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    for value in (1, 2):
        assert save(one_constant(value), path) == [path, path.with_suffix(".safetensors")]
    (layer,) = load(path, trt.get_plugin_registry()).layers
    assert isinstance(layer, trt.IConstantLayer)
    assert layer.weights.array is not None
    assert layer.weights.array.tolist() == [2]


def test_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    with pytest.raises(NetworkError, match="cannot be read"):
        load(path, trt.get_plugin_registry())
    path.write_text("[]")
    with pytest.raises(NetworkError, match="is not a recorded network"):
        load(path, trt.get_plugin_registry())
    save(every_layer(), path)
    weights = path.with_suffix(".safetensors")
    weights.write_bytes(weights.read_bytes()[:20])
    with pytest.raises(NetworkError, match="cannot read the weights"):
        load(path, trt.get_plugin_registry())
    weights.unlink()
    with pytest.raises(NetworkError, match="cannot read the weights"):
        load(path, trt.get_plugin_registry())


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    save(every_layer(), path)
    save(one_constant(0), tmp_path / "small.json")
    (tmp_path / "small.safetensors").replace(path.with_suffix(".safetensors"))
    with pytest.raises(NetworkError, match="has no weights of layer"):
        load(path, trt.get_plugin_registry())


def test_a_file_cannot_carry_an_oversized_shape_tensor(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    net = RecordedNetwork()
    entry = out(net.add_gather(const(net, np.arange(64)), const(net, [3], np.int32), 0))
    layer = net.add_shuffle(const(net, np.zeros(3), np.float32))
    layer.set_input(1, entry)
    save(net, path)

    def grow(document: dict[str, Any]) -> None:
        record = document["layers"][0]
        record["attrs"]["shape"], record["outputs"][0]["shape"] = [65], [65]
        record["weights"]["stored"] = False

    change(path, grow)
    with pytest.raises(NetworkError, match="at most 64"):
        load(path, trt.get_plugin_registry())
