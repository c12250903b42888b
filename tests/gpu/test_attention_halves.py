"""Attention in halves in TensorRT, with the reference GPTAttention inside, against the interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from gpu.attention_model import TOLERANCE, AttentionModel, Heads, Tensors, to_numpy
from gpu.half_engine import HalfEngine
from trtllm_tokenweave.plugin_library import plugin_library
from trtllm_tokenweave.plugin_specs import Half

HALVES = (Half.PREFIX, Half.SUFFIX)
#: Steps of (sequence, tokens, is_context), each cut at several tokens below.
STEPS: list[list[tuple[int, int, bool]]] = [
    [(0, 90, True), (1, 70, True)],
    [(2, 300, True), (0, 45, True), (1, 1, False)],
    [(3, 2000, True), (2, 33, True), (0, 1, False), (1, 1, False)],
    [(s, 1, False) for s in range(4)],
]


@pytest.fixture(scope="module", params=[Heads(8, 2, 128, "bfloat16"), Heads(9, 3, 64, "float16")])
def layer(request: pytest.FixtureRequest) -> Iterator[tuple[AttentionModel, list[HalfEngine]]]:
    model = AttentionModel(request.param)
    engines = [HalfEngine(model, half) for half in HALVES]
    # The engines were made with tokens of sequence 0, which no cache has seen.
    model.blocks.free(0)
    model.lengths.clear()
    model.prompts.clear()
    yield model, engines
    model.plugin.close()


def cuts(tensors: Tensors) -> list[int]:
    """Nothing, one token, inside a chunk at no block's edge, between two sequences, all but one token, everything."""
    first, rows = int(tensors["host_context_lengths"][0]), len(tensors["qkv"])
    return sorted({0, 1, min(min(first, rows) // 2 + 3, rows), min(first, rows), rows - 1, rows})


def test_halves_give_what_the_whole_step_gives(layer: tuple[AttentionModel, list[HalfEngine]]) -> None:
    model, engines = layer
    for chunks in STEPS:
        tensors = model.step(chunks)
        want, before = model.expected(tensors), model.device_pool.clone()
        for prefix_rows in cuts(tensors):
            model.device_pool.copy_(before)
            got = torch.cat([engine.run(tensors, prefix_rows) for engine in engines])
            model.check(got, want)


def test_suffix_before_prefix_is_wrong(layer: tuple[AttentionModel, list[HalfEngine]]) -> None:
    """The check above sees a suffix that does not find the prefix's keys."""
    model, engines = layer
    sequence = 10 + len(model.lengths)
    tensors = model.step([(sequence, 200, True)])
    want = model.expected(tensors)
    late = to_numpy(engines[1].run(tensors, 100))
    assert not np.allclose(late, want[100:], rtol=0, atol=TOLERANCE[model.heads.dtype])
    model.check(torch.cat([engine.run(tensors, 100) for engine in engines]), want)


def test_a_graph_of_decoding_follows_the_device(layer: tuple[AttentionModel, list[HalfEngine]]) -> None:
    """Captured once, replayed with other lengths, as long as the cut is the same."""
    model, engines = layer
    first = 30 + len(model.lengths)
    sequences = range(first, first + 5)
    prompt = model.step([(s, 150 + s, True) for s in sequences])
    want = model.expected(prompt)
    model.check(torch.cat([engine.run(prompt, len(prompt["qkv"])) for engine in engines]), want)
    tensors, before = model.step(decode := [(s, 1, False) for s in sequences]), model.device_pool.clone()
    bound = [engine.bind(tensors, 2) for engine in engines]
    torch.cuda.synchronize()
    # TensorRT defers work after a change of shapes; it must be done before a capture.
    assert all(engine.enqueue() for engine in engines)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert all(engine.enqueue() for engine in engines)
    # The eager step did all that the first replay is to do.
    model.device_pool.copy_(before)
    for attempt in range(2):
        if attempt > 0:
            tensors = model.step(decode)
            rows = (slice(2), slice(2, None))
            for (inputs, _), own in zip(bound, rows, strict=True):
                new = model.inputs(tensors | {"qkv": tensors["qkv"][own]})
                for name, value in zip(model.names, new, strict=True):
                    if not name.startswith("host_"):
                        inputs[name].copy_(value)
        for _, output in bound:
            output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        model.check(torch.cat([output for _, output in bound]), model.expected(tensors))


def test_a_step_that_cannot_be_served_fails_with_its_layer(layer: tuple[AttentionModel, list[HalfEngine]]) -> None:
    model, engines = layer
    tensors = model.step([(50 + len(model.lengths), 8, True)])
    engines[0].bind(tensors | {"host_max_attention_window_sizes": np.full(3, 7, np.int32)}, 4)
    torch.cuda.synchronize()
    assert not engines[0].enqueue()
    message = "TokenWeaveAttention layer 1 prefix: sequence 0 is cut in two, and its 8 tokens do not fit the attention"
    assert message in plugin_library().last_error()


def test_lengths_that_count_other_tokens_than_the_step_has_are_refused(
    layer: tuple[AttentionModel, list[HalfEngine]],
) -> None:
    model, engines = layer
    tensors = model.step([(70 + len(model.lengths), 8, True)])
    engines[1].bind(tensors | {"host_context_lengths": np.full(1, 9, np.int32)}, 4)
    torch.cuda.synchronize()
    assert not engines[1].enqueue()
    message = "TokenWeaveBatchSplit: the step has 8 tokens, host_request_types and host_context_lengths count 9"
    assert message in plugin_library().last_error()
