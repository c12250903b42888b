"""Kernels of the plugins that communicate, of the join, and of the plugin matrix products.

Sums over ranks are taken in float32 in rank order, from parts gathered in rank order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.interpreter.numeric import matmul, normalised, rank_sum, rounded, widen
from trtllm_tokenweave.interpreter.registry import KernelContext, kernel
from trtllm_tokenweave.plugin_specs import (
    ALL_REDUCE_RMS_NORM,
    GEMM,
    NAMESPACE,
    STREAM_JOIN,
    SUFFIX_ROWS,
    VERSION,
    Half,
    shard_rows,
)
from trtllm_tokenweave.recorder.plugin import Fields
from trtllm_tokenweave.schedule import SplitPlan, plan_step
from trtllm_tokenweave.table import TuningTable

Array = NDArray[Any]
TRTLLM = "tensorrt_llm"

#: AllReduceFusionOp values that have kept their meaning over releases.
_FUSION_NONE = 0
_FUSION_RESIDUAL_RMS_NORM = 1


def _int(fields: Fields, name: str, default: int = 0) -> int:
    value: Any = fields.get(name, default)
    return int(value)


def _check_group(ctx: KernelContext, fields: Fields) -> None:
    group = np.ravel(np.asarray(fields["group"])).tolist()
    if group != list(range(ctx.comm.size)):
        raise UserError(
            f"the plugin's group is {group}, but {ctx.comm.size} ranks run",
            fix="run one rank per member of the group, numbered from 0",
        )


def _gather(ctx: KernelContext, what: str, x: Array) -> list[Array]:
    return ctx.comm.all_gather(f"{ctx.layer} ({what})", x)


def _gather_equal(ctx: KernelContext, what: str, x: Array) -> list[Array]:
    """Gather arrays that must agree in shape and dtype: ranks in different places of the network mostly do not."""
    parts = _gather(ctx, what, x)
    for rank, part in enumerate(parts):
        if part.shape != x.shape or part.dtype != x.dtype:
            raise UserError(
                f"rank {ctx.comm.rank} has {x.dtype} {x.shape}, rank {rank} brought {part.dtype} {part.shape}: "
                "the ranks are not at the same collective"
            )
    return parts


@kernel("AllReduce", "1", TRTLLM)
def all_reduce(ctx: KernelContext, fields: Fields, inputs: list[Array]) -> list[Array]:
    """Sum over ranks, rounded to the dtype; with RESIDUAL_RMS_NORM also bias, residual and RMSNorm.

    Inputs: tensor, [workspace], and when fused [bias], residual, [norm_weight], [scale]. The fused op rounds after
    each of its parts, so that it gives the same bits as the unfused layers.
    """
    _check_group(ctx, fields)
    x = inputs[0]
    dtype = x.dtype
    fusion = _int(fields, "fusion_op")
    if fusion not in (_FUSION_NONE, _FUSION_RESIDUAL_RMS_NORM):
        raise UserError(f"fusion_op {fusion} cannot be run", fix="NONE (0) and RESIDUAL_RMS_NORM (1) can")
    summed = rounded(rank_sum(_gather_equal(ctx, "sum", x)), dtype)
    if fusion == _FUSION_NONE:
        return [summed]
    has_bias, affine, scale = (_int(fields, name) for name in ("bias", "affine", "scale"))
    if scale:
        raise UserError("scale belongs to quantised outputs, which cannot be run")
    expected = 2 + bool(has_bias) + bool(affine)
    extra = len(inputs) - expected
    if extra not in (0, 1):
        raise UserError(f"has {len(inputs)} inputs, expected {expected}, or one more with a workspace")
    rest = iter(inputs[1 + extra :])
    if has_bias:
        summed = rounded(widen(summed) + widen(next(rest)), dtype)
    stored = rounded(widen(next(rest)) + widen(summed), dtype)
    normed = rounded(normalised(widen(stored), np.float32(fields["eps"]), ctx.exact), dtype)
    if affine:
        normed = rounded(widen(normed) * widen(next(rest)), dtype)
    return [normed, stored]


@kernel("AllGather", "1", TRTLLM)
def all_gather(ctx: KernelContext, fields: Fields, inputs: list[Array]) -> list[Array]:
    """Concatenation of the ranks' tensors along dimension 0."""
    _check_group(ctx, fields)
    return [np.concatenate(_gather_equal(ctx, "gather", inputs[0]), axis=0)]


@kernel("Gemm", "1", TRTLLM)
def gemm(ctx: KernelContext, fields: Fields, inputs: list[Array]) -> list[Array]:
    """alpha * op(a) @ op(b), accumulated in float32 and rounded once; dimensions of ``a`` before the last are rows."""
    if _int(fields, "use_fp8"):
        raise UserError("FP8 matrix products cannot be run")
    a, b = ctx.float32_copy(inputs[0]), ctx.float32_copy(inputs[1])
    if _int(fields, "transa"):
        a = a.swapaxes(-1, -2)
    if _int(fields, "transb"):
        b = b.swapaxes(-1, -2)
    rows = a.reshape(-1, a.shape[-1]) if b.ndim == 2 and a.size else a
    out = matmul(rows, b, ctx.exact).reshape(*a.shape[:-1], b.shape[-1])
    alpha: Any = fields.get("alpha", 1.0)
    if alpha != 1.0:
        out = out * np.float32(alpha)
    return [rounded(out, inputs[0].dtype)]


