"""The tuner's parts: intervals of few samples, the space of candidates, and the check of a table."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.tuning import CONFIG, SHAPES, SPACE, FakeRunner, bowl, run_on_ranks, run_tuner

from trtllm_tokenweave.comm import SingleComm
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableRow, TuningTable
from trtllm_tokenweave.tune.candidates import Candidate, Space
from trtllm_tokenweave.tune.check import HELD_OUT, choice_of, even_split, held_out, jitter
from trtllm_tokenweave.tune.measure import Run
from trtllm_tokenweave.tune.statistics import centre_interval, relative_difference, spread, worst_difference
from trtllm_tokenweave.tune.store import Record
from trtllm_tokenweave.waves import table_key

# ---- statistics


def test_the_extremes_of_six_enclose_the_centre_and_those_of_five_do_not_surely() -> None:
    found = centre_interval([3, 1, 6, 2, 5, 4])
    assert (found.low, found.median, found.high) == (1, 3.5, 6)
    assert centre_interval([1, 2, 3, 4, 5]).low == -math.inf
    # 99 % need eight.
    assert centre_interval(range(7), 0.99).high == math.inf
    assert centre_interval(range(8), 0.99).high == 7


@pytest.mark.parametrize(("count", "critical"), [(6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (15, 25), (20, 52), (25, 89)])
def test_intervals_are_those_of_the_tables_of_wilcoxons_signed_ranks(count: int, critical: int) -> None:
    """The tables' critical values, two-sided at 5 %: the interval leaves out so many means of two at each end."""
    values = [float(1 << i) for i in range(count)]
    means = sorted((x + y) / 2 for i, x in enumerate(values) for y in values[i:])
    found = centre_interval(values)
    assert (found.low, found.high) == (means[critical], means[-1 - critical])


def test_intervals_hold_the_centre_as_often_as_they_say() -> None:
    noise = random.Random(1)
    for count in (8, 15, 24):
        held = narrow = 0
        for _ in range(1000):
            # As ratios of two candidates with the same noise are: alike to both sides, with outliers.
            found = centre_interval([noise.expovariate(1) - noise.expovariate(1) for _ in range(count)])
            held += found.low <= 0 <= found.high
            narrow += found.low <= 0.4 <= found.high
        assert 935 <= held <= 985
        assert narrow < held


def test_differences_are_of_pairs() -> None:
    drifting = [1.0 + i / 10 for i in range(8)]
    found = relative_difference([0.9 * x for x in drifting], drifting)
    assert found.low == pytest.approx(-0.1)
    assert found.high == pytest.approx(-0.1)
    assert spread([2.0]) == (2.0, 2.0)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)


def test_intervals_over_two_counts_hold_the_mean_as_often_as_they_say() -> None:
    noise = random.Random(2)
    for count in (8, 16):
        held = 0
        for _ in range(1000):
            # Centres of 0.05 and -0.01 at the two counts.
            a = [1 + 0.06 * (i % 2 == 0) - 0.01 + noise.gauss(0, 0.01) for i in range(count)]
            found = relative_difference(a, [1.0] * count, turns=2)
            held += found.low <= 0.02 <= found.high
        assert 930 <= held <= 985


def test_differences_over_two_counts_are_those_of_the_counts_on_average() -> None:
    """Three of four pairs at the first count would else make it the row's; and what counts differ by is no noise."""
    a, b = [0.9, 1.04, 0.9, 1.04, 0.9, 1.04, 0.9, 1.04], [1.0] * 8
    found = relative_difference(a, b, turns=2)
    assert (found.low, found.median, found.high) == pytest.approx((-0.03, -0.03, -0.03))
    assert relative_difference(a, b).high > 0
    assert relative_difference([0.9, 1.0, 0.9], [1.0] * 3, turns=2).median == pytest.approx(-0.05)
    assert worst_difference(a, b, 2) == pytest.approx(0.04)
    assert worst_difference(a, b, 1) == pytest.approx(relative_difference(a, b).median)


