"""The search for one row of a table: seeds, then neighbours of the best, then the best ones against each other."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from trtllm_tokenweave.errors import TokenWeaveError
from trtllm_tokenweave.tune.candidates import COARSE_STEP, FINE_STEP, Candidate, Space
from trtllm_tokenweave.tune.measure import Bench, measure
from trtllm_tokenweave.tune.statistics import Interval, relative_difference, worst_difference
from trtllm_tokenweave.waves import GemmShape

#: Samples with which candidates are compared while looking around.
LOOK_ROUNDS = 2
#: Rounds of the last comparison: at first, between two looks, and at most. They take turns at one count or two.
MIN_ROUNDS, MORE_ROUNDS, MAX_ROUNDS = 8, 4, 32
#: Splits, and fuse-only candidates, in the last comparison.
FINALISTS, FUSE_FINALISTS = 3, 2
#: Of one offset: other CTAs change little, another offset may be better in the middle of a row.
SAME_OFFSET = 2
CONFIDENCE = 0.95
#: A split that is used gains more than this: less is not worth twice the collectives.
MIN_GAIN = 0.002
#: And, with nine chances in ten (the upper end of an 80 % interval), loses no more than this, nor does it at one of the
#: counts alone. At 95 % a gain of 5 % was missed for one disturbed pair of eight.
MAX_LOSS, USE_CONFIDENCE = 0.01, 0.8
#: Where two differ by less, it does not matter which is taken.
SAME = 0.003


@dataclass(frozen=True)
class Choice:
    """What a search found.

    Attributes:
        num_tokens: Tokens of the step: the row's largest count.
        candidate: What the table should say.
        best_split: The fastest split, used or not, of those that lose at no count if there are any; None where none
            could run.
        fuse: The fastest fuse-only candidate.
        gain: Interval of best split / fuse-only - 1 over interleaved pairs; None without a split.
        middle: The count within the row at which every second pair was measured; None: none was.
    """

    num_tokens: int
    candidate: Candidate
    best_split: Candidate | None
    fuse: Candidate
    gain: Interval | None
    middle: int | None = None

    @property
    def separated(self) -> bool:
        """Whether the interval says which of the two is faster."""
        return self.gain is None or self.gain.excludes_zero


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

    def run(self, bench: Bench, near: Sequence[Candidate] = (), middle: Bench | None = None) -> Choice:
        """Choose for the token count of ``bench``.

        Args:
            bench: Of the largest count of a row.
            near: Candidates that won at other counts, the nearest first.
            middle: Of a count in the middle of the row, which has to do with the same choice: splits that are equal
                where the row ends may differ there.

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
        return self._decide([bench] if middle is None else [bench, middle], looked)

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

    def _decide(self, benches: Sequence[Bench], looked: dict[Candidate, list[float]]) -> Choice:
        """Measure the best ones side by side, and take a split only if it wins and surely loses next to nothing."""
        bench, turns = benches[0], len(benches)
        ranked = sorted(looked, key=lambda c: statistics.median(looked[c]))
        while True:
            ranked = bench.usable(ranked)
            fuses = self._runnable([c for c in ranked if c.offset is None] or [self.space.fuse()], benches)
            splits = self._runnable(_varied(c for c in ranked if c.offset is not None), benches)
            finalists = [*itertools.islice(splits, FINALISTS), *itertools.islice(fuses, FUSE_FINALISTS)]
            times = compare(benches, finalists, self.out_of_time)
            split, fuse = (fastest(times, fuse_only=fuse_only, turns=turns) for fuse_only in (False, True))
            if fuse is None:
                counts = " or ".join(str(b.num_tokens) for b in benches)
                raise TokenWeaveError(f"no fuse-only step of {counts} tokens gives the same result twice")
            middle = None if turns == 1 else benches[1].num_tokens
            if split is None:
                return Choice(bench.num_tokens, fuse, None, fuse, None, middle)
            choice = split if _is_gain(times[split], times[fuse], turns) else fuse
            bench.check_whole(choice)
            if bench.usable([choice]):
                gain = relative_difference(times[split], times[fuse], CONFIDENCE, turns)
                return Choice(bench.num_tokens, choice, split, fuse, gain, middle)
            # Else it is wrong in a row that the quick look left out.

    def _runnable(self, candidates: Iterable[Candidate], benches: Sequence[Bench]) -> Iterator[Candidate]:
        """Those that can run at all counts, and are right there."""
        for candidate in candidates:
            if all(not self.space.refusal(b.num_tokens, candidate) and b.usable([candidate]) for b in benches):
                yield candidate


