"""Networks that look weavable and are not quite, or that once were woven wrongly: same results, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.stack import PLAIN, Stack, options, run

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave import trt as seam
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.passes import WeaveResult, make_plan, names, verify, weave
from trtllm_tokenweave.plugin_specs import Half
from trtllm_tokenweave.recorder.trtllm_plugins import AllReduceStrategy

Make = Callable[[int], trt.RecordedNetwork]
Inputs = dict[str, NDArray[Any]]


def x(n: int = 37, width: int = 16) -> Inputs:
    return {"x": np.random.default_rng(n).integers(-4, 5, (n, width)).astype(np.float32)}


def woven_like_stock(make: Make, inputs: Inputs, seeds: int = 6, **fields: Any) -> WeaveResult:
    """Weave two ranks, compare with the stock run in recorded order and under ``seeds`` schedules."""
    stock, woven = [make(rank) for rank in range(2)], [make(rank) for rank in range(2)]
    results = [weave(network, options(rank=rank, **fields)) for rank, network in enumerate(woven)]
    assert verify(woven[0]) == []
    expected = run(stock, inputs, exact=True)
    for seed in (None, *range(seeds)):
        for a, b in zip(expected, run(woven, inputs, exact=True, seed=seed), strict=True):
            for name in a:
                np.testing.assert_array_equal(a[name], b[name], err_msg=f"output {name}, seed {seed}")
    return results[0]


def reasons(result: WeaveResult) -> str:
    return " | ".join(r.reason for r in result.plan.refused)


def mlp(stack: Stack, y: trt.ITensor, index: int) -> trt.ITensor:
    n = stack.network
    up = n.add_matrix_multiply(y, PLAIN, stack.weight("up", index, (16, 24)), PLAIN).outputs[0]
    act = n.add_activation(up, trt.ActivationType.RELU).outputs[0]
    return n.add_matrix_multiply(act, PLAIN, stack.weight("down", index, (24, 16)), PLAIN).outputs[0]


def all_reduce(stack: Stack, value: trt.ITensor, name: str, workspace: trt.ITensor | None = None) -> trt.ITensor:
    fields: dict[str, Any] = dict.fromkeys(("fusion_op", "affine", "bias", "scale"), 0)
    fields["strategy"] = int(AllReduceStrategy.NCCL if workspace is None else AllReduceStrategy.AUTO)
    fields |= {"group": np.arange(stack.tp_size), "type_id": value.dtype.value, "eps": 1e-5}
    key, inputs = ("AllReduce", "1", "tensorrt_llm"), [value] if workspace is None else [value, workspace]
    made: trt.ITensor = seam.add_plugin(stack.network, key, name, fields, inputs).outputs[0]
    return made


def finish(stack: Stack, tensor: trt.ITensor, name: str = "out") -> trt.RecordedNetwork:
    tensor.name = name
    stack.network.mark_output(tensor)
    return stack.network


def sites(stack: Stack, h: trt.ITensor, count: int = 3) -> trt.RecordedNetwork:
    y = stack.norm(h, 0)
    for index in range(count):
        h, y = stack.site(index, f"mlp{index}", mlp(stack, y, index), h)
    return finish(stack, y)


def embedding(stack: Stack, name: str, rows: int, seed: int) -> trt.ITensor:
    return stack.const(np.random.default_rng(seed).integers(-3, 4, (rows, 16)), name)


def test_tokens_are_counted_at_the_entry_not_at_an_input_that_looks_like_it() -> None:
    """input_ids [batch, length] is flattened: its first dimension is not the number of tokens."""

    def make(rank: int) -> trt.RecordedNetwork:
        stack = Stack(rank=rank)
        ids = stack.network.add_input("input_ids", trt.int32, (-1, -1))
        flat = stack.network.add_shuffle(ids)
        flat.reshape_dims = (-1,)
        return sites(stack, stack.network.add_gather(embedding(stack, "emb", 32, 8), flat.outputs[0], 0).outputs[0])

    for shape in ((4, 9), (1, 36), (36, 1)):
        ids = (np.arange(36, dtype=np.int32) % 32).reshape(shape)
        assert woven_like_stock(make, {"input_ids": ids}).mode == "weave"


def test_tokens_are_not_the_rows_of_an_embedding_table_that_is_an_input() -> None:
    def make(rank: int) -> trt.RecordedNetwork:
        stack = Stack(rank=rank)
        rows = stack.network.add_input("table", trt.float32, (-1, 16))
        ids = stack.network.add_input("tokens", trt.int32, (-1,))
        return sites(stack, stack.network.add_gather(rows, ids, 0).outputs[0])

    inputs = {"table": x(8)["x"], "tokens": np.arange(37, dtype=np.int32) % 8}
    assert woven_like_stock(make, inputs).mode == "weave"


def test_input_ids_of_an_embedding_stand_for_the_step() -> None:
    stack = Stack()
    ids = stack.network.add_input("input_ids", trt.int32, (-1,))
    network = sites(stack, stack.network.add_gather(embedding(stack, "emb", 32, 8), ids, 0).outputs[0])
    assert make_plan(network, options()).tokens_ref == "input_ids"


def test_and_of_an_embedding_that_is_summed_over_the_ranks() -> None:
    stack = Stack()
    ids = stack.network.add_input("input_ids", trt.int32, (-1,))
    words = stack.network.add_gather(embedding(stack, "emb", 32, 8), ids, 0).outputs[0]
    network = sites(stack, all_reduce(stack, words, "embedding/all_reduce"))
    assert make_plan(network, options()).tokens_ref == "input_ids"


def test_but_not_the_workspace_of_the_sum() -> None:
    def make(rank: int) -> trt.RecordedNetwork:
        stack = Stack(rank=rank)
        memory = stack.network.add_input("all_reduce_workspace", trt.int64, (-1,))
        ids = stack.network.add_input("input_ids", trt.int32, (-1,))
        words = stack.network.add_gather(embedding(stack, "emb", 32, 8 + rank), ids, 0).outputs[0]
        return sites(stack, all_reduce(stack, words, "embedding/all_reduce", memory))

    inputs: dict[str, Any] = {
        "all_reduce_workspace": np.zeros(10, np.int64),
        "input_ids": np.arange(37, dtype=np.int32) % 32,
    }
    assert woven_like_stock(make, inputs).plan.tokens_ref == "input_ids"


def test_a_branch_that_does_not_come_from_the_residual_stream_is_not_split() -> None:
    """Vocabulary embedding reduced over ranks, position embedding as the residual."""

    def make(rank: int) -> trt.RecordedNetwork:
        stack = Stack(rank=rank)
        n = stack.network
        ids, positions = (n.add_input(name, trt.int32, (-1,)) for name in ("input_ids", "position_ids"))
        words = n.add_gather(embedding(stack, "vocab", 32, 10 + rank), ids, 0).outputs[0]
        places = n.add_gather(embedding(stack, "positions", 64, 8), positions, 0).outputs[0]
        return sites(stack, stack.binary(places, all_reduce(stack, words, "embedding/all_reduce"), "SUM"))

    ids = np.arange(37, dtype=np.int32)
    result = woven_like_stock(make, {"input_ids": ids % 32, "position_ids": ids})
    assert result.mode == "fuse"
    assert "not computed from the region's tokens" in reasons(result)


def gemm(network: trt.RecordedNetwork, a: trt.ITensor, b: trt.ITensor, transb: int) -> trt.ITensor:
    fields = {"transa": 0, "transb": transb, "pad_lda": 0, "pad_ldb": 0, "type_id": 0, "use_fp8": 0, "alpha": 1.0}
    key = ("Gemm", "1", "tensorrt_llm")
    made: trt.ITensor = seam.add_plugin(network, key, f"gemm_{network.num_layers}", fields, [a, b]).outputs[0]
    return made


def test_gemm_of_tokens_with_tokens_is_not_split() -> None:
    def gram(stack: Stack, index: int, value: trt.ITensor) -> trt.ITensor:
        if index != 2:
            return value
        return gemm(stack.network, gemm(stack.network, value, value, 1), value, 0)

    result = woven_like_stock(lambda rank: Stack(rank=rank, inner=gram).build(), x())
    assert result.mode == "fuse"
    assert "input 1 of plugin Gemm depends on the region's tokens" in reasons(result)


def test_residual_read_by_the_next_site_and_by_an_unfused_one() -> None:
    def make(rank: int) -> trt.RecordedNetwork:
        stack = Stack(rank=rank)
        h = stack.network.add_input("x", trt.float32, (-1, 16))
        s0, y0 = stack.site(0, "mlp0", mlp(stack, stack.norm(h, 0), 0), h)
        _, y1 = stack.site(1, "mlp1", mlp(stack, y0, 1), s0)
        finish(stack, stack.binary(s0, all_reduce(stack, mlp(stack, y0, 7), "aux/all_reduce"), "SUM"), "aux")
        return finish(stack, y1)

    # Its two branches have collectives without an order of their own, stock as well as fused: recorded order only.
    assert len(woven_like_stock(make, x(), seeds=0).plan.sites) == 2


def post_norm(rank: int) -> trt.RecordedNetwork:
    """h = norm(h + all_reduce(mlp(h))): the residual of a site is the norm of the one before."""
    stack = Stack(rank=rank)
    h = stack.norm(stack.network.add_input("x", trt.float32, (-1, 16)), 0)
    for index in range(3):
        branch = all_reduce(stack, mlp(stack, h, index), f"layer{index}/all_reduce")
        h = stack.norm(stack.binary(h, branch, "SUM"), index + 1)
    return finish(stack, h)


def shared_residual(rank: int) -> trt.RecordedNetwork:
    """Two branches that start from one residual stream."""
    stack = Stack(rank=rank)
    h = stack.network.add_input("x", trt.float32, (-1, 16))
    y = stack.norm(h, 0)
    _, a = stack.site(0, "mlp0", mlp(stack, y, 0), h)
    _, b = stack.site(1, "mlp1", mlp(stack, a, 1), h)
    return finish(stack, b)


def reduced_norm(rank: int) -> trt.RecordedNetwork:
    """The all-reduce of a site reads the norm of the site before, with nothing in between."""
    stack = Stack(rank=rank)
    h = stack.network.add_input("x", trt.float32, (-1, 16))
    s, y = stack.site(0, "mlp0", mlp(stack, stack.norm(h, 0), 0), h)
    return finish(stack, stack.site(1, "mlp1", y, s)[1])


@pytest.mark.parametrize("make", [post_norm, shared_residual, reduced_norm])
def test_unusual_residual_streams(make: Make) -> None:
    result = woven_like_stock(make, x())
    assert result.mode in ("fuse", "weave")
    network = make(0)
    weave(network, options())
    assert not [n for n in live(network) if n.plugin_name == "AllReduce"], "replaced collectives must be dead"


def live(network: trt.RecordedNetwork) -> list[Any]:
    from trtllm_tokenweave.network import Graph

    return list(Graph(network).live)


def sizes(stack: Stack, tensor: trt.ITensor, index: int) -> trt.ITensor:
    """A number between 0 and 8 that depends on the step's tokens."""
    rows = stack.network.add_gather(
        stack.network.add_shape(tensor).outputs[0], stack.const([0], f"{index}/zero", trt.int64), 0
    ).outputs[0]
    less = stack.binary(rows, stack.const([20], f"{index}/twenty", trt.int64), "SUB")
    low = stack.binary(less, stack.const([0], f"{index}/low", trt.int64), "MAX")
    return stack.binary(low, stack.const([8], f"{index}/high", trt.int64), "MIN")


