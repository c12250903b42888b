"""The split of a step as constants that a network can look up from its shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trtllm_tokenweave.recorder.tensor import MAX_SHAPE_TENSOR_ELEMENTS
from trtllm_tokenweave.schedule import ceil_div, check_limits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trtllm_tokenweave.table.model import TuningTable


@dataclass(frozen=True, eq=False)
class PrefixLookup:
    """Constants of the in-graph lookup and the arithmetic on them.

    For a step of n tokens in b sequences the network computes, in int64 shape arithmetic::

        bucket = sum(b >= s for s in batch_starts)
        k      = ceil(n / granularity)
        below  = clamp(min_tokens - n, 0, 1)
        prefix = min(n, prefix_table[bucket][k] + below * min_tokens, max_prefix)
        suffix = min(n - prefix, max_suffix)

    The table holds a true bound (granularity * k) where a step is not split, never a huge number: TensorRT sizes
    activations by the bounds of these expressions. The two constants at the end cut nothing off; they tell it that
    the halves never reach their separate maxima over unreachable inputs.

    Attributes:
        granularity: Tokens of a token bucket.
        min_tokens: Steps below are not split.
        max_batch: Largest batch served.
        max_num_tokens: Largest token count served.
        batch_starts: First batch size of each batch bucket after the first, ascending.
        prefix: int64 [len(batch_starts) + 1, ceil(max_num_tokens / granularity) + 1], tokens.
        max_prefix: Largest prefix over all n in 0..max_num_tokens and all batches, exactly.
        max_suffix: Largest suffix likewise; 0: no step is ever split.
    """

    granularity: int
    min_tokens: int
    max_batch: int
    max_num_tokens: int
    batch_starts: tuple[int, ...]
    prefix: NDArray[np.int64]
    max_prefix: int
    max_suffix: int

    @property
    def splits(self) -> bool:
        """Whether any step is split."""
        return self.max_suffix > 0

    @property
    def activation_ratio(self) -> float:
        """Estimated activation memory relative to an unsplit network: both halves' bounds over the largest step.

        Fuse-only rows above a splitting bucket raise it: the prefix then has to hold a whole step while the suffix
        keeps room for the half of a smaller one.
        """
        return (self.max_prefix + self.max_suffix) / self.max_num_tokens

    def evaluate(self, batch: int, num_tokens: int) -> tuple[int, int]:
        """What the network computes, in plain integers: (prefix, suffix) tokens.

        Raises:
            ValueError: Outside of 0..max_batch or 0..max_num_tokens.
        """
        if not (0 <= batch <= self.max_batch and 0 <= num_tokens <= self.max_num_tokens):
            raise ValueError(f"batch {batch} or num_tokens {num_tokens} is outside of the lookup's range")
        bucket = sum(int(batch >= start) for start in self.batch_starts)
        k = ceil_div(num_tokens, self.granularity)
        below = min(max(self.min_tokens - num_tokens, 0), 1)
        prefix = min(num_tokens, int(self.prefix[bucket, k]) + below * self.min_tokens, self.max_prefix)
        return prefix, min(num_tokens - prefix, self.max_suffix)

    def chunks(self) -> tuple[NDArray[np.int64], ...]:
        """`prefix` flattened row by row and cut into constants of at most 64 elements, in order.

        Element [bucket, k] is number ``bucket * prefix.shape[1] + k`` of their concatenation.
        """
        flat, most = self.prefix.reshape(-1), MAX_SHAPE_TENSOR_ELEMENTS
        return tuple(flat[i : i + most] for i in range(0, flat.size, most))


def prefix_lookup(table: TuningTable, max_batch: int, max_num_tokens: int) -> PrefixLookup:
    """Constants of the lookup rule of `table` (`schedule.plan_step`) up to the given sizes.

    Batch buckets that cannot be told apart up to `max_num_tokens` are joined.

    Raises:
        UserError: A size outside of 1..`schedule.MAX_NUM_TOKENS`.
    """
    check_limits(max_batch, max_num_tokens)
    bounds = {row.batch.lo for row in table.rows} | {row.batch.hi + 1 for row in table.rows if row.batch.hi is not None}
    starts: list[int] = []
    rows: list[list[int]] = []
    for start in sorted({1} | {bound for bound in bounds if bound <= max_batch}):
        values = _prefix_row(table, start, max_num_tokens)
        if not rows or values != rows[-1]:
            starts.append(start)
            rows.append(values)
    max_prefix, max_suffix = _bounds(table, rows, max_num_tokens)
    return PrefixLookup(
        granularity=table.granularity,
        min_tokens=table.min_tokens,
        max_batch=max_batch,
        max_num_tokens=max_num_tokens,
        batch_starts=tuple(starts[1:]),
        prefix=np.array(rows, dtype=np.int64),
        max_prefix=max_prefix,
        max_suffix=max_suffix,
    )


def _prefix_row(table: TuningTable, batch: int, max_num_tokens: int) -> list[int]:
    values = [0]
    # The rows of one batch size in ascending order of tokens: each is left behind once it is passed.
    rows = sorted((row for row in table.rows if row.batch.contains(batch)), key=lambda row: -row.tokens.lo)
    for top in range(table.granularity, max_num_tokens + table.granularity, table.granularity):
        while rows and rows[-1].tokens.hi is not None and rows[-1].tokens.hi < top:
            rows.pop()
        row = rows[-1] if rows and rows[-1].tokens.contains(top) else None
        if top < table.min_tokens or (row is not None and row.mode == "fuse"):
            values.append(top)
        else:
            values.append(min(top, top // 2 + (row.split_offset if row is not None else 0)))
    return values


def _bounds(table: TuningTable, rows: list[list[int]], max_num_tokens: int) -> tuple[int, int]:
    # Below min_tokens the prefix is the whole step. From there on both min(n, p) and n - min(n, p) never fall as n
    # grows inside a token bucket, so each bucket's last reachable n gives its maxima.
    max_prefix, max_suffix = min(max_num_tokens, table.min_tokens - 1), 0
    for values in rows:
        for k, value in enumerate(values):
            top = min(table.granularity * k, max_num_tokens)
            if top >= table.min_tokens:
                max_prefix = max(max_prefix, min(top, value))
                max_suffix = max(max_suffix, top - min(top, value))
    return max_prefix, max_suffix
