"""Builds one rank's network of a Llama, Qwen2 or Mixtral model."""

from __future__ import annotations

from collections.abc import Mapping as Dict
from typing import Any

from numpy.typing import NDArray

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.llama import layers, rope
from trtllm_tokenweave.llama.inputs import add_inputs
from trtllm_tokenweave.llama.layers import Build, NormArgs
from trtllm_tokenweave.llama.ops import Ops
from trtllm_tokenweave.llama.options import NetworkOptions
from trtllm_tokenweave.llama.weights import RankWeights, weight_specs
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.recorder.enums import TRT_NAMES
from trtllm_tokenweave.recorder.trtllm_plugins import AllReduceFusionOp


def build_llama(
    network: Any,
    config: ModelConfig,
    mapping: Mapping,
    weights: Dict[str, NDArray[Any]] | None,
    options: NetworkOptions,
    *,
    collectives: bool = True,
) -> None:
    """Add every layer of one rank to an empty strongly typed network, as TensorRT-LLM 1.x does.

    Tokens are packed and the KV cache is paged. Inputs: see :func:`add_inputs`. Output: ``logits``
    [rows, padded vocabulary], one row for each entry of ``last_token_ids``.

    Args:
        network: ``tensorrt.INetworkDefinition`` or ``RecordedNetwork``; nothing else of TensorRT is needed.
        config: The whole model.
        mapping: The rank. With one rank no collective is added.
        weights: This rank's tensors (see :func:`weight_specs`), or None to give every weight a shape but no
            values; constants that are part of the network's form (epsilon, indices) have values all the same.
        options: Limits and switches.
        collectives: False leaves out what the ranks say to each other, for measurements: each goes on with its own
            partial sums, and its own columns of the logits.

    Raises:
        UserError: when the network is not empty, the model cannot be cut into ``tp_size`` ranks, a tensor is
            missing or misshapen, or the options exclude each other. Nothing is added then.
    """
    if network.num_layers or network.num_inputs:
        raise UserError("the network has layers or inputs already", where="network", fix="build into an empty one")
    _check(config, mapping, options)
    checked = RankWeights(weight_specs(config, mapping), mapping, weights)
    ops = Ops(network)
    inputs = add_inputs(network, ops.trt, config, mapping, options)
    group = mapping if collectives else Mapping()
    build = Build(ops, config, group, options, config.local(mapping.tp_size), checked, inputs)
    with ops.module("LLaMAForCausalLM" if build.is_llama else "QWenForCausalLM"):
        _model(build)


def _check(config: ModelConfig, mapping: Mapping, options: NetworkOptions) -> None:
    if options.max_seq_len > config.max_position_embeddings:
        raise UserError(
            f"{options.max_seq_len} is above the model's {config.max_position_embeddings} positions",
            where="option max_seq_len",
            fix=f"use at most {config.max_position_embeddings}",
        )
    fused = options.reduce_fusion and mapping.tp_size > 1
    if fused and options.nccl_dtype not in (None, config.dtype):
        raise UserError(
            f"collectives in {options.nccl_dtype} cannot take the residual in {config.dtype}",
            where="option nccl_dtype",
            fix="leave it out, or turn reduce_fusion off",
        )


def _rotary(build: Build) -> None:
    """Add the two rotary constants to the tensors that attention reads; all layers share them."""
    config, real = build.config, build.weights.arrays is not None
    frequencies = rope.inverse_frequencies(config) if real else None
    table = rope.cos_sin_table(config) if real else None
    shape = (1, config.max_position_embeddings * config.head_size)
    build.inputs["rotary_inv_freq"] = build.ops.parameter(
        "rotary_inv_freq", frequencies, (config.head_size // 2,), "FLOAT"
    )
    build.inputs["rotary_cos_sin"] = build.ops.parameter("embed_positions_for_gpt_attention", table, shape, "FLOAT")


def _model(build: Build) -> None:
    ops, options = build.ops, build.options
    _rotary(build)
    with ops.module("transformer"):
        with ops.module("vocab_embedding"):
            hidden = ops.gather(build.parameter("transformer.vocab_embedding.weight"), build.inputs["input_ids"])
        if options.residual_multiplier is not None and build.is_llama:
            # The embedding multiplier came with the residual one.
            hidden = ops.elementwise(hidden, options.residual_multiplier, "PROD")
        hidden = decoder_layers(build, hidden)
    hidden = _last_tokens(build, hidden)
    with ops.module("lm_head"):
        logits = layers.gathered(build, layers.linear(build, hidden, build.parameter("lm_head.weight")))
    logits = ops.cast(logits, TRT_NAMES[options.logits_dtype].name)
    build.ops.network.mark_output(logits)
    logits.name = "logits"


def decoder_layers(build: Build, hidden: Any) -> Any:
    """All decoder layers and the norm after the last: [T, h] -> [T, h]."""
    state: tuple[Any, ...] = (hidden,)
    for layer in range(build.config.num_hidden_layers):
        with build.ops.module(f"layers/{layer}"):
            state = _decoder_layer(build, layer, state)
    with build.ops.module("ln_f"):
        return layers.rms_norm(build, state[0], "transformer.ln_f.weight")


def _decoder_layer(build: Build, layer: int, state: tuple[Any, ...]) -> tuple[Any, ...]:
    """One decoder layer: (hidden,) in and out, or (normed, residual) between layers whose norms are fused."""
    ops, config, path = build.ops, build.config, f"transformer.layers.{layer}"
    op = AllReduceFusionOp.RESIDUAL_RMS_NORM if build.reduce_fusion else AllReduceFusionOp.NONE
    if len(state) == 2:
        hidden, residual = state
    else:
        (residual,) = state
        with ops.module("input_layernorm"):
            hidden = layers.rms_norm(build, residual, f"{path}.input_layernorm.weight")
    norm = None
    if build.is_llama:
        norm = NormArgs(residual, build.parameter(f"{path}.post_layernorm.weight"), config.norm_epsilon)
    with ops.module("attention"):
        out = layers.attention(build, hidden, layer, norm, op)
    if build.reduce_fusion:
        hidden, residual = out
    else:
        residual = layers.scaled_residual(build, residual, out[0])
        with ops.module("post_layernorm"):
            hidden = layers.rms_norm(build, residual, f"{path}.post_layernorm.weight")
    with ops.module("mlp"):
        if config.moe is not None:
            out = (layers.experts(build, hidden, f"{path}.mlp"),)
        elif build.reduce_fusion and layer + 1 < config.num_hidden_layers:
            # The next layer's input norm is applied here.
            weight = build.parameter(f"transformer.layers.{layer + 1}.input_layernorm.weight")
            return layers.mlp(build, hidden, f"{path}.mlp", NormArgs(residual, weight, config.norm_epsilon), op)
        else:
            out = layers.mlp(build, hidden, f"{path}.mlp", None, AllReduceFusionOp.NONE)
    return (layers.scaled_residual(build, residual, out[0]),)


def _last_tokens(build: Build, hidden: Any) -> Any:
    """Rows of the last token of each sequence; ``last_token_ids`` are cumulative token counts."""
    ops, last = build.ops, build.inputs["last_token_ids"]
    indices = ops.elementwise(last, 1, "SUB")
    shape = [ops.dimension(indices, 0), ops.dimension(hidden, 1)]
    rows = ops.view(ops.gather(hidden, indices), ops.concat(shape))
    return ops.view(rows, ops.concat([ops.dimension(last, 0), ops.dimension(rows, 1)]))
