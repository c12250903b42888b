"""Negative controls: each edge that the pass adds, taken away again, is missed by the checker and by the result."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.models import tiny
from support.stack import Stack, options, run

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.errors import TokenWeaveError
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.passes import Baseline, WeaveOptions, names, verify, weave
from trtllm_tokenweave.plugin_specs import (
    ALL_REDUCE_RMS_NORM,
    ATTENTION,
    BATCH_SPLIT,
    SUFFIX_ROWS,
    AttentionRole,
    Half,
)
from trtllm_tokenweave.recorder import rules as recorder_rules
from trtllm_tokenweave.recorder import tensor as recorder_tensor
from trtllm_tokenweave.table import prefix
from trtllm_tokenweave.waves import default_table

LAYERS = 2
SEEDS = range(24)
MODEL_TOKENS = 32768
Damage = Callable[[trt.RecordedNetwork], None]


def layer(network: trt.RecordedNetwork, name: str) -> trt.ILayer:
    return next(found for found in network.layers if found.name == name)


def woven(rank: int) -> trt.RecordedNetwork:
    network = Stack(rank=rank, layers=LAYERS).build()
    assert weave(network, options(rank=rank)).mode == "weave"
    return network


def wrong_runs(damage: Damage | None) -> int:
    """In how many of the adversarial schedules does the damaged network give a wrong result or an error?"""
    stock = [Stack(rank=rank, layers=LAYERS).build() for rank in range(2)]
    # Halves of equal size: nothing but the edges tells the ranks which half a collective serves.
    x = {"x": np.random.default_rng(4).integers(-4, 5, (64, 16)).astype(np.float32)}
    expected = run(stock, x, exact=True)
    networks = [woven(rank) for rank in range(2)]
    if damage is not None:
        for network in networks:
            damage(network)
    wrong = 0
    for seed in SEEDS:
        try:
            got = run(networks, x, exact=True, seed=seed)
        except TokenWeaveError:
            wrong += 1
            continue
        wrong += not all(np.array_equal(a["out"], b["out"]) for a, b in zip(got, expected, strict=True))
    return wrong


def drop_keep_alive(network: trt.RecordedNetwork) -> None:
    """The join of a collective no longer holds the collective's input."""
    join = layer(network, names.join(1, Half.PREFIX))
    x = layer(network, names.start(1, Half.PREFIX)).inputs[0]
    position = join.inputs.index(x)
    join.set_input(position, join.outputs[0].producer.inputs[0])  # type: ignore[union-attr,arg-type]


def drop_residual_keep_alive(network: trt.RecordedNetwork) -> None:
    join = layer(network, names.join(1, Half.SUFFIX))
    residual = layer(network, names.start(1, Half.SUFFIX)).inputs[1]
    join.set_input(join.inputs.index(residual), join.inputs[0])  # type: ignore[arg-type]


def drop_join(network: trt.RecordedNetwork) -> None:
    """What follows a collective reads its result without waiting."""
    join = layer(network, names.join(2, Half.PREFIX))
    for reader, position in list(join.outputs[0].consumers):
        reader.set_input(position, join.inputs[0])  # type: ignore[arg-type]


def drop_chain_link(network: trt.RecordedNetwork) -> None:
    """A join no longer comes after the other half's start, so the ranks may start collectives in either order."""
    join = layer(network, names.join(0, Half.SUFFIX))
    start = layer(network, names.start(1, Half.PREFIX))
    join.set_input(join.num_inputs - 1, start.inputs[-1])  # type: ignore[arg-type]


def test_the_woven_network_is_right_under_every_schedule() -> None:
    assert verify(woven(0)) == []
    assert wrong_runs(None) == 0


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (drop_keep_alive, "is not kept alive by"),
        (drop_residual_keep_alive, "is not kept alive by"),
        (drop_join, "is read before its join"),
        (drop_chain_link, "the chain forks"),
    ],
)
def test_a_missing_edge_is_seen_by_the_checker_and_in_the_result(damage: Damage, problem: str) -> None:
    network = woven(0)
    damage(network)
    assert any(problem in found for found in verify(network)), verify(network)
    assert wrong_runs(damage) > 0


def reads_other_half(network: trt.RecordedNetwork) -> None:
    prefix = layer(network, names.rows(Half.PREFIX)).outputs[0]
    suffix_reader, position = layer(network, names.gate(0)).outputs[0].consumers[0]
    suffix_reader.set_input(position, prefix)


