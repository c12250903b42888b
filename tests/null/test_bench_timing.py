"""Samples of steps in a queue that does not run empty, and what the ranks make of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.fake_gpu import FakeRuntime, install_cuda

from trtllm_tokenweave import device
from trtllm_tokenweave.bench import step_timer
from trtllm_tokenweave.bench.rank_timing import ROUNDS, STEPS, RankTimer, given, steps_of
from trtllm_tokenweave.bench.sm_clock import SmClock
from trtllm_tokenweave.bench.step_timer import LEAD_MS, MOST_LEAD_STEPS, Prepare, StepTimer, Timing, lead_steps
from trtllm_tokenweave.comm import CommBackend, LocalComm, run_ranks
from trtllm_tokenweave.device import CudaError, cudart
from trtllm_tokenweave.errors import TokenWeaveError


def test_long_steps_are_queued_fewer_times() -> None:
    assert [steps_of(n) for n in (1, 1024, 1025, 16384)] == [5, 5, 2, 2]


def test_a_queue_begins_with_as_much_work_as_brings_the_clock_down() -> None:
    assert [lead_steps(ms) for ms in (LEAD_MS, LEAD_MS + 1, LEAD_MS / 2, LEAD_MS / 3 - 0.1)] == [1, 1, 2, 4]
    assert lead_steps(1e-3) == MOST_LEAD_STEPS
    assert lead_steps(None) > 1


class Queue:
    """A stream on which a step takes as many milliseconds as it is asked for; notes when it runs empty."""

    handle = 7

    def __init__(self) -> None:
        self.now, self.log = 0.0, ["empty"]
        self.events: dict[int, float] = {}

    def synchronize(self) -> None:
        self.log.append("empty")

    def step(self, milliseconds: float) -> None:
        self.now += milliseconds
        self.log.append(f"{milliseconds:g}")

    def prepare(self, milliseconds: float) -> Any:
        self.log.append("prepare")
        return partial(self.step, milliseconds)

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "cudaEventCreate":
            self.events[len(self.events)] = -1.0
            return len(self.events) - 1
        if name == "cudaEventRecord":
            assert arguments[1] == self.handle
            self.events[arguments[0]] = self.now
            return None
        assert name == "cudaEventElapsedTime"
        assert self.log[-1] == "empty", "read before the work was done"
        return self.events[arguments[1]] - self.events[arguments[0]]


class Clock:
    """Ran at 1400 MHz between the first two marks, and at 1 more between any next two."""

    def begin(self, marks: int) -> None:
        self.room, self.marks = marks, 0

    def mark(self) -> None:
        self.marks += 1

    def mhz(self) -> list[float]:
        assert self.marks == self.room
        return [1400.0 + number for number in range(self.marks // 2)]


def test_samples_follow_each_other_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()
    monkeypatch.setattr(step_timer, "call", queue.call)
    timer = StepTimer(cast("Any", queue), cast("Any", Clock()))
    samples = [(partial(queue.prepare, 3.0), 2), (partial(queue.prepare, 5.0), 1)]
    assert timer.time(samples, lead=2) == [Timing(3.0, 1400.0), Timing(5.0, 1401.0)]
    # The lead and one more, then two that count; one and one.
    assert queue.log == ["empty", "prepare", *["3"] * 5, "prepare", *["5"] * 2, "empty"]
    # Events are made once, and a shorter queue does not read those of the longer one.
    assert timer.time(samples[1:]) == [Timing(5.0, 1400.0)]
    assert len(queue.events) == 4


class FakeDriver:
    """Launches the kernel of `SmClock`: SM k's counters are behind by k, and SM 1 is reached by every second mark."""

    CUDA_SUCCESS = 0

    def __init__(self, mhz: float, sms: tuple[int, ...] = (0, 1, 2), strange: tuple[int, ...] = ()) -> None:
        self.mhz, self.sms, self.nanoseconds, self.launched = mhz, sms, 10**9, 0
        self.strange = strange

    def cuModuleLoadData(self, image: bytes) -> Any:  # noqa: N802
        assert image.endswith(b"\0")
        return 0, "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> Any:  # noqa: N802
        assert module == "module"
        return (0, "kernel") if name == b"sm_clocks" else (500, None)

    def cuGetErrorString(self, _code: int) -> Any:  # noqa: N802
        return 0, b"not found"

    def cuLaunchKernel(self, kernel: str, *arguments: Any) -> Any:  # noqa: N802
        assert (kernel, arguments[0]) == ("kernel", 6)
        ((address,), _types) = arguments[8]
        row = np.ctypeslib.as_array((ctypes.c_uint64 * 2048).from_address(address)).reshape(1024, 2)
        self.nanoseconds += 10_000_000
        for sm in self.sms:
            if sm != 1 or self.launched % 2:
                cycles = self.nanoseconds * self.mhz / 1e3 - sm
                # Another SM's, which has run for a while longer.
                if sm in self.strange and self.launched % 2 == 0:
                    cycles += 10**9
                row[sm] = cycles, self.nanoseconds
        self.launched += 1
        return (0,)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SmClock]]:
    install_cuda(monkeypatch, FakeRuntime())

    def clock(**fields: Any) -> SmClock:
        made = FakeDriver(**fields)
        monkeypatch.setattr(device, "cuda_driver", lambda: made)
        return SmClock(cast("Any", SimpleNamespace(handle=7, synchronize=lambda: None)))

    yield clock
    cudart.cache_clear()


