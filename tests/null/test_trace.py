"""The synthetic trace, and its schedule on the real generator."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.trace import BATCH, BUDGET, TRACE, bench

from trtllm_tokenweave.bench.trace import MAX_TOKENS, OUTPUTS, PROMPTS, Schedule, TraceStep, make_trace
from trtllm_tokenweave.bench.trace_run import TraceArguments, read_bench
from trtllm_tokenweave.mapping import Mapping


@pytest.mark.parametrize(("requests", "tolerance"), [(60, 0.04), (1000, 0.005)])
@pytest.mark.parametrize("seed", [0, 1])
def test_lengths_have_the_published_statistics(requests: int, tolerance: float, seed: int) -> None:
    made = make_trace(requests, seed)
    prompts, outputs = [r.prompt for r in made.requests], [r.output for r in made.requests]
    for lengths, published in ((prompts, PROMPTS), (outputs, OUTPUTS)):
        assert statistics.median(lengths) == pytest.approx(published.median, rel=tolerance)
        assert np.quantile(lengths, 0.9) == pytest.approx(published.p90, rel=tolerance)
    # Of the lengths that the authors publish, and not fitted.
    for found, mean, deviation in ((prompts, 2340, 2089), (outputs, 439, 266)):
        assert statistics.mean(found) == pytest.approx(mean, rel=0.1)
        assert statistics.pstdev(found) == pytest.approx(deviation, rel=0.08)
    assert max(r.total for r in made.requests) <= MAX_TOKENS
    assert min(map(min, (prompts, outputs))) >= 1


def test_the_seed_shuffles_lengths_and_nothing_else() -> None:
    first, again, other = make_trace(60, 0), make_trace(60, 0), make_trace(60, 1)
    assert first == again
    assert first.requests != other.requests
    assert sorted(r.output for r in first.requests) == sorted(r.output for r in other.requests)
    # Prompts and outputs are shuffled apart: long prompts do not have long outputs.
    lengths = np.array([(r.prompt, r.output) for r in make_trace(1000, 0).requests])
    assert abs(np.corrcoef(np.log(lengths.T))[0, 1]) < 0.2


def test_what_results_say_of_the_trace() -> None:
    document = make_trace(60, 7).document()
    assert "arXiv 2403.02310" in document["source"]
    assert document["published"]["prompt"] == {"median": 1730, "p90": 5696}
    assert document["published"]["output"] == {"median": 415, "p90": 834}
    assert (document["requests"], document["seed"]) == (60, 7)
    assert document["prompt"]["sum"] == sum(r.prompt for r in make_trace(60, 7).requests)
    json.dumps(document)


@pytest.mark.parametrize("requests", [1, 2, 7])
def test_a_trace_of_few_requests(requests: int) -> None:
    made = make_trace(requests, 0)
    assert len(made.requests) == requests
    assert all(min(r.prompt, r.output) > 0 for r in made.requests)


# --- the schedule


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return bench().schedule(BUDGET)


def positions(steps: tuple[TraceStep, ...]) -> Counter[int]:
    return Counter(int(p) for step in steps for p in step.inputs["position_ids"])


def test_every_token_of_every_request_is_run_once(schedule: Schedule) -> None:
    # The last token of an output is never read.
    wanted = Counter(p for r in TRACE.requests for p in range(r.total - 1))
    assert positions(schedule.steps) == wanted
    contexts = rows = samples = 0
    for step in schedule.steps:
        is_context = step.inputs["host_request_types"] == 0
        contexts += int(step.inputs["host_context_lengths"][is_context].sum())
        rows += int((~is_context).sum())
        ends = step.inputs["sequence_length"][is_context]
        samples += int(np.isin(ends, [r.prompt for r in TRACE.requests]).sum() + (~is_context).sum())
    assert contexts == sum(r.prompt for r in TRACE.requests)
    assert rows == sum(r.output - 1 for r in TRACE.requests)
    assert samples == sum(r.output for r in TRACE.requests) == schedule.generation_rows + len(TRACE.requests)


def test_chunks_keep_to_the_budget_beside_generation_rows(schedule: Schedule) -> None:
    assert max(step.record.num_tokens for step in schedule.steps) == BUDGET
    assert max(step.record.batch for step in schedule.steps) == BATCH
    assert [step.record.index for step in schedule.steps] == list(range(len(schedule.steps)))
    for step in schedule.steps:
        assert len(step.inputs["input_ids"]) == step.record.num_tokens
        types = step.inputs["host_request_types"]
        assert len(types) == step.record.batch
        assert (
            step.kind
            == {(True, False): "prefill", (True, True): "mixed", (False, True): "decode"}[
                bool((types == 0).any()), bool((types == 1).any())
            ]
        )
    counts, tokens = schedule.steps_of_kinds(), schedule.tokens_of_kinds()
    assert set(counts) == {"prefill", "mixed", "decode"}
    assert min(counts.values()) > 0
    assert sum(counts.values()) == len(schedule.steps)
    assert sum(tokens.values()) == sum(r.total - 1 for r in TRACE.requests)


def test_the_loaded_part_ends_with_the_last_prompt(schedule: Schedule) -> None:
    loaded = schedule.loaded.steps
    assert loaded[-1].record.num_contexts > 0
    rest = schedule.steps[len(loaded) :]
    assert rest
    assert all(step.kind == "decode" for step in rest)
    only = Schedule(schedule.steps[:1])
    assert only.loaded.steps == only.steps
    cut = bench(tail=False).schedule(BUDGET)
    assert [step.record for step in cut.steps] == [step.record for step in loaded]


def test_a_larger_budget_makes_fewer_steps_of_the_same_tokens() -> None:
    few, many = bench().schedule(96), bench().schedule(32)
    assert len(few.steps) < len(many.steps)
    assert positions(few.steps) == positions(many.steps)


def test_the_schedule_is_the_same_on_all_ranks_and_for_every_run() -> None:
    made = [bench(rank).schedule(BUDGET) for rank in (0, 1, 0)]
    for other in made[1:]:
        for a, b in zip(made[0].steps, other.steps, strict=True):
            assert a.record == b.record
            assert {name: x.tobytes() for name, x in a.inputs.items()} == {n: x.tobytes() for n, x in b.inputs.items()}
    reseeded = bench(trace=replace(TRACE, seed=4)).schedule(BUDGET)
    assert [s.record for s in reseeded.steps] == [s.record for s in made[0].steps]  # tokens say nothing about steps
    assert any(
        (a.inputs["input_ids"] != b.inputs["input_ids"]).any()
        for a, b in zip(made[0].steps, reseeded.steps, strict=True)
    )


def test_the_whole_published_trace_is_scheduled() -> None:
    made = read_bench(TraceArguments("llama-3.3-70b", 8), Mapping(2, 0, 2))
    steps = made.schedule(1024).steps
    assert positions(steps) == Counter(p for r in made.trace.requests for p in range(r.total - 1))
    kinds = Counter(step.kind for step in steps)
    assert max(step.record.num_tokens for step in steps) <= 1024
    assert kinds["decode"] > 0.9 * len(steps)
    full, reading = sum(step.record.num_tokens == 1024 for step in steps), kinds["prefill"] + kinds["mixed"]
    document = (Path(__file__).resolve().parents[2] / "docs/benchmarks.md").read_text()
    assert f"1024 on the default rule splits: {full} of {reading} of them" in document
    assert 50 < max(step.record.batch for step in steps) <= 60


def test_one_step_for_each_graph(schedule: Schedule) -> None:
    found = schedule.recurring(103)
    assert [step.kind for step in found] == ["decode"] * len(found)
    assert [step.record.batch for step in found] == list(
        dict.fromkeys(step.record.batch for step in schedule.steps if step.kind == "decode")
    )  # all lengths are rounded to the same


def test_a_cache_has_room_for_those_that_run_at_once() -> None:
    limits = TRACE.limits(BUDGET, BATCH)
    assert limits.max_seq_len == 103
    assert limits.num_blocks == 4 + 3 + 2  # blocks of 32 for 103, 72 and 45 tokens
    assert TRACE.limits(BUDGET, 60).num_blocks == 4 + 3 + 2 + 2 + 1 + 1
