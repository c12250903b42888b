"""Kernels that communicate: against numpy, and the fused ones against the stock layer chain, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.comm import LocalComm, run_ranks
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.interpreter import ExecutionContext

Array = NDArray[Any]
F = trt.PluginFieldType
E = trt.ElementWiseOperation
BF16 = np.dtype(ml_dtypes.bfloat16)
EPS = 1e-5
HIDDEN = 16


def plugin(key: tuple[str, str, str], **values: Any) -> trt.Plugin:
    """Create a plugin from keyword fields, in the field types that its spec asks for."""
    creator = trt.get_plugin_registry().get_creator(*key)
    assert creator is not None
    kinds = {spec.name: spec.type for spec in creator.spec.fields}
    given = [trt.PluginField(n, np.asarray(v), kinds.get(n, F.INT32)) for n, v in values.items()]
    return creator.create_plugin("p", trt.PluginFieldCollection(given))


def dtype_name(dtype: np.dtype[Any]) -> trt.DataType:
    return trt.dtype_of(np.empty(0, dtype))


@dataclass
class Case:
    """One rank's network under construction."""

    network: trt.RecordedNetwork
    rank: int
    tp: int
    dtype: trt.DataType

    def input(self, name: str, *shape: int) -> trt.ITensor:
        return self.network.add_input(name, self.dtype, shape)

    def constant(self, values: Array) -> trt.ITensor:
        return self.network.add_constant(values.shape, values).get_output(0)  # type: ignore[return-value]

    def op(self, a: trt.ITensor, b: trt.ITensor, op: E) -> trt.ITensor:
        return self.network.add_elementwise(a, b, op).outputs[0]

    def all_reduce(self, x: trt.ITensor, *more: trt.ITensor, **fields: Any) -> list[trt.ITensor]:
        values = {"strategy": 0, "fusion_op": 0, "eps": EPS, "affine": 0, "bias": 0, "scale": 0, **fields}
        p = plugin(("AllReduce", "1", "tensorrt_llm"), group=range(self.tp), type_id=self.dtype.value, **values)
        return self.network.add_plugin_v2([x, *more], p).outputs

    def rms_norm(self, x: trt.ITensor, gamma: trt.ITensor) -> trt.ITensor:
        """The layer chain of TensorRT-LLM's rms_norm."""
        wide = self.network.add_cast(x, trt.float32).outputs[0] if self.dtype is not trt.float32 else x
        scalar = [self.constant(np.full((1, 1), v, np.float32)) for v in (2.0, EPS)]
        mean = self.network.add_reduce(self.op(wide, scalar[0], E.POW), trt.ReduceOperation.AVG, 0b10, True).outputs[0]
        root = self.network.add_unary(self.op(mean, scalar[1], E.SUM), trt.UnaryOperation.SQRT).outputs[0]
        normed = self.op(wide, root, E.DIV)
        if self.dtype is not trt.float32:
            normed = self.network.add_cast(normed, self.dtype).outputs[0]
        row = self.network.add_shuffle(gamma)
        row.reshape_dims = (1, HIDDEN)
        return self.op(normed, row.outputs[0], E.PROD)

    def fused_norm(
        self, x: trt.ITensor, residual: trt.ITensor, gamma: trt.ITensor, bias: trt.ITensor | None = None, **fields: int
    ) -> list[trt.ITensor]:
        p = plugin(
            ("AllReduceRmsNorm", "1", "tokenweave"),
            group=range(self.tp),
            tp_rank=self.rank,
            type_id=self.dtype.value,
            eps=EPS,
            **{"kind": 0, "site": 0, "half": 2, "has_bias": int(bias is not None), "weave_hash": 0, **fields},
        )
        chain = self.constant(np.zeros(1, np.int32))
        vectors = [gamma] if bias is None else [gamma, bias]
        return self.network.add_plugin_v3([x, residual, *vectors, x, x, chain], [], p).outputs


Build = Callable[[Case], list[trt.ITensor]]