# ---- candidates


def test_names_say_all_that_differs() -> None:
    usual = LaunchConfig(ctas=16)
    assert str(Candidate(None, usual, usual)) == "fuse 16/16"
    other = LaunchConfig(ctas=8, threads=512, gemm_sms=120)
    assert str(Candidate(64, usual, other)) == "+64 16/8x512g120"
    assert str(Candidate(0, LaunchConfig(fabric="peer", ctas=16), usual)) == "+0 peer:16/16"
    every = [*SPACE.everything(8192, 64)]
    assert len({str(c) for c in every}) == len(every)


@pytest.mark.parametrize(
    ("tokens", "candidate", "reason"),
    [
        (4096, SPACE.woven(128, 16), ""),
        (4096, SPACE.fuse(132), ""),
        (4096, SPACE.woven(128, 6), "no such launch"),
        (1024, SPACE.woven(512, 16), "no suffix"),
        (1025, SPACE.woven(512, 16), "no suffix"),
        (1100, SPACE.woven(448, 16), ""),
    ],
)
def test_admission(tokens: int, candidate: Candidate, reason: str) -> None:
    found = SPACE.refusal(tokens, candidate)
    assert found == reason or (reason and reason in found)


def test_a_small_gpu_admits_fewer_ctas() -> None:
    small = replace(SPACE, sms=34)
    assert small.alone == (16, 32)
    assert Space(sms=8).alone == (8,)
    assert "no SMs" in Space(ctas=(16, 32), sms=32).refusal(4096, Space().woven(0, 32))
    assert small.refusal(4096, small.woven(0, 32)) == ""


def test_every_admitted_candidate_can_be_put_into_a_table() -> None:
    for tokens in (1024, 1280, 8192):
        for candidate in SPACE.everything(tokens, 64):
            row = TableRow(
                tokens=Bucket(lo=tokens - 255, hi=tokens),
                mode=candidate.mode,
                split_offset=candidate.offset or 0,
                attention=candidate.attention,
                mlp=candidate.mlp,
            )
            table = TuningTable(key=table_key(CONFIG, 2), rows=(row,))
            assert choice_of(table, SPACE, tokens) == candidate
            assert candidate.prefix(tokens, 256) <= 0.75 * tokens or candidate.offset is None


def test_neighbours_are_one_move_away_and_lead_everywhere() -> None:
    at = SPACE.woven(128, 16)
    moved = SPACE.neighbours(4096, at, 128)
    assert {c.offset for c in moved} == {0, 128, 256}
    assert {(c.attention.ctas, c.mlp.ctas) for c in moved if c.offset == 128} == {
        (12, 12),
        (20, 20),
        (12, 16),
        (20, 16),
        (16, 12),
        (16, 20),
    }
    assert [str(c) for c in SPACE.neighbours(4096, SPACE.fuse(64), 128)] == ["fuse 32/32", "fuse 96/96"]
    reached, todo = {at}, [at]
    while todo:
        for candidate in SPACE.neighbours(2048, todo.pop(), 64):
            if candidate not in reached:
                reached.add(candidate)
                todo.append(candidate)
    assert set(SPACE.everything(2048, 64)) - {SPACE.fuse(n) for n in SPACE.alone} <= reached
    budget = Space(gemm_sms=(116, 124))
    assert {c.mlp.gemm_sms for c in budget.neighbours(4096, budget.woven(0, 16), 64)} == {116, 124}


def test_seeds_begin_with_what_won_elsewhere_and_hold_the_even_split() -> None:
    won = Candidate(192, SPACE.launch(8), SPACE.launch(12))
    seeds = SPACE.seeds(4096, SHAPES, [won, SPACE.fuse()])
    assert seeds[0] == won
    assert Candidate(0, won.attention, won.mlp) in seeds
    assert max(c.offset or 0 for c in seeds) == max(SPACE.offsets(4096))
    assert len(seeds) == len(set(seeds))
    # An offset that leaves no suffix here is no seed here.
    assert all(not SPACE.refusal(512, c) for c in SPACE.seeds(512, SHAPES, [Candidate(448, won.attention, won.mlp)]))