def _is_gain(split: Sequence[float], fuse: Sequence[float], turns: int) -> bool:
    gain = relative_difference(split, fuse, USE_CONFIDENCE, turns)
    return gain.median < -MIN_GAIN and gain.high < MAX_LOSS and worst_difference(split, fuse, turns) < MAX_LOSS


def _varied(splits: Iterable[Candidate]) -> Iterator[Candidate]:
    """Those in order, no more than `SAME_OFFSET` of an offset."""
    seen: Counter[int | None] = Counter()
    for candidate in splits:
        seen[candidate.offset] += 1
        if seen[candidate.offset] <= SAME_OFFSET:
            yield candidate


def best_of(times: dict[Candidate, list[float]], fuse_only: bool) -> Candidate | None:
    """That of the smallest median of the splits, or of the fuse-only candidates."""
    return min(_of_kind(times, fuse_only), key=lambda c: statistics.median(times[c]), default=None)


def fastest(times: dict[Candidate, list[float]], fuse_only: bool, turns: int = 1) -> Candidate | None:
    """The fastest of the splits, or of the fuse-only candidates, by pairs: those of a round are of one token count."""
    found = _of_kind(times, fuse_only)
    return min(found, key=lambda c: relative_difference(times[c], times[found[0]], turns=turns).median, default=None)


def _of_kind(times: dict[Candidate, list[float]], fuse_only: bool) -> list[Candidate]:
    return [c for c in times if (c.offset is None) == fuse_only]


def compare(
    benches: Sequence[Bench], finalists: Sequence[Candidate], out_of_time: Callable[[], bool]
) -> dict[Candidate, list[float]]:
    """Rounds of interleaved samples until it is clear which split and which fuse-only candidate are the fastest, and
    which of the two; or a cap. Those that are clearly not are left out of later rounds, and of the result.

    Rounds take turns at the counts of ``benches``. Round i of all candidates was measured together: their i-th samples
    are pairs.
    """
    times: dict[Candidate, list[float]] = {c: [] for c in finalists}
    done, rounds, turns = 0, MIN_ROUNDS, len(benches)
    while done < MAX_ROUNDS:
        for candidate, more in measure(benches, list(times), rounds, turn=done).items():
            times[candidate] += more
        done, rounds = done + rounds, MORE_ROUNDS
        times = without_losers(times, turns)
        if _is_clear(times, turns) or out_of_time():
            break
    return times


def without_losers(times: dict[Candidate, list[float]], turns: int) -> dict[Candidate, list[float]]:
    """Without those that are slower than the best of their kind, or no different from it.

    The best split is one that loses at no count, where there is such a one.
    """
    times, kept = _losing_nowhere(times, turns), {}
    for fuse_only in (False, True):
        best = fastest(times, fuse_only, turns)
        if best is None:
            continue
        for candidate in _of_kind(times, fuse_only):
            over = relative_difference(times[candidate], times[best], CONFIDENCE, turns)
            if candidate == best or not (over.low > 0 or _same(over)):
                kept[candidate] = times[candidate]
    return kept


def _losing_nowhere(times: dict[Candidate, list[float]], turns: int) -> dict[Candidate, list[float]]:
    """Without splits that lose too much at one of the counts, as long as others are left."""
    fuse = fastest(times, fuse_only=True, turns=turns)
    if fuse is None:
        return times
    kept = {c: t for c, t in times.items() if c.offset is None or worst_difference(t, times[fuse], turns) < MAX_LOSS}
    return kept if _of_kind(kept, fuse_only=False) else times


def _is_clear(times: dict[Candidate, list[float]], turns: int) -> bool:
    """Whether one of each kind is left, and it is clear which of the two is faster, or that they are the same."""
    kinds = [fastest(times, fuse_only, turns) for fuse_only in (False, True)]
    if len(times) > len([best for best in kinds if best is not None]):
        return False
    split, fuse = kinds
    if split is None or fuse is None:
        return True
    gain = relative_difference(times[split], times[fuse], CONFIDENCE, turns)
    return gain.excludes_zero or _same(gain)


def _same(difference: Interval) -> bool:
    return difference.low > -SAME and difference.high < SAME
