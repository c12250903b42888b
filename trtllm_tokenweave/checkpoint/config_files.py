"""Reading a Hugging Face or a TensorRT-LLM checkpoint's config.json into a ModelConfig."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_tokenweave.checkpoint.fields import Fields, read_json
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.model_config import ARCHITECTURES, DTYPES, ModelConfig, make_config

_SERVED = f"use a model of {', '.join(ARCHITECTURES)}"
_NO_QUANT = "use the checkpoint with unquantized weights (float32, float16 or bfloat16)"
_DEFAULT_DTYPE = "float16"


@dataclass(frozen=True)
class HuggingFaceConfig:
    """What a Hugging Face folder's config.json says."""

    model: ModelConfig
    tie_word_embeddings: bool


@dataclass(frozen=True)
class TrtllmConfig:
    """What a TensorRT-LLM checkpoint's config.json says; ``embedding_sharding_dim`` is None where it isn't sharded."""

    model: ModelConfig
    tp_size: int
    share_embedding_table: bool
    embedding_sharding_dim: int | None


def read_hugging_face_config(path: Path, architecture_hint: str | None = None) -> HuggingFaceConfig:
    """Read ``config.json`` as transformers writes it (both the 4.x and the 5.x field names).

    Args:
        path: The file.
        architecture_hint: The architecture to take where the file names none.

    Raises:
        UserError: A field is missing, has the wrong type, or asks for something that is not served.
    """
    fields = Fields(read_json(path), str(path))
    architecture = _hugging_face_architecture(fields, architecture_hint)
    if fields.get("quantization_config") is not None:
        raise UserError("quantized weights are not served", where=fields.where("quantization_config"), fix=_NO_QUANT)
    fields.refuse("hidden_act", allowed=("silu",), fix="use a model whose feed-forward layers use silu (SwiGLU)")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if not (architecture == "Qwen2ForCausalLM" and name == "attention_bias"):
            fields.refuse(name, allowed=(False,))
    max_positions = fields.integer("max_position_embeddings")
    if architecture != "Qwen2ForCausalLM" and fields.integer("sliding_window", default=max_positions) < max_positions:
        window = fields.integer("sliding_window")
        raise UserError(
            f"a sliding window (of {window} tokens) is not served",
            where=fields.where("sliding_window"),
            fix=f"use a model without one, or set it to null and keep sequences within {window} tokens",
        )
    rope = fields.section("rope_parameters") or Fields({}, str(path))
    values = _common_sizes(fields) | {
        "architecture": architecture,
        "dtype": _dtype(fields, "torch_dtype", "dtype"),
        "max_position_embeddings": max_positions,
        "norm_epsilon": fields.number("rms_norm_eps", default=1e-6),
        "rotary_base": rope.number("rope_theta", default=fields.number("rope_theta", default=10000.0)),
        "rotary_scaling": _rotary_scaling(fields.section("rope_scaling") or rope),
        "qkv_bias": architecture == "Qwen2ForCausalLM",
    }
    values["head_size"] = fields.integer("head_dim", default=_head_size(values, fields))
    if architecture == "MixtralForCausalLM":
        values["moe"] = {
            "num_experts": fields.integer("num_local_experts"),
            "top_k": fields.integer("num_experts_per_tok"),
            "renormalize": True,
        }
    return HuggingFaceConfig(make_config(str(path), values), fields.flag("tie_word_embeddings"))


