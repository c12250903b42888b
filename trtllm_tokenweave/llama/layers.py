"""The modules of a decoder layer: linear layers and their collectives, norm, MLP, experts, attention.

Each function adds the layers that TensorRT-LLM's module of that name adds, in its order, under its names. h is the
hidden size, T the tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trtllm_tokenweave.llama.ops import Ops
from trtllm_tokenweave.llama.options import NetworkOptions
from trtllm_tokenweave.llama.weights import RankWeights
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import LocalShapes, ModelConfig
from trtllm_tokenweave.recorder.enums import TRT_NAMES, DataType
from trtllm_tokenweave.recorder.plugin import FieldValue
from trtllm_tokenweave.recorder.trtllm_plugins import (
    ALL_GATHER,
    ALL_REDUCE,
    GEMM,
    GPT_ATTENTION,
    MIXTURE_OF_EXPERTS,
    AllReduceFusionOp,
    RotaryScalingType,
)

_ROPE_GPT_NEOX = 2  # PositionEmbeddingType
_CAUSAL = 1  # AttentionMaskType
_CONTEXT_FMHA = 1  # ContextFMHAType: enabled, accumulation in the model's dtype
_SWIGLU = 3  # ActivationType of the MixtureOfExperts plugin
_DEFAULT_EPS = 1e-6  # AllReduceParams.eps where no norm is given


def _type_id(dtype: str) -> int:
    # The recorder's members have the numbers of nvinfer1::DataType, which plugins store.
    return int(DataType[dtype].value)


def gpt_attention(build: Build, qkv: Any, layer: int) -> Any:
    """Attention itself, by plugin, which applies rotary embedding and writes the cache: [T, qkv] -> [T, q]."""
    inputs = [qkv, *(build.inputs[name] for name in _ATTENTION_INPUTS)]
    return build.ops.plugin(GPT_ATTENTION, attention_fields(build, layer), inputs)[0]


@dataclass(frozen=True)
class Build:
    """What every module needs to know: where layers go, and for which model, rank and options.

    ``mapping`` says which collectives there are, ``local`` and ``weights`` how wide this rank is.
    ``attend`` adds what stands between the two projections of attention.
    """

    ops: Ops
    config: ModelConfig
    mapping: Mapping
    options: NetworkOptions
    local: LocalShapes
    weights: RankWeights
    inputs: dict[str, Any]
    attend: Callable[[Build, Any, int], Any] = field(default=gpt_attention)

    @property
    def dtype(self) -> str:
        """DataType name of the activations."""
        return TRT_NAMES[self.config.dtype].name

    @property
    def nccl_dtype(self) -> str:
        """DataType name of the collectives."""
        return TRT_NAMES[self.options.nccl_dtype or self.config.dtype].name

    @property
    def reduce_fusion(self) -> bool:
        """Whether the AllReduce plugins carry the residual add and the norm."""
        return self.options.reduce_fusion and self.mapping.tp_size > 1 and self.is_llama and self.config.moe is None

    @property
    def is_llama(self) -> bool:
        """Whether TensorRT-LLM builds the model with its Llama class (Mixtral too), not with Qwen's."""
        return self.config.architecture != "Qwen2ForCausalLM"

    def parameter(self, name: str) -> Any:
        """The constant of the weight ``name``."""
        shape, dtype = self.weights.specs[name]
        return self.ops.parameter(name, self.weights.get(name), shape, TRT_NAMES[dtype].name)


@dataclass(frozen=True)
class NormArgs:
    """A norm that an AllReduce may take over: the residual stream [T, h] to add, weight [h] and epsilon."""

    residual: Any
    weight: Any
    eps: float


def rms_norm(build: Build, x: Any, weight: str) -> Any:
    """x / sqrt(mean(x^2) + eps) in float32, rounded to the dtype of ``x``, times weight; x is [T, h]."""
    ops = build.ops
    wide = ops.cast(x, "FLOAT")
    square = ops.elementwise(wide, 2.0, "POW")
    mean = ops.mean(square)
    root = ops.sqrt(ops.elementwise(mean, build.config.norm_epsilon, "SUM"))
    normed = ops.cast(ops.elementwise(wide, root, "DIV"), x.dtype.name)
    return ops.elementwise(normed, build.parameter(weight), "PROD")


def scaled_residual(build: Build, residual: Any, branch: Any) -> Any:
    """residual + branch [* residual_multiplier]."""
    if build.options.residual_multiplier is not None and build.is_llama:
        branch = build.ops.elementwise(branch, build.options.residual_multiplier, "PROD")
    return build.ops.elementwise(residual, branch, "SUM")


def linear(build: Build, x: Any, weight: Any) -> Any:
    """x times a weight [out, in], by plugin or by matrix multiplication; in the dtype of the weight."""
    if not build.options.gemm_plugin:
        return build.ops.matmul(x, weight)
    fields: dict[str, FieldValue] = {
        "transa": 0,
        "transb": 1,
        "pad_lda": 0,
        "pad_ldb": 0,
        "type_id": _type_id(weight.dtype.name),
        "use_fp8": 0,
        "alpha": 1.0,
    }
    return build.ops.plugin(GEMM, fields, [x, weight])[0]


