"""The reference library's AllGather in TensorRT: in a group of one rank, and on two GPUs under mpirun.

Needs torch and TensorRT. torch's NCCL serves: it is loaded.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu.mpirun import needs_mpirun, on_ranks, room_for
from gpu.plugin_network import TYPE_IDS, Input, PluginEngine
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.plugin_library import register_reference
from trtllm_tokenweave.recorder.plugin import FieldValue
from trtllm_tokenweave.recorder.trtllm_plugins import ALL_GATHER
from trtllm_tokenweave.tensorrt_module import tensorrt

ROWS = (0, 1, 7, 1000)


@pytest.fixture(scope="module", autouse=True)
def needs_tensorrt() -> None:
    try:
        tensorrt()
    except UserError as error:
        pytest.skip(str(error))
    register_reference("AllGather")


def engine(dtype: torch.dtype) -> PluginEngine:
    fields: dict[str, FieldValue] = {"group": np.zeros(1, np.int32), "type_id": TYPE_IDS[dtype]}
    return PluginEngine(ALL_GATHER, fields, [Input(dtype, (-1, 512), smallest=0)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_group_of_one_gathers_its_own(dtype: torch.dtype) -> None:
    built = engine(dtype)
    for rows in ROWS:
        x = torch.randn(rows, 512, device="cuda").to(dtype)
        (got,) = built.run([x])
        assert torch.equal(got, x)


def test_a_graph_gathers_what_its_replay_finds() -> None:
    built = engine(torch.bfloat16)
    x = torch.randn(7, 512, device="cuda").to(torch.bfloat16)
    built.run([x])
    before = x.clone()
    (got,) = built.capture_and_replay([x], lambda: x.mul_(2))
    assert torch.equal(got, before * 2)


@needs_mpirun
@pytest.mark.skipif(not room_for(2), reason="NCCL wants a GPU for each rank")
def test_ranks_gather_and_sum() -> None:
    assert "2 ranks agree" in on_ranks(2, "collective_ranks")
