"""The reference library's AllReduce in TensorRT on one GPU, in a group of one rank: the sum is the input.

Needs torch and TensorRT. torch's NCCL serves: it is loaded.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu.plugin_network import TYPE_IDS, Input, PluginEngine
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.plugin_library import register_reference
from trtllm_tokenweave.recorder.plugin import FieldValue
from trtllm_tokenweave.recorder.trtllm_plugins import ALL_REDUCE, AllReduceFusionOp, AllReduceStrategy
from trtllm_tokenweave.tensorrt_module import tensorrt

EPS = 1e-5
ROWS = (0, 1, 7, 1000)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STRATEGIES = (AllReduceStrategy.NCCL, AllReduceStrategy.AUTO)
#: One, two, four and eight vectors a thread; the last threads without one; the largest.
HIDDEN = (64, 576, 2048, 4104, 8192, 16384)


@pytest.fixture(scope="module", autouse=True)
def needs_tensorrt() -> None:
    try:
        tensorrt()
    except UserError as error:
        pytest.skip(str(error))
    register_reference("AllReduce", "Gemm")


def fields(dtype: torch.dtype, strategy: AllReduceStrategy, **changes: FieldValue) -> dict[str, FieldValue]:
    made: dict[str, FieldValue] = {
        "group": np.zeros(1, np.int32),
        "type_id": TYPE_IDS[dtype],
        "strategy": int(strategy),
        "fusion_op": int(AllReduceFusionOp.NONE),
        "eps": EPS,
        "affine": 0,
        "bias": 0,
        "scale": 0,
    }
    return made | changes


def workspace(strategy: AllReduceStrategy) -> tuple[list[Input], list[torch.Tensor]]:
    if not strategy.needs_workspace:
        return [], []
    return [Input(torch.int64, (10,))], [torch.zeros(10, dtype=torch.int64, device="cuda")]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum(dtype: torch.dtype, strategy: AllReduceStrategy) -> None:
    given, memory = workspace(strategy)
    engine = PluginEngine(ALL_REDUCE, fields(dtype, strategy), [Input(dtype, (-1, 512), smallest=0), *given])
    for rows in ROWS:
        x = torch.randn(rows, 512, device="cuda").to(dtype)
        (got,) = engine.run([x, *memory])
        assert torch.equal(got, x)


def check_fused(dtype: torch.dtype, hidden: int, strategy: AllReduceStrategy, bias: int, affine: int) -> None:
    fused = fields(dtype, strategy, fusion_op=int(AllReduceFusionOp.RESIDUAL_RMS_NORM), bias=bias, affine=affine)
    given, memory = workspace(strategy)
    matrix, vector = Input(dtype, (-1, hidden), smallest=0), Input(dtype, (hidden,))
    engine = PluginEngine(ALL_REDUCE, fused, [matrix, *given, *[vector] * bias, matrix, *[vector] * affine])
    for rows in ROWS:
        make = torch.Generator(device="cuda").manual_seed(rows)
        x, residual = (torch.randn(rows, hidden, generator=make, device="cuda").to(dtype) for _ in range(2))
        offset, gamma = (torch.randn(hidden, generator=make, device="cuda").to(dtype) for _ in range(2))
        normed, stored = engine.run([x, *memory, *[offset] * bias, residual, *[gamma] * affine])
        total = x.float() + offset.float() * bias + residual.float()
        assert torch.equal(stored, total.to(dtype)), rows
        wide = stored.double()
        want = wide / (wide.square().mean(1, keepdim=True) + EPS).sqrt()
        want = want * gamma.double() if affine else want
        # Rounded once; the float32 arithmetic before it is a few units of its own off.
        unit = max(torch.finfo(dtype).eps, 8 * torch.finfo(torch.float32).eps)
        assert bool(((normed.double() - want).abs() <= unit * (want.abs() + 1e-5)).all()), rows


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_rms_norm(dtype: torch.dtype, hidden: int) -> None:
    check_fused(dtype, hidden, AllReduceStrategy.NCCL, bias=0, affine=1)


@pytest.mark.parametrize("affine", [0, 1])
@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inputs_of_residual_rms_norm(strategy: AllReduceStrategy, bias: int, affine: int) -> None:
    check_fused(torch.bfloat16, 576, strategy, bias, affine)