def run(
    build: Build, tp: int, dtype: np.dtype[Any], inputs: Callable[[int], Mapping[str, Array]], exact: bool = False
) -> list[list[Array]]:
    """Build and run one network per rank; returns [rank][output]."""

    def body(rank: int, comm: LocalComm) -> list[Array]:
        case = Case(trt.RecordedNetwork(), rank, tp, dtype_name(dtype))
        outputs = build(case)
        for tensor in outputs:
            case.network.mark_output(tensor)
        results = ExecutionContext(case.network, comm, exact=exact).run(inputs(rank))
        return [results[t.name] for t in outputs]

    comms = LocalComm.group(tp, timeout=10)
    return run_ranks([partial(body, r, comms[r]) for r in range(tp)])


def gamma_values(dtype: np.dtype[Any]) -> Array:
    return np.linspace(0.5, 2.0, HIDDEN).astype(np.float32).astype(dtype)


def data(tp: int, rows: int, dtype: np.dtype[Any], integer: bool = False) -> Callable[[int], dict[str, Array]]:
    def make(seed: int) -> Array:
        rng = np.random.default_rng(seed)
        values = rng.integers(-3, 4, (rows, HIDDEN)) if integer else rng.uniform(-2, 2, (rows, HIDDEN))
        return values.astype(np.float32).astype(dtype)

    return lambda rank: {"x": make(rank), "residual": make(1000)}


def stock(case: Case) -> list[trt.ITensor]:
    x, residual = case.input("x", -1, HIDDEN), case.input("residual", -1, HIDDEN)
    gamma = case.constant(gamma_values(trt.numpy_dtype(case.dtype)))
    total = case.op(residual, case.all_reduce(x)[0], E.SUM)
    return [case.rms_norm(total, gamma), total]


def stock_fused(case: Case) -> list[trt.ITensor]:
    x, residual = case.input("x", -1, HIDDEN), case.input("residual", -1, HIDDEN)
    gamma = case.constant(gamma_values(trt.numpy_dtype(case.dtype)))
    return case.all_reduce(x, residual, gamma, fusion_op=1, affine=1)


def ours(case: Case) -> list[trt.ITensor]:
    x, residual = case.input("x", -1, HIDDEN), case.input("residual", -1, HIDDEN)
    gamma = case.constant(gamma_values(trt.numpy_dtype(case.dtype)))
    return case.fused_norm(x, residual, gamma, gather_residual=1)[:2]


def same_bits(a: list[list[Array]], b: list[list[Array]]) -> bool:
    pairs = [(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True)]
    return all(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs)


@settings(max_examples=40, deadline=None)
@given(tp=st.integers(1, 5), rows=st.integers(0, 12), integer=st.booleans(), exact=st.booleans())
def test_fused_norm_equals_the_stock_chain_bit_for_bit_in_float32(
    tp: int, rows: int, integer: bool, exact: bool
) -> None:
    dtype = np.dtype(np.float32)
    inputs = data(tp, rows, dtype, integer)
    wanted = run(stock, tp, dtype, inputs, exact)
    assert same_bits(run(ours, tp, dtype, inputs, exact), wanted)
    # Every rank holds the same result.
    assert same_bits(wanted, [wanted[0]] * tp)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16), BF16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_reduce_fusion_on_and_off_agree_bit_for_bit(dtype: np.dtype[Any], rows: int) -> None:
    inputs = data(3, rows, dtype)
    assert same_bits(run(stock_fused, 3, dtype, inputs), run(stock, 3, dtype, inputs))


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BF16], ids=str)
@pytest.mark.parametrize("tp", [1, 3, 4])
def test_fused_norm_in_low_precision_rounds_as_defined(dtype: np.dtype[Any], tp: int) -> None:
    """Sum, bias and residual in float32, one rounding; norm and gamma in float32, one rounding."""
    rows, bias = 7, np.linspace(-1, 1, HIDDEN).astype(np.float32).astype(dtype)

    def build(case: Case) -> list[trt.ITensor]:
        x, residual = case.input("x", -1, HIDDEN), case.input("residual", -1, HIDDEN)
        gamma = case.constant(gamma_values(dtype))
        return case.fused_norm(x, residual, gamma, case.constant(bias), gather_residual=1)[:2]

    inputs = data(tp, rows, dtype)
    total = inputs(0)["x"].astype(np.float32)
    for rank in range(1, tp):
        total = total + inputs(rank)["x"].astype(np.float32)
    total = (total + bias.astype(np.float32)) + inputs(0)["residual"].astype(np.float32)
    stored = total.astype(dtype)
    wide = stored.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * gamma_values(dtype).astype(np.float64)
    for found in run(build, tp, dtype, inputs):
        assert np.array_equal(found[1], stored)
        np.testing.assert_allclose(found[0].astype(np.float64), normed, rtol=2.0**-7)


