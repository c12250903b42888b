"""The one seam between this package and TensorRT's object model, real or recorded.

Everything that builds or edits networks asks this module for enumerations, constants and plugins, so that it
runs unchanged on a ``tensorrt.INetworkDefinition`` and on a :class:`RecordedNetwork`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave import recorder
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.recorder.plugin import Fields, FieldValue, PluginKey
from trtllm_tokenweave.recorder.tensor import Shape
from trtllm_tokenweave.tensorrt_module import tensorrt


@dataclass
class _Notes:
    """What TensorRT's Python objects do not tell, or do not keep alive: by layer name, of one network.

    A V3 plugin does not say its type, no plugin its fields; weights given by address are not kept.
    """

    plugins: dict[str, tuple[PluginKey, Fields]] = field(default_factory=dict)
    arrays: dict[str, NDArray[Any] | None] = field(default_factory=dict)


_NOTES: weakref.WeakKeyDictionary[Any, _Notes] = weakref.WeakKeyDictionary()


def _notes(network: Any) -> _Notes:
    return _NOTES.setdefault(network, _Notes())


def object_model(network: Any) -> Any:
    """Return the module whose enumerations and registry belong to ``network``."""
    return recorder if isinstance(network, recorder.RecordedNetwork) else tensorrt()


#: Concrete classes of TensorRT's layers, by LayerType name: ``INetworkDefinition.get_layer`` returns the base class.
_CLASSES = {
    "ACTIVATION": "IActivationLayer",
    "CAST": "ICastLayer",
    "CONCATENATION": "IConcatenationLayer",
    "CONSTANT": "IConstantLayer",
    "ELEMENTWISE": "IElementWiseLayer",
    "GATHER": "IGatherLayer",
    "IDENTITY": "IIdentityLayer",
    "MATRIX_MULTIPLY": "IMatrixMultiplyLayer",
    "PLUGIN_V2": "IPluginV2Layer",
    "PLUGIN_V3": "IPluginV3Layer",
    "REDUCE": "IReduceLayer",
    "SELECT": "ISelectLayer",
    "SHAPE": "IShapeLayer",
    "SHUFFLE": "IShuffleLayer",
    "SLICE": "ISliceLayer",
    "SOFTMAX": "ISoftMaxLayer",
    "TOPK": "ITopKLayer",
    "UNARY": "IUnaryLayer",
}


def get_layer(network: Any, index: int) -> tuple[Any, str]:
    """Layer ``index`` with the attributes of its kind, and that kind: its LayerType name ("ELEMENTWISE")."""
    layer = network.get_layer(index)
    if isinstance(layer, recorder.ILayer):
        return layer, layer.layer_type.name
    trt = object_model(network)
    # Not ``layer.type``: an activation layer's is its function.
    kind = str(trt.ILayer.type.__get__(layer).name)
    if kind in _CLASSES:
        layer.__class__ = getattr(trt, _CLASSES[kind])
    return layer, kind


def note_plugin(network: Any, layer: str, key: PluginKey, fields: Fields) -> None:
    """Remember what the layer of that name runs, for a plugin that was not made by :func:`add_plugin`."""
    if not isinstance(network, recorder.RecordedNetwork):
        _notes(network).plugins[layer] = (key, fields)


def note_constant(network: Any, layer: str, array: NDArray[Any] | None) -> None:
    """Remember the values of a constant that was not made by :func:`constant`; None: it is filled in later.

    What stands in the memory of such a constant by now means nothing, and is never read.
    """
    _notes(network).arrays[layer] = array


def register_plugins(network: Any) -> None:
    """Make the creators of this project's plugins known to the object model of ``network``.

    Raises:
        UserError: the plugin library is missing or does not load.
    """
    if not isinstance(network, recorder.RecordedNetwork):
        from trtllm_tokenweave.plugin_library import plugin_library

        plugin_library()


def plugin_of(network: Any, layer: Any) -> tuple[PluginKey, Fields]:
    """Creator's key and fields of a plugin layer; as far as they are known."""
    noted = _NOTES[network].plugins.get(str(layer.name)) if network in _NOTES else None
    if noted is not None:
        return noted
    plugin = layer.plugin
    key = tuple(str(getattr(plugin, f"plugin_{part}", "")) for part in ("type", "version", "namespace"))
    return (key[0], key[1], key[2]), getattr(plugin, "fields", {})