def column_slice(stack: Stack, index: int, value: trt.ITensor) -> trt.ITensor:
    if index != 2:
        return value
    n = stack.network
    rows = n.add_gather(n.add_shape(value).outputs[0], stack.const([0], "rows", trt.int64), 0).outputs[0]
    layer = n.add_slice(value, (0, 0), (0, 0), (1, 1))
    layer.set_input(1, n.add_concatenation([stack.const([0], "a", trt.int64), sizes(stack, value, 0)]).outputs[0])
    layer.set_input(2, n.add_concatenation([rows, stack.const([16], "b", trt.int64)]).outputs[0])
    wide = stack.const(np.random.default_rng(5).integers(-2, 3, (16, 24)), "wide")
    return n.add_matrix_multiply(layer.outputs[0], PLAIN, wide, PLAIN).outputs[0]


def test_columns_cut_by_the_number_of_tokens_are_not_split() -> None:
    result = woven_like_stock(lambda rank: Stack(rank=rank, inner=column_slice).build(), x())
    assert result.mode == "fuse"
    assert "slices by numbers that depend on sizes" in reasons(result)


def test_cast_through_integers_is_not_fused_away() -> None:
    class Truncating(Stack):
        def site(self, index: int, kind: str, x: trt.ITensor, h: trt.ITensor) -> tuple[trt.ITensor, trt.ITensor]:
            n = self.network
            whole = n.add_cast(all_reduce(self, x, f"{index}/{kind}/all_reduce"), trt.int32).outputs[0]
            total = self.binary(h, n.add_cast(whole, trt.float32).outputs[0], "SUM")
            return total, self.norm(total, index + 1)

    result = woven_like_stock(lambda rank: Truncating(rank=rank).build(), x())
    assert result.mode == "stock"
    assert "CAST" in reasons(result)


