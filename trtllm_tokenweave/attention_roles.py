"""Which input of a GPTAttention layer is which.

TensorRT-LLM's attention plugin has one long list of possible inputs; a layer carries those that its fields ask
for, in list order, without gaps. So an input's place says nothing: it is found from the fields
(``GPTAttentionPlugin::isEntryUsed`` of TensorRT-LLM 0.17 to 1.2).
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import numpy as np

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.plugin_specs import AttentionRole
from trtllm_tokenweave.recorder.plugin import Fields


class PositionEmbedding(enum.IntEnum):
    """Field ``position_embedding_type`` (TensorRT-LLM's ``PositionEmbeddingType``)."""

    LEARNED_ABSOLUTE = 0
    ROPE_GPTJ = 1
    ROPE_GPT_NEOX = 2
    LONG_ROPE = 3
    ALIBI = 4
    ALIBI_WITH_SCALE = 5
    RELATIVE = 6
    CHATGLM = 7
    YARN = 8
    MROPE = 9


_ROPE = frozenset(
    {
        PositionEmbedding.ROPE_GPTJ,
        PositionEmbedding.ROPE_GPT_NEOX,
        PositionEmbedding.LONG_ROPE,
        PositionEmbedding.YARN,
        PositionEmbedding.MROPE,
    }
)
_ALIBI = frozenset({PositionEmbedding.ALIBI, PositionEmbedding.ALIBI_WITH_SCALE})

#: ``AttentionMaskType``: only the causal mask may be cut in halves.
MASK_CAUSAL = 1
MASK_CUSTOM = 6

#: Bits of ``kv_cache_quant_mode`` that mean a quantised cache (INT8, FP8).
KV_CACHE_QUANT_BITS = (1 << 6) | (1 << 7)


def int_field(fields: Fields, name: str, default: int | None = None) -> int:
    """Return an integer field of an attention plugin.

    Raises:
        UserError: the field is missing and has no default, or is no single integer.
    """
    value = fields.get(name, default)
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0].item()
    if isinstance(value, (bytes, np.ndarray)) or value is None or int(value) != value:
        state = "is missing" if value is None else f"= {value!r} is no integer"
        raise UserError(f"field {name!r} {state}", where="GPTAttention")
    return int(value)


def float_field(fields: Fields, name: str, default: float) -> float:
    """Return a float field of an attention plugin, ``default`` when the release does not have it."""
    value = fields.get(name, default)
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0].item()
    if isinstance(value, (bytes, np.ndarray)):
        raise UserError(f"field {name!r} = {value!r} is no number", where="GPTAttention")
    return float(value)


def _flag(name: str, default: int = 0) -> Callable[[Fields], bool]:
    return lambda fields: int_field(fields, name, default) != 0


def _always(_: Fields) -> bool:
    return True


def _position(*kinds: int) -> Callable[[Fields], bool]:
    return lambda fields: int_field(fields, "position_embedding_type") in kinds


def _paged(fields: Fields) -> bool:
    return _use_cache(fields) and int_field(fields, "paged_kv_cache") != 0


def _contiguous(fields: Fields) -> bool:
    return _use_cache(fields) and int_field(fields, "paged_kv_cache") == 0


def _quantised(fields: Fields) -> bool:
    return _use_cache(fields) and (int_field(fields, "kv_cache_quant_mode") & KV_CACHE_QUANT_BITS) != 0


def _custom_mask(fields: Fields) -> bool:
    return int_field(fields, "mask_type") == MASK_CUSTOM


def _full_mask(fields: Fields) -> bool:
    return _custom_mask(fields) and int_field(fields, "has_full_attention_mask", 0) != 0


_use_cache = _flag("use_cache", 1)
_cross = _flag("do_cross_attention")
_spec = _flag("is_spec_decoding_enabled")
_mla = _flag("is_mla_enabled")
_unfused = _flag("unfuse_qkv_gemm")

