"""Arithmetic of causal attention over a paged KV cache, in numpy.

The cache pool of one rank is [pages, num_kv_heads, tokens_per_block, head_size]; a page holds the keys or the values
of one block of one layer. A block's page number for layer 0 is what the block table stores; a layer's pages come
``2 * layer_in_pool`` later (TensorRT-LLM's layout: block, layer, key or value).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.floating[Any]]

#: Query rows scored at once: bounds memory to rows x heads x past, and skips keys no row of the tile sees.
_ROW_TILE = 128


@dataclass(frozen=True)
class LayerCache:
    """One layer's view of the cache for the sequences of a batch.

    Attributes:
        pool: [pages, num_kv_heads, tokens_per_block, head_size].
        tables: [B, 2, blocks] int: page numbers of keys and values, the layer's offset included.
    """

    pool: Array
    tables: Array

    @property
    def tokens_per_block(self) -> int:
        """Tokens per page."""
        return int(self.pool.shape[2])

    def append(self, sequences: Array, positions: Array, keys: Array, values: Array) -> None:
        """Store rotated keys and values [n, num_kv_heads, head_size] of n tokens, rounded to the pool's dtype."""
        blocks, slots = np.divmod(positions, self.tokens_per_block)
        for kind, rows in enumerate((keys, values)):
            self.pool[self.tables[sequences, kind, blocks], :, slots] = rows.astype(self.pool.dtype, copy=False)

    def read(self, sequence: int, kind: int, length: int) -> Array:
        """Return the first ``length`` keys (kind 0) or values (1) of a sequence: [num_kv_heads, length, head_size]."""
        count = -(-length // self.tokens_per_block)
        pages = self.pool[self.tables[sequence, kind, :count]]
        joined = pages.transpose(1, 0, 2, 3).reshape(pages.shape[1], -1, pages.shape[3])
        return joined[:, :length]

    def read_padded(self, sequences: Array, kind: int, lengths: Array) -> Array:
        """Return keys or values of several sequences, zero after each length: [n, num_kv_heads, longest, head_size]."""
        longest = int(lengths.max())
        count = -(-longest // self.tokens_per_block)
        used = np.arange(count) * self.tokens_per_block < lengths[:, None]
        tables = np.where(used, self.tables[sequences, kind, :count], 0)
        pages = self.pool[tables].transpose(0, 2, 1, 3, 4)
        joined = pages.reshape(*pages.shape[:2], -1, pages.shape[4])[:, :, :longest]
        valid = np.arange(longest) < lengths[:, None]
        return np.where(valid[:, None, :, None], joined, joined.dtype.type(0))


def rotate_half(x: Floats, table: Floats) -> Floats:
    """Apply RoPE in GPT-NeoX order: dimension i turns with i + rotary_dim / 2.

    Args:
        x: [n, heads, head_size] float32; dimensions past rotary_dim are left alone.
        table: [n, rotary_dim / 2, 2] float32: cosine and sine of each row's position.
    """
    half = table.shape[1]
    cos, sin = table[:, None, :, 0], table[:, None, :, 1]
    low, high = x[..., :half], x[..., half : 2 * half]
    return np.concatenate((low * cos - high * sin, high * cos + low * sin, x[..., 2 * half :]), axis=-1)


def _softmax(scores: Floats) -> tuple[Floats, Floats]:
    """Exponentials (in place) and their sums over the last axis."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    return scores, scores.sum(axis=-1, keepdims=True)


def attend_chunk(queries: Floats, keys: Array, values: Array, scale: float) -> Floats:
    """Attend from a sequence's last n tokens to all its tokens up to each of them.

    Args:
        queries: [n, heads, head_size] float32, rotated.
        keys: [num_kv_heads, length, head_size], any float dtype; the last n rows are the queries' own tokens.
        values: As ``keys``.
        scale: Factor of the scores.

    Returns:
        [n, heads * head_size] float32.
    """
    n, heads, head_size = queries.shape
    kv_heads, length, _ = keys.shape
    group = heads // kv_heads
    k = keys.astype(np.float32, copy=False).transpose(0, 2, 1)
    v = values.astype(np.float32, copy=False)
    q = (queries * np.float32(scale)).reshape(n, kv_heads, group, head_size).transpose(1, 2, 0, 3)
    out = np.empty((n, kv_heads, group, head_size), np.float32)
    for first in range(0, n, _ROW_TILE):
        last = min(first + _ROW_TILE, n)
        rows, seen = last - first, length - n + last
        scores = q[:, :, first:last].reshape(kv_heads, group * rows, head_size) @ k[:, :, :seen]
        if rows > 1:
            hidden = np.arange(seen) > (seen - rows + np.arange(rows))[:, None]
            scores.reshape(kv_heads, group, rows, seen)[:, :, hidden] = -np.inf
        weights, sums = _softmax(scores)
        tile = (weights @ v[:, :seen]) / sums
        out[first:last] = tile.reshape(kv_heads, group, rows, head_size).transpose(2, 0, 1, 3)
    return out.reshape(n, heads * head_size)


def attend_generation(queries: Floats, keys: Array, values: Array, lengths: Array, scale: float) -> Floats:
    """Attend from one token of each of n sequences.

    Args:
        queries: [n, heads, head_size] float32, rotated.
        keys: [n, num_kv_heads, longest, head_size], zero past each sequence's length.
        values: As ``keys``.
        lengths: [n] tokens of each sequence.
        scale: Factor of the scores.

    Returns:
        [n, heads * head_size] float32.
    """
    n, heads, head_size = queries.shape
    kv_heads, longest = keys.shape[1], keys.shape[2]
    q = (queries * np.float32(scale)).reshape(n, kv_heads, heads // kv_heads, head_size)
    scores = q @ keys.astype(np.float32, copy=False).transpose(0, 1, 3, 2)
    hidden = np.arange(longest) >= lengths[:, None]
    np.copyto(scores, np.float32(-np.inf), where=hidden[:, None, None, :])
    weights, sums = _softmax(scores)
    return ((weights @ values.astype(np.float32, copy=False)) / sums).reshape(n, heads * head_size)


def attend_row(query: Floats, keys: Array, values: Array, scale: float) -> Floats:
    """Attend from one token in float64; the result depends on nothing but these numbers.

    Every sum is numpy's own over arrays whose shapes follow from ``keys`` alone, so a row gives the same bits
    whichever rows it is computed with.

    Args:
        query: [heads, head_size], rotated.
        keys: [num_kv_heads, length, head_size], the token's own included.
        values: As ``keys``.
        scale: Factor of the scores.

    Returns:
        [heads * head_size] float64.
    """
    kv_heads, _, head_size = keys.shape
    q = query.astype(np.float64).reshape(kv_heads, -1, 1, head_size) * scale
    scores = (q * keys.astype(np.float64)[:, None]).sum(axis=-1)
    weights, sums = _softmax(scores)
    mixed: Floats = (weights[..., None] * values.astype(np.float64)[:, None]).sum(axis=-2)
    return (mixed / sums).reshape(-1)