def test_the_exhaustive_sweep_is_the_grid() -> None:
    assert SPACE.offsets(4096) == tuple(range(0, 1025, 128))
    assert len(SPACE.everything(4096)) == len(SPACE.fuse_ctas) + len(SPACE.ctas) * 9


# ---- the check of a table


def tuned_table() -> TuningTable:
    return run_tuner(FakeRunner(bowl), counts=tuple(range(1024, 4097, 256))).table


def run_of(runner: FakeRunner, said: list[str] | None = None) -> Run:
    say = (lambda _: None) if said is None else said.append
    return Run(SingleComm(), runner, Record(key={}), runner.clock, 0.0, None, say)


def test_held_out_counts_are_not_tuned_ones() -> None:
    assert len(HELD_OUT) == 10
    assert not [n for n in HELD_OUT if n % 256 == 0]
    assert [n for n in HELD_OUT if n % 64]


def test_the_check_finds_a_good_table_good_and_a_bad_one_bad() -> None:
    said: list[str] = []
    good = tuned_table()
    rows = list(held_out(good, SPACE, run_of(FakeRunner(bowl, noise=0.002), said), (1400, 2240)))
    assert len(said) == 2
    for row in rows:
        assert row["chosen_ms"] <= 1.02 * row["best_ms"]
        assert row["chosen_over_fuse_only"][2] < 1
    bad = good.model_copy(
        update={"rows": tuple(r.model_copy(update={"attention": LaunchConfig(ctas=32)}) for r in good.rows)}
    )
    (row,) = held_out(bad, SPACE, run_of(FakeRunner(bowl, noise=0.002)), (2240,))
    assert row["chosen"].endswith("32/16")
    assert row["chosen_over_best"][0] > 1.005


def test_the_check_refuses_what_the_engine_does_not_hold_and_wrong_results() -> None:
    table = tuned_table()
    with pytest.raises(UserError, match="no such launch configuration"):
        list(held_out(table, Space(ctas=(4, 8)), run_of(FakeRunner(bowl)), (2240,)))
    name = str(choice_of(table, SPACE, 2240))
    with pytest.raises(UserError, match="wrong result"):
        list(held_out(table, SPACE, run_of(FakeRunner(bowl, wrong={name: 1.0})), (2240,)))


def test_jitter_compares_the_same_launch_at_half() -> None:
    table = tuned_table()
    choice = choice_of(table, SPACE, 2048)
    assert even_split(table, SPACE, 2048) == Candidate(0, choice.attention, choice.mlp)
    rows = list(jitter(table, SPACE, run_of(FakeRunner(bowl)), (2048, 2112)))
    assert [row["num_tokens"] for row in rows] == [2048, 2112]
    assert all(row["tuned_ms"] < row["even_ms"] < row["fuse_only_ms"] for row in rows)
    # Below the table's threshold nothing is split, and the even split is still drawn.
    (row,) = jitter(table, SPACE, run_of(FakeRunner(bowl)), (960,))
    assert row["tuned"] == "fuse 132/132"
    assert row["even"].startswith("+0")


def test_jitter_refuses_what_gives_a_wrong_result() -> None:
    table = tuned_table()
    for wrong in (choice_of(table, SPACE, 2048), even_split(table, SPACE, 2048)):
        runner = FakeRunner(bowl, wrong={str(wrong): 1.0})
        with pytest.raises(UserError, match=f"a wrong result for 2048 tokens as {re.escape(str(wrong))}"):
            list(jitter(table, SPACE, run_of(runner), (2048,)))


def test_ranks_check_alike(tmp_path: Path) -> None:
    first, second = run_on_ranks([FakeRunner(bowl, seed=i, noise=0.01) for i in range(2)], counts=(1024,))
    assert first.choices == second.choices