@settings(max_examples=30, deadline=None)
@given(tp=st.integers(1, 5), rows=st.integers(0, 9))
def test_residual_stays_sharded_between_sites(tp: int, rows: int) -> None:
    """Two sites: full residual in, sharded between them, gathered at the end; rows that no token owns are NaN."""
    dtype = np.dtype(np.float32)

    def build(case: Case) -> list[trt.ITensor]:
        x, residual = case.input("x", -1, HIDDEN), case.input("residual", -1, HIDDEN)
        gamma = case.constant(gamma_values(dtype))
        normed, shard, _ = case.fused_norm(x, residual, gamma)
        return [*case.fused_norm(normed, shard, gamma, site=1, residual_sharded=1, gather_residual=1)[:2], shard]

    def oracle(case: Case) -> list[trt.ITensor]:
        normed, total = stock(case)
        gamma = case.constant(gamma_values(dtype))
        last = case.op(total, case.all_reduce(normed)[0], E.SUM)
        return [case.rms_norm(last, gamma), last, total]

    inputs = data(tp, rows, dtype, integer=True)
    own = -(-rows // tp)
    for rank, (found, wanted) in enumerate(
        zip(run(build, tp, dtype, inputs), run(oracle, tp, dtype, inputs), strict=True)
    ):
        assert np.array_equal(found[0], wanted[0])
        assert np.array_equal(found[1], wanted[1])
        shard = wanted[2][rank * own : (rank + 1) * own]
        assert found[2].shape == (own, HIDDEN)
        assert np.array_equal(found[2][: len(shard)], shard)
        assert np.isnan(found[2][len(shard) :]).all()


def test_all_reduce_takes_workspace_and_bias() -> None:
    dtype = np.dtype(np.float32)

    def build(case: Case) -> list[trt.ITensor]:
        x, residual = case.input("x", -1, HIDDEN), case.input("residual", -1, HIDDEN)
        workspace = case.network.add_input("all_reduce_workspace", trt.int64, (3,))
        gamma, bias = case.constant(gamma_values(dtype)), case.constant(np.ones(HIDDEN, np.float32))
        more = (workspace, bias, residual, gamma)
        return case.all_reduce(x, *more, strategy=3, fusion_op=1, affine=1, bias=1)

    make = data(2, 4, dtype, integer=True)
    found = run(build, 2, dtype, lambda r: {**make(r), "all_reduce_workspace": np.zeros(3, np.int64)})
    wanted = make(0)["x"] + make(1)["x"] + 1 + make(0)["residual"]
    assert np.array_equal(found[0][1], wanted)


def test_all_gather_stacks_ranks() -> None:
    def build(case: Case) -> list[trt.ITensor]:
        p = plugin(("AllGather", "1", "tensorrt_llm"), group=range(case.tp), type_id=case.dtype.value)
        return case.network.add_plugin_v2([case.input("x", -1, HIDDEN)], p).outputs

    make = data(3, 2, BF16)
    (out,) = run(build, 3, BF16, lambda r: {"x": make(r)["x"]})[2]
    assert np.array_equal(out, np.concatenate([make(r)["x"] for r in range(3)]))


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("transb", [0, 1])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_our_gemm_equals_matrix_multiply(dtype: np.dtype[Any], exact: bool, transb: int, rows: int) -> None:
    shape = (24, HIDDEN) if transb else (HIDDEN, 24)
    weight = np.random.default_rng(1).uniform(-1, 1, shape).astype(dtype)

    def build(case: Case) -> list[trt.ITensor]:
        x, w = case.input("x", -1, HIDDEN), case.constant(weight)
        step = [case.network.add_input(name, trt.DataType.INT32, (-1,)) for name in ("tokens", "sequences")]
        p = plugin(("Gemm", "1", "tokenweave"), type_id=case.dtype.value, transb=transb, kind=1)
        none, flip = trt.MatrixOperation.NONE, trt.MatrixOperation.TRANSPOSE
        return [
            case.network.add_plugin_v3([x, w, *step], [], p).outputs[0],
            case.network.add_matrix_multiply(x, none, w, flip if transb else none).outputs[0],
        ]

    make = data(1, rows, dtype)
    references = {"tokens": np.zeros(max(rows, 7), np.int32), "sequences": np.zeros(1, np.int32)}
    ((one, other),) = run(build, 1, dtype, lambda r: {"x": make(r)["x"]} | references, exact)
    assert one.tobytes() == other.tobytes()
    assert one.shape == (rows, 24)
    assert one.dtype == dtype


@pytest.mark.parametrize(
    ("x", "weight", "count", "message"),
    [
        ((-1, 8), (5, 9), 4, "inner dimensions differ: 8 and 9"),
        ((-1, -1), (5, 8), 4, "inner dimensions differ: -1 and 8"),
        ((-1, 8), (-1, 8), 4, "weight has shape"),
        ((2, -1, 8), (5, 8), 4, "expected a matrix"),
        ((-1, 8), (1, 5, 8), 4, "expected a matrix"),
        ((-1, 8), (5, 8), 3, "has 3 inputs, expected 4"),
    ],
)
def test_our_gemm_refuses(x: tuple[int, ...], weight: tuple[int, ...], count: int, message: str) -> None:
    network = trt.RecordedNetwork()
    shapes = [x, weight, (-1,), (-1,)][:count]
    inputs = [network.add_input(f"x{i}", trt.DataType.HALF, shape) for i, shape in enumerate(shapes)]
    with pytest.raises(trt.NetworkError, match=message):
        network.add_plugin_v3(inputs, [], plugin(("Gemm", "1", "tokenweave"), type_id=1, transb=1, kind=0))


def test_our_gemm_refuses_another_dtype() -> None:
    network = trt.RecordedNetwork()
    for x, weight in ((trt.DataType.HALF, trt.DataType.BF16), (trt.DataType.BF16, trt.DataType.HALF)):
        kinds = (x, weight, trt.DataType.INT32, trt.DataType.INT32)
        inputs = [network.add_input(f"{x.name}{i}", kind, (8, 8)) for i, kind in enumerate(kinds)]
        with pytest.raises(trt.NetworkError, match="an operand has dtype HALF, which is not type_id"):
            network.add_plugin_v3(inputs, [], plugin(("Gemm", "1", "tokenweave"), type_id=7, transb=1, kind=0))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("rows", [0, 5])
def test_gemm_plugin_equals_matrix_multiply(exact: bool, rows: int) -> None:
    weight = np.random.default_rng(1).uniform(-1, 1, (24, HIDDEN)).astype(BF16)
    creator = trt.get_plugin_registry().get_creator("Gemm", "1", "tensorrt_llm")
    assert creator is not None
    known = {spec.name for spec in creator.spec.fields}

    def build(case: Case) -> list[trt.ITensor]:
        x, w = case.input("x", -1, HIDDEN), case.constant(weight)
        values = {"transa": 0, "transb": 1, "type_id": case.dtype.value, "alpha": 1.0}
        values |= dict.fromkeys(known - values.keys(), 0)
        p = plugin(("Gemm", "1", "tensorrt_llm"), **values)
        none, flip = trt.MatrixOperation.NONE, trt.MatrixOperation.TRANSPOSE
        return [
            case.network.add_plugin_v2([x, w], p).outputs[0],
            case.network.add_matrix_multiply(x, none, w, flip).outputs[0],
        ]

    make = data(1, rows, BF16)
    ((one, other),) = run(build, 1, BF16, lambda r: {"x": make(r)["x"]}, exact)
    assert one.tobytes() == other.tobytes()
    assert one.shape == (rows, 24)


def test_ranks_with_different_row_counts_are_refused() -> None:
    dtype = np.dtype(np.float32)
    with pytest.raises(UserError, match=r"layer .*AllReduce.* rank \d brought float32 \(\d, 16\)|not at the same"):
        run(stock, 2, dtype, lambda r: data(2, 2 + r, dtype)(r))


def test_a_group_of_another_size_is_refused() -> None:
    def build(case: Case) -> list[trt.ITensor]:
        case.tp = 3
        return stock(case)

    dtype = np.dtype(np.float32)
    with pytest.raises(UserError, match=r"group is \[0, 1, 2\], but 2 ranks run"):
        run(build, 2, dtype, data(2, 2, dtype))
