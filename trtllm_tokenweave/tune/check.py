"""How good a table is: against an exhaustive sweep at token counts that were not tuned, and against the even split."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.schedule import find_row
from trtllm_tokenweave.table import TuningTable
from trtllm_tokenweave.tune.candidates import Candidate, Space
from trtllm_tokenweave.tune.measure import Bench, Run
from trtllm_tokenweave.tune.statistics import relative_difference

#: Off the tuner's grid of 256, some off any grid of 64, over the range of the shipped tables.
HELD_OUT = (1088, 1400, 1856, 2240, 2752, 3300, 4000, 5056, 6300, 7777)
#: The exhaustive sweep: a sample of every candidate, more of the fastest quarter, then of the fastest ones; last, pairs
#: of the fastest with the table's choice.
SWEEP_ROUNDS, QUARTER_ROUNDS, FINAL_ROUNDS, PAIR_ROUNDS = 1, 2, 6, 12
FINALISTS = 3
JITTER_STEP, JITTER_ROUNDS = 64, 5


def choice_of(table: TuningTable, space: Space, num_tokens: int) -> Candidate:
    """What a step of one sequence does; a collective that runs alone and has no row takes all the CTAs there are."""
    plan, row = table.lookup(1, num_tokens), find_row(table, 1, num_tokens)
    if not plan.suffix and (row is None or row.mode == "weave"):
        return space.fuse()
    return Candidate.of_plan(plan, table.granularity)


def even_split(table: TuningTable, space: Space, num_tokens: int) -> Candidate:
    """Half, with the launch configuration of the table's choice; the middle one where that is fuse-only."""
    choice = choice_of(table, space, num_tokens)
    if choice.offset is None:
        return space.woven(0, space.ctas[len(space.ctas) // 2])
    return Candidate(0, choice.attention, choice.mlp)


def held_out_row(table: TuningTable, space: Space, run: Run, num_tokens: int) -> dict[str, Any]:
    """The table's choice, the best of all candidates, and the best fuse-only one, interleaved.

    The fastest one and the choice are measured again side by side: the samples by which it was found to be the fastest
    are lower than others would be.

    Raises:
        UserError: the choice cannot run, or gives a wrong result.
    """
    bench, chosen = Bench(run, num_tokens, space.fuse()), choice_of(table, space, num_tokens)
    _check_usable(bench, space, chosen)
    swept = bench.measure(list(dict.fromkeys([chosen, *space.everything(num_tokens)])), SWEEP_ROUNDS)
    ranked = _ranked(swept)
    quarter = ranked[: max(len(ranked) // 4, FINALISTS)]
    for candidate, more in bench.measure(quarter, QUARTER_ROUNDS).items():
        swept[candidate] += more
    best = _ranked({c: swept[c] for c in quarter})[:FINALISTS]
    fuse = next(c for c in _ranked(swept) if c.offset is None)
    fastest = _ranked(bench.measure(list(dict.fromkeys([chosen, *best, fuse])), FINAL_ROUNDS))[0]
    times = bench.measure(list(dict.fromkeys([chosen, fastest, fuse])), PAIR_ROUNDS)
    medians = {c: statistics.median(t) for c, t in times.items()}
    row: dict[str, Any] = {"num_tokens": num_tokens}
    for name, candidate in (("chosen", chosen), ("best", fastest), ("fuse_only", fuse)):
        row |= {f"{name}_ms": round(medians[candidate], 4), name: str(candidate)}
    for name, candidate in (("chosen_over_best", fastest), ("chosen_over_fuse_only", fuse)):
        ratio = relative_difference(times[chosen], times[candidate])
        row[name] = [round(1 + x, 4) for x in (ratio.low, ratio.median, ratio.high)]
    return row | {"candidates": len(swept), **_sensitivity(swept)}


def _sensitivity(swept: dict[Candidate, list[float]]) -> dict[str, dict[str, float]]:
    """The sweep's fastest split by CTAs (equal after both blocks), and by offset."""
    by_ctas: dict[str, float] = {}
    by_offset: dict[str, float] = {}
    for c, times in swept.items():
        if c.offset is None or c.attention.ctas != c.mlp.ctas:
            continue
        milliseconds = round(statistics.median(times), 4)
        for found, name in ((by_ctas, str(c.mlp.ctas)), (by_offset, str(c.offset))):
            found[name] = min(found.get(name, milliseconds), milliseconds)
    return {"by_ctas": by_ctas, "by_offset": by_offset}


def _ranked(times: dict[Candidate, list[float]]) -> list[Candidate]:
    return sorted(times, key=lambda c: statistics.median(times[c]))


def jitter_row(table: TuningTable, space: Space, run: Run, num_tokens: int) -> dict[str, Any]:
    """The even split, the table's choice and fuse-only, interleaved.

    Raises:
        UserError: one of them cannot run, or gives a wrong result.
    """
    candidates = {
        "even": even_split(table, space, num_tokens),
        "tuned": choice_of(table, space, num_tokens),
        "fuse_only": space.fuse(),
    }
    bench = Bench(run, num_tokens, space.fuse())
    for candidate in candidates.values():
        _check_usable(bench, space, candidate)
    times = bench.measure(list(dict.fromkeys(candidates.values())), JITTER_ROUNDS)
    row: dict[str, Any] = {"num_tokens": num_tokens}
    for name, candidate in candidates.items():
        row |= {f"{name}_ms": round(statistics.median(times[candidate]), 4), name: str(candidate)}
    return row


def _check_usable(bench: Bench, space: Space, candidate: Candidate) -> None:
    reason = space.refusal(bench.num_tokens, candidate)
    if reason:
        raise UserError(f"cannot run {bench.num_tokens} tokens as {candidate}: {reason}", where="table")
    if not bench.usable([candidate]):
        raise UserError(f"gives a wrong result for {bench.num_tokens} tokens as {candidate}", where="table")


def held_out(table: TuningTable, space: Space, run: Run, counts: Sequence[int] = HELD_OUT) -> Iterator[dict[str, Any]]:
    """:func:`held_out_row` of every count, as it is measured."""
    for done, count in enumerate(counts, start=1):
        row = held_out_row(table, space, run, count)
        if run.comm.rank == 0:
            over = f"chosen / best {row['chosen_over_best'][1]:.3f}, / fuse-only {row['chosen_over_fuse_only'][1]:.3f}"
            run.say(f"{done}/{len(counts)}  {count} tokens: {row['chosen']}, {over}")
        yield row


def jitter(table: TuningTable, space: Space, run: Run, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """:func:`jitter_row` of every count, as it is measured."""
    for done, count in enumerate(counts, start=1):
        row = jitter_row(table, space, run, count)
        if run.comm.rank == 0:
            run.say(f"{done}/{len(counts)}  {row}")
        yield row