def test_steps_larger_than_the_network_was_woven_for() -> None:
    networks = [Stack(rank=rank).build() for rank in range(2)]
    for rank, network in enumerate(networks):
        weave(network, options(rank=rank, max_num_tokens=32))
    run(networks, x(32))
    with pytest.raises(UserError, match="max_num_tokens"):
        run(networks, x(37))


def test_references_stay_whole_when_the_entry_is_the_input() -> None:
    network = Stack().build()
    weave(network, options())
    starts = [n for n in live(network) if n.plugin_name == "AllReduceRmsNorm"]
    assert {n.inputs[-3] for n in starts} == {"x"}


def untouched(network: trt.RecordedNetwork, **fields: Any) -> WeaveResult:
    """Weave a network that must be refused as a whole, and check that nothing was added."""
    before = network.num_layers
    result = weave(network, options(**fields))
    assert network.num_layers == before
    return result


def test_all_reduce_read_by_a_reduction() -> None:
    def probe(stack: Stack, index: int, _reduced: trt.ITensor, total: trt.ITensor) -> None:
        if index == 3:
            reduced = all_reduce(stack, total, "probe/all_reduce")
            layer = stack.network.add_reduce(reduced, trt.ReduceOperation.SUM, 2, True)
            finish(stack, layer.outputs[0], "probe")

    assert len(woven_like_stock(lambda rank: Stack(rank=rank, twist=probe).build(), x()).plan.sites) == 3


