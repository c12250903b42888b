"""TensorRT's network object model in memory, under the names of the ``tensorrt`` Python module.

``import trtllm_tokenweave.recorder as trt`` reads like code written for TensorRT: enumerations, ``add_*``
methods, plugin registry. See :class:`RecordedNetwork`.
"""

from __future__ import annotations

from functools import cache

from trtllm_tokenweave.recorder.enums import (
    ActivationType,
    DataType,
    ElementWiseOperation,
    GatherMode,
    LayerType,
    MatrixOperation,
    NetworkDefinitionCreationFlag,
    PluginFieldType,
    ReduceOperation,
    SampleMode,
    TensorLocation,
    TensorRTPhase,
    TopKOperation,
    UnaryOperation,
    dtype_of,
    numpy_dtype,
)
from trtllm_tokenweave.recorder.layers import (
    IActivationLayer,
    ICastLayer,
    IConcatenationLayer,
    IConstantLayer,
    IElementWiseLayer,
    IGatherLayer,
    IIdentityLayer,
    ILayer,
    IMatrixMultiplyLayer,
    IReduceLayer,
    ISelectLayer,
    IShapeLayer,
    IShuffleLayer,
    ISliceLayer,
    ISoftMaxLayer,
    ITopKLayer,
    IUnaryLayer,
)
from trtllm_tokenweave.recorder.network import RecordedNetwork
from trtllm_tokenweave.recorder.plugin import (
    FieldSpec,
    IPluginV2Layer,
    IPluginV3Layer,
    Plugin,
    PluginCreator,
    PluginField,
    PluginFieldCollection,
    PluginRegistry,
    PluginSpec,
)
from trtllm_tokenweave.recorder.store import load, save
from trtllm_tokenweave.recorder.tensor import ITensor, NetworkError, TensorDesc, Weights

float32 = DataType.FLOAT
float16 = DataType.HALF
bfloat16 = DataType.BF16
int32 = DataType.INT32
int64 = DataType.INT64
int8 = DataType.INT8
bool = DataType.BOOL  # noqa: A001


@cache
def get_plugin_registry() -> PluginRegistry:
    """Return the registry of every plugin type this package knows: its own and TensorRT-LLM's."""
    from trtllm_tokenweave.plugin_specs import SPECS
    from trtllm_tokenweave.recorder.trtllm_plugins import SPECS as TRTLLM_SPECS

    registry = PluginRegistry()
    for spec in (*SPECS, *TRTLLM_SPECS):
        registry.register(spec)
    return registry


__all__ = [
    "ActivationType",
    "DataType",
    "ElementWiseOperation",
    "FieldSpec",
    "GatherMode",
    "IActivationLayer",
    "ICastLayer",
    "IConcatenationLayer",
    "IConstantLayer",
    "IElementWiseLayer",
    "IGatherLayer",
    "IIdentityLayer",
    "ILayer",
    "IMatrixMultiplyLayer",
    "IPluginV2Layer",
    "IPluginV3Layer",
    "IReduceLayer",
    "ISelectLayer",
    "IShapeLayer",
    "IShuffleLayer",
    "ISliceLayer",
    "ISoftMaxLayer",
    "ITensor",
    "ITopKLayer",
    "IUnaryLayer",
    "LayerType",
    "MatrixOperation",
    "NetworkDefinitionCreationFlag",
    "NetworkError",
    "Plugin",
    "PluginCreator",
    "PluginField",
    "PluginFieldCollection",
    "PluginFieldType",
    "PluginRegistry",
    "PluginSpec",
    "RecordedNetwork",
    "ReduceOperation",
    "SampleMode",
    "TensorDesc",
    "TensorLocation",
    "TensorRTPhase",
    "TopKOperation",
    "UnaryOperation",
    "Weights",
    "bfloat16",
    "bool",
    "dtype_of",
    "float16",
    "float32",
    "get_plugin_registry",
    "int32",
    "int64",
    "int8",
    "load",
    "numpy_dtype",
    "save",
]
