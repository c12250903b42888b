"""Tiny checkpoint folders of Hugging Face and TensorRT-LLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from trtllm_tokenweave.checkpoint import RandomCheckpoint, full_shapes, numpy_dtype
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig, make_config

Array = NDArray[Any]
Tensors = dict[str, Array]

SIZES: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_size": 6,
    "intermediate_size": 12,
    "vocab_size": 21,
    "max_position_embeddings": 64,
    "norm_epsilon": 1e-6,
    "rotary_base": 5e5,
}
LLAMA3 = {
    "type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA = make_config("", SIZES | {"architecture": "LlamaForCausalLM", "rotary_scaling": LLAMA3})
QWEN = make_config("", SIZES | {"architecture": "Qwen2ForCausalLM", "qkv_bias": True})
MIXTRAL = make_config("", SIZES | {"architecture": "MixtralForCausalLM", "moe": {"num_experts": 3, "top_k": 2}})
ALL = pytest.mark.parametrize("config", [LLAMA, QWEN, MIXTRAL], ids=["llama", "qwen2", "mixtral"])


def full_tensors(config: ModelConfig) -> Tensors:
    """The model's tensors in its dtype; the router, which stays float32 in a network, in float32."""
    checkpoint = RandomCheckpoint(config, seed=5)
    tensors = {name: checkpoint.read_full(name) for name in full_shapes(config)}
    dtype = numpy_dtype(config.dtype)
    return {name: t if name.endswith("moe.gate.weight") else t.astype(dtype) for name, t in tensors.items()}


def hugging_face_json(config: ModelConfig) -> dict[str, Any]:
    data: dict[str, Any] = {
        "architectures": [config.architecture],
        "torch_dtype": config.dtype,
        "head_dim": config.head_size,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_scaling": None,
        "sliding_window": None,
    }
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        data[name] = getattr(config, name)
    for name in ("intermediate_size", "vocab_size", "max_position_embeddings"):
        data[name] = getattr(config, name)
    if config.rotary_scaling:
        data["rope_scaling"] = config.rotary_scaling.model_dump()
        data["rope_scaling"]["rope_type"] = data["rope_scaling"].pop("type")
    if config.moe:
        data |= {"num_local_experts": config.moe.num_experts, "num_experts_per_tok": config.moe.top_k}
    return data


def trtllm_json(config: ModelConfig, tp_size: int) -> dict[str, Any]:
    data = config.model_dump()
    moe = data.pop("moe")
    data |= {
        "moe": {"num_experts": 0, "top_k": 0, "normalization_mode": None},
        "mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1, "cp_size": 1, "moe_ep_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "hidden_act": "swiglu" if moe else "silu",
        "attn_bias": data.pop("qkv_bias"),
        "position_embedding_type": "rope_gpt_neox",
        "logits_dtype": "float32",
        "use_parallel_embedding": False,
    }
    if moe:
        data["moe"] = {"num_experts": moe["num_experts"], "top_k": moe["top_k"], "normalization_mode": 1}
    return data


def write_hugging_face(folder: Path, config: ModelConfig = LLAMA, **changes: Any) -> Tensors:
    tensors = full_tensors(config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hugging_face_json(config) | changes))
    return tensors


def write_trtllm(folder: Path, config: ModelConfig = LLAMA, tp_size: int = 2, **changes: Any) -> None:
    checkpoint = RandomCheckpoint(config, seed=5)
    for rank in range(tp_size):
        save_file(checkpoint.rank_weights(Mapping(tp_size, rank, tp_size)), folder / f"rank{rank}.safetensors")
    (folder / "config.json").write_text(json.dumps(trtllm_json(config, tp_size) | changes))


def rewrite(path: Path, change: Callable[[Tensors], object]) -> None:
    from safetensors.numpy import load_file

    tensors: Tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def same(found: Tensors, expected: Tensors) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name], tensor)
