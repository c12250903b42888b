"""Recorded networks on disk: ``NAME.json`` (structure) beside ``NAME.safetensors`` (weights, if any)."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.atomic import check_target, replace_files
from trtllm_tokenweave.errors import CHECK_PATH, check_kind
from trtllm_tokenweave.recorder import enums
from trtllm_tokenweave.recorder import layers as L  # noqa: N812
from trtllm_tokenweave.recorder.network import RecordedNetwork
from trtllm_tokenweave.recorder.plugin import (
    IPluginV2Layer,
    IPluginV3Layer,
    Plugin,
    PluginField,
    PluginKey,
    PluginRegistry,
    opaque_spec,
)
from trtllm_tokenweave.recorder.tensor import ITensor, NetworkError, TensorDesc, Weights, check_shape_tensor
from trtllm_tokenweave.topology import producers_first

FORMAT = "trtllm_tokenweave.network"
FORMAT_VERSION = 1
_LAYER_CLASSES: dict[str, type[L.ILayer]] = {
    cls.layer_type.name: cls
    for cls in (
        L.IConstantLayer, L.ICastLayer, L.IIdentityLayer, L.IActivationLayer, L.IElementWiseLayer, L.IUnaryLayer,
        L.IReduceLayer, L.ISoftMaxLayer, L.ITopKLayer, L.IMatrixMultiplyLayer, L.IConcatenationLayer,
        L.IShuffleLayer, L.ISliceLayer, L.IGatherLayer, L.IShapeLayer, L.ISelectLayer, IPluginV2Layer, IPluginV3Layer,
    )
}  # fmt: skip
_ENUMS: dict[str, type[enum.Enum]] = {
    "to_type": enums.DataType,
    "activation": enums.ActivationType,
    "op0": enums.MatrixOperation,
    "op1": enums.MatrixOperation,
}
#: Dtype names of the safetensors format.
_STORED_DTYPES = {
    "F32": "FLOAT",
    "F16": "HALF",
    "BF16": "BF16",
    "I64": "INT64",
    "I32": "INT32",
    "I8": "INT8",
    "U8": "UINT8",
    "BOOL": "BOOL",
    "F8_E4M3": "FP8",
}
_OPS: dict[str, type[enum.Enum]] = {
    "ELEMENTWISE": enums.ElementWiseOperation,
    "UNARY": enums.UnaryOperation,
    "REDUCE": enums.ReduceOperation,
    "TOPK": enums.TopKOperation,
    "GATHER": enums.GatherMode,
    "SLICE": enums.SampleMode,
}


def _desc(tensor: ITensor) -> dict[str, Any]:
    return {"name": tensor.name, "dtype": tensor.dtype.name, "shape": list(tensor.shape)}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": value.dtype.name}
    if isinstance(value, np.generic):
        return value.item()
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _producers_first(network: RecordedNetwork) -> list[L.ILayer]:
    """All layers, each after those whose outputs it reads: ``set_input`` may have put a newer layer in front."""
    return producers_first({layer: layer.producers() for layer in network.layers})


def save(network: RecordedNetwork, path: str | Path) -> list[Path]:
    """Write ``path`` (``NAME.json``) and, where constants have values, ``NAME.safetensors`` beside it.

    Both files are written aside before either is renamed, so that a good pair is never half replaced.

    Returns:
        The files written.

    Raises:
        UserError: when it is no recorded network, the name does not end in ``.json``, a file cannot be written, or the
            weights would replace those of something else.
    """
    check_kind(network, ("a RecordedNetwork", RecordedNetwork), where="network")
    path = Path(path)
    if path.suffix != ".json":
        raise NetworkError("the name of a recorded network ends in .json", where=str(path))
    check_target(path)
    ids = {network.get_input(i): i for i in range(network.num_inputs)}
    records: list[dict[str, Any]] = []
    arrays: dict[str, NDArray[Any]] = {}
    for position, layer in enumerate(_producers_first(network)):
        for tensor in layer.outputs:
            ids[tensor] = len(ids)
        record: dict[str, Any] = {
            "type": layer.layer_type.name,
            "name": layer.name,
            "inputs": [-1 if t is None else ids[t] for t in layer.inputs],
            "attrs": {key: _plain(getattr(layer, key)) for key in layer.ATTRS},
            "outputs": [_desc(t) for t in layer.outputs],
        }
        if isinstance(layer, L.IConstantLayer):
            record["weights"] = {"dtype": layer.weights.dtype.name, "stored": layer.weights.array is not None}
            if layer.weights.array is not None:
                arrays[str(position)] = layer.weights.array
        if isinstance(layer, IPluginV2Layer | IPluginV3Layer):
            record["plugin"] = {
                "key": list(layer.plugin.spec.key),
                "name": layer.plugin.name,
                "fields": {k: _plain(v) for k, v in layer.plugin.fields.items()},
            }
        records.append(record)
    inputs = [_desc(t) | {"dims": {str(i): n for i, n in t._dims.items()}} for t in ids if t.is_network_input]
    document = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "name": network.name,
        "inputs": inputs,
        "layers": records,
        "outputs": [ids[network.get_output(i)] for i in range(network.num_outputs)],
    }
    files: list[tuple[Path, Callable[[Path], object]]] = [(path, lambda aside: aside.write_text(json.dumps(document)))]
    if arrays:
        weights = path.with_suffix(".safetensors")
        _check_replaceable(weights)
        files.append((weights, lambda aside: _save_arrays(arrays, aside, weights)))
    replace_files(files)
    return [file for file, _ in files]


def _check_replaceable(path: Path) -> None:
    """Refuse to replace weights that are not marked as a recorded network's: a model's, perhaps."""
    from safetensors import SafetensorError, safe_open

    check_target(path)
    if not path.exists():
        return
    try:
        with safe_open(path, framework="numpy") as file:
            ours = (file.metadata() or {}).get("format") == FORMAT
    except (OSError, SafetensorError):
        ours = False
    if not ours:
        what = "exists, and is not marked as the weights of a recorded network"
        raise NetworkError(what, where=str(path), fix="give the network another name, or remove the file")


def _save_arrays(arrays: dict[str, NDArray[Any]], aside: Path, path: Path) -> None:
    """Write what will become ``path``."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    packed = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
    try:
        save_file(packed, aside, metadata={"format": FORMAT})
    except SafetensorError as error:
        raise NetworkError(f"cannot be written: {error}", where=str(path)) from None


