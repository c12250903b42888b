"""The tuner with an injected runner and clock: what it chooses, what it refuses, and that it comes to an end."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from support.tuning import COUNTS, MHZ, SPACE, Clock, FakeRunner, bowl, run_on_ranks, run_tuner

from trtllm_tokenweave.comm import CommError
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.tune.candidates import Candidate
from trtllm_tokenweave.tune.measure import MAX_QUEUED
from trtllm_tokenweave.tune.search import SAME_OFFSET, best_of, fastest
from trtllm_tokenweave.tune.store import Record, load_record, partial_file
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


# ---- the middle of a row


def in_the_middle(num_tokens: int, candidate: Candidate, *, worse: float) -> float:
    """Offsets 256 and 0 are all but equal where rows end; inside a row 256 takes longer by ``worse``."""
    whole, inside = num_tokens / 320, num_tokens in (1536, 3072)
    if candidate.offset is None:
        return whole
    if candidate.offset not in (0, 256):
        return whole * 1.01
    return whole * (0.95 + (0.0001 if candidate.offset == 0 else worse * inside))


@pytest.mark.parametrize(("worse", "offset"), [(0.03, 0), (0.0, 256)])
def test_splits_that_are_equal_where_a_row_ends_are_told_apart_inside_it(worse: float, offset: int) -> None:
    tuned = run_tuner(FakeRunner(partial(in_the_middle, worse=worse)))
    assert [choice.middle for choice in tuned.choices] == [None, 1536, 3072]
    assert [choice.candidate.offset for choice in tuned.choices[1:]] == [offset, offset]
    document = measurements(tuned.run, tuned.choices)
    assert "middle" not in document[0]
    assert document[1]["middle"]["num_tokens"] == 1536
    assert {row["samples"] for row in document[1]["middle"]["candidates"]} >= {4}


def test_a_split_that_wins_at_the_end_and_loses_inside_is_not_used() -> None:
    def landscape(num_tokens: int, candidate: Candidate) -> float:
        loses = num_tokens in (1536, 3072)
        return num_tokens / 320 * (1 if candidate.offset is None else 1.05 if loses else 0.96)

    assert [c.candidate.offset for c in run_tuner(FakeRunner(landscape)).choices[1:]] == [None, None]


def test_the_fastest_is_that_of_pairs_not_of_medians_over_two_counts() -> None:
    """The median of three long and two short steps is of a long one, and says nothing about the short ones."""
    first, second = SPACE.woven(0, 8), SPACE.woven(256, 8)
    times = {first: [2.0, 1.03, 2.0, 1.03, 2.0], second: [2.01, 1.0, 2.01, 1.0, 2.01]}
    assert best_of(times, fuse_only=False) == first
    assert fastest(times, fuse_only=False, turns=2) == second
    assert fastest(times, fuse_only=True) is None


@pytest.mark.parametrize(("loss", "used"), [(0.03, False), (0.005, True)])
def test_a_gain_over_the_row_that_is_a_loss_inside_it_is_not_used(loss: float, used: bool) -> None:
    """Where rows end 7 % are won; a loss of 3 % in their middle is more than a count may lose, one of 0.5 % is not."""

    def landscape(num_tokens: int, candidate: Candidate) -> float:
        inside = num_tokens in (1536, 3072)
        return num_tokens / 320 * (1 if candidate.offset is None else 1 + loss if inside else 0.93)

    choices = run_tuner(FakeRunner(landscape), budget_seconds=1.0).choices[1:]
    expected = (loss - 0.07) / 2
    assert [c.gain.median for c in choices if c.gain is not None] == pytest.approx([expected, expected])
    assert [c.candidate.offset is not None for c in choices] == [used, used]


def test_a_slower_split_that_loses_nowhere_is_used_where_the_fastest_one_does() -> None:
    def landscape(num_tokens: int, candidate: Candidate) -> float:
        if candidate.offset is None:
            return num_tokens / 320
        inside = num_tokens in (1536, 3072)
        # The first wins 4 % over the row, the others 2 % everywhere.
        return num_tokens / 320 * ((1.03 if inside else 0.89) if candidate.offset == 0 else 0.98)

    for choice in run_tuner(FakeRunner(landscape)).choices[1:]:
        assert choice.candidate.offset not in (None, 0)
        assert choice.candidate == choice.best_split


@pytest.mark.parametrize("where", [1536, 2048])
def test_what_is_wrong_inside_a_row_is_not_chosen(where: int) -> None:
    class WrongThere(FakeRunner):
        def error(self, num_tokens: int, candidate: Candidate, *, whole: bool = False) -> float:
            error = super().error(num_tokens, candidate, whole=whole)
            return 0.5 if num_tokens == where and candidate.offset is not None else error

    tuned = run_tuner(WrongThere(bowl))
    assert [c.candidate.offset is None for c in tuned.choices] == [False, True, False]


def test_a_split_that_leaves_no_suffix_inside_a_row_is_not_chosen() -> None:
    """Only the largest offset wins; in the middle of the row it would take all tokens."""

    def landscape(num_tokens: int, candidate: Candidate) -> float:
        return num_tokens / 320 * (1 if candidate.offset is None else 0.7 if candidate.offset >= 512 else 0.9)

    runner = FakeRunner(landscape)
    choice = run_tuner(runner, counts=(256, 2048)).choices[1]
    assert choice.middle == 1152
    assert any(name.startswith("+512 ") for n, name in runner.sampled if n == 2048)
    assert SPACE.refusal(1152, SPACE.woven(512, 8)) == "it leaves no suffix"
    assert choice.candidate.offset is not None
    assert choice.candidate.offset < 512


def test_the_last_splits_are_not_all_of_one_offset() -> None:
    runner = FakeRunner(bowl)
    run_tuner(runner)
    compared = {name for n, name in runner.sampled if n == 3072 and name.startswith("+")}
    assert sorted(Counter(name.split()[0] for name in compared).values()) == [1, 2]


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


def test_a_run_that_goes_on_keeps_the_clock_of_the_first(tmp_path: Path) -> None:
    file = tmp_path / "t.partial.json"
    first = run_tuner(FakeRunner(bowl), file=file, counts=(1024,))
    loaded = load_record(file, {})
    again = run_tuner(FakeRunner(bowl, mhz=lambda _: MHZ / 2), record=loaded, counts=(1024, 2048))
    assert again.run.record.mhz == first.run.record.mhz == MHZ
    fuse = again.run.record.buckets[2048].candidates[str(SPACE.fuse())]
    assert fuse.ms == pytest.approx([bowl(2048, SPACE.fuse())] * len(fuse.ms), rel=1e-4)


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


# ---- going on


class KilledError(Exception):
    """Stands for a signal."""


def kill_at(count: int, number: int) -> None:
    if number >= count:
        raise KilledError


def test_a_run_that_was_killed_loses_nothing_and_measures_nothing_again(tmp_path: Path) -> None:
    whole = FakeRunner(bowl)
    expected = run_tuner(whole)
    file = partial_file(tmp_path / "table.json")
    for half in (len(whole.sampled) // 3, len(whole.sampled) // 2, len(whole.sampled) - 1):
        clock = Clock()
        first = FakeRunner(bowl, clock, fails=partial(kill_at, half))
        record = Record(key={"gpu": "x"})
        with pytest.raises(TokenWeaveError):
            run_tuner(first, record=record, file=file)
        loaded = load_record(file, {"gpu": "x"})
        assert loaded is not None
        kept = sum(len(m.ms) for b in loaded.buckets.values() for m in b.candidates.values())
        # Written every two seconds: what is lost is less than that took.
        assert half - 60 <= kept <= half
        second = FakeRunner(bowl, Clock(1000.0))
        again = run_tuner(second, record=loaded, file=file)
        assert again.table == expected.table
        assert kept + len(second.sampled) == len(whole.sampled)
        assert again.run.elapsed() == pytest.approx(expected.run.elapsed(), rel=0.1)


def test_a_finished_record_needs_no_more_samples(tmp_path: Path) -> None:
    file = tmp_path / "t.partial.json"
    expected = run_tuner(FakeRunner(bowl, noise=0.01), file=file)
    loaded = load_record(file, {})
    runner = FakeRunner(bowl)
    assert run_tuner(runner, record=loaded).table == expected.table
    assert runner.sampled == []


@pytest.mark.parametrize("budget", [8.0, 20.0, 285.0])
def test_what_was_found_wrong_at_last_is_found_at_the_same_place_again(tmp_path: Path, budget: float) -> None:
    """Its samples come before: a run that left it out from the start would look elsewhere."""
    winner = str(run_tuner(FakeRunner(bowl, noise=0.01), budget_seconds=budget).choices[-1].candidate)
    wrong, file = {f"whole {winner}": 0.5}, tmp_path / "t.partial.json"
    expected = run_tuner(FakeRunner(bowl, noise=0.01, wrong=wrong), file=file, budget_seconds=budget)
    rejected = expected.run.record.buckets[COUNTS[-1]].candidates[winner].rejected
    second = FakeRunner(bowl, Clock(1000.0), noise=0.01, wrong=wrong)
    again = run_tuner(second, record=load_record(file, {}), budget_seconds=budget)
    assert rejected
    assert again.choices == expected.choices
    assert second.sampled == []


@pytest.mark.parametrize("budget", [8.0, 20.0])
def test_what_an_earlier_run_found_in_its_time_is_not_searched_again_without_time(
    tmp_path: Path, budget: float
) -> None:
    """The run that goes on begins after its budget: counts that were done stay as they were chosen."""
    file = tmp_path / "t.partial.json"
    first = FakeRunner(bowl, noise=0.01)
    expected = run_tuner(first, file=file, budget_seconds=budget)
    answers = [answer for bucket in expected.run.record.buckets.values() for answer in bucket.answers]
    assert True in answers
    loaded = load_record(file, {})
    assert loaded is not None
    del loaded.buckets[COUNTS[0]]
    second = FakeRunner(bowl, Clock(1000.0), noise=0.01)
    again = run_tuner(second, record=loaded, budget_seconds=budget)
    assert again.choices[1:] == expected.choices[1:]
    assert {n for n, _ in second.sampled} == {COUNTS[0]}


def test_samples_of_another_key_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.partial.json"
    run_tuner(FakeRunner(bowl), record=Record(key={"gpu": "NVIDIA H200", "layers": 2}), file=file)
    assert load_record(file, {"gpu": "NVIDIA H200", "layers": 2}) is not None
    for key, what in (({"gpu": "NVIDIA H100", "layers": 2}, "gpu NVIDIA H200"), ({"gpu": "NVIDIA H200"}, "layers 2")):
        with pytest.raises(UserError) as raised:
            load_record(file, key)
        assert what in raised.value.what
        assert raised.value.where == str(file)
        assert "--restart" in raised.value.fix


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.partial.json"
    assert load_record(file, {}) is None
    for text in ("{", "[]", '{"key": {}, "buckets": {"a": 1}}', '{"format_version": 1, "key": {}}'):
        file.write_text(text)
        with pytest.raises(UserError) as raised:
            load_record(file, {})
        assert raised.value.where.startswith(str(file))


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
