"""Plugins of a recorded network: what their creators accept, and what their layers put out.

A plugin type is described by data (:class:`PluginSpec`); there is no plugin code here. Kernels for the
interpreter are registered elsewhere, under the same (name, version, namespace).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.recorder.enums import LayerType, PluginFieldType, TensorRTPhase
from trtllm_tokenweave.recorder.layers import ILayer
from trtllm_tokenweave.recorder.tensor import NetworkError, TensorDesc

Scalar = int | float
FieldValue = Scalar | bytes | NDArray[Any]
Fields = Mapping[str, FieldValue]
PluginKey = tuple[str, str, str]

#: Numbers that a field may hold; CHAR fields hold bytes.
FIELD_DTYPES = {
    PluginFieldType.INT8: np.int8,
    PluginFieldType.INT32: np.int32,
    PluginFieldType.INT64: np.int64,
    PluginFieldType.FLOAT32: np.float32,
}


class PluginField:
    """A named attribute for a creator: numpy data (or bytes for CHAR) and its type."""

    def __init__(self, name: str, data: Any, type: PluginFieldType = PluginFieldType.UNKNOWN) -> None:  # noqa: A002
        self.name = name
        self.type = type
        self.data: bytes | NDArray[Any] = data if isinstance(data, bytes) else np.asarray(data)


class PluginFieldCollection(list[PluginField]):
    """The attributes handed to ``create_plugin``."""


@dataclass(frozen=True)
class FieldSpec:
    """One attribute: its type, whether it may be absent, whether it is a list, and the values it may take."""

    name: str
    type: PluginFieldType
    default: FieldValue | None = None
    is_list: bool = False
    low: float | None = None
    high: float | None = None
    choices: frozenset[Scalar] = frozenset()

    @property
    def required(self) -> bool:
        """An attribute without a default must be given."""
        return self.default is None

    def convert(self, given: PluginField, where: str) -> FieldValue:
        """Check one given field and return its value.

        Raises:
            NetworkError: for a wrong type, length or value; names the plugin and the field.
        """
        if given.type is not self.type:
            what = f"field {self.name!r} has type {given.type.name}, expected {self.type.name}"
            raise NetworkError(what, where=where)
        if self.type is PluginFieldType.CHAR:
            return given.data if isinstance(given.data, bytes) else bytes(given.data)
        values = np.ravel(np.asarray(given.data)).astype(FIELD_DTYPES[self.type])
        if not self.is_list and values.size != 1:
            raise NetworkError(f"field {self.name!r} has {values.size} values, expected 1", where=where)
        for value in values.tolist():
            if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
                raise NetworkError(f"field {self.name!r} = {value} is outside {self.low}..{self.high}", where=where)
            if self.choices and value not in self.choices:
                raise NetworkError(f"field {self.name!r} = {value} is not one of {sorted(self.choices)}", where=where)
        if self.is_list:
            return values
        scalar: Scalar = values[0].item()
        return scalar


def _no_alias(_: Fields, __: int) -> dict[int, int]:
    return {}


def _no_token_inputs(_: Fields, __: int) -> frozenset[int]:
    return frozenset()


@dataclass(frozen=True)
class PluginSpec:
    """A plugin type.

    Attributes:
        outputs: Maps (fields, input descriptions) to output descriptions; raises NetworkError on bad inputs.
        aliased: Maps (fields, number of inputs) to {output index: input index} of outputs sharing memory.
        token_inputs: Maps (fields, number of inputs) to the positions of the per-token inputs: row i of every output
            depends on row i of those, and on all of the others. Such a plugin may be run on any subset of a step's
            tokens if the others do not depend on them. Empty: with these fields it mixes tokens.
        open_fields: Accept fields that are not listed (plugins whose attribute list differs by release).
    """

    name: str
    version: str
    namespace: str
    v2: bool
    fields: tuple[FieldSpec, ...]
    outputs: Callable[[Fields, Sequence[TensorDesc]], list[TensorDesc]]
    aliased: Callable[[Fields, int], dict[int, int]] = field(default=_no_alias)
    token_inputs: Callable[[Fields, int], frozenset[int]] = field(default=_no_token_inputs)
    open_fields: bool = False

    @property
    def key(self) -> PluginKey:
        """(name, version, namespace): what a plan stores to find the creator again."""
        return (self.name, self.version, self.namespace)


class Plugin:
    """A created plugin: its type and checked fields."""

    def __init__(self, spec: PluginSpec, name: str, fields: Fields) -> None:
        self.spec = spec
        self.name = name
        self.fields = fields

    @property
    def plugin_type(self) -> str:
        """Creator name."""
        return self.spec.name

    @property
    def plugin_version(self) -> str:
        """Creator version."""
        return self.spec.version

    @property
    def plugin_namespace(self) -> str:
        """Creator namespace."""
        return self.spec.namespace


class PluginCreator:
    """Creates plugins of one type from fields."""

    def __init__(self, spec: PluginSpec) -> None:
        self.spec = spec
        self.name, self.plugin_version, self.plugin_namespace = spec.key

    def create_plugin(
        self, name: str, field_collection: Sequence[PluginField], phase: TensorRTPhase = TensorRTPhase.BUILD
    ) -> Plugin:
        """Create a plugin; every attribute is checked here, not when it runs.

        Raises:
            NetworkError: for an unknown, missing, ill-typed or out-of-range field.
        """
        del phase
        where = f"plugin {self.name} {name!r}"
        known = {f.name: f for f in self.spec.fields}
        fields: dict[str, FieldValue] = {}
        for given in field_collection:
            spec = known.get(given.name)
            if spec is not None:
                fields[given.name] = spec.convert(given, where)
            elif self.spec.open_fields:
                fields[given.name] = plain_value(given)
            else:
                raise NetworkError(f"unknown field {given.name!r}", where=where, fix=f"known: {', '.join(known)}")
        for spec in self.spec.fields:
            if spec.name not in fields:
                if spec.default is None:
                    raise NetworkError(f"field {spec.name!r} is missing", where=where)
                fields[spec.name] = spec.default
        return Plugin(self.spec, name, fields)


def plain_value(given: PluginField) -> FieldValue:
    """The value of a field whose description is not known: one number stands for itself."""
    if isinstance(given.data, bytes):
        return given.data
    values = np.ravel(given.data)
    return values[0].item() if values.size == 1 else values


class PluginRegistry:
    """Finds creators by name, version and namespace, as TensorRT's registry does."""

    def __init__(self) -> None:
        self._creators: dict[PluginKey, PluginCreator] = {}

    def register(self, spec: PluginSpec) -> None:
        """Add a plugin type; a second one under the same key is refused."""
        if spec.key in self._creators:
            raise NetworkError(f"plugin {spec.key} is registered already", where="plugin registry")
        self._creators[spec.key] = PluginCreator(spec)

    def get_creator(self, name: str, version: str, namespace: str = "") -> PluginCreator | None:
        """Return the creator, None when there is none."""
        return self._creators.get((name, version, namespace))

    #: Older spelling, used by TensorRT-LLM for IPluginV2 creators.
    get_plugin_creator = get_creator

    @property
    def all_creators(self) -> list[PluginCreator]:
        """Every creator."""
        return list(self._creators.values())


class _PluginLayer(ILayer):
    plugin: Plugin

    def infer(self) -> list[TensorDesc]:
        descs = [self.desc(i) for i in range(self.num_inputs)]
        try:
            return self.plugin.spec.outputs(self.plugin.fields, descs)
        except NetworkError as error:
            raise NetworkError(error.what, where=f"layer {self.name}", fix=error.fix) from None

    def aliases(self) -> dict[int, int]:
        """{output index: input index} of the outputs that share memory with an input."""
        return self.plugin.spec.aliased(self.plugin.fields, self.num_inputs)


class IPluginV2Layer(_PluginLayer):
    """A layer run by a V2 plugin (TensorRT-LLM's own)."""

    layer_type = LayerType.PLUGIN_V2


class IPluginV3Layer(_PluginLayer):
    """A layer run by a V3 plugin (ours)."""

    layer_type = LayerType.PLUGIN_V3


def opaque_spec(key: PluginKey, v2: bool, outputs: list[TensorDesc]) -> PluginSpec:
    """Describe a plugin type that is known only from a recorded file: never row-wise, cannot be interpreted."""
    return PluginSpec(*key, v2=v2, fields=(), outputs=lambda _fields, _inputs: outputs, open_fields=True)
