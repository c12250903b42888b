"""Woven models say what stock models say, whatever the step: chunks, generation rows, a cut anywhere."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.models import MAX_TOKENS, Model, ragged_steps, tiny

from trtllm_tokenweave.batch import SequenceStep
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig, preset
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.passes import WeaveOptions, weave
from trtllm_tokenweave.plugin_specs import ALL_REDUCE_RMS_NORM
from trtllm_tokenweave.recorder import RecordedNetwork
from trtllm_tokenweave.waves import default_table

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM")
CONTEXTS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 24)), max_size=3)
CONFIGS = st.builds(
    lambda architecture, hidden, heads, layers: tiny(
        architecture,
        hidden_size=hidden,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        num_hidden_layers=layers,
    ),
    st.sampled_from(ARCHITECTURES),
    st.sampled_from([8, 16, 40]),
    st.sampled_from([(8, 8), (8, 4), (9, 3), (8, 1)]),
    st.integers(1, 3),
)
GENERATIONS = st.lists(st.integers(1, 20), max_size=4)


def outputs(model: Model, steps: list[list[SequenceStep]], seed: int | None = None) -> list[Any]:
    session = model.session(seed=seed)
    results = [session.step(step) for step in steps]
    return [*results, *(pool.pages.copy() for pool in session.pools)]


def tokens_of(steps: list[list[SequenceStep]]) -> int:
    return max(sum(len(s.tokens) for s in step) for step in steps)


@settings(max_examples=30, deadline=None)
@given(
    config=CONFIGS,
    tp_size=st.integers(1, 8),
    contexts=CONTEXTS,
    generations=GENERATIONS,
    offset=st.sampled_from([0, 8, 24]),
    split_attention=st.booleans(),
    seed=st.one_of(st.none(), st.integers(0, 2**20)),
)
def test_woven_equals_stock_bit_for_bit(
    config: ModelConfig,
    tp_size: int,
    contexts: list[tuple[int, int]],
    generations: list[int],
    offset: int,
    split_attention: bool,
    seed: int | None,
) -> None:
    steps = ragged_steps(contexts, generations)
    assume(steps and tokens_of(steps) <= MAX_TOKENS)
    common: dict[str, Any] = {"config": config, "tp_size": tp_size, "integer": True}
    stock = outputs(Model(**common), steps)
    woven = outputs(Model(**common, weaving="weave", offset=offset, split_attention=split_attention), steps, seed)
    for a, b in zip(stock, woven, strict=True):
        np.testing.assert_array_equal(a, b)


#: A step of 32 tokens in all is cut at 16 (offset 0): where that falls is in the name.
CUTS = {
    "one token": ([(0, 1)], []),
    "inside a sequence": ([(0, 32)], []),
    "inside a later chunk": ([(13, 32)], []),
    "unaligned to blocks, in the second sequence": ([(3, 11), (5, 21)], []),
    "at a sequence's end": ([(0, 16), (0, 16)], []),
    "at the first generation row": ([(2, 16)], [3] * 16),
    "inside the generation part": ([(0, 4)], [5, 1, 7, 2] * 7),
    "all generation": ([], [6] * 32),
}


@pytest.mark.parametrize("split_attention", [True, False])
@pytest.mark.parametrize("name", CUTS)
def test_named_cuts(name: str, split_attention: bool) -> None:
    contexts, generations = CUTS[name]
    steps = ragged_steps(contexts, generations)
    if generations:  # Fill the caches in steps of their own: the second step is the one that is cut.
        steps = [*([s] for s in steps[0]), steps[1]]
    common: dict[str, Any] = {"config": tiny(), "tp_size": 3, "integer": True}
    for a, b in zip(
        outputs(Model(**common), steps),
        outputs(Model(**common, weaving="weave", split_attention=split_attention), steps),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.04), ("float16", 0.005)])
def test_real_weights_stay_within_the_dtype(architecture: str, dtype: str, tolerance: float) -> None:
    """Stock rounds the rank sum, the residual sum and the scaled norm apart; the fused result rounds less often."""
    steps = ragged_steps([(4, 17), (0, 20)], [3, 9])
    config = tiny(architecture, dtype=dtype)
    stock, fused, woven = (
        outputs(Model(config, 3, weaving=weaving), steps)[0] for weaving in ("stock", "fuse", "weave")
    )
    np.testing.assert_array_equal(fused, woven)
    assert np.abs(stock - woven).max() <= tolerance * np.abs(stock).max()


def test_heads_padded_for_tp_give_the_same_tokens() -> None:
    config = tiny(num_attention_heads=6, num_key_value_heads=2)
    steps = ragged_steps([(4, 17), (0, 20)], [3, 9])
    one = outputs(Model(config, 1), steps)[0]
    for tp_size in (3, 4):
        many = outputs(Model(config, tp_size, weaving="weave"), steps)[0]
        assert np.abs(one - many[:, : one.shape[1]]).max() < 1e-5 * np.abs(one).max()


@pytest.mark.parametrize("gemm_plugin", [False, True])
def test_gemm_plugin_layers_are_woven_too(gemm_plugin: bool) -> None:
    steps = ragged_steps([(4, 17), (0, 20)], [3])
    common: dict[str, Any] = {"config": tiny(), "tp_size": 2, "gemm_plugin": gemm_plugin, "integer": True}
    for a, b in zip(outputs(Model(**common), steps), outputs(Model(**common, weaving="weave"), steps), strict=True):
        np.testing.assert_array_equal(a, b)


def canonical(network: RecordedNetwork) -> set[str]:
    """Digests of the live layers that ignore names and numbering: each covers all that its layer depends on."""
    graph = Graph(network)
    digest: dict[str, str] = {name: name for name in graph.inputs}
    found = set()
    for node in graph.ordered():
        layer = node.layer
        dynamic = node.kind == "SLICE" and len(node.inputs) > 1
        attributes = [] if dynamic else [str(getattr(layer, k)) for k in layer.ATTRS]
        fields = sorted((k, np.asarray(v).tobytes() if not isinstance(v, bytes) else v) for k, v in node.fields.items())
        weights = layer.weights.array.tobytes() if node.kind == "CONSTANT" else b""
        inputs = [digest[n] for n in node.inputs if n is not None]
        made = repr((node.kind, node.plugin_key, attributes, fields, weights, inputs))
        found.add(hashlib.sha256(made.encode()).hexdigest())
        for i, name in enumerate(node.outputs):
            digest[name] = f"{hashlib.sha256(made.encode()).hexdigest()}:{i}"
    return found


def weave_hashes(**changes: Any) -> set[int]:
    """Of a woven model's collectives, on all ranks."""
    networks = Model(tiny(), 2, weaving="weave", **changes).networks()
    starts = [n for network in networks for n in Graph(network).nodes if n.plugin_name == ALL_REDUCE_RMS_NORM]
    return {int(n.fields["weave_hash"]) for n in starts}


