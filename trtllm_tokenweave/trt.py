"""The one seam between this package and TensorRT's object model, real or recorded.

Everything that builds or edits networks asks this module for enumerations, constants and plugins, so that it
runs unchanged on a ``tensorrt.INetworkDefinition`` and on a :class:`RecordedNetwork`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave import recorder
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.recorder.plugin import FieldValue, PluginKey
from trtllm_tokenweave.recorder.tensor import Shape


def object_model(network: Any) -> Any:
    """Return the module whose enumerations and registry belong to ``network``."""
    if isinstance(network, recorder.RecordedNetwork):
        return recorder
    import tensorrt

    return tensorrt


def layer_kind(network: Any, layer: Any) -> str:
    """Return the LayerType name of ``layer`` ("ELEMENTWISE"), also for an activation layer."""
    if isinstance(layer, recorder.ILayer):
        return layer.layer_type.name
    return str(object_model(network).ILayer.type.__get__(layer).name)


def constant(
    network: Any, array: NDArray[Any] | None, shape: Shape | None = None, dtype: Any = None, name: str = ""
) -> Any:
    """Add a constant and return its tensor.

    Args:
        network: The network to add to.
        array: Values (kept by reference: the caller keeps them alive), or None for a shape without values.
        shape: Shape when ``array`` is None; else a reshape of the values.
        dtype: DataType of the object model, needed when ``array`` is None.
        name: Layer name.
    """
    trt = object_model(network)
    dims = tuple(array.shape) if shape is None and array is not None else tuple(shape or ())
    if array is None:
        weights = trt.Weights(dtype, int(np.prod(dims, dtype=np.int64)))
    elif trt is recorder:
        weights = trt.Weights(array)
    else:
        kind = getattr(trt.DataType, recorder.dtype_of(array).name)
        weights = trt.Weights(kind, array.ctypes.data, array.size)
    layer = network.add_constant(dims, weights)
    if name:
        layer.name = name
    return layer.get_output(0)


def dims_or_none(dims: Any) -> Shape | None:
    """Dimensions as a tuple, None where they are not set (TensorRT then has Dims of a negative length)."""
    try:
        return None if dims is None else tuple(int(d) for d in dims)
    except ValueError:
        return None


def create_plugin(network: Any, key: PluginKey, name: str, fields: Mapping[str, FieldValue]) -> Any:
    """Create a plugin of a type known to this package from plain field values.

    Raises:
        UserError: when no library has registered the creator, or it refuses the fields.
    """
    trt = object_model(network)
    known = recorder.get_plugin_registry().get_creator(*key)
    registry = trt.get_plugin_registry()
    creator = registry.get_creator(*key) or getattr(registry, "get_plugin_creator", registry.get_creator)(*key)
    if creator is None or known is None:
        raise UserError(
            f"no plugin creator {key[0]!r} version {key[1]} in namespace {key[2]!r}",
            where="plugin registry",
            fix="load the plugin library first",
        )
    listed = {f.name: f.type.name for f in known.spec.fields}
    collection = []
    for field_name, value in fields.items():
        kind = listed.get(field_name) or _type_of(value)
        collection.append(trt.PluginField(field_name, _field_data(value, kind), getattr(trt.PluginFieldType, kind)))
    args = (name, trt.PluginFieldCollection(collection))
    plugin = creator.create_plugin(*args) if known.spec.v2 else creator.create_plugin(*args, trt.TensorRTPhase.BUILD)
    if plugin is None:
        raise UserError(f"creator {key[0]!r} refused the fields of {name!r}", where="plugin registry")
    return plugin


_NUMPY = {"INT8": np.int8, "INT32": np.int32, "INT64": np.int64, "FLOAT32": np.float32}


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
    """Create a plugin and add the layer that runs it; returns the layer, named ``name``."""
    plugin = create_plugin(network, key, name, fields)
    known = recorder.get_plugin_registry().get_creator(*key)
    v2 = known is not None and known.spec.v2
    layer = network.add_plugin_v2(inputs, plugin) if v2 else network.add_plugin_v3(inputs, [], plugin)
    layer.name = name
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
