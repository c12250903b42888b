"""``RecordedNetwork``: TensorRT's ``INetworkDefinition`` in memory, for machines without a GPU.

TensorRT cannot create a network without a driver, so the model builder, the pass and the tests work on this
recording of the same object model: the same methods, properties and refusals. Layers cannot be removed, as in
TensorRT; layers that no output depends on are simply never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from numpy.typing import NDArray

from trtllm_tokenweave.recorder import layers as L  # noqa: N812
from trtllm_tokenweave.recorder.enums import (
    ActivationType,
    DataType,
    ElementWiseOperation,
    GatherMode,
    LayerType,
    MatrixOperation,
    NetworkDefinitionCreationFlag,
    ReduceOperation,
    SampleMode,
    TopKOperation,
    UnaryOperation,
)
from trtllm_tokenweave.recorder.plugin import IPluginV2Layer, IPluginV3Layer, Plugin
from trtllm_tokenweave.recorder.tensor import ITensor, NetworkError, Shape, TensorDesc, Weights, check_shape_tensor

AnyLayer = TypeVar("AnyLayer", bound=L.ILayer)


class RecordedNetwork:
    """A strongly typed network definition held in memory."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.layers: list[L.ILayer] = []
        self._inputs: list[ITensor] = []
        self._outputs: list[ITensor] = []
        #: Tensors that TensorRT would evaluate on the host to work out shapes.
        self.shape_tensors: set[ITensor] = set()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("add_"):
            raise NetworkError(f"layer kind {name[4:]!r} is not recorded", where="network")
        raise AttributeError(name)

    # ---- tensors

    def add_input(self, name: str, dtype: DataType, shape: Sequence[int]) -> ITensor:
        """Add a network input; -1 marks a dimension known at run time.

        Raises:
            NetworkError: for a name in use or a dimension below -1.
        """
        if any(t.name == name for t in self._inputs):
            raise NetworkError("there is an input of this name already", where=f"input {name}")
        if any(d < -1 for d in shape):
            raise NetworkError(f"shape {tuple(shape)} has a dimension below -1", where=f"input {name}")
        tensor = ITensor(name, TensorDesc(dtype, tuple(int(d) for d in shape)))
        self._inputs.append(tensor)
        return tensor

    def mark_output(self, tensor: ITensor) -> None:
        """Make ``tensor`` a network output."""
        if tensor.is_network_output:
            raise NetworkError("is an output already", where=f"tensor {tensor.name}")
        if tensor.is_network_input:
            raise NetworkError("is a network input", where=f"tensor {tensor.name}", fix="mark a copy (add_identity)")
        if any(t.name == tensor.name for t in self._outputs):
            raise NetworkError("there is an output of this name already", where=f"tensor {tensor.name}")
        tensor.is_network_output = True
        self._outputs.append(tensor)

    def unmark_output(self, tensor: ITensor) -> None:
        """Take ``tensor`` off the outputs."""
        if not tensor.is_network_output:
            raise NetworkError("is not an output", where=f"tensor {tensor.name}")
        tensor.is_network_output = False
        self._outputs.remove(tensor)

    @property
    def num_inputs(self) -> int:
        """Number of network inputs."""
        return len(self._inputs)

    @property
    def num_outputs(self) -> int:
        """Number of network outputs."""
        return len(self._outputs)

    @property
    def num_layers(self) -> int:
        """Number of layers, dangling ones included."""
        return len(self.layers)

    def get_input(self, index: int) -> ITensor:
        """Return network input ``index``."""
        return self._inputs[index]

    def get_output(self, index: int) -> ITensor:
        """Return network output ``index``."""
        return self._outputs[index]

    def get_layer(self, index: int) -> L.ILayer:
        """Return layer ``index`` in order of creation."""
        return self.layers[index]

    def get_flag(self, flag: NetworkDefinitionCreationFlag) -> bool:
        """Recorded networks are strongly typed and nothing else."""
        return flag is NetworkDefinitionCreationFlag.STRONGLY_TYPED

    # ---- layers

    def add_constant(self, shape: Sequence[int], weights: Weights | NDArray[Any]) -> L.IConstantLayer:
        """Add a constant; the weights are kept by reference."""
        held = weights if isinstance(weights, Weights) else Weights(weights)
        return self._add(L.IConstantLayer(self, [], weights=held, shape=tuple(int(d) for d in shape)))

    def add_cast(self, input: ITensor, to_type: DataType) -> L.ICastLayer:  # noqa: A002
        """Add a conversion to ``to_type``."""
        return self._add(L.ICastLayer(self, [input], to_type=to_type))

    def add_identity(self, input: ITensor) -> L.IIdentityLayer:  # noqa: A002
        """Add a copy."""
        return self._add(L.IIdentityLayer(self, [input]))

    def add_activation(self, input: ITensor, type: ActivationType) -> L.IActivationLayer:  # noqa: A002
        """Add an activation."""
        return self._add(L.IActivationLayer(self, [input], activation=type, alpha=0.0, beta=0.0))

    def add_elementwise(self, input1: ITensor, input2: ITensor, op: ElementWiseOperation) -> L.IElementWiseLayer:
        """Add a binary operation."""
        return self._add(L.IElementWiseLayer(self, [input1, input2], op=op))

    def add_unary(self, input: ITensor, op: UnaryOperation) -> L.IUnaryLayer:  # noqa: A002
        """Add a unary operation."""
        return self._add(L.IUnaryLayer(self, [input], op=op))

    def add_reduce(self, input: ITensor, op: ReduceOperation, axes: int, keep_dims: bool) -> L.IReduceLayer:  # noqa: A002
        """Add a reduction over the axes in the bit mask ``axes``."""
        return self._add(L.IReduceLayer(self, [input], op=op, axes=axes, keep_dims=keep_dims))

    def add_softmax(self, input: ITensor) -> L.ISoftMaxLayer:  # noqa: A002
        """Add a softmax; the default axis is TensorRT's: the third from the end, at least 0."""
        return self._add(L.ISoftMaxLayer(self, [input], axes=1 << max(0, len(input.shape) - 3)))

    def add_topk(self, input: ITensor, op: TopKOperation, k: int, axes: int) -> L.ITopKLayer:  # noqa: A002
        """Add a top-k along the axis in the bit mask ``axes``."""
        return self._add(L.ITopKLayer(self, [input], op=op, k=k, axes=axes))

    def add_matrix_multiply(
        self, input0: ITensor, op0: MatrixOperation, input1: ITensor, op1: MatrixOperation
    ) -> L.IMatrixMultiplyLayer:
        """Add a matrix product."""
        return self._add(L.IMatrixMultiplyLayer(self, [input0, input1], op0=op0, op1=op1))

    def add_concatenation(self, inputs: Sequence[ITensor]) -> L.IConcatenationLayer:
        """Add a concatenation; the default axis is TensorRT's: the third from the end, at least 0."""
        if not inputs:
            raise NetworkError("a concatenation needs inputs", where="network")
        return self._add(L.IConcatenationLayer(self, list(inputs), axis=max(0, len(inputs[0].shape) - 3)))

    def add_shuffle(self, input: ITensor) -> L.IShuffleLayer:  # noqa: A002
        """Add a shuffle; set ``reshape_dims`` or input 1, and the transposes."""
        attrs: dict[str, Any] = dict.fromkeys(("first_transpose", "reshape_dims", "second_transpose"))
        return self._add(L.IShuffleLayer(self, [input], zero_is_placeholder=True, **attrs))

    def add_slice(self, input: ITensor, start: Shape, shape: Shape, stride: Shape) -> L.ISliceLayer:  # noqa: A002
        """Add a slice; ``set_input(1..3)`` replaces start, size and stride by tensors."""
        attrs = {"start": tuple(start), "shape": tuple(shape), "stride": tuple(stride)}
        return self._add(L.ISliceLayer(self, [input], mode=SampleMode.STRICT_BOUNDS, **attrs))

    def add_gather(self, input: ITensor, indices: ITensor, axis: int) -> L.IGatherLayer:  # noqa: A002
        """Add a gather along ``axis``."""
        return self._add(
            L.IGatherLayer(self, [input, indices], axis=axis, mode=GatherMode.DEFAULT, num_elementwise_dims=0)
        )

    def add_shape(self, input: ITensor) -> L.IShapeLayer:  # noqa: A002
        """Add a layer that puts out the dimensions (INT64)."""
        return self._add(L.IShapeLayer(self, [input]))

    def add_select(self, condition: ITensor, then_input: ITensor, else_input: ITensor) -> L.ISelectLayer:
        """Add an element-wise choice."""
        return self._add(L.ISelectLayer(self, [condition, then_input, else_input]))

    def add_plugin_v2(self, inputs: Sequence[ITensor], plugin: Plugin) -> IPluginV2Layer:
        """Add a layer run by a V2 plugin."""
        return self._add_plugin(IPluginV2Layer, inputs, plugin)

    def add_plugin_v3(
        self, inputs: Sequence[ITensor], shape_inputs: Sequence[ITensor], plugin: Plugin
    ) -> IPluginV3Layer:
        """Add a layer run by a V3 plugin (shape inputs are not recorded)."""
        if shape_inputs:
            raise NetworkError("shape inputs of V3 plugins are not recorded", where=f"plugin {plugin.plugin_type}")
        return self._add_plugin(IPluginV3Layer, inputs, plugin)

    def _add_plugin(self, kind: type[AnyLayer], inputs: Sequence[ITensor], plugin: Plugin) -> AnyLayer:
        if plugin.spec.v2 != (kind is IPluginV2Layer):
            raise NetworkError(
                f"is a V{2 if plugin.spec.v2 else 3} plugin",
                where=f"plugin {plugin.plugin_type}",
                fix=f"use add_plugin_v{2 if plugin.spec.v2 else 3}",
            )
        return self._add(kind(self, list(inputs), plugin=plugin))

    def adopt(self, layer: AnyLayer) -> AnyLayer:
        """Take in a layer made from a file, under the same checks as any other."""
        return self._add(layer)

    def _add(self, layer: AnyLayer) -> AnyLayer:
        for position, tensor in enumerate(layer.inputs):
            if tensor is not None or position not in layer.SHAPE_INPUTS:
                self._check_owner(layer, tensor)
        descs = layer.infer()
        layer.outputs = [ITensor(f"{layer.name}_output_{i}", d, layer, i) for i, d in enumerate(descs)]
        for position, tensor in enumerate(layer.inputs):
            if tensor is not None:
                tensor.consumers.append((layer, position))
        self.layers.append(layer)
        object.__setattr__(layer, "_ready", True)
        return layer

    # ---- edits

    def _check_owner(self, layer: L.ILayer, tensor: ITensor | None) -> None:
        if not isinstance(tensor, ITensor):
            raise NetworkError(f"an input is {tensor!r}, not a tensor", where=f"layer {layer.name}")
        owned = tensor in self._inputs if tensor.producer is None else tensor.producer.network is self
        if not owned:
            raise NetworkError(f"tensor {tensor.name!r} belongs to another network", where=f"layer {layer.name}")

    def set_layer_input(self, layer: L.ILayer, index: int, tensor: ITensor) -> None:
        """Body of :meth:`ILayer.set_input`: all or nothing."""
        self._check_owner(layer, tensor)
        if not 0 <= index < max(layer.num_inputs, layer.max_inputs()):
            layer.fail(f"has no input {index}")
        if index in layer.SHAPE_INPUTS:
            if len(tensor.shape) != 1:
                layer.fail(f"shape input {index} has rank {len(tensor.shape)}, expected 1")
            check_shape_tensor(tensor, self)
        elif layer.layer_type is not LayerType.SHAPE and any(t in self.shape_tensors for t in layer.outputs):
            check_shape_tensor(tensor, self)
        before = list(layer.inputs)
        layer.inputs.extend([None] * (index + 1 - layer.num_inputs))
        layer.inputs[index] = tensor
        try:
            self.reinfer(layer)
        except NetworkError:
            layer.inputs = before
            self.reinfer(layer)
            raise
        old = before[index] if index < len(before) else None
        if old is not None:
            old.consumers.remove((layer, index))
        tensor.consumers.append((layer, index))

    def reinfer(self, layer: L.ILayer) -> None:
        """Work out the outputs of ``layer`` again and of everything that depends on a change."""
        todo = [layer]
        while todo:
            current = todo.pop()
            for tensor, desc in zip(current.outputs, current.infer(), strict=True):
                if tensor.desc != desc:
                    tensor.desc = desc
                    todo.extend(consumer for consumer, _ in tensor.consumers)

    def layer_kind(self, layer: L.ILayer) -> LayerType:
        """The LayerType, also for an activation layer."""
        return layer.layer_type