def _load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    from safetensors import SafetensorError, deserialize

    try:
        entries: list[tuple[str, Any]] = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError) as error:
        raise NetworkError(f"cannot read the weights: {error}", where=str(path)) from None
    out = {}
    for key, entry in entries:
        dtype = enums.numpy_dtype(enums.DataType[_STORED_DTYPES[entry["dtype"]]])
        out[key] = np.frombuffer(entry["data"], dtype=dtype).reshape(entry["shape"])
    return out


def load(path: str | Path, registry: PluginRegistry | None = None) -> RecordedNetwork:
    """Read a network written by :func:`save`; every rule of the object model is checked again.

    Args:
        path: The JSON file.
        registry: Plugin types; by default all that this package knows. Others are kept, but never taken for row-wise.

    Raises:
        NetworkError: for a file that is missing, not a network, of a newer version, or inconsistent.
    """
    path = Path(path)
    if registry is None:
        from trtllm_tokenweave.recorder import get_plugin_registry

        registry = get_plugin_registry()
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise NetworkError(what, where=str(path), fix=CHECK_PATH) from None
    except (ValueError, RecursionError) as error:
        raise NetworkError(f"is not JSON: {error}", where=str(path), fix="save the network again") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise NetworkError("is not a recorded network", where=str(path))
    format_version = document.get("version")
    if not isinstance(format_version, int) or format_version < 1:
        raise NetworkError(f"has format version {format_version!r}, expected a number", where=str(path))
    if format_version > FORMAT_VERSION:
        raise NetworkError(
            f"has format version {format_version}, this release reads up to {FORMAT_VERSION}",
            where=str(path),
            fix="upgrade trtllm_tokenweave",
        )
    try:
        return _build(document, path, registry)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise NetworkError(f"is damaged: {_fault(error)}", where=str(path)) from None


def _fault(error: Exception) -> str:
    """What a file must have wrong to end in an exception of Python."""
    if isinstance(error, KeyError):
        return f"{error} is missing or not known"
    if isinstance(error, AttributeError | TypeError):
        return "a value is of another kind than expected (text, number, list or section)"
    return "a number refers to nothing" if isinstance(error, IndexError) else str(error)


