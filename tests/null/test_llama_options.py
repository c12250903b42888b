"""Inputs of the built networks, the attention plugin, options that are refused, and planning of large models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support.models import small as config

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig, RotaryScaling, preset
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.recorder import RecordedNetwork

TOP = "LLaMAForCausalLM"


def build(model: ModelConfig, tp_size: int = 2, rank: int = 0, **options: Any) -> RecordedNetwork:
    network = RecordedNetwork("test")
    limits = {"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 64}
    build_llama(network, model, Mapping(tp_size, rank, tp_size), None, NetworkOptions(**(limits | options)))
    return network


def plugins(network: RecordedNetwork, kind: str) -> list[trt.IPluginV2Layer]:
    return [x for x in network.layers if isinstance(x, trt.IPluginV2Layer) and x.plugin.plugin_type == kind]


def test_inputs_and_their_dimensions() -> None:
    network = build(config())
    inputs = {t.name: t for t in map(network.get_input, range(network.num_inputs))}
    described = {
        name: (t.dtype.name, [t.get_dimension_name(i) if d < 0 else d for i, d in enumerate(t.shape)])
        for name, t in inputs.items()
    }
    batch = "batch_size_beam_width"
    blocks = ("INT32", ["num_kv_cache_pools", batch, 2, "max_blocks_per_seq"])
    assert described == {
        "input_ids": ("INT32", ["num_tokens"]),
        "position_ids": ("INT32", ["position_ids_num_tokens_range"]),
        "last_token_ids": ("INT32", ["batch_size_last_token_ids"]),
        "kv_cache_block_offsets": blocks,
        "host_kv_cache_block_offsets": blocks,
        "host_kv_cache_pool_pointers": ("INT64", ["num_pools_layers", 2]),
        "host_kv_cache_pool_mapping": ("INT32", [2, 2]),
        "sequence_length": ("INT32", [batch]),
        "host_request_types": ("INT32", [batch]),
        "host_past_key_value_lengths": ("INT32", [batch]),
        "context_lengths": ("INT32", [batch]),
        "host_runtime_perf_knobs": ("INT64", [16]),
        "host_context_progress": ("INT64", [1]),
        "host_context_lengths": ("INT32", [batch]),
        "host_max_attention_window_sizes": ("INT32", [2]),
        "host_sink_token_length": ("INT32", [1]),
        "cache_indirection": ("INT32", ["batch_size_cache", "beam_width", "max_seq_len"]),
    }
    assert all(t.get_dimension_name(i) for t in inputs.values() for i in range(len(t.shape)))


def test_workspace_only_where_the_strategy_reads_it() -> None:
    network = build(config(), all_reduce_strategy="AUTO")
    workspace = next(t for t in map(network.get_input, range(network.num_inputs)) if t.name == "all_reduce_workspace")
    assert (workspace.dtype, workspace.shape, workspace.get_dimension_name(0)) == (trt.int64, (17,), "all_reduce_size")
    assert all(x.get_input(1) is workspace for x in plugins(network, "AllReduce"))
    alone = build(config(), tp_size=1, all_reduce_strategy="AUTO")
    assert "all_reduce_workspace" not in {alone.get_input(i).name for i in range(alone.num_inputs)}


def test_attention_fields_and_inputs() -> None:
    scaling = RotaryScaling(type="llama3", factor=4.0)
    network = build(config(rotary_scaling=scaling, rotary_base=5e5), rank=1, tokens_per_block=16)
    second = plugins(network, "GPTAttention")[1]
    fields = second.plugin.fields
    expected = {
        "layer_idx": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "num_kv_heads_origin": 2,
        "head_size": 8,
        "tp_size": 2,
        "tp_rank": 1,
        "tokens_per_block": 16,
        "position_embedding_type": 2,
        "rotary_embedding_dim": 8,
        "rotary_embedding_base": 5e5,
        "rotary_embedding_scale_type": 4,
        "rotary_embedding_scale": 4.0,
        "rotary_embedding_max_positions": 64,
        "mask_type": 1,
        "paged_kv_cache": 1,
        "use_paged_context_fmha": 1,
        "remove_input_padding": 1,
        "type_id": trt.bfloat16.value,
    }
    assert {k: fields[k] for k in expected} == expected
    assert [t.name for t in second.inputs if t is not None] == [
        f"{TOP}/transformer/layers/1/attention/qkv/MATRIX_MULTIPLY_0_output_0",
        "sequence_length",
        "host_past_key_value_lengths",
        "host_max_attention_window_sizes",
        "host_sink_token_length",
        "context_lengths",
        "cache_indirection",
        "host_request_types",
        "kv_cache_block_offsets",
        "host_kv_cache_block_offsets",
        "host_kv_cache_pool_pointers",
        "host_kv_cache_pool_mapping",
        "rotary_inv_freq_output_0",
        "embed_positions_for_gpt_attention_output_0",
        "host_context_lengths",
        "host_runtime_perf_knobs",
        "host_context_progress",
    ]
    assert (
        plugins(build(config(), use_paged_context_fmha=False), "GPTAttention")[0].plugin.fields[
            "use_paged_context_fmha"
        ]
        == 0
    )


def test_host_tensors_reach_plugins_only() -> None:
    graph = Graph(build(config()))
    for name in graph.inputs:
        if name.startswith("host_"):
            assert {n.kind for n, _ in graph.readers[name]} == {"PLUGIN_V2"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 0}, "option max_batch_size: 0 is less than 1"),
        ({"tokens_per_block": 24}, "no power of two"),
        ({"logits_dtype": "int8"}, "option logits_dtype: dtype 'int8'"),
        ({"nccl_dtype": "float64"}, "option nccl_dtype"),
        ({"residual_multiplier": 0.5}, "option residual_multiplier: 0.5"),
        ({"all_reduce_strategy": "MAGIC"}, "option all_reduce_strategy: strategy 'MAGIC' is unknown"),
        ({"max_seq_len": 65}, "option max_seq_len: 65 is above the model's 64 positions"),
        ({"reduce_fusion": True, "nccl_dtype": "float32"}, "option nccl_dtype: collectives in float32"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(config(), **options)


def test_a_used_network_is_refused() -> None:
    network = build(config())
    with pytest.raises(UserError, match="has layers or inputs already"):
        build_llama(network, config(), Mapping(2, 0, 2), None, NetworkOptions(max_seq_len=64))


def test_more_ranks_than_heads_are_refused() -> None:
    network = RecordedNetwork()
    with pytest.raises(UserError, match="tp_size 5 is larger than the model's 4 attention heads"):
        build_llama(network, config(), Mapping(5, 0, 5), None, NetworkOptions(max_seq_len=64))
    assert (network.num_inputs, network.num_layers) == (0, 0)


@pytest.mark.parametrize("name", ["llama-3.3-70b", "qwen2.5-72b", "mixtral-8x22b"])
def test_presets_are_planned_without_weights(name: str) -> None:
    model = preset(name).model_copy(update={"num_hidden_layers": 2})
    network = RecordedNetwork()
    build_llama(network, model, Mapping(8, 7, 8), None, NetworkOptions())
    constants = [x for x in network.layers if isinstance(x, trt.IConstantLayer)]
    valued = [x for x in constants if x.weights.array is not None]
    assert sum(x.weights.nbytes for x in valued) < 2000
    assert {x.weights.size for x in valued} == {1}
    assert sum(x.weights.nbytes for x in constants) > 1e9
    assert len(plugins(network, "AllReduce")) == 4


def test_llama_70b_on_eight_ranks() -> None:
    """80 layers, shapes only: two all-reduces a layer; with reduce_fusion all but the last carry their norm."""
    plain, fused = RecordedNetwork(), RecordedNetwork()
    for network, flag in ((plain, False), (fused, True)):
        build_llama(network, preset("llama-3.3-70b"), Mapping(8, 0, 8), None, NetworkOptions(reduce_fusion=flag))
    assert len(plugins(plain, "AllReduce")) == 160
    assert Counter(int(x.plugin.fields["fusion_op"]) for x in plugins(fused, "AllReduce")) == {1: 159, 0: 1}
    assert sum(x.weights.array is not None for x in plain.layers if isinstance(x, trt.IConstantLayer)) > 1000
