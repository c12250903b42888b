"""The tuner inside a row of its table: what is measured, chosen and refused between two token counts."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from support.tuning import SPACE, FakeRunner, bowl, run_tuner

from trtllm_tokenweave.tune.candidates import Candidate
from trtllm_tokenweave.tune.search import best_of, fastest
from trtllm_tokenweave.tune.tuner import measurements


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