#: Every input in plugin order, and when a layer has it.
_ENTRIES: tuple[tuple[str, Callable[[Fields], bool]], ...] = (
    ("qkv", _always),
    ("k", _unfused),
    ("v", _unfused),
    ("attention_mask", _full_mask),
    ("attention_packed_mask", _custom_mask),
    ("sequence_length", _use_cache),
    ("host_past_key_value_lengths", _use_cache),
    ("host_max_attention_window_sizes", _always),
    ("host_sink_token_length", _always),
    ("context_lengths", _always),
    ("cache_indirection", _use_cache),
    ("host_request_types", _always),
    ("kv_cache_block_offsets", _paged),
    ("host_kv_cache_block_offsets", _paged),
    ("host_kv_cache_pool_pointers", _paged),
    ("host_kv_cache_pool_mapping", _paged),
    ("past_key_value", _contiguous),
    ("kv_cache_quantization_scale", _quantised),
    ("kv_cache_dequantization_scale", _quantised),
    ("attention_output_quantization_scale", _flag("use_fp8_context_fmha")),
    ("attention_output_sf_scale", _flag("fuse_fp4_quant")),
    ("rotary_inv_freq", _position(*_ROPE)),
    ("rotary_cos_sin", _position(*_ROPE)),
    ("alibi_slopes", _position(*_ALIBI)),
    ("relative_attention_bias", _position(PositionEmbedding.RELATIVE)),
    ("cross_kv", _cross),
    ("cross_kv_length", _cross),
    ("encoder_input_lengths", _cross),
    ("host_context_lengths", _flag("remove_input_padding")),
    ("qkv_bias", _flag("qkv_bias_enabled")),
    ("spec_decoding_generation_lengths", _spec),
    ("spec_decoding_packed_mask", _spec),
    ("spec_decoding_position_offsets", _spec),
    ("spec_decoding_use", _spec),
    ("long_rope_rotary_inv_freq", _position(PositionEmbedding.LONG_ROPE)),
    ("long_rope_rotary_cos_sin", _position(PositionEmbedding.LONG_ROPE)),
    ("mrope_rotary_cos_sin", _position(PositionEmbedding.MROPE)),
    ("mrope_position_deltas", _position(PositionEmbedding.MROPE)),
    ("host_runtime_perf_knobs", _always),
    ("host_context_progress", _always),
    ("mla_q_b_proj", _mla),
    ("mla_kv_b_proj", _mla),
    ("mla_k_b_proj_trans", _mla),
    ("skip_attn", _flag("skip_attn")),
    ("logn_scaling", _flag("use_logn_scaling")),
)

_ROLES = {
    "qkv": AttentionRole.QKV,
    "sequence_length": AttentionRole.SEQUENCE_LENGTH,
    "host_past_key_value_lengths": AttentionRole.HOST_PAST_KEY_VALUE_LENGTHS,
    "host_max_attention_window_sizes": AttentionRole.HOST_MAX_ATTENTION_WINDOW_SIZES,
    "host_sink_token_length": AttentionRole.HOST_SINK_TOKEN_LENGTH,
    "context_lengths": AttentionRole.CONTEXT_LENGTHS,
    "cache_indirection": AttentionRole.CACHE_INDIRECTION,
    "host_request_types": AttentionRole.HOST_REQUEST_TYPES,
    "kv_cache_block_offsets": AttentionRole.KV_CACHE_BLOCK_OFFSETS,
    "host_kv_cache_block_offsets": AttentionRole.HOST_KV_CACHE_BLOCK_OFFSETS,
    "host_context_lengths": AttentionRole.HOST_CONTEXT_LENGTHS,
    "host_context_progress": AttentionRole.HOST_CONTEXT_PROGRESS,
}


def attention_inputs(fields: Fields) -> list[str]:
    """Return the names of a GPTAttention layer's inputs, in order.

    Raises:
        UserError: a field that decides about an input is missing.
    """
    return [name for name, used in _ENTRIES if used(fields)]


def attention_roles(fields: Fields) -> list[AttentionRole]:
    """Return what each input of a GPTAttention layer means to a split (field ``roles`` of TokenWeaveAttention)."""
    return [_ROLES.get(name, AttentionRole.OTHER) for name in attention_inputs(fields)]


#: (refused when, why): layers whose batch cannot be cut at any token.
_REFUSALS: tuple[tuple[Callable[[Fields], bool], str], ...] = (
    (lambda f: int_field(f, "remove_input_padding") == 0, "tokens are not packed (remove_input_padding 0)"),
    (lambda f: not _paged(f), "the KV cache is not paged"),
    (
        lambda f: int_field(f, "use_paged_context_fmha") == 0,
        "context chunks cannot read the cache (no paged context FMHA)",
    ),
    (_unfused, "Q, K and V are separate inputs (unfuse_qkv_gemm)"),
    (lambda f: int_field(f, "mask_type") != MASK_CAUSAL, "the mask is not causal"),
    (_spec, "speculative decoding gives a generation row more than one token"),
    (_cross, "it is cross attention"),
    (_mla, "it is multi-head latent attention"),
    (_position(PositionEmbedding.MROPE), "mrope carries per-sequence position tables"),
    (_flag("skip_attn"), "it can be skipped at run time (skip_attn)"),
    (_flag("use_logn_scaling"), "logn scaling depends on the place in the chunk"),
    (lambda f: int_field(f, "cp_size", 1) > 1, "it is context parallel"),
    (_flag("fuse_fp4_quant"), "its output is block-quantised over rows (fuse_fp4_quant)"),
)


def split_refusal(fields: Fields) -> str:
    """Return why a GPTAttention layer must stay whole; empty when its batch may be cut at any token.

    Beam width, sliding windows and sink tokens are known at run time only: the kernels check them.
    """
    return next((reason for refused, reason in _REFUSALS if refused(fields)), "")
