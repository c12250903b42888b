"""TensorRT-LLM's own plugins, as far as the networks of this package use them (releases 0.17 to 1.2).

All are ``IPluginV2`` creators of version ``1`` in the namespace ``tensorrt_llm``. Fields stand in the order in
which TensorRT-LLM 1.x passes them. Where the field list differs between releases the creator also takes fields
that are not listed here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import numpy as np

from trtllm_tokenweave.attention_roles import attention_inputs
from trtllm_tokenweave.recorder.enums import FLOATS, DataType, PluginFieldType
from trtllm_tokenweave.recorder.plugin import Fields, FieldSpec, PluginKey, PluginSpec
from trtllm_tokenweave.recorder.tensor import NetworkError, Shape, TensorDesc

NAMESPACE = "tensorrt_llm"
VERSION = "1"

ALL_REDUCE: PluginKey = ("AllReduce", VERSION, NAMESPACE)
ALL_GATHER: PluginKey = ("AllGather", VERSION, NAMESPACE)
GEMM: PluginKey = ("Gemm", VERSION, NAMESPACE)
GPT_ATTENTION: PluginKey = ("GPTAttention", VERSION, NAMESPACE)
MIXTURE_OF_EXPERTS: PluginKey = ("MixtureOfExperts", VERSION, NAMESPACE)


class AllReduceStrategy(enum.IntEnum):
    """How an all-reduce is carried out; the numbers are those of TensorRT-LLM 0.20 to 1.2."""

    NCCL = 0
    MIN_LATENCY = 1
    UB = 2
    AUTO = 3
    ONESHOT = 4
    TWOSHOT = 5
    LOWPRECISION = 6
    MNNVL = 7
    NCCL_SYMMETRIC = 8

    @property
    def needs_workspace(self) -> bool:
        """Whether the plugin reads the ``all_reduce_workspace`` input."""
        return self not in (AllReduceStrategy.NCCL, AllReduceStrategy.UB, AllReduceStrategy.NCCL_SYMMETRIC)


class AllReduceFusionOp(enum.IntEnum):
    """What an AllReduce does besides the sum."""

    NONE = 0
    RESIDUAL_RMS_NORM = 1
    LAST_PROCESS_FOR_UB = 2
    RESIDUAL_RMS_PREPOST_NORM = 3
    RESIDUAL_RMS_NORM_QUANT_FP8 = 4


class RotaryScalingType(enum.IntEnum):
    """Scaling of rotary frequencies."""

    NONE = 0
    LINEAR = 1
    DYNAMIC = 2
    LONGROPE = 3
    LLAMA3 = 4


def _int(name: str, low: float | None = None, high: float | None = None) -> FieldSpec:
    return FieldSpec(name, PluginFieldType.INT32, low=low, high=high)


def _flag(name: str) -> FieldSpec:
    return FieldSpec(name, PluginFieldType.INT8, low=0, high=1)


def _float(name: str) -> FieldSpec:
    return FieldSpec(name, PluginFieldType.FLOAT32)


def _ranks(name: str) -> FieldSpec:
    return FieldSpec(name, PluginFieldType.INT32, is_list=True, low=0)


def _type(name: str) -> FieldSpec:
    return FieldSpec(name, PluginFieldType.INT32, choices=frozenset(d.value for d in FLOATS))


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise NetworkError(what)


def _at(fields: Fields, name: str) -> int:
    """An integer field; 0 when the release does not have it."""
    value = fields.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0


def _dtype(fields: Fields, name: str = "type_id") -> DataType:
    return DataType(_at(fields, name))


def _size(fields: Fields, name: str) -> int:
    value = fields[name]
    return len(value) if isinstance(value, np.ndarray) else 1


def _same(desc: TensorDesc, dtype: DataType, shape: Shape, what: str) -> None:
    """Refuse a tensor of another dtype, rank or fixed dimension."""
    fits = len(desc.shape) == len(shape) and all(a == b or -1 in (a, b) for a, b in zip(desc.shape, shape, strict=True))
    _need(fits and desc.dtype is dtype, f"{what} is {desc.dtype.name} {desc.shape}, expected {dtype.name} {shape}")


# ---- AllReduce, AllGather


def all_reduce_inputs(fields: Fields) -> tuple[str, ...]:
    """Names of an AllReduce's inputs in order: input, then whatever strategy and fusion_op ask for.

    Raises:
        NetworkError: for a strategy or a fused operation that is not recorded.
    """
    try:
        strategy = AllReduceStrategy(_at(fields, "strategy"))
        op = AllReduceFusionOp(_at(fields, "fusion_op"))
    except ValueError as error:
        raise NetworkError(f"AllReduce: {error}") from None
    names = ["input"] + ["all_reduce_workspace"] * strategy.needs_workspace
    if op is not AllReduceFusionOp.NONE:
        names += ["bias"] * bool(_at(fields, "bias")) + ["residual"] + ["norm_weight"] * bool(_at(fields, "affine"))
        if op is AllReduceFusionOp.RESIDUAL_RMS_PREPOST_NORM and _at(fields, "affine"):
            names.append("norm_pre_residual_weight")
        names += ["scale"] * bool(_at(fields, "scale"))
    return tuple(names)


def _all_reduce(fields: Fields, inputs: Sequence[TensorDesc]) -> list[TensorDesc]:
    names = all_reduce_inputs(fields)
    _need(len(inputs) == len(names), f"has {len(inputs)} inputs, expected {', '.join(names)}")
    x, dtype = inputs[0], _dtype(fields)
    _need(x.dtype is dtype, f"input dtype {x.dtype.name} is not type_id {dtype.name}")
    _need(len(x.shape) >= 1, "input is a scalar")
    vector = (x.shape[-1],)
    for name, desc in zip(names[1:], inputs[1:], strict=True):
        if name == "all_reduce_workspace":
            _need(desc.dtype is DataType.INT64, f"{name} has dtype {desc.dtype.name}, expected INT64")
        elif name == "residual":
            _same(desc, dtype, x.shape, name)
        elif name == "scale":
            _need(desc.dtype is DataType.FLOAT, f"{name} has dtype {desc.dtype.name}, expected FLOAT")
        else:
            _same(desc, dtype, vector, name)
    op = AllReduceFusionOp(_at(fields, "fusion_op"))
    out = TensorDesc(dtype, x.shape)
    if op is AllReduceFusionOp.NONE:
        return [out]
    quantised = op is AllReduceFusionOp.RESIDUAL_RMS_NORM_QUANT_FP8
    return [TensorDesc(DataType.FP8, x.shape) if quantised else out, out]


def _all_gather(fields: Fields, inputs: Sequence[TensorDesc]) -> list[TensorDesc]:
    _need(len(inputs) == 1 and len(inputs[0].shape) >= 1, "needs one input of rank 1 or more")
    x, dtype = inputs[0], _dtype(fields)
    _need(x.dtype is dtype, f"input dtype {x.dtype.name} is not type_id {dtype.name}")
    rows = -1 if x.shape[0] < 0 else x.shape[0] * _size(fields, "group")
    return [TensorDesc(dtype, (rows, *x.shape[1:]))]


# ---- Gemm


def _gemm(fields: Fields, inputs: Sequence[TensorDesc]) -> list[TensorDesc]:
    """Inputs: x [..., k] and weight ([n, k] with transb, else [k, n]); output [..., n]."""
    _need(len(inputs) == 2, f"has {len(inputs)} inputs, expected 2")
    _need(not _at(fields, "transa"), "a transposed input (transa) is not recorded")
    _need(not _at(fields, "pad_lda") and not _at(fields, "pad_ldb"), "padded leading dimensions are not recorded")
    x, weight = inputs
    dtype = _dtype(fields)
    given = DataType.FP8 if _at(fields, "use_fp8") else dtype
    for desc in inputs:
        _need(desc.dtype is given, f"an operand has dtype {desc.dtype.name}, expected {given.name}")
    _need(len(x.shape) >= 2 and len(weight.shape) == 2, f"operands have ranks {len(x.shape)} and {len(weight.shape)}")
    n, k = weight.shape if _at(fields, "transb") else weight.shape[::-1]
    _need(x.shape[-1] in (k, -1), f"inner dimensions differ: {x.shape[-1]} and {k}")
    return [TensorDesc(dtype, (*x.shape[:-1], n))]


# ---- GPTAttention

_INT64_INPUTS = {"host_kv_cache_pool_pointers", "host_runtime_perf_knobs", "host_context_progress"}
_INT32_INPUTS = {"sequence_length", "context_lengths", "cache_indirection", "kv_cache_block_offsets"}


def _gpt_attention(fields: Fields, inputs: Sequence[TensorDesc]) -> list[TensorDesc]:
    _need(bool(_at(fields, "paged_kv_cache")), "only the paged KV cache is recorded")
    _need(not _at(fields, "fuse_fp4_quant"), "FP4 outputs are not recorded")
    names = attention_inputs(fields)
    _need(len(inputs) == len(names), f"has {len(inputs)} inputs, expected {len(names)}: {', '.join(names)}")
    dtype, head_size = _dtype(fields), _at(fields, "head_size")
    heads, kv_heads = _at(fields, "num_heads"), _at(fields, "num_kv_heads")
    for name, desc in zip(names, inputs, strict=True):
        expected = dtype if name == "qkv" else None
        if name in _INT64_INPUTS:
            expected = DataType.INT64
        elif name in _INT32_INPUTS or name.startswith("host_"):
            expected = DataType.INT32
        elif name.startswith("rotary_"):
            expected = DataType.FLOAT
        if expected is not None and desc.dtype is not expected:
            raise NetworkError(f"{name} has dtype {desc.dtype.name}, expected {expected.name}")
    qkv = inputs[0]
    _need(len(qkv.shape) == 2, f"{names[0]} has rank {len(qkv.shape)}, expected [tokens, width]")
    if names[0] == "qkv":
        _same(qkv, dtype, (-1, (heads + 2 * kv_heads) * head_size), "qkv")
    return [TensorDesc(dtype, (qkv.shape[0], heads * head_size))]


# ---- MixtureOfExperts

_GATED = (3, 4, 5)  # swiglu, geglu, swiglu with bias


def _mixture_of_experts(fields: Fields, inputs: Sequence[TensorDesc]) -> list[TensorDesc]:
    """Inputs: hidden [m, h], fc [E, 2f, h], proj [E, h, f], experts INT32 [m, k], [scales FLOAT [m, k]], [2 biases]."""
    for name in ("quant_mode", "use_lora", "side_stream_id", "groupwise_quant_algo"):
        _need(not _at(fields, name), f"{name} {_at(fields, name)} is not recorded")
    expected = 4 + bool(_at(fields, "use_final_scales")) + 2 * bool(_at(fields, "use_bias"))
    _need(len(inputs) == expected, f"has {len(inputs)} inputs, expected {expected}")
    x, experts, top_k = inputs[0], _at(fields, "number_of_experts"), _at(fields, "experts_per_token")
    hidden, inter = _at(fields, "expert_hidden_size"), _at(fields, "expert_inter_size")
    rows = x.shape[0] if x.shape else -1
    wide = inter * (2 if _at(fields, "activation_type") in _GATED else 1)
    _need(0 < top_k <= experts, f"experts_per_token {top_k} is outside 1..{experts}")
    local = experts // max(_at(fields, "ep_size"), 1)
    _same(x, _dtype(fields), (rows, hidden), "input")
    _same(inputs[1], _dtype(fields, "weight_type_id"), (local, wide, hidden), "fc")
    _same(inputs[2], _dtype(fields, "weight_type_id"), (local, hidden, inter), "proj")
    _same(inputs[3], DataType.INT32, (rows, top_k), "token_selected_experts")
    if _at(fields, "use_final_scales"):
        _same(inputs[4], DataType.FLOAT, (rows, top_k), "token_final_scales")
    return [TensorDesc(_dtype(fields, "output_type_id"), (rows, hidden))]


_ATTENTION_FIELDS = """
    layer_idx:i num_heads:i vision_start:i vision_length:i num_kv_heads:i num_kv_heads_origin:i head_size:i
    unidirectional:i q_scaling:f attn_logit_softcapping_scale:f position_embedding_type:b rotary_embedding_dim:i
    rotary_embedding_base:f rotary_embedding_scale_type:b rotary_embedding_scale:f rotary_embedding_short_m_scale:f
    rotary_embedding_long_m_scale:f rotary_embedding_max_positions:i rotary_embedding_original_max_positions:i
    tp_size:i tp_rank:i unfuse_qkv_gemm:b context_fmha_type:b kv_cache_quant_mode:i remove_input_padding:b mask_type:i
    block_sparse_block_size:i block_sparse_homo_head_pattern:b block_sparse_num_local_blocks:i
    block_sparse_vertical_stride:i paged_kv_cache:i tokens_per_block:i type_id:t max_context_length:i
    qkv_bias_enabled:b do_cross_attention:b max_distance:i pos_shift_enabled:b dense_context_fmha:b
    use_paged_context_fmha:b use_fp8_context_fmha:b has_full_attention_mask:b use_cache:i is_spec_decoding_enabled:b
    spec_decoding_is_generation_length_variable:b spec_decoding_max_generation_length:i is_mla_enabled:b q_lora_rank:i
    kv_lora_rank:i qk_nope_head_dim:i qk_rope_head_dim:i v_head_dim:i fuse_fp4_quant:b skip_attn:b cp_size:i cp_rank:i
    cp_group:r use_logn_scaling:b
