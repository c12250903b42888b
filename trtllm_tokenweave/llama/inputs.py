"""Network inputs of a decoder with packed tokens and a paged KV cache, as TensorRT-LLM 1.x declares them."""

from __future__ import annotations

from typing import Any

from trtllm_tokenweave.llama.options import NetworkOptions
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig

_BATCH = "batch_size_beam_width"


def add_inputs(
    network: Any, trt: Any, config: ModelConfig, mapping: Mapping, options: NetworkOptions
) -> dict[str, Any]:
    """Add every input in TensorRT-LLM's order; returns them by name.

    Those named ``host_*`` and ``all_reduce_workspace`` are bound to CPU memory at run time although they are
    declared like the others: only plugins may read them.
    """
    layers = config.num_hidden_layers
    blocks = ((-1, "num_kv_cache_pools"), (-1, _BATCH), (2, "kv"), (-1, "max_blocks_per_seq"))
    int32: dict[str, tuple[tuple[int, str], ...]] = {
        "input_ids": ((-1, "num_tokens"),),
        "position_ids": ((-1, "position_ids_num_tokens_range"),),
        "all_reduce_workspace": ((7 * mapping.tp_size + 3, "all_reduce_size"),),
        "last_token_ids": ((-1, "batch_size_last_token_ids"),),
        "kv_cache_block_offsets": blocks,
        "host_kv_cache_block_offsets": blocks,
        "host_kv_cache_pool_pointers": ((-1, "num_pools_layers"), (2, "num_pools_kv")),
        "host_kv_cache_pool_mapping": ((layers, "pools_mapping"), (2, "layer_cache_pool_locator")),
        "sequence_length": ((-1, _BATCH),),
        "host_request_types": ((-1, _BATCH),),
        "host_past_key_value_lengths": ((-1, _BATCH),),
        "context_lengths": ((-1, _BATCH),),
        "host_runtime_perf_knobs": ((16, "perf_knob_size"),),
        "host_context_progress": ((1, "context_progress_size"),),
        "host_context_lengths": ((-1, _BATCH),),
        "host_max_attention_window_sizes": ((layers, "num_layers"),),
        "host_sink_token_length": ((1, "scalar"),),
        "cache_indirection": ((-1, "batch_size_cache"), (-1, "beam_width"), (-1, "max_seq_len")),
    }
    if mapping.tp_size == 1 or not options.strategy.needs_workspace:
        del int32["all_reduce_workspace"]
    int64 = {"all_reduce_workspace", "host_kv_cache_pool_pointers", "host_runtime_perf_knobs", "host_context_progress"}
    tensors: dict[str, Any] = {}
    for name, dims in int32.items():
        dtype = trt.DataType.INT64 if name in int64 else trt.DataType.INT32
        tensor = network.add_input(name, dtype, tuple(size for size, _ in dims))
        for index, (_, dimension) in enumerate(dims):
            tensor.set_dimension_name(index, dimension)
        tensors[name] = tensor
    return tensors
