"""The plugins of this project: creators' fields, inputs and outputs (the C++ library implements the same).

All are ``IPluginV3`` with namespace ``tokenweave`` and version ``1``. Shapes below: m rows of this layer's half,
h hidden size, tp ranks, B sequences of the step, n tokens of the step.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from trtllm_tokenweave.recorder.enums import FLOATS, DataType, PluginFieldType
from trtllm_tokenweave.recorder.plugin import Fields, FieldSpec, PluginSpec
from trtllm_tokenweave.recorder.tensor import NetworkError, Shape, TensorDesc

NAMESPACE = "tokenweave"
VERSION = "1"

ALL_REDUCE_RMS_NORM = "AllReduceRmsNorm"
STREAM_JOIN = "StreamJoin"
ATTENTION = "TokenWeaveAttention"
BATCH_SPLIT = "TokenWeaveBatchSplit"
SUFFIX_ROWS = "TokenWeaveSuffixRows"
GEMM = "Gemm"

#: Shape and dtype of the chain: the tiny tensor that orders all collectives and joins of a network.
CHAIN = TensorDesc(DataType.INT32, (1,))


class Half(enum.IntEnum):
    """Which tokens of the step a layer serves."""

    PREFIX = 0
    SUFFIX = 1
    WHOLE = 2


class SiteKind(enum.IntEnum):
    """What computed the tensor that a fusion site reduces."""

    ATTENTION = 0
    MLP = 1


class AttentionRole(enum.IntEnum):
    """What an input of a GPTAttention layer is; OTHER inputs are handed to either half unchanged."""

    OTHER = 0
    QKV = 1
    SEQUENCE_LENGTH = 2
    HOST_PAST_KEY_VALUE_LENGTHS = 3
    CONTEXT_LENGTHS = 4
    CACHE_INDIRECTION = 5
    HOST_REQUEST_TYPES = 6
    KV_CACHE_BLOCK_OFFSETS = 7
    HOST_KV_CACHE_BLOCK_OFFSETS = 8
    HOST_CONTEXT_LENGTHS = 9
    HOST_CONTEXT_PROGRESS = 10
    HOST_MAX_ATTENTION_WINDOW_SIZES = 11
    HOST_SINK_TOKEN_LENGTH = 12


def _int32(name: str, low: float | None = None, high: float | None = None, *, default: int | None = None) -> FieldSpec:
    return FieldSpec(name, PluginFieldType.INT32, default=default, low=low, high=high)


def _flag(name: str) -> FieldSpec:
    return FieldSpec(name, PluginFieldType.INT8, default=0, low=0, high=1)


def _chars(name: str, default: bytes | None = None) -> FieldSpec:
    return FieldSpec(name, PluginFieldType.CHAR, default=default)


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise NetworkError(what)


def shard_rows(rows: int, tp_size: int) -> int:
    """Rows of a token-sharded tensor: ceil(rows / tp_size); -1 (dynamic) stays -1."""
    return -1 if rows < 0 else -(-rows // tp_size)


def _group_size(fields: Fields) -> int:
    group = fields["group"]
    return len(group) if isinstance(group, np.ndarray) else 1


def _rows_agree(given: int, expected: int) -> bool:
    return given == expected or -1 in (given, expected)


def _all_reduce_rms_norm(fields: Fields, inputs: Sequence[TensorDesc]) -> list[TensorDesc]:
    """Inputs: input, residual, norm_weight, [bias], num_tokens_ref, batch_ref, chain."""
    expected = 6 + int(bool(fields["has_bias"]))
    _need(len(inputs) == expected, f"has {len(inputs)} inputs, expected {expected}")
    x, residual, vectors, chain = inputs[0], inputs[1], inputs[2 : expected - 3], inputs[-1]
    _need(len(x.shape) == 2, f"input has rank {len(x.shape)}, expected [tokens, hidden]")
    rows, hidden = x.shape
    tp_size = _group_size(fields)
    _need(x.dtype in FLOATS and x.dtype.value == fields["type_id"], f"input dtype {x.dtype.name} is not type_id")
    _need(hidden > 0 and hidden % 8 == 0, f"hidden size {hidden} is not a positive multiple of 8")
    _need(int(fields["tp_rank"]) < tp_size, f"tp_rank {fields['tp_rank']!r} is outside the group of {tp_size}")
    residual_rows = shard_rows(rows, tp_size) if fields["residual_sharded"] else rows
    _need(residual.dtype is x.dtype, f"residual dtype {residual.dtype.name} differs from {x.dtype.name}")
    _need(
        len(residual.shape) == 2 and residual.shape[1] == hidden and _rows_agree(residual.shape[0], residual_rows),
        f"residual has shape {residual.shape}, expected ({residual_rows}, {hidden})",
    )
    for vector in vectors:
        _need(
            vector.dtype is x.dtype and vector.shape == (hidden,),
            f"norm weight or bias is {vector.dtype.name} {vector.shape}, expected {x.dtype.name} ({hidden},)",
        )
    _check_chain(chain)
    out_rows = rows if fields["gather_residual"] else shard_rows(rows, tp_size)
    return [TensorDesc(x.dtype, (rows, hidden)), TensorDesc(x.dtype, (out_rows, hidden)), CHAIN]


def _check_chain(chain: TensorDesc) -> None:
    _need((chain.dtype, chain.shape) == (CHAIN.dtype, CHAIN.shape), f"chain is {chain.dtype.name} {chain.shape}")


def _stream_join(fields: Fields, inputs: Sequence[TensorDesc]) -> list[TensorDesc]:
    """Inputs: aliased tensors, keep-alive tensors, chain."""
    count = int(fields["num_aliased"])
    _need(len(inputs) > count, f"has {len(inputs)} inputs for {count} aliased tensors and a chain")
    _check_chain(inputs[-1])
    return [*(TensorDesc(d.dtype, d.shape) for d in inputs[:count]), CHAIN]


def _join_aliases(fields: Fields, _num_inputs: int) -> dict[int, int]:
    return {i: i for i in range(int(fields["num_aliased"]))}


def _attention(fields: Fields, inputs: Sequence[TensorDesc]) -> list[TensorDesc]:
    """Inputs: those of the inner plugin, in its order; output [m, num_heads * head_size].

    Field ``inner`` holds the inner plugin's fields, see ``recorder/packed_fields.py``.
    """
    roles = fields["roles"]
    count = len(roles) if isinstance(roles, np.ndarray) else 1
    _need(len(inputs) == count, f"has {len(inputs)} inputs for {count} roles")
    qkv = inputs[0]
    _need(len(qkv.shape) == 2, f"qkv has rank {len(qkv.shape)}, expected [tokens, qkv]")
    width = int(fields["num_heads"]) * int(fields["head_size"])
    return [TensorDesc(qkv.dtype, (qkv.shape[0], width))]


def _batch_split(_fields: Fields, inputs: Sequence[TensorDesc]) -> list[TensorDesc]:
    """Inputs: prefix_ref, num_tokens_ref, host_request_types, host_context_lengths, sequence_length, context_lengths.

    Outputs: the last two, for the prefix, then for the suffix.
    """
    _need(len(inputs) == 6, f"has {len(inputs)} inputs, expected 6")
    device: list[tuple[DataType, Shape]] = [(d.dtype, d.shape) for d in inputs[4:]]
    _need(all(dtype is DataType.INT32 for dtype, _ in device), "batch tensors must be INT32")
    return [TensorDesc(dtype, shape) for dtype, shape in device * 2]


def _suffix_rows(fields: Fields, inputs: Sequence[TensorDesc]) -> list[TensorDesc]:
    """Inputs: tensor [n, width], prefix_ref [prefix rows, ...]; output [min(n - prefix rows, max_rows), width].

    The rows behind the prefix's. No slice layer: of one that stands between two plugins' tensors TensorRT 10.6 makes a
    copy that starts at row 0.
    """
    _need(len(inputs) == 2, f"has {len(inputs)} inputs, expected 2")
    x, prefix = inputs
    _need(len(x.shape) == 2, f"tensor has shape {x.shape}, expected [tokens, width]")
    _need(len(prefix.shape) > 0, "the prefix's reference has no dimension")
    rows = -1 if -1 in (x.shape[0], prefix.shape[0]) else min(x.shape[0] - prefix.shape[0], int(fields["max_rows"]))
    return [TensorDesc(x.dtype, (rows, x.shape[1]))]


def _gemm(fields: Fields, inputs: Sequence[TensorDesc]) -> list[TensorDesc]:
    """Inputs: x [m, k], weight ([n, k] with transb, else [k, n]), num_tokens_ref, batch_ref; output [m, n]."""
    _need(len(inputs) == 4, f"has {len(inputs)} inputs, expected 4")
    x, weight = inputs[:2]
    for desc in (x, weight):
        _need(desc.dtype.value == fields["type_id"], f"an operand has dtype {desc.dtype.name}, which is not type_id")
        _need(len(desc.shape) == 2, f"an operand has shape {desc.shape}, expected a matrix")
    n, k = weight.shape if fields["transb"] else weight.shape[::-1]
    _need(n > 0 and k > 0, f"weight has shape {weight.shape}, which is not known when building")
    _need(x.shape[1] == k, f"inner dimensions differ: {x.shape[1]} and {k}")
    return [TensorDesc(x.dtype, (x.shape[0], n))]


SPECS: tuple[PluginSpec, ...] = (
    PluginSpec(
        ALL_REDUCE_RMS_NORM,
        VERSION,
        NAMESPACE,
        v2=False,
        fields=(
            FieldSpec("group", PluginFieldType.INT32, is_list=True, low=0),
            _int32("tp_rank", 0),
            FieldSpec("type_id", PluginFieldType.INT32, choices=frozenset(d.value for d in FLOATS)),
            FieldSpec("eps", PluginFieldType.FLOAT32, low=0.0, high=1.0),
            _int32("kind", 0, 1),
            _int32("site", 0),
            _int32("half", 0, 2),
            _flag("residual_sharded"),
            _flag("gather_residual"),
            _flag("has_bias"),
            _flag("side_stream"),
            _flag("last"),
            # Equal in all layers and on all ranks; tells the engines of a process apart.
            _int32("weave_hash", 0),
            _chars("table", b""),
        ),
        outputs=_all_reduce_rms_norm,
        token_inputs=lambda _fields, _count: frozenset({0, 1}),
    ),
    PluginSpec(
        STREAM_JOIN,
        VERSION,
        NAMESPACE,
        v2=False,
        fields=(_int32("num_aliased", 0), _int32("site", -1), _int32("half", 0, 2), _flag("waits")),
        outputs=_stream_join,
        aliased=_join_aliases,
        token_inputs=lambda _fields, count: frozenset(range(count - 1)),
    ),
    PluginSpec(
        ATTENTION,
        VERSION,
        NAMESPACE,
        v2=False,
        fields=(
            _int32("half", 0, 1),
            _int32("num_heads", 1),
            _int32("head_size", 1),
            _chars("inner_name"),
            _chars("inner_version"),
            _chars("inner_namespace"),
            _chars("inner"),
            FieldSpec("roles", PluginFieldType.INT32, is_list=True, low=0, high=max(AttentionRole)),
        ),
        outputs=_attention,
    ),
    PluginSpec(
        GEMM,
        VERSION,
        NAMESPACE,
        v2=False,
        fields=(
            FieldSpec("type_id", PluginFieldType.INT32, choices=frozenset(d.value for d in FLOATS)),
            _flag("transb"),
            _int32("kind", 0, 1),
            _chars("table", b""),
        ),
        outputs=_gemm,
        token_inputs=lambda _fields, _count: frozenset({0}),
    ),
    PluginSpec(
        BATCH_SPLIT,
        VERSION,
        NAMESPACE,
        v2=False,
        # Of a step that the network is woven for: the halves have no rows for more.
        fields=(_int32("max_num_tokens", 1),),
        outputs=_batch_split,
    ),
    PluginSpec(
        SUFFIX_ROWS,
        VERSION,
        NAMESPACE,
        v2=False,
        # Site -1: at the region's entry. max_rows: the bound that TensorRT sizes the suffix half by.
        fields=(_int32("site", -1), _int32("max_rows", 1)),
        outputs=_suffix_rows,
    ),
)
