from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trtllm_tokenweave.batch import SequenceStep, StepLayout, step_inputs
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.kv_cache import BlockManager, KvCacheConfig, KvCachePool


def layout(tp_size: int = 1) -> StepLayout:
    cache = KvCacheConfig(3, 2, 8, np.dtype(np.float32), 16, 4, 6)
    return StepLayout(KvCachePool(cache), BlockManager(cache), max_seq_len=20, tp_size=tp_size)


CHUNK = SequenceStep(4, (11, 12, 13), start=8, prompt_length=14, is_context=True)
LAST_CHUNK = SequenceStep(1, (21, 22), start=0, prompt_length=2, is_context=True)
GENERATED = SequenceStep(2, (31,), start=7, prompt_length=5, is_context=False)


def inputs(given: StepLayout) -> dict[str, Any]:
    for step in (CHUNK, LAST_CHUNK, GENERATED):
        given.blocks.grow(step.sequence, step.end)
    return step_inputs([CHUNK, LAST_CHUNK, GENERATED], given)


def test_sequence_tensors_mean_what_tensorrt_llm_means() -> None:
    got = inputs(layout())
    expected = {
        "input_ids": [11, 12, 13, 21, 22, 31],
        "position_ids": [8, 9, 10, 0, 1, 7],
        "last_token_ids": [3, 5, 6],
        "sequence_length": [11, 2, 8],
        "context_lengths": [3, 2, 5],
        "host_context_lengths": [3, 2, 5],
        "host_request_types": [0, 0, 1],
        # Context: the chunk included. Generation: the new token excluded.
        "host_past_key_value_lengths": [11, 2, 7],
        "host_max_attention_window_sizes": [20, 20, 20],
        "host_sink_token_length": [0],
        "host_runtime_perf_knobs": [1] + [-1] * 15,
        "host_context_progress": [0],
        "host_kv_cache_pool_mapping": [[0, 0], [0, 1], [0, 2]],
    }
    for name, values in expected.items():
        assert got[name].tolist() == values, name


def test_cache_tensors_have_a_row_per_sequence() -> None:
    given = layout()
    got = inputs(given)
    assert got["kv_cache_block_offsets"].shape == (1, 3, 2, 6)
    for row, sequence in enumerate((4, 1, 2)):
        np.testing.assert_array_equal(got["kv_cache_block_offsets"][0, row], given.blocks.offsets(sequence))
    np.testing.assert_array_equal(got["kv_cache_block_offsets"], got["host_kv_cache_block_offsets"])
    assert got["host_kv_cache_pool_pointers"].tolist() == [[int(given.pool.pointers[0, 0]), 0]]
    assert got["cache_indirection"].shape == (3, 1, 20)
    assert not got["cache_indirection"].any()


def test_dtypes_and_the_workspace() -> None:
    int64 = {"host_kv_cache_pool_pointers", "host_runtime_perf_knobs", "host_context_progress", "all_reduce_workspace"}
    got = inputs(layout(tp_size=3))
    assert got["all_reduce_workspace"].shape == (7 * 3 + 3,)
    assert {name for name, x in got.items() if x.dtype == np.int64} == int64
    assert all(x.dtype == np.int32 for name, x in got.items() if name not in int64)
    assert "all_reduce_workspace" not in inputs(layout())


def test_sampling_is_for_whole_prompts_only() -> None:
    assert [s.samples for s in (CHUNK, LAST_CHUNK, GENERATED)] == [False, True, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), 0, 4, True), "0 tokens"),
        (((1, 2), 3, 4, True), "chunk ends at 5, the prompt at 4"),
        (((1, 2), 4, 4, False), "2 tokens at 4 are no generation row"),
        (((1,), 3, 4, False), "1 tokens at 3 are no generation row"),
        (((1,), -1, 4, True), "from position -1"),
    ],
)
def test_impossible_sequences_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        SequenceStep(9, *arguments)
    assert caught.value.where == "sequence 9"


def test_impossible_steps_are_refused() -> None:
    given = layout()
    with pytest.raises(UserError, match="at least one sequence"):
        step_inputs([], given)
    with pytest.raises(UserError, match="sequence 1: context chunk after a generation row"):
        step_inputs([GENERATED, LAST_CHUNK], given)
    with pytest.raises(UserError, match="sequence 1: 2 tokens, room for 0"):
        step_inputs([LAST_CHUNK], given)
    long = SequenceStep(3, (1,) * 21, 0, 21, is_context=True)
    given.blocks.grow(3, 21)
    with pytest.raises(UserError, match="sequence 3: 21 tokens, room for 24 in its blocks, max_seq_len 20"):
        step_inputs([long], given)