def test_all_reduce_added_to_itself() -> None:
    class Doubled(Stack):
        def site(self, index: int, kind: str, x: trt.ITensor, h: trt.ITensor) -> tuple[trt.ITensor, trt.ITensor]:
            reduced = all_reduce(self, x, f"{index}/{kind}/all_reduce")
            del h
            total = self.binary(reduced, reduced, "SUM")
            return total, self.norm(total, index + 1)

    assert untouched(Doubled().build()).mode == "stock"


def test_scalar_gamma_and_large_epsilon() -> None:
    class Scalar(Stack):
        def norm_weight(self, index: int) -> trt.ITensor:
            return self.const([[2.0]], f"norm{index}/gamma")

    result = untouched(Scalar().build())
    assert "no constant vector of 16" in reasons(result)

    class Large(Stack):
        def const(self, values: Any, name: str, dtype: trt.DataType | None = None) -> trt.ITensor:
            return super().const([[2.0]] if name.endswith("/eps") else values, name, dtype)

    assert "epsilon 2.0 is outside" in reasons(untouched(Large().build()))


def test_one_row_added_to_every_token() -> None:
    class Broadcast(Stack):
        def site(self, index: int, kind: str, x: trt.ITensor, h: trt.ITensor) -> tuple[trt.ITensor, trt.ITensor]:
            del x
            row = self.network.add_input(f"row{index}", self.dtype, (1, self.hidden))
            return super().site(index, kind, row, h)

    result = untouched(Broadcast().build())
    assert "differ" in reasons(result)


