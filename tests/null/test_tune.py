"""The tuner with an injected runner and clock: what it chooses, what it refuses, and that it comes to an end."""

from __future__ import annotations

import math
import statistics
from functools import partial

import pytest
from support.tuning import COUNTS, MHZ, SPACE, Clock, FakeRunner, bowl, run_on_ranks, run_tuner

from trtllm_tokenweave.comm import CommError
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.tune.candidates import Candidate
from trtllm_tokenweave.tune.measure import MAX_QUEUED
from trtllm_tokenweave.tune.search import SAME_OFFSET
from trtllm_tokenweave.tune.tuner import measurements


def losing(num_tokens: int, candidate: Candidate) -> float:
    """Every split takes at least 1 % longer than fuse-only."""
    return bowl(num_tokens, candidate, gain=-0.01)


def best(num_tokens: int) -> float:
    return min(bowl(num_tokens, c) for c in SPACE.everything(num_tokens, 64))


def test_the_search_finds_the_best_without_trying_everything() -> None:
    runner = FakeRunner(bowl)
    tuned = run_tuner(runner)
    for choice in tuned.choices:
        # CTAs of each kind are free, so it may be better than all candidates with equal ones.
        assert bowl(choice.num_tokens, choice.candidate) <= best(choice.num_tokens)
        if choice.num_tokens > 1024:
            assert (choice.candidate.offset, choice.candidate.attention.ctas, choice.candidate.mlp.ctas) == (
                320,
                12,
                16,
            )
    tried = {name for n, name in runner.sampled if n == 4096}
    assert len(tried) < 0.5 * len(SPACE.launches) * len(SPACE.offsets(4096, 64)) ** 0.5
    assert tuned.table.min_tokens == 1024
    assert [(row.tokens.lo, row.tokens.hi) for row in tuned.table.rows] == [(769, 1024), (1025, 2048), (2049, 4096)]
    assert [row.split_offset for row in tuned.table.rows] == [c.candidate.offset for c in tuned.choices]


def test_the_table_does_what_was_chosen() -> None:
    tuned = run_tuner(FakeRunner(bowl))
    for choice in tuned.choices:
        plan = tuned.table.lookup(1, choice.num_tokens)
        assert Candidate.of_plan(plan, tuned.table.granularity) == choice.candidate
        assert Candidate.of_plan(tuned.table.unpack(tuned.table.pack()).lookup(1, choice.num_tokens), 256) == (
            choice.candidate
        )
    assert tuned.table.lookup(1, 1023).suffix == 0


def test_two_runs_give_the_same_table() -> None:
    first, second = (run_tuner(FakeRunner(bowl, noise=0.004, seed=5)) for _ in range(2))
    assert first.table == second.table
    # Other noise may choose otherwise where it does not matter.
    third = run_tuner(FakeRunner(bowl, noise=0.004, seed=6))
    for a, b in zip(first.choices, third.choices, strict=True):
        assert bowl(a.num_tokens, a.candidate) == pytest.approx(bowl(b.num_tokens, b.candidate), rel=0.02)


@pytest.mark.parametrize("seed", range(12))
def test_noise_never_picks_a_losing_split(seed: int) -> None:
    tuned = run_tuner(FakeRunner(losing, noise=0.02, seed=seed))
    assert [choice.candidate.offset for choice in tuned.choices] == [None] * 3
    assert {row.mode for row in tuned.table.rows} == {"fuse"}


def test_a_gain_within_the_noise_is_not_used_and_one_beyond_it_is() -> None:
    for gain, noise, used in ((0.001, 0.003, False), (0.001, 0.0, False), (0.05, 0.003, True)):
        tuned = run_tuner(FakeRunner(partial(bowl, gain=gain), noise=noise, seed=1), counts=(4096,))
        assert (tuned.choices[0].candidate.offset is not None) is used
        assert tuned.choices[0].best_split is not None


