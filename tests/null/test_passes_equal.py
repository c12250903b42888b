"""Woven, fused and stock networks compute the same, on any ragged step, in any order the events allow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.stack import Stack, options, run, table

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.passes import chain_signature, verify, verify_ranks, weave
from trtllm_tokenweave.plugin_specs import ALL_REDUCE_RMS_NORM
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableRow

LAUNCH = LaunchConfig(ctas=16, threads=1024)


def networks(tp_size: int, weaving: str, layers: int, dtype: trt.DataType, **fields: Any) -> list[trt.RecordedNetwork]:
    out = []
    for rank in range(tp_size):
        network = Stack(tp_size, rank, layers, dtype=dtype, **fields).build()
        if weaving != "stock":
            result = weave(network, options(tp_size, rank, split=weaving == "weave"))
            assert result.mode == weaving
        out.append(network)
    return out


def tokens(n: int, dtype: trt.DataType = trt.float32, seed: int = 0) -> dict[str, NDArray[Any]]:
    x = np.random.default_rng([n, seed]).integers(-4, 5, (n, 16))
    return {"x": x.astype(trt.numpy_dtype(dtype))}


@settings(max_examples=40, deadline=None)
@given(
    tp_size=st.integers(2, 8),
    layers=st.integers(1, 3),
    n=st.one_of(st.integers(0, 20), st.integers(21, 250)),
    form=st.sampled_from([{}, {"fused": True}, {"bias": True}]),
    seed=st.one_of(st.none(), st.integers(0, 2**20)),
)
def test_integer_networks_are_bit_equal(
    tp_size: int, layers: int, n: int, form: dict[str, Any], seed: int | None
) -> None:
    stock = run(networks(tp_size, "stock", layers, trt.float32, **form), tokens(n), exact=True)
    for weaving in ("fuse", "weave"):
        other = run(networks(tp_size, weaving, layers, trt.float32, **form), tokens(n), exact=True, seed=seed)
        for a, b in zip(stock, other, strict=True):
            np.testing.assert_array_equal(a["out"], b["out"])


def test_real_valued_fp32_is_within_1e_5() -> None:
    x = {"x": np.random.default_rng(3).standard_normal((203, 16), np.float32)}
    stock = run(networks(3, "stock", 4, trt.float32, scale=0.37), x)
    woven = run(networks(3, "weave", 4, trt.float32, scale=0.37), x)
    for a, b in zip(stock, woven, strict=True):
        error = np.abs(a["out"] - b["out"]).max() / np.abs(a["out"]).max()
        assert error < 1e-5


def oracle(tp_size: int, layers: int, dtype: trt.DataType, x: NDArray[Any]) -> NDArray[Any]:
    """The woven result as it is defined, in float64 with the roundings written out.

    Each rank's partial sums are rounded to the dtype (a GEMM's result); their sum over ranks plus the residual is
    rounded once and is the new residual; that stored value is normalised and scaled in fp32 and rounded once.
    """
    to = trt.numpy_dtype(dtype)

    def norm(h: NDArray[Any], gamma: NDArray[Any], once: bool) -> NDArray[Any]:
        wide = h.astype(np.float32)
        mean = np.mean(wide * wide, axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
        y = wide / np.sqrt(mean + np.float32(1e-5))
        return (y * gamma.astype(np.float32)).astype(to) if once else (y.astype(to) * gamma.astype(to)).astype(to)

    weights = Stack(tp_size, 0, layers, dtype=dtype)
    h, y = x, norm(x, weights.gamma(0), once=False)
    for index in range(2 * layers):
        total = h.astype(np.float64)
        for rank in range(tp_size):
            part = Stack(tp_size, rank, layers, dtype=dtype)
            up, down = (
                part.weight(name, index, shape).producer.weights.numpy().astype(np.float64)  # type: ignore[union-attr]
                for name, shape in (("up", (16, 24)), ("down", (24, 16)))
            )
            act = np.maximum((y.astype(np.float64) @ up).astype(to), 0).astype(np.float64)
            total += (act @ down).astype(to).astype(np.float64)
        h = total.astype(np.float32).astype(to)
        y = norm(h, weights.gamma(index + 1), once=True)
    return y


@pytest.mark.parametrize("dtype", [trt.float32, trt.bfloat16, trt.float16])
@pytest.mark.parametrize("n", [1, 7, 64])
def test_each_dtype_is_the_defined_result(dtype: trt.DataType, n: int) -> None:
    x = tokens(n, dtype)
    for weaving in ("fuse", "weave"):
        for out in run(networks(4, weaving, 2, dtype), x, exact=True):
            got, expected = out["out"].astype(np.float64), oracle(4, 2, dtype, x["x"]).astype(np.float64)
            # The mean of squares is summed in another order, which may carry over into the last place of a rounding.
            tolerance = {trt.float32: 1e-5, trt.bfloat16: 2**-8, trt.float16: 2**-11}[dtype]
            assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("dtype", [trt.bfloat16, trt.float16])
def test_split_and_unsplit_are_bit_equal_in_half_precision(dtype: trt.DataType) -> None:
    for n in (5, 37, 130):
        fused = run(networks(3, "fuse", 2, dtype), tokens(n, dtype), exact=True)
        woven = run(networks(3, "weave", 2, dtype), tokens(n, dtype), exact=True)
        for a, b in zip(fused, woven, strict=True):
            np.testing.assert_array_equal(a["out"], b["out"])


def test_rows_of_a_table_are_looked_up_in_the_network() -> None:
    """Several batch and token buckets, more than 64 entries: halves as the table says, seen in the network's slices."""
    rows = (
        TableRow(tokens=Bucket(lo=1, hi=96), mode="fuse", attention=LAUNCH, mlp=LAUNCH),
        TableRow(tokens=Bucket(lo=97, hi=160), mode="weave", split_offset=24, attention=LAUNCH, mlp=LAUNCH),
    )
    tuned = table(rows=rows)
    network = Stack().build()
    assert weave(network, options(table=tuned, max_num_tokens=2048)).mode == "weave"
    lookup = tuned.prefix_lookup(8, 2048)
    assert lookup.prefix.size > 64
    halves = [
        next(layer for layer in network.layers if layer.name == f"tokenweave/rows/{h}") for h in ("prefix", "suffix")
    ]
    for tensor, name in zip((layer.outputs[0] for layer in halves), ("p", "s"), strict=True):
        shape = network.add_shape(tensor).outputs[0]
        shape.name = name
        network.mark_output(shape)
    other = Stack(rank=1).build()
    weave(other, options(rank=1, table=tuned, max_num_tokens=2048))
    for n in (0, 1, 96, 97, 112, 113, 160, 161, 1000, 1039, 1040, 2047, 2048):
        out = run([network, other], tokens(n))[0]
        assert (int(out["p"][0]), int(out["s"][0])) == lookup.evaluate(1, n)


