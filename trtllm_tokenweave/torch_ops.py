"""``torch.ops.tokenweave.all_reduce_rms_norm``: the fused kernel for eager PyTorch, with a fake for tracing.

    handle = register_group(Group(2, rank=rank, device=rank, staging_bytes=max_tokens * hidden * 4))  # collective
    op = torch.ops.tokenweave.all_reduce_rms_norm
    normed, residual = op(x, residual, weight, None, 1e-5, handle, False, False, 0)

The work is queued on the current stream. Every rank of the group makes the same calls in the same order.
"""

from __future__ import annotations

import torch

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.native import DTYPES, Call, Group, LaunchConfig, RankTensors

_SCHEMA = (
    "(Tensor input, Tensor residual, Tensor norm_weight, Tensor? bias, float eps, int group, bool residual_sharded, "
    "bool gather_residual, int ctas) -> (Tensor normed, Tensor residual_out)"
)
_groups: dict[int, Group] = {}

_library = torch.library.Library("tokenweave", "DEF")
_library.define("all_reduce_rms_norm" + _SCHEMA)


def register_group(group: Group) -> int:
    """Give a group the number under which the operator finds it; valid until :func:`release_group`."""
    handle = max(_groups, default=-1) + 1
    _groups[handle] = group
    return handle


def release_group(handle: int) -> None:
    """Forget and destroy a group (collective).

    Raises:
        UserError: for a number that is not registered.
    """
    _group(handle)
    _groups.pop(handle).close()


def _group(handle: int) -> Group:
    if handle not in _groups:
        raise UserError(
            f"group {handle} is not registered", where="all_reduce_rms_norm", fix="call register_group first"
        )
    return _groups[handle]


def _outputs(
    x: torch.Tensor, residual: torch.Tensor, group: Group, residual_sharded: bool, gather_residual: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """New outputs: normed [m, h], residual_out [ceil(m / size), h], or [m, h] when gathered."""
    if x.ndim != 2 or residual.ndim != 2:
        raise UserError(f"input has shape {tuple(x.shape)}, expected [tokens, hidden]", where="all_reduce_rms_norm")
    rows = (x.shape[0] + group.size - 1) // group.size
    torch._check(residual.shape[0] == (rows if residual_sharded else x.shape[0]))
    return torch.empty_like(x), x.new_empty((x.shape[0] if gather_residual else rows, x.shape[1]))


@torch.library.impl(_library, "all_reduce_rms_norm", "CUDA")  # type: ignore[untyped-decorator]
def _run(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    group: int,
    residual_sharded: bool,
    gather_residual: bool,
    ctas: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module and ``AllReduceRmsNorm`` in plugin_specs for shapes and the result."""
    owner = _group(group)
    vectors = [t for t in (norm_weight, bias) if t is not None]
    for tensor in (x, residual, *vectors):
        if tensor.dtype is not x.dtype or x.dtype not in DTYPES or not tensor.is_contiguous():
            raise UserError(
                f"a tensor is {tensor.dtype}, contiguous: {tensor.is_contiguous()}; all must be contiguous and of one "
                "of float32, float16, bfloat16",
                where="all_reduce_rms_norm",
            )
    if any(tuple(t.shape) != (x.shape[-1],) for t in vectors) or residual.shape[-1] != x.shape[-1]:
        raise UserError("residual, norm_weight or bias is not as wide as the input", where="all_reduce_rms_norm")
    normed, residual_out = _outputs(x, residual, owner, residual_sharded, gather_residual)
    call = Call(norm_weight, bias, eps, residual_sharded, gather_residual)
    owner.run(call, [RankTensors(x, residual, normed, residual_out)], LaunchConfig(ctas=ctas))
    return normed, residual_out


@torch.library.register_fake("tokenweave::all_reduce_rms_norm", lib=_library)  # type: ignore[untyped-decorator]
def _fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    group: int,
    residual_sharded: bool,
    gather_residual: bool,
    ctas: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes only."""
    del norm_weight, bias, eps, ctas
    return _outputs(x, residual, _group(group), residual_sharded, gather_residual)
