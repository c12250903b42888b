"""Copy one layer onto other inputs, through the object model's own ``add_*`` calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtllm_tokenweave import trt
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.network import Node
from trtllm_tokenweave.recorder.plugin import FieldValue


def clone_layer(
    network: Any, node: Node, inputs: list[Any], name: str, fields: Mapping[str, FieldValue] | None = None
) -> Any:
    """Add a copy of ``node`` that reads ``inputs``.

    Args:
        network: The network that holds the layer.
        node: The layer to copy; constants are never copied, their tensors are shared.
        inputs: One tensor per input position of the layer (None where it has none).
        name: Name of the copy.
        fields: Plugin fields that differ in the copy.

    Raises:
        UserError: for a kind of layer that cannot be copied.
    """
    layer, first = node.layer, inputs[0]
    if node.plugin_key is not None:
        return trt.add_plugin(network, node.plugin_key, name, {**node.fields, **(fields or {})}, inputs)
    match node.kind:
        case "CAST":
            copy = network.add_cast(first, layer.to_type)
        case "IDENTITY":
            copy = network.add_identity(first)
        case "ACTIVATION":
            copy = network.add_activation(first, layer.type)
            copy.alpha, copy.beta = layer.alpha, layer.beta
        case "ELEMENTWISE":
            copy = network.add_elementwise(first, inputs[1], layer.op)
        case "UNARY":
            copy = network.add_unary(first, layer.op)
        case "REDUCE":
            copy = network.add_reduce(first, layer.op, layer.axes, layer.keep_dims)
        case "SOFTMAX":
            copy = network.add_softmax(first)
            copy.axes = layer.axes
        case "TOPK":
            copy = network.add_topk(first, layer.op, layer.k, layer.axes)
        case "MATRIX_MULTIPLY":
            copy = network.add_matrix_multiply(first, layer.op0, inputs[1], layer.op1)
        case "CONCATENATION":
            copy = network.add_concatenation(inputs)
            copy.axis = layer.axis
        case "GATHER":
            copy = network.add_gather(first, inputs[1], layer.axis)
            copy.num_elementwise_dims = layer.num_elementwise_dims
        case "SHAPE":
            copy = network.add_shape(first)
        case "SELECT":
            copy = network.add_select(*inputs)
        case "SHUFFLE":
            copy = _clone_shuffle(network, node, inputs)
        case "SLICE":
            rank = len(first.shape)
            # Where an input takes the place of Dims, anything of the right rank will do.
            static = [node.attribute(n) or (fill,) * rank for n, fill in (("start", 0), ("shape", 0), ("stride", 1))]
            copy = network.add_slice(first, *static)
            copy.mode = layer.mode
            for position, tensor in enumerate(inputs[1:], start=1):
                if tensor is not None:
                    copy.set_input(position, tensor)
        case _:
            raise UserError(f"layer kind {node.kind} cannot be copied", where=f"layer {node.name}")
    copy.name = name
    return copy


def _clone_shuffle(network: Any, node: Node, inputs: list[Any]) -> Any:
    layer = node.layer
    copy = network.add_shuffle(inputs[0])
    copy.zero_is_placeholder = layer.zero_is_placeholder
    if layer.first_transpose is not None:
        copy.first_transpose = layer.first_transpose
    if len(inputs) > 1 and inputs[1] is not None:
        copy.set_input(1, inputs[1])
    elif (dims := node.attribute("reshape_dims")) is not None:
        copy.reshape_dims = dims
    # Last: its rank is that of the reshaped tensor.
    if layer.second_transpose is not None:
        copy.second_transpose = layer.second_transpose
    return copy
