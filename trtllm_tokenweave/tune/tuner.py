"""From token counts to a table: one search each, a time budget over all, and what was measured beside the table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.table import Bucket, TableKey, TableRow, TableSource, TuningTable
from trtllm_tokenweave.table.model import MeasuredOn
from trtllm_tokenweave.tune.candidates import Candidate, Space
from trtllm_tokenweave.tune.measure import Bench, Run
from trtllm_tokenweave.tune.search import Choice, Search
from trtllm_tokenweave.tune.statistics import spread
from trtllm_tokenweave.tune.store import BucketRecord
from trtllm_tokenweave.waves import GemmShape

#: Of the budget: what a search measures after its time is over takes the rest.
SEARCH_SHARE = 0.95
#: Of a search: seeds and neighbours; the last ones side by side take the rest. With a dozen pairs an interval no
#: longer hangs on one sample that was disturbed.
LOOK_SHARE = 0.45


@dataclass(frozen=True)
class TuneGoal:
    """What to tune.

    Attributes:
        key: The table's key.
        counts: Token counts, ascending multiples of the granularity: each is the last of a row of the table.
        space: The candidates.
        shapes: GEMMs of a layer on one rank.
        budget_seconds: Most seconds of the run, the building of engines included. It bounds the searches, not the
            least that each choice needs.
        exhaustive: Measure every candidate.
    """

    key: TableKey
    counts: tuple[int, ...]
    space: Space
    shapes: tuple[GemmShape, ...]
    budget_seconds: float = 285.0
    exhaustive: bool = False

    def __post_init__(self) -> None:
        grid = self.space.granularity
        wrong = [n for n in self.counts if n < 1 or n % grid]
        if wrong or not self.counts or list(self.counts) != sorted(set(self.counts)):
            what = f"{wrong[0]} is not a multiple of {grid}" if wrong else "the counts do not ascend"
            raise UserError(what, where="token counts", fix=f"give START:STOP:STEP in multiples of {grid}")


def tune(goal: TuneGoal, run: Run) -> list[Choice]:
    """Search for every token count, the largest first; the same choices on all ranks.

    Larger steps first: what wins for one is the next smaller one's seed, and the longest ones are sure to be reached.
    Time that a search leaves over is the others'.

    Raises:
        TokenWeaveError: on all ranks, where one fails.
    """
    choices: list[Choice] = []
    for done, n in enumerate(reversed(goal.counts)):
        left = goal.counts[: len(goal.counts) - done]
        began = run.elapsed()
        share = max(SEARCH_SHARE * goal.budget_seconds - began, 0) * n / sum(left)
        bench = Bench(run, n, goal.space.fuse())
        asked = _answers(run, bench.record)
        seen, over = (partial(asked, began + part * share) for part in (LOOK_SHARE, 1))
        search = Search(goal.space, goal.shapes, seen, over, goal.exhaustive)
        near = [c for choice in reversed(choices[-2:]) for c in _winners(choice)]
        inside = middle_of(goal.counts, n)
        middle = None if inside is None else Bench(run, inside, goal.space.fuse())
        choices.append(search.run(bench, list(dict.fromkeys(near)), middle))
        now = run.elapsed()
        bench.record.seconds = round(bench.record.seconds + now - began, 3)
        run.save(now)
        if run.comm.rank == 0:
            run.say(f"{done + 1}/{len(goal.counts)}  {_said(choices[-1])}, {_time_left(goal, run, now, left[:-1])}")
    return choices[::-1]


def middle_of(counts: Sequence[int], num_tokens: int) -> int | None:
    """The middle of the table's row that ends at ``num_tokens``; None for the first: it serves its last count alone."""
    below = max((n for n in counts if n < num_tokens), default=None)
    return None if below is None else num_tokens - (num_tokens - below) // 2


def _answers(run: Run, record: BucketRecord) -> Callable[[float], bool]:
    """Tells whether a deadline is over: first what an earlier run was told, so that this one finds what that found."""
    told = iter(tuple(record.answers))

    def over(deadline: float) -> bool:
        answer = next(told, None)
        if answer is None:
            answer = run.elapsed() >= deadline
            record.answers.append(answer)
        return answer

    return over


