"""Samples for a search: from the file of an earlier run first, then from the GPUs, the same on all ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trtllm_tokenweave.agreement import gather_json, on_all_ranks, slowest
from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.errors import TokenWeaveError
from trtllm_tokenweave.tune.candidates import Candidate
from trtllm_tokenweave.tune.store import BucketRecord, Measured, Record, save_record

#: Largest relative error of a row against the fuse-only result: bfloat16 through the layers, other GEMM kernels.
TOLERANCE = 0.1
#: Seconds between two writes of the samples.
SAVE_SECONDS = 2.0


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

    def prepare(self, num_tokens: int, candidate: Candidate) -> None:
        """Bind a step."""

    def time(self) -> float:
        """Milliseconds of what :meth:`prepare` bound."""


@dataclass(frozen=True)
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

    def elapsed(self) -> float:
        """Seconds since the run began, earlier runs that it goes on from included; rank 0's on all ranks."""
        return float(gather_json(self.comm, "clock", self.record.seconds + self.clock() - self.started)[0])

    def save(self, seconds: float) -> None:
        """Save the samples on rank 0, with the time that they took."""
        if self.comm.rank == 0 and self.file is not None:
            save_record(self.record.model_copy(update={"seconds": seconds}), self.file)


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
        self._saved = run.clock()

    def usable(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those whose results are right; each is looked at once, before it is timed."""
        return [c for c in candidates if not self._rejected(c)]

    def measure(self, candidates: Sequence[Candidate], rounds: int) -> dict[Candidate, list[float]]:
        """Milliseconds of ``rounds`` new samples of each usable candidate, in another order in each round."""
        order = self.usable(candidates)
        times: dict[Candidate, list[float]] = {c: [] for c in order}
        for _ in range(rounds):
            self._shuffled.shuffle(order)
            for candidate in order:
                times[candidate].append(self._sample(candidate))
            self._save_now_and_then()
        return times

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

    def _verify_again(self, candidate: Candidate) -> None:
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

    def _sample(self, candidate: Candidate) -> float:
        found, taken = self._verified(candidate), self._taken.get(candidate, 0)
        if taken == len(found.ms):
            self._verify_again(candidate)
            comm, runner = self.run.comm, self.run.runner
            tag = f"{candidate} at {self.num_tokens} tokens"
            on_all_ranks(comm, tag, lambda: runner.prepare(self.num_tokens, candidate))
            milliseconds = slowest(comm, on_all_ranks(comm, tag, runner.time))
            if not 0 < milliseconds < math.inf:
                raise TokenWeaveError(f"{tag}: a step took {milliseconds} ms")
            found.ms.append(round(milliseconds, 5))
        self._taken[candidate] = taken + 1
        return found.ms[taken]

    def _save_now_and_then(self) -> None:
        """Rank 0 alone looks at its clock: the others have nothing to save."""
        run = self.run
        if run.comm.rank == 0 and run.clock() - self._saved >= SAVE_SECONDS:
            self._saved = run.clock()
            run.save(run.record.seconds + self._saved - run.started)


def _judged(error: float) -> tuple[float | None, str]:
    """The error as it is kept, and why the candidate is rejected (empty: it is not)."""
    if not math.isfinite(error):
        return None, "its result is not finite"
    return round(error, 6), "" if error <= TOLERANCE else f"its result is off by {error:.3g}"
