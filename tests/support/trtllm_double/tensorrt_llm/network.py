from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from trtllm_tokenweave import recorder
from trtllm_tokenweave.trt import plugin_fields

from ._strict import Strict, seal
from .functional import Tensor

_NP_BFLOAT16 = np.dtype("V2", metadata={"dtype": "bfloat16"})
_PLUGIN_INFOS: weakref.WeakKeyDictionary[Any, dict[str, PluginInfo]] = weakref.WeakKeyDictionary()


class PluginInfo(Strict):
    def __init__(self, plugin: recorder.Plugin) -> None:
        key = plugin.spec.key
        self.plugin_creator = SimpleNamespace(name=key[0], plugin_version=key[1], plugin_namespace=key[2])
        self.pfc = plugin_fields(key, plugin.fields)
        self.pfc_as_ndarray = {
            field.name: np.frombuffer(field.data, np.int8) if isinstance(field.data, bytes) else np.asarray(field.data)
            for field in self.pfc
        }


class Network(Strict):
    def __init__(self, definition: Any) -> None:
        self._double_definition = definition
        self._inputs: dict[str, Tensor] = {}
        self._unfilled_weights: dict[str, Any] = {}

    @property
    def trt_network(self) -> Any:
        return self._double_definition

    def _double_complete(self) -> None:
        """What `constant` and `_add_plugin_info` of TensorRT-LLM do layer by layer."""
        for layer in self._double_definition.layers:
            if isinstance(layer, recorder.IConstantLayer) and layer.weights.array is None:
                self._unfilled_weights[layer.name] = (None, None)
        infos = {x.name: PluginInfo(x.plugin) for x in self._double_definition.layers if hasattr(x, "plugin")}
        _PLUGIN_INFOS[self._double_definition] = infos


def get_plugin_info(trt_network: Any, layer_name: str) -> PluginInfo | None:
    return _PLUGIN_INFOS.get(trt_network, {}).get(layer_name)


def get_np_weight(trt_network: Any, layer_name: str) -> Any:
    layer = next(layer for layer in trt_network.layers if layer.name == layer_name)
    array = layer.weights.array
    return array.view(_NP_BFLOAT16) if array is not None and array.dtype == ml_dtypes.bfloat16 else array


seal(__name__)
