"""Device-event timing of steps that the ranks of mpirun run together."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from trtllm_tokenweave.agreement import slowest
from trtllm_tokenweave.bench.sm_clock import SmClock
from trtllm_tokenweave.bench.step_timer import Prepare, StepTimer, Timing, of_slowest_rank
from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.device import Stream
from trtllm_tokenweave.progress import print_progress

#: Most steps of a sample, and samples of each engine.
STEPS, ROUNDS = 5, 11
#: Steps of more tokens are long enough for two to be a sample.
SHORT_TOKENS = 1024
METHOD = (
    f"{STEPS} steps (above {SHORT_TOKENS} tokens 2) between device events, after one more of the same; median of "
    f"{ROUNDS} rounds, engines in random order, all queued without a pause; the slower rank; verified against the "
    "stock engine first; mhz: the median clock of the SMs meanwhile, of the rank whose is lower"
)


def steps_of(num_tokens: int) -> int:
    """Steps of a sample."""
    return STEPS if num_tokens <= SHORT_TOKENS else 2


class RankReporter:
    """What the ranks of a benchmark tell the user and each other.

    Args:
        comm: The ranks.
    """

    def __init__(self, comm: CommBackend) -> None:
        self.comm, self.started = comm, time.perf_counter()

    def say(self, what: str) -> None:
        """Progress, from rank 0 to stderr."""
        if self.comm.rank == 0:
            print_progress(time.perf_counter() - self.started, what)

    def slowest(self, value: float) -> float:
        """The largest of the ranks' values."""
        return slowest(self.comm, value)


class RankTimer(RankReporter):
    """Times steps on one rank; all ranks make the same calls.

    Args:
        comm: The ranks.
        stream: Where steps are queued.
    """

    def __init__(self, comm: CommBackend, stream: Stream) -> None:
        super().__init__(comm)
        self.stream, self.timer = stream, StepTimer(stream, SmClock(stream))

    def time_steps(self, steps: Mapping[str, Prepare], num_tokens: int, rounds: int = ROUNDS) -> dict[str, Timing]:
        """Medians over rounds, the steps in another order in each (the same on all ranks).

        A round that does not count comes first: it brings the GPUs to the clock that they have under load.
        """
        order, shuffled = list(steps), random.Random(num_tokens)
        names = []
        for _ in range(rounds + 1):
            shuffled.shuffle(order)
            names += order
        self.stream.synchronize()
        self.comm.barrier()
        found = self.timer.time([(steps[name], steps_of(num_tokens)) for name in names])
        counted = list(zip(names, of_slowest_rank(self.comm, found), strict=True))[len(order) :]
        of_each = {name: [timing for timed, timing in counted if timed == name] for name in steps}
        return {
            name: Timing(median([ms for ms, _ in of]), round(statistics.median(mhz for _, mhz in of)))
            for name, of in of_each.items()
        }

    def time_queueing(self, steps: Mapping[str, Prepare], rounds: int = ROUNDS) -> dict[str, float]:
        """Median milliseconds that the CPU takes to queue one of `STEPS` steps, the queue being empty at first."""
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, prepare in steps.items():
                step = prepare()
                step()
                self.stream.synchronize()
                self.comm.barrier()
                before = time.perf_counter()
                for _ in range(STEPS):
                    step()
                times[name].append(self.slowest((time.perf_counter() - before) / STEPS * 1e3))
                self.stream.synchronize()
        return {name: median(each) for name, each in times.items()}


def median(values: Sequence[float]) -> float:
    """Of milliseconds, as results hold them."""
    return round(statistics.median(values), 4)


def given(step: Callable[[], None]) -> Prepare:
    """Of a step that is prepared for good."""
    return lambda: step
