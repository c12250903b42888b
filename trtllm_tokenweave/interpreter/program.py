"""From a network to what a context runs: live layers in order, constants folded, tensors numbered."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.comm import CommError
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.interpreter.numeric import Float32Copy, is_low, shared_float32_copy, widen
from trtllm_tokenweave.interpreter.ops import Op, make_op
from trtllm_tokenweave.interpreter.registry import KernelContext, find_kernel
from trtllm_tokenweave.plugin_specs import ALL_REDUCE_RMS_NORM, NAMESPACE, STREAM_JOIN
from trtllm_tokenweave.recorder.enums import numpy_dtype
from trtllm_tokenweave.recorder.layers import IConstantLayer, ILayer
from trtllm_tokenweave.recorder.network import RecordedNetwork
from trtllm_tokenweave.recorder.plugin import IPluginV2Layer, IPluginV3Layer, Plugin
from trtllm_tokenweave.recorder.tensor import ITensor
from trtllm_tokenweave.topology import producers_first

Array = NDArray[Any]
#: Identifies the collective whose end a join waits for: (site, half).
JoinKey = tuple[int, int]


@dataclass
class Step:
    """One live layer.

    Attributes:
        op: Function of the input arrays.
        inputs: Tensor numbers of the connected inputs.
        outputs: Tensor numbers of the outputs.
        drop: Tensors that nothing reads after this layer in recorded order.
        aliases: {output position: input position} of outputs that share memory.
        plugin: Set for plugin layers.
        queued: (site, half) of work that goes to the side stream.
        waits_for: (site, half) that the main stream waits for here.
    """

    layer: ILayer
    op: Op
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    drop: tuple[int, ...] = ()
    aliases: dict[int, int] = field(default_factory=dict)
    plugin: Plugin | None = None
    queued: JoinKey | None = None
    waits_for: JoinKey | None = None

    @property
    def name(self) -> str:
        """Name of the layer."""
        return self.layer.name


@dataclass
class Program:
    """A compiled network.

    Attributes:
        steps: Live layers in recorded topological order.
        initial: Value of every tensor number before a run: constants, else None.
        inputs: (tensor, number) of the network inputs.
        outputs: (tensor, number) of the network outputs.
        copies: Float32 copies of low-precision constants by id of the array.
    """

    steps: list[Step]
    initial: list[Array | None]
    inputs: list[tuple[ITensor, int]]
    outputs: list[tuple[ITensor, int]]
    copies: dict[int, Float32Copy]


def compile_network(network: RecordedNetwork, base: KernelContext) -> Program:
    """Compile the live part of a network.

    Args:
        base: Context that every kernel gets a copy of (with its own layer name).

    Raises:
        UserError: for a constant without values, a plugin without kernel, a network without outputs, or a cycle.
    """
    return _Compiler(network, base).run()


class _Compiler:
    def __init__(self, network: RecordedNetwork, base: KernelContext) -> None:
        self.network = network
        self.exact = base.exact
        self.copies: dict[int, Float32Copy] = {}
        self.base = replace(base, float32_copy=self.float32_copy)
        self.constants: dict[ITensor, Array] = {}

    def float32_copy(self, array: Array) -> Array:
        """Cached copy of a constant, fresh copy of anything else in low precision, else the array itself."""
        held = self.copies.get(id(array))
        return widen(array) if held is None else held.get()

    def run(self) -> Program:
        order = self.live_layers()
        live = [layer for layer in order if not self.fold(layer)]
        read = dict.fromkeys(t for layer in live for t in layer.inputs if t is not None)
        outputs = [self.network.get_output(i) for i in range(self.network.num_outputs)]
        inputs = [self.network.get_input(i) for i in range(self.network.num_inputs)]
        tensors = list(dict.fromkeys([*inputs, *(t for layer in live for t in layer.outputs), *read, *outputs]))
        number = {tensor: i for i, tensor in enumerate(tensors)}
        initial: list[Array | None] = [self.constants.get(t) for t in tensors]
        for array in initial:
            if array is not None and is_low(array.dtype) and array.ndim > 1:
                self.copies[id(array)] = shared_float32_copy(array)
        steps = [self.step(layer, number) for layer in live]
        _mark_drops(steps, keep={number[t] for t in (*inputs, *outputs, *(t for t in read if t in self.constants))})
        return Program(steps, initial, [(t, number[t]) for t in inputs], [(t, number[t]) for t in outputs], self.copies)

    def live_layers(self) -> list[ILayer]:
        """Layers that an output depends on, in topological order; among ready layers the first recorded runs first."""
        if not self.network.num_outputs:
            raise UserError("has no outputs", where=f"network {self.network.name!r}", fix="mark an output")
        producers: dict[ILayer, set[ILayer]] = {}
        todo = [self.network.get_output(i).producer for i in range(self.network.num_outputs)]
        while todo:
            layer = todo.pop()
            if layer is not None and layer not in producers:
                producers[layer] = set() if self.fold_known(layer) else layer.producers()
                todo.extend(producers[layer])
        return producers_first(producers)

    def fold_known(self, layer: ILayer) -> bool:
        """Make a constant of an integer tensor whose elements the recorder knows (static dimensions and such)."""
        if len(layer.outputs) != 1 or isinstance(layer, IConstantLayer):
            return False
        desc = layer.outputs[0].desc
        values = desc.values
        if values is None or any(v is None for v in values) or -1 in desc.shape:
            return False
        self.constants[layer.outputs[0]] = np.array(values, numpy_dtype(desc.dtype)).reshape(desc.shape)
        return True

    def fold(self, layer: ILayer) -> bool:
        """Evaluate a layer now if it is a constant or all its inputs are."""
        if layer.outputs[0] in self.constants:
            return True
        if isinstance(layer, IConstantLayer):
            if layer.weights.array is None:
                raise UserError(
                    "the constant has a shape but no values: the network was built from shapes only",
                    where=f"layer {layer.name}",
                    fix="build it from a checkpoint to run it",
                )
            self.constants[layer.outputs[0]] = layer.weights.array.reshape(layer.shape)
            return True
        inputs = [t for t in layer.inputs if t is not None]
        if isinstance(layer, (IPluginV2Layer, IPluginV3Layer)) or not inputs:
            return False
        if not all(t in self.constants for t in inputs):
            return False
        op = make_op(layer, self.exact, widen)
        with guard(layer), np.errstate(all="ignore"):
            results = op(*(self.constants[t] for t in inputs))
        for tensor, array in zip(layer.outputs, results if isinstance(results, list) else [results], strict=True):
            self.constants[tensor] = array
        return True

    def step(self, layer: ILayer, number: dict[ITensor, int]) -> Step:
        """Build the step of a live layer."""
        step = Step(
            layer,
            op=_unset,
            inputs=tuple(number[t] for t in layer.inputs if t is not None),
            outputs=tuple(number[t] for t in layer.outputs),
        )
        if not isinstance(layer, (IPluginV2Layer, IPluginV3Layer)):
            with guard(layer):
                step.op = make_op(layer, self.exact, self.float32_copy)
            return step
        plugin = layer.plugin
        with guard(layer):
            function = find_kernel(plugin.spec.key)
        ctx, fields = replace(self.base, layer=layer.name), plugin.fields
        step.op = lambda *inputs: function(ctx, fields, list(inputs))
        step.plugin = plugin
        step.aliases = layer.aliases()
        if plugin.plugin_namespace == NAMESPACE and plugin.plugin_type == ALL_REDUCE_RMS_NORM and fields["side_stream"]:
            step.queued = _join_key(plugin)
        if plugin.plugin_namespace == NAMESPACE and plugin.plugin_type == STREAM_JOIN and fields["waits"]:
            step.waits_for = _join_key(plugin)
        return step


def _unset(*_: Array) -> Array:
    raise AssertionError("the step has no function")


def _join_key(plugin: Plugin) -> JoinKey:
    site, half = (np.asarray(plugin.fields[name]).item() for name in ("site", "half"))
    return int(site), int(half)


def _mark_drops(steps: list[Step], keep: set[int]) -> None:
    """Note after which step each tensor can go; one that nothing reads goes at once."""
    seen = set(keep)
    for step in reversed(steps):
        step.drop = tuple({n for n in (*step.inputs, *step.outputs) if n not in seen})
        seen.update(step.drop)


class guard:  # noqa: N801  (a context manager)
    """Make any error inside a block name the layer."""

    def __init__(self, layer: ILayer) -> None:
        self.layer = layer

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            raise_in_layer(self.layer.name, error)


def raise_in_layer(name: str, error: Exception) -> NoReturn:
    """Raise ``error`` again with the layer's name in front; the kinds that callers tell apart are kept."""
    where = f"layer {name}"
    if isinstance(error, CommError):
        raise CommError(f"{where}: {error}") from error
    if isinstance(error, UserError):
        inner = "" if error.where in ("", where) else f"{error.where}: "
        raise UserError(inner + error.what, where=where, fix=error.fix) from error
    text = str(error) or type(error).__name__
    if not isinstance(error, ValueError):
        text = f"{type(error).__name__}: {text}"
    raise UserError(text, where=where) from error
