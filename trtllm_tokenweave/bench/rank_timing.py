"""Device-event timing of steps that the ranks of mpirun run together."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trtllm_tokenweave.agreement import slowest
from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.device import Stream, call
from trtllm_tokenweave.progress import print_progress

#: Most steps queued back to back for one measurement, and measurements of each engine.
STEPS, ROUNDS = 5, 7
#: Pause before a measurement, so that the power limit of one engine is not paid by the next.
GAP_SECONDS = 0.03
METHOD = (
    f"{STEPS} steps (above 4096 tokens 2) queued back to back between device events, median of {ROUNDS} rounds, "
    "engines in random order, the slower rank; verified against the stock engine first"
)

#: Prepares a step, and returns what queues it.
Prepare = Callable[[], Callable[[], None]]


def steps_of(num_tokens: int) -> int:
    """Steps queued back to back: long ones need few to fill the queue and to warm the GPU."""
    return STEPS if num_tokens <= 4096 else 2


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
        self.stream = stream
        self.events: tuple[Any, ...] = tuple(call("cudaEventCreate") for _ in range(2))

    def time_once(self, step: Callable[[], None], count: int) -> tuple[float, float]:
        """Milliseconds on the GPU and on the CPU of one of ``count`` steps, of the slower rank."""
        start, end = self.events
        step()
        self.stream.synchronize()
        time.sleep(GAP_SECONDS)
        self.comm.barrier()
        # One step ahead of the first event: the queue is full when it comes, and the ranks have met.
        step()
        call("cudaEventRecord", start, self.stream.handle)
        before = time.perf_counter()
        for _ in range(count):
            step()
        queued = (time.perf_counter() - before) / count * 1e3
        call("cudaEventRecord", end, self.stream.handle)
        self.stream.synchronize()
        return self.slowest(call("cudaEventElapsedTime", start, end) / count), self.slowest(queued)

    def time_steps(
        self, steps: Mapping[str, Prepare], num_tokens: int, rounds: int = ROUNDS
    ) -> dict[str, tuple[float, float]]:
        """Medians over rounds, the steps in another order in each (the same on all ranks)."""
        order, shuffled = list(steps), random.Random(num_tokens)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for _ in range(rounds):
            shuffled.shuffle(order)
            for name in order:
                times[name].append(self.time_once(steps[name](), steps_of(num_tokens)))
        return {name: (median([gpu for gpu, _ in t]), median([cpu for _, cpu in t])) for name, t in times.items()}


def median(values: Sequence[float]) -> float:
    """Of milliseconds, as results hold them."""
    return round(statistics.median(values), 4)
