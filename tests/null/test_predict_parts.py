"""Pieces of the prediction by hand: curves, fits, GEMM times, two streams, attention, the clock."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.predict import Workload, load_gemms, load_machine
from trtllm_tokenweave.predict.curve import Curve, fit_positive
from trtllm_tokenweave.predict.data import FOLDER, GemmData
from trtllm_tokenweave.predict.gemm import GemmModel
from trtllm_tokenweave.predict.step import causal_pairs
from trtllm_tokenweave.predict.streams import Op, Streams
from trtllm_tokenweave.predict.variants import Predictor, slowdown
from trtllm_tokenweave.waves import GemmShape, gemm_shapes

SMS = 132


def gemms() -> GemmData:
    return load_gemms(FOLDER / "gemm_h200.json")


def test_curve() -> None:
    # The third point is a mistake of the library: 300 tokens cost what 400 do at most.
    curve = Curve.through([(100, 11), (200, 21), (300, 99), (400, 41)], less=1)
    assert [curve(x) for x in (0, 100, 150, 200, 300, 400)] == pytest.approx([10, 10, 15, 20, 40, 40])
    # Least squares through (200, 20), (300, 40), (400, 40).
    assert curve(500) == pytest.approx(50)
    assert Curve.through([(10, 5), (100, 50)])(200) == pytest.approx(100)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0.1, 1e4)), min_size=2, unique_by=lambda p: p[0]))
def test_curves_never_fall(points: list[tuple[int, float]]) -> None:
    curve = Curve.through(points)
    values = [curve(x) for x in range(0, 20_000, 97)]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(values))


def test_fit_finds_what_made_the_numbers() -> None:
    features = [(1.0, x, x * x) for x in (1.0, 2.0, 5.0, 9.0)]
    fit = fit_positive(features, [3 + 2 * x + 10 for _, x, _ in features], known=[10.0] * 4)
    assert fit.coefficients == pytest.approx((3, 2, 0), abs=1e-9)
    assert fit.worst < 1e-9
    # The best of all would be negative.
    assert fit_positive([(1.0, 1.0), (1.0, 2.0)], [2.0, 1.0]).coefficients[1] == 0


def test_a_measured_gemm_is_its_curve() -> None:
    model, qkv = GemmModel(gemms()), gemm_shapes(preset("llama-3.3-70b"), 8)[0]
    assert model.is_measured(qkv)
    assert model.us(qkv, 4096) == pytest.approx(124.3 - model.data.event_us)
    assert model.us(qkv, 0) == 0


def test_another_gemm_is_its_neighbour_carried_over() -> None:
    model = GemmModel(gemms())
    measured, near = GemmShape("", "mlp", 7168, 8192), GemmShape("", "mlp", 7392, 8192)
    assert not model.is_measured(near)
    assert 1.0 < model.us(near, 4096) / model.us(measured, 4096) < 1.1
    # Left out of the data, a curve that is in it comes back within what the documentation says.
    data = model.data
    for curve in data.curves:
        others = data.model_copy(update={"curves": tuple(c for c in data.curves if c is not curve)})
        shape = GemmShape("", "mlp", curve.n, curve.k)
        assert GemmModel(others).us(shape, 4096) == pytest.approx(model.us(shape, 4096), rel=0.25)
    experts = GemmShape("", "mlp", 4096, 6144, groups=8, rows_per_token=2)
    assert model.us(experts, 4096) == pytest.approx(model.us(GemmShape("", "mlp", 4096, 6144), 8192), rel=0.25)


@pytest.mark.parametrize(("name", "tp_size"), [("llama-3.3-70b", 8), ("qwen2.5-72b", 8), ("llama-3.1-8b", 4)])
def test_gemms_never_get_faster_with_tokens(name: str, tp_size: int) -> None:
    model = GemmModel(gemms())
    for shape in gemm_shapes(preset(name), tp_size):
        times = [model.us(shape, tokens) for tokens in range(1, 9000, 61)]
        assert times == sorted(times)


def run(streams: Streams, *ops: Op) -> float:
    for op in ops:
        streams.run(op)
    return streams.now


@pytest.mark.parametrize("ctas", [-1, 132, 133])
def test_a_collective_that_leaves_no_sms(ctas: int) -> None:
    with pytest.raises(UserError, match=rf"ctas: {ctas} is outside of 0\.\.131\. Fix: give the collective fewer"):
        Streams(SMS).start("a", 7.0, ctas)


@pytest.mark.parametrize("ctas", [-1, 5, 133])
def test_a_collective_of_ctas_that_were_not_measured(ctas: int) -> None:
    predictor = Predictor(load_machine("h200-peer"), Workload(preset("llama-3.3-70b"), 2))
    for refused in (lambda: predictor.fuse_only_us(4096, ctas), lambda: predictor.woven(4096, 0, 8, ctas)):
        with pytest.raises(UserError, match=rf"ctas: {ctas} CTAs were not measured on h200-peer\. Fix: choose one of"):
            refused()


def test_streams_alone() -> None:
    assert run(Streams(SMS), Op(10.0, 132), Op(5.0)) == 15
    streams = Streams(SMS, fork_us=2.0)
    streams.start("a", 7.0, 8)
    streams.start("b", 5.0, 8)
    assert streams.now == 4
    streams.join("a")
    assert streams.now == 7
    assert streams.finish() == 12
    with pytest.raises(KeyError):
        streams.join("a")


@pytest.mark.parametrize(
    ("tiles", "held_us", "end"),
    [
        (124, 1000.0, 10.0),  # the SMs left are enough
        (132, 1000.0, 20.0),  # eight tiles wait for a second wave,
        (132, 5.0, 15.0),  # or for the collective's SMs
        (264, 5.0, 25.0),  # 124 twice, and 8 twice from 5 us on
        (264, 1000.0, 30.0),
        (1, 1000.0, 10.0),
    ],
)
def test_a_gemm_loses_whole_tiles_to_a_collective(tiles: int, held_us: float, end: float) -> None:
    streams = Streams(SMS)
    streams.start("c", held_us, 8)
    assert run(streams, Op(10.0 * -(-tiles // SMS), tiles)) == pytest.approx(end)


@pytest.mark.parametrize(
    ("tiles", "held_us", "end"),
    [
        (124, 1000.0, 10.0),  # there are SMs for all CTAs
        (128, 1000.0, 20.0),  # four CTAs wait: for the first of the others
        (128, 5.0, 15.0),  # or for the collective
        (320, 5.0, 30.0),  # the last 8 CTAs have 2 tiles of 3, so that there is time for the collective
        (320, 12.0, 32.0),  # up to a tile
        (320, 1000.0, 40.0),
        (389, 5.0, 35.0),  # the last 8 are more than those with 2 tiles
        (396, 5.0, 35.0),
    ],
)
def test_a_dealt_gemm_waits_for_its_last_ctas(tiles: int, held_us: float, end: float) -> None:
    streams = Streams(SMS, dealt=True)
    streams.start("c", held_us, 8)
    assert run(streams, Op(10.0 * -(-tiles // SMS), tiles)) == pytest.approx(end)


def test_a_dealt_gemm_does_not_wait_for_what_is_queued() -> None:
    streams = Streams(SMS, dealt=True)
    streams.start("a", 5.0, 4)
    streams.start("b", 50.0, 8)
    assert run(streams, Op(5.0), Op(10.0, 132)) == pytest.approx(5.0 * 132 / 128 + 20.0, abs=0.2)


@pytest.mark.parametrize("dealt", [False, True])
def test_a_gemm_with_a_budget_loses_nothing_to_a_collective(dealt: bool) -> None:
    for held_us in (0.1, 1000.0):
        streams = Streams(SMS, dealt=dealt)
        streams.start("c", held_us, 8)
        assert run(streams, Op(20.0, 248, budget=124)) == pytest.approx(20.0)
    # Its tiles need a third wave on 124 SMs, with a collective or without.
    assert run(Streams(SMS), Op(20.0, 264, budget=124)) == pytest.approx(30.0)
    streams = Streams(SMS, beside=0.5, dealt=dealt)
    streams.start("c", 10.0, 8)
    assert run(streams, Op(20.0, 248, budget=124)) == pytest.approx(25.0)


def test_other_kernels_lose_their_share() -> None:
    streams = Streams(SMS, beside=0.5)
    streams.start("c", 10.0, 66)
    # A quarter of the speed for 10 us, then all of it.
    assert run(streams, Op(4.0)) == pytest.approx(11.5)
    streams = Streams(SMS, beside=0.5)
    streams.start("c", 10.0, 8)
    assert run(streams, Op(10.0, 124)) == pytest.approx(15.0)


def test_a_second_collective_waits_for_the_first() -> None:
    streams = Streams(SMS)
    streams.start("a", 5.0, 16)
    streams.start("b", 5.0, 8)
    # 116 tiles at once; 8 SMs come at 5 us, the other 8 at 10 us: 8 tiles end at 15, the rest at 20.
    assert run(streams, Op(10.0, 132)) == pytest.approx(20.0)
    streams = Streams(SMS)
    streams.start("a", 5.0, 16)
    streams.start("b", 5.0, 8)
    assert run(streams, Op(10.0, 124)) == pytest.approx(15.0)


OPS = st.lists(st.tuples(st.floats(0.1, 50), st.integers(0, 900), st.floats(0.1, 80), st.integers(1, 16)), max_size=12)


@given(OPS, st.floats(0, 0.3), st.booleans())
def test_overlap_beats_neither_stream(work: list[tuple[float, int, float, int]], beside: float, dealt: bool) -> None:
    streams = Streams(SMS, beside, dealt=dealt)
    compute = sum(us for us, _, _, _ in work)
    communication = sum(us for _, _, us, _ in work)
    for i, (us, tiles, held, ctas) in enumerate(work):
        streams.run(Op(us, tiles))
        before = streams.now
        streams.start(i, held, 2 * ctas)
        assert streams.now == before
    for i in range(len(work)):
        streams.join(i)
    assert streams.finish() == streams.now
    assert streams.now >= max(compute, communication) - 1e-6
    # With 32 SMs of 132 taken for ever, a GEMM needs at most twice the waves that its share of the SMs would.
    assert streams.now <= 2 * SMS / (SMS - 32) * compute / (1 - beside) + communication + 1e-6


LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(LENGTHS, st.floats(0, 1))
def test_halves_attend_to_what_the_step_does(lengths: list[int], share: float) -> None:
    total = sum(lengths)
    cut = round(share * total)
    halves = causal_pairs(lengths, 0, cut) + causal_pairs(lengths, cut, total)
    assert halves == pytest.approx(sum(length**2 / 2 for length in lengths))


def test_the_suffix_attends_to_the_prefix() -> None:
    assert causal_pairs([10], 0, 5) == 12.5
    assert causal_pairs([10], 5, 10) == 37.5
    assert causal_pairs([5, 5], 5, 10) == 12.5
    assert Workload(preset("llama-3.2-1b"), 2, batch=3).sequences(11) == (4, 4, 3)


@given(st.floats(1, 1e3), st.floats(0, 1e3), st.floats(0.1, 1e4))
def test_the_clock_meets_the_limit(compute: float, rest: float, flops: float) -> None:
    def time(slower: float) -> float:
        return compute * slower + rest

    found = slowdown(time, flops, 2.0)
    if flops / time(1.0) <= 2.0:
        assert found == 1
    else:
        assert found**2 * time(found) == pytest.approx(flops / 2.0, rel=1e-3)
    assert slowdown(time, flops, None) == 1


def test_traffic_of_more_ranks() -> None:
    peer, multimem = load_machine("h200-peer"), load_machine("h100-multimem")
    size = 1 << 27
    # 2 (tp - 1) / tp: 1 for two ranks, 1.75 for eight; the switch does it with one.
    assert peer.fused_us(16, size, 8) == pytest.approx(peer.fused_us(16, size * 7 // 4, 2))
    assert multimem.fused_us(16, size, 8) == multimem.fused_us(16, size, 4)
    assert max(peer.beside_ctas) == max(multimem.beside_ctas) == 32


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        ({"sms": 1}, ": sms", "greater than or equal to 2"),
        ({"curves": []}, ": curves", "at least 1"),
        ({"curves": [{"n": 1, "k": 1, "points": [[1, 0.0], [2, 1.0]]}]}, ": curves.0.points.0.1", "greater than 0"),
        ({"curves": [{"n": 1, "k": 1, "points": [[1, 1.0]]}]}, ": curves.0.points", "at least 2"),
        ({"dtype": "int3"}, ": dtype", "bfloat16"),
        ({"more": 1}, ": more", "not permitted"),
        ({"event_us": 31.9}, "", "25.0 us, not longer than event_us 31.9"),
    ],
)
def test_wrong_gemm_files(change: dict[str, object], where: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "gemm.json"
    path.write_text(json.dumps({**gemms().model_dump(mode="json"), **change}))
    with pytest.raises(UserError) as caught:
        load_gemms(path)
    assert caught.value.where == f"{path}{where}"
    assert what in caught.value.what


def test_other_wrong_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_gemms(tmp_path / "none.json")
    with pytest.raises(UserError, match="choose one of h200-peer, h100-multimem"):
        load_machine("abacus")
    with pytest.raises(UserError, match="148 SMs, h200-peer has 132"):
        load_machine("h200-peer", gemms().model_copy(update={"sms": 148}))
    with pytest.raises(UserError, match="no collectives"):
        Workload(preset("llama-3.2-1b"), 1)
    with pytest.raises(UserError, match="float32 was not measured"):
        Workload(preset("llama-3.2-1b").with_dtype("float32"), 2)
    with pytest.raises(UserError, match="attention heads"):
        Workload(preset("llama-3.2-1b"), 64)