def swaps_the_halves(network: trt.RecordedNetwork) -> None:
    last = next(found for found in network.layers if names.is_concatenate(found.name))
    prefix, suffix = last.inputs
    last.set_input(0, suffix)  # type: ignore[arg-type]
    last.set_input(1, prefix)  # type: ignore[arg-type]


def never_joined(network: trt.RecordedNetwork) -> None:
    join = layer(network, names.join(2, Half.PREFIX))
    for tensor, source in zip(join.outputs, join.inputs[:2], strict=False):
        for reader, position in list(tensor.consumers):
            reader.set_input(position, source)  # type: ignore[arg-type]
    for reader, position in list(join.outputs[2].consumers):
        reader.set_input(position, join.inputs[-1])  # type: ignore[arg-type]


def host_tensor_cast(network: trt.RecordedNetwork) -> None:
    host = network.add_input("host_context_lengths", trt.int32, (-1,))
    network.mark_output(network.add_cast(host, trt.int64).outputs[0])


def stock_collective_inside(network: trt.RecordedNetwork) -> None:
    gate = layer(network, names.gate(0))
    plugin = trt.get_plugin_registry().get_creator("AllReduce", "1", "tensorrt_llm")
    assert plugin is not None
    used = next(x for x in network.layers if isinstance(x, trt.IPluginV2Layer)).plugin
    extra = network.add_plugin_v2([gate.outputs[0]], used)
    for reader, position in list(gate.outputs[0].consumers):
        if reader is not extra:
            reader.set_input(position, extra.outputs[0])


def takes_rows_of_another_tensor(network: trt.RecordedNetwork) -> None:
    suffix = layer(network, names.rows(Half.SUFFIX))
    own: trt.ITensor = suffix.inputs[0]  # type: ignore[assignment]
    suffix.set_input(0, network.add_input("other", own.dtype, own.shape))


def counts_the_rows_of_another_tensor(network: trt.RecordedNetwork) -> None:
    suffix = layer(network, names.rows(Half.SUFFIX))
    suffix.set_input(1, suffix.inputs[0])  # type: ignore[arg-type]


def starts_behind_row_0(network: trt.RecordedNetwork) -> None:
    prefix = layer(network, names.rows(Half.PREFIX))
    prefix.set_input(1, network.add_constant((2,), np.array([3, 0], np.int64)).outputs[0])


def takes_every_other_row(network: trt.RecordedNetwork) -> None:
    layer(network, names.rows(Half.PREFIX)).stride = (2, 1)


def is_sized_by_a_constant(network: trt.RecordedNetwork) -> None:
    prefix = layer(network, names.rows(Half.PREFIX))
    prefix.set_input(2, network.add_constant((2,), np.array([4, 16], np.int64)).outputs[0])


def counts_other_tokens(network: trt.RecordedNetwork) -> None:
    graph = Graph(network)
    width = graph.producer[graph.named[names.rows(Half.PREFIX)].inputs[2] or ""]
    within = graph.producer[graph.producer[width.inputs[0] or ""].inputs[0] or ""].layer
    within.set_input(1, within.inputs[0])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (takes_rows_of_another_tensor, "has no counterpart that takes the rows behind it of the same tensor"),
        (counts_the_rows_of_another_tensor, "has no counterpart that takes the rows behind it of the same tensor"),
        (starts_behind_row_0, "does not take all rows from row 0 on"),
        (takes_every_other_row, "does not take all rows from row 0 on"),
        (is_sized_by_a_constant, "does not take whole rows"),
        (counts_other_tokens, "is not bounded by the step's tokens"),
        (reads_other_half, "has no twin in the suffix half"),
        (swaps_the_halves, "does not concatenate the prefix half and the suffix half"),
        (never_joined, "never joined"),
        (host_tensor_cast, "which is no plugin"),
        (stock_collective_inside, "unchained collective"),
    ],
)
def test_the_checker_sees(damage: Damage, problem: str) -> None:
    network = woven(0)
    damage(network)
    assert any(problem in found for found in verify(network)), verify(network)


def plugins(network: trt.RecordedNetwork, name: str) -> list[trt.IPluginV3Layer]:
    found = [x for x in network.layers if isinstance(x, trt.IPluginV3Layer)]
    return [x for x in found if x.plugin.plugin_type == name]


def woven_model() -> trt.RecordedNetwork:
    network, config, mapping = trt.RecordedNetwork(), tiny(), Mapping(2, 0, 2)
    table = default_table(config, 2)
    build_llama(network, config, mapping, None, NetworkOptions(max_num_tokens=MODEL_TOKENS, max_seq_len=128))
    assert weave(network, WeaveOptions(mapping, table, 8, MODEL_TOKENS)).mode == "weave"
    return network


