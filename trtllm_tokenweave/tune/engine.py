"""The tuning engine: a few decoder layers whose split and launch configuration are inputs of every step.

Its two extra inputs are read by their dimensions alone: that of `PREFIX_INPUT` is the prefix half's rows, that of
`stack_network.BATCH_INPUT` picks a row of the table, and so a launch configuration. Nothing is built again between
candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.agreement import on_all_ranks
from trtllm_tokenweave.bench.sm_clock import SmClock
from trtllm_tokenweave.bench.stack_network import BATCH_INPUT, Gemm, Stack
from trtllm_tokenweave.bench.step_timer import StepTimer, Timing
from trtllm_tokenweave.builder import BuilderSettings, ShapeRange, build_on_all_ranks, opt_num_tokens
from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.device import DeviceArray, Stream, call, cudart
from trtllm_tokenweave.engine import Engine
from trtllm_tokenweave.engine_context import Binding, Bindings
from trtllm_tokenweave.errors import TokenWeaveError
from trtllm_tokenweave.plugin_library import plugin_library
from trtllm_tokenweave.recorder.enums import TRT_NAMES, numpy_dtype
from trtllm_tokenweave.step_graphs import StepGraphs
from trtllm_tokenweave.table import TuningTable
from trtllm_tokenweave.tune.candidates import Candidate, Space
from trtllm_tokenweave.tune.measure import MAX_QUEUED

PREFIX_INPUT = "prefix_tokens"
Mode = Literal["eager", "graph"]
#: Rows that are compared with the fuse-only result before a candidate is timed, besides those at the cut.
SAMPLED_ROWS = 256
CUT_ROWS = 16
#: Graphs that are kept: as many as are queued at once.
GRAPHS = MAX_QUEUED
#: The input of the step before a verified one begins so many rows later: where TensorRT's alignment of addresses holds.
OTHER_ROWS = 128


@dataclass(frozen=True)
class TuningEngine:
    """What to build.

    Attributes:
        stack: The layers; its options hold the space's table, `PREFIX_INPUT` and the largest step.
        space: The candidates.
        rule: Table that says which step the profile is optimised for, as a final engine's would.
        gemm: Whose GEMMs the engine has.
        symmetric: Activations lie in symmetric memory; else collectives copy.
        mode: Whether steps are queued layer by layer or from CUDA graphs.
    """

    stack: Stack
    space: Space
    rule: TuningTable
    gemm: Gemm = "trt"
    symmetric: bool = True
    mode: Mode = "eager"

    @property
    def opt_num_tokens(self) -> int:
        """Tokens that the profile is optimised for; the most there are where the rule splits none: a table may."""
        most = self.stack.options.max_num_tokens
        return opt_num_tokens(self.rule, most, 1) if self.rule.prefix_lookup(1, most).splits else most

    @property
    def profile(self) -> dict[str, ShapeRange]:
        """Ranges of the inputs; at the optimum the step is cut in half."""
        most, best, hidden = self.stack.options.max_num_tokens, self.opt_num_tokens, self.stack.config.hidden_size
        return {
            "x": ShapeRange((1, hidden), (best, hidden), (most, hidden)),
            PREFIX_INPUT: ShapeRange((1,), (max(best // 2, 1),), (most,)),
            BATCH_INPUT: ShapeRange((1,), (1,), (len(self.space.launches),)),
        }


def steps_of(num_tokens: int, layers: int) -> int:
    """Steps of one sample: the same on all ranks, whatever they measure.

    A sample takes about ten milliseconds, or one step: more, shorter ones say more in the same time.
    """
    return max(1, min(5, 8192 // (num_tokens * layers)))


class GpuRunner:
    """Runs the tuning engine of one rank; see `measure.Runner`. All ranks make it together.

    Args:
        engine: What to build.
        comm: The ranks.
        cache: This rank's timing cache; made when missing.

    Raises:
        TokenWeaveError: on all ranks, where one cannot build or has no memory.
    """

    def __init__(self, engine: TuningEngine, comm: CommBackend, cache: Path) -> None:
        self.engine = engine
        stack = engine.stack
        # Seconds of work, which would else be done twice in a row: the second build waits for the first.
        on_all_ranks(comm, "weights", lambda: stack.weights)
        settings = BuilderSettings((engine.profile,), timing_cache=cache)
        plan = build_on_all_ranks(comm, lambda network: stack.build(network, "woven", engine.gemm), settings)
        if plan.result.mode != "weave":
            reasons = "; ".join(refusal.reason for refusal in plan.result.plan.refused)
            raise TokenWeaveError(f"the tuning engine is not split: {reasons}")
        self.checks = [str(check) for check in plan.report.checks]
        self.memory_bytes = plan.report.memory_bytes
        self.context = Engine.of_plan(plan, comm).context(symmetric=engine.symmetric)
        self.graphs = StepGraphs(self.context, GRAPHS)
        self.stream = Stream()
        self.timer = StepTimer(self.stream, SmClock(self.stream))
        self._x, self._out, self._expected, self._counts = on_all_ranks(comm, "inputs and outputs", self._arrays)
        self.reference_tokens = 0

    def _arrays(self) -> tuple[DeviceArray, DeviceArray, DeviceArray, DeviceArray]:
        """The rows to run, equal on all ranks, two outputs, and what the inputs lie in whose values nothing reads."""
        stack = self.engine.stack
        most, hidden = stack.options.max_num_tokens, stack.config.hidden_size
        dtype = numpy_dtype(TRT_NAMES[stack.config.dtype])
        x = np.random.default_rng(stack.seed).standard_normal((most + OTHER_ROWS, hidden), np.float32).astype(dtype)
        counts = DeviceArray((max(most, len(self.engine.space.launches)),), np.int32)
        counts.fill(0)
        return DeviceArray.from_numpy(x), DeviceArray((most, hidden), dtype), DeviceArray((most, hidden), dtype), counts

    def close(self) -> None:
        """Give everything back; graphs before their context."""
        with ExitStack() as last_first:
            last_first.callback(self.context.close)
            last_first.callback(self.graphs.close)
            last_first.callback(self.stream.synchronize)

    def __enter__(self) -> GpuRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error of the GPU nothing can be given back either, and the first error is the one to see.
        with nullcontext() if kind is None else suppress(TokenWeaveError):
            self.close()

    def reference(self, num_tokens: int, candidate: Candidate) -> None:
        """See `measure.Runner`."""
        self.reference_tokens = 0
        self._run(num_tokens, candidate, self._expected)
        if not np.isfinite(_as_float(rows_of(self._expected, 0, num_tokens, 1))).all():
            raise TokenWeaveError(f"the fuse-only result of {num_tokens} tokens is not finite")
        self.reference_tokens = num_tokens

    def error(self, num_tokens: int, candidate: Candidate, *, whole: bool = False) -> float:
        """See `measure.Runner`. The output is poisoned before the step, and what the step before computed differs."""
        self._run(num_tokens, candidate, self._out)
        stride = 1 if whole else max(1, num_tokens // SAMPLED_ROWS)
        cut = candidate.prefix(num_tokens, self.engine.space.granularity)
        # Another phase for each split, so that the same rows are not left out by all.
        first = cut % stride
        spans = [(first, len(range(first, num_tokens, stride)), stride)]
        low, high = max(cut - CUT_ROWS, 0), min(cut + CUT_ROWS, num_tokens)
        spans.append((low, high - low, 1))
        return max(self._row_error(*span) for span in spans)

    def _row_error(self, first: int, count: int, stride: int) -> float:
        want, got = (_as_float(rows_of(a, first, count, stride)) for a in (self._expected, self._out))
        squares = np.maximum(_squares(want), np.finfo(np.float32).tiny)
        error = math.sqrt(float(np.max(_squares(got - want) / squares, initial=0.0)))
        return error if math.isfinite(error) else math.inf

    @property
    def symmetric(self) -> bool:
        """Whether collectives found their tensors in symmetric memory, at the same offsets on all ranks."""
        return bool(self.context.symmetric) and not plugin_library().counters()["offset_fallbacks"]

    def time(self, steps: Sequence[tuple[int, Candidate]], lead: int) -> list[Timing]:
        """See `measure.Runner`: between device events."""
        layers = self.engine.stack.config.num_hidden_layers
        if self.engine.mode == "graph":
            for step in dict.fromkeys(steps):
                # Captures wait for the GPU. Run, too: what was used last is not dropped for the graphs that follow.
                self._queued(*step, self._out)()
        samples = [(partial(self._queued, n, c, self._out), steps_of(n, layers)) for n, c in steps]
        return self.timer.time(samples, lead)

    def _run(self, num_tokens: int, candidate: Candidate, out: DeviceArray) -> None:
        """A step as it will be timed, after one on other rows: what a collective left behind would else look right."""
        if self.engine.mode == "graph":
            self._queued(num_tokens, candidate, out)  # its capture runs the step, too
        self.context.step(*self._bindings(num_tokens, candidate, out, OTHER_ROWS), self.stream)
        self.stream.synchronize()
        out.fill(0xFF)
        self._queued(num_tokens, candidate, out)()
        self.stream.synchronize()

    def _queued(self, num_tokens: int, candidate: Candidate, out: DeviceArray) -> Callable[[], None]:
        bound = self._bindings(num_tokens, candidate, out)
        if self.engine.mode == "eager":
            self.context.bind(*bound)
            return lambda: self.context.enqueue(self.stream)
        failed = self.graphs.counters.fallback
        while not self.graphs.has(*bound):
            self.graphs.step(*bound, self.stream)
            if self.graphs.counters.fallback > failed:
                raise TokenWeaveError(f"{candidate}, {num_tokens} tokens: {self.graphs.counters.reason}")
        return lambda: self.graphs.step(*bound, self.stream)

    def _bindings(
        self, num_tokens: int, candidate: Candidate, out: DeviceArray, first_row: int = 0
    ) -> tuple[Bindings, Bindings]:
        space, shape = self.engine.space, (num_tokens, self._x.shape[1])
        counts = self._counts.address
        inputs = {
            "x": Binding(self._x.address + first_row * self._x.shape[1] * self._x.dtype.itemsize, shape),
            PREFIX_INPUT: Binding(counts, (candidate.prefix(num_tokens, space.granularity),)),
            BATCH_INPUT: Binding(counts, (space.batch(candidate),)),
        }
        return inputs, {"out": Binding(out.address, shape)}


def rows_of(array: DeviceArray, first: int, count: int, stride: int) -> NDArray[np.generic]:
    """Copy every ``stride``-th row of a matrix to the host, ``count`` of them from row ``first`` on."""
    width = array.shape[1] * array.dtype.itemsize
    out = np.empty((count, array.shape[1]), array.dtype)
    if count:
        kind = cudart().cudaMemcpyKind.cudaMemcpyDeviceToHost
        source = array.address + first * width
        call("cudaMemcpy2D", out.ctypes.data, width, source, stride * width, width, count, kind)
    return out


def _as_float(array: NDArray[np.generic]) -> NDArray[np.float32]:
    return array.astype(np.float32)


def _squares(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sum of the squares of each row; several times faster than `numpy.linalg.norm`, and done for whole results."""
    squares: NDArray[np.float32] = np.einsum("ij,ij->i", rows, rows)
    return squares
