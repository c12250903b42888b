"""Decoder layers in TensorRT engines, woven and not: `mpirun -n N trtllm-tokenweave bench stack`.

All engines are built from the same weights, on all ranks with rank 0's timings, and checked against the stock one
before anything is timed. Times are of device events around steps that are queued back to back, of the slower rank.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trtllm_tokenweave.agreement import on_all_ranks
from trtllm_tokenweave.bench import timeline
from trtllm_tokenweave.bench.rank_timing import METHOD, ROUNDS, RankTimer, given
from trtllm_tokenweave.bench.stack_network import VARIANTS, Gemm, Stack, Variant
from trtllm_tokenweave.bench.step_timer import Timing
from trtllm_tokenweave.builder import BuilderSettings, Plan, ShapeRange, build_on_all_ranks, opt_num_tokens
from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.device import DeviceArray, Stream
from trtllm_tokenweave.engine import Engine
from trtllm_tokenweave.engine_context import Array, Binding, Bindings, EngineContext
from trtllm_tokenweave.errors import TokenWeaveError
from trtllm_tokenweave.inspection import BuildReport
from trtllm_tokenweave.plugin_library import plugin_library
from trtllm_tokenweave.recorder.enums import TRT_NAMES, numpy_dtype
from trtllm_tokenweave.step_graphs import StepGraphs
from trtllm_tokenweave.table import LaunchConfig

Mode = Literal["eager", "graph"]
MODES: tuple[Mode, ...] = ("eager", "graph")
#: Largest relative error against the stock engine: bfloat16 through all layers, sums in another order.
TOLERANCE = 0.05
#: Measurements of each candidate of a sweep.
SWEEP_ROUNDS = 3


@dataclass(frozen=True)
class StackBench:
    """What to measure.

    Attributes:
        stack: The layers, with a table whose launch configurations say the SM budget of GEMMs.
        tokens: Token counts of the table of results.
        small_tokens: Token counts of steps that are not split, timed for GPU and CPU.
        gemms: Whose GEMMs the woven engine has: TensorRT's ("trt"), our plugin's ("budget").
        symmetric: Activations of woven and fused engines lie in symmetric memory; else collectives copy.
        sweep_ctas: CTAs to try for the collectives of split steps; none: what the table says.
        timing_cache: Folder that keeps TensorRT's timings.
    """

    stack: Stack
    tokens: tuple[int, ...] = (1024, 2048, 4096, 8192)
    small_tokens: tuple[int, ...] = (1, 16, 64)
    gemms: tuple[Gemm, ...] = ("trt", "budget")
    symmetric: bool = True
    sweep_ctas: tuple[int, ...] = (4, 8, 12, 16)
    timing_cache: Path | None = None


@dataclass
class Running:
    """An engine's context, and the step that is bound."""

    context: EngineContext
    graphs: StepGraphs
    report: BuildReport

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
        return cls.of_plan(plan, comm, symmetric=symmetric and plan.result.mode != "stock")

    @classmethod
    def of_plan(cls, plan: Plan, comm: CommBackend, *, symmetric: bool) -> Running:
        """Load; all ranks together."""
        context = Engine.of_plan(plan, comm).context(symmetric=symmetric)
        return cls(context, StepGraphs(context), plan.report)

    def document(self) -> dict[str, Any]:
        """What results say of it."""
        return engine_document(self.report, self.context)


def engine_document(report: BuildReport, context: EngineContext) -> dict[str, Any]:
    """What results say of an engine."""
    return {
        "memory_bytes": report.memory_bytes,
        "plan_bytes": report.plan_bytes,
        "symmetric": context.symmetric,
        "checks": [str(check) for check in report.checks],
    }


def close_all(engines: Iterable[Running], stream: Stream) -> None:
    """Give engines back. Graphs go first: a NCCL communicator waits for those that it was captured in."""
    with ExitStack() as last_first:
        for running in engines:
            last_first.callback(running.context.close)
            last_first.callback(running.graphs.close)
        last_first.callback(stream.synchronize)


