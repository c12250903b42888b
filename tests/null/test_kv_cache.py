from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.kv_cache import BlockManager, KvCacheConfig, KvCachePool, pool_mapping


def config(**changes: Any) -> KvCacheConfig:
    sizes: dict[str, Any] = {
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_size": 8,
        "dtype": np.dtype(np.float32),
        "num_blocks": 6,
        "tokens_per_block": 4,
        "max_blocks_per_seq": 5,
    }
    return KvCacheConfig(**(sizes | changes))


def test_blocks_are_allocated_as_a_sequence_grows_and_reused_after_it_ends() -> None:
    blocks = BlockManager(config())
    blocks.grow(0, 4)
    blocks.grow(1, 1)
    blocks.grow(0, 5)
    first = blocks.blocks(0)
    assert (len(first), len(blocks.blocks(1)), blocks.num_free) == (2, 1, 3)
    blocks.grow(0, 3)
    assert blocks.blocks(0) == first
    blocks.free(0)
    assert (blocks.blocks(0), blocks.num_free) == ((), 5)
    blocks.grow(2, 8)
    assert set(blocks.blocks(2)) == set(first)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.booleans()), max_size=30))
def test_no_block_ever_has_two_owners(actions: list[tuple[int, int, bool]]) -> None:
    blocks = BlockManager(config(num_blocks=8))
    alive: set[int] = set()
    for sequence, tokens, end in actions:
        if end and sequence in alive:
            blocks.free(sequence)
            alive.remove(sequence)
            continue
        try:
            blocks.grow(sequence, tokens)
            alive.add(sequence)
        except UserError:
            pass
        owned = [b for s in alive for b in blocks.blocks(s)]
        assert len(owned) == len(set(owned)) == 8 - blocks.num_free


def test_full_cache_is_refused_and_nothing_changes() -> None:
    blocks = BlockManager(config())
    blocks.grow(0, 16)
    with pytest.raises(UserError, match=r"sequence 1: needs 3 more blocks, 2 of 6 are free.*num_blocks"):
        blocks.grow(1, 9)
    assert (blocks.num_free, blocks.blocks(1)) == (2, ())


def test_sequence_longer_than_the_block_table_is_refused() -> None:
    with pytest.raises(UserError, match="21 tokens need 6 blocks, the block table has 5"):
        BlockManager(config()).grow(0, 21)


def test_freeing_twice_is_refused() -> None:
    blocks = BlockManager(config())
    blocks.grow(0, 1)
    blocks.free(0)
    with pytest.raises(UserError, match="sequence 0: has no blocks"):
        blocks.free(0)


def test_offsets_follow_the_pool_layout() -> None:
    blocks = BlockManager(config())
    blocks.grow(0, 6)
    first, second = blocks.blocks(0)
    row = blocks.offsets(0)
    assert row.shape == (2, 5)
    assert row.dtype == np.int32
    assert row[:, :2].tolist() == [[first * 6, second * 6], [first * 6 + 1, second * 6 + 1]]
    assert not row[:, 2:].any()
    assert pool_mapping(3).tolist() == [[0, 0], [0, 1], [0, 2]]


def test_pool_is_poisoned_and_found_by_its_address() -> None:
    pool = KvCachePool(config())
    assert pool.pages.shape == (6 * 3 * 2, 2, 4, 8)
    assert np.isnan(pool.pages).all()
    assert pool.bindings[int(pool.pointers[0, 0])] is pool.pages
    assert KvCachePool(config()).address != pool.address


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_blocks": 0}, "num_blocks is 0"), ({"tokens_per_block": 12}, "12 is no power of two")],
)
def test_bad_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**changes)