def all_reduce(
    build: Build, x: Any, norm: NormArgs | None = None, op: AllReduceFusionOp = AllReduceFusionOp.NONE
) -> tuple[Any, ...]:
    """Sum over the ranks; with RESIDUAL_RMS_NORM returns (normed, sum plus residual). One rank: nothing to do.

    ``norm`` also marks a plain operation with the norm's weight and epsilon, as TensorRT-LLM does in the fields of
    attention's all-reduce although the plain operation reads neither.
    """
    if build.mapping.tp_size == 1:
        return (x,)
    fields: dict[str, FieldValue] = {
        "group": np.array(build.mapping.tp_group, np.int32),
        "type_id": _type_id(build.nccl_dtype),
        "strategy": int(build.options.strategy),
        "fusion_op": int(op),
        "eps": _DEFAULT_EPS if norm is None else norm.eps,
        "affine": int(norm is not None),
        "bias": 0,
        "scale": 0,
    }
    inputs = [build.ops.cast(x, build.nccl_dtype)]
    if build.options.strategy.needs_workspace:
        inputs.append(build.inputs["all_reduce_workspace"])
    if op is not AllReduceFusionOp.NONE and norm is not None:
        inputs += [norm.residual, norm.weight]
    return tuple(build.ops.cast(t, x.dtype.name) for t in build.ops.plugin(ALL_REDUCE, fields, inputs))


def row_linear(
    build: Build, x: Any, weight: str, norm: NormArgs | None = None, op: AllReduceFusionOp = AllReduceFusionOp.NONE
) -> tuple[Any, ...]:
    """A row-parallel linear layer: partial product, then the sum over the ranks; see :func:`all_reduce`."""
    return all_reduce(build, linear(build, x, build.parameter(weight)), norm, op)


def gathered(build: Build, x: Any) -> Any:
    """Join the columns of all ranks: [m, n] -> [m, n * tp_size], by AllGather along rows, slices and a concat."""
    tp_size, ops = build.mapping.tp_size, build.ops
    if tp_size == 1:
        return x
    fields: dict[str, FieldValue] = {
        "group": np.array(build.mapping.tp_group, np.int32),
        "type_id": _type_id(build.nccl_dtype),
    }
    stacked = ops.plugin(ALL_GATHER, fields, [ops.cast(x, build.nccl_dtype)])[0]
    stacked = ops.cast(stacked, x.dtype.name)
    # TensorRT-LLM divides; for sizes that is the floor division, which reads as such in every object model.
    rows = ops.elementwise(ops.pick(ops.shape(stacked), 0), ops.constant((tp_size,), "INT64"), "FLOOR_DIV")
    starts = [ops.constant((0,), "INT64") for _ in range(2)]
    sizes = [rows, ops.dimension(stacked, 1)]
    parts = []
    for rank in range(tp_size):
        starts[0] = ops.elementwise(rows, ops.constant((rank,), "INT64"), "PROD")
        parts.append(ops.slice(stacked, ops.concat(starts), ops.concat(sizes)))
    return ops.concat(parts, axis=1)


def mlp(build: Build, x: Any, path: str, norm: NormArgs | None, op: AllReduceFusionOp) -> tuple[Any, ...]:
    """SwiGLU: silu(fc(x)) * gate(x), then the row-parallel projection."""
    ops = build.ops
    if build.options.use_fused_mlp:
        # The linear half stands first, the half under the activation second.
        parts = (f"{path}.gate.weight", f"{path}.fc.weight")
        (rows, hidden), _ = build.weights.specs[parts[0]]
        with ops.module("fused_fc"):
            weight = ops.parameter(
                f"{path}.fused_fc.weight", build.weights.joined(parts), (2 * rows, hidden), build.dtype
            )
            both = linear(build, x, weight)
        gate, fc = ops.chunk(both, 2, axis=1)
        inner = ops.elementwise(ops.elementwise(fc, ops.sigmoid(fc), "PROD"), gate, "PROD")
    else:
        with ops.module("fc"):
            fc = linear(build, x, build.parameter(f"{path}.fc.weight"))
        activated = ops.elementwise(fc, ops.sigmoid(fc), "PROD")
        with ops.module("gate"):
            gate = linear(build, x, build.parameter(f"{path}.gate.weight"))
        inner = ops.elementwise(activated, gate, "PROD")
    with ops.module("proj"):
        return row_linear(build, inner, f"{path}.proj.weight", norm, op)


