"""The built networks compute the models: against a plain numpy forward pass, and for every tp_size the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from trtllm_tokenweave.checkpoint import RandomCheckpoint
from trtllm_tokenweave.comm import LocalComm
from trtllm_tokenweave.interpreter.context import ExecutionContext
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.llama.rope import inverse_frequencies
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig, MoeConfig, RotaryScaling
from trtllm_tokenweave.recorder import RecordedNetwork
from trtllm_tokenweave.runner import GenerationLimits, make_generator

Array = NDArray[np.float64]
LIMITS = GenerationLimits(max_num_tokens=16, max_batch_size=2, max_seq_len=32, max_new_tokens=3, tokens_per_block=8)
PROMPTS = [[1, 7, 3, 9, 2], [4, 4, 11, 0, 5, 6, 8, 12, 3, 1, 2]]


def config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_size": 4,
        "intermediate_size": 20,
        "vocab_size": 23,
        "max_position_embeddings": 32,
    }
    return ModelConfig(**(values | changes))


MODELS = {
    "llama": config(),
    "scaled": config(rotary_scaling=RotaryScaling(type="llama3", factor=4.0, original_max_position_embeddings=8)),
    "qwen": config(architecture="Qwen2ForCausalLM", qkv_bias=True),
    "mixtral": config(architecture="MixtralForCausalLM", moe=MoeConfig(num_experts=4, top_k=2)),
}


def generate(model: ModelConfig, tp_size: int, **options: Any) -> tuple[list[list[int]], list[NDArray[np.float32]]]:
    """Greedy tokens of both prompts and the logits that chose them."""
    checkpoint = RandomCheckpoint(model, seed=3)
    contexts = []
    for rank, comm in enumerate(LocalComm.group(tp_size)):
        mapping, network = Mapping(tp_size, rank, tp_size), RecordedNetwork()
        limits = NetworkOptions(max_seq_len=32, max_num_tokens=16, max_batch_size=2, tokens_per_block=8, **options)
        build_llama(network, model, mapping, checkpoint.rank_weights(mapping), limits)
        contexts.append(ExecutionContext(network, comm))
    result = make_generator(contexts, model, tp_size, LIMITS).generate(PROMPTS)
    return result.tokens, [np.stack(g.logits) for g in result.generations]


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight)


def _silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


class Reference:
    """A decoder in float64, from the whole model's weights under Hugging Face's names; no cache, no batching."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self.checkpoint = RandomCheckpoint(model, seed=3)

    def weight(self, name: str) -> Array:
        return np.asarray(self.checkpoint.read_full(name), np.float64)

    def logits(self, tokens: list[int]) -> Array:
        """Logits of the last token."""
        x = self.weight("model.embed_tokens.weight")[tokens]
        for i in range(self.model.num_hidden_layers):
            path, eps = f"model.layers.{i}.", self.model.norm_epsilon
            x = x + self.attention(_norm(x, self.weight(f"{path}input_layernorm.weight"), eps), f"{path}self_attn.")
            h = _norm(x, self.weight(f"{path}post_attention_layernorm.weight"), eps)
            x = x + (self.experts(h, path) if self.model.moe else self.mlp(h, f"{path}mlp.", ("gate", "up", "down")))
        last = _norm(x[-1], self.weight("model.norm.weight"), self.model.norm_epsilon)
        return self.weight("lm_head.weight") @ last

    def mlp(self, x: Array, path: str, names: tuple[str, str, str], suffix: str = "_proj") -> Array:
        gate, up, down = (self.weight(f"{path}{n}{suffix}.weight") for n in names)
        return (_silu(x @ gate.T) * (x @ up.T)) @ down.T

    def experts(self, x: Array, path: str) -> Array:
        moe, path = self.model.moe, f"{path}block_sparse_moe."
        assert moe is not None
        out = np.zeros_like(x)
        for row, scores in enumerate(x @ self.weight(f"{path}gate.weight").T):
            best = np.argsort(-scores)[: moe.top_k]
            shares = np.exp(scores[best]) / np.exp(scores[best]).sum()
            for expert, share in zip(best, shares, strict=True):
                out[row] += share * self.mlp(x[row], f"{path}experts.{expert}.", ("w1", "w3", "w2"), "")
        return out

    def attention(self, x: Array, path: str) -> Array:
        q, k, v = (self.heads(x, f"{path}{n}_proj.") for n in "qkv")
        q, k = self.turned(q), self.turned(k)
        group = q.shape[1] // k.shape[1]
        out = np.empty_like(q)
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(self.model.head_size)
            scores += np.triu(np.full(scores.shape, -np.inf), 1)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, head // group]
        return out.reshape(len(x), -1) @ self.weight(f"{path}o_proj.weight").T

    def heads(self, x: Array, path: str) -> Array:
        y = x @ self.weight(f"{path}weight").T
        if self.model.qkv_bias:
            y = y + self.weight(f"{path}bias")
        return y.reshape(len(x), -1, self.model.head_size)

    def turned(self, x: Array) -> Array:
        angles = np.arange(len(x))[:, None, None] * inverse_frequencies(self.model).astype(np.float64)
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate(
            (a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)), axis=-1
        )


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_a_plain_forward_pass(name: str) -> None:
    """Prefill (in chunks: 16 prompt tokens do not fit one step) and decode."""
    tokens, logits = generate(MODELS[name], 1)
    reference = Reference(MODELS[name])
    for prompt, chosen, rows in zip(PROMPTS, tokens, logits, strict=True):
        for step in range(len(chosen)):
            expected = reference.logits([*prompt, *chosen[:step]])
            assert rows[step] == pytest.approx(expected, rel=1e-4, abs=1e-5)
            assert chosen[step] == int(np.argmax(expected))


@pytest.mark.parametrize("name", ["llama", "qwen", "mixtral"])
@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_every_tp_size_gives_the_same(name: str, tp_size: int) -> None:
    """Heads, FFN channels and vocabulary that tp_size does not divide are padded with zero weights."""
    alone, together = generate(MODELS[name], 1), generate(MODELS[name], tp_size)
    assert together[0] == alone[0]
    for a, b in zip(alone[1], together[1], strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"reduce_fusion": True},
        {"gemm_plugin": True},
        {"use_fused_mlp": False},
        {"residual_multiplier": 1.0},
        {"all_reduce_strategy": "AUTO"},
    ],
)
def test_build_options_do_not_change_the_result(options: dict[str, Any]) -> None:
    plain, other = generate(MODELS["llama"], 2), generate(MODELS["llama"], 2, **options)
    assert other[0] == plain[0]
    for a, b in zip(plain[1], other[1], strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_stays_near_float32(dtype: str) -> None:
    model = MODELS["llama"]
    first = [rows[0] for rows in generate(model, 2)[1]]
    for options in ({}, {"nccl_dtype": "float32"}):
        low = [rows[0] for rows in generate(model.with_dtype(dtype), 2, **options)[1]]
        for a, b in zip(first, low, strict=True):
            assert b == pytest.approx(a, abs=0.15 if dtype == "bfloat16" else 0.02)
