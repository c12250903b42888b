"""GPTAttention, TokenWeaveAttention and TokenWeaveBatchSplit of the interpreter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trtllm_tokenweave import trt
from trtllm_tokenweave.attention_roles import attention_inputs, attention_roles, split_refusal
from trtllm_tokenweave.batch import SequenceStep, StepLayout, step_inputs
from trtllm_tokenweave.comm import SingleComm
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.interpreter import attention
from trtllm_tokenweave.interpreter.registry import KernelContext
from trtllm_tokenweave.kv_cache import BlockManager, KvCacheConfig, KvCachePool
from trtllm_tokenweave.plugin_specs import AttentionRole, Half
from trtllm_tokenweave.recorder.enums import DataType, numpy_dtype
from trtllm_tokenweave.recorder.packed_fields import pack_fields
from trtllm_tokenweave.recorder.trtllm_plugins import GPT_ATTENTION

Array = NDArray[Any]
MAX_SEQ = 96
LAYERS = 3
BASE = 10000.0
FLOAT: np.dtype[Any] = np.dtype(np.float32)


def gpt_fields(**changes: Any) -> dict[str, Any]:
    """Fields that decide what the interpreter does, for a layer of 4 heads over 2 KV heads of 8."""
    fields: dict[str, Any] = {
        "layer_idx": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "q_scaling": 1.0,
        "attn_logit_softcapping_scale": 0.0,
        "position_embedding_type": 2,
        "rotary_embedding_dim": 8,
        "unfuse_qkv_gemm": 0,
        "kv_cache_quant_mode": 0,
        "remove_input_padding": 1,
        "mask_type": 1,
        "paged_kv_cache": 1,
        "tokens_per_block": 4,
        "qkv_bias_enabled": 0,
        "do_cross_attention": 0,
        "use_paged_context_fmha": 1,
        "use_fp8_context_fmha": 0,
        "has_full_attention_mask": 0,
        "use_cache": 1,
        "is_spec_decoding_enabled": 0,
        "is_mla_enabled": 0,
        "fuse_fp4_quant": 0,
        "skip_attn": 0,
        "cp_size": 1,
        "use_logn_scaling": 0,
    }
    return fields | changes


def rope_table(dim: int) -> Array:
    angles = np.arange(MAX_SEQ)[:, None] / BASE ** (np.arange(0, dim, 2) / dim)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32).reshape(1, -1)


@dataclass
class Model:
    """One attention layer with a cache, fed step by step; keeps every row it was given."""

    fields: dict[str, Any] = field(default_factory=gpt_fields)
    dtype: np.dtype[Any] = FLOAT
    exact: bool = False
    seed: int = 0
    bias: Array | None = None
    history: dict[int, list[Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        f = self.fields
        cache = KvCacheConfig(LAYERS, f["num_kv_heads"], f["head_size"], self.dtype, 96, f["tokens_per_block"], 24)
        self.pool = KvCachePool(cache)
        self.blocks = BlockManager(cache)
        self.rng = np.random.default_rng(self.seed)
        self.prompts: dict[int, int] = {}
        self.context = KernelContext(comm=SingleComm(), exact=self.exact, pools=dict(self.pool.bindings))

    def step(self, chunks: list[tuple[int, int, bool]]) -> tuple[dict[str, Array], list[SequenceStep]]:
        """Tensors of a step of (sequence, tokens, is_context)."""
        steps = []
        for sequence, count, is_context in chunks:
            start = len(self.history.setdefault(sequence, []))
            prompt = start + count if is_context else self.prompts.get(sequence, start)
            self.prompts[sequence] = prompt
            steps.append(SequenceStep(sequence, (7,) * count, start, prompt, is_context))
            # Interleaved growth gives every sequence blocks from all over the pool.
            self.blocks.grow(sequence, start + count)
        tensors = step_inputs(steps, StepLayout(self.pool, self.blocks, MAX_SEQ))
        rows = int(tensors["last_token_ids"][-1])
        width = (self.fields["num_heads"] + 2 * self.fields["num_kv_heads"]) * self.fields["head_size"]
        qkv = self.rng.normal(size=(rows, width)).astype(np.float32).astype(self.dtype)
        tensors |= {"qkv": qkv, "rotary_cos_sin": rope_table(self.fields["rotary_embedding_dim"])}
        tensors["rotary_inv_freq"] = np.zeros(self.fields["rotary_embedding_dim"] // 2, np.float32)
        if self.bias is not None:
            tensors["qkv_bias"] = self.bias
        row = 0
        for s in steps:
            self.history[s.sequence] += list(qkv[row : row + len(s.tokens)])
            row += len(s.tokens)
        return tensors, steps

    def run(self, tensors: dict[str, Array]) -> Array:
        inputs = [tensors[name] for name in attention_inputs(self.fields)]
        (out,) = attention.gpt_attention(self.context, self.fields, inputs)
        assert out.dtype == self.dtype
        return out

    def oracle(self, steps: list[SequenceStep]) -> Array:
        """Float64 attention over the whole history, without a cache; RoPE as multiplication of complex numbers."""
        rows = []
        for s in steps:
            q, k, v = self._heads(np.stack(self.history[s.sequence]).astype(np.float64))
            for position in range(s.start, s.end):
                scores = np.einsum("hd,lhd->hl", q[position], k[: position + 1]) / np.sqrt(q.shape[-1])
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                rows.append(np.einsum("hl,lhd->hd", weights, v[: position + 1]).reshape(-1))
        return np.stack(rows)

    def _heads(self, rows: Array) -> tuple[Array, Array, Array]:
        heads, kv, d = self.fields["num_heads"], self.fields["num_kv_heads"], self.fields["head_size"]
        x = (rows if self.bias is None else rows + self.bias).reshape(len(rows), -1, d)
        dim = self.fields["rotary_embedding_dim"]
        turn = np.exp(1j * np.arange(len(rows))[:, None] / BASE ** (np.arange(0, dim, 2) / dim))[:, None]
        z = (x[..., : dim // 2] + 1j * x[..., dim // 2 : dim]) * turn
        turned = np.concatenate([z.real, z.imag, x[..., dim:]], axis=-1)
        group = heads // kv
        keys, values = turned[:, heads : heads + kv], x[:, heads + kv :]
        return turned[:, :heads], np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)


TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}
#: Chunked prefills, mixed steps, decode of sequences of very different lengths.
STEPS: list[list[tuple[int, int, bool]]] = [
    [(0, 9, True), (1, 1, True)],
    [(2, 8, True), (0, 1, False), (1, 1, False)],
    [(2, 5, True), (3, 30, True), (1, 1, False), (0, 1, False)],
    [(0, 1, False), (1, 1, False), (2, 1, False), (3, 1, False)],
]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [DataType.FLOAT, DataType.HALF, DataType.BF16], ids=lambda d: d.name)
def test_agrees_with_float64_attention_without_a_cache(dtype: DataType, exact: bool) -> None:
    model = Model(dtype=numpy_dtype(dtype), exact=exact)
    for chunks in STEPS:
        tensors, steps = model.step(chunks)
        got = model.run(tensors).astype(np.float64)
        np.testing.assert_allclose(got, model.oracle(steps), atol=TOLERANCE[numpy_dtype(dtype).name])


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 3, "num_kv_heads": 1, "head_size": 16, "rotary_embedding_dim": 16},
        {"num_heads": 2, "num_kv_heads": 2},
        {"rotary_embedding_dim": 4},
        {"tokens_per_block": 16, "layer_idx": 0},
        {"layer_idx": 2, "tokens_per_block": 8},
    ],
)
def test_agrees_for_other_shapes(changes: dict[str, Any]) -> None:
    model = Model(fields=gpt_fields(**changes))
    for chunks in STEPS:
        tensors, steps = model.step(chunks)
        np.testing.assert_allclose(model.run(tensors), model.oracle(steps), atol=2e-6)


def test_adds_the_qkv_bias_before_the_rotation() -> None:
    bias = np.random.default_rng(5).normal(size=64).astype(np.float32)
    model = Model(fields=gpt_fields(qkv_bias_enabled=1), bias=bias)
    for chunks in STEPS:
        tensors, steps = model.step(chunks)
        np.testing.assert_allclose(model.run(tensors), model.oracle(steps), atol=3e-6)


def test_long_chunk_is_tiled_without_a_seam() -> None:
    model = Model(fields=gpt_fields(tokens_per_block=32))
    for chunks in ([(0, 5, True)], [(0, 90, True)]):
        tensors, steps = model.step(chunks)
        np.testing.assert_allclose(model.run(tensors), model.oracle(steps), atol=2e-6)


def test_writes_only_its_own_layer_and_tokens() -> None:
    model = Model()
    tensors, _ = model.step([(0, 6, True)])
    model.run(tensors)
    pages = model.pool.pages.reshape(96, LAYERS, 2, 2, 4, 8)
    written = np.asarray(np.isfinite(pages).all(axis=(3, 5)))
    assert written.sum() == 2 * 6
    assert written[:, 1].sum() == 2 * 6


@pytest.mark.parametrize("exact", [False, True])
def test_chunked_prefill_equals_prefill_in_one_step(exact: bool) -> None:
    whole, chunked = Model(exact=exact), Model(exact=exact)
    tensors, _ = whole.step([(0, 23, True)])
    expected = whole.run(tensors)
    parts = []
    for start, end in ((0, 8), (8, 9), (9, 23)):
        part, _ = chunked.step([(0, end - start, True)])
        part["qkv"] = tensors["qkv"][start:end]
        parts.append(chunked.run(part))
    got = np.concatenate(parts)
    if exact:
        assert got.tobytes() == expected.tobytes()
    np.testing.assert_allclose(got, expected, atol=2e-6)


# --- halves -----------------------------------------------------------------------------------------------------


def wrapper_fields(fields: dict[str, Any], half: Half) -> dict[str, Any]:
    return {
        "half": int(half),
        "num_heads": fields["num_heads"],
        "head_size": fields["head_size"],
        "inner_name": b"GPTAttention",
        "inner_version": b"1",
        "inner_namespace": b"tensorrt_llm",
        "inner": pack_fields(trt.plugin_fields(GPT_ATTENTION, fields)),
        "roles": np.array([int(r) for r in attention_roles(fields)], np.int32),
    }


DEVICE = ("sequence_length", "context_lengths")


class Halves:
    """The two halves of a step, as the woven network runs them."""

    def __init__(self, model: Model, tensors: dict[str, Array], cut: int) -> None:
        self.model, self.tensors, self.cut = model, tensors, cut
        read = ("qkv", "host_request_types", "host_context_lengths", *DEVICE)
        inputs = [tensors["qkv"][:cut], *(tensors[name] for name in read)]
        split = attention.tokenweave_batch_split(model.context, {"max_num_tokens": 64}, inputs)
        self.metadata = {Half.PREFIX: split[:2], Half.SUFFIX: split[2:]}

    def run(self, half: Half) -> Array:
        given = self.tensors | dict(zip(DEVICE, self.metadata[half], strict=True))
        given["qkv"] = self.tensors["qkv"][: self.cut] if half is Half.PREFIX else self.tensors["qkv"][self.cut :]
        inputs = [given[name] for name in attention_inputs(self.model.fields)]
        (out,) = attention.tokenweave_attention(self.model.context, wrapper_fields(self.model.fields, half), inputs)
        return out


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[tuple[int, int, bool]], int]:
    """(past, new tokens, is_context) per sequence, contexts first, and a cut."""
    contexts = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 11), st.just(True)), max_size=3))
    generation = draw(
        st.lists(st.tuples(st.integers(1, 17), st.just(1), st.just(False)), min_size=not contexts, max_size=4)
    )
    batch = contexts + generation
    return batch, draw(st.integers(0, sum(count for _, count, _ in batch)))


def filled(batch: list[tuple[int, int, bool]], **options: Any) -> tuple[Model, dict[str, Array], list[SequenceStep]]:
    """A model whose cache holds the past of each sequence, and the step that follows."""
    model = Model(**options)
    past = [(s, p, True) for s, (p, _, _) in enumerate(batch) if p]
    if past:
        model.run(model.step(past)[0])
    tensors, steps = model.step([(s, count, is_context) for s, (_, count, is_context) in enumerate(batch)])
    return model, tensors, steps


def check_halves(batch: list[tuple[int, int, bool]], cut: int) -> None:
    """Run a step whole and in halves on the same cache: outputs and caches must be equal bit for bit."""
    model, tensors, _ = filled(batch, exact=True)
    before = model.pool.pages.copy()
    whole = model.run(tensors)
    after = model.pool.pages.copy()
    model.pool.pages[:] = before
    halves = Halves(model, tensors, cut)
    parts = [halves.run(Half.PREFIX), halves.run(Half.SUFFIX)]
    assert [len(p) for p in parts] == [cut, len(whole) - cut]
    assert np.concatenate(parts).tobytes() == whole.tobytes()
    assert model.pool.pages.tobytes() == after.tobytes()


@settings(max_examples=150, deadline=None)
@given(batches())
def test_prefix_then_suffix_equals_the_whole_bit_for_bit(case: tuple[list[tuple[int, int, bool]], int]) -> None:
    check_halves(*case)


@settings(max_examples=25, deadline=None)
@given(batches())
def test_halves_equal_the_whole_within_rounding(case: tuple[list[tuple[int, int, bool]], int]) -> None:
    batch, cut = case
    model, tensors, steps = filled(batch)
    halves = Halves(model, tensors, cut)
    got = np.concatenate([halves.run(Half.PREFIX), halves.run(Half.SUFFIX)])
    np.testing.assert_allclose(got, model.oracle(steps), atol=2e-6)


#: A chunk of 10 after 3 tokens, a chunk of 4, two generation rows: 16 tokens.
MIXED = [(3, 10, True), (0, 4, True), (7, 1, False), (12, 1, False)]


@pytest.mark.parametrize("cut", [0, 4, 10, 12, 14, 15, 16])
def test_named_cuts_equal_the_whole(cut: int) -> None:
    # Empty prefix, inside a chunk, between chunks, inside the second, before generation, inside it, empty suffix.
    check_halves(MIXED, cut)


def test_suffix_before_prefix_is_wrong_when_a_sequence_is_cut() -> None:
    model, tensors, steps = filled(MIXED, exact=True)
    halves = Halves(model, tensors, 4)
    suffix = halves.run(Half.SUFFIX)
    prefix = halves.run(Half.PREFIX)
    right = model.oracle(steps)
    np.testing.assert_allclose(prefix, right[:4], atol=2e-6)
    assert not np.allclose(suffix[:6], right[4:10], atol=1e-3)
    np.testing.assert_allclose(suffix[6:], right[10:], atol=2e-6)


def test_suffix_before_prefix_is_right_when_no_sequence_is_cut() -> None:
    model, tensors, steps = filled(MIXED, exact=True)
    halves = Halves(model, tensors, 10)
    suffix = halves.run(Half.SUFFIX)
    np.testing.assert_allclose(np.concatenate([halves.run(Half.PREFIX), suffix]), model.oracle(steps), atol=2e-6)


def test_rows_past_a_half_are_undefined_and_never_read() -> None:
    model, tensors, _ = filled(MIXED)
    halves = Halves(model, tensors, 4)
    lengths = halves.metadata[Half.PREFIX][0]
    assert lengths.tolist() == [7, attention.UNDEFINED, attention.UNDEFINED, attention.UNDEFINED]
    assert halves.metadata[Half.SUFFIX][0].tolist() == [13, 4, 8, 13]
    assert halves.metadata[Half.SUFFIX][1].tolist() == [6, 4, 7, 12]


def test_empty_half_does_not_call_the_inner_plugin() -> None:
    model, tensors, _ = filled(MIXED)
    inputs = [tensors[name] for name in attention_inputs(model.fields)]
    inputs[0] = inputs[0][:0]
    fields = wrapper_fields(model.fields, Half.SUFFIX) | {"inner_name": b"NoSuchPlugin"}
    (out,) = attention.tokenweave_attention(model.context, fields, inputs)
    assert out.shape == (0, 32)


def test_half_larger_than_the_step_is_refused() -> None:
    model, tensors, _ = filled(MIXED)
    inputs = [tensors[name] for name in attention_inputs(model.fields)]
    inputs[0] = np.concatenate([inputs[0], inputs[0][:1]])
    with pytest.raises(UserError, match="this half has 17 tokens, the step 16"):
        attention.tokenweave_attention(model.context, wrapper_fields(model.fields, Half.PREFIX), inputs)


def test_progress_pointer_goes_to_the_last_half_with_a_context_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def inner(_: KernelContext, fields: Any, inputs: list[Array]) -> list[Array]:
        place = attention_roles(fields).index(AttentionRole.HOST_CONTEXT_PROGRESS)
        seen.append(int(inputs[place][0]))
        return [np.zeros((len(inputs[0]), 32), np.float32)]

    monkeypatch.setattr(attention, "find_kernel", lambda _: inner)
    model, tensors, _ = filled(MIXED)
    tensors["host_context_progress"][0] = 99
    for cut in (4, 14, 16):  # inside a chunk; between the contexts and the generation rows; nothing left
        halves = Halves(model, tensors, cut)
        halves.run(Half.PREFIX)
        halves.run(Half.SUFFIX)
    assert seen == [0, 99, 99, 99, 99]


# --- refusals ---------------------------------------------------------------------------------------------------


def _set(name: str, index: Any, value: Any) -> Any:
    def change(tensors: dict[str, Array]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][index] = value

    return change


def _cut_table(tensors: dict[str, Array]) -> None:
    for name in ("kv_cache_block_offsets", "host_kv_cache_block_offsets"):
        tensors[name] = tensors[name][..., :3]


def _outside(tensors: dict[str, Array]) -> None:
    for name in ("kv_cache_block_offsets", "host_kv_cache_block_offsets"):
        _set(name, (0, 1, 1, 0), 96 * LAYERS * 2)(tensors)


BAD: list[tuple[Any, str]] = [
    (_set("host_request_types", 0, 1), "context sequence 1 comes after a generation"),
    (_set("host_request_types", 3, 2), "sequence 3 has type 2"),
    (_set("host_context_lengths", 1, 3), "qkv has 16 rows, the sequences have 15 tokens"),
    (_set("host_context_lengths", 1, 0), "context sequence 1 has 0 tokens"),
    (_set("context_lengths", 0, 9), "context_lengths of sequence 0 is 9, host_context_lengths says 10"),
    (_set("host_past_key_value_lengths", 0, 3), "host_past_key_value_lengths of sequence 0 is 3"),
    (_set("host_past_key_value_lengths", 2, 8), "host_past_key_value_lengths of sequence 2 is 8"),
    (_cut_table, "sequence 0 needs 4 blocks, kv_cache_block_offsets has 3"),
    (_outside, "block 0 .V. of sequence 1 has page"),
    (_set("host_kv_cache_block_offsets", (0, 2, 0, 1), 0), "block 1 .K. of sequence 2"),
    (_set("host_kv_cache_pool_pointers", (0, 0), 12345), "no KV cache pool at address 0x3039"),
    (_set("host_kv_cache_pool_mapping", (1, 0), 1), "mapped to pool 1 of 1"),
    (_set("host_max_attention_window_sizes", 1, 12), "sequence 0 has 13 tokens, more than the attention window 12"),
    (_set("host_sink_token_length", 0, 4), "host_sink_token_length is 4"),
    (lambda t: t.update(cache_indirection=np.zeros((4, 2, MAX_SEQ), np.int32)), "beam width 1"),
    (lambda t: t.update(qkv=t["qkv"][:, :-8]), "qkv has shape"),
    (lambda t: t.update(context_lengths=t["context_lengths"][:3]), "context_lengths has shape"),
    (lambda t: t.update(rotary_cos_sin=t["rotary_cos_sin"][:, : 8 * 10]), "position 12 is past the 10 of rotary"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_wrong_metadata_is_refused_by_layer_and_sequence(change: Any, message: str) -> None:
    model, tensors, _ = filled(MIXED)
    model.context.layer = "transformer/layers/1/attention"
    change(tensors)
    with pytest.raises(UserError, match=message) as caught:
        model.run(tensors)
    assert caught.value.where == "layer transformer/layers/1/attention"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"remove_input_padding": 0}, "not packed"),
        ({"paged_kv_cache": 0}, "not paged"),
        ({"use_paged_context_fmha": 0}, "cannot read the cache"),
        ({"mask_type": 2}, "not causal"),
        ({"is_spec_decoding_enabled": 1}, "speculative decoding"),
        ({"do_cross_attention": 1}, "cross attention"),
        ({"position_embedding_type": 9}, "mrope"),
        ({"position_embedding_type": 1}, "position_embedding_type 1"),
        ({"kv_cache_quant_mode": 64}, "quantised KV cache"),
        ({"attn_logit_softcapping_scale": 30.0}, "softcapping"),
        ({"num_kv_heads": 3}, "no multiple"),
    ],
)
def test_features_that_are_not_served_are_refused(changes: dict[str, Any], message: str) -> None:
    model, tensors, _ = filled(MIXED)
    fields = gpt_fields(**changes)
    with pytest.raises(UserError, match=message):
        attention.gpt_attention(model.context, fields, list(tensors.values()))


def test_missing_field_and_wrong_number_of_inputs_are_refused() -> None:
    model, tensors, _ = filled(MIXED)
    fields = gpt_fields()
    del fields["layer_idx"]
    with pytest.raises(UserError, match="'layer_idx' is missing"):
        attention.gpt_attention(model.context, fields, [])
    with pytest.raises(UserError, match="has 3 inputs, its fields ask for 17"):
        attention.gpt_attention(model.context, gpt_fields(), list(tensors.values())[:3])


# --- roles ------------------------------------------------------------------------------------------------------


def test_roles_follow_the_fields() -> None:
    plain = attention_inputs(gpt_fields())
    assert plain[7:13] == [
        "host_request_types",
        "kv_cache_block_offsets",
        "host_kv_cache_block_offsets",
        "host_kv_cache_pool_pointers",
        "host_kv_cache_pool_mapping",
        "rotary_inv_freq",
    ]
    assert plain[14:] == ["host_context_lengths", "host_runtime_perf_knobs", "host_context_progress"]
    biased = attention_roles(gpt_fields(qkv_bias_enabled=1, kv_cache_quant_mode=128))
    assert biased.index(AttentionRole.HOST_CONTEXT_LENGTHS) == 16
    assert biased[-1] is AttentionRole.HOST_CONTEXT_PROGRESS
    assert attention_roles(gpt_fields(position_embedding_type=0)).count(AttentionRole.OTHER) == 3


def test_every_special_role_appears_once() -> None:
    roles = [r for r in attention_roles(gpt_fields()) if r is not AttentionRole.OTHER]
    assert sorted(roles) == [r for r in AttentionRole if r is not AttentionRole.OTHER]
    assert split_refusal(gpt_fields()) == ""