def read_trtllm_config(path: Path) -> TrtllmConfig:
    """Read ``config.json`` as TensorRT-LLM's ``convert_checkpoint.py`` writes it (0.8 to 1.2).

    Raises:
        UserError: A field is missing, has the wrong type, or asks for something that is not served.
    """
    fields = Fields(read_json(path), str(path))
    architecture = fields.text("architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(f"{architecture!r} is not served", where=fields.where("architecture"), fix=_SERVED)
    _refuse_trtllm_features(fields, architecture)
    mapping = fields.section("mapping") or fields
    for name in ("pp_size", "cp_size", "moe_ep_size"):
        mapping.refuse(name, allowed=(1, -1), fix=f"convert the checkpoint with {name} 1")
    values = _common_sizes(fields) | {
        "architecture": architecture,
        "dtype": _dtype(fields, "dtype"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "norm_epsilon": fields.number("norm_epsilon", default=1e-5),
        "rotary_base": fields.number("rotary_base", default=10000.0),
        "rotary_scaling": _rotary_scaling(fields.section("rotary_scaling")),
        "qkv_bias": fields.flag("attn_bias", default=architecture == "Qwen2ForCausalLM"),
        "moe": _trtllm_moe(fields),
    }
    values["head_size"] = fields.integer("head_size", default=_head_size(values, fields))
    sharded = fields.flag("use_parallel_embedding")
    return TrtllmConfig(
        model=make_config(str(path), values),
        tp_size=mapping.integer("tp_size", default=1),
        share_embedding_table=fields.flag("share_embedding_table") or fields.flag("tie_word_embeddings"),
        embedding_sharding_dim=fields.integer("embedding_sharding_dim", default=0) if sharded else None,
    )


def _hugging_face_architecture(fields: Fields, hint: str | None) -> str:
    names = fields.get("architectures") or ([hint] if hint else None)
    if names is None:
        raise UserError("is missing", where=fields.where("architectures"), fix=_SERVED)
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise UserError(f"{names!r} is not served", where=fields.where("architectures"), fix=_SERVED)
    return str(names[0])


def _refuse_trtllm_features(fields: Fields, architecture: str) -> None:
    quantization = fields.section("quantization")
    for name in ("quant_algo", "kv_cache_quant_algo"):
        if quantization is not None:
            quantization.refuse(name, allowed=(), what="quantization is not served", fix=_NO_QUANT)
    # The MoE layer spells the gated activation out.
    fields.refuse("hidden_act", allowed=("swiglu",) if architecture == "MixtralForCausalLM" else ("silu",))
    fields.refuse(
        "position_embedding_type", allowed=("rope_gpt_neox",), fix="use a model with rotary embedding (rope_gpt_neox)"
    )
    if architecture != "Qwen2ForCausalLM":
        fields.refuse("attn_bias", allowed=(False,))
    for name in ("mlp_bias", "residual_mlp", "qk_layernorm", "use_logn_attn", "fc_after_embed"):
        fields.refuse(name, allowed=(False,))
    for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "output_multiplier_scale"):
        fields.refuse(name, allowed=(1, 1.0))
    fields.refuse("rotary_pct", allowed=(1, 1.0))


def _trtllm_moe(fields: Fields) -> dict[str, Any] | None:
    section = fields.section("moe")
    if section is None:
        section, names = fields, ("moe_num_experts", "moe_top_k", "moe_normalization_mode")
    else:
        section.refuse("shared_expert_intermediate_size", allowed=(0,))
        names = ("num_experts", "top_k", "normalization_mode")
    num_experts = section.integer(names[0], default=0)
    if num_experts == 0:
        return None
    # ExpertScaleNormalizationMode: 0 NONE, 1 RENORMALIZE; the others belong to other model families.
    section.refuse(names[2], allowed=(0, 1))
    renormalize = section.integer(names[2], default=1) == 1
    return {"num_experts": num_experts, "top_k": section.integer(names[1]), "renormalize": renormalize}


def _common_sizes(fields: Fields) -> dict[str, Any]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    sizes = {name: fields.integer(name) for name in names}
    sizes["num_key_value_heads"] = fields.integer("num_key_value_heads", default=sizes["num_attention_heads"])
    return sizes


def _head_size(sizes: dict[str, Any], fields: Fields) -> int:
    heads = sizes["num_attention_heads"]
    if heads < 1:
        raise UserError(
            f"is {heads}, expected at least 1",
            where=fields.where("num_attention_heads"),
            fix="copy the model's own config.json again",
        )
    return int(sizes["hidden_size"] // heads)


def _dtype(fields: Fields, *names: str) -> str:
    dtype = fields.text(*names, default=_DEFAULT_DTYPE)
    if dtype not in DTYPES:
        raise UserError(f"{dtype!r} is not served", where=fields.where(names[0]), fix=f"one of {', '.join(DTYPES)}")
    return dtype


def _rotary_scaling(section: Fields | None) -> dict[str, Any] | None:
    if section is None:
        return None
    kind = section.text("rope_type", "type", default="default")
    if kind == "default":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": section.number("factor")}
    if kind != "llama3":
        raise UserError(f"{kind!r} is not served", where=section.where("rope_type"), fix="use llama3, linear or none")
    return {
        "type": "llama3",
        "factor": section.number("factor", default=8.0),
        "low_freq_factor": section.number("low_freq_factor", default=1.0),
        "high_freq_factor": section.number("high_freq_factor", default=4.0),
        "original_max_position_embeddings": section.integer("original_max_position_embeddings", default=8192),
    }
