"""Sharding and padding leave the model's function as it is: proved against a plain forward pass without any cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trtllm_tokenweave.checkpoint import GgufCheckpoint, RandomCheckpoint, numpy_dtype, rank_shapes, smollm2_gguf
from trtllm_tokenweave.checkpoint.sharding import take_columns, take_rows
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig, make_config

Array = NDArray[Any]
Weights = dict[str, Array]
Read = Callable[[str], Array]

TOKENS = [3, 100, 7, 7, 0, 41]
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "head_size": 4,
    "intermediate_size": 50,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}
LLAMA = make_config(
    "llama", SIZES | {"architecture": "LlamaForCausalLM", "num_attention_heads": 9, "num_key_value_heads": 3}
)
QWEN = make_config(
    "qwen",
    SIZES | {"architecture": "Qwen2ForCausalLM", "num_attention_heads": 8, "num_key_value_heads": 2, "qkv_bias": True},
)
MIXTRAL = make_config(
    "mixtral",
    SIZES
    | {
        "architecture": "MixtralForCausalLM",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "moe": {"num_experts": 4, "top_k": 2},
    },
)


def norm(x: Array, gamma: Array, eps: float) -> Array:
    result: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * gamma
    return result


def silu(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x))
    return result


def attend(q: Array, k: Array, v: Array, config: ModelConfig) -> Array:
    """Causal attention with rotary embedding; rows [n, heads * d], each KV head serving its group of query heads."""
    n, d = len(q), config.head_size
    angles = np.outer(np.arange(n), config.rotary_base ** (-np.arange(0, d, 2) / d)).astype(q.dtype)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def turn(x: Array) -> Array:
        low, high = np.split(x.reshape(n, -1, d), 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    queries, keys, values = turn(q), turn(k), v.reshape(n, -1, d)
    group = queries.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("ihd,jhd->hij", queries, keys) / np.sqrt(d).astype(q.dtype)
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed: Array = np.einsum("hij,jhd->ihd", scores, values)
    return mixed.reshape(n, -1)


def expert_weights(x: Array, router: Array, config: ModelConfig) -> Array:
    """[n, experts]: the softmax over the chosen experts, 0 for the others."""
    assert config.moe is not None
    logits = x @ router.T
    kth = np.sort(logits, axis=-1)[:, -config.moe.top_k][:, None]
    chosen = np.where(logits >= kth, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0)
    result: Array = chosen / chosen.sum(axis=-1, keepdims=True)
    return result


def full_forward(config: ModelConfig, read: Read, tokens: list[int]) -> Array:
    """Logits [n, vocab] of the whole model from its Hugging Face tensors, in float64."""

    def get(name: str) -> Array:
        return read(name).astype(np.float64)

    x = get("model.embed_tokens.weight")[tokens]
    for index in range(config.num_hidden_layers):
        p = f"model.layers.{index}."
        y = norm(x, get(p + "input_layernorm.weight"), config.norm_epsilon)
        qkv = [
            y @ get(f"{p}self_attn.{i}_proj.weight").T + (get(f"{p}self_attn.{i}_proj.bias") if config.qkv_bias else 0)
            for i in "qkv"
        ]
        x = x + attend(qkv[0], qkv[1], qkv[2], config) @ get(p + "self_attn.o_proj.weight").T
        y = norm(x, get(p + "post_attention_layernorm.weight"), config.norm_epsilon)
        if config.moe is None:
            inner = silu(y @ get(p + "mlp.gate_proj.weight").T) * (y @ get(p + "mlp.up_proj.weight").T)
            x = x + inner @ get(p + "mlp.down_proj.weight").T
            continue
        share = expert_weights(y, get(p + "block_sparse_moe.gate.weight"), config)
        branch = np.zeros_like(x)
        for e in range(config.moe.num_experts):
            w1, w2, w3 = (get(f"{p}block_sparse_moe.experts.{e}.w{i}.weight") for i in (1, 2, 3))
            branch += share[:, e : e + 1] * ((silu(y @ w1.T) * (y @ w3.T)) @ w2.T)
        x = x + branch
    logits: Array = norm(x, get("model.norm.weight"), config.norm_epsilon) @ get("lm_head.weight").T
    return logits


def rank_attention(config: ModelConfig, w: Weights, prefix: str, y: Array) -> Array:
    local = w[prefix + "attention.dense.weight"].shape[1]
    qkv = y @ w[prefix + "attention.qkv.weight"].T
    if config.qkv_bias:
        qkv = qkv + w[prefix + "attention.qkv.bias"]
    q, k, v = np.split(qkv, [local, (qkv.shape[1] + local) // 2], axis=1)
    result: Array = attend(q, k, v, config) @ w[prefix + "attention.dense.weight"].T
    return result


def rank_ffn(config: ModelConfig, w: Weights, prefix: str, y: Array) -> Array:
    if config.moe is None:
        inner = silu(y @ w[prefix + "mlp.fc.weight"].T) * (y @ w[prefix + "mlp.gate.weight"].T)
        result: Array = inner @ w[prefix + "mlp.proj.weight"].T
        return result
    share = expert_weights(y, w[prefix + "mlp.router.weight"], config)
    total = np.zeros_like(y)
    for e in range(config.moe.num_experts):
        up, gate = np.split(y @ w[prefix + "mlp.fc.weight"][e].T, 2, axis=1)
        total += share[:, e : e + 1] * ((silu(gate) * up) @ w[prefix + "mlp.proj.weight"][e].T)
    return total


def rank_forward(config: ModelConfig, ranks: list[Weights], tokens: list[int], last_only: bool = False) -> Array:
    """Logits [n, vocab]: branches summed over the ranks, as tensor parallelism does."""
    x = ranks[0]["transformer.vocab_embedding.weight"][tokens]
    for index in range(config.num_hidden_layers):
        p = f"transformer.layers.{index}."
        y = norm(x, ranks[0][p + "input_layernorm.weight"], config.norm_epsilon)
        x = x + sum(rank_attention(config, w, p, y) for w in ranks)
        y = norm(x, ranks[0][p + "post_layernorm.weight"], config.norm_epsilon)
        x = x + sum(rank_ffn(config, w, p, y) for w in ranks)
    x = norm(x[-1:] if last_only else x, ranks[0]["transformer.ln_f.weight"], config.norm_epsilon)
    logits = np.concatenate([x @ w["lm_head.weight"].T for w in ranks], axis=1)
    return logits[:, : config.vocab_size]


def all_ranks(checkpoint: RandomCheckpoint | GgufCheckpoint, tp_size: int) -> list[Weights]:
    return [checkpoint.rank_weights(Mapping(tp_size, rank, tp_size)) for rank in range(tp_size)]


def as_double(ranks: list[Weights]) -> list[Weights]:
    return [{name: tensor.astype(np.float64) for name, tensor in w.items()} for w in ranks]


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("config", [LLAMA, QWEN, MIXTRAL], ids=["llama", "qwen2", "mixtral"])
def test_ranks_together_are_the_unsharded_model(config: ModelConfig, tp_size: int) -> None:
    checkpoint = RandomCheckpoint(config, seed=1)
    expected = full_forward(config, checkpoint.read_full, TOKENS)
    ranks = all_ranks(checkpoint, tp_size)
    for weights in ranks:
        assert {name: tensor.shape for name, tensor in weights.items()} == rank_shapes(config, tp_size)
        assert list(weights) == list(rank_shapes(config, tp_size))
    found = rank_forward(config, as_double(ranks), TOKENS)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 4),
    ffn=st.integers(1, 9),
    tp_size=st.integers(1, 8),
    bias=st.booleans(),
)
def test_any_shape_can_be_sharded(kv_heads: int, group: int, ffn: int, tp_size: int, bias: bool) -> None:
    sizes = SIZES | {"num_hidden_layers": 1, "intermediate_size": ffn, "vocab_size": 7, "qkv_bias": bias}
    heads = {"num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads}
    config = make_config("any", sizes | heads | {"architecture": "LlamaForCausalLM"})
    checkpoint = RandomCheckpoint(config, seed=2)
    if tp_size > kv_heads * group:
        with pytest.raises(UserError, match="tp_size"):
            all_ranks(checkpoint, tp_size)
        return
    expected = full_forward(config, checkpoint.read_full, [0, 5, 3])
    found = rank_forward(config, as_double(all_ranks(checkpoint, tp_size)), [0, 5, 3])
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_a_wrong_head_would_be_seen() -> None:
    """The oracle tells the right sharding from one that swaps two KV heads."""
    checkpoint = RandomCheckpoint(QWEN, seed=1)
    ranks = as_double(all_ranks(checkpoint, 4))
    names = [name for name in ranks[0] if "qkv" in name]
    for name in names:
        ranks[0][name], ranks[2][name] = ranks[2][name], ranks[0][name]
    expected = full_forward(QWEN, checkpoint.read_full, TOKENS)
    assert np.abs(rank_forward(QWEN, ranks, TOKENS) - expected).max() > 1e-3


def test_random_weights_are_the_same_model_for_every_dtype_and_seed_decides() -> None:
    base = RandomCheckpoint(LLAMA, seed=3).rank_weights(Mapping())
    half = RandomCheckpoint(LLAMA.with_dtype("bfloat16"), seed=3).rank_weights(Mapping())
    other = RandomCheckpoint(LLAMA, seed=4).rank_weights(Mapping())
    for name, tensor in base.items():
        np.testing.assert_array_equal(tensor.astype(numpy_dtype("bfloat16")), half[name])
        assert not np.array_equal(tensor, other[name])


def test_integer_weights_are_small_and_norms_one() -> None:
    weights = RandomCheckpoint(MIXTRAL.with_dtype("float16"), integer=True).rank_weights(Mapping(2, 0, 2))
    for name, tensor in weights.items():
        router = name.endswith("router.weight")
        assert tensor.dtype == (np.float32 if router else np.float16)
        if "layernorm" in name or "ln_f" in name:
            assert (tensor == 1).all()
        else:
            assert set(np.unique(tensor)) <= {-2, -1, 0, 1, 2}


def test_what_is_not_sharded_is_shared_and_all_is_read_only() -> None:
    checkpoint = RandomCheckpoint(LLAMA)
    first, second = all_ranks(checkpoint, 2)
    assert first["transformer.vocab_embedding.weight"] is second["transformer.vocab_embedding.weight"]
    assert checkpoint.rank_weights(Mapping(2, 1, 2))["lm_head.weight"] is second["lm_head.weight"]
    assert np.shares_memory(first["lm_head.weight"], checkpoint.rank_weights(Mapping(2, 0, 2))["lm_head.weight"])
    # Rows are views of one array: the fc shards of both ranks have the same base.
    name = "transformer.layers.0.mlp.fc.weight"
    assert first[name].base is second[name].base is not None
    with pytest.raises(ValueError, match="read-only"):
        first[name][0, 0] = 1


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_one_rank_alone_gets_the_same_weights_and_holds_nothing_else(config: ModelConfig) -> None:
    expected = all_ranks(RandomCheckpoint(config), 4)[3]
    found = RandomCheckpoint(config).rank_weights(Mapping(4, 3, 4), only_this_rank=True)
    assert list(found) == list(expected)
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, expected[name])
        assert tensor.base is None or tensor.base.nbytes == tensor.nbytes


def test_slices_pad_with_zeros_and_are_views_where_they_can_be() -> None:
    matrix = np.arange(12.0).reshape(3, 4)
    assert take_rows(matrix, 1, 2).base is not None
    np.testing.assert_array_equal(take_rows(matrix, 2, 2), [[8, 9, 10, 11], [0, 0, 0, 0]])
    np.testing.assert_array_equal(take_rows(matrix, 5, 1), np.zeros((1, 4)))
    assert take_columns(matrix, 0, 4) is matrix
    assert take_columns(matrix, 1, 2).flags.c_contiguous
    np.testing.assert_array_equal(take_columns(matrix, 3, 2), [[3, 0], [7, 0], [11, 0]])
    np.testing.assert_array_equal(take_columns(matrix, 6, 1), np.zeros((3, 1)))


def test_values_beyond_float16_are_refused() -> None:
    class Huge(RandomCheckpoint):
        def read_full(self, name: str) -> Array:
            return super().read_full(name) * (1e6 if name == "lm_head.weight" else 1)

    with pytest.raises(UserError, match=r"lm_head.weight has values beyond float16.*bfloat16"):
        Huge(LLAMA.with_dtype("float16")).rank_weights(Mapping())


@pytest.mark.slow
def test_smollm2_answers_and_padding_keeps_its_logits() -> None:
    checkpoint = GgufCheckpoint(smollm2_gguf())
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(question))
    padded = rank_forward(checkpoint.config, all_ranks(checkpoint, 4), prompt, last_only=True)
    whole = all_ranks(checkpoint, 1)
    answer: list[int] = []
    for _ in range(9):
        logits = rank_forward(checkpoint.config, whole, prompt + answer, last_only=True)
        if not answer:
            np.testing.assert_allclose(padded, logits, rtol=1e-3, atol=2e-4)
        answer.append(int(logits[0].argmax()))
        if "Paris" in tokenizer.decode(answer) or answer[-1] in tokenizer.eos_ids:
            break
    assert tokenizer.decode(answer).endswith("Paris")
