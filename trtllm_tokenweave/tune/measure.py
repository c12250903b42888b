"""Samples for a search: from the file of an earlier run first, then from the GPUs, the same on all ranks."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trtllm_tokenweave.agreement import gather_json, on_all_ranks, slowest
from trtllm_tokenweave.bench.step_timer import Timing, lead_steps, of_slowest_rank
from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.errors import TokenWeaveError
from trtllm_tokenweave.tune.candidates import Candidate
from trtllm_tokenweave.tune.store import BucketRecord, Measured, Record, save_record

#: Largest relative error of a row against the fuse-only result: bfloat16 through the layers, other GEMM kernels.
TOLERANCE = 0.1
#: Seconds between two writes of the samples.
SAVE_SECONDS = 2.0
#: Samples that are queued at once: what a run that is killed loses.
MAX_QUEUED = 32


class Runner(Protocol):
    """Runs steps of one rank. All ranks make the same calls; one that fails raises, the others learn of it."""

    #: Tokens of the step whose result is kept; 0: none is.
    reference_tokens: int

    def reference(self, num_tokens: int, candidate: Candidate) -> None:
        """Run a fuse-only step and keep its result for :meth:`error`, in the place of that before.

        Raises:
            TokenWeaveError: the result is not finite.
        """

    def error(self, num_tokens: int, candidate: Candidate, *, whole: bool = False) -> float:
        """Largest relative error of a row of the candidate's result; ``whole``: look at every row.

        ``num_tokens`` are `reference_tokens`.
        """

    def time(self, steps: Sequence[tuple[int, Candidate]], lead: int) -> list[Timing]:
        """Time each step (tokens and candidate), all queued without a pause after ``lead`` of the first."""


@dataclass
class Run:
    """What all parts of a run share.

    Attributes:
        comm: The ranks.
        runner: This rank's.
        record: The samples so far, equal on all ranks.
        clock: Seconds; rank 0's decides.
        started: What the clock said when the run began.
        file: Where rank 0 saves the samples; None: nowhere.
        say: Progress, called on rank 0.
    """

    comm: CommBackend
    runner: Runner
    record: Record
    clock: Callable[[], float]
    started: float
    file: Path | None = None
    say: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self._saved = self.started

    def elapsed(self) -> float:
        """Seconds since the run began, earlier runs that it goes on from included; rank 0's on all ranks."""
        return float(gather_json(self.comm, "clock", self.record.seconds + self.clock() - self.started)[0])

    def save(self, seconds: float) -> None:
        """Save the samples on rank 0, with the time that they took."""
        if self.comm.rank == 0 and self.file is not None:
            save_record(self.record.model_copy(update={"seconds": seconds}), self.file)

    def save_now_and_then(self) -> None:
        """Save where the last time is a while ago. Rank 0 alone looks at its clock: the others have nothing to save."""
        if self.comm.rank == 0 and self.clock() - self._saved >= SAVE_SECONDS:
            self._saved = self.clock()
            self.save(self.record.seconds + self._saved - self.started)


