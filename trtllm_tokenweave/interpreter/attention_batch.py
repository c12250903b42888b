"""What a GPTAttention layer finds in its metadata inputs, checked as TensorRT-LLM checks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.attention_roles import (
    KV_CACHE_QUANT_BITS,
    PositionEmbedding,
    attention_inputs,
    float_field,
    int_field,
    split_refusal,
)
from trtllm_tokenweave.batch_split import CONTEXT, tokens_per_sequence
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.interpreter.paged_attention import LayerCache
from trtllm_tokenweave.recorder.plugin import Fields

Array = NDArray[Any]


@dataclass(frozen=True)
class AttentionConfig:
    """Fields of one layer; head counts are this rank's."""

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rotary_dim: int
    tokens_per_block: int
    scale: float
    inputs: tuple[str, ...]

    @classmethod
    def from_fields(cls, fields: Fields, where: str) -> AttentionConfig:
        """Read the fields of a GPTAttention plugin.

        Raises:
            UserError: for a feature that the interpreter does not have; names the layer and the field.
        """
        refusal = split_refusal(fields)
        position = int_field(fields, "position_embedding_type")
        if refusal:
            raise UserError(f"the interpreter cannot run this attention: {refusal}", where=where)
        if position not in (PositionEmbedding.LEARNED_ABSOLUTE, PositionEmbedding.ROPE_GPT_NEOX):
            raise UserError(f"position_embedding_type {position} is not served (0 none, 2 rope_gpt_neox)", where=where)
        if float_field(fields, "attn_logit_softcapping_scale", 0.0):
            raise UserError("attn_logit_softcapping_scale is not served", where=where)
        if int_field(fields, "kv_cache_quant_mode") & KV_CACHE_QUANT_BITS:
            raise UserError("kv_cache_quant_mode asks for a quantised KV cache, which is not served", where=where)
        heads, kv_heads = int_field(fields, "num_heads"), int_field(fields, "num_kv_heads")
        if kv_heads < 1 or heads % kv_heads:
            raise UserError(f"num_heads {heads} is no multiple of num_kv_heads {kv_heads}", where=where)
        head_size = int_field(fields, "head_size")
        return cls(
            layer_idx=int_field(fields, "layer_idx"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head_size,
            rotary_dim=int_field(fields, "rotary_embedding_dim") if position else 0,
            tokens_per_block=int_field(fields, "tokens_per_block"),
            scale=1.0 / (float_field(fields, "q_scaling", 1.0) * float(np.sqrt(head_size))),
            inputs=tuple(attention_inputs(fields)),
        )


@dataclass(frozen=True)
class AttentionBatch:
    """Metadata of the sequences of one call; arrays are [B].

    Attributes:
        counts: Rows of each sequence in this call.
        lengths: Tokens of each sequence after this call (``sequence_length``).
        num_contexts: Sequences that are context chunks; they come first.
    """

    counts: Array
    lengths: Array
    num_contexts: int

    @property
    def starts(self) -> Array:
        """First row of each sequence."""
        starts: Array = np.cumsum(self.counts) - self.counts
        return starts

    @property
    def past(self) -> Array:
        """Tokens of each sequence that are in the cache already."""
        past: Array = self.lengths - self.counts
        return past

    def token_sequences(self) -> Array:
        """Sequence of each row."""
        sequences: Array = np.repeat(np.arange(len(self.counts)), self.counts)
        return sequences

    def token_positions(self) -> Array:
        """Position of each row in its sequence."""
        shift = np.repeat(self.past - self.starts, self.counts)
        positions: Array = np.arange(len(shift)) + shift
        return positions


def read_batch(config: AttentionConfig, tensors: dict[str, Array], where: str) -> AttentionBatch:
    """Check and read the sequence metadata of a call.

    Args:
        config: The layer.
        tensors: Inputs by name (:func:`attention_inputs`).
        where: The layer, for messages.

    Raises:
        UserError: what TensorRT-LLM asserts (contexts first, token count, equal lengths), and what it does not
            assert but silently gets wrong (host and device metadata that differ, sliding windows, beams).
    """
    lengths, contexts = tensors["sequence_length"], tensors["context_lengths"]
    types, host_contexts = tensors["host_request_types"], tensors["host_context_lengths"]
    past = tensors["host_past_key_value_lengths"]
    try:
        counts = tokens_per_sequence(types, host_contexts)
    except UserError as error:
        raise UserError(f"{error.where}: {error.what}", where=where) from None
    for name, array in (("sequence_length", lengths), ("context_lengths", contexts), (_PAST, past)):
        if array.shape != types.shape:
            raise UserError(f"{name} has shape {array.shape}, host_request_types {types.shape}", where=where)
    rows = tensors["qkv"].shape[0]
    if int(counts.sum()) != rows:
        raise UserError(f"qkv has {rows} rows, the sequences have {int(counts.sum())} tokens", where=where)
    context = types == CONTEXT
    _same(contexts[context], host_contexts[context], "context_lengths", "host_context_lengths", where)
    _same(past, np.where(context, lengths, lengths - 1), _PAST, "sequence_length (- 1 for generation)", where)
    short = np.flatnonzero(lengths < counts)
    if short.size:
        s = short[0]
        raise UserError(f"sequence {s} has {counts[s]} new tokens but sequence_length {lengths[s]}", where=where)
    _check_windows(config, tensors, lengths, where)
    return AttentionBatch(counts, lengths, int(context.sum()))


_PAST = "host_past_key_value_lengths"


def _same(given: Array, expected: Array, name: str, other: str, where: str) -> None:
    wrong = np.flatnonzero(given != expected)
    if wrong.size:
        s = wrong[0]
        raise UserError(f"{name} of sequence {s} is {given[s]}, {other} says {expected[s]}", where=where)


def _check_windows(config: AttentionConfig, tensors: dict[str, Array], lengths: Array, where: str) -> None:
    windows, sink = tensors["host_max_attention_window_sizes"], tensors["host_sink_token_length"]
    if not 0 <= config.layer_idx < len(windows):
        raise UserError(f"layer_idx {config.layer_idx} is outside the {len(windows)} window sizes", where=where)
    window = int(windows[config.layer_idx])
    beyond = np.flatnonzero(lengths > window)
    if beyond.size:
        s = beyond[0]
        raise UserError(
            f"sequence {s} has {lengths[s]} tokens, more than the attention window {window}",
            where=where,
            fix="set host_max_attention_window_sizes to max_seq_len: sliding windows are not served",
        )
    if sink.size and int(sink.reshape(-1)[0]):
        raise UserError(f"host_sink_token_length is {int(sink.reshape(-1)[0])}, expected 0", where=where)
    beams = tensors["cache_indirection"].shape
    if len(beams) != 3 or beams[1] != 1:
        raise UserError(
            f"cache_indirection has shape {beams}, expected [B, 1, max_seq_len] (beam width 1)", where=where
        )


def read_cache(
    config: AttentionConfig, tensors: dict[str, Array], batch: AttentionBatch, pools: dict[int, Array], where: str
) -> LayerCache:
    """Find the layer's pages of the cache and check every block that the call touches.

    Raises:
        UserError: no pool at the address, a pool of another shape or dtype, a block table that is too short, points
            outside the pool or differs between host and device.
    """
    mapping, pointers = tensors["host_kv_cache_pool_mapping"], tensors["host_kv_cache_pool_pointers"]
    if mapping.ndim != 2 or mapping.shape[1] != 2 or config.layer_idx >= len(mapping):
        raise UserError(f"host_kv_cache_pool_mapping {mapping.shape} has no row {config.layer_idx}", where=where)
    index, layer_in_pool = (int(x) for x in mapping[config.layer_idx])
    device, host = tensors["kv_cache_block_offsets"], tensors["host_kv_cache_block_offsets"]
    if not 0 <= index < len(pointers) or index >= len(device):
        raise UserError(f"layer {config.layer_idx} is mapped to pool {index} of {len(pointers)}", where=where)
    pool = pools.get(int(pointers[index, 0]))
    if pool is None:
        raise UserError(f"no KV cache pool at address {int(pointers[index, 0]):#x}", where=where)
    expected = (config.num_kv_heads, config.tokens_per_block, config.head_size)
    if pool.shape[1:] != expected or pool.dtype != tensors["qkv"].dtype:
        raise UserError(
            f"pool is {pool.dtype} {pool.shape[1:]}, expected {tensors['qkv'].dtype} {expected}", where=where
        )
    blocks = -(-batch.lengths // config.tokens_per_block)
    for name, table in (("kv_cache_block_offsets", device), ("host_kv_cache_block_offsets", host)):
        if table.ndim != 4 or table.shape[1:3] != (len(blocks), 2):
            raise UserError(f"{name} has shape {table.shape}, expected [pools, {len(blocks)}, 2, blocks]", where=where)
        short = np.flatnonzero(blocks > table.shape[3])
        if short.size:
            s = short[0]
            raise UserError(f"sequence {s} needs {blocks[s]} blocks, {name} has {table.shape[3]}", where=where)
    tables = device[index]
    used = (np.arange(tables.shape[2]) < blocks[:, None])[:, None]
    _check_tables(np.where(used, tables, 0), np.where(used, host[index], 0), len(pool) - 2 * layer_in_pool, where)
    return LayerCache(pool, tables.astype(np.int64) + 2 * layer_in_pool)


def _check_tables(device: Array, host: Array, pages: int, where: str) -> None:
    wrong = np.argwhere(device != host)
    if len(wrong):
        s, kind, block = wrong[0]
        raise UserError(
            f"block {block} ({'KV'[kind]}) of sequence {s} is {device[s, kind, block]} in kv_cache_block_offsets, "
            f"{host[s, kind, block]} in host_kv_cache_block_offsets",
            where=where,
        )
    outside = np.argwhere((device < 0) | (device >= pages))
    if len(outside):
        s, kind, block = outside[0]
        raise UserError(
            f"block {block} ({'KV'[kind]}) of sequence {s} has page {device[s, kind, block]}, the pool {pages}",
            where=where,
        )
