"""A run of the tuner that was ended and goes on: it loses nothing and measures nothing again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from support.tuning import COUNTS, MHZ, SPACE, Clock, FakeRunner, bowl, run_tuner

from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.tune.store import Record, load_record, partial_file


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


def test_a_run_that_goes_on_keeps_the_clock_of_the_first(tmp_path: Path) -> None:
    file = tmp_path / "t.partial.json"
    first = run_tuner(FakeRunner(bowl), file=file, counts=(1024,))
    loaded = load_record(file, {})
    again = run_tuner(FakeRunner(bowl, mhz=lambda _: MHZ / 2), record=loaded, counts=(1024, 2048))
    assert again.run.record.mhz == first.run.record.mhz == MHZ
    fuse = again.run.record.buckets[2048].candidates[str(SPACE.fuse())]
    assert fuse.ms == pytest.approx([bowl(2048, SPACE.fuse())] * len(fuse.ms), rel=1e-4)
