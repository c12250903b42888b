"""Cutting one step's batch in two at any token: the rule behind TokenWeaveAttention and TokenWeaveBatchSplit.

A step packs its sequences one after the other, context chunks first, then generation rows of one token each. The
cut falls at a token, so it may fall inside a context chunk; that sequence then appears in both halves, with the
same row of the block table. For a chunk of c tokens after p earlier ones, cut after its token a::

    half     context_lengths  sequence_length  host_past_key_value_lengths
    whole    c                p + c            p + c
    prefix   a                p + a            p + a
    suffix   c - a            p + c            p + c

The suffix part is a later chunk of the same sequence: the prefix must have run before it on the same layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.errors import UserError

Array = NDArray[Any]
Int32Array = NDArray[np.int32]

#: Values of ``host_request_types``.
CONTEXT = 0
GENERATION = 1


@dataclass(frozen=True)
class HalfBatch:
    """One half of a cut batch; all arrays are int32 with one entry per sequence of the half.

    Attributes:
        start: First token (row of the step's packed tensors).
        rows: Number of tokens.
        first: First sequence (row of the step's metadata).
        request_types: 0 context, 1 generation.
        context_lengths: Rewritten chunk lengths; a generation row keeps its prompt length.
        removed: Tokens of the step's chunk that come after this half: subtract them from ``sequence_length``
            and ``host_past_key_value_lengths``.
    """

    start: int
    rows: int
    first: int
    request_types: Int32Array
    context_lengths: Int32Array
    removed: Int32Array

    @property
    def count(self) -> int:
        """Sequences of this half."""
        return len(self.request_types)

    @property
    def sequences(self) -> slice:
        """The half's rows in the step's metadata."""
        return slice(self.first, self.first + self.count)

    def shortened(self, lengths: Array) -> Int32Array:
        """Rewrite ``sequence_length`` or ``host_past_key_value_lengths`` ([B] int32) of the step for this half."""
        result: Int32Array = (lengths[self.sequences] - self.removed).astype(np.int32)
        return result


def tokens_per_sequence(request_types: Array, context_lengths: Array) -> Int32Array:
    """Return how many rows each sequence has in this step ([B] int32).

    Raises:
        UserError: the arrays differ in length, a type is unknown, a generation row comes before a context row, or
            a context chunk is empty.
    """
    where = "host_request_types"
    types, lengths = np.asarray(request_types), np.asarray(context_lengths)
    if types.ndim != 1 or types.shape != lengths.shape:
        raise UserError(f"has shape {types.shape}, host_context_lengths {lengths.shape}: both must be [B]", where=where)
    unknown = np.flatnonzero((types != CONTEXT) & (types != GENERATION))
    if unknown.size:
        raise UserError(f"sequence {unknown[0]} has type {types[unknown[0]]}, expected 0 or 1", where=where)
    disorder = np.flatnonzero(types[1:] < types[:-1])
    if disorder.size:
        raise UserError(f"context sequence {disorder[0] + 1} comes after a generation sequence", where=where)
    empty = np.flatnonzero((types == CONTEXT) & (lengths < 1))
    if empty.size:
        raise UserError(
            f"context sequence {empty[0]} has {lengths[empty[0]]} tokens, expected at least 1",
            where="host_context_lengths",
        )
    counts: Int32Array = np.where(types == CONTEXT, lengths, 1).astype(np.int32)
    return counts


def split_batch(request_types: Array, context_lengths: Array, prefix_rows: int) -> tuple[HalfBatch, HalfBatch]:
    """Cut a batch after ``prefix_rows`` tokens.

    Args:
        request_types: ``host_request_types`` [B] int32.
        context_lengths: ``host_context_lengths`` [B] int32.
        prefix_rows: Tokens of the prefix, 0 to the number of tokens of the step.

    Returns:
        The prefix and the suffix; either may be empty.

    Raises:
        UserError: for an inconsistent batch or a cut outside it.
    """
    counts = tokens_per_sequence(request_types, context_lengths)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    if not 0 <= prefix_rows <= total:
        raise UserError(f"the prefix has {prefix_rows} tokens, the step {total}", where="batch split")
    whole = int(np.searchsorted(ends, prefix_rows, side="right"))
    inside = prefix_rows - (int(ends[whole - 1]) if whole else 0)
    types = np.asarray(request_types, np.int32)
    lengths = np.asarray(context_lengths, np.int32)
    left, right = lengths[: whole + (inside > 0)].copy(), lengths[whole:].copy()
    removed = np.zeros(len(left), np.int32)
    if inside:  # only a context chunk has more than one token
        left[-1], right[0] = inside, right[0] - inside
        removed[-1] = right[0]
    prefix = HalfBatch(0, prefix_rows, 0, types[: len(left)].copy(), left, removed)
    suffix = HalfBatch(
        prefix_rows, total - prefix_rows, whole, types[whole:].copy(), right, np.zeros(len(right), np.int32)
    )
    return prefix, suffix
