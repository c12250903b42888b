"""A serving trace on engines with and without the weave: `mpirun -n N trtllm-tokenweave bench trace`.

Every engine runs the same steps with the same inputs (`trace.make_schedule`), as the project's runner does
(`engine_runner.EngineStep`): steps of generation rows from CUDA graphs, those with chunks of prompts eagerly. One
engine serves all chunk budgets and, as in `bench e2e`, all splits: the prefix half is an input of each step.
"""

from __future__ import annotations

import datetime as dt
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_tokenweave.agreement import gather_json, on_all_ranks
from trtllm_tokenweave.bench.e2e import PEER, PREFIX_INPUT, E2eBench, Variant, make_plan, relative_error
from trtllm_tokenweave.bench.rank_timing import RankReporter, median
from trtllm_tokenweave.bench.stack import TOLERANCE, engine_document
from trtllm_tokenweave.bench.trace import KINDS, Schedule, Trace, TraceStep, make_schedule
from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.decoder import DecoderModel
from trtllm_tokenweave.engine import Engine
from trtllm_tokenweave.engine_runner import EngineStep
from trtllm_tokenweave.errors import TokenWeaveError
from trtllm_tokenweave.kv_cache import CachePool
from trtllm_tokenweave.plugin_library import plugin_library
from trtllm_tokenweave.runner import Array, GenerationLimits, StepInputs
from trtllm_tokenweave.schedule import ceil_div
from trtllm_tokenweave.table import LaunchConfig, TuningTable

METHOD = (
    "seconds of the steps, copies of inputs and logits included, scheduling not; medians of {} passes through the "
    "trace, engines in random order, the slower rank; logits verified against the stock engine first"
)
#: Steps of a trace whose logits are compared with the stock engine's.
COMPARED = 16
#: Token ids that occur: which does not matter, as long as they are not all the same.
TOKENS = 256


@dataclass(frozen=True)
class Column:
    """An engine, and how it splits steps.

    Attributes:
        variant: The engine.
        splits: The table that says where; None: they are not split.
        launch: How collectives of split steps are launched; None: as the engine's table says.
    """

    variant: Variant
    splits: TuningTable | None = None
    launch: LaunchConfig | None = None

    def prefix(self, step: TraceStep) -> int | None:
        """Tokens of the prefix half; None for an engine without halves."""
        if self.splits is None:
            return None
        return self.splits.lookup(step.record.batch, step.record.num_tokens).split


@dataclass(frozen=True)
class TraceBench:
    """What to measure.

    Attributes:
        engines: The engines; their largest step is the largest budget, and the trace fits them.
        trace: The requests.
        budgets: Most tokens of a step: chunks of prompts fill what generation rows leave.
        ctas: CTAs of a collective beside the other half's work, where steps are split evenly.
        tuned: Whether the engines' table says more than the default rule.
        rounds: Passes of each engine through the trace, for each budget.
        tail: Go on when all prompts are read, until all is generated.
    """

    engines: E2eBench
    trace: Trace
    budgets: tuple[int, ...] = (1024, 2048, 4096, 8192)
    ctas: int = 8
    tuned: bool = False
    rounds: int = 2
    tail: bool = True

    def limits(self, budget: int) -> GenerationLimits:
        """Of steps and sequences at a budget."""
        return self.trace.limits(budget, self.engines.weave.max_batch_size)

    def schedule(self, budget: int) -> Schedule:
        """The steps at a budget."""
        limits, config = self.limits(budget), self.engines.config
        cache = limits.cache(config, self.engines.weave.mapping.tp_size)
        made = make_schedule(self.trace, limits, cache, min(TOKENS, config.vocab_size))
        return made if self.tail else made.loaded

    def columns(self) -> dict[str, Column]:
        """What is compared, by name."""
        table = self.engines.weave.table
        # The default rule, from as many tokens on as the table splits.
        even, launch = table.model_copy(update={"rows": ()}), LaunchConfig(ctas=self.ctas)
        every = {
            "stock": Column("stock"),
            "peer": Column("peer"),
            "fuse_only": Column("fuse_only"),
            "even_split": Column("woven", even, launch),
            "tuned_split": Column("woven", table),
            "whole_attention_even": Column("whole", even, launch),
            "whole_attention_tuned": Column("whole", table),
            "no_comm": Column("no_comm"),
        }
        wanted = {name: column for name, column in every.items() if column.variant in self.engines.variants}
        return {name: column for name, column in wanted.items() if self.tuned or column.splits is not table}


def given(step: TraceStep, pool: CachePool, prefix: int | None, number: int | None) -> StepInputs:
    """The inputs of a step for one engine.

    Args:
        step: The step.
        pool: The engine's KV cache.
        prefix: See `Column.prefix`.
        number: Stands in a knob that no plugin reads: a graph serves steps of one number only. None: as it was.
    """
    inputs = step.inputs | {"host_kv_cache_pool_pointers": pool.pointers}
    if number is not None:
        knobs = inputs["host_runtime_perf_knobs"].copy()
        knobs[-1] = number
        inputs["host_runtime_perf_knobs"] = knobs
    if prefix is not None:
        inputs[PREFIX_INPUT] = np.zeros(prefix, np.int32)
    return inputs