def test_the_last_site_says_so() -> None:
    network = Stack(layers=2).build()
    weave(network, options())
    starts = [n for n in Graph(network).live if n.plugin_name == ALL_REDUCE_RMS_NORM]
    assert {(n.fields["site"], n.fields["half"]) for n in starts if n.fields["last"]} == {(3, 0), (3, 1)}


def test_every_rank_gets_the_same_chain() -> None:
    woven = networks(4, "weave", 3, trt.float32)
    assert verify_ranks(woven) == []
    assert len(chain_signature(woven[0])) == 1 + 4 * 6
    assert verify_ranks([woven[0], networks(4, "weave", 2, trt.float32)[1]]) != []


@pytest.mark.parametrize("weaving", ["fuse", "weave"])
def test_fused_and_plain_form_give_the_same_chain_and_pass_verify(weaving: str) -> None:
    plain, fused = (networks(2, weaving, 3, trt.bfloat16, fused=form)[0] for form in (False, True))
    assert chain_signature(plain) == chain_signature(fused)
    assert verify(plain) == verify(fused) == []


def test_network_output_keeps_name_and_order() -> None:
    network = Stack(layers=1).build()
    probe = network.add_identity(network.get_input(0)).outputs[0]
    probe.name = "probe"
    network.mark_output(probe)
    weave(network, options())
    assert [network.get_output(i).name for i in range(2)] == ["out", "probe"]