@pytest.mark.parametrize("seed", range(8))
def test_a_gain_of_a_few_percent_is_found_in_little_time(seed: int) -> None:
    """As noisy as a GPU, with the budget's share of a token count: the choice is within 2 % of the best there is."""
    runner = FakeRunner(partial(bowl, gain=0.03), noise=0.009, seed=seed)
    for choice in run_tuner(runner, budget_seconds=20.0).choices:
        n = choice.num_tokens
        fastest = min(bowl(n, c, gain=0.03) for c in SPACE.everything(n, 64))
        assert bowl(n, choice.candidate, gain=0.03) <= 1.02 * fastest


@pytest.mark.parametrize("budget_seconds", [1.0, 1e6])
def test_a_split_that_loses_a_percent_is_hardly_ever_used(budget_seconds: float) -> None:
    """However much time there is: looking after every round, and at the best of several, does not cost the confidence.

    The noise is a GPU's.
    """

    def used(loss: float) -> int:
        def landscape(num_tokens: int, candidate: Candidate) -> float:
            return num_tokens / 320 * (1 if candidate.offset is None else 1 + loss)

        runs = (FakeRunner(landscape, noise=0.009, seed=seed) for seed in range(60))
        found = [run_tuner(runner, counts=(1024,), budget_seconds=budget_seconds) for runner in runs]
        return sum(tuned.choices[0].candidate.offset is not None for tuned in found)

    assert used(0.01) <= 3  # 5 %
    assert used(-0.02) >= 50


def test_fuse_only_gets_ctas_of_its_own() -> None:
    tuned = run_tuner(FakeRunner(losing))
    assert {(row.attention.ctas, row.mlp.ctas) for row in tuned.table.rows} == {(96, 96)}


def test_exhaustive_measures_everything() -> None:
    runner = FakeRunner(bowl)
    tuned = run_tuner(runner, counts=(2048,), exhaustive=True)
    assert {str(c) for c in SPACE.everything(2048)} <= {name for _, name in runner.sampled}
    assert tuned.choices[0].candidate.offset is not None


@pytest.mark.parametrize("seed", range(6))
def test_one_disturbed_sample_of_each_does_not_hide_a_gain(seed: int) -> None:
    """The seventh step of every candidate takes half as long again, as where something else wakes up."""
    taken: dict[tuple[int, Candidate], int] = {}

    def landscape(num_tokens: int, candidate: Candidate) -> float:
        key = num_tokens, candidate
        taken[key] = taken.get(key, 0) + 1
        return bowl(num_tokens, candidate, gain=0.04) * (1.5 if taken[key] == 7 else 1.0)

    (choice,) = run_tuner(FakeRunner(landscape, noise=0.008, seed=seed), counts=(4096,), budget_seconds=8.0).choices
    assert choice.candidate.offset is not None


# ---- the clock


def wandering(number: int) -> float:
    """As under a power limit: 1380 to 1560 MHz, another with each sample."""
    return 1380.0 + 30 * (number * 5 % 7)


def test_samples_are_kept_at_one_clock_whatever_they_ran_at() -> None:
    steady, wanders = (run_tuner(FakeRunner(bowl, mhz=mhz)) for mhz in (lambda _: MHZ, wandering))
    assert [str(c.candidate) for c in wanders.choices] == [str(c.candidate) for c in steady.choices]
    record = wanders.run.record
    for n, bucket in record.buckets.items():
        for measured in bucket.candidates.values():
            expected = bowl(n, measured.candidate) * MHZ / record.mhz
            assert measured.ms == pytest.approx([expected] * len(measured.ms), rel=1e-4)
    (row, *_) = measurements(wanders.run, wanders.choices)[0]["candidates"]
    assert 1380 <= row["mhz"] <= 1560
    # Not by accident: what they took differs by more than the choices do.
    assert len({mhz for b in record.buckets.values() for m in b.candidates.values() for mhz in m.mhz}) > 5