"""
_MOE_FIELDS = """
    remove_input_padding:i number_of_experts:i experts_per_token:i expert_hidden_size:i expert_inter_size:i
    groupwise_quant_algo:i group_size:i activation_type:i type_id:t weight_type_id:t output_type_id:t quant_mode:i
    use_bias:i use_final_scales:i tp_size:i tp_rank:i ep_size:i ep_rank:i force_determinism:i side_stream_id:i
    use_lora:i
"""


def _parse(text: str) -> tuple[FieldSpec, ...]:
    """Build field descriptions from ``name:code`` words: b INT8, i INT32, f FLOAT32, r ranks, t type id."""
    make: dict[str, Callable[[str], FieldSpec]] = {
        "b": lambda name: FieldSpec(name, PluginFieldType.INT8),
        "i": _int,
        "f": _float,
        "r": _ranks,
        "t": _type,
    }
    return tuple(make[code](name) for name, code in (word.split(":") for word in text.split()))


SPECS: tuple[PluginSpec, ...] = (
    PluginSpec(
        *ALL_REDUCE,
        v2=True,
        fields=(
            _ranks("group"),
            _type("type_id"),
            FieldSpec("strategy", PluginFieldType.INT8),
            FieldSpec("fusion_op", PluginFieldType.INT8),
            _float("eps"),
            _flag("affine"),
            _flag("bias"),
            _flag("scale"),
        ),
        outputs=_all_reduce,
        open_fields=True,
    ),
    PluginSpec(*ALL_GATHER, v2=True, fields=(_ranks("group"), _type("type_id")), outputs=_all_gather),
    PluginSpec(
        *GEMM,
        v2=True,
        fields=(
            _int("transa", 0, 1),
            _int("transb", 0, 1),
            _int("pad_lda", 0),
            _int("pad_ldb", 0),
            _type("type_id"),
            _int("use_fp8", 0, 1),
            _float("alpha"),
        ),
        outputs=_gemm,
        token_inputs=lambda fields, _count: frozenset() if _at(fields, "transa") else frozenset({0}),
    ),
    PluginSpec(*GPT_ATTENTION, v2=True, fields=_parse(_ATTENTION_FIELDS), outputs=_gpt_attention, open_fields=True),
    PluginSpec(
        *MIXTURE_OF_EXPERTS,
        v2=True,
        fields=_parse(_MOE_FIELDS),
        outputs=_mixture_of_experts,
        token_inputs=lambda fields, _count: frozenset({0, 3, 4} if _at(fields, "use_final_scales") else {0, 3}),
        open_fields=True,
    ),
)
