"""Whole decoders in TensorRT engines, with real attention: `mpirun -n N trtllm-tokenweave bench e2e`.

One sequence is prefilled at once. All engines are built from the same weights, on all ranks with rank 0's timings. The
split of the woven engines is an input of each step, so that one engine serves every split; its launch configurations
are the table's, or those that are tried.
"""

from __future__ import annotations

import datetime as dt
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trtllm_tokenweave.agreement import on_all_ranks
from trtllm_tokenweave.batch import SequenceStep, StepLayout, step_inputs
from trtllm_tokenweave.bench import timeline
from trtllm_tokenweave.bench.rank_timing import METHOD, ROUNDS, RankTimer
from trtllm_tokenweave.bench.stack import MODES, TOLERANCE, Mode, Running, close_all
from trtllm_tokenweave.bench.step_timer import Timing
from trtllm_tokenweave.builder import BuilderSettings, Plan, Ranges, ShapeRange, build_on_all_ranks
from trtllm_tokenweave.checkpoint import RankWeights
from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.decoder import profile_sizes
from trtllm_tokenweave.device import DeviceArray, Stream
from trtllm_tokenweave.engine_context import Array, Binding, Bindings
from trtllm_tokenweave.engine_runner import DeviceCachePool, is_host
from trtllm_tokenweave.errors import TokenWeaveError
from trtllm_tokenweave.kv_cache import BlockManager
from trtllm_tokenweave.llama import NetworkOptions, build_llama, weight_specs
from trtllm_tokenweave.llama.profiles import decoder_profile
from trtllm_tokenweave.llama.weights import replicated, window_weights
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.passes import WeaveOptions, WeavePlan, WeaveResult, weave
from trtllm_tokenweave.plugin_library import plugin_library
from trtllm_tokenweave.runner import GenerationLimits
from trtllm_tokenweave.schedule import split_point
from trtllm_tokenweave.table import LaunchConfig, TableSource
from trtllm_tokenweave.trt import object_model

Variant = Literal["stock", "peer", "fuse_only", "woven", "whole", "no_comm"]
VARIANTS: tuple[Variant, ...] = ("stock", "peer", "fuse_only", "woven", "whole", "no_comm")
#: Input of the woven engines whose dimension 0 is the rows of the prefix half.
PREFIX_INPUT = "prefix_tokens"
#: Rounds that a split of the sweep gets.
SWEEP_ROUNDS = 3
PEER = (
    "stock with the fastest all-reduce but ours (bench kernel, from 1024 tokens on): NCCL in registered windows "
    "(AllReduce's strategy NCCL_SYMMETRIC), into which the input is copied; then, in dense models, one kernel for add "
    "and norm"
)


