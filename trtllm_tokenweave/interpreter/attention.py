"""Attention plugins of the interpreter: GPTAttention, and the two plugins that run it on half of a step.

Numbers: queries, keys and values are biased and rotated in float32; rotated keys and values are rounded to the
model's dtype once, when stored; scores, softmax and the weighted sum are float32 (float64, row by row, in exact
mode) and are rounded once. Keys and values of the call's own tokens are read back from the cache, as TensorRT-LLM's
paged context FMHA reads them, so a chunked prefill sees the numbers that a prefill in one step sees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.batch_split import CONTEXT, HalfBatch, split_batch, tokens_per_sequence
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.interpreter import paged_attention as paged
from trtllm_tokenweave.interpreter.attention_batch import AttentionBatch, AttentionConfig, read_batch, read_cache
from trtllm_tokenweave.interpreter.registry import KernelContext, find_kernel, kernel
from trtllm_tokenweave.plugin_specs import ATTENTION, BATCH_SPLIT, NAMESPACE, VERSION, AttentionRole, Half
from trtllm_tokenweave.recorder.packed_fields import unpack_fields
from trtllm_tokenweave.recorder.plugin import Fields

Array = NDArray[Any]

#: Rows of the halves' lengths that no sequence owns hold this; it is no valid length.
UNDEFINED = -(1 << 30)


@kernel("GPTAttention", "1", "tensorrt_llm")
def gpt_attention(ctx: KernelContext, fields: Fields, inputs: list[Array]) -> list[Array]:
    """Append the step's keys and values to the cache and attend causally: [num_tokens, num_heads * head_size].

    Raises:
        UserError: the metadata does not describe the tokens; names the layer, the input and the sequence.
    """
    where = f"layer {ctx.layer}" if ctx.layer else "GPTAttention"
    config = AttentionConfig.from_fields(fields, where)
    if len(inputs) != len(config.inputs):
        raise UserError(f"has {len(inputs)} inputs, its fields ask for {len(config.inputs)}", where=where)
    tensors = dict(zip(config.inputs, inputs, strict=True))
    qkv = tensors["qkv"]
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_size
    if qkv.ndim != 2 or qkv.shape[1] != width:
        raise UserError(f"qkv has shape {qkv.shape}, expected [num_tokens, {width}]", where=where)
    batch = read_batch(config, tensors, where)
    cache = read_cache(config, tensors, batch, ctx.pools, where)
    sequences, positions = batch.token_sequences(), batch.token_positions()
    queries, keys, values = _heads(config, tensors, positions, where)
    cache.append(sequences, positions, keys, values)
    attend = _attend_exact if ctx.exact else _attend
    return [attend(config, batch, cache, queries).astype(qkv.dtype, copy=False)]


def _heads(
    config: AttentionConfig, tensors: dict[str, Array], positions: Array, where: str
) -> tuple[Array, Array, Array]:
    """Cut qkv into heads, add the bias, rotate Q and K: three [n, heads, head_size] float32."""
    x = tensors["qkv"].astype(np.float32)
    if "qkv_bias" in tensors:
        x += tensors["qkv_bias"].astype(np.float32)
    x = x.reshape(len(x), -1, config.head_size)
    turned, values = x[:, : config.num_heads + config.num_kv_heads], x[:, config.num_heads + config.num_kv_heads :]
    if config.rotary_dim:
        table = tensors["rotary_cos_sin"].reshape(-1, config.rotary_dim // 2, 2)
        if len(positions) and int(positions.max()) >= len(table):
            raise UserError(f"position {int(positions.max())} is past the {len(table)} of rotary_cos_sin", where=where)
        turned = paged.rotate_half(turned, table[positions])
    return turned[:, : config.num_heads], turned[:, config.num_heads :], values


def _attend(config: AttentionConfig, batch: AttentionBatch, cache: paged.LayerCache, queries: Array) -> Array:
    out = np.empty((len(queries), config.num_heads * config.head_size), np.float32)
    for s in range(batch.num_contexts):
        rows = slice(int(batch.starts[s]), int(batch.starts[s] + batch.counts[s]))
        length = int(batch.lengths[s])
        out[rows] = paged.attend_chunk(queries[rows], cache.read(s, 0, length), cache.read(s, 1, length), config.scale)
    for group in _generation_groups(config, batch):
        places, lengths = batch.starts[group], batch.lengths[group]
        out[places] = paged.attend_generation(
            queries[places],
            cache.read_padded(group, 0, lengths),
            cache.read_padded(group, 1, lengths),
            lengths,
            config.scale,
        )
    return out


def _generation_groups(config: AttentionConfig, batch: AttentionBatch) -> list[Array]:
    """Generation sequences to run together: those whose block counts have the same bit length (padding below 2x)."""
    sequences = np.arange(batch.num_contexts, len(batch.counts))
    if not len(sequences):
        return []
    classes = np.frexp(-(-batch.lengths[sequences] // config.tokens_per_block))[1]
    return [sequences[classes == c] for c in np.unique(classes)]


def _attend_exact(config: AttentionConfig, batch: AttentionBatch, cache: paged.LayerCache, queries: Array) -> Array:
    out = np.empty((len(queries), config.num_heads * config.head_size), np.float64)
    for s in range(len(batch.counts)):
        length, count, start = int(batch.lengths[s]), int(batch.counts[s]), int(batch.starts[s])
        keys, values = cache.read(s, 0, length), cache.read(s, 1, length)
        for i in range(count):
            seen = length - count + i + 1
            out[start + i] = paged.attend_row(queries[start + i], keys[:, :seen], values[:, :seen], config.scale)
    return out


_inner_fields = lru_cache(maxsize=1024)(unpack_fields)


def _roles(fields: Fields) -> list[AttentionRole]:
    return [AttentionRole(int(r)) for r in np.ravel(fields["roles"])]


@kernel(ATTENTION, VERSION, NAMESPACE)
def tokenweave_attention(ctx: KernelContext, fields: Fields, inputs: list[Array]) -> list[Array]:
    """Run the inner attention plugin on one half of the step: [m, num_heads * head_size].

    Of the device arrays ``sequence_length`` and ``context_lengths`` are the half's, padded to the step's B rows by
    TokenWeaveBatchSplit; they are trimmed here. All others are the whole step's; they are cut here. An empty half does
    not call the inner plugin.

    Raises:
        UserError: the half has more tokens than the step, or the inner plugin's error.
    """
    where = f"layer {ctx.layer}" if ctx.layer else ATTENTION
    roles = _roles(fields)
    place = {role: i for i, role in enumerate(roles) if role is not AttentionRole.OTHER}
    types, lengths = inputs[place[AttentionRole.HOST_REQUEST_TYPES]], inputs[place[AttentionRole.HOST_CONTEXT_LENGTHS]]
    qkv = inputs[place[AttentionRole.QKV]]
    total = int(tokens_per_sequence(types, lengths).sum())
    rows = len(qkv)
    if rows > total:
        raise UserError(f"this half has {rows} tokens, the step {total}", where=where)
    is_prefix = fields["half"] == Half.PREFIX
    prefix, suffix = split_batch(types, lengths, rows if is_prefix else total - rows)
    half = prefix if is_prefix else suffix
    if not half.rows:
        return [np.zeros((0, int(fields["num_heads"]) * int(fields["head_size"])), qkv.dtype)]
    key = tuple(bytes(fields[f"inner_{part}"]).decode() for part in ("name", "version", "namespace"))  # type: ignore[arg-type]
    inner = _inner_fields(bytes(fields["inner"]))  # type: ignore[arg-type]
    # The progress event of a layer must be recorded once, after its last context chunk; only these record it.
    last = not (is_prefix and CONTEXT in suffix.request_types)
    trimmed = [_TRIM[role](half, x, last) for role, x in zip(roles, inputs, strict=True)]
    return find_kernel((key[0], key[1], key[2]))(ctx, inner, trimmed)


_Trim = Callable[[HalfBatch, Array, bool], Array]

_TRIM: dict[AttentionRole, _Trim] = {
    AttentionRole.OTHER: lambda _, x, __: x,
    AttentionRole.QKV: lambda _, x, __: x,
    AttentionRole.SEQUENCE_LENGTH: lambda half, x, _: x[: half.count],
    AttentionRole.CONTEXT_LENGTHS: lambda half, x, _: x[: half.count],
    AttentionRole.CACHE_INDIRECTION: lambda half, x, _: x[half.sequences],
    AttentionRole.KV_CACHE_BLOCK_OFFSETS: lambda half, x, _: x[:, half.sequences],
    AttentionRole.HOST_PAST_KEY_VALUE_LENGTHS: lambda half, x, _: half.shortened(x),
    AttentionRole.HOST_REQUEST_TYPES: lambda half, _, __: half.request_types,
    AttentionRole.HOST_CONTEXT_LENGTHS: lambda half, _, __: half.context_lengths,
    AttentionRole.HOST_KV_CACHE_BLOCK_OFFSETS: lambda half, x, _: x[:, half.sequences],
    AttentionRole.HOST_CONTEXT_PROGRESS: lambda _, x, last: x if last else np.zeros_like(x),
    AttentionRole.HOST_MAX_ATTENTION_WINDOW_SIZES: lambda _, x, __: x,
    AttentionRole.HOST_SINK_TOKEN_LENGTH: lambda _, x, __: x,
}


@kernel(BATCH_SPLIT, VERSION, NAMESPACE)
def tokenweave_batch_split(ctx: KernelContext, fields: Fields, inputs: list[Array]) -> list[Array]:
    """Make the device's lengths of both halves: sequence_length and context_lengths of the prefix, then of the suffix.

    Each output has its input's shape; the half's rows come first, the rest is undefined.

    Raises:
        UserError: for an inconsistent batch, one that has other tokens than the step, or more than the network was
            woven for: the halves' attention, which cuts by the rows it gets, would cut the batch at another place.
    """
    where = f"layer {ctx.layer}" if ctx.layer else BATCH_SPLIT
    prefix_ref, num_tokens_ref, types, host_contexts, lengths, contexts = inputs
    halves = split_batch(types, host_contexts, len(prefix_ref))
    counted = sum(half.rows for half in halves)
    if counted != len(num_tokens_ref):
        raise UserError(
            f"the step has {len(num_tokens_ref)} tokens, host_request_types and host_context_lengths count {counted}",
            where=where,
            fix="give both for the tokens of input_ids",
        )
    if counted > (most := int(fields["max_num_tokens"])):
        raise UserError(
            f"the step has {counted} tokens, the network was woven for {most}",
            where=where,
            fix="weave with the max_num_tokens of the engine's profile",
        )
    outputs: list[Array] = []
    for half in halves:
        # Cut lengths are differences, so that the device's own values stay what they are.
        cut = half.context_lengths - host_contexts[half.sequences]
        outputs += [_padded(half.shortened(lengths), lengths), _padded(contexts[half.sequences] + cut, contexts)]
    return outputs


def _padded(rows: Array, like: Array) -> Array:
    """Put ``rows`` first in an array shaped as ``like``."""
    out = np.full_like(like, UNDEFINED)
    out[: len(rows)] = rows
    return out
