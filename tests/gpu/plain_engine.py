"""A network of a test's own, built and loaded by TensorRT and run on torch's tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trtllm_tokenweave.config import building
from trtllm_tokenweave.tensorrt_module import create_builder, logger, tensorrt


def built(define: Callable[[Any, Any], None]) -> tuple[Any, Any]:
    """The engine of the network that ``define`` gives layers and whose profile it sets, and an execution context."""
    trt = tensorrt()
    with building():
        builder = create_builder()
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        profile = builder.create_optimization_profile()
        define(network, profile)
        config = builder.create_builder_config()
        config.add_optimization_profile(profile)
        plan = builder.build_serialized_network(network, config)
        assert plan is not None, "TensorRT built no engine"
    engine = trt.Runtime(logger()).deserialize_cuda_engine(plan)
    assert engine is not None, "TensorRT cannot load the engine"
    context = engine.create_execution_context()
    assert context is not None, "TensorRT made no execution context"
    return engine, context


def set_address(context: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Tell the context where a tensor is; returns what has to live as long."""
    # TensorRT takes no null address, which is what torch gives an empty tensor.
    held = tensor if tensor.numel() else tensor.new_empty(1)
    assert context.set_tensor_address(name, held.data_ptr()), name
    return held


def set_input(context: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Give the context an input; returns what has to live as long."""
    assert context.set_input_shape(name, tuple(tensor.shape)), name
    return set_address(context, name, tensor)