def experts(build: Build, x: Any, path: str) -> Any:
    """Mixture of experts: router in float32, top-k weights, the plugin, one all-reduce of its result.

    Expert weights are [E, 2f, h] (linear half, then the half under the activation) and [E, h, f].
    """
    ops, moe, local = build.ops, build.config.moe, build.local
    assert moe is not None
    with ops.module("router"):
        wide = ops.cast(x, "FLOAT")
        logits = linear(build, wide, build.parameter(f"{path}.router.weight"))
    if moe.renormalize:
        scores, selected = ops.topk(logits, moe.top_k)
        scales = ops.softmax(scores)
    else:
        scales, selected = ops.topk(ops.softmax(logits), moe.top_k)
    type_id = _type_id(build.dtype)
    fields: dict[str, FieldValue] = {
        "remove_input_padding": 1,
        "number_of_experts": moe.num_experts,
        "experts_per_token": moe.top_k,
        "expert_hidden_size": build.config.hidden_size,
        "expert_inter_size": local.intermediate_size,
        "groupwise_quant_algo": 0,
        "group_size": -1,
        "activation_type": _SWIGLU,
        "type_id": type_id,
        "weight_type_id": type_id,
        "output_type_id": type_id,
        "quant_mode": 0,
        "use_bias": 0,
        "use_final_scales": 1,
        "tp_size": build.mapping.tp_size,
        "tp_rank": build.mapping.tp_rank,
        "ep_size": 1,
        "ep_rank": 0,
        "force_determinism": 0,
        "side_stream_id": 0,
        "use_lora": 0,
    }
    weights = [build.parameter(f"{path}.fc.weight"), build.parameter(f"{path}.proj.weight")]
    out = ops.plugin(MIXTURE_OF_EXPERTS, fields, [x, *weights, selected, scales])[0]
    return all_reduce(build, out)[0]


_ATTENTION_INPUTS = (
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
    "rotary_inv_freq",
    "rotary_cos_sin",
    "host_context_lengths",
    "host_runtime_perf_knobs",
    "host_context_progress",
)


def attention(build: Build, x: Any, layer: int, norm: NormArgs | None, op: AllReduceFusionOp) -> tuple[Any, ...]:
    """QKV projection [+ bias], attention itself, row projection."""
    ops, path = build.ops, f"transformer.layers.{layer}.attention"
    with ops.module("qkv"):
        qkv = linear(build, x, build.parameter(f"{path}.qkv.weight"))
        if build.config.qkv_bias:
            qkv = ops.elementwise(qkv, build.parameter(f"{path}.qkv.bias"), "SUM")
    context = build.attend(build, qkv, layer)
    with ops.module("dense"):
        return row_linear(build, context, f"{path}.dense.weight", norm, op)


def attention_fields(build: Build, layer: int) -> dict[str, FieldValue]:
    """Fields of the GPTAttention of one layer, in TensorRT-LLM's order."""
    config, options, local, mapping = build.config, build.options, build.local, build.mapping
    scaling = config.rotary_scaling
    scale_type = RotaryScalingType.NONE if scaling is None else RotaryScalingType[scaling.type.upper()]
    return {
        "layer_idx": layer,
        "num_heads": local.num_heads,
        "vision_start": -1,
        "vision_length": -1,
        "num_kv_heads": local.num_kv_heads,
        "num_kv_heads_origin": local.padded_num_kv_heads,
        "head_size": config.head_size,
        "unidirectional": 1,
        "q_scaling": 1.0,
        "attn_logit_softcapping_scale": 0.0,
        "position_embedding_type": _ROPE_GPT_NEOX,
        "rotary_embedding_dim": config.head_size,
        "rotary_embedding_base": config.rotary_base,
        "rotary_embedding_scale_type": int(scale_type),
        "rotary_embedding_scale": 1.0 if scaling is None else scaling.factor,
        "rotary_embedding_short_m_scale": 1.0,
        "rotary_embedding_long_m_scale": 1.0,
        "rotary_embedding_max_positions": config.max_position_embeddings,
        "rotary_embedding_original_max_positions": 1024,
        "tp_size": mapping.tp_size,
        "tp_rank": mapping.tp_rank,
        "unfuse_qkv_gemm": 0,
        "context_fmha_type": _CONTEXT_FMHA,
        "kv_cache_quant_mode": 0,
        "remove_input_padding": 1,
        "mask_type": _CAUSAL,
        "block_sparse_block_size": 64,
        "block_sparse_homo_head_pattern": 0,
        "block_sparse_num_local_blocks": 16,
        "block_sparse_vertical_stride": 8,
        "paged_kv_cache": 1,
        "tokens_per_block": options.tokens_per_block,
        "type_id": _type_id(build.dtype),
        "max_context_length": options.max_seq_len,
        "qkv_bias_enabled": 0,
        "do_cross_attention": 0,
        "max_distance": 0,
        "pos_shift_enabled": 0,
        "dense_context_fmha": 0,
        "use_paged_context_fmha": int(options.use_paged_context_fmha),
        "use_fp8_context_fmha": 0,
        "has_full_attention_mask": 0,
        "use_cache": 1,
        "is_spec_decoding_enabled": 0,
        "spec_decoding_is_generation_length_variable": 0,
        "spec_decoding_max_generation_length": 1,
        "is_mla_enabled": 0,
        "q_lora_rank": 0,
        "kv_lora_rank": 0,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "v_head_dim": 0,
        "fuse_fp4_quant": 0,
        "skip_attn": 0,
        "cp_size": 1,
        "cp_rank": 0,
        "cp_group": np.array([mapping.rank], np.int32),
        "use_logn_scaling": 0,
    }