def constant_values(network: Any, layer: Any) -> NDArray[Any] | None:
    """Values of a constant layer; None where it has none yet, or TensorRT does not hand them out (BF16)."""
    if network in _NOTES and str(layer.name) in _NOTES[network].arrays:
        return _NOTES[network].arrays[str(layer.name)]
    weights = layer.weights
    if isinstance(weights, recorder.Weights):
        return weights.array
    return weights if isinstance(weights, np.ndarray) else None


def constant(
    network: Any, array: NDArray[Any] | None, shape: Shape | None = None, dtype: Any = None, name: str = ""
) -> Any:
    """Add a constant and return its tensor.

    Args:
        network: The network to add to.
        array: Values, kept by reference; or None for a shape without values (recorded networks only).
        shape: Shape when ``array`` is None; else a reshape of the values.
        dtype: DataType of the object model, needed when ``array`` is None.
        name: Layer name.

    Raises:
        UserError: for a constant without values in a TensorRT network.
    """
    trt = object_model(network)
    dims = tuple(array.shape) if shape is None and array is not None else tuple(shape or ())
    held = None
    if trt is recorder:
        weights = trt.Weights(dtype, int(np.prod(dims, dtype=np.int64))) if array is None else trt.Weights(array)
    elif array is None:
        raise UserError("has no values", where=f"constant {name!r}", fix="give the checkpoint's weights")
    else:
        held = np.ascontiguousarray(array)
        kind = getattr(trt.DataType, recorder.dtype_of(held).name)
        weights = trt.Weights(kind, held.ctypes.data, held.size)
    layer = network.add_constant(dims, weights)
    if name:
        layer.name = name
    if held is not None:
        _notes(network).arrays[str(layer.name)] = held
    return layer.get_output(0)


def dims_or_none(dims: Any) -> Shape | None:
    """Dimensions as a tuple, None where they are not set (TensorRT then has Dims of a negative length)."""
    try:
        return None if dims is None else tuple(int(dims[i]) for i in range(len(dims)))
    except ValueError:
        return None


def attribute(layer: Any, name: str) -> Any:
    """An attribute of a layer as a value that compares: Dims and Permutation as tuples, None where not set."""
    value = getattr(layer, name)
    if value is None or isinstance(value, int | float | str) or hasattr(value, "name"):
        return value
    return dims_or_none(value)


def create_plugin(network: Any, key: PluginKey, name: str, fields: Mapping[str, FieldValue]) -> Any:
    """Create a plugin of a type known to this package from plain field values.

    Raises:
        UserError: when no library has registered the creator, or it refuses the fields.
    """
    return _create(network, key, name, fields)[0]


def _create(network: Any, key: PluginKey, name: str, fields: Mapping[str, FieldValue]) -> tuple[Any, recorder.Plugin]:
    """The plugin, and the same as a recorded network has it: its fields are checked and complete."""
    recorded_creator = recorder.get_plugin_registry().get_creator(*key)
    if recorded_creator is None:
        raise _no_creator(key)
    typed = plugin_fields(key, fields)  # held until the plugin is made: TensorRT's PluginField keeps an address only
    recorded = recorded_creator.create_plugin(name, typed)
    trt = object_model(network)
    if trt is recorder:
        return recorded, recorded
    registry = trt.get_plugin_registry()
    creator = registry.get_creator(*key)
    if creator is None:
        raise _no_creator(key)
    collection = trt.PluginFieldCollection(
        # TensorRT knows no field without data: an empty one is left out, and so takes its default.
        [trt.PluginField(f.name, f.data, getattr(trt.PluginFieldType, f.type.name)) for f in typed if len(f.data)]
    )
    args = (name, collection)
    plugin = creator.create_plugin(*args) if recorded.spec.v2 else creator.create_plugin(*args, trt.TensorRTPhase.BUILD)
    if plugin is None:
        fix = "see the plugin library's message in TensorRT's log"
        raise UserError(f"creator {key[0]!r} refused the fields of {name!r}", where="plugin registry", fix=fix)
    return plugin, recorded