class StackRunner(RankTimer):
    """Runs the engines of one rank on arrays that they share."""

    def __init__(self, bench: StackBench, comm: CommBackend, folder: Path) -> None:
        super().__init__(comm, Stream())
        self.bench = bench
        #: The launch of an engine's collectives at a number of tokens, where it is not the table's.
        self.launches: dict[tuple[str, int], LaunchConfig] = {}
        stack = bench.stack
        shape = (stack.options.max_num_tokens, stack.config.hidden_size)
        dtype = numpy_dtype(TRT_NAMES[stack.config.dtype])
        x = np.random.default_rng(stack.seed).standard_normal(shape, np.float32).astype(dtype)
        self.x, self.out = DeviceArray.from_numpy(x), DeviceArray(shape, dtype)
        self.engines: dict[str, Running] = {}
        for variant in VARIANTS:
            for gemm in bench.gemms if variant == "woven" else ("trt",):
                name = f"woven_{gemm}" if variant == "woven" else variant
                fused = self.engines["fuse_only"].report.memory_bytes if variant == "woven" else None
                self.say(f"building {name}")
                self.engines[name] = Running.make(bench, variant, gemm, comm, folder, fused)

    def close(self) -> None:
        """Give everything back."""
        close_all(self.engines.values(), self.stream)

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
        launch = self.launches.get((name, tokens))

        def launch_as_wanted() -> None:
            if self.launches:
                plugin_library().override_launch(launch)

        def eager() -> None:
            launch_as_wanted()
            running.context.enqueue(self.stream)

        def prepare() -> None:
            launch_as_wanted()
            if mode == "eager":
                running.context.bind(*bound)
            while mode == "graph" and not running.graphs.has(*bound):
                running.graphs.step(*bound, self.stream)
                if running.graphs.counters.fallback:
                    raise TokenWeaveError(f"{name}, {tokens} tokens: {running.graphs.counters.reason}")

        on_all_ranks(self.comm, "preparing a step", prepare)
        if mode == "eager":
            return eager
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

    def time_all(self, names: Sequence[str], tokens: int, mode: Mode, rounds: int = ROUNDS) -> dict[str, Timing]:
        """Medians of each; see `RankTimer.time_steps`."""
        return self.time_steps({name: given(self.queue(name, tokens, mode)) for name in names}, tokens, rounds)

    def rows(self, tokens: int) -> list[dict[str, Any]]:
        """The rows of one token count: a mode and a kind of GEMM each."""
        out = []
        for mode in MODES:
            self.say(f"{tokens} tokens, {mode}")
            errors = self.verify(tokens, mode)
            times = self.time_all(list(self.engines), tokens, mode)
            for gemm in self.bench.gemms:
                row: dict[str, Any] = {"num_tokens": tokens, "mode": mode, "gemm": gemm}
                launch = self.launches.get((f"woven_{gemm}", tokens))
                if launch is not None:
                    row |= {"ctas": launch.ctas, "gemm_sms": launch.gemm_sms if gemm == "budget" else 0}
                timings = {v: times[f"woven_{gemm}" if v == "woven" else v] for v in VARIANTS}
                row |= {f"{variant}_ms": timing.ms for variant, timing in timings.items()}
                row["mhz"] = {variant: timing.mhz for variant, timing in timings.items()}
                out.append({**row, "error": round(errors[f"woven_{gemm}"], 5)})
                self.say(json.dumps(out[-1]))
        return out

    def sweep(self, tokens: int) -> list[dict[str, Any]]:
        """The woven engines by CTAs of their collectives, eager; GEMMs with a budget keep to the SMs that are left.

        Each engine then keeps what was best for it at this number of tokens.
        """
        table = self.bench.stack.options.table
        launch = table.rows[0].mlp if table.rows else table.default_launch
        names = [f"woven_{gemm}" for gemm in self.bench.gemms]
        stock = self.result("stock", tokens, "eager")
        out, best = [], dict.fromkeys(names, (math.inf, launch))
        for ctas in self.bench.sweep_ctas:
            gemm_sms = launch.gemm_sms + launch.ctas - ctas if launch.gemm_sms else 0
            tried = launch.model_copy(update={"ctas": ctas, "gemm_sms": gemm_sms})
            for name in names:
                self.launches[name, tokens] = tried
                self.compare(name, stock, tokens, "eager")
            times = self.time_all(names, tokens, "eager", SWEEP_ROUNDS)
            row: dict[str, Any] = {"num_tokens": tokens, "ctas": ctas, "gemm_sms": gemm_sms}
            out.append(row | {f"{name}_ms": times[name].ms for name in names})
            self.say(json.dumps(out[-1]))
            best = {name: min(best[name], (times[name].ms, tried), key=lambda pair: pair[0]) for name in names}
        for name in names if self.bench.sweep_ctas else ():
            self.launches[name, tokens] = best[name][1]
        return out

    def timelines(self, tokens: int) -> dict[str, Any]:
        """One step's kernels: figures of every engine, and the kernels of stock and woven ones (this rank's)."""
        out: dict[str, Any] = {"num_tokens": tokens}
        on_all_ranks(self.comm, "starting the profiler", timeline.start_profiler)
        for mode in MODES:
            found = {}
            for name in self.engines:
                self.say(f"timeline of {name}, {mode}")
                step = self.queue(name, tokens, mode)

                def run(step: Callable[[], None] = step) -> None:
                    self.comm.barrier()
                    step()
                    self.stream.synchronize()

                run()
                found[name] = timeline.record(run)
            out[mode] = {name: timeline.summary(kernels) for name, kernels in found.items()}
            shown = ["stock", *(f"woven_{gemm}" for gemm in self.bench.gemms)]
            out[f"{mode}_kernels"] = {name: timeline.rows(found[name]) for name in shown}
        return out

    def small_rows(self, tokens: int) -> dict[str, Any]:
        """A step that is not split: GPU time of a graph, and CPU time of an eager step."""
        names = ["fuse_only", f"woven_{self.bench.gemms[0]}"]
        graph = self.time_all(names, tokens, "graph")
        enqueue = self.time_queueing({name: given(self.queue(name, tokens, "eager")) for name in names})
        row: dict[str, Any] = {"num_tokens": tokens}
        for name in names:
            row |= {f"{name}_graph_ms": graph[name].ms, f"{name}_enqueue_ms": enqueue[name]}
        self.say(json.dumps(row))
        return row


