"""One plugin in a TensorRT network of its own: built, loaded and run on torch's tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trtllm_tokenweave import trt as seam
from trtllm_tokenweave.config import building
from trtllm_tokenweave.recorder.plugin import FieldValue, PluginKey
from trtllm_tokenweave.tensorrt_module import create_builder, logger, tensorrt

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
        trt = tensorrt()
        with building():
            builder = create_builder()
            network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
            profile = builder.create_optimization_profile()
            tensors = []
            for i, given in enumerate(inputs):
                tensors.append(network.add_input(f"i{i}", getattr(trt.DataType, _NAMES[given.dtype]), given.shape))
                if -1 in given.shape:
                    sizes = (given.smallest, given.largest, given.largest)
                    profile.set_shape(f"i{i}", *(given.sized(rows) for rows in sizes))
            layer = seam.add_plugin(network, key, "layer", fields, tensors)
            for i in range(layer.num_outputs):
                layer.get_output(i).name = f"o{i}"
                network.mark_output(layer.get_output(i))
            config = builder.create_builder_config()
            config.add_optimization_profile(profile)
            plan = builder.build_serialized_network(network, config)
            assert plan is not None, "TensorRT built no engine"
        self._engine = trt.Runtime(logger()).deserialize_cuda_engine(plan)
        assert self._engine is not None, "TensorRT cannot load the engine"
        self._context = self._engine.create_execution_context()
        assert self._context is not None, "TensorRT made no execution context"
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
        self._kept = []
        for i, tensor in enumerate(inputs):
            # TensorRT takes no null address, which is what torch gives an empty tensor.
            held = tensor if tensor.numel() else tensor.new_empty(1)
            self._kept.append(held)
            assert self._context.set_input_shape(f"i{i}", tuple(tensor.shape))
            assert self._context.set_tensor_address(f"i{i}", held.data_ptr())
        outputs = []
        for i in range(self._engine.num_io_tensors - len(inputs)):
            name = f"o{i}"
            shape = tuple(self._context.get_tensor_shape(name))
            dtype = _DTYPES[self._engine.get_tensor_dtype(name).name]
            memory = torch.full((max(1, math.prod(shape)),), float("nan"), dtype=dtype, device="cuda")
            self._kept.append(memory)
            assert self._context.set_tensor_address(name, memory.data_ptr())
            outputs.append(memory[: math.prod(shape)].view(shape))
        torch.cuda.synchronize()
        return outputs

    def _enqueue(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        assert self._context.execute_async_v3(stream), "the step failed: see TensorRT's log"