def test_the_clock_is_that_of_the_rank_that_the_others_wait_for() -> None:
    def slow(number: int) -> float:
        return 0.9 * wandering(number)

    for tuned in run_on_ranks([FakeRunner(bowl, mhz=wandering), FakeRunner(bowl, mhz=slow)], counts=(1024,)):
        record = tuned.run.record
        for measured in record.buckets[1024].candidates.values():
            expected = bowl(1024, measured.candidate) * MHZ / record.mhz
            assert measured.ms == pytest.approx([expected] * len(measured.ms), rel=1e-4)


# ---- right results only


@pytest.mark.parametrize("error", [0.5, float("nan"), float("inf")])
def test_wrong_results_are_rejected_and_never_timed(error: float) -> None:
    winner = str(run_tuner(FakeRunner(bowl), counts=(4096,)).choices[0].candidate)
    runner = FakeRunner(bowl, wrong={winner: error})
    tuned = run_tuner(runner, counts=(4096,))
    assert str(tuned.choices[0].candidate) != winner
    assert (4096, winner) not in runner.sampled
    rows = {row["name"]: row for row in measurements(tuned.run, tuned.choices)[0]["candidates"]}
    assert "rejected" in rows[winner]
    assert "median_ms" not in rows[winner]


def test_what_is_wrong_in_a_row_that_was_left_out_is_not_chosen() -> None:
    winner = str(run_tuner(FakeRunner(bowl), counts=(4096,)).choices[0].candidate)
    tuned = run_tuner(FakeRunner(bowl, wrong={f"whole {winner}": 0.5}), counts=(4096,))
    assert str(tuned.choices[0].candidate) != winner
    assert tuned.choices[0].candidate.offset is not None


def test_in_the_place_of_what_was_found_wrong_at_last_the_next_one_is_compared() -> None:
    runner = FakeRunner(bowl, wrong={"whole +320 12/16": 0.5})
    run_tuner(runner, counts=(2048, 4096))
    assert len({name for n, name in runner.sampled if n == 3072 and name.startswith("+320 ")}) == SAME_OFFSET + 1


def test_where_no_split_is_right_steps_are_fused_only() -> None:
    class AllWrong(FakeRunner):
        def error(self, num_tokens: int, candidate: Candidate, *, whole: bool = False) -> float:
            super().error(num_tokens, candidate, whole=whole)
            return 0.0 if candidate.offset is None else 1.0

    tuned = run_tuner(AllWrong(bowl))
    assert {row.mode for row in tuned.table.rows} == {"fuse"}
    assert [choice.best_split for choice in tuned.choices] == [None] * 3


def test_a_time_that_is_none_is_an_error() -> None:
    with pytest.raises(TokenWeaveError, match=r"took 0\.0 ms"):
        run_tuner(FakeRunner(lambda _n, _c: 0.0))
    with pytest.raises(TokenWeaveError, match="MHz"):
        run_tuner(FakeRunner(bowl, mhz=lambda _: math.inf))


# ---- time


def test_the_budget_bounds_the_search_and_every_count_gets_its_least() -> None:
    free = FakeRunner(bowl, noise=0.01)
    run_tuner(free, budget_seconds=1e6)
    for budget in (1.0, 8.0, 20.0):
        runner = FakeRunner(bowl, noise=0.01)
        tuned = run_tuner(runner, budget_seconds=budget)
        assert len(tuned.choices) == len(COUNTS)
        assert len(runner.sampled) <= len(free.sampled)
        if budget >= 20:
            assert runner.clock() <= 1.2 * budget
        # Seeds twice, five finalists eight times.
        least = {n: sum(1 for m, _ in runner.sampled if m == n) for n in COUNTS}
        assert all(count >= 20 for count in least.values())
    short, long = FakeRunner(bowl, noise=0.01), FakeRunner(bowl, noise=0.01)
    run_tuner(short, budget_seconds=1.0)
    run_tuner(long, budget_seconds=30.0)
    assert len(short.sampled) < len(long.sampled)