def _winners(choice: Choice) -> list[Candidate]:
    return [c for c in (choice.best_split, choice.fuse) if c is not None]


def _said(choice: Choice) -> str:
    text = f"{choice.num_tokens} tokens: {choice.candidate}"
    if choice.gain is None:
        return f"{text}, no split can run"
    gain = choice.gain
    return f"{text}, best split {1 + gain.median:.3f} of fuse-only ({1 + gain.low:.3f} to {1 + gain.high:.3f})"


def _time_left(goal: TuneGoal, run: Run, now: float, left: Sequence[int]) -> str:
    """An estimate from the searches so far, in proportion to tokens, and no more than the budget."""
    done = sum(n for n in goal.counts if n not in left)
    spent = sum(run.record.bucket(n).seconds for n in goal.counts if n not in left)
    wanted = spent / done * sum(left)
    return f"{now:.0f} s, about {max(min(wanted, goal.budget_seconds - now), 0):.0f} s left"


def make_table(goal: TuneGoal, choices: Sequence[Choice], measured: MeasuredOn) -> TuningTable:
    """The table of the choices: a row ends at each token count and begins after the one before.

    Steps below the first count are not split: nothing was measured there.
    """
    rows, lo = [], goal.counts[0] - goal.space.granularity + 1
    for choice in choices:
        c = choice.candidate
        rows.append(
            TableRow(
                tokens=Bucket(lo=lo, hi=choice.num_tokens),
                mode=c.mode,
                split_offset=c.offset or 0,
                attention=c.attention,
                mlp=c.mlp,
            )
        )
        lo = choice.num_tokens + 1
    source = TableSource(kind="measurement", text=f"trtllm-tokenweave tune, {measured.date}", measured=measured)
    return TuningTable(
        key=goal.key,
        granularity=goal.space.granularity,
        min_tokens=goal.counts[0],
        source=source,
        rows=tuple(rows),
    )


def measurements(run: Run, choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """Every candidate of every token count with its median and quartiles, for the file beside the table.

    ``middle`` has those that were compared in the middle of the row, too.
    """
    out = []
    for choice in choices:
        gain = choice.gain
        out.append(
            {
                "num_tokens": choice.num_tokens,
                "chosen": str(choice.candidate),
                "best_split": None if choice.best_split is None else str(choice.best_split),
                "fuse_only": str(choice.fuse),
                "split_over_fuse": None if gain is None else [round(1 + x, 5) for x in _finite(gain)],
                "separated": choice.separated,
                "seconds": run.record.bucket(choice.num_tokens).seconds,
                "candidates": candidate_rows(run, choice.num_tokens),
            }
        )
        if choice.middle is not None:
            rows = candidate_rows(run, choice.middle)
            out[-1]["middle"] = {"num_tokens": choice.middle, "candidates": rows}
    return out


def candidate_rows(run: Run, num_tokens: int) -> list[dict[str, Any]]:
    """Medians and quartiles of all candidates of a token count."""
    rows = []
    for name, found in run.record.bucket(num_tokens).candidates.items():
        row: dict[str, Any] = {
            "name": name,
            "offset": found.offset,
            "attention_ctas": found.attention.ctas,
            "mlp_ctas": found.mlp.ctas,
            "gemm_sms": found.mlp.gemm_sms,
            "error": found.error,
        }
        if found.rejected:
            row["rejected"] = found.rejected
        if found.ms:
            low, high = spread(found.ms)
            row |= {"samples": len(found.ms), "median_ms": round(statistics.median(found.ms), 4)}
            row |= {"quartiles_ms": [round(low, 4), round(high, 4)], "mhz": round(statistics.median(found.mhz))}
        rows.append(row)
    return rows


def _finite(gain: Any) -> list[float]:
    return [max(min(x, 9.0), -1.0) for x in (gain.low, gain.median, gain.high)]
