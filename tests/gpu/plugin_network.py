"""One plugin in a TensorRT network of its own, on torch's tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpu.plain_engine import built, set_address, set_input
from trtllm_tokenweave import trt as seam
from trtllm_tokenweave.recorder.plugin import FieldValue, PluginKey
from trtllm_tokenweave.tensorrt_module import tensorrt

TYPE_IDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 7}
_NAMES = {
    torch.float32: "FLOAT",
    torch.float16: "HALF",
    torch.bfloat16: "BF16",
    torch.int32: "INT32",
    torch.int64: "INT64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Input:
    """An input of the network; -1 in its shape runs from ``smallest`` to ``largest``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    smallest: int = 1
    largest: int = 4096

    def sized(self, rows: int) -> tuple[int, ...]:
        """The shape for that many rows."""
        return tuple(rows if size < 0 else size for size in self.shape)


class PluginEngine:
    """An engine whose only layer is the plugin ``key``; tensors are named i0, i1, ... and o0, o1, ..."""

    def __init__(self, key: PluginKey, fields: Mapping[str, FieldValue], inputs: Sequence[Input]) -> None:
        def define(network: Any, profile: Any) -> None:
            tensors = []
            for i, given in enumerate(inputs):
                kind = getattr(tensorrt().DataType, _NAMES[given.dtype])
                tensors.append(network.add_input(f"i{i}", kind, given.shape))
                if -1 in given.shape:
                    sizes = (given.smallest, given.largest, given.largest)
                    profile.set_shape(f"i{i}", *(given.sized(rows) for rows in sizes))
            layer = seam.add_plugin(network, key, "layer", fields, tensors)
            for i in range(layer.num_outputs):
                layer.get_output(i).name = f"o{i}"
                network.mark_output(layer.get_output(i))

        self._engine, self._context = built(define)
        self._kept: list[torch.Tensor] = []

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the plugin on torch's current stream; outputs start as NaN."""
        outputs = self._bind(inputs)
        self._enqueue()
        torch.cuda.synchronize()
        return outputs

    def capture_and_replay(
        self, inputs: Sequence[torch.Tensor], before_replay: Callable[[], object]
    ) -> list[torch.Tensor]:
        """Capture a run into a CUDA graph, change the inputs, and run the graph."""
        outputs = self._bind(inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._enqueue()
        before_replay()
        graph.replay()
        torch.cuda.synchronize()
        return outputs

    def _bind(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._kept = [set_input(self._context, f"i{i}", tensor) for i, tensor in enumerate(inputs)]
        outputs = []
        for i in range(self._engine.num_io_tensors - len(inputs)):
            name = f"o{i}"
            shape = tuple(self._context.get_tensor_shape(name))
            dtype = _DTYPES[self._engine.get_tensor_dtype(name).name]
            memory = torch.full((max(1, math.prod(shape)),), float("nan"), dtype=dtype, device="cuda")
            self._kept.append(set_address(self._context, name, memory))
            outputs.append(memory[: math.prod(shape)].view(shape))
        torch.cuda.synchronize()
        return outputs

    def _enqueue(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        assert self._context.execute_async_v3(stream), "the step failed: see TensorRT's log"
