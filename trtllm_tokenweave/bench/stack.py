"""Decoder layers in TensorRT engines, woven and not: `mpirun -n N trtllm-tokenweave bench stack`.

All engines are built from the same weights, on all ranks with rank 0's timings, and checked against the stock one
before anything is timed. Times are of device events around steps that are queued back to back, of the slower rank.
"""

from __future__ import annotations

import datetime as dt
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trtllm_tokenweave.agreement import gather_json, on_all_ranks
from trtllm_tokenweave.bench import timeline
from trtllm_tokenweave.bench.stack_network import VARIANTS, Gemm, Stack, Variant
from trtllm_tokenweave.builder import BuilderSettings, ShapeRange, build_on_all_ranks, opt_num_tokens
from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.device import DeviceArray, Stream, call
from trtllm_tokenweave.engine import Engine
from trtllm_tokenweave.engine_context import Array, Binding, Bindings, EngineContext
from trtllm_tokenweave.errors import TokenWeaveError
from trtllm_tokenweave.plugin_library import plugin_library
from trtllm_tokenweave.recorder.enums import TRT_NAMES, numpy_dtype
from trtllm_tokenweave.step_graphs import StepGraphs

Mode = Literal["eager", "graph"]
MODES: tuple[Mode, ...] = ("eager", "graph")
#: Steps queued back to back for one measurement, and measurements of each engine.
STEPS, ROUNDS = 5, 7
#: Pause before a measurement, so that the power limit of one engine is not paid by the next.
GAP_SECONDS = 0.03
#: Largest relative error against the stock engine: bfloat16 through all layers, sums in another order.
TOLERANCE = 0.05


@dataclass(frozen=True)
class StackBench:
    """What to measure.

    Attributes:
        stack: The layers, with a table whose launch configurations say the SM budget of GEMMs.
        tokens: Token counts of the table of results.
        small_tokens: Token counts of steps that are not split, timed for GPU and CPU.
        gemms: Whose GEMMs the woven engine has: TensorRT's ("trt"), our plugin's ("budget").
        symmetric: Activations of woven and fused engines lie in symmetric memory; else collectives copy.
        sweep_ctas: CTAs to try for the collectives of split steps.
    """

    stack: Stack
    tokens: tuple[int, ...] = (1024, 2048, 4096, 8192)
    small_tokens: tuple[int, ...] = (1, 16, 64)
    gemms: tuple[Gemm, ...] = ("trt", "budget")
    symmetric: bool = True
    sweep_ctas: tuple[int, ...] = (4, 6, 8, 12, 16, 24)


@dataclass
class Running:
    """An engine's context, and the step that is bound."""

    context: EngineContext
    graphs: StepGraphs
    memory_bytes: int
    plan_bytes: int
    checks: list[str] = field(default_factory=list)

    @classmethod
    def make(
        cls, bench: StackBench, variant: Variant, gemm: Gemm, comm: CommBackend, folder: Path, fused: int | None
    ) -> Running:
        """Build and load; all ranks together. ``fused``: activation memory of the fuse-only engine."""
        stack, symmetric = bench.stack, bench.symmetric
        options, hidden = stack.options, stack.config.hidden_size
        best = opt_num_tokens(options.table, options.max_num_tokens, options.max_batch_size)
        ranges = ShapeRange((1, hidden), (best, hidden), (options.max_num_tokens, hidden))
        settings = BuilderSettings(
            ({"x": ranges},),
            timing_cache=folder / f"timing{comm.rank}.cache",
            fused_memory_bytes=fused,
        )
        plan = build_on_all_ranks(comm, lambda network: stack.build(network, variant, gemm), settings)
        context = Engine.of_plan(plan, comm).context(symmetric=symmetric and plan.result.mode != "stock")
        checks = [str(check) for check in plan.report.checks]
        return cls(context, StepGraphs(context), plan.report.memory_bytes, plan.report.plan_bytes, checks)