def _build(document: dict[str, Any], path: Path, registry: PluginRegistry) -> RecordedNetwork:
    network = RecordedNetwork(document["name"])
    tensors: list[ITensor] = []
    for entry in document["inputs"]:
        tensor = network.add_input(entry["name"], enums.DataType[entry["dtype"]], entry["shape"])
        for index, name in entry["dims"].items():
            tensor.set_dimension_name(int(index), name)
        tensors.append(tensor)
    needed = any(r.get("weights", {}).get("stored") for r in document["layers"])
    arrays = _load_arrays(path.with_suffix(".safetensors")) if needed else {}
    for index, record in enumerate(document["layers"]):
        stored = bool(record.get("weights", {}).get("stored"))
        array = arrays.get(str(index)) if stored else None
        if stored and array is None:
            raise NetworkError(f"has no weights of layer {record['name']}", where=str(path.with_suffix(".safetensors")))
        try:
            layer = _layer(network, record, tensors, array, registry)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            where = f"{path}: layer {record.get('name', index)}"
            raise NetworkError(f"is damaged: {_fault(error)}", where=where) from None
        layer.name = record["name"]
        for tensor, entry in zip(layer.outputs, record["outputs"], strict=True):
            if (tensor.dtype.name, list(tensor.shape)) != (entry["dtype"], entry["shape"]):
                layer.fail(f"puts out {tensor!r}, the file says {entry}")
            tensor.name = entry["name"]
        tensors.extend(layer.outputs)
    for output in document["outputs"]:
        if not 0 <= output < len(tensors):
            raise ValueError(f"output {output} is no tensor")
        network.mark_output(tensors[output])
    return network


def _layer(
    network: RecordedNetwork,
    record: dict[str, Any],
    tensors: list[ITensor],
    array: NDArray[Any] | None,
    registry: PluginRegistry,
) -> L.ILayer:
    kind = record["type"]
    cls = _LAYER_CLASSES.get(kind)
    if cls is None:
        raise NetworkError(f"layer kind {kind!r} is not recorded", where=f"layer {record['name']}")
    inputs = [None if i < 0 else tensors[i] for i in record["inputs"]]
    attrs: dict[str, Any] = {}
    for key, value in record["attrs"].items():
        enumeration = _ENUMS.get(key) or (_OPS.get(kind) if key in ("op", "mode") else None)
        attrs[key] = enumeration[value] if enumeration else tuple(value) if isinstance(value, list) else value
    if cls is L.IConcatenationLayer:
        attrs["axis_given"] = True
    if cls is L.IConstantLayer:
        dtype = enums.DataType[record["weights"]["dtype"]]
        count = int(np.prod(attrs["shape"], dtype=np.int64))
        attrs["weights"] = Weights(dtype, count) if array is None else Weights(array)
    if "plugin" in record:
        attrs["plugin"] = _plugin(record, kind == "PLUGIN_V2", registry)
    layer = cls(network, [], **attrs)
    layer.inputs = list(inputs)
    for position in cls.SHAPE_INPUTS:
        tensor = layer.get_input(position)
        if tensor is not None:
            check_shape_tensor(tensor, network)
    return network.adopt(layer)


def _plugin(record: dict[str, Any], v2: bool, registry: PluginRegistry) -> Plugin:
    entry = record["plugin"]
    key: PluginKey = tuple(entry["key"])
    fields: list[PluginField] = []
    creator = registry.get_creator(*key)
    types = {} if creator is None else {f.name: f.type for f in creator.spec.fields}
    for name, value in entry["fields"].items():
        if isinstance(value, dict) and "bytes" in value:
            fields.append(PluginField(name, bytes.fromhex(value["bytes"]), enums.PluginFieldType.CHAR))
            continue
        data = np.array(value["array"], value["dtype"]) if isinstance(value, dict) else np.array(value)
        fields.append(PluginField(name, data, types.get(name, enums.PluginFieldType.UNKNOWN)))
    if creator is None:
        outputs = [TensorDesc(enums.DataType[o["dtype"]], tuple(o["shape"])) for o in record["outputs"]]
        from trtllm_tokenweave.recorder.plugin import PluginCreator

        creator = PluginCreator(opaque_spec(key, v2, outputs))
    return creator.create_plugin(entry["name"], fields)