class Bench:
    """Samples of one token count.

    Args:
        run: The run.
        num_tokens: Tokens of the step.
        reference: The fuse-only candidate whose result all others have to give.
    """

    def __init__(self, run: Run, num_tokens: int, reference: Candidate) -> None:
        self.run, self.num_tokens, self._reference = run, num_tokens, reference
        self.record: BucketRecord = run.record.bucket(num_tokens)
        self._taken: dict[Candidate, int] = {}
        #: Looked at in this run: a resumed one has built its engine again.
        self._seen: set[Candidate] = set()
        self._checked_whole: set[Candidate] = set()
        self._shuffled = random.Random(num_tokens)

    def usable(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those whose results are right; each is looked at once, before it is timed."""
        return [c for c in candidates if not self._rejected(c)]

    def measure(self, candidates: Sequence[Candidate], rounds: int) -> dict[Candidate, list[float]]:
        """See :func:`measure`."""
        return measure([self], candidates, rounds)

    def shuffle(self, candidates: list[Candidate]) -> None:
        """Put candidates in another order: the same on all ranks, and in a run that goes on."""
        self._shuffled.shuffle(candidates)

    def next_sample(self, candidate: Candidate) -> tuple[list[float], int]:
        """Where the next sample of a candidate is, or will be: in its list, at a place that may be past its end."""
        taken = self._taken.get(candidate, 0)
        self._taken[candidate] = taken + 1
        return self._verified(candidate).ms, taken

    def check_whole(self, candidate: Candidate) -> None:
        """Verify every row of a candidate's result; what is wrong is rejected."""
        found = self._verified(candidate)
        found.error, found.rejected = _judged(self._error(candidate, whole=True))
        self._checked_whole.add(candidate)

    def _rejected(self, candidate: Candidate) -> bool:
        """What has samples was rejected after them: a resumed run finds out at the same place again."""
        found = self._verified(candidate)
        return bool(found.rejected) and (not found.ms or candidate in self._checked_whole)

    def _verified(self, candidate: Candidate) -> Measured:
        found = self.record.of(candidate)
        if found is None:
            found = self.record.add(candidate, *_judged(self._error(candidate)))
        return found

    def verify_again(self, candidate: Candidate) -> None:
        """What an earlier run verified is looked at once more before it is timed in this one."""
        if candidate not in self._seen and _judged(self._error(candidate))[1]:
            raise TokenWeaveError(f"{candidate} at {self.num_tokens} tokens: a result that was right is now wrong")

    def _error(self, candidate: Candidate, whole: bool = False) -> float:
        comm, runner, n = self.run.comm, self.run.runner, self.num_tokens
        where = f"at {n} tokens"
        self._seen.add(candidate)
        if runner.reference_tokens != n:
            on_all_ranks(comm, f"fuse-only result {where}", lambda: runner.reference(n, self._reference))
        error = on_all_ranks(comm, f"{candidate} {where}", lambda: runner.error(n, candidate, whole=whole))
        return slowest(comm, error if math.isfinite(error) else math.inf)

    def known_ms(self) -> float | None:
        """Milliseconds of some sample; None: there is none yet."""
        return next((found.ms[-1] for found in self.record.candidates.values() if found.ms), None)


def measure(
    benches: Sequence[Bench], candidates: Sequence[Candidate], rounds: int, turn: int = 0
) -> dict[Candidate, list[float]]:
    """Milliseconds of ``rounds`` new samples of each candidate that is usable at all counts.

    Rounds take turns at the counts of ``benches``, the ``turn``-th first, with the candidates in another order in each.
    """
    order = [c for c in candidates if all(bench.usable([c]) for bench in benches)]
    samples: list[tuple[Bench, Candidate]] = []
    for number in range(turn, turn + rounds):
        bench = benches[number % len(benches)]
        bench.shuffle(order)
        samples += [(bench, candidate) for candidate in order]
    places = [bench.next_sample(candidate) for bench, candidate in samples]
    missing = [sample for sample, (ms, taken) in zip(samples, places, strict=True) if taken >= len(ms)]
    for first in range(0, len(missing), MAX_QUEUED):
        _take(missing[first : first + MAX_QUEUED])
    times: dict[Candidate, list[float]] = {c: [] for c in order}
    for (_, candidate), (ms, taken) in zip(samples, places, strict=True):
        times[candidate].append(ms[taken])
    return times


def _take(samples: Sequence[tuple[Bench, Candidate]]) -> None:
    """Measure what no earlier run has, and save it now and then.

    A sample is kept as it would be at the clock of the run's first ones, `Record.mhz`: in proportion to the clock that
    it ran at, of the GPU whose clock was lowest, for which the others wait. What the clock does not make faster, as a
    collective that nothing hides, is thereby corrected too much, by its share of the step times the difference of the
    clocks: two small numbers.
    """
    for bench, candidate in samples:
        bench.verify_again(candidate)
    first = samples[0][0]
    run, lead = first.run, lead_steps(first.known_ms())
    steps = [(bench.num_tokens, candidate) for bench, candidate in samples]
    found = on_all_ranks(run.comm, f"steps of {first.num_tokens} tokens", lambda: run.runner.time(steps, lead))
    timings = of_slowest_rank(run.comm, found)
    if not run.record.mhz:
        run.record.mhz = round(statistics.median(timing.mhz for timing in timings), 1)
    for (bench, candidate), (milliseconds, mhz) in zip(samples, timings, strict=True):
        if not (0 < milliseconds < math.inf and 0 < mhz < math.inf):
            what = f"a step took {milliseconds} ms at {mhz} MHz"
            raise TokenWeaveError(f"{candidate} at {bench.num_tokens} tokens: {what}")
        measured = bench.record.candidates[str(candidate)]
        measured.ms.append(round(milliseconds * mhz / run.record.mhz, 5))
        measured.mhz.append(round(mhz, 1))
    run.save_now_and_then()


def _judged(error: float) -> tuple[float | None, str]:
    """The error as it is kept, and why the candidate is rejected (empty: it is not)."""
    if not math.isfinite(error):
        return None, "its result is not finite"
    return round(error, 6), "" if error <= TOLERANCE else f"its result is off by {error:.3g}"