def role_input(wrapper: trt.IPluginV3Layer, role: AttentionRole) -> int:
    return int(np.flatnonzero(np.asarray(wrapper.plugin.fields["roles"]) == role)[0])


def lengths_of_the_step(network: trt.RecordedNetwork) -> None:
    wrapper, split = plugins(network, ATTENTION)[0], plugins(network, BATCH_SPLIT)[0]
    wrapper.set_input(role_input(wrapper, AttentionRole.CONTEXT_LENGTHS), split.inputs[5])  # type: ignore[arg-type]


def lengths_of_the_other_half(network: trt.RecordedNetwork) -> None:
    split = plugins(network, BATCH_SPLIT)[0]
    for wrapper in plugins(network, ATTENTION):
        for index, role in enumerate((AttentionRole.SEQUENCE_LENGTH, AttentionRole.CONTEXT_LENGTHS)):
            other = 2 * (1 - int(wrapper.plugin.fields["half"])) + index
            wrapper.set_input(role_input(wrapper, role), split.outputs[other])


def host_lengths_of_another_batch(network: trt.RecordedNetwork) -> None:
    other = network.add_input("host_other_lengths", trt.int32, (-1,))
    for wrapper in plugins(network, ATTENTION):
        wrapper.set_input(role_input(wrapper, AttentionRole.HOST_CONTEXT_LENGTHS), other)


def other_token_reference(network: trt.RecordedNetwork) -> None:
    split = plugins(network, BATCH_SPLIT)[0]
    split.set_input(1, split.inputs[0])  # type: ignore[arg-type]


def fewer_rows_than_the_suffix_has(network: trt.RecordedNetwork) -> None:
    (suffix,) = plugins(network, SUFFIX_ROWS)
    suffix.plugin.fields = {**suffix.plugin.fields, "max_rows": 8}


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (fewer_rows_than_the_suffix_has, "the halves hold 16896 and 8 tokens, a step of tokenweave/batch_split up to"),
        (lengths_of_the_step, "does not take its half's lengths from a batch split"),
        (lengths_of_the_other_half, "does not take its half's lengths from a batch split"),
        (host_lengths_of_another_batch, "reads other host lengths than tokenweave/batch_split"),
        (other_token_reference, "has another reference for the step's tokens than the collectives"),
    ],
)
def test_the_halves_attention_cuts_where_the_batch_split_does(damage: Damage, problem: str) -> None:
    network = woven_model()
    assert verify(network) == []
    damage(network)
    assert any(problem in found for found in verify(network)), verify(network)


def test_the_batch_split_knows_the_step_as_the_collectives_do() -> None:
    network = woven_model()
    (split,) = plugins(network, BATCH_SPLIT)
    assert split.inputs[1] is plugins(network, ALL_REDUCE_RMS_NORM)[0].inputs[-3]
    assert split.num_outputs == 4
    assert int(split.plugin.fields["max_num_tokens"]) == MODEL_TOKENS


def test_changes_against_the_baseline() -> None:
    network = Stack(layers=1).build()
    baseline = Baseline.of(network)
    weave(network, options())
    assert verify(network, baseline) == []
    weights = network.add_constant((16, 16), np.ones((16, 16), np.float32)).outputs[0]
    gate = layer(network, names.gate(0)).outputs[0]
    product = network.add_matrix_multiply(gate, trt.MatrixOperation.NONE, weights, trt.MatrixOperation.NONE).outputs[0]
    for reader, position in list(gate.consumers):
        if reader is not product.producer:
            reader.set_input(position, product)
    network.get_output(0).name = "renamed"
    problems = verify(network, baseline)
    assert any("were added or copied" in p for p in problems)
    assert any("outputs changed" in p for p in problems)


def test_a_lookup_constant_of_more_than_64_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded network refuses it as soon as it shapes a slice; TensorRT builds it, and computes other rows."""
    many = options(max_num_tokens=2048)
    for module in (prefix, recorder_rules, recorder_tensor):
        monkeypatch.setattr(module, "MAX_SHAPE_TENSOR_ELEMENTS", 1000)
    with pytest.raises(TokenWeaveError, match=r"lookup/constant_\d+ holds 129 elements of a lookup, at most 64"):
        weave(Stack().build(), many)
    monkeypatch.undo()
    assert weave(Stack().build(), many).mode == "weave"
