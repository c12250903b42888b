from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.model_config import PRESETS, ModelConfig, MoeConfig, RotaryScaling, make_config, preset


def tiny(**other: object) -> ModelConfig:
    values: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_size": 4,
        "intermediate_size": 50,
        "vocab_size": 101,
        "max_position_embeddings": 64,
    }
    return make_config("tiny", {**values, **other})


def parameters(config: ModelConfig) -> int:
    """Number of weights, the head counted apart."""
    h, d, f = config.hidden_size, config.head_size, config.intermediate_size
    attention = h * d * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    ffn = 3 * h * f * (config.moe.num_experts if config.moe else 1)
    return config.num_hidden_layers * (attention + ffn + 2 * h) + 2 * config.vocab_size * h


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2-135m", 0.163),  # 0.135 and the tied head once more
        ("llama-2-7b", 6.74),
        ("llama-2-13b", 13.02),
        ("llama-2-70b", 68.98),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.1-405b", 405.85),
        ("llama-3.2-1b", 1.50),  # tied: 1.24 + 0.26
        ("llama-3.2-3b", 3.61),  # tied: 3.21 + 0.39
        ("llama-3.3-70b", 70.55),
        ("qwen2.5-7b", 7.61),
        ("qwen2.5-72b", 72.7),
        ("mixtral-8x7b", 46.7),
        ("mixtral-8x22b", 140.6),
    ],
)
def test_presets_have_the_public_sizes(name: str, billions: float) -> None:
    assert parameters(preset(name)) / 1e9 == pytest.approx(billions, rel=0.005)


def test_every_preset_is_listed_above_and_frozen() -> None:
    assert len(PRESETS) == 14
    assert {config.kind for name, config in PRESETS.items() if name.startswith("mixtral")} == {"moe"}
    assert PRESETS["qwen2.5-72b"].qkv_bias
    with pytest.raises(ValidationError):
        PRESETS["llama-2-7b"].hidden_size = 1


def test_unknown_preset_lists_the_names() -> None:
    with pytest.raises(UserError, match=r"'gpt-5'.*llama-3.3-70b"):
        preset("gpt-5")


@pytest.mark.parametrize(
    ("tp_size", "heads", "kv_heads"),
    [(1, 9, 3), (2, 6, 2), (3, 3, 1), (4, 3, 1), (5, 3, 1), (8, 3, 1), (9, 1, 1)],
)
def test_heads_of_smollm2(tp_size: int, heads: int, kv_heads: int) -> None:
    local = preset("smollm2-135m").local(tp_size)
    assert (local.num_heads, local.num_kv_heads) == (heads, kv_heads)


def test_kv_heads_are_duplicated_only_where_it_works_out() -> None:
    config = preset("llama-3.3-70b")
    assert (config.local(16).num_heads, config.local(16).num_kv_heads, config.local(16).kv_replicas) == (4, 1, 2)
    assert config.local(8).kv_replicas == 1
    # 12 ranks are no multiple of 8 KV heads: padded to 12 with groups of 8.
    local = config.local(12)
    assert (local.kv_replicas, local.padded_num_kv_heads, local.padded_num_heads) == (1, 12, 96)


@given(kv_heads=st.integers(1, 8), group=st.integers(1, 8), ffn=st.integers(1, 99), tp_size=st.integers(1, 64))
def test_local_shapes_cover_the_model(kv_heads: int, group: int, ffn: int, tp_size: int) -> None:
    config = tiny(num_attention_heads=kv_heads * group, num_key_value_heads=kv_heads, intermediate_size=ffn)
    if tp_size > kv_heads * group:
        with pytest.raises(UserError, match=f"tp_size {tp_size} is larger"):
            config.local(tp_size)
        return
    local = config.local(tp_size)
    assert local.num_heads * tp_size == local.padded_num_heads >= kv_heads * group
    assert local.num_kv_heads * tp_size == local.padded_num_kv_heads * local.kv_replicas
    assert local.padded_num_heads == local.padded_num_kv_heads * group
    assert local.num_heads % local.num_kv_heads == 0
    assert local.intermediate_size * tp_size == local.padded_intermediate_size >= ffn
    assert local.padded_vocab_size - 101 < tp_size


def test_tp_size_below_one() -> None:
    with pytest.raises(UserError, match="tp_size 0"):
        tiny().local(0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_key_value_heads": 4}, "num_attention_heads 9 is not a multiple of num_key_value_heads 4"),
        ({"head_size": 5}, "head_size 5 is odd"),
        ({"hidden_size": 0}, "field hidden_size"),
        ({"dtype": "int8"}, "field dtype"),
        ({"architecture": "GPT2LMHeadModel"}, "field architecture"),
        ({"architecture": "MixtralForCausalLM"}, "needs experts"),
        ({"moe": MoeConfig(num_experts=4, top_k=2)}, "has no experts"),
        ({"moe": {"num_experts": 4, "top_k": 5}}, "top_k 5 is larger than num_experts 4"),
        ({"rotary_scaling": {"type": "llama3", "factor": 8, "high_freq_factor": 1}}, "high_freq_factor must be larger"),
        ({"colour": "red"}, "field colour"),
    ],
)
def test_inconsistent_values_name_the_field(other: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        tiny(**other)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("tiny")


def test_with_dtype() -> None:
    config = tiny()
    assert config.with_dtype(None) is config
    assert config.with_dtype("bfloat16").dtype == "bfloat16"
    with pytest.raises(UserError, match=r"'int4' is not served.*float16"):
        config.with_dtype("int4")


def test_json_round_trip() -> None:
    config = tiny(rotary_scaling=RotaryScaling(type="linear", factor=2))
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config