def measure_stack(bench: StackBench, comm: CommBackend) -> dict[str, Any]:
    """Measure on the ranks of ``comm``, one GPU each; returns the JSON document (on every rank).

    Raises:
        TokenWeaveError: on all ranks, where an engine cannot be built or does not compute what stock does.
    """
    with ExitStack() as stack:
        folder = bench.timing_cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(plugin_library().override_launch, None)
        runner = stack.enter_context(closing(StackRunner(bench, comm, folder)))
        plugin_library().reset_counters()
        small = [runner.small_rows(tokens) for tokens in bench.small_tokens]
        rows: list[dict[str, Any]] = []
        sweep: list[dict[str, Any]] = []
        for tokens in bench.tokens:
            sweep += runner.sweep(tokens)
            rows += runner.rows(tokens)
        traced = runner.timelines(min(bench.tokens, key=lambda tokens: abs(tokens - 4096)))
    config = bench.stack.config
    return {
        "what": f"{config.num_hidden_layers} decoder layers, hidden {config.hidden_size}, tp_size {comm.size}, "
        f"{config.dtype}; attention a stand-in of {bench.stack.keys} keys; ms a step",
        "method": METHOD,
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "engines": {name: running.document() for name, running in runner.engines.items()},
        "counters": plugin_library().counters(),
        "rows": rows,
        "sweep": sweep,
        "small": small,
        "timeline": traced,
    }