@dataclass(frozen=True)
class E2eBench:
    """What to measure.

    Attributes:
        config: The model.
        weave: Options of the pass; its table has the launch configurations, and its limits are the engines'.
        tokens: Tokens of the sequences.
        offsets: Splits to try: tokens that the prefix half has more than half of them. None: the table says the split.
        ctas: CTAs to try for the collectives of a step that is split.
        variants: Engines to build; "stock" is among them.
        seed: Of the weights and tokens.
        gemm_plugin: Products by the Gemm plugin, as `trtllm-build --gemm_plugin`, in all engines.
        max_seq_len: Longest sequence; None: all of it fits in one step.
        multiple_profiles: See `decoder.profile_sizes`.
    """

    config: ModelConfig
    weave: WeaveOptions
    tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    offsets: tuple[int, ...] | None = (0, 128, 256, 384, 512, 768, 1024)
    ctas: tuple[int, ...] = (4, 8)
    variants: tuple[Variant, ...] = VARIANTS
    seed: int = 0
    gemm_plugin: bool = False
    max_seq_len: int | None = None
    multiple_profiles: bool = False

    @property
    def limits(self) -> NetworkOptions:
        """Of the network."""
        most = self.weave.max_num_tokens
        longest = most if self.max_seq_len is None else self.max_seq_len
        batch = self.weave.max_batch_size
        return NetworkOptions(batch, max_num_tokens=most, max_seq_len=longest, gemm_plugin=self.gemm_plugin)

    @property
    def shape(self) -> str:
        """The model and the ranks, in words."""
        config = self.config
        return (
            f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, vocabulary {config.vocab_size}, "
            f"tp_size {self.weave.mapping.tp_size}, {config.dtype}, random weights"
        )

    @cached_property
    def weights(self) -> RankWeights:
        """This rank's."""
        mapping = self.weave.mapping
        specs = weight_specs(self.config, mapping)
        return window_weights(specs, mapping, replicated(self.config, mapping), self.seed)

    def build(self, network: Any, variant: Variant) -> tuple[WeaveResult, tuple[Ranges, ...]]:
        """Fill an empty network; returns what the weave did, and for each profile the ranges of the inputs."""
        options, limits = self.weave, self.limits
        if variant == "peer":
            limits = replace(limits, all_reduce_strategy="NCCL_SYMMETRIC", reduce_fusion=True)
        build_llama(network, self.config, options.mapping, self.weights, limits, collectives=variant != "no_comm")
        sizes = profile_sizes(limits, options.table, multiple=self.multiple_profiles)
        profiles = tuple(decoder_profile(network, size, optimum) for size, optimum in sizes)
        if variant in ("stock", "peer", "no_comm"):
            return WeaveResult(WeavePlan(options, (), (), None)), profiles
        # The tables of engines of one process have to differ: ranks and contexts find one another by them.
        # Of this kind is a table whose splits are not the engine's.
        source = TableSource(kind="capability", text="the split is an input of a step")
        table = options.table.model_copy(update={"min_tokens": 1 + VARIANTS.index(variant), "source": source})
        # Said before the table loses what it was measured with.
        gemm = options.table.gemm if options.gemm == "table" else options.gemm
        options = replace(options, table=table, split=False, gemm=gemm)
        if variant != "fuse_only":
            network.add_input(PREFIX_INPUT, object_model(network).DataType.INT32, (-1,))
            for number, (ranges, (size, optimum)) in enumerate(zip(profiles, sizes, strict=True)):
                # Only steps of the first profile are split.
                prefix = optimum if number else max(optimum // 2, 1)
                ranges[PREFIX_INPUT] = ShapeRange((1,), (prefix,), (size.max_num_tokens,))
            options = replace(options, split=True, split_attention=variant == "woven", prefix_input=PREFIX_INPUT)
        return weave(network, options), profiles

    def even(self, num_tokens: int) -> int:
        """Tokens of the prefix half of an even split."""
        return min(split_point(num_tokens, self.weave.table.granularity, 0), num_tokens)


def make_plan(bench: E2eBench, variant: Variant, comm: CommBackend, folder: Path, fused: int | None) -> Plan:
    """Build; all ranks together. ``fused``: activation memory of the fuse-only engine."""
    found: list[Ranges] = []

    def make_network(network: Any) -> WeaveResult:
        result, found[:] = bench.build(network, variant)
        return result

    def profile(number: int, _network: Any) -> Ranges:
        return found[number]

    count = len(profile_sizes(bench.limits, bench.weave.table, multiple=bench.multiple_profiles))
    settings = BuilderSettings(
        tuple(partial(profile, number) for number in range(count)),
        timing_cache=folder / f"timing{comm.rank}.cache",
        fused_memory_bytes=fused,
    )
    plan = build_on_all_ranks(comm, make_network, settings)
    wanted = {"fuse_only": "fuse", "woven": "weave", "whole": "weave"}.get(variant, "stock")
    if plan.result.mode != wanted:
        reasons = "; ".join(refusal.reason for refusal in plan.result.plan.refused)
        raise TokenWeaveError(f"{variant} became {plan.result.mode}: {reasons}")
    return plan


def make_engine(bench: E2eBench, variant: Variant, comm: CommBackend, folder: Path, fused: int | None) -> Running:
    """Build and load; see :func:`make_plan`."""
    plan = make_plan(bench, variant, comm, folder, fused)
    return Running.of_plan(plan, comm, symmetric=plan.result.mode != "stock")


def relative_error(found: Array, expected: Array) -> float:
    """Norm of the difference over the norm of what is expected; infinite where a value is none."""
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    return float(np.nan_to_num(error, nan=np.inf))


@dataclass(frozen=True)
class Split:
    """How a woven engine runs a step: tokens of the prefix half, and CTAs of a collective (0: as the table says)."""

    prefix: int
    ctas: int = 0


@dataclass(frozen=True)
class Run:
    """One way to run a step: an engine, and how a woven one splits."""

    variant: Variant
    split: Split | None = None


class E2eRunner(RankTimer):
    """Runs the engines of one rank on one KV cache and on inputs that they share."""

    def __init__(self, bench: E2eBench, comm: CommBackend, folder: Path) -> None:
        super().__init__(comm, Stream())
        self.bench = bench
        limits = bench.limits
        sizes = GenerationLimits(
            limits.max_num_tokens, limits.max_batch_size, limits.max_seq_len, 1, limits.tokens_per_block
        )
        cache = sizes.cache(bench.config, comm.size)
        self.pool, self.blocks = DeviceCachePool(cache), BlockManager(cache)
        self.blocks.grow(0, limits.max_seq_len)
        self.ids = np.random.default_rng(bench.seed).integers(0, bench.config.vocab_size, limits.max_num_tokens)
        self.counts = DeviceArray((limits.max_num_tokens,), np.int32)
        self.counts.fill(0)
        self._inputs: dict[tuple[int, bool], dict[str, Binding]] = {}
        self.engines: dict[Variant, Running] = {}
        for variant in bench.variants:
            plain = self.engines.get("fuse_only") if variant in ("woven", "whole") else None
            fused = None if plain is None else plain.report.memory_bytes
            self.say(f"building {variant}")
            self.engines[variant] = make_engine(bench, variant, comm, folder, fused)
        self._outputs = {variant: self._output(variant) for variant in bench.variants}

    def close(self) -> None:
        """Give everything back."""
        close_all(self.engines.values(), self.stream)

    def _output(self, variant: Variant) -> DeviceArray:
        local = self.bench.config.local(self.comm.size)
        columns = local.vocab_size if variant == "no_comm" else local.padded_vocab_size
        return DeviceArray((1, columns), np.float32)

    def inputs(self, num_tokens: int, *, other: bool = False) -> dict[str, Binding]:
        """A step that prefills a sequence of so many tokens; ``other``: of other ones."""
        key = num_tokens, other
        if key not in self._inputs:
            ids = self.ids[::-1] if other else self.ids
            tokens = tuple(int(t) for t in ids[:num_tokens])
            step = SequenceStep(0, tokens, 0, num_tokens, is_context=True)
            layout = StepLayout(self.pool, self.blocks, self.bench.limits.max_seq_len, self.comm.size)
            self._inputs[key] = {
                name: Binding.on_host(x) if is_host(name) else Binding.device(DeviceArray.from_numpy(x))
                for name, x in step_inputs([step], layout).items()
            }
        return self._inputs[key]

    def bindings(self, run: Run, num_tokens: int, *, other: bool = False) -> tuple[Bindings, Bindings]:
        """Inputs and outputs of a run's engine; ``other``: as of :meth:`inputs`."""
        names = {spec.name for spec in self.engines[run.variant].context.engine.manifest.tensors}
        inputs = {name: b for name, b in self.inputs(num_tokens, other=other).items() if name in names}
        if run.split is not None:
            inputs[PREFIX_INPUT] = Binding(self.counts.address, (run.split.prefix,))
        return inputs, {"logits": Binding.device(self._outputs[run.variant])}

    def prepare(self, run: Run, num_tokens: int, mode: Mode) -> Callable[[], None]:
        """Bind a step, or make its graph; returns what queues it.

        Raises:
            TokenWeaveError: the step cannot be captured.
        """
        running, bound = self.engines[run.variant], self.bindings(run, num_tokens)

        def enqueue() -> None:
            self.override(run)
            running.context.enqueue(self.stream)

        if mode == "eager":
            running.context.bind(*bound)
            return enqueue
        self.override(run)
        while not running.graphs.has(*bound):
            failed = running.graphs.counters.fallback
            running.graphs.step(*bound, self.stream)
            if running.graphs.counters.fallback > failed:
                raise TokenWeaveError(f"{run.variant}, {num_tokens} tokens: {running.graphs.counters.reason}")
        return partial(running.graphs.step, *bound, self.stream)

    def override(self, run: Run) -> None:
        """Launch the collectives of the steps that are queued from now on as a run wants."""
        ctas = 0 if run.split is None else run.split.ctas
        plugin_library().override_launch(LaunchConfig(ctas=ctas) if ctas else None)

    def prepare_all(self, run: Run, num_tokens: int, mode: Mode) -> Callable[[], None]:
        """:meth:`prepare` on all ranks; where one cannot, all raise its error."""
        return on_all_ranks(self.comm, "preparing a step", lambda: self.prepare(run, num_tokens, mode))

    def step_on_other_tokens(self, run: Run, num_tokens: int) -> None:
        """Leave other values wherever a step has some: what it fails to compute would else look right."""
        self.override(run)
        self.engines[run.variant].context.step(*self.bindings(run, num_tokens, other=True), self.stream)
        self.stream.synchronize()
        self._outputs[run.variant].fill(0xFF)

    def logits(self, run: Run, num_tokens: int, mode: Mode) -> Array:
        """What an engine puts out, after a step on other tokens."""
        if mode == "graph":
            self.prepare_all(run, num_tokens, mode)  # its capture runs the step, too
        on_all_ranks(self.comm, "a step on other tokens", lambda: self.step_on_other_tokens(run, num_tokens))
        self.prepare_all(run, num_tokens, mode)()
        self.stream.synchronize()
        return self._outputs[run.variant].to_numpy()

    def verify(self, runs: dict[str, Run], num_tokens: int, mode: Mode) -> dict[str, float]:
        """Relative errors of the logits against the stock engine's, the worst over ranks.

        Raises:
            TokenWeaveError: on all ranks, where one is too large.
        """
        stock = self.logits(runs["stock"], num_tokens, mode)
        errors = {}
        for name, run in runs.items():
            if run.variant in ("stock", "no_comm"):
                continue
            errors[name] = self.slowest(relative_error(self.logits(run, num_tokens, mode), stock))
            if errors[name] > TOLERANCE:
                what = f"{name} differs from stock at {num_tokens} tokens ({mode}): {errors[name]:.3g}"
                raise TokenWeaveError(what)
        return errors

    def time_runs(self, runs: dict[str, Run], num_tokens: int, mode: Mode, rounds: int = ROUNDS) -> dict[str, Timing]:
        """Medians of each; see `RankTimer.time_steps`."""
        makers = {name: partial(self.prepare_all, run, num_tokens, mode) for name, run in runs.items()}
        return self.time_steps(makers, num_tokens, rounds)

    def sweep(self, num_tokens: int, splits: Sequence[Split]) -> tuple[Split, list[dict[str, Any]]]:
        """The fastest of some splits, and the milliseconds of each (eager); each is verified first."""
        even = self.bench.even(num_tokens)
        runs = {
            f"split {index} (+{split.prefix - even}, {split.ctas} CTAs)": Run("woven", split)
            for index, split in enumerate(splits)
        }
        self.verify({"stock": Run("stock"), **runs}, num_tokens, "eager")
        times = [timing.ms for timing in self.time_runs(runs, num_tokens, "eager", SWEEP_ROUNDS).values()]
        rows = [
            {"num_tokens": num_tokens, "offset": split.prefix - even, "ctas": split.ctas, "woven_ms": time}
            for split, time in zip(splits, times, strict=True)
        ]
        return splits[times.index(min(times))], rows

    def splits(self, num_tokens: int) -> tuple[Split, Split, list[dict[str, Any]]]:
        """The even split, the best one, and the sweep that found them: CTAs for the even one, then offsets."""
        even, offsets = self.bench.even(num_tokens), self.bench.offsets
        tuned = Split(self.bench.weave.table.lookup(1, num_tokens).split)
        if "woven" not in self.bench.variants:
            return Split(even), tuned, []
        if offsets is None and tuned.prefix == even:
            return tuned, tuned, []  # a step has one graph a split
        half, rows = self.sweep(num_tokens, [Split(even, ctas) for ctas in self.bench.ctas])
        if offsets is None:
            return half, tuned, rows
        others = [Split(even + offset, half.ctas) for offset in offsets if offset and even + offset < num_tokens]
        best, more = self.sweep(num_tokens, [half, *others])
        return half, best, rows + more

    def runs(self, even: Split, tuned: Split) -> dict[str, Run]:
        """The columns of a row."""
        every = {
            "stock": Run("stock"),
            "peer": Run("peer"),
            "fuse_only": Run("fuse_only"),
            "even_split": Run("woven", even),
            "tuned_split": Run("woven", tuned),
            "whole_attention_even": Run("whole", even),
            "whole_attention_tuned": Run("whole", tuned),
            "no_comm": Run("no_comm"),
        }
        return {name: run for name, run in every.items() if run.variant in self.bench.variants}

    def rows(self, num_tokens: int, even: Split, tuned: Split) -> list[dict[str, Any]]:
        """The rows of one token count, one a mode."""
        runs, out = self.runs(even, tuned), []
        for mode in MODES:
            self.say(f"{num_tokens} tokens, {mode}")
            errors = self.verify(runs, num_tokens, mode)
            times = self.time_runs(runs, num_tokens, mode)
            row: dict[str, Any] = {"num_tokens": num_tokens, "mode": mode, "peer_ms": None}
            row |= {f"{name}_ms": timing.ms for name, timing in times.items()}
            row["mhz"] = {name: timing.mhz for name, timing in times.items()}
            for name, split in (("even", even), ("tuned", tuned)):
                row |= {f"prefix_{name}": split.prefix, f"ctas_{name}": split.ctas}
            out.append(row | {"error": round(max(errors.values(), default=0.0), 5)})
            self.say(json.dumps(out[-1]))
        return out

    def timelines(self, num_tokens: int, even: Split, tuned: Split) -> dict[str, Any]:
        """One eager step's kernels on this rank: figures of every column, and the kernels of stock and tuned split."""
        found = {}
        on_all_ranks(self.comm, "starting the profiler", timeline.start_profiler)
        for name, run in self.runs(even, tuned).items():
            step = self.prepare_all(run, num_tokens, "eager")

            def once(step: Callable[[], None] = step) -> None:
                self.comm.barrier()
                step()
                self.stream.synchronize()

            once()
            found[name] = timeline.record(once)
        kernels = {name: timeline.rows(found[name]) for name in ("stock", "tuned_split") if name in found}
        figures = {name: timeline.summary(of) for name, of in found.items()}
        return {"num_tokens": num_tokens, "eager": figures, "eager_kernels": kernels}


def measure_e2e(
    bench: E2eBench,
    comm: CommBackend,
    cache: Path | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda _document: None,
) -> dict[str, Any]:
    """Measure on the ranks of ``comm``, one GPU each; returns the JSON document (on every rank).

    Args:
        bench: What to measure.
        comm: The ranks.
        cache: Folder of TensorRT's timings, kept for the next run; None: a temporary one.
        keep: Called on every rank with the document so far, still without timeline, whenever a token count is done: a
            run that is cut short leaves what it has.

    Raises:
        TokenWeaveError: on all ranks, where an engine cannot be built or does not compute what stock does.
    """
    with ExitStack() as stack:
        folder = cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(plugin_library().override_launch, None)
        runner = stack.enter_context(closing(E2eRunner(bench, comm, folder)))
        plugin_library().reset_counters()
        rows: list[dict[str, Any]] = []
        sweep: list[dict[str, Any]] = []
        best: dict[int, tuple[Split, Split]] = {}
        for tokens in bench.tokens:
            even, tuned, tried = runner.splits(tokens)
            best[tokens] = even, tuned
            sweep += tried
            rows += runner.rows(tokens, even, tuned)
            on_all_ranks(comm, "writing the result", partial(keep, _document(runner, rows, sweep)))
        nearest = min(bench.tokens, key=lambda tokens: abs(tokens - 4096))
        return _document(runner, rows, sweep) | {"timeline": runner.timelines(nearest, *best[nearest])}


def _document(runner: E2eRunner, rows: list[dict[str, Any]], sweep: list[dict[str, Any]]) -> dict[str, Any]:
    bench = runner.bench
    return {
        "what": f"prefill of one sequence: {bench.shape}; ms a step",
        "method": METHOD,
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "peer": PEER,
        "gemm_plugin": bench.gemm_plugin,
        "engines": {name: running.document() for name, running in runner.engines.items()},
        "counters": plugin_library().counters(),
        "rows": rows,
        "sweep": sweep,
    }
