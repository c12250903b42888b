"""torch.ops.tokenweave.all_reduce_rms_norm on two GPUs, one process each."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trtllm_tokenweave.bench.processes import run_ranks
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.native import Group
from trtllm_tokenweave.torch_ops import register_group, release_group

HIDDEN = 4096


def _raises(call: Any) -> str:
    try:
        call()
    except (UserError, RuntimeError) as error:
        return str(error)
    return ""


def _body(rank: int, address: str) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    handle = register_group(
        Group(2, rank=rank, device=rank, bootstrap=address.encode(), staging_bytes=8 * 1024 * HIDDEN)
    )
    op = torch.ops.tokenweave.all_reduce_rms_norm
    results: dict[str, Any] = {"errors": []}
    for tokens in (1, 37, 256):
        make = torch.Generator().manual_seed(tokens)
        parts = torch.randint(-8, 9, (2, tokens, HIDDEN), generator=make).bfloat16()
        residual = torch.randint(-8, 9, (tokens, HIDDEN), generator=make).bfloat16()
        weight = torch.ones(HIDDEN).bfloat16()
        args = (parts[rank].cuda(), residual.cuda(), weight.cuda(), None, 1e-5, handle)
        normed, gathered = op(*args, False, True, 0)
        total = parts.double().sum(0) + residual.double()
        results["errors"].append(float((gathered.cpu().double() - total).abs().max()))
        want = total / (total.square().mean(1, keepdim=True) + 1e-5).sqrt()
        off = (normed.cpu().double() - want).abs() / want.abs().clamp(min=1e-3)
        results["errors"].append(float(off.max()) // 2**-7)  # within two units in the last place
        _, shard = op(*args, False, False, 16)
        own = -(-tokens // 2)
        mine = total[rank * own : (rank + 1) * own]
        results["errors"].append(float((shard.cpu()[: len(mine)] - mine).abs().sum()))
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
            fake = op(*fakes, False, False, 0)
        results[f"fake {tokens}"] = [tuple(t.shape) for t in fake] == [tuple(normed.shape), tuple(shard.shape)]
    half = args[0].half()
    results["mixed"] = _raises(lambda: op(half, *args[1:], False, False, 0))
    results["strided"] = _raises(lambda: op(args[0].t().contiguous().t(), *args[1:], False, False, 0))
    results["handle"] = _raises(lambda: op(*args[:5], 99, False, False, 0))
    torch.cuda.synchronize()
    release_group(handle)
    return results


def test_operator() -> None:
    for results in run_ranks(_body):
        assert set(results["errors"]) == {0.0}
        assert all(results[f"fake {tokens}"] for tokens in (1, 37, 256))
        assert "all must be contiguous" in results["mixed"]
        assert "all must be contiguous" in results["strided"]
        assert "not registered" in results["handle"]
