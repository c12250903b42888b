"""The reference GPTAttention against the interpreter's: a paged cache, chunks, decoding, graphs, halves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from gpu.attention_model import MAX_SEQUENCES, TOLERANCE, AttentionModel, Heads, Tensors, half_tensors, to_numpy
from trtllm_tokenweave.batch_split import split_batch
from trtllm_tokenweave.model_config import RotaryScaling

LLAMA3 = RotaryScaling(type="llama3", factor=8.0, original_max_position_embeddings=2048)
HEADS = [
    Heads(9, 3, 64, "bfloat16"),
    Heads(9, 3, 64, "float16", LLAMA3),
    Heads(8, 1, 128, "bfloat16", LLAMA3),
    Heads(8, 1, 128, "float16"),
]
#: Chunks from nothing and with a past, mixed steps, decoding from one token to thousands; cut between CTAs or not.
STEPS: list[list[tuple[int, int, bool]]] = [
    [(0, 37, True), (1, 1, True), (2, 500, True)],
    [(2, 131, True), (0, 1, False), (1, 1, False)],
    [(3, 2048, True), (0, 1, False)],
    [(3, 2000, True), (4, 3, True), (5, 64, True), (0, 1, False), (1, 1, False), (2, 1, False)],
    [(3, 1, True)],
    [(3, 1, False)],
    [(s, 1, False) for s in range(6)],
    [(3, 1500, True)],
    [(s, 1, True) for s in range(6, MAX_SEQUENCES)],
    [(s, 1, False) for s in range(MAX_SEQUENCES)],
]


@pytest.fixture(params=HEADS, ids=lambda h: f"{h.num_heads}x{h.num_kv_heads}x{h.head_size}-{h.dtype}")
def model(request: pytest.FixtureRequest) -> Iterator[AttentionModel]:
    made = AttentionModel(request.param)
    yield made
    made.plugin.close()


def test_every_step_agrees(model: AttentionModel) -> None:
    for chunks in STEPS:
        tensors = model.step(chunks)
        model.check(model.run(tensors), model.expected(tensors))


def test_the_check_sees_a_wrong_position_and_a_missing_key(model: AttentionModel) -> None:
    tensors = model.step([(0, 40, True)])
    model.check(model.run(tensors), model.expected(tensors))
    tensors = model.step([(0, 1, False)])
    want = model.expected(tensors)
    tolerance = TOLERANCE[model.heads.dtype]
    turned = {"rotary_cos_sin": np.roll(tensors["rotary_cos_sin"], model.heads.head_size, axis=1)}
    shorter = {name: tensors[name] - 1 for name in ("sequence_length", "host_past_key_value_lengths")}
    for wrong in (turned, shorter):
        error = np.abs(to_numpy(model.run(tensors | wrong)) - want).max()
        assert error > 3 * tolerance, error


def capture(model: AttentionModel, given: list[torch.Tensor], out: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of one step; the host's arrays are overwritten once it is there."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert model.plugin.enqueue(given, out)
    for tensor in given:
        if not tensor.is_cuda:
            tensor.zero_()
    return graph


def overwrite(model: AttentionModel, captured: list[torch.Tensor], tensors: Tensors) -> None:
    """Put another step into the device's inputs of a graph."""
    for name, old, new in zip(model.names, captured, model.inputs(tensors), strict=True):
        if not name.startswith("host_"):
            old.copy_(new)


def test_a_graph_follows_the_lengths_of_its_replay(model: AttentionModel) -> None:
    """Captured for short sequences, replayed for long ones, with the host's arrays overwritten in between."""
    model.run(first := model.step([(s, 150 + s, True) for s in range(5)]))
    model.expected(first)
    tensors = model.step(decode := [(s, 1, False) for s in range(5)])
    captured, out = model.inputs(tensors), model.output(5)
    graph = capture(model, captured, out)
    for attempt in range(3):
        if attempt > 0:
            # One sequence grows by a chunk, outside of the graph.
            model.run(chunk := model.step([(attempt, 1000, True)]))
            model.expected(chunk)
            tensors = model.step(decode)
            overwrite(model, captured, tensors)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        model.check(out, model.expected(tensors))


@pytest.mark.parametrize("captured_chunk", [64, 200, 1152])
def test_a_graph_with_chunks_follows_other_chunks(model: AttentionModel, captured_chunk: int) -> None:
    """Two chunks that fill their tiles, or nearly, replayed as chunks of the same sum that take more tiles.

    Of 64 tokens keys are whole, of 200 they are shared out, of 1152 the tiles leave no room for that.
    """
    fewer, more = captured_chunk - 12, captured_chunk + 12
    tensors = model.step([(0, captured_chunk, True), (1, captured_chunk, True)])
    model.run(tensors)  # all kernels are loaded now
    captured, out = model.inputs(tensors), model.output(2 * captured_chunk)
    graph = capture(model, captured, out)
    for chunks in ([], [(2, fewer, True), (3, more, True)], [(2, more, True), (3, fewer, True)]):
        if chunks:
            tensors = model.step(chunks)
            overwrite(model, captured, tensors)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        model.check(out, model.expected(tensors))


def test_halves_give_what_the_whole_step_gives(model: AttentionModel) -> None:
    before = model.step([(0, 90, True), (1, 70, True)])
    model.check(model.run(before), model.expected(before))
    tensors = model.step([(2, 300, True), (0, 45, True), (1, 1, False)])
    want = model.expected(tensors)
    for prefix_rows in (1, 77, 300, 323, 345):
        halves = split_batch(tensors["host_request_types"], tensors["host_context_lengths"], prefix_rows)
        got = torch.cat([model.run(half_tensors(tensors, half)) for half in halves])
        model.check(got, want)


def test_wrong_bindings_are_errors(capfd: pytest.CaptureFixture[str]) -> None:
    model = AttentionModel(HEADS[0])
    tensors = model.step([(0, 8, True)])
    good, out = model.inputs(tensors), model.output(8)
    on_device = [t.cuda() if name == "host_request_types" else t for name, t in zip(model.names, good, strict=True)]
    assert not model.plugin.enqueue(on_device, out)
    assert "GPTAttention layer 1: host_request_types is in device memory" in capfd.readouterr().err
    place = model.names.index("host_kv_cache_pool_pointers")
    for pool, words in (
        (0, "is 0 for the layer's pool"),
        (good[4].data_ptr(), "names a pool that is not, or no longer"),
    ):
        bad = [torch.tensor([[pool, 0]]) if i == place else t for i, t in enumerate(good)]
        assert not model.plugin.enqueue(bad, out)
        assert words in capfd.readouterr().err
    torch.cuda.synchronize()
    assert bool(out.isnan().all())
    assert model.plugin.enqueue(good, out)
    torch.cuda.synchronize()
    model.check(out, model.expected(tensors))
    model.plugin.close()


def test_no_token_is_no_work() -> None:
    model = AttentionModel(HEADS[0])
    tensors = model.step([(0, 3, True)])
    before = to_numpy(model.device_pool)
    assert model.run(tensors | {"qkv": tensors["qkv"][:0]}).shape[0] == 0
    np.testing.assert_array_equal(to_numpy(model.device_pool), before)
    model.plugin.close()
