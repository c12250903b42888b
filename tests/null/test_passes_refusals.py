"""Every place that the pass leaves alone, with its reason; the network is then as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.stack import PLAIN, Stack, options, run, table

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave import trt as seam
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.passes import WeaveResult, weave
from trtllm_tokenweave.plugin_specs import SiteKind


def woven(stack: Stack, **fields: Any) -> tuple[trt.RecordedNetwork, WeaveResult]:
    network = stack.build()
    return network, weave(network, options(stack.tp_size, stack.rank, **fields))


def same_as_stock(make: Any, **fields: Any) -> WeaveResult:
    """Weave the stacks that ``make(rank)`` builds and compare with the stock run; returns rank 0's result."""
    stock = [make(rank).build() for rank in range(2)]
    results = []
    networks = []
    for rank in range(2):
        network, result = woven(make(rank), **fields)
        networks.append(network)
        results.append(result)
    x = np.random.default_rng(1).integers(-4, 5, (37, 16)).astype(np.float32)
    for a, b in zip(run(stock, {"x": x}, exact=True), run(networks, {"x": x}, exact=True), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
    return results[0]


def refused(result: WeaveResult, stage: str) -> list[str]:
    return [r.reason for r in result.plan.refused if r.stage == stage]


def test_every_site_of_a_plain_stack_is_fused_and_split() -> None:
    result = same_as_stock(lambda rank: Stack(rank=rank))
    assert result.mode == "weave"
    assert not result.plan.refused
    assert [s.kind for s in result.plan.sites] == [SiteKind.ATTENTION, SiteKind.MLP] * 2
    assert [s.eps for s in result.plan.sites] == pytest.approx([1e-5] * 4)


@pytest.mark.parametrize("fields", [{"fused": True}, {"bias": True}, {"multiplier": 1.0}])
def test_other_forms_of_a_site(fields: dict[str, Any]) -> None:
    result = same_as_stock(lambda rank: Stack(rank=rank, **fields))
    assert result.mode == "weave"
    assert len(result.plan.sites) == 4


@pytest.mark.parametrize(("field", "value", "needed"), [("tp_size", 4, 2), ("hidden_size", 32, 16)])
def test_a_table_of_another_model_is_refused(field: str, value: int, needed: int) -> None:
    foreign = table()
    foreign = foreign.model_copy(update={"key": foreign.key.model_copy(update={field: value})})
    network = Stack().build()
    before = [layer.name for layer in network.layers]
    for split in (True, False):
        with pytest.raises(UserError, match=f"made for {field} {value}, but {needed} is needed") as caught:
            weave(network, options(table=foreign, split=split))
        assert caught.value.where == f"table: key.{field}"
        assert caught.value.fix
    assert [layer.name for layer in network.layers] == before
    assert weave(network, options()).mode == "weave"


def read_twice(stack: Stack, index: int, reduced: trt.ITensor, _total: trt.ITensor) -> None:
    if index == 1:
        probe = stack.network.add_identity(reduced).outputs[0]
        probe.name = "probe"
        stack.network.mark_output(probe)


def test_all_reduce_with_a_second_reader_stays_unfused() -> None:
    result = same_as_stock(lambda rank: Stack(rank=rank, twist=read_twice))
    assert len(result.plan.sites) == 3
    (reason,) = refused(result, "fuse")
    assert "2 readers" in reason
    assert result.mode == "fuse", "a stock collective inside the region rules a split out"
    assert any("not fused" in reason for reason in refused(result, "split"))


def sum_read(stack: Stack, index: int, _reduced: trt.ITensor, total: trt.ITensor) -> None:
    if index == 2:
        probe = stack.network.add_identity(total).outputs[0]
        probe.name = "probe"
        stack.network.mark_output(probe)


def sum_output(stack: Stack, index: int, _reduced: trt.ITensor, total: trt.ITensor) -> None:
    if index == 2:
        total.name = "hidden"
        stack.network.mark_output(total)


@pytest.mark.parametrize(("twist", "reason"), [(sum_read, "is read by layer"), (sum_output, "is a network output")])
def test_residual_with_another_reader(twist: Any, reason: str) -> None:
    result = same_as_stock(lambda rank: Stack(rank=rank, twist=twist))
    assert len(result.plan.sites) == 3
    assert any(reason in r for r in refused(result, "fuse"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gemm": "nonsense"}, "gemm: no choice 'nonsense'. Fix: give one of ('table', 'trt', 'budget')"),
        ({"max_beam_width": 0}, "max_beam_width: 0 is less than 1"),
        ({"max_draft_len": -1}, "max_draft_len: -1 is less than 0"),
    ],
)
def test_options_that_there_are_not(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        options(2, 0, **fields)
    assert str(raised.value) == message


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("twist", [None, sum_read])
def test_a_woven_network_is_not_woven_again(twist: Any, split: bool) -> None:
    """Also where the first weave has left AllReduce layers."""
    network, result = woven(Stack(twist=twist), split=split)
    assert result.mode == ("weave" if split and twist is None else "fuse")
    before = [layer.name for layer in network.layers]
    with pytest.raises(UserError) as raised:
        weave(network, options())
    assert str(raised.value) == (
        f"layer {next(name for name in before if 'all_reduce_rms_norm' in name)}: "
        "is of an earlier weave: the network is woven already. "
        "Fix: weave a network once; for other options build it again, and weave that"
    )
    assert [layer.name for layer in network.layers] == before


def test_other_multiplier_is_refused() -> None:
    result = same_as_stock(lambda rank: Stack(rank=rank, multiplier=0.5))
    assert result.mode == "stock"
    assert all("scales the branch by 0.5" in r for r in refused(result, "fuse"))


def test_other_group_is_refused() -> None:
    network = Stack(tp_size=2).build()
    before = network.num_layers
    result = weave(network, options(3))
    assert result.mode == "stock"
    assert all("reduces over ranks (0, 1)" in r for r in refused(result, "fuse"))
    assert network.num_layers == before, "a network in which nothing is done must stay untouched"


def across_tokens(stack: Stack, index: int, x: trt.ITensor) -> trt.ITensor:
    if index != 2:
        return x
    mean = stack.network.add_reduce(x, trt.ReduceOperation.AVG, 1, True).outputs[0]
    return stack.binary(x, mean, "SUB")


def softmax_over_tokens(stack: Stack, index: int, x: trt.ITensor) -> trt.ITensor:
    if index != 2:
        return x
    layer = stack.network.add_softmax(x)
    layer.axes = 1
    return layer.outputs[0]


def times_itself(stack: Stack, index: int, x: trt.ITensor) -> trt.ITensor:
    if index != 2:
        return x
    gram = stack.network.add_matrix_multiply(x, trt.MatrixOperation.TRANSPOSE, x, PLAIN).outputs[0]
    return stack.network.add_matrix_multiply(x, PLAIN, gram, PLAIN).outputs[0]


def shifted(stack: Stack, index: int, x: trt.ITensor) -> trt.ITensor:
    """Rows in reverse order: a slice that is not row-wise."""
    if index != 2:
        return x
    n = stack.network
    rows = n.add_gather(n.add_shape(x).outputs[0], stack.const([0], "zero", trt.int64), 0).outputs[0]
    last = stack.binary(rows, stack.const([1], "one", trt.int64), "SUB")
    start = n.add_concatenation([last, stack.const([0], "zero2", trt.int64)])
    layer = n.add_slice(x, (0, 0), (0, 0), (-1, 1))
    layer.set_input(1, start.outputs[0])
    size = n.add_concatenation([rows, stack.const([stack.ffn], "width", trt.int64)])
    layer.set_input(2, size.outputs[0])
    return layer.outputs[0]


def divided_by_tokens(stack: Stack, index: int, x: trt.ITensor) -> trt.ITensor:
    """Data scaled by the number of tokens of the step."""
    if index != 2:
        return x
    n = stack.network
    rows = n.add_gather(n.add_shape(x).outputs[0], stack.const([0], "zero", trt.int64), 0).outputs[0]
    count = n.add_cast(rows, trt.float32).outputs[0]
    shuffle = n.add_shuffle(count)
    shuffle.reshape_dims = (1, 1)
    return stack.binary(x, shuffle.outputs[0], "DIV")


@pytest.mark.parametrize("inner", [across_tokens, softmax_over_tokens, times_itself, shifted, divided_by_tokens])
def test_row_mixing_layer_is_fused_but_not_split(inner: Any) -> None:
    result = same_as_stock(lambda rank: Stack(rank=rank, inner=inner))
    assert result.mode == "fuse"
    assert len(result.plan.sites) == 4
    assert any(r.startswith("inside the region:") for r in refused(result, "split"))


def narrowed(stack: Stack, index: int, x: trt.ITensor) -> trt.ITensor:
    """Row-wise slices with a size taken from the shape, concatenated back: as a fused MLP does it."""
    n = stack.network
    rows = n.add_gather(n.add_shape(x).outputs[0], stack.const([0], f"{index}/zero", trt.int64), 0).outputs[0]
    half = stack.ffn // 2
    parts = []
    for start in (0, half):
        layer = n.add_slice(x, (0, start), (0, 0), (1, 1))
        size = n.add_concatenation([rows, stack.const([half], f"{index}/{start}/half", trt.int64)])
        layer.set_input(2, size.outputs[0])
        parts.append(layer.outputs[0])
    joined = n.add_concatenation(parts)
    joined.axis = 1
    return joined.outputs[0]


def test_row_wise_slices_are_split() -> None:
    """Negative control of the refusals above: the same kinds of layers, used row by row."""
    assert same_as_stock(lambda rank: Stack(rank=rank, inner=narrowed)).mode == "weave"


def unknown_plugin(stack: Stack, index: int, x: trt.ITensor) -> trt.ITensor:
    if index != 1:
        return x
    spec = trt.PluginSpec("Mystery", "1", "test", v2=True, fields=(), outputs=lambda _f, i: [i[0]])
    plugin = trt.PluginCreator(spec).create_plugin("mystery", [])
    return stack.network.add_plugin_v2([x], plugin).outputs[0]


def test_unknown_plugin_is_not_split() -> None:
    network = Stack(inner=unknown_plugin).build()
    result = weave(network, options())
    assert result.mode == "fuse"
    assert any("Mystery is not known to act on each token alone" in r for r in refused(result, "split"))


def other_rows(stack: Stack, index: int, x: trt.ITensor) -> trt.ITensor:
    """A per-token input that is not computed from the region's entry."""
    if index != 0:
        return x
    extra = stack.network.add_input("extra", stack.dtype, (-1, stack.ffn))
    return stack.binary(x, extra, "SUM")


def test_per_token_input_is_not_split() -> None:
    network = Stack(inner=other_rows).build()
    result = weave(network, options())
    assert result.mode == "fuse"
    assert any("'extra'" in r for r in refused(result, "split"))


def test_result_inside_the_region_read_outside() -> None:
    def leak(stack: Stack, index: int, x: trt.ITensor) -> trt.ITensor:
        if index == 1:
            x.name = "inner"
            stack.network.mark_output(x)
        return x

    result = same_as_stock(lambda rank: Stack(rank=rank, inner=leak))
    assert result.mode == "fuse"
    assert any("'inner' is read outside" in r for r in refused(result, "split"))


def test_table_that_never_splits() -> None:
    result = same_as_stock(lambda rank: Stack(rank=rank), table=table(min_tokens=1024))
    assert result.mode == "fuse"
    assert refused(result, "split") == ["it splits no step of up to 256 tokens"]


def test_splitting_switched_off() -> None:
    result = same_as_stock(lambda rank: Stack(rank=rank), split=False)
    assert result.mode == "fuse"
    assert refused(result, "split") == ["splitting is switched off"]


def test_gamma_stored_as_a_row() -> None:
    """Plain TensorRT networks keep the weight as [1, hidden]: it is flattened, not refused."""

    class Row(Stack):
        def norm_weight(self, index: int) -> trt.ITensor:
            return self.const(self.gamma(index)[None, :], f"norm{index}/gamma")

    assert same_as_stock(lambda rank: Row(rank=rank)).mode == "weave"


def test_norm_with_unreadable_epsilon() -> None:
    class Lazy(Stack):
        def const(self, values: Any, name: str, dtype: trt.DataType | None = None) -> trt.ITensor:
            if not name.endswith("/eps"):
                return super().const(values, name, dtype)
            tensor: trt.ITensor = seam.constant(self.network, None, (1, 1), dtype or self.dtype, name)
            return tensor

    network = Lazy().build()
    result = weave(network, options())
    assert result.mode == "stock"
    assert all("epsilon" in r for r in refused(result, "fuse"))