def test_progress_says_how_much_is_left() -> None:
    said: list[str] = []
    run_tuner(FakeRunner(bowl), say=said.append)
    assert [line.split("  ")[0] for line in said] == ["1/3", "2/3", "3/3"]
    assert "4096 tokens: +320 12/16, best split 0.9" in said[0]
    assert said[-1].endswith("about 0 s left")


# ---- ranks


def test_all_ranks_use_the_slowest_ranks_time_and_one_clock() -> None:
    """Rank 1 is slower with few CTAs, and its clock runs ten times as fast: both choose alike all the same."""

    def slower(num_tokens: int, candidate: Candidate) -> float:
        few = candidate.offset is not None and min(candidate.attention.ctas, candidate.mlp.ctas) < 20
        return bowl(num_tokens, candidate) * (1.2 if few else 1.0)

    class FastClock(Clock):
        def __call__(self) -> float:
            return 7.0 + 10 * self.now

    runners = [FakeRunner(bowl, seed=1, noise=0.002), FakeRunner(slower, FastClock(), seed=2, noise=0.002)]
    first, second = run_on_ranks(runners, budget_seconds=25.0)
    assert first.table == second.table
    assert first.run.record == second.run.record
    assert runners[0].sampled == runners[1].sampled
    for choice in first.choices:
        assert min(choice.candidate.attention.ctas, choice.candidate.mlp.ctas) >= 20
    median = statistics.median(first.run.record.buckets[4096].candidates[str(SPACE.fuse())].ms)
    assert median == pytest.approx(4096 / 320, rel=0.02)


def test_a_result_that_is_wrong_on_one_rank_is_rejected_on_all() -> None:
    winner = str(run_tuner(FakeRunner(bowl), counts=(4096,)).choices[0].candidate)
    runners = [FakeRunner(bowl), FakeRunner(bowl, wrong={winner: 0.5})]
    for tuned in run_on_ranks(runners, counts=(4096,)):
        assert str(tuned.choices[0].candidate) != winner


def test_fuse_only_that_does_not_repeat_itself_is_an_error() -> None:
    every = {str(SPACE.fuse(n)): 0.5 for n in SPACE.alone}
    for wrong in (every, {f"whole {name}": error for name, error in every.items()}):
        with pytest.raises(TokenWeaveError, match="no fuse-only step of 2048 tokens gives the same result twice"):
            run_tuner(FakeRunner(partial(bowl, gain=-0.1), wrong=wrong), counts=(2048,))


def test_a_rank_that_fails_stops_all_with_its_error() -> None:
    def die(number: int) -> None:
        if number == 9:
            raise TokenWeaveError("the GPU fell off the bus")

    runners = [FakeRunner(bowl), FakeRunner(bowl, fails=die)]
    with pytest.raises(TokenWeaveError, match="rank 1: the GPU fell off the bus"):
        run_on_ranks(runners)
    assert len(runners[0].sampled) <= MAX_QUEUED


def test_a_rank_that_is_gone_stops_the_others() -> None:
    def leave(number: int) -> None:
        if number == 9:
            raise SystemExit

    with pytest.raises((SystemExit, CommError)):
        run_on_ranks([FakeRunner(bowl), FakeRunner(bowl, fails=leave)])


# ---- what is written down


def test_measurements_have_median_and_spread_of_every_candidate() -> None:
    tuned = run_tuner(FakeRunner(bowl, noise=0.01), counts=(2048,))
    (bucket,) = measurements(tuned.run, tuned.choices)
    assert bucket["num_tokens"] == 2048
    assert bucket["chosen"] == str(tuned.choices[0].candidate)
    low, middle, high = bucket["split_over_fuse"]
    assert low <= middle <= high < 1
    for row in bucket["candidates"]:
        first, third = row["quartiles_ms"]
        assert first <= row["median_ms"] <= third
        assert row["samples"] >= 2


@pytest.mark.parametrize("counts", [(), (1000,), (2048, 1024), (1024, 1024)])
def test_counts_that_no_table_can_have_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="token counts"):
        run_tuner(FakeRunner(bowl), counts=counts)