class StackRunner:
    """Runs the engines of one rank on arrays that they share."""

    def __init__(self, bench: StackBench, comm: CommBackend, folder: Path) -> None:
        self.bench, self.comm, self.started = bench, comm, time.perf_counter()
        self.stream = Stream()
        stack = bench.stack
        shape = (stack.options.max_num_tokens, stack.config.hidden_size)
        dtype = numpy_dtype(TRT_NAMES[stack.config.dtype])
        x = np.random.default_rng(stack.seed).standard_normal(shape, np.float32).astype(dtype)
        self.x, self.out = DeviceArray.from_numpy(x), DeviceArray(shape, dtype)
        self.engines: dict[str, Running] = {}
        for variant in VARIANTS:
            for gemm in bench.gemms if variant == "woven" else ("trt",):
                name = f"woven_{gemm}" if variant == "woven" else variant
                fused = self.engines["fuse_only"].memory_bytes if variant == "woven" else None
                self.say(f"building {name}")
                self.engines[name] = Running.make(bench, variant, gemm, comm, folder, fused)
        self.events = tuple(call("cudaEventCreate") for _ in range(2))

    def close(self) -> None:
        """Give everything back. Graphs go first: a NCCL communicator waits for those that it was captured in."""
        with ExitStack() as last_first:
            for running in self.engines.values():
                last_first.callback(running.context.close)
                last_first.callback(running.graphs.close)
            last_first.callback(self.stream.synchronize)

    def say(self, what: str) -> None:
        """Progress, from rank 0 to stderr."""
        if self.comm.rank == 0:
            print(f"{time.perf_counter() - self.started:6.1f} s  {what}", file=sys.stderr, flush=True)

    def bindings(self, tokens: int) -> tuple[Bindings, Bindings]:
        """The first rows of the shared arrays."""
        shape = (tokens, self.x.shape[1])
        return {"x": Binding(self.x.address, shape)}, {"out": Binding(self.out.address, shape)}

    def result(self, name: str, tokens: int, mode: Mode) -> Array:
        """What an engine puts out, in float32; the output is poisoned before."""
        self.out.fill(0xFF)
        self.queue(name, tokens, mode)()
        self.stream.synchronize()
        return self.out.to_numpy()[:tokens].astype(np.float32)

    def queue(self, name: str, tokens: int, mode: Mode) -> Callable[[], None]:
        """A function that queues one step; in graph mode the graph is made here. All ranks together.

        Raises:
            TokenWeaveError: on all ranks, where one cannot make it.
        """
        running, bound = self.engines[name], self.bindings(tokens)

        def prepare() -> None:
            if mode == "eager":
                running.context.bind(*bound)
            while mode == "graph" and not running.graphs.has(*bound):
                running.graphs.step(*bound, self.stream)
                if running.graphs.counters.fallback:
                    raise TokenWeaveError(f"{name}, {tokens} tokens: {running.graphs.counters.reason}")

        on_all_ranks(self.comm, "preparing a step", prepare)
        if mode == "eager":
            return lambda: running.context.enqueue(self.stream)
        return lambda: running.graphs.step(*bound, self.stream)

    def verify(self, tokens: int, mode: Mode) -> dict[str, float]:
        """Relative errors against the stock engine, the worst over ranks; see :meth:`compare`."""
        stock = self.result("stock", tokens, mode)
        return {n: self.compare(n, stock, tokens, mode) for n in self.engines if n not in ("stock", "no_comm")}

    def compare(self, name: str, stock: Array, tokens: int, mode: Mode) -> float:
        """Relative error of an engine's result, the worst over ranks.

        Raises:
            TokenWeaveError: on all ranks, where it is too large.
        """
        difference = np.linalg.norm(self.result(name, tokens, mode) - stock) / np.linalg.norm(stock)
        error = self.slowest(float(np.nan_to_num(difference, nan=np.inf)))
        if error > TOLERANCE:
            raise TokenWeaveError(f"{name} differs from stock at {tokens} tokens ({mode}): {error:.3g}")
        return error

    def slowest(self, value: float) -> float:
        """The largest of the ranks' values."""
        return float(max(gather_json(self.comm, "bench", value)))

    def time_once(self, step: Callable[[], None]) -> tuple[float, float]:
        """Milliseconds on the GPU and on the CPU of one step, of the slower rank."""
        start, end = self.events
        step()
        self.stream.synchronize()
        time.sleep(GAP_SECONDS)
        self.comm.barrier()
        # One step ahead of the first event: the queue is full when it comes, and the ranks have met.
        step()
        call("cudaEventRecord", start, self.stream.handle)
        before = time.perf_counter()
        for _ in range(STEPS):
            step()
        queued = (time.perf_counter() - before) / STEPS * 1e3
        call("cudaEventRecord", end, self.stream.handle)
        self.stream.synchronize()
        return self.slowest(call("cudaEventElapsedTime", start, end) / STEPS), self.slowest(queued)

    def time_all(self, names: Sequence[str], tokens: int, mode: Mode) -> dict[str, tuple[float, float]]:
        """Medians over rounds, the engines in another order in each (the same on all ranks)."""
        order, shuffled = list(names), random.Random(tokens)
        steps = {name: self.queue(name, tokens, mode) for name in names}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for _ in range(ROUNDS):
            shuffled.shuffle(order)
            for name in order:
                times[name].append(self.time_once(steps[name]))
        return {name: (_median([gpu for gpu, _ in t]), _median([cpu for _, cpu in t])) for name, t in times.items()}

    def rows(self, tokens: int) -> list[dict[str, Any]]:
        """The rows of one token count: a mode and a kind of GEMM each."""
        out = []
        for mode in MODES:
            self.say(f"{tokens} tokens, {mode}")
            errors = self.verify(tokens, mode)
            times = self.time_all(list(self.engines), tokens, mode)
            for gemm in self.bench.gemms:
                row: dict[str, Any] = {"num_tokens": tokens, "mode": mode, "gemm": gemm}
                for variant in VARIANTS:
                    row[f"{variant}_ms"] = times[f"woven_{gemm}" if variant == "woven" else variant][0]
                out.append({**row, "error": round(errors[f"woven_{gemm}"], 5)})
                self.say(json.dumps(out[-1]))
        return out

    def sweep(self, tokens: int) -> list[dict[str, Any]]:
        """The first woven engine by CTAs of its collectives, eager; then the table's are put back."""
        name, library = f"woven_{self.bench.gemms[0]}", plugin_library()
        launch = self.bench.stack.options.table.rows[0].mlp
        stock = self.result("stock", tokens, "eager")
        out = []
        try:
            for ctas in self.bench.sweep_ctas:
                library.override_launch(launch.model_copy(update={"ctas": ctas}))
                self.compare(name, stock, tokens, "eager")
                milliseconds = self.time_all([name], tokens, "eager")[name][0]
                out.append({"num_tokens": tokens, "ctas": ctas, "woven_ms": milliseconds})
                self.say(json.dumps(out[-1]))
        finally:
            library.override_launch(None)
        return out

    def timelines(self, tokens: int) -> dict[str, Any]:
        """One step's kernels: figures of every engine, and the kernels of the first woven one (this rank's)."""
        out: dict[str, Any] = {"num_tokens": tokens}
        for mode in MODES:
            found = {}
            for name in self.engines:
                self.say(f"timeline of {name}, {mode}")
                step = self.queue(name, tokens, mode)

                def run(step: Callable[[], None] = step) -> None:
                    step()
                    self.stream.synchronize()

                run()
                self.comm.barrier()
                found[name] = timeline.record(run)
            out[mode] = {name: timeline.summary(kernels) for name, kernels in found.items()}
            out[f"{mode}_woven"] = timeline.rows(found[f"woven_{self.bench.gemms[0]}"])
        return out

    def small_rows(self, tokens: int) -> dict[str, Any]:
        """A step that is not split: GPU time of a graph, and CPU time of an eager step."""
        names = ["fuse_only", f"woven_{self.bench.gemms[0]}"]
        graph, eager = (self.time_all(names, tokens, mode) for mode in ("graph", "eager"))
        row: dict[str, Any] = {"num_tokens": tokens}
        for name in names:
            row |= {f"{name}_graph_ms": graph[name][0], f"{name}_enqueue_ms": eager[name][1]}
        self.say(json.dumps(row))
        return row


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4)


