"""Real ranks: ``mpirun -n 3 python -m pytest tests/ranks``. Every rank checks its own results."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.comm import MpiComm
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.interpreter import ExecutionContext

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def comm() -> MpiComm:
    pytest.importorskip("mpi4py")
    return MpiComm(timeout=60)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int8, np.bool_], ids=str)
def test_gathers_different_shapes(comm: MpiComm, dtype: type) -> None:
    for step in range(3):
        x: NDArray[Any] = np.full((comm.rank + step, 3), comm.rank, dtype)
        parts = comm.all_gather("t", x)
        assert len(parts) == comm.size
        for rank, part in enumerate(parts):
            assert part.shape == (rank + step, 3)
            assert part.dtype == np.dtype(dtype)
            assert (part == np.array(rank, dtype)).all()
    comm.barrier()


def test_scalars_empty_arrays_and_strided_arrays(comm: MpiComm) -> None:
    assert [int(p) for p in comm.all_gather("t", np.array(comm.rank, np.int32))] == list(range(comm.size))
    assert all(p.shape == (0, 8) for p in comm.all_gather("t", np.zeros((0, 8), np.float32)))
    x = (np.arange(12, dtype=np.float32).reshape(3, 4) + comm.rank).T[::2]
    for rank, part in enumerate(comm.all_gather("t", x)):
        assert np.array_equal(part, x - comm.rank + rank)
    with pytest.raises(UserError, match="rank 9"):
        comm.all_gather("t", np.zeros((1,) * 9, np.float32))


def _field(name: str, value: object, kind: trt.PluginFieldType) -> trt.PluginField:
    return trt.PluginField(name, np.asarray(value), kind)


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
def test_all_reduce_rms_norm(comm: MpiComm, rows: int) -> None:
    """The fused kernel over real messages, ragged rows included, against the sum and norm computed by every rank."""
    F, hidden, size = trt.PluginFieldType, 16, comm.size
    network = trt.RecordedNetwork()
    x = network.add_input("x", trt.float32, (-1, hidden))
    residual = network.add_input("residual", trt.float32, (-1, hidden))
    gamma = network.add_constant((hidden,), np.linspace(0.5, 2, hidden, dtype=np.float32)).outputs[0]
    chain = network.add_constant((1,), np.zeros(1, np.int32)).outputs[0]
    fields = trt.PluginFieldCollection(
        [
            _field("group", list(range(size)), F.INT32),
            _field("tp_rank", comm.rank, F.INT32),
            _field("type_id", trt.float32.value, F.INT32),
            _field("eps", 1e-5, F.FLOAT32),
            _field("kind", 0, F.INT32),
            _field("site", 0, F.INT32),
            _field("weave_hash", 0, F.INT32),
            _field("half", 2, F.INT32),
            _field("gather_residual", 1, F.INT8),
        ]
    )
    creator = trt.get_plugin_registry().get_creator("AllReduceRmsNorm", "1", "tokenweave")
    assert creator is not None
    layer = network.add_plugin_v3([x, residual, gamma, x, x, chain], [], creator.create_plugin("site", fields))
    for i in range(2):
        network.mark_output(layer.outputs[i])
    inputs = {
        "x": np.random.default_rng(comm.rank).integers(-4, 5, (rows, hidden)).astype(np.float32),
        "residual": np.random.default_rng(99).integers(-4, 5, (rows, hidden)).astype(np.float32),
    }
    normed, stored = ExecutionContext(network, comm).run(inputs).values()
    parts = [np.random.default_rng(r).integers(-4, 5, (rows, hidden)).astype(np.float64) for r in range(size)]
    wanted = sum(parts) + inputs["residual"]
    assert np.array_equal(stored, wanted)
    gammas = np.linspace(0.5, 2, hidden)
    np.testing.assert_allclose(normed, wanted / np.sqrt((wanted**2).mean(-1, keepdims=True) + 1e-5) * gammas, rtol=1e-5)