class TraceRunner(RankReporter):
    """Runs the engines of one rank; all ranks make the same calls.

    Args:
        bench: What to measure.
        comm: The ranks.
        engines: This rank's.
        clock: Seconds.
    """

    def __init__(
        self,
        bench: TraceBench,
        comm: CommBackend,
        engines: Mapping[Variant, EngineStep],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(comm)
        self.bench, self.engines, self.clock = bench, engines, clock
        self.columns = bench.columns()
        self._passes = 0

    def _begin(self, column: Column) -> None:
        """Count another pass, and let collectives be launched as the column says."""
        self._passes += 1
        plugin_library().override_launch(column.launch)

    def _variation(self, name: str, step: TraceStep) -> tuple[int | None, int | None]:
        """Prefix half of a step and the number of its graphs, see `given`.

        No server meets the same chunks twice, so that no graph may serve them in the next pass. And graphs keep the
        launch that they were captured with, so that columns of one engine share those of steps that are not split only.
        """
        prefix = self.columns[name].prefix(step)
        if step.record.num_contexts:
            return prefix, self._passes
        split = prefix is not None and prefix < step.record.num_tokens
        return prefix, -2 - list(self.columns).index(name) if split else None

    def _inputs(self, name: str, step: TraceStep) -> StepInputs:
        """The inputs of a column's step."""
        return given(step, self.engines[self.columns[name].variant].pool, *self._variation(name, step))

    def rehearse(self, name: str, schedule: Schedule) -> list[Array]:
        """Run the steps until all prompts are read, and let graphs be made for those that read none.

        Returns:
            Logits of some of the steps that read prompts.
        """
        column = self.columns[name]
        engine = self.engines[column.variant]
        self._begin(column)
        loaded = schedule.loaded.steps
        reading = [index for index, step in enumerate(loaded) if step.record.num_contexts]
        compared = set(reading[:: ceil_div(len(reading), COMPARED)])
        logits = []
        for index, step in enumerate(loaded):
            found = engine([self._inputs(name, step)])
            if index in compared:
                logits.append(found.copy())
        recurring = schedule.recurring(self.bench.engines.limits.max_seq_len)
        columns = [other for other, each in self.columns.items() if each.variant == column.variant]
        graphs = sum(len({self._variation(other, step) for other in columns}) for step in recurring)
        engine.graphs.capacity = max(engine.graphs.capacity, graphs)
        for step in recurring:
            inputs = self._inputs(name, step)
            # Eager, captured behind another eager one, and replayed: a graph's first launch brings it to the GPU.
            for _ in range(3):
                engine([inputs])
        return logits

    def verify(self, what: str, logits: Mapping[str, Sequence[Array]]) -> float:
        """The largest relative error of logits against the stock engine's, over steps, columns and ranks.

        Raises:
            TokenWeaveError: on all ranks, where one is too large.
        """
        worst = 0.0
        for name, found in logits.items():
            if self.columns[name].variant in ("stock", "no_comm"):
                continue
            error = self.slowest(max(relative_error(a, b) for a, b in zip(found, logits["stock"], strict=True)))
            if error > TOLERANCE:
                raise TokenWeaveError(f"{name} differs from stock in {what}: {error:.3g}")
            worst = max(worst, error)
        return worst

    def one_pass(self, name: str, schedule: Schedule) -> tuple[dict[str, float], Array]:
        """Run the trace.

        Returns:
            Milliseconds by kind of step, of the slower rank, and the logits of the last step.
        """
        column = self.columns[name]
        engine = self.engines[column.variant]
        self._begin(column)
        prepared = [self._inputs(name, step) for step in schedule.steps]

        def run() -> tuple[dict[str, float], Array]:
            times: dict[str, float] = dict.fromkeys(KINDS, 0.0)
            for step, inputs in zip(schedule.steps, prepared, strict=True):
                before = self.clock()
                logits = engine([inputs])
                times[step.kind] += 1e3 * (self.clock() - before)
            return times, logits.copy()

        self.comm.barrier()
        times, logits = on_all_ranks(self.comm, name, run)
        ranks: list[dict[str, float]] = gather_json(self.comm, "bench", times)
        return max(ranks, key=lambda each: sum(each.values())), logits

    def row(self, budget: int) -> dict[str, Any]:
        """The row of one budget."""
        schedule = self.bench.schedule(budget)
        self.say(f"budget {budget}: {len(schedule.steps)} steps")
        rehearsed = {
            name: on_all_ranks(self.comm, name, partial(self.rehearse, name, schedule)) for name in self.columns
        }
        error = self.verify("steps that read prompts", rehearsed)
        passes: dict[str, list[dict[str, float]]] = {name: [] for name in self.columns}
        graphs: dict[str, int] = {}
        order, shuffled = list(self.columns), random.Random(budget)
        for number in range(self.bench.rounds):
            self.say(f"budget {budget}: pass {number + 1} of {self.bench.rounds}")
            last = {}
            shuffled.shuffle(order)
            for name in order:
                counters = self.engines[self.columns[name].variant].graphs.counters
                before = counters.graph
                times, logits = self.one_pass(name, schedule)
                passes[name].append(times)
                graphs[name], last[name] = counters.graph - before, [logits]
            error = max(error, self.verify("the last step", last))
        row = {"max_num_tokens": budget, "peer_ms": None, **self._times(passes, schedule), **self._sizes(schedule)}
        row |= {"graph_steps": graphs, "error": round(error, 5)}
        self.say(json.dumps(row))
        return row

    def _times(self, passes: Mapping[str, Sequence[Mapping[str, float]]], schedule: Schedule) -> dict[str, Any]:
        """Medians over passes."""
        requests = self.bench.trace.requests
        generated = schedule.generation_rows + len(requests)
        total = generated + sum(request.prompt for request in requests)
        totals = {name: [sum(times.values()) for times in each] for name, each in passes.items()}
        medians = {name: median(each) for name, each in totals.items()}
        return {
            **{f"{name}_ms": milliseconds for name, milliseconds in medians.items()},
            "tokens_per_s": {name: round(1e3 * total / ms, 1) for name, ms in medians.items()},
            "generated_per_s": {name: round(1e3 * generated / ms, 1) for name, ms in medians.items()},
            "kinds_ms": {
                name: {kind: median([times[kind] for times in each]) for kind in KINDS} for name, each in passes.items()
            },
            "passes_ms": {name: [round(total, 4) for total in each] for name, each in totals.items()},
        }

    def _sizes(self, schedule: Schedule) -> dict[str, Any]:
        """What the steps hold, and how many of them each column splits."""
        split = {
            name: sum((column.prefix(step) or 0) < step.record.num_tokens for step in schedule.steps)
            for name, column in self.columns.items()
            if column.splits is not None
        }
        return {"steps": schedule.steps_of_kinds(), "tokens": schedule.tokens_of_kinds(), "split_steps": split}


def load_engine(
    bench: TraceBench, variant: Variant, comm: CommBackend, folder: Path, fused: int | None
) -> tuple[EngineStep, dict[str, Any]]:
    """Build and load, with a KV cache for the trace; all ranks together.

    Returns:
        The engine, and what results say of it.
    """
    engines, limits = bench.engines, bench.limits(max(bench.budgets))
    plan = make_plan(engines, variant, comm, folder, fused)
    config = engines.config
    if variant == "no_comm":  # it puts out this rank's columns
        config = config.model_copy(update={"vocab_size": config.local(comm.size).vocab_size})
    model = DecoderModel(
        config=config,
        source="random weights",
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_seq_len=limits.max_seq_len,
        tokens_per_block=limits.tokens_per_block,
        wanted=plan.result.mode,
    )
    step = EngineStep(Engine.of_plan(plan, comm), model, limits.cache(engines.config, comm.size))
    return step, engine_document(plan.report, step.contexts[0])


def measure_trace(
    bench: TraceBench,
    comm: CommBackend,
    cache: Path | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda _document: None,
) -> dict[str, Any]:
    """Measure on the ranks of ``comm``, one GPU each; returns the JSON document (on every rank).

    Args:
        bench: What to measure.
        comm: The ranks.
        cache: Folder of TensorRT's timings, kept for the next run; None: a temporary one.
        keep: Called on every rank with the document so far whenever a budget is done: a run that is cut short leaves
            what it has.

    Raises:
        TokenWeaveError: on all ranks, where an engine cannot be built or does not compute what stock does.
    """
    engines: dict[Variant, EngineStep] = {}
    documents: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    with ExitStack() as last_first:
        folder = cache or Path(last_first.enter_context(tempfile.TemporaryDirectory()))
        last_first.callback(plugin_library().override_launch, None)
        reporter = RankReporter(comm)
        for variant in bench.engines.variants:
            fused = documents.get("fuse_only", {}).get("memory_bytes") if variant in ("woven", "whole") else None
            reporter.say(f"building {variant}")
            engines[variant], documents[variant] = load_engine(bench, variant, comm, folder, fused)
            last_first.callback(engines[variant].close)
        plugin_library().reset_counters()
        runner = TraceRunner(bench, comm, engines)
        for budget in bench.budgets:
            rows.append(runner.row(budget))
            for variant, engine in engines.items():
                documents[variant] |= {"graphs": vars(engine.graphs.counters).copy()}
            on_all_ranks(comm, "writing the result", lambda: keep(_document(bench, documents, rows)))
        return _document(bench, documents, rows)


def _document(bench: TraceBench, documents: dict[str, dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    limits = bench.limits(max(bench.budgets))
    return {
        "what": f"serving trace: {bench.engines.shape}; ms for all steps"
        + ("" if bench.tail else " until all prompts are read"),
        "method": METHOD.format(bench.rounds),
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "peer": PEER,
        "trace": bench.trace.document(),
        "limits": {name: getattr(limits, name) for name in ("max_batch_size", "max_seq_len", "num_blocks")},
        "min_tokens": bench.engines.weave.table.min_tokens,
        "engines": documents,
        "counters": plugin_library().counters(),
        "rows": rows,
    }