def measure_stack(bench: StackBench, comm: CommBackend) -> dict[str, Any]:
    """Measure on the ranks of ``comm``, one GPU each; returns the JSON document (on every rank).

    Raises:
        TokenWeaveError: on all ranks, where an engine cannot be built or does not compute what stock does.
    """
    with tempfile.TemporaryDirectory() as folder, closing(StackRunner(bench, comm, Path(folder))) as runner:
        plugin_library().reset_counters()
        rows = [row for tokens in bench.tokens for row in runner.rows(tokens)]
        sweep = [row for tokens in bench.tokens for row in runner.sweep(tokens)]
        small = [runner.small_rows(tokens) for tokens in bench.small_tokens]
        traced = runner.timelines(min(bench.tokens, key=lambda tokens: abs(tokens - 4096)))
    config = bench.stack.config
    return {
        "what": f"{config.num_hidden_layers} decoder layers, hidden {config.hidden_size}, tp_size {comm.size}, "
        f"{config.dtype}; attention a stand-in of {bench.stack.keys} keys; ms a step",
        "method": f"{STEPS} steps queued back to back between device events, median of {ROUNDS} rounds, engines in "
        "random order, the slower rank; verified against the stock engine first",
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "engines": {
            name: {
                "memory_bytes": e.memory_bytes,
                "plan_bytes": e.plan_bytes,
                "symmetric": e.context.symmetric,
                "checks": e.checks,
            }
            for name, e in runner.engines.items()
        },
        "counters": plugin_library().counters(),
        "rows": rows,
        "sweep": sweep,
        "small": small,
        "timeline": traced,
    }
