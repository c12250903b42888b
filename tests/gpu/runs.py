"""Runs a problem on the ranks of this process and checks what comes out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from gpu.oracle import Problem, Shape, check_normed, check_residual
from trtllm_tokenweave.c_interface import UNSUPPORTED, LibraryError
from trtllm_tokenweave.native import AUTO, BULK, PEER, PUSH, SOFT_MULTICAST, Group, LaunchConfig, RankTensors

MAILBOX_BYTES = 4 << 20  # of one call of the push loader
SHARED_BYTES = (227 << 10) - 5632  # of a CTA, less what the kernels have for themselves


@dataclass(frozen=True)
class Variant:
    """How a problem reaches the kernel."""

    symmetric: bool = True  # input and normed in symmetric memory, else staged
    in_place: bool = True  # normed overwrites input
    residual_sharded: bool = True
    gather_residual: bool = False
    fabric: int = PEER
    loader: int = AUTO
    ctas: int = 0
    threads: int = 0


def supported(shape: Shape, variant: Variant) -> bool:
    """Whether the variant's loader can serve the shape."""
    row = shape.hidden * shape.dtype.itemsize
    threads = 1024 if shape.size == 2 else 768
    if variant.loader not in (BULK, PUSH):
        return True
    if row > 16 * 4 * threads:
        return False
    if variant.loader == BULK:
        return bool(torch.cuda.get_device_capability() >= (9, 0)) and (shape.size + 1) * row <= SHARED_BYTES
    rows = -(-shape.tokens // shape.size) * (shape.size - 1) * (3 if variant.gather_residual else 2)
    return shape.size > 1 and rows * row <= MAILBOX_BYTES


def place(group: Group, rank: int, problem: Problem, variant: Variant) -> RankTensors:
    """The tensors of one rank, outputs poisoned."""
    shape, dtype = tuple(problem.residual.shape), problem.residual.dtype
    num_bytes = problem.residual.numel() * dtype.itemsize
    rows = -(-shape[0] // problem.size)
    if variant.symmetric:
        source = group.tensor(rank, shape, dtype)
        normed = source if variant.in_place else group.tensor(rank, shape, dtype, num_bytes)
    else:
        source = torch.empty(shape, dtype=dtype, device=problem.residual.device)
        normed = source if variant.in_place else torch.empty_like(source)
    normed.fill_(float("nan"))
    source.copy_(problem.inputs[rank])
    residual = problem.residual
    if variant.residual_sharded:
        residual = torch.full((rows, shape[1]), float("nan"), dtype=dtype, device=source.device)
        own = problem.residual[problem.shard(rank)]
        residual[: own.shape[0]] = own
    out_shape = shape if variant.gather_residual else (rows, shape[1])
    if variant.gather_residual and variant.symmetric:
        residual_out = group.tensor(rank, shape, dtype, 2 * num_bytes)
    else:
        residual_out = torch.empty(out_shape, dtype=dtype, device=source.device)
    residual_out.fill_(float("nan"))
    return RankTensors(source, residual, normed, residual_out)


def launch(group: Group, problem: Problem, variant: Variant, tensors: list[RankTensors]) -> None:
    """Queues the problem."""
    call = problem.call(residual_sharded=variant.residual_sharded, gather_residual=variant.gather_residual)
    group.run(call, tensors, LaunchConfig(variant.fabric, variant.loader, variant.ctas, variant.threads))


def run_and_check(group: Group, problem: Problem, variant: Variant, *, exact: bool) -> None:
    """Runs the problem on all ranks of this process; every rank's outputs are checked, `exact` with zero tolerance.

    Where the variant's loader cannot serve the problem, checks that it is refused.
    """
    ranks = range(problem.size) if group.loopback else [group.rank]
    tensors = [place(group, rank, problem, variant) for rank in ranks]
    torch.cuda.synchronize()
    tokens, hidden = problem.residual.shape
    shape = Shape(problem.size, tokens, hidden, problem.residual.dtype)
    if not supported(shape, variant) and tokens > 0:
        with pytest.raises(LibraryError, match="loader needs") as caught:
            launch(group, problem, variant, tensors)
        assert caught.value.code == UNSUPPORTED
        return
    launch(group, problem, variant, tensors)
    torch.cuda.synchronize()
    group.check()
    rounded = variant.fabric == SOFT_MULTICAST
    for rank, t in zip(ranks, tensors, strict=True):
        tokens = slice(0, problem.residual.shape[0]) if variant.gather_residual else problem.shard(rank)
        got = t.residual_out[: tokens.stop - tokens.start]
        check_residual(problem, got, tokens, rounded=rounded)
        whole = t.residual_out if variant.gather_residual else None
        if exact:
            total = problem.inputs.double().sum(0) + problem.residual.double()
            total = total if problem.bias is None else total + problem.bias.double()
            assert torch.equal(got.double(), total[tokens])
            assert torch.equal(t.normed.double(), total.sign() * problem.weight.double())
        elif whole is not None:
            check_normed(problem, t.normed, whole)
        else:
            check_normed(problem, t.normed[tokens], got)
    # All ranks hold the same normed tensor. Among processes the caller compares.
    for t in tensors[1:]:
        assert torch.equal(t.normed, tensors[0].normed)