def plugin_fields(key: PluginKey, fields: Mapping[str, FieldValue]) -> list[recorder.PluginField]:
    """The fields of a plugin with the types that its creator expects."""
    creator = recorder.get_plugin_registry().get_creator(*key)
    listed = {} if creator is None else {f.name: f.type.name for f in creator.spec.fields}
    kinds = {name: _own_type(value) or listed.get(name) or _type_of(value) for name, value in fields.items()}
    types = recorder.PluginFieldType
    return [recorder.PluginField(n, _field_data(v, kinds[n]), types[kinds[n]]) for n, v in fields.items()]


def _no_creator(key: PluginKey) -> UserError:
    what = f"no plugin creator {key[0]!r} version {key[1]} in namespace {key[2]!r}"
    return UserError(what, where="plugin registry", fix="load the plugin library first")


_NUMPY = {"INT8": np.int8, "INT32": np.int32, "INT64": np.int64, "FLOAT32": np.float32}


def _own_type(value: FieldValue) -> str:
    """Type of a field whose value tells: an array of one of the types that releases of TensorRT-LLM differ in."""
    dtype = value.dtype if isinstance(value, np.ndarray) else None
    return next((kind for kind, own in _NUMPY.items() if kind != "INT64" and dtype == own), "")


def _type_of(value: FieldValue) -> str:
    """Type of a field that this package's description of the plugin does not list."""
    if isinstance(value, bytes):
        return "CHAR"
    return "FLOAT32" if np.asarray(value).dtype.kind == "f" else "INT32"


def _field_data(value: FieldValue, kind: str) -> Any:
    if isinstance(value, bytes):
        return value
    return np.atleast_1d(np.asarray(value, dtype=_NUMPY[kind]))


def add_plugin(network: Any, key: PluginKey, name: str, fields: Mapping[str, FieldValue], inputs: list[Any]) -> Any:
    """Create a plugin and add the layer that runs it; returns the layer, named ``name``.

    Raises:
        UserError: as `create_plugin`, or the layer is refused, or its name.
    """
    plugin, recorded = _create(network, key, name, fields)
    layer = network.add_plugin_v2(inputs, plugin) if recorded.spec.v2 else network.add_plugin_v3(inputs, [], plugin)
    if layer is None:
        raise UserError(f"plugin {key[0]!r} refused its inputs", where=f"layer {name}", fix="see TensorRT's log")
    layer.name = name
    if layer.name != name:  # TensorRT's way to refuse it, and a line in its log
        what = f"another layer has this name: TensorRT keeps {layer.name!r}"
        raise UserError(what, where=f"layer {name}", fix="give every layer a name of its own")
    note_plugin(network, name, key, recorded.fields)
    return layer


def redirect(network: Any, graph: Any, name: str, new: Any, keep: frozenset[str]) -> None:
    """Let every live reader of the tensor ``name`` read ``new`` instead, except the layers named in ``keep``.

    A network output moves along under its old name, in its old place among the outputs.
    """
    old = graph.tensors[name]
    for reader, position in graph.live_readers(name):
        if reader.name not in keep:
            reader.layer.set_input(position, new)
    if name in graph.outputs:
        outputs = [network.get_output(i) for i in range(network.num_outputs)]
        for tensor in outputs:
            network.unmark_output(tensor)
        old.name, new.name = f"{graph.producer[name].name}/{name}", name
        for tensor in outputs:
            network.mark_output(new if tensor is old else tensor)