@kernel(GEMM, VERSION, NAMESPACE)
def budgeted_gemm(ctx: KernelContext, fields: Fields, inputs: list[Array]) -> list[Array]:
    """x @ weight, as TensorRT-LLM's Gemm has it; on how many SMs makes no difference to the result."""
    return gemm(ctx, {"transb": fields["transb"]}, inputs[:2])


@lru_cache(maxsize=256)
def _planned(table: bytes, batch: int, num_tokens: int) -> SplitPlan:
    return plan_step(_unpacked(table), batch, num_tokens)


@lru_cache(maxsize=16)
def _unpacked(table: bytes) -> TuningTable:
    return TuningTable.unpack(table)


def _check_step(ctx: KernelContext, fields: Fields, inputs: list[Array]) -> None:
    """What a collective can tell of its own place: rank, residual, and how many rows the table gives its half."""
    rows, rank = inputs[0].shape[0], _int(fields, "tp_rank")
    if rank != ctx.comm.rank:
        raise UserError(f"is built for tp_rank {rank}, but runs on rank {ctx.comm.rank}")
    expected = shard_rows(rows, ctx.comm.size) if _int(fields, "residual_sharded") else rows
    if inputs[1].shape[0] != expected:
        raise UserError(f"the residual has {inputs[1].shape[0]} rows, expected {expected}")
    step, sequences = inputs[-3].shape[0], inputs[-2].shape[0]
    half, table = Half(_int(fields, "half")), fields["table"]
    planned = step
    if half is not Half.WHOLE and isinstance(table, bytes) and table:
        if _unpacked(table).source.kind == "capability":
            return  # a tuning engine's: the split is an input of the step
        plan = _planned(table, sequences, step)
        planned = plan.prefix if half is Half.PREFIX else plan.suffix
    if rows != planned:
        raise UserError(
            f"the {half.name.lower()} of a step of {step} tokens has {rows} rows, expected {planned}",
            fix="stay within the max_num_tokens and max_batch_size that the network was woven for",
        )


@kernel(ALL_REDUCE_RMS_NORM, VERSION, NAMESPACE)
def all_reduce_rms_norm(ctx: KernelContext, fields: Fields, inputs: list[Array]) -> list[Array]:
    """AllReduce, residual add and RMSNorm, each rank doing its own rows; see `plugin_specs`.

    The sum over ranks, the bias and the residual are added in float32 and rounded once: that is ``residual_out``.
    The stored value is normalised in float32, multiplied by gamma in float32 and rounded once. Rows of a sharded
    residual that no token stands for are NaN, as nothing may read them.
    """
    _check_group(ctx, fields)
    x, residual, gamma = inputs[:3]
    bias = inputs[3] if _int(fields, "has_bias") else None
    comm, rows, dtype = ctx.comm, x.shape[0], x.dtype
    own = shard_rows(rows, comm.size)
    _check_step(ctx, fields, inputs)
    first, last = min(comm.rank * own, rows), min((comm.rank + 1) * own, rows)
    count = last - first
    total = rank_sum([part[first:last] for part in _gather_equal(ctx, "sum", x)])
    if bias is not None:
        total += widen(bias)
    before = residual[:count] if _int(fields, "residual_sharded") else residual[first:last]
    stored = rounded(widen(before) + total, dtype)
    normed = rounded(normalised(widen(stored), np.float32(fields["eps"]), ctx.exact) * widen(gamma), dtype)
    full = np.concatenate(_gather(ctx, "broadcast", normed), axis=0)
    if full.shape != x.shape:
        raise UserError(f"rank {comm.rank} gathered rows {full.shape}, expected {x.shape}: the ranks are out of step")
    if _int(fields, "gather_residual"):
        shards = np.concatenate(_gather(ctx, "residual", stored), axis=0)
    else:
        shards = np.full((own, x.shape[1]), np.nan, dtype)
        shards[:count] = stored
    return [full, shards, np.zeros(1, np.int32)]


@kernel(STREAM_JOIN, VERSION, NAMESPACE)
def stream_join(ctx: KernelContext, fields: Fields, inputs: list[Array]) -> list[Array]:
    """Hand the aliased tensors through; waiting is the business of whoever runs the layers."""
    del ctx
    return [*inputs[: _int(fields, "num_aliased")], inputs[-1]]


@kernel(SUFFIX_ROWS, VERSION, NAMESPACE)
def suffix_rows(ctx: KernelContext, fields: Fields, inputs: list[Array]) -> list[Array]:
    """The rows behind the prefix's; refuses more than ``max_rows``."""
    x, prefix = inputs
    rows, most = x[len(prefix) :], _int(fields, "max_rows")
    if len(rows) > most:
        raise UserError(
            f"the step has {len(x)} tokens, the halves {len(prefix)} and {most}",
            where=f"layer {ctx.layer}",
            fix="weave with the max_num_tokens of the engine's profile",
        )
    return [rows.copy()]
