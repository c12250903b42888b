"""One half's attention in an engine: TokenWeaveBatchSplit, and TokenWeaveAttention with the reference plugin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpu.attention_model import MAX_SEQUENCES, MAX_TOKENS, AttentionModel, Tensors
from gpu.plain_engine import built, set_address, set_input
from trtllm_tokenweave import trt as seam
from trtllm_tokenweave.attention_roles import attention_roles
from trtllm_tokenweave.plugin_library import plugin_library, register_reference
from trtllm_tokenweave.plugin_specs import ATTENTION, BATCH_SPLIT, NAMESPACE, VERSION, AttentionRole, Half
from trtllm_tokenweave.recorder.packed_fields import pack_fields
from trtllm_tokenweave.recorder.plugin import FieldValue
from trtllm_tokenweave.recorder.trtllm_plugins import GPT_ATTENTION
from trtllm_tokenweave.tensorrt_module import tensorrt

#: Device tensors that TokenWeaveBatchSplit makes, in the order of its outputs.
DEVICE = ("sequence_length", "context_lengths")
_TYPES = {torch.float16: "HALF", torch.bfloat16: "BF16", torch.float32: "FLOAT", torch.int32: "INT32"}
#: Roles of the tensors whose first dimension, or second (block tables), is the number of sequences.
_SEQUENCES = {
    AttentionRole.SEQUENCE_LENGTH: 0,
    AttentionRole.HOST_PAST_KEY_VALUE_LENGTHS: 0,
    AttentionRole.CONTEXT_LENGTHS: 0,
    AttentionRole.CACHE_INDIRECTION: 0,
    AttentionRole.HOST_REQUEST_TYPES: 0,
    AttentionRole.HOST_CONTEXT_LENGTHS: 0,
    AttentionRole.KV_CACHE_BLOCK_OFFSETS: 1,
    AttentionRole.HOST_KV_CACHE_BLOCK_OFFSETS: 1,
}
PREFIX_REF, NUM_TOKENS_REF = "prefix_ref", "num_tokens_ref"


class HalfEngine:
    """The engine's inputs are the layer's, with the half's rows of qkv, and tensors of the prefix's and step's rows."""

    def __init__(self, model: AttentionModel, half: Half) -> None:
        plugin_library()
        register_reference(GPT_ATTENTION[0])
        self.model, self.half = model, half
        self._engine, self._context = built(self._define)
        self._kept: list[torch.Tensor] = []

    def _define(self, network: Any, profile: Any) -> None:
        output = self._layers(network, self._inputs(network, profile))
        output.name = "output"
        network.mark_output(output)

    def _inputs(self, network: Any, profile: Any) -> dict[str, Any]:
        """Network inputs by name; sequences and rows are dynamic."""
        trt = tensorrt()
        step = self.model.step([(0, 1, True)])
        examples = dict(zip(self.model.names, self.model.inputs(step), strict=True))
        roles = dict(zip(self.model.names, attention_roles(self.model.fields), strict=True))
        made = {}
        for name, example in examples.items():
            shape, axis, bounds = list(example.shape), _SEQUENCES.get(roles[name]), (1, MAX_SEQUENCES)
            if name == "qkv":
                axis, bounds = 0, (0, MAX_TOKENS)
            kind = getattr(trt.DataType, _TYPES.get(example.dtype, "INT64"))
            made[name] = _add_input(network, profile, (name, kind, shape), axis, bounds)
        kind = trt.DataType.INT32
        for name in (PREFIX_REF, NUM_TOKENS_REF):
            made[name] = _add_input(network, profile, (name, kind, [1, 1]), 0, (0, MAX_TOKENS))
        return made

    def _layers(self, network: Any, inputs: dict[str, Any]) -> Any:
        """Both plugins; returns the half's output."""
        fields = self.model.fields
        host = ("host_request_types", "host_context_lengths")
        read = [inputs[name] for name in (PREFIX_REF, NUM_TOKENS_REF, *host, *DEVICE)]
        split = seam.add_plugin(
            network, (BATCH_SPLIT, VERSION, NAMESPACE), "split", {"max_num_tokens": MAX_TOKENS}, read
        )
        given = dict(inputs)
        for i, name in enumerate(DEVICE):
            given[name] = split.get_output(i + int(self.half) * len(DEVICE))
        inner = dict(zip(("inner_name", "inner_version", "inner_namespace"), GPT_ATTENTION, strict=True))
        wrapper: dict[str, FieldValue] = {
            "half": int(self.half),
            "num_heads": self.model.heads.num_heads,
            "head_size": self.model.heads.head_size,
            **{name: part.encode() for name, part in inner.items()},
            "inner": pack_fields(seam.plugin_fields(GPT_ATTENTION, fields)),
            "roles": np.asarray(attention_roles(fields), np.int32),
        }
        tensors = [given[name] for name in self.model.names]
        return seam.add_plugin(network, (ATTENTION, VERSION, NAMESPACE), "half", wrapper, tensors).get_output(0)

    def bind(self, tensors: Tensors, prefix_rows: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Give the context a step's tensors; returns the inputs by name, and the half's output."""
        rows = slice(prefix_rows) if self.half is Half.PREFIX else slice(prefix_rows, None)
        own = tensors | {"qkv": tensors["qkv"][rows]}
        bound = dict(zip(self.model.names, self.model.inputs(own), strict=True))
        for name, tokens in ((PREFIX_REF, prefix_rows), (NUM_TOKENS_REF, len(tensors["qkv"]))):
            bound[name] = torch.zeros((tokens, 1), dtype=torch.int32, device="cuda")
        output = self.model.output(len(own["qkv"]))
        self._kept = [set_input(self._context, name, tensor) for name, tensor in bound.items()]
        self._kept.append(set_address(self._context, "output", output))
        return bound, output

    def enqueue(self) -> bool:
        """Queue a step on torch's current stream."""
        return bool(self._context.execute_async_v3(torch.cuda.current_stream().cuda_stream))

    def run(self, tensors: Tensors, prefix_rows: int) -> torch.Tensor:
        """One step; the half's output."""
        _, output = self.bind(tensors, prefix_rows)
        torch.cuda.synchronize()
        assert self.enqueue(), "the step failed: see TensorRT's log"
        torch.cuda.synchronize()
        return output


def _add_input(
    network: Any, profile: Any, given: tuple[str, Any, Sequence[int]], axis: int | None, bounds: tuple[int, int]
) -> Any:
    """An input of (name, type, shape); its size along ``axis`` may be anything in ``bounds``."""
    name, kind, shape = given

    def sized(size: int) -> tuple[int, ...]:
        return tuple(size if i == axis else length for i, length in enumerate(shape))

    tensor = network.add_input(name, kind, sized(-1))
    if axis is not None:
        profile.set_shape(name, sized(bounds[0]), sized(bounds[1]), sized(bounds[1]))
    return tensor
