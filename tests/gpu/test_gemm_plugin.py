"""Both Gemm plugins, ours and the reference library's, in TensorRT on one GPU, against torch.matmul.

Needs torch and TensorRT. torch's cuBLASLt serves: it is loaded.
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from gpu.plugin_network import TYPE_IDS, Input, PluginEngine
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.plugin_library import plugin_library, register_reference
from trtllm_tokenweave.plugin_specs import GEMM, NAMESPACE, VERSION
from trtllm_tokenweave.recorder import trtllm_plugins
from trtllm_tokenweave.recorder.plugin import FieldValue
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableKey, TableRow, TuningTable
from trtllm_tokenweave.tensorrt_module import tensorrt

K, N = 1024, 1536
ROWS = (0, 1, 7, 129, 1000, 4096)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TABLE_DTYPES: dict[torch.dtype, Literal["float32", "float16", "bfloat16"]] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


@pytest.fixture(scope="module", autouse=True)
def needs_tensorrt() -> None:
    try:
        tensorrt()
    except UserError as error:
        pytest.skip(str(error))
    plugin_library()
    register_reference("AllReduce", "Gemm")


def operands(rows: int, dtype: torch.dtype, transb: int, *, integer: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weight. Of integers from -1 to 1 all sums are exact in float32, in any order."""
    make = torch.Generator(device="cuda").manual_seed(rows)
    shapes = (rows, K), ((N, K) if transb else (K, N))
    if integer:
        x, weight = (torch.randint(-1, 2, shape, generator=make, device="cuda") for shape in shapes)
        return x.to(dtype), weight.to(dtype)
    x, weight = (torch.randn(shape, generator=make, device="cuda") for shape in shapes)
    return x.to(dtype), weight.to(dtype)


def check(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, transb: int, *, integer: bool) -> None:
    want = torch.matmul(x.double(), (weight.t() if transb else weight).double())
    if integer:
        assert torch.equal(got, want.to(got.dtype))
        return
    # Rounded once to the dtype, after float32 sums of K products of unit variance.
    unit = torch.finfo(got.dtype).eps
    assert bool(((got.double() - want).abs() <= unit * want.abs() + 1e-6 * K).all())


@pytest.mark.parametrize("integer", [True, False], ids=["integer", "normal"])
@pytest.mark.parametrize("transb", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gemm_sms", [0, 128, 116])
def test_our_gemm(gemm_sms: int, dtype: torch.dtype, transb: int, integer: bool) -> None:
    table = TuningTable(
        key=TableKey(tp_size=1, hidden_size=N, dtype=TABLE_DTYPES[dtype]),
        rows=(TableRow(tokens=Bucket(lo=1), mode="weave", mlp=LaunchConfig(gemm_sms=gemm_sms)),),
    )
    fields: dict[str, FieldValue] = {
        "type_id": TYPE_IDS[dtype],
        "transb": transb,
        "kind": 1,
        "table": table.pack(),
    }
    shape = (N, K) if transb else (K, N)
    step = Input(torch.int32, (-1,), largest=2 * max(ROWS))
    inputs = [Input(dtype, (-1, K), smallest=0), Input(dtype, shape), step, step]
    engine = PluginEngine((GEMM, VERSION, NAMESPACE), fields, inputs)
    plugin_library().reset_counters()
    sequences = torch.zeros(4, dtype=torch.int32, device="cuda")
    for rows in ROWS:
        x, weight = operands(rows, dtype, transb, integer=integer)
        for step_tokens in (rows, 2 * rows):  # whole: no limit; split: at most gemm_sms
            tokens = torch.zeros(max(step_tokens, 1), dtype=torch.int32, device="cuda")
            for _ in range(2):  # asked for an algorithm, then remembered
                (got,) = engine.run([x, weight, tokens, sequences])
                check(got, x, weight, transb, integer=integer)
    assert plugin_library().counters()["while_building"] == 0


def test_our_gemm_in_a_graph() -> None:
    fields = {"type_id": TYPE_IDS[torch.bfloat16], "transb": 1, "kind": 0}
    step = Input(torch.int32, (-1,))
    inputs = [Input(torch.bfloat16, (-1, K)), Input(torch.bfloat16, (N, K)), step, step]
    engine = PluginEngine((GEMM, VERSION, NAMESPACE), fields, inputs)
    sequences = torch.zeros(1, dtype=torch.int32, device="cuda")
    for rows in (64, 513):
        x, weight = operands(rows, torch.bfloat16, 1, integer=True)
        tokens = torch.zeros(rows, dtype=torch.int32, device="cuda")
        engine.run([x, weight, tokens, sequences])  # TensorRT wants a run in front of a capture
        (got,) = engine.capture_and_replay([x, weight, tokens, sequences], before_replay=x.neg_)
        check(got, x, weight, 1, integer=True)


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("transb", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_gemm(dtype: torch.dtype, transb: int, alpha: float) -> None:
    fields = {
        "transa": 0,
        "transb": transb,
        "pad_lda": 0,
        "pad_ldb": 0,
        "type_id": TYPE_IDS[dtype],
        "use_fp8": 0,
        "alpha": alpha,
    }
    inputs = [Input(dtype, (-1, K), smallest=0), Input(dtype, (N, K) if transb else (K, N))]
    engine = PluginEngine(trtllm_plugins.GEMM, fields, inputs)
    for rows in ROWS:
        x, weight = operands(rows, dtype, transb, integer=True)
        (got,) = engine.run([x, weight])
        want = alpha * torch.matmul(x.double(), (weight.t() if transb else weight).double())
        assert torch.equal(got, want.to(dtype))