def test_the_clock_is_cycles_over_time_of_sms_that_both_marks_reached(gpu: Callable[..., SmClock]) -> None:
    clock = gpu(mhz=1433.0)
    for _ in range(2):
        clock.begin(4)
        for _ in range(4):
            clock.mark()
        assert clock.mhz() == pytest.approx([1433.0] * 2, rel=1e-6)


def test_marks_without_an_sm_in_common_are_an_error(gpu: Callable[..., SmClock]) -> None:
    clock = gpu(mhz=1000.0, sms=(1,))
    clock.begin(2)
    clock.mark()
    clock.mark()
    with pytest.raises(TokenWeaveError, match="clock of the SMs cannot be read: their counters tell nothing"):
        clock.mhz()


def test_counters_of_another_sm_do_not_count(gpu: Callable[..., SmClock]) -> None:
    clock = gpu(mhz=1433.0, strange=(0,))
    clock.begin(2)
    clock.mark()
    clock.mark()
    assert clock.mhz() == pytest.approx([1433.0], rel=1e-6)


def test_a_clock_above_the_highest_is_an_error(gpu: Callable[..., SmClock]) -> None:
    clock = gpu(mhz=1433.0, strange=(0, 2))
    clock.begin(2)
    clock.mark()
    clock.mark()
    with pytest.raises(TokenWeaveError, match=r"tell 101433 MHz, above the highest, 1980\. Fix: let no other process"):
        clock.mhz()


def test_an_error_of_the_driver_is_named(gpu: Callable[..., SmClock]) -> None:
    gpu(mhz=1.0)
    with pytest.raises(CudaError, match="cuModuleGetFunction: not found"):
        device.call_driver("cuModuleGetFunction", "module", b"other")


class Played(RankTimer):
    """Steps of given milliseconds; the first of each takes twice as long."""

    def __init__(self, comm: CommBackend, times: dict[str, float]) -> None:
        self.comm, self.started, self.times = comm, 0.0, times
        self.stream = cast("Any", SimpleNamespace(synchronize=lambda: None))
        self.timer = cast("Any", self)
        self.run: list[str] = []

    def queue(self, name: str) -> None:
        self.run.append(name)

    def steps(self) -> dict[str, Prepare]:
        return {name: given(partial(self.queue, name)) for name in self.times}

    def time(self, samples: Sequence[tuple[Prepare, int]]) -> list[Timing]:
        """As `StepTimer.time`."""
        found = []
        for prepare, _ in samples:
            prepare()()
            name = self.run[-1]
            ms = self.times[name] * (2 if self.run.count(name) == 1 else 1)
            found.append(Timing(ms, 1500.0 - 100 * self.comm.rank))
        return found


def test_times_and_clocks_are_of_the_slower_rank_and_the_first_round_does_not_count() -> None:
    runners: list[Played] = []

    def job(comm: CommBackend) -> dict[str, Timing]:
        runner = Played(comm, {"a": 4.0 + comm.rank, "b": 7.0 - comm.rank})
        runners.append(runner)
        return runner.time_steps(runner.steps(), 4096, 1)

    found = run_ranks([partial(job, comm) for comm in LocalComm.group(2)])
    assert found == [{"a": Timing(5.0, 1400.0), "b": Timing(7.0, 1400.0)}] * 2
    assert runners[0].run == runners[1].run
    assert sorted(runners[0].run) == ["a", "a", "b", "b"]


def test_queueing_is_timed_with_an_empty_queue() -> None:
    (comm,) = LocalComm.group(1)
    runner = Played(comm, {"a": 1.0, "b": 1.0})
    waited: list[int] = []
    cast("Any", runner.stream).synchronize = lambda: waited.append(len(runner.run))
    found = runner.time_queueing(runner.steps())
    assert set(found) == {"a", "b"}
    assert all(ms >= 0 for ms in found.values())
    # One ahead, then those that are timed, which the next one does not wait behind.
    assert waited[:4] == [1, 1 + STEPS, 2 + STEPS, 2 + 2 * STEPS]
    assert len(runner.run) == 2 * ROUNDS * (1 + STEPS)