def test_engines_of_a_process_are_told_apart() -> None:
    """By a number that all layers of a network have, on all ranks."""
    split, whole = weave_hashes(), weave_hashes(split_attention=False)
    assert len(split) == len(whole) == 1
    assert split != whole


@pytest.mark.parametrize("weaving", ["fuse", "weave"])
def test_reduce_fusion_on_and_off_give_the_same_woven_network(weaving: str) -> None:
    plain, fused = (
        Model(tiny(num_hidden_layers=3), 2, weaving=weaving, reduce_fusion=on).networks()[0] for on in (False, True)
    )
    assert plain.num_layers != fused.num_layers, "the networks before the pass differ"
    assert canonical(plain) == canonical(fused)
    stock = [Model(tiny(num_hidden_layers=3), 2, reduce_fusion=on).networks()[0] for on in (False, True)]
    assert canonical(stock[0]) != canonical(stock[1]), "negative control"


@pytest.mark.parametrize("reduce_fusion", [False, True])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen2.5-7b", "mixtral-8x7b", "smollm2-135m"])
def test_two_sites_per_layer_of_any_model(name: str, reduce_fusion: bool) -> None:
    config = preset(name)
    network, mapping = RecordedNetwork(), Mapping(4, 1, 4)
    build_llama(network, config, mapping, None, NetworkOptions(reduce_fusion=reduce_fusion))
    result = weave(network, WeaveOptions(mapping, default_table(config, 4), 8, 8192))
    assert result.mode == "weave"
    assert len(result.plan.sites) == 2 * config.num_hidden_layers
    assert [s.kind.name for s in result.plan.sites] == ["ATTENTION", "MLP"] * config.num_hidden_layers
    assert not result.plan.refused


def test_largest_model_in_bounded_memory() -> None:
    """80 layers, shapes only: every site is fused and the network holds no weight values."""
    config = preset("llama-3.3-70b")
    network, mapping = RecordedNetwork(), Mapping(8, 0, 8)
    build_llama(network, config, mapping, None, NetworkOptions(max_num_tokens=8192))
    result = weave(network, WeaveOptions(mapping, default_table(config, 8), 8, 8192))
    assert (result.mode, len(result.plan.sites)) == ("weave", 160)
    held = sum(n.layer.weights.array.nbytes for n in Graph(network).nodes
               if n.kind == "CONSTANT" and n.layer.weights.array is not None)  # fmt: skip
    assert held < 64 * 2**20


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_paged_context_fmha": False}, "paged context FMHA"),
        ({}, "max_beam_width is 2"),
    ],
)
def test_attention_left_whole_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    config = tiny()
    network, mapping = RecordedNetwork(), Mapping(2, 0, 2)
    build_llama(network, config, mapping, None, NetworkOptions(max_num_tokens=2048, max_seq_len=128, **changes))
    beams = 1 if changes else 2
    table = default_table(config, 2)
    result = weave(network, WeaveOptions(mapping, table, 8, max(8192, table.min_tokens * 2), max_beam_width=beams))
    assert result.mode == "weave"
    assert result.plan.region is not None
    assert result.plan.region.attention == "whole"
    (refusal,) = result.plan.refused
    assert refusal.stage == "attention"
    assert reason in refusal.reason
