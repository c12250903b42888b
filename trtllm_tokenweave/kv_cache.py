"""The paged KV cache: which blocks a sequence owns, and one rank's pool of pages.

All ranks use the same block tables; each has its own pool, holding its own KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.errors import UserError, check_fields

Array = NDArray[Any]


@dataclass(frozen=True)
class KvCacheConfig:
    """Sizes of the cache; ``num_kv_heads`` is one rank's, ``dtype`` the model's numpy dtype."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: np.dtype[Any]
    num_blocks: int
    tokens_per_block: int = 32
    max_blocks_per_seq: int = 256

    def __post_init__(self) -> None:
        check_fields(self, "KV cache: ")
        for name in (
            "num_layers",
            "num_kv_heads",
            "head_size",
            "num_blocks",
            "tokens_per_block",
            "max_blocks_per_seq",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, expected at least 1", where="KV cache")
        if self.tokens_per_block & (self.tokens_per_block - 1):
            raise UserError(f"tokens_per_block {self.tokens_per_block} is no power of two", where="KV cache")

    @property
    def pool_shape(self) -> tuple[int, int, int, int]:
        """[pages, num_kv_heads, tokens_per_block, head_size]: a page of keys and one of values a block and layer."""
        pages = self.num_blocks * self.num_layers * 2
        return pages, self.num_kv_heads, self.tokens_per_block, self.head_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens of one sequence take."""
        return -(-tokens // self.tokens_per_block)


class CachePool(Protocol):
    """What a step needs to know of one rank's pool."""

    @property
    def config(self) -> KvCacheConfig:
        """Its sizes."""

    @property
    def pointers(self) -> NDArray[np.int64]:
        """``host_kv_cache_pool_pointers`` [1 pool, 2]: address of the first page, and 0 (no secondary pool)."""


class KvCachePool:
    """One rank's pages: [blocks * layers * 2, num_kv_heads, tokens_per_block, head_size], filled with NaN at first.

    NaN makes any read of a slot that was never written show in the result.
    """

    def __init__(self, config: KvCacheConfig) -> None:
        self.config = config
        self.pages: Array = np.full(config.pool_shape, np.nan, config.dtype)

    @property
    def address(self) -> int:
        """Address of the first page: what ``host_kv_cache_pool_pointers`` carries."""
        return int(self.pages.__array_interface__["data"][0])

    @property
    def pointers(self) -> NDArray[np.int64]:
        """See `CachePool`."""
        return np.array([[self.address, 0]], np.int64)

    @property
    def bindings(self) -> dict[int, Array]:
        """{address: pages}: what the interpreter needs to find the pool again."""
        return {self.address: self.pages}


class BlockManager:
    """Owns the blocks: hands them out as sequences grow, takes them back when they finish.

    Freed blocks are handed out again last-freed-first, so reuse happens early.
    """

    def __init__(self, config: KvCacheConfig) -> None:
        self.config = config
        self._free = list(range(config.num_blocks - 1, -1, -1))
        self._owned: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no sequence owns."""
        return len(self._free)

    def blocks(self, sequence: int) -> tuple[int, ...]:
        """Blocks of a sequence, in token order; empty for one that is not known."""
        return tuple(self._owned.get(sequence, ()))

    def grow(self, sequence: int, tokens: int) -> None:
        """Make room for the first ``tokens`` tokens of a sequence; a new sequence starts here.

        Raises:
            UserError: no block is free, or the sequence exceeds ``max_blocks_per_seq``. Nothing changes then.
        """
        needed, owned = self.config.blocks_for(tokens), self.blocks(sequence)
        where = f"KV cache, sequence {sequence}"
        if needed > self.config.max_blocks_per_seq:
            raise UserError(
                f"{tokens} tokens need {needed} blocks, the block table has {self.config.max_blocks_per_seq}",
                where=where,
                fix="shorten the prompt or raise max_seq_len",
            )
        more = needed - len(owned)
        if more > len(self._free):
            raise UserError(
                f"needs {more} more blocks, {len(self._free)} of {self.config.num_blocks} are free",
                where=where,
                fix="raise num_blocks or lower max_batch_size",
            )
        self._owned.setdefault(sequence, []).extend(self._free.pop() for _ in range(more))

    def free(self, sequence: int) -> None:
        """Take back the blocks of a sequence.

        Raises:
            UserError: the sequence has no blocks (freed twice).
        """
        if sequence not in self._owned:
            raise UserError("has no blocks to free", where=f"KV cache, sequence {sequence}")
        self._free.extend(reversed(self._owned.pop(sequence)))

    def offsets(self, sequence: int) -> NDArray[np.int32]:
        """Row of ``kv_cache_block_offsets`` [2, max_blocks_per_seq]: page numbers of keys and of values.

        Unused entries are 0, as TensorRT-LLM leaves them.
        """
        blocks = np.array(self.blocks(sequence), np.int32)
        row = np.zeros((2, self.config.max_blocks_per_seq), np.int32)
        row[:, : len(blocks)] = blocks * (2 * self.config.num_layers) + np.array([[0], [1]], np.int32)
        return row


def pool_mapping(num_layers: int) -> NDArray[np.int32]:
    """``host_kv_cache_pool_mapping`` [layers, 2]: every layer in pool 0, in order."""
    return np.stack([np.zeros(num_layers, np.int32), np.arange(num_layers, dtype=np.int32)], axis=1)
