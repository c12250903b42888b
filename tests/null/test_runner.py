"""Generation over the interpreter against a plain model that keeps no cache, and the generator's bookkeeping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models import small

from trtllm_tokenweave.checkpoint import RandomCheckpoint
from trtllm_tokenweave.comm import LocalComm
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.interpreter import ExecutionContext
from trtllm_tokenweave.kv_cache import KvCachePool
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.mapping import Mapping as RankMapping
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.recorder import RecordedNetwork
from trtllm_tokenweave.runner import (
    GenerationLimits,
    GenerationResult,
    Generator,
    Produced,
    StepInputs,
    StepRecord,
    make_generator,
)

Array = NDArray[Any]


tiny = partial(small, dtype="float32", vocab_size=61, max_position_embeddings=128)
LIMITS = GenerationLimits(max_num_tokens=16, max_batch_size=3, max_seq_len=64, max_new_tokens=6, tokens_per_block=8)


@cache
def contexts(config: ModelConfig, tp_size: int, exact: bool = False) -> list[ExecutionContext]:
    checkpoint = RandomCheckpoint(config, seed=3)
    made = []
    for comm in LocalComm.group(tp_size):
        mapping = RankMapping(world_size=tp_size, rank=comm.rank, tp_size=tp_size)
        network = RecordedNetwork()
        options = NetworkOptions(max_num_tokens=64, max_seq_len=64, tokens_per_block=8)
        build_llama(network, config, mapping, checkpoint.rank_weights(mapping), options)
        made.append(ExecutionContext(network, comm, exact=exact))
    return made


def generate(
    config: ModelConfig, tp_size: int, limits: GenerationLimits, exact: bool = False, prompts: Any = None
) -> GenerationResult:
    generator = make_generator(contexts(config, tp_size, exact), config, tp_size, limits)
    return generator.generate(PROMPTS if prompts is None else prompts)


_rng = np.random.default_rng(11)
PROMPTS: list[list[int]] = [_rng.integers(0, 61, n).tolist() for n in (5, 37, 1, 18, 9)]


class Reference:
    """The model's forward pass over a whole sequence in float64: no cache, no ranks, no batching."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        weights = RandomCheckpoint(config, seed=3).rank_weights(RankMapping())
        self.w = {name: np.asarray(x).astype(np.float64) for name, x in weights.items()}

    def logits(self, tokens: Sequence[int]) -> Array:
        """Logits of the last token [vocab_size]."""
        w, c = self.w, self.config
        h = w["transformer.vocab_embedding.weight"][list(tokens)]
        for i in range(c.num_hidden_layers):
            layer = f"transformer.layers.{i}"
            h = h + self._attention(f"{layer}.attention", self._norm(h, f"{layer}.input_layernorm.weight"))
            h = h + self._mlp(f"{layer}.mlp", self._norm(h, f"{layer}.post_layernorm.weight"))
        last: Array = self._norm(h, "transformer.ln_f.weight")[-1] @ w["lm_head.weight"].T
        return last[: c.vocab_size]

    def _norm(self, h: Array, name: str) -> Array:
        normed: Array = h / np.sqrt((h**2).mean(-1, keepdims=True) + self.config.norm_epsilon) * self.w[name]
        return normed

    def _attention(self, name: str, x: Array) -> Array:
        c, n = self.config, len(x)
        qkv = (x @ self.w[f"{name}.qkv.weight"].T + self.w.get(f"{name}.qkv.bias", 0.0)).reshape(n, -1, c.head_size)
        angles = np.arange(n)[:, None] / c.rotary_base ** (np.arange(0, c.head_size, 2) / c.head_size)
        half, heads, kv = c.head_size // 2, c.num_attention_heads, c.num_key_value_heads
        z = (qkv[..., :half] + 1j * qkv[..., half:]) * np.exp(1j * angles)[:, None]
        turned = np.concatenate([z.real, z.imag], -1)
        q, k = turned[:, :heads], np.repeat(turned[:, heads : heads + kv], heads // kv, axis=1)
        v = np.repeat(qkv[:, heads + kv :], heads // kv, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(c.head_size)
        scores += np.triu(np.full((n, n), -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(n, -1)
        result: Array = out @ self.w[f"{name}.dense.weight"].T
        return result

    def _mlp(self, name: str, x: Array) -> Array:
        fc, proj = self.w[f"{name}.fc.weight"], self.w[f"{name}.proj.weight"]
        moe = self.config.moe
        if moe is None:
            gate = x @ fc.T
            dense: Array = (gate / (1 + np.exp(-gate)) * (x @ self.w[f"{name}.gate.weight"].T)) @ proj.T
            return dense
        logits = x @ self.w[f"{name}.router.weight"].T
        chosen = np.sort(logits, axis=1)[:, -moe.top_k]
        weights = np.where(logits >= chosen[:, None], np.exp(logits), 0.0)
        both = np.einsum("nh,efh->nef", x, fc)
        up, gate = np.split(both, 2, axis=-1)
        experts = np.einsum("nef,ehf->neh", up * gate / (1 + np.exp(-gate)), proj)
        mixed: Array = np.einsum("ne,neh->nh", weights / weights.sum(1, keepdims=True), experts)
        return mixed


@cache
def expected(config: ModelConfig) -> tuple[list[list[int]], list[list[Array]]]:
    """Greedy tokens and their logits per prompt, each token from a forward pass over everything before it."""
    reference = Reference(config)
    tokens: list[list[int]] = []
    logits: list[list[Array]] = []
    for prompt in PROMPTS:
        made: list[int] = []
        rows = []
        for _ in range(LIMITS.max_new_tokens):
            rows.append(reference.logits([*prompt, *made]))
            made.append(int(np.argmax(rows[-1])))
        tokens.append(made)
        logits.append(rows)
    return tokens, logits


@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM"])
def test_greedy_generation_equals_a_model_without_a_cache(architecture: str, tp_size: int) -> None:
    config = tiny(architecture)
    result = generate(config, tp_size, LIMITS)
    tokens, logits = expected(config)
    assert result.tokens == tokens
    for generation, rows in zip(result.generations, logits, strict=True):
        np.testing.assert_allclose(np.stack(generation.logits), np.stack(rows), atol=2e-4)
    # Prompts longer than a step, sequences joining and leaving: chunks and generation really shared steps.
    assert any(0 < s.num_contexts < s.batch for s in result.steps)
    assert any(s.num_contexts == 0 for s in result.steps)
    assert sum(s.num_contexts for s in result.steps) > len(PROMPTS)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_chunked_prefill_equals_prefill_in_one_step(tp_size: int) -> None:
    config = tiny()
    whole = generate(config, tp_size, GenerationLimits(64, 1, 64, 6, 8), exact=True)
    chunked = generate(config, tp_size, LIMITS, exact=True)
    assert len(whole.steps) == len(PROMPTS) * LIMITS.max_new_tokens
    assert whole.tokens == chunked.tokens
    for a, b in zip(whole.generations, chunked.generations, strict=True):
        assert np.stack(a.logits).tobytes() == np.stack(b.logits).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_ranks_agree_with_one_rank(dtype: str) -> None:
    config = tiny(dtype=dtype)
    one, two = (generate(config, tp, LIMITS) for tp in (1, 2))
    for a, b in zip(one.generations, two.generations, strict=True):
        np.testing.assert_allclose(a.logits[0], b.logits[0], atol=0.08)


# --- bookkeeping, with a stand-in for the engine -----------------------------------------------------------------


class Engine:
    """A stand-in: the next token is the last token plus one, modulo the vocabulary; records what it was given."""

    def __init__(self, vocab: int = 61) -> None:
        self.vocab = vocab
        self.inputs: list[StepInputs] = []

    def __call__(self, inputs: list[StepInputs]) -> Array:
        step = inputs[0]
        self.inputs.append(step)
        last = step["input_ids"][step["last_token_ids"] - 1]
        # Padding columns hold the largest logits of all, and must never be chosen.
        logits = np.zeros((len(last), self.vocab + 3), np.float32)
        logits[:, self.vocab :] = 9.0
        logits[np.arange(len(last)), (last + 1) % self.vocab] = 1.0
        return logits


def generator(limits: GenerationLimits, **options: Any) -> tuple[Generator, Engine]:
    engine = Engine()
    pools = [KvCachePool(limits.cache(tiny(), 1))]
    return Generator(engine, pools, tp_size=1, vocab_size=61, limits=limits, **options), engine


def test_contexts_come_first_and_chunks_are_whole_blocks() -> None:
    made, engine = generator(LIMITS)
    result = made.generate([[1] * 5, [2] * 37])
    assert result.tokens == [[2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 8]]
    chunks = [(s["host_request_types"].tolist(), s["host_context_lengths"].tolist()) for s in engine.inputs[:5]]
    assert chunks == [
        ([0, 0], [5, 8]),
        ([0, 1], [8, 5]),
        ([0, 1], [8, 5]),
        ([0, 1], [13, 5]),
        ([1, 1], [5, 37]),
    ]
    assert engine.inputs[3]["host_past_key_value_lengths"].tolist() == [37, 7]
    assert [s.num_tokens for s in result.steps[:5]] == [13, 9, 9, 14, 2]


def test_end_token_ends_a_sequence_and_frees_its_place() -> None:
    limits = GenerationLimits(16, 1, 64, 6, 8, eos_ids=frozenset({12}))
    made, engine = generator(limits)
    result = made.generate([[9], [30]])
    assert result.tokens == [[10, 11, 12], [31, 32, 33, 34, 35, 36]]
    assert [g.ended_by_eos for g in result.generations] == [True, False]
    assert len(engine.inputs) == 9


def test_sequences_wait_for_blocks() -> None:
    # Room for two full sequences of 2 blocks each; a third waits for one of them.
    made, _ = generator(GenerationLimits(16, 8, 16, 6, 8, num_blocks=5))
    result = made.generate([[1] * 9, [2] * 9, [3] * 9])
    assert max(s.batch for s in result.steps) == 2
    assert result.tokens[2] == [4, 5, 6, 7, 8, 9]


def test_callback_sees_each_step_before_it_runs() -> None:
    seen: list[tuple[StepRecord, int]] = []
    made, engine = generator(LIMITS, on_step=lambda record, inputs: seen.append((record, len(inputs["input_ids"]))))
    result = made.generate([[1] * 20])
    assert [record for record, _ in seen] == result.steps
    assert [tokens for _, tokens in seen] == [s.num_tokens for s in result.steps]
    assert len(engine.inputs) == len(seen)


def test_equal_logits_choose_the_lowest_token() -> None:
    pools = [KvCachePool(LIMITS.cache(tiny(), 1))]
    made = Generator(
        lambda i: np.ones((len(i[0]["last_token_ids"]), 61), np.float32), pools, tp_size=1, vocab_size=61, limits=LIMITS
    )
    assert made.generate([[5]]).tokens == [[0] * 6]


@pytest.mark.parametrize(
    ("prompt", "limits", "message"),
    [
        ([], LIMITS, "prompt 0: is empty"),
        ([1, 61], LIMITS, "prompt 0: token 61 is outside the vocabulary of 61"),
        ([1] * 59, LIMITS, "59 tokens and 6 new ones exceed max_seq_len 64"),
        ([1] * 30, GenerationLimits(16, 3, 64, 6, 8, num_blocks=4), "needs 5 KV-cache blocks, there are 4"),
    ],
)
def test_bad_prompts_are_refused(prompt: list[int], limits: GenerationLimits, message: str) -> None:
    with pytest.raises(UserError, match=message):
        generator(limits)[0].generate([prompt])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_num_tokens": 7, "max_batch_size": 8}, "max_num_tokens 7 is less than"),
        ({"max_num_tokens": 8, "tokens_per_block": 32}, "max_num_tokens 8 is less than"),
    ],
)
def test_impossible_limits_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GenerationLimits(**changes)


def test_more_positions_than_the_model_has_are_refused() -> None:
    with pytest.raises(UserError, match="max_seq_len 256 exceeds the model's 128"):
        make_generator(contexts(tiny(), 1), tiny(), 1, GenerationLimits(max_seq_len=256))


def test_logits_that_are_not_finite_are_an_error() -> None:
    pools = [KvCachePool(LIMITS.cache(tiny(), 1))]
    made = Generator(lambda _: np.full((1, 61), np.nan, np.float32), pools, tp_size=1, vocab_size=61, limits=LIMITS)
    with pytest.raises(TokenWeaveError, match="logits of sequence 0 at position 2 are not finite"):
        made.generate([[1, 2, 3]])


def test_ranks_that_disagree_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny()
    pair = contexts(config, 2)
    made = make_generator(pair, config, 2, LIMITS)
    right = pair[1].run

    def wrong(given: Mapping[str, Array]) -> dict[str, Array]:
        return {name: x + 1 for name, x in right(given).items()}

    monkeypatch.setattr(pair[1], "run", wrong)
    with pytest.raises(TokenWeaveError, match="logits of local rank 1 differ"):
        made.generate([[1, 2]])


# --- sequences in flight -----------------------------------------------------------------------------------------


def drain(made: Generator) -> list[Produced]:
    produced = []
    while made.busy:
        produced += made.step()
    return produced


def test_sequences_in_flight_are_those_of_whole_prompts() -> None:
    """Joining while others run, over the real interpreter, changes no token."""
    config = tiny()
    made = make_generator(contexts(config, 2), config, 2, LIMITS)
    produced: list[Produced] = []
    numbers = []
    for prompt in PROMPTS:
        numbers.append(made.submit(prompt))
        for _ in range(2):
            produced += made.step()
    produced += drain(made)
    assert numbers == [0, 1, 2, 3, 4]
    tokens = {n: [p.token for p in produced if p.number == n] for n in numbers}
    assert list(tokens.values()) == expected(config)[0]
    assert [p.ended for p in produced if p.number == 3] == ["", "", "", "", "", "length"]


def test_what_a_step_produces() -> None:
    limits = GenerationLimits(16, 2, 64, 3, 8, eos_ids=frozenset({12}))
    made, engine = generator(limits)
    assert (made.busy, made.step(), engine.inputs) == (False, [], [])
    first, second = made.submit([1] * 20), made.submit([11], max_new_tokens=9)
    assert (made.busy, made.step()) == (True, [])  # a chunk of 16 tokens
    assert made.step() == [Produced(first, 2, ""), Produced(second, 12, "eos")]
    assert made.step() == [Produced(first, 3, "")]
    third = made.submit([30], max_new_tokens=1)
    assert made.step() == [Produced(third, 31, "length"), Produced(first, 4, "length")]
    assert (made.busy, made.step()) == (False, [])


def test_cancelled_sequences_produce_nothing_and_give_back_their_blocks() -> None:
    # 4 blocks: two sequences of 2 run, two wait.
    made, _ = generator(GenerationLimits(16, 8, 16, 6, 8, num_blocks=4))
    numbers = [made.submit([start] * 9) for start in (1, 20, 30, 40)]
    made.step()
    made.cancel(numbers[0])  # it runs
    made.cancel(numbers[2])  # it waits
    produced = drain(made)
    assert {p.number for p in produced} == {numbers[1], numbers[3]}
    assert [p.token for p in produced if p.number == numbers[3]] == [41, 42, 43, 44, 45, 46]
    for number in (*numbers, 99):  # ended, or never there
        made.cancel(number)
    # All blocks are free: two full sequences share a step again.
    assert max(s.batch for s in made.generate([[1] * 9, [2] * 9]).steps) == 2


def test_blocks_of_a_cancelled_sequence_serve_the_next_step() -> None:
    made, engine = generator(GenerationLimits(16, 8, 16, 6, 8, num_blocks=2))
    first = made.submit([1] * 9)
    made.step()
    second = made.submit([20] * 9)
    assert made.step() == [Produced(first, 3, "")]
    made.cancel(first)
    assert made.step() == [Produced(second, 21, "")]
    assert sorted(engine.inputs[-1]["kv_cache_block_offsets"][0, 0, 0].tolist()) == [0, 4]


def test_a_cancelled_last_sequence_leaves_nothing_to_do() -> None:
    made, engine = generator(LIMITS)
    made.cancel(made.submit([1]))
    assert not made.busy
    assert made.step() == []
    assert not engine.inputs


def test_the_same_calls_make_the_same_steps() -> None:
    def run() -> list[dict[str, list[int]]]:
        made, engine = generator(LIMITS)
        for number, prompt in enumerate(PROMPTS):
            made.submit(prompt, 2 + number)
            made.step()
            if number == 2:
                made.cancel(1)
        drain(made)
        return [
            {n: x.tolist() for n, x in step.items() if n != "host_kv_cache_pool_pointers"} for step in engine.inputs
        ]

    first = run()
    assert len(first) > 8
    assert run() == first


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], None, "sequence 1: is empty"),
        ([1], 0, "sequence 1: max_new_tokens is 0"),
        ([1], 64, "1 tokens and 64 new ones exceed max_seq_len 64"),
        ([-1], None, "token -1 is outside the vocabulary"),
    ],
)
def test_a_refused_sequence_changes_nothing(prompt: list[int], new: int | None, message: str) -> None:
    made, _ = generator(LIMITS)
    first = made.submit([1])
    with pytest.raises(UserError, match=message):
        made.submit(prompt, new)
    assert made.submit([5], 1) == first + 1
    assert len(drain(made)) == LIMITS.max_new_tokens + 1


def test_whole_prompts_do_not_mix_with_sequences_in_flight() -> None:
    made, _ = generator(LIMITS)
    made.submit([1])
    with pytest.raises(UserError, match="generate: sequences are in flight"):
        made.generate([[2]])
    drain(made)
    assert made.generate([[2]]).tokens == [[3, 4, 5, 6, 7, 8]]


def test_whole_prompts_that_fail_leave_nothing_in_flight() -> None:
    made, engine = generator(LIMITS)
    with pytest.raises(UserError, match="prompt 1: is empty"):
        made.generate([[1], []])
    assert not made.busy
    made.run_step = lambda _: np.full((1, 61), np.inf, np.float32)
    with pytest.raises(TokenWeaveError, match="not finite"):
        made.generate([[1] * 3])
    made.run_step = engine
    assert made.generate([[2]]).tokens == [[3, 4, 5, 6, 7, 8]]
