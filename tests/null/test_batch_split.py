from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_tokenweave.batch_split import HalfBatch, split_batch
from trtllm_tokenweave.comm import SingleComm
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.interpreter.attention import tokenweave_batch_split
from trtllm_tokenweave.interpreter.registry import KernelContext


def arrays(batch: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(type, context length) per sequence as two int32 arrays."""
    return np.array([t for t, _ in batch], np.int32), np.array([c for _, c in batch], np.int32)


def tokens(half: HalfBatch, seq: list[int]) -> list[tuple[int, int]]:
    """(sequence, position) of every token of a half, worked out from its rewritten arrays alone."""
    lengths = half.shortened(np.array(seq, np.int32))
    found = []
    for i in range(half.count):
        count = int(half.context_lengths[i]) if half.request_types[i] == 0 else 1
        found += [(half.first + i, p) for p in range(int(lengths[i]) - count, int(lengths[i]))]
    return found


contexts = st.lists(st.tuples(st.just(0), st.integers(1, 9)), max_size=4)
generation = st.lists(st.tuples(st.just(1), st.integers(1, 20)), max_size=4)


@given(contexts, generation, st.data())
def test_halves_hold_every_token_once_and_in_order(
    first: list[tuple[int, int]], rest: list[tuple[int, int]], data: st.DataObject
) -> None:
    batch = first + rest
    past = [data.draw(st.integers(0, 12)) for _ in first]
    seq = [p + c for p, (_, c) in zip(past, first, strict=True)] + [c + 1 for _, c in rest]
    counts = [c if t == 0 else 1 for t, c in batch]
    cut = data.draw(st.integers(0, sum(counts)))
    prefix, suffix = split_batch(*arrays(batch), cut)
    whole = [(s, p) for s, (n, c) in enumerate(zip(seq, counts, strict=True)) for p in range(n - c, n)]
    assert tokens(prefix, seq) == whole[:cut]
    assert tokens(suffix, seq) == whole[cut:]
    assert (prefix.start, prefix.rows, suffix.start, suffix.rows) == (0, cut, cut, len(whole) - cut)
    shared = prefix.count + suffix.count - len(batch)
    assert shared == (0 < cut < len(whole) and whole[cut - 1][0] == whole[cut][0])


def test_cut_inside_a_chunk_follows_the_rule() -> None:
    # A chunk of 10 after 3 tokens, cut after 4 of its tokens; past counts as TensorRT-LLM's (the chunk included).
    prefix, suffix = split_batch(*arrays([(0, 10), (1, 6)]), 4)
    seq, past = np.array([13, 8], np.int32), np.array([13, 7], np.int32)
    assert (prefix.context_lengths.tolist(), prefix.request_types.tolist()) == ([4], [0])
    assert (prefix.shortened(seq).tolist(), prefix.shortened(past).tolist()) == ([7], [7])
    assert (suffix.context_lengths.tolist(), suffix.request_types.tolist()) == ([6, 6], [0, 1])
    assert (suffix.shortened(seq).tolist(), suffix.shortened(past).tolist()) == ([13, 8], [13, 7])
    assert (prefix.sequences, suffix.sequences) == (slice(0, 1), slice(0, 2))
    assert suffix.shortened(seq).dtype == np.int32


def test_empty_batch_has_two_empty_halves() -> None:
    prefix, suffix = split_batch(*arrays([]), 0)
    assert (prefix.count, prefix.rows, suffix.count, suffix.rows) == (0, 0, 0, 0)


def test_inputs_are_not_changed() -> None:
    types, lengths = arrays([(0, 5), (0, 3)])
    split_batch(types, lengths, 2)
    assert lengths.tolist() == [5, 3]


@pytest.mark.parametrize(
    ("batch", "cut", "message"),
    [
        ([(0, 3), (1, 4)], 5, "the prefix has 5 tokens, the step 4"),
        ([(0, 3)], -1, "the prefix has -1 tokens"),
        ([(1, 3), (0, 4)], 1, "context sequence 1 comes after"),
        ([(0, 3), (2, 4)], 1, "sequence 1 has type 2"),
        ([(0, 0)], 0, "context sequence 0 has 0 tokens"),
    ],
)
def test_inconsistent_batches_are_refused(batch: list[tuple[int, int]], cut: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        split_batch(*arrays(batch), cut)


def test_arrays_of_different_length_are_refused() -> None:
    with pytest.raises(UserError, match="both must be"):
        split_batch(np.zeros(2, np.int32), np.ones(3, np.int32), 0)


@pytest.mark.parametrize(
    ("tokens", "most", "message"),
    [
        (16, 15, "layer split: the step has 16 tokens, the network was woven for 15"),
        (15, 64, "layer split: the step has 15 tokens, host_request_types and host_context_lengths count 16"),
        (17, 64, "layer split: the step has 17 tokens, host_request_types and host_context_lengths count 16"),
    ],
)
def test_the_plugin_refuses_a_step_that_its_halves_would_cut_elsewhere(tokens: int, most: int, message: str) -> None:
    types, contexts, lengths = (np.array(x, np.int32) for x in ([0, 0, 1, 1], [10, 4, 6, 9], [13, 4, 8, 13]))

    def run(tokens: int, most: int) -> list[np.ndarray[Any, Any]]:
        references: list[np.ndarray[Any, Any]] = [np.zeros((12, 1)), np.zeros((tokens, 1))]
        given = [*references, types, contexts, lengths, contexts]
        return tokenweave_batch_split(KernelContext(comm=SingleComm(), layer="split"), {"max_num_tokens": most}, given)

    prefix_lengths, _, _, suffix_contexts = run(16, 16)
    assert prefix_lengths[:2].tolist() == [13, 2]
    assert suffix_contexts[:3].tolist() == [2, 6, 9]
    with pytest.raises(UserError) as caught:
        run(tokens, most)
    assert str(caught.value).startswith(message)
