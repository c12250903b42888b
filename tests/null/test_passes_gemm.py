"""The region's GEMMs in our plugin: which are replaced, beside what they run, and that nothing else changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import tuning
from support.models import small, small_table
from support.stack import Stack, options, run

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.network import Graph, Node
from trtllm_tokenweave.passes import names, verify, weave
from trtllm_tokenweave.passes.gemm import beside
from trtllm_tokenweave.plugin_specs import ALL_REDUCE_RMS_NORM, GEMM, NAMESPACE, STREAM_JOIN, VERSION, Half, SiteKind
from trtllm_tokenweave.table import TableSource

OURS = (GEMM, VERSION, NAMESPACE)


def woven(stack: Stack, **fields: Any) -> Graph:
    network = stack.build()
    assert weave(network, options(stack.tp_size, stack.rank, gemm="budget", **fields)).mode == "weave"
    assert verify(network) == []
    return Graph(network)


def count(graph: Graph) -> Counter[str]:
    return Counter(n.plugin_name or n.kind for n in graph.live if n.plugin_key == OURS or n.kind == "MATRIX_MULTIPLY")


def product_in_a_row(stack: Stack, index: int, x: trt.ITensor) -> trt.ITensor:
    return stack.matmul(x, stack.weight("middle", index, (stack.ffn, stack.ffn)))


@pytest.mark.parametrize(("inner", "others"), [(None, 1), (product_in_a_row, 2)])
def test_the_first_product_of_every_block_of_either_half_is_replaced(inner: Any, others: int) -> None:
    graph = woven(Stack(layers=2, dtype=trt.bfloat16, inner=inner))
    assert count(graph) == {"Gemm": 2 * 4, "MATRIX_MULTIPLY": 2 * 4 * others}
    for node in graph.nodes:
        if node.plugin_key == OURS:
            assert node in graph.live
            assert node.inputs[2:] == ["x", graph.named[names.ONE_SEQUENCE].outputs[0]]


def test_products_in_float32_stay_tensorrts() -> None:
    assert count(woven(Stack(layers=2))) == {"MATRIX_MULTIPLY": 16}


def test_nothing_is_replaced_where_nothing_is_split_or_asked_for() -> None:
    for fields in ({"gemm": "trt"}, {"gemm": "budget", "split": False}):
        network = Stack(layers=2, dtype=trt.bfloat16).build()
        weave(network, options(**fields))
        assert "Gemm" not in count(Graph(network))


def test_by_default_the_table_says_whose_gemms() -> None:
    for gemm in ("trt", "budget", None):
        how, network = options(), Stack(layers=2, dtype=trt.bfloat16).build()
        measured = None if gemm is None else tuning.measured(gemm=gemm)
        source = TableSource(kind="default" if gemm is None else "measurement", text="", measured=measured)
        weave(network, replace(how, table=how.table.model_copy(update={"source": source})))
        assert ("Gemm" in count(Graph(network))) is (gemm != "trt")


def in_flight(graph: Graph, node: Node) -> set[SiteKind]:
    """Kinds of the collectives that may run beside a layer: neither joined before it nor started after it."""
    before = graph.ancestors([n for n in node.inputs if n is not None])
    after = graph.descendants(node.outputs[0])
    chain = [n for n in graph.ordered() if n.plugin_name in (ALL_REDUCE_RMS_NORM, STREAM_JOIN)]

    def key(layer: Node) -> tuple[int, int]:
        return int(layer.fields["site"]), int(layer.fields["half"])

    joined = {key(n) for n in chain if n in before and n.plugin_name == STREAM_JOIN and n.fields["waits"]}
    starts = [n for n in chain if n.plugin_name == ALL_REDUCE_RMS_NORM]
    return {SiteKind(int(n.fields["kind"])) for n in starts if key(n) not in joined and n not in after}


@pytest.mark.parametrize("half", [Half.PREFIX, Half.SUFFIX])
def test_a_gemm_keeps_to_the_budget_of_the_collective_beside_it(half: Half) -> None:
    graph = woven(Stack(layers=3, dtype=trt.bfloat16))
    mine = [n for n in graph.ordered() if n.plugin_key == OURS and n.name.endswith("/suffix") is (half is Half.SUFFIX)]
    assert len(mine) == 6
    for node in mine:
        found = in_flight(graph, node)
        # In front of site 0 the prefix half has nothing beside it.
        assert found in ({SiteKind(int(node.fields["kind"]))}, set()), node.name
    assert sum(not in_flight(graph, node) for node in mine) == (1 if half is Half.PREFIX else 0)
    assert {int(n.fields["kind"]) for n in mine} == {0, 1}


def test_what_is_beside_follows_the_kinds() -> None:
    kinds = [SiteKind.ATTENTION, SiteKind.MLP, SiteKind.MLP]
    assert [beside(kinds, site, Half.PREFIX) for site in range(3)] == [kinds[0], kinds[0], kinds[1]]
    assert [beside(kinds, site, Half.SUFFIX) for site in range(3)] == kinds


def test_results_are_those_of_the_stock_network() -> None:
    x = {"x": np.random.default_rng(4).integers(-4, 5, (70, 16)).astype(ml_dtypes.bfloat16)}
    stock = run([Stack(rank=rank, dtype=trt.bfloat16).build() for rank in range(2)], x, exact=True)
    networks = [woven(Stack(rank=rank, dtype=trt.bfloat16)).network for rank in range(2)]
    plain = []
    for rank in range(2):
        network = Stack(rank=rank, dtype=trt.bfloat16).build()
        weave(network, options(rank=rank))
        plain.append(network)
    for seed in (None, 1, 2, 3):
        got, want = run(networks, x, exact=True, seed=seed), run(plain, x, exact=True)
        for a, b, c in zip(got, want, stock, strict=True):
            np.testing.assert_array_equal(a["out"], b["out"])
            assert np.abs(a["out"].astype(np.float32) - c["out"].astype(np.float32)).max() < 0.1


def test_a_plugin_that_is_not_used_is_a_fault() -> None:
    graph = woven(Stack(layers=2, dtype=trt.bfloat16))
    node = next(n for n in graph.nodes if n.plugin_key == OURS and not n.name.endswith("/suffix"))
    stock = graph.named[node.name.removesuffix("/tokenweave_gemm")]
    for reader, position in graph.live_readers(node.outputs[0]):
        reader.layer.set_input(position, stock.layer.get_output(0))
    assert f"layer {node.name} is not used" in verify(graph.network)


def test_trtllms_gemm_plugin_is_replaced_too() -> None:
    """In a whole model, attention split: Q, K and V's product becomes ours, and gate and up projection's."""
    network, config, mapping = trt.RecordedNetwork(), small(), Mapping(2, 0, 2)
    build_llama(network, config, mapping, None, NetworkOptions(max_num_tokens=96, max_seq_len=64, gemm_plugin=True))
    how = options(gemm="budget", table=small_table(config, 2), max_num_tokens=96)
    assert weave(network, how).mode == "weave"
    keys = Counter(n.plugin_key for n in Graph(network).live)
    assert keys[OURS] == 2 * 2 * config.num_hidden_layers
    assert keys["Gemm", "1", "tensorrt_llm"] == 2 * 2 * config.num_hidden_layers + 1
