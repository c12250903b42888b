"""Times steps that are queued one after the other, so that the GPU does not rest in between.

A GPU at its power limit that has rested for milliseconds runs at a higher clock until its limit catches up, tens of
milliseconds later. Steps that are timed after pauses are therefore neither those of a busy server nor alike: the same
step differs several times as much from sample to sample as in a queue that never runs empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trtllm_tokenweave.agreement import gather_json
from trtllm_tokenweave.bench.sm_clock import SmClock
from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.device import Stream, call

#: Milliseconds of work after a pause that fill the queue, and begin to bring the clock back to what it is under load.
LEAD_MS = 25.0
#: Steps of that work, at most, and where it is not known yet how long one takes.
MOST_LEAD_STEPS, UNKNOWN_LEAD_STEPS = 64, 4

#: Prepares a step, and returns what queues it.
Prepare = Callable[[], Callable[[], None]]


def lead_steps(milliseconds: float | None) -> int:
    """Steps of so many milliseconds (None: unknown) with which a queue begins after a pause.

    They are counted, not timed: all ranks have to queue as many.
    """
    if milliseconds is None:
        return UNKNOWN_LEAD_STEPS
    return min(MOST_LEAD_STEPS, math.ceil(LEAD_MS / milliseconds))


class Timing(NamedTuple):
    """What a sample found.

    Attributes:
        ms: Milliseconds of a step.
        mhz: The clock of the SMs meanwhile.
    """

    ms: float
    mhz: float


def of_slowest_rank(comm: CommBackend, timings: Sequence[Timing]) -> list[Timing]:
    """Of each sample the longest time of all ranks and the lowest clock, on every rank."""
    of_ranks = gather_json(comm, "timings", timings)
    each_sample = (zip(*sample, strict=True) for sample in zip(*of_ranks, strict=True))
    return [Timing(float(max(ms)), float(min(mhz))) for ms, mhz in each_sample]


class StepTimer:
    """Times steps of one rank on one stream.

    Args:
        stream: Where steps are queued.
        clock: Tells the clock of each sample, by marks in the same stream.
    """

    def __init__(self, stream: Stream, clock: SmClock) -> None:
        self.stream, self.clock = stream, clock
        self._events: list[tuple[Any, Any]] = []

    def time(self, samples: Sequence[tuple[Prepare, int]], lead: int = 0) -> list[Timing]:
        """Time a step of each sample, between device events.

        Args:
            samples: What prepares a step, and how many of it a sample holds, in the order in which they are queued.
                One more runs before each sample: what TensorRT does once after a change of shapes is done then.
            lead: Steps of the first sample that are queued before all.
        """
        while len(self._events) < len(samples):
            self._events.append((call("cudaEventCreate"), call("cudaEventCreate")))
        self.clock.begin(2 * len(samples))
        for number, ((prepare, count), (start, end)) in enumerate(zip(samples, self._events, strict=False)):
            step = prepare()
            for _ in range(1 if number else lead + 1):
                step()
            # Marks are outside the events: each takes microseconds.
            self.clock.mark()
            call("cudaEventRecord", start, self.stream.handle)
            for _ in range(count):
                step()
            call("cudaEventRecord", end, self.stream.handle)
            self.clock.mark()
        self.stream.synchronize()
        return [
            Timing(float(call("cudaEventElapsedTime", start, end)) / count, mhz)
            for (_, count), (start, end), mhz in zip(samples, self._events, self.clock.mhz(), strict=False)
        ]
