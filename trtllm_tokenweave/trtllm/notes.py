"""What TensorRT-LLM knows of its network and TensorRT does not tell: plugins' fields, small constants, profiles."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave import recorder, trt
from trtllm_tokenweave.recorder.plugin import FieldValue, PluginKey

#: The dimension that counts the tokens of a step.
TOKENS = "num_tokens"

#: All its names: of token ids and hidden states, of positions, and of the prompt table's tasks (a task a token). Layers
#: combine these inputs token by token, so an optimum that differs between them is none.
_TOKEN_DIMENSIONS = (TOKENS, "position_ids_num_tokens_range", "input_len_task")

#: The dimension that counts the sequences of a step, times beams.
SEQUENCES = "batch_size_beam_width"


def note_layers(net: Any, network: ModuleType) -> None:
    """Tell `trt` the fields of every plugin and the value of every one-element constant of a network.

    No other constant's values are looked at: TensorRT-LLM fills its weights in after the network is complete.

    Args:
        net: TensorRT-LLM's ``Network``.
        network: The module ``tensorrt_llm.network``.
    """
    definition = net.trt_network
    for index in range(definition.num_layers):
        layer, kind = trt.get_layer(definition, index)
        name = str(layer.name)
        if kind in ("PLUGIN_V2", "PLUGIN_V3"):
            info = network.get_plugin_info(definition, name)
            if info is not None:
                trt.note_plugin(definition, name, *plugin_description(info))
        elif kind == "CONSTANT":
            if name in net._unfilled_weights:
                trt.note_constant(definition, name, None)
            elif np.prod(trt.dims_or_none(layer.get_output(0).shape) or (0,), dtype=np.int64) == 1:
                value = _plain(network.get_np_weight(definition, name))
                if value is not None:
                    trt.note_constant(definition, name, value)


def plugin_description(info: Any) -> tuple[PluginKey, dict[str, FieldValue]]:
    """Creator's key and fields of a plugin, from a ``PluginInfo``.

    Fields have the type that this release gave them, also where it differs from the one that is known here:
    attention plugins are made again from these.
    """
    made_by = info.plugin_creator
    key = (str(made_by.name), str(made_by.plugin_version), str(made_by.plugin_namespace))
    creator = recorder.get_plugin_registry().get_creator(*key)
    known = {} if creator is None else {field.name: field for field in creator.spec.fields}
    fields: dict[str, FieldValue] = {}
    for index in range(len(info.pfc)):
        name, kind = str(info.pfc[index].name), str(info.pfc[index].type.name)
        values = np.ravel(info.pfc_as_ndarray[name])
        spec = known.get(name)
        if kind == "CHAR":
            fields[name] = values.tobytes()
        elif spec is not None and spec.type.name == kind and not spec.is_list and values.size == 1:
            fields[name] = values[0].item()
        else:
            fields[name] = values.copy()
    return key, fields


def _plain(array: Any) -> NDArray[Any] | None:
    """An array of numbers; TensorRT-LLM's bfloat16 is two bytes that numpy cannot read."""
    if not isinstance(array, np.ndarray):
        return None
    if array.dtype.kind != "V":
        return array
    bfloat16 = array.dtype.itemsize == 2 and (array.dtype.metadata or {}).get("dtype") == "bfloat16"
    return array.view(ml_dtypes.bfloat16) if bfloat16 else None


@dataclass(frozen=True)
class Profile:
    """One optimisation profile of the network, as ``IOptimizationProfile`` gives it."""

    shapes: dict[str, list[tuple[int, ...]]]

    def get_shape(self, name: str) -> list[tuple[int, ...]]:
        """Minimum, optimum and maximum of an input; nothing where it has none."""
        return self.shapes.get(name, [])

    def first(self, name: str) -> tuple[int, int, int]:
        """Dimension 0 of an input that has a range, at minimum, optimum and maximum."""
        low, optimum, high = (shape[0] for shape in self.shapes[name])
        return low, optimum, high


def profiles(net: Any) -> list[Profile]:
    """The profiles that TensorRT-LLM will add when it builds."""
    inputs = {str(name): tensor.profiles for name, tensor in net._inputs.items() if tensor.profiles}
    count = min((len(ranges) for ranges in inputs.values()), default=0)
    return [
        Profile({name: [tuple(part) for part in (r[i].min, r[i].opt, r[i].max)] for name, r in inputs.items()})
        for i in range(count)
    ]


def counting(net: Any, dimension: str) -> str | None:
    """Name of an input whose first dimension has this name; None where there is none."""
    for name, tensor in net._inputs.items():
        if tensor.profiles and (tensor.profiles[0].dimension_names or [""])[0] == dimension:
            return str(name)
    return None


def set_optimum(net: Any, index: int, tokens: int) -> None:
    """Optimise profile ``index`` for steps of so many tokens: on all inputs that count them, as TensorRT asks."""
    for tensor in net._inputs.values():
        for ranges in tensor.profiles[index : index + 1]:
            for axis, name in enumerate(ranges.dimension_names or ()):
                if name in _TOKEN_DIMENSIONS:
                    ranges.opt[axis] = tokens