def transposed_reshape(stack: Stack, index: int, value: trt.ITensor) -> trt.ITensor:
    first = stack.network.add_shuffle(value)
    first.reshape_dims = (0, 4, 6)
    first.second_transpose = (0, 2, 1)
    back = stack.network.add_shuffle(first.outputs[0])
    back.reshape_dims = (0, 24)
    return back.outputs[0]


def uneven_concatenation(stack: Stack, index: int, value: trt.ITensor) -> trt.ITensor:
    n = stack.network
    rows = n.add_gather(n.add_shape(value).outputs[0], stack.const([0], f"{index}/zero", trt.int64), 0).outputs[0]
    parts = []
    for start, width in ((8, 16), (0, 8)):
        layer = n.add_slice(value, (0, start), (0, 0), (1, 1))
        width_const = stack.const([width], f"{index}/{start}/width", trt.int64)
        layer.set_input(2, n.add_concatenation([rows, width_const]).outputs[0])
        parts.append(layer.outputs[0])
    joined = n.add_concatenation(parts)
    joined.axis = 1
    return joined.outputs[0]


@pytest.mark.parametrize("inner", [transposed_reshape, uneven_concatenation])
def test_layers_whose_attributes_must_be_copied_in_order(inner: Any) -> None:
    assert woven_like_stock(lambda rank: Stack(rank=rank, inner=inner).build(), x()).mode == "weave"


def test_fixed_number_of_tokens_with_a_dead_reader() -> None:
    class Fixed(Stack):
        def build(self) -> trt.RecordedNetwork:
            add_input = self.network.add_input
            h = add_input("x", self.dtype, (8, self.hidden))
            y = self.norm(h, 0)
            for index in range(2):
                h, y = self.site(index, f"mlp{index}", mlp(self, y, index), h)
                self.network.add_elementwise(h, h, trt.ElementWiseOperation.SUM)
            return finish(self, y)

    result = woven_like_stock(lambda rank: Fixed(rank=rank).build(), x(8))
    assert result.mode == "fuse"
    assert "number of tokens is fixed" in reasons(result)


def test_shape_of_a_host_tensor_is_harmless_and_old_faults_are_not_ours() -> None:
    network = Stack().build()
    host = network.add_input("host_request_types", trt.int32, (-1,))
    finish_shape = network.add_shape(host).outputs[0]
    finish_shape.name = "sequences"
    network.mark_output(finish_shape)
    assert weave(network, options()).mode == "weave"
    broken = Stack().build()
    lengths = broken.add_input("host_context_lengths", trt.int32, (-1,))
    cast = broken.add_cast(lengths, trt.int64).outputs[0]
    cast.name = "lengths"
    broken.mark_output(cast)
    assert weave(broken, options()).mode == "weave"
    assert any("which is no plugin" in problem for problem in verify(broken))


def test_two_layers_of_one_name() -> None:
    network = Stack().build()
    network.layers[3].name = network.layers[4].name = "twice"
    with pytest.raises(UserError, match="two layers have this name"):
        weave(network, options())


def test_stock_collective_beside_the_chain_rules_a_split_out() -> None:
    def make(rank: int) -> trt.RecordedNetwork:
        stack = Stack(rank=rank)
        network = stack.build()
        finish(stack, all_reduce(stack, network.get_input(0), "beside/all_reduce"), "beside")
        return network

    network = make(0)
    result = weave(network, options())
    assert result.mode == "fuse"
    assert "neither before the first site nor after the last" in reasons(result)


def test_a_fault_of_the_pass_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the checks inside weave: a step that breaks the network raises."""
    from trtllm_tokenweave import passes

    def damage(network: trt.RecordedNetwork, _plan: Any) -> None:
        join = next(layer for layer in network.layers if layer.name == names.join(0, Half.PREFIX))
        join.set_input(2, join.inputs[0])  # type: ignore[arg-type]

    monkeypatch.setattr(passes, "PASSES", (*passes.PASSES, damage))
    with pytest.raises(TokenWeaveError, match=r"after damage: .* is not kept alive"):
        weave(Stack().build(), options())
