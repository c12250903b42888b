"""The search for one token count: seeds, then neighbours of the best, then the best ones against each other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trtllm_tokenweave.errors import TokenWeaveError
from trtllm_tokenweave.tune.candidates import COARSE_STEP, FINE_STEP, Candidate, Space
from trtllm_tokenweave.tune.measure import Bench
from trtllm_tokenweave.tune.statistics import Interval, relative_difference
from trtllm_tokenweave.waves import GemmShape

#: Samples with which candidates are compared while looking around.
LOOK_ROUNDS = 2
#: Rounds of the last comparison: from the fewest that have a 95 % interval to a cap.
MIN_ROUNDS, MAX_ROUNDS = 6, 30
#: Splits, and fuse-only candidates, in the last comparison.
FINALISTS, FUSE_FINALISTS = 3, 2
CONFIDENCE = 0.95
#: A split that is used gains more than this: less is not worth twice the collectives.
MIN_GAIN = 0.002
#: And, with the confidence, loses no more than this.
MAX_LOSS = 0.01
#: Where two differ by less, it does not matter which is taken.
SAME = 0.003


@dataclass(frozen=True)
class Choice:
    """What a search found.

    Attributes:
        num_tokens: Tokens of the step.
        candidate: What the table should say.
        best_split: The fastest split, used or not; None where none could run.
        fuse: The fastest fuse-only candidate.
        gain: Interval of best split / fuse-only - 1 over interleaved pairs; None without a split.
        separated: Whether the interval says which of the two is faster.
        milliseconds: Median of each candidate that was in the last comparison to its end.
    """

    num_tokens: int
    candidate: Candidate
    best_split: Candidate | None
    fuse: Candidate
    gain: Interval | None
    separated: bool
    milliseconds: dict[Candidate, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Search:
    """How to search.

    Attributes:
        space: The candidates.
        shapes: GEMMs of a layer, for the seeds.
        seen_enough: Whether looking around should end; the same answer on all ranks.
        out_of_time: Whether the search should end, likewise. The least that a choice needs is measured all the same.
        exhaustive: Measure every candidate on the coarse grid instead of looking around.
    """

    space: Space
    shapes: Sequence[GemmShape]
    seen_enough: Callable[[], bool] = lambda: False
    out_of_time: Callable[[], bool] = lambda: False
    exhaustive: bool = False

    def run(self, bench: Bench, near: Sequence[Candidate] = ()) -> Choice:
        """Choose for the token count of ``bench``; ``near`` won at other counts, the nearest first.

        Raises:
            TokenWeaveError: fuse-only itself does not give its own result again.
        """
        n = bench.num_tokens
        fuse = next((c for c in near if c.offset is None), self.space.fuse())
        seeds = [fuse, *self.space.seeds(n, self.shapes, near)]
        looked = bench.measure(seeds, LOOK_ROUNDS)
        if self.exhaustive:
            looked |= bench.measure([c for c in self.space.everything(n) if c not in looked], LOOK_ROUNDS)
        else:
            self._look_around(bench, looked, fuse_only=True)
            self._look_around(bench, looked, fuse_only=False)
        return self._decide(bench, looked)

    def _look_around(self, bench: Bench, looked: dict[Candidate, list[float]], *, fuse_only: bool) -> None:
        """Move to the best neighbour while there is a better one, in coarse steps first; adds to ``looked``."""
        for step in (COARSE_STEP,) if fuse_only else (COARSE_STEP, FINE_STEP):
            while not self.seen_enough():
                best = best_of(looked, fuse_only)
                if best is None:
                    return
                around = self.space.neighbours(bench.num_tokens, best, step)
                new = bench.usable([c for c in around if c not in looked])
                if not new:
                    break
                # The incumbent is measured again beside them: clocks drift.
                times = bench.measure([best, *new], LOOK_ROUNDS)
                looked.update(times)
                if best_of(times, fuse_only) == best:
                    break

    def _decide(self, bench: Bench, looked: dict[Candidate, list[float]]) -> Choice:
        """Measure the best ones side by side, and take a split only if it wins and surely loses next to nothing."""
        ranked = sorted(looked, key=lambda c: statistics.median(looked[c]))
        fuses = [c for c in ranked if c.offset is None][:FUSE_FINALISTS] or [self.space.fuse()]
        splits = [c for c in ranked if c.offset is not None][:FINALISTS]
        while True:
            times = compare(bench, [*splits, *fuses], self.out_of_time)
            medians = {c: statistics.median(t) for c, t in times.items()}
            split, fuse = best_of(times, fuse_only=False), best_of(times, fuse_only=True)
            if fuse is None:
                raise TokenWeaveError(f"no fuse-only step of {bench.num_tokens} tokens gives the same result twice")
            if split is None:
                return Choice(bench.num_tokens, fuse, None, fuse, None, True, medians)
            gain = relative_difference(times[split], times[fuse], CONFIDENCE)
            used = gain.median < -MIN_GAIN and gain.high < MAX_LOSS
            choice = split if used else fuse
            bench.check_whole(choice)
            if not bench.usable([choice]):
                # Wrong in a row that the quick look left out.
                splits, fuses = bench.usable(splits), bench.usable(fuses) or [self.space.fuse()]
                continue
            return Choice(bench.num_tokens, choice, split, fuse, gain, gain.high < 0 or gain.low > 0, medians)


def best_of(times: dict[Candidate, list[float]], fuse_only: bool) -> Candidate | None:
    """The fastest of the splits, or of the fuse-only candidates."""
    found = [c for c in times if (c.offset is None) == fuse_only]
    return min(found, key=lambda c: statistics.median(times[c]), default=None)


def compare(
    bench: Bench, finalists: Sequence[Candidate], out_of_time: Callable[[], bool]
) -> dict[Candidate, list[float]]:
    """Rounds of interleaved samples until it is clear which split and which fuse-only candidate are the fastest, and
    which of the two; or a cap. Those that are clearly not are left out of later rounds, and of the result.

    Round i of all candidates was measured together: their i-th samples are pairs.
    """
    times = bench.measure(finalists, MIN_ROUNDS)
    while len(times) > 1 and len(next(iter(times.values()))) < MAX_ROUNDS:
        times = without_losers(times)
        if _is_clear(times) or out_of_time():
            break
        for candidate, more in bench.measure(list(times), 1).items():
            times[candidate] += more
    return times


def without_losers(times: dict[Candidate, list[float]]) -> dict[Candidate, list[float]]:
    """Without those that are slower than the best of their kind, or no different from it."""
    kept = {}
    for fuse_only in (False, True):
        best = best_of(times, fuse_only)
        for candidate in times:
            if best is None or (candidate.offset is None) != fuse_only:
                continue
            over = relative_difference(times[candidate], times[best], CONFIDENCE)
            if candidate == best or not (over.low > 0 or _same(over)):
                kept[candidate] = times[candidate]
    return kept


def _is_clear(times: dict[Candidate, list[float]]) -> bool:
    """Whether one of each kind is left, and it is clear which of the two is faster, or that they are the same."""
    kinds = [best_of(times, fuse_only) for fuse_only in (False, True)]
    if len(times) > len([best for best in kinds if best is not None]):
        return False
    split, fuse = kinds
    if split is None or fuse is None:
        return True
    gain = relative_difference(times[split], times[fuse], CONFIDENCE)
    return gain.high < 0 or gain.low > 0 or _same(gain)


def _same(difference: Interval) -> bool:
    return difference.low > -SAME and difference.high < SAME
