"""Woven networks on real ranks: each rank builds, weaves and runs its own, messages go through MPI."""

from __future__ import annotations

import numpy as np
import pytest
from support.stack import Stack, options

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.comm import MpiComm
from trtllm_tokenweave.interpreter import ExecutionContext, Schedule
from trtllm_tokenweave.passes import weave

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def comm() -> MpiComm:
    pytest.importorskip("mpi4py")
    found = MpiComm(timeout=60)
    if found.size < 2:
        pytest.skip("needs at least two ranks: start with mpirun")
    return found


@pytest.mark.parametrize("dtype", [trt.float32, trt.bfloat16], ids=lambda d: d.name)
@pytest.mark.parametrize("weaving", ["fuse", "weave"])
def test_woven_equals_stock(comm: MpiComm, weaving: str, dtype: trt.DataType) -> None:
    made = {}
    for kind in ("stock", weaving):
        network = Stack(comm.size, comm.rank, layers=2, dtype=dtype).build()
        if kind != "stock":
            assert weave(network, options(comm.size, comm.rank, split=weaving == "weave")).mode == weaving
        made[kind] = network
    for n in (0, 1, 5, 37, 64):
        x = {"x": np.random.default_rng(n).integers(-4, 5, (n, 16)).astype(trt.numpy_dtype(dtype))}
        stock = ExecutionContext(made["stock"], comm, exact=True).run(x)["out"]
        for schedule in (None, Schedule(n * 100 + comm.rank)):
            woven = ExecutionContext(made[weaving], comm, exact=True, schedule=schedule).run(x)["out"]
            if dtype is trt.float32:
                np.testing.assert_array_equal(stock, woven)
            else:
                a, b = stock.astype(np.float64), woven.astype(np.float64)
                assert np.abs(a - b).max(initial=0) <= 0.05 * np.abs(a).max(initial=1)
