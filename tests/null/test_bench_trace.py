"""What `bench trace` makes of engines that are played, what engines it builds, and its options."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.fake_decoder import DecoderMachine, FakeDecoder, no_plugins
from support.fake_gpu import FakeRuntime
from support.trace import BATCH, BUDGET, CONFIG, TRACE, bench, sized

from trtllm_tokenweave import engine as engine_module
from trtllm_tokenweave import engine_context, engine_runner
from trtllm_tokenweave.bench import trace_measure
from trtllm_tokenweave.bench.e2e import PREFIX_INPUT, E2eBench, Variant
from trtllm_tokenweave.bench.trace import Schedule, TraceStep
from trtllm_tokenweave.bench.trace_measure import TraceBench, TraceRunner, given, measure_trace
from trtllm_tokenweave.bench.tune_plots import pictures_of
from trtllm_tokenweave.builder import Plan
from trtllm_tokenweave.checkpoint import RandomCheckpoint
from trtllm_tokenweave.comm import CommBackend, LocalComm, SingleComm, run_ranks
from trtllm_tokenweave.decoder import DecoderBuild, describe
from trtllm_tokenweave.device import current_gpu
from trtllm_tokenweave.engine import Engine
from trtllm_tokenweave.engine_runner import EngineStep
from trtllm_tokenweave.errors import TokenWeaveError
from trtllm_tokenweave.inspection import BuildReport
from trtllm_tokenweave.interpreter import ExecutionContext
from trtllm_tokenweave.kv_cache import KvCachePool
from trtllm_tokenweave.manifest import tensor_specs
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.passes import verify
from trtllm_tokenweave.recorder import RecordedNetwork
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableRow


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return bench().schedule(BUDGET)


# --- what engines are given


def test_columns() -> None:
    made = bench(variants=("stock", "fuse_only", "woven", "whole", "no_comm")).columns()
    assert list(made) == [
        "stock",
        "fuse_only",
        "even_split",
        "tuned_split",
        "whole_attention_even",
        "whole_attention_tuned",
        "no_comm",
    ]
    assert list(bench(tuned=False).columns()) == ["stock", "fuse_only", "even_split", "no_comm"]
    assert list(bench(variants=("stock", "no_comm")).columns()) == ["stock", "no_comm"]
    assert made["even_split"].launch == LaunchConfig(ctas=8)
    assert made["tuned_split"].launch is None


def test_the_table_says_where_a_step_is_split() -> None:
    columns = bench().columns()
    assert [columns["stock"].prefix(sized(40)), columns["fuse_only"].prefix(sized(40))] == [None, None]
    assert [columns["even_split"].prefix(sized(n)) for n in (3, 31, 32, 40, 64)] == [3, 31, 16, 24, 32]
    assert [columns["tuned_split"].prefix(sized(n)) for n in (3, 31, 32, 40, 64)] == [3, 31, 16, 32, 32]


def test_the_inputs_of_an_engine(schedule: Schedule) -> None:
    mixed = next(step for step in schedule.steps if step.kind == "mixed")
    decode = next(step for step in schedule.steps if step.kind == "decode")
    pool = KvCachePool(bench().limits(BUDGET).cache(CONFIG, 2))
    made = [given(mixed, pool, 24, number) for number in (1, 2)]
    assert made[0]["host_kv_cache_pool_pointers"].tolist() == [[pool.address, 0]]
    assert made[0][PREFIX_INPUT].shape == (24,)
    differing = [n for n in made[0] if made[0][n].tobytes() != made[1][n].tobytes()]
    assert differing == ["host_runtime_perf_knobs"]
    again = [given(decode, pool, None, None) for _ in range(2)]
    assert PREFIX_INPUT not in again[0]
    assert all(again[0][n].tobytes() == again[1][n].tobytes() for n in again[0])
    assert mixed.inputs["host_runtime_perf_knobs"][-1] == -1


# --- the measuring loop, with engines that are played


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeEngine:
    """Takes as many milliseconds as it is told for a step, and puts out ones, or something else."""

    def __init__(self, clock: Clock, milliseconds: Callable[[int, int], float], error: Callable[[int], float]) -> None:
        self.clock, self.milliseconds, self.error = clock, milliseconds, error
        self.pool = SimpleNamespace(pointers=np.array([[4096, 0]], np.int64))
        self.graphs = SimpleNamespace(capacity=2, counters=SimpleNamespace(graph=0))
        self.given: list[dict[str, Any]] = []

    def __call__(self, inputs: list[dict[str, Any]]) -> Any:
        (one,) = inputs
        self.given.append(one)
        tokens = len(one["input_ids"])
        self.clock.now += self.milliseconds(tokens, len(one.get(PREFIX_INPUT, ()))) / 1000
        chunks = (one["host_request_types"] == 0).any()
        self.graphs.counters.graph += not chunks
        return np.full((len(one["host_request_types"]), 4), 1 + self.error(bool(chunks)), np.float32)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    said: list[Any] = []
    monkeypatch.setattr(trace_measure, "plugin_library", lambda: SimpleNamespace(override_launch=said.append))
    return said


def played(
    comm: CommBackend, errors: dict[str, Callable[[int], float]] | None = None, **fields: Any
) -> tuple[TraceRunner, dict[Variant, FakeEngine]]:
    """What :func:`played_with` makes of the tests' bench."""
    return played_with(bench(comm.rank, **fields), comm, errors)


def played_with(
    made: TraceBench, comm: CommBackend | None = None, errors: dict[str, Callable[[int], float]] | None = None
) -> tuple[TraceRunner, dict[Variant, FakeEngine]]:
    """Stock takes a millisecond a token, others less, rank 1 half a millisecond a step more, and so do prefixes."""
    clock, comm = Clock(), comm or SingleComm()
    speed = {"stock": 1.0, "fuse_only": 0.9, "woven": 0.75, "no_comm": 0.5}

    def milliseconds(tokens: int, prefix: int, variant: str) -> float:
        return speed[variant] * tokens + comm.rank / 2 + (0.125 if prefix % 16 else 0)

    engines = {
        variant: FakeEngine(
            clock, partial(milliseconds, variant=variant), (errors or {}).get(variant, lambda _chunks: 0.0)
        )
        for variant in made.engines.variants
    }
    runner = TraceRunner(made, comm, cast("dict[Variant, EngineStep]", engines), clock)
    return runner, engines


def on_ranks(job: Callable[[CommBackend], Any]) -> list[Any]:
    return run_ranks([partial(job, comm) for comm in LocalComm.group(2, timeout=20)])


def test_a_row_holds_the_slower_ranks_times(launches: list[Any], schedule: Schedule) -> None:
    first, second = on_ranks(lambda comm: played(comm)[0].row(BUDGET))
    assert first == second
    steps, tokens = schedule.steps_of_kinds(), schedule.tokens_of_kinds()
    count, total = len(schedule.steps), sum(tokens.values())
    assert (first["max_num_tokens"], first["peer_ms"], first["error"]) == (BUDGET, None, 0.0)
    for name, speed in (("stock", 1.0), ("fuse_only", 0.9), ("no_comm", 0.5)):
        assert first[f"{name}_ms"] == pytest.approx(speed * total + count / 2, abs=1e-3)
        for kind in ("prefill", "mixed", "decode"):
            assert first["kinds_ms"][name][kind] == pytest.approx(speed * tokens[kind] + steps[kind] / 2, abs=1e-3)
    assert first["tokens_per_s"]["stock"] == pytest.approx(
        1e3 * sum(r.total for r in TRACE.requests) / first["stock_ms"], abs=0.1
    )
    assert first["generated_per_s"]["stock"] == pytest.approx(
        1e3 * sum(r.output for r in TRACE.requests) / first["stock_ms"], abs=0.1
    )
    assert (first["steps"], first["tokens"]) == (steps, tokens)
    assert first["graph_steps"]["stock"] == steps["decode"]
    assert {name: len(each) for name, each in first["passes_ms"].items()} == dict.fromkeys(bench().columns(), 3)
    split = sum(step.record.num_tokens >= 32 for step in schedule.steps)
    assert first["split_steps"] == {"even_split": split, "tuned_split": split}
    json.dumps(first)
    assert list(pictures_of({"rows": [first]})) == ["speed_up_trace", "speed_up_reading"]


def test_a_trace_without_its_tail_counts_what_was_run(launches: list[Any], schedule: Schedule) -> None:
    runner, engines = played(SingleComm(), variants=("stock",), tail=False, rounds=1)
    row = runner.row(BUDGET)
    assert len(engines["stock"].given) - len(schedule.loaded.steps) == len(schedule.loaded.steps) + 3
    rows, prompts = schedule.loaded.generation_rows, sum(r.prompt for r in TRACE.requests)
    assert 0 < rows < schedule.generation_rows
    assert row["generated_per_s"]["stock"] == pytest.approx(1e3 * (rows + 6) / row["stock_ms"], abs=0.1)
    assert row["tokens_per_s"]["stock"] == pytest.approx(1e3 * (prompts + rows + 6) / row["stock_ms"], abs=0.1)


def test_every_engine_runs_the_same_steps(launches: list[Any], schedule: Schedule) -> None:
    def job(comm: CommBackend) -> Any:
        runner, engines = played(comm)
        runner.row(BUDGET)
        return {
            variant: [(one["input_ids"].tobytes(), one["position_ids"].tobytes()) for one in engine.given]
            for variant, engine in engines.items()
        }, {variant: engine.graphs.capacity for variant, engine in engines.items()}

    (given_to, capacity), (other, _) = on_ranks(job)
    assert given_to == other
    assert given_to["stock"] == given_to["fuse_only"] == given_to["no_comm"]
    recurring = len(schedule.recurring(103))
    rehearsed = len(schedule.loaded.steps) + 3 * recurring
    assert len(given_to["stock"]) == rehearsed + 3 * len(schedule.steps)
    assert len(given_to["woven"]) == 2 * len(given_to["stock"])  # two columns
    assert set(capacity.values()) == {max(recurring, 2)}
    assert set(map(repr, launches)) == {"None", repr(LaunchConfig(ctas=8))}


def test_columns_take_turns(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    orders: dict[int, list[str]] = {0: [], 1: []}
    run = TraceRunner.one_pass

    def noted(self: TraceRunner, name: str, schedule: Schedule) -> Any:
        orders[self.comm.rank].append(name)
        return run(self, name, schedule)

    monkeypatch.setattr(TraceRunner, "one_pass", noted)
    on_ranks(lambda comm: played(comm)[0].row(BUDGET))
    names = list(bench().columns())
    rounds = [orders[0][i : i + len(names)] for i in range(0, len(orders[0]), len(names))]
    assert orders[0] == orders[1]
    assert [sorted(each) for each in rounds] == [sorted(names)] * 3
    assert len(set(map(tuple, rounds))) > 1


def test_woven_engines_are_told_the_prefix_of_each_step(launches: list[Any], schedule: Schedule) -> None:
    runner, engines = played(SingleComm(), variants=("stock", "woven"), rounds=1)
    runner.one_pass("tuned_split", schedule)
    table = bench().engines.weave.table
    wanted = [table.lookup(step.record.batch, step.record.num_tokens).split for step in schedule.steps]
    assert [len(one[PREFIX_INPUT]) for one in engines["woven"].given] == wanted
    assert any(a < step.record.num_tokens for a, step in zip(wanted, schedule.steps, strict=True))
    runner.one_pass("stock", schedule)
    assert all(PREFIX_INPUT not in one for one in engines["stock"].given)
    knobs = [one["host_runtime_perf_knobs"][-1] for one in engines["woven"].given + engines["stock"].given]
    assert set(knobs) == {-1, 1, 2}


def rehearsed(made: TraceBench) -> tuple[dict[str, set[tuple[int, int, int]]], list[set[int]], int]:
    """Both woven columns and the first again: (sequences, prefix, knob) of their generation rows, the knobs of their
    chunks, and how many graphs the engine may have."""
    runner, engines = played_with(made)
    rows, chunks = {}, []
    for name in ("even_split", "tuned_split", "even_split"):
        engines["woven"].given.clear()
        runner.rehearse(name, made.schedule(BUDGET))
        found = [
            (len(one["host_request_types"]), len(one[PREFIX_INPUT]), int(one["host_runtime_perf_knobs"][-1]))
            for one in engines["woven"].given
        ]
        reads = [bool((one["host_request_types"] == 0).any()) for one in engines["woven"].given]
        rows[name] = {key for key, reading in zip(found, reads, strict=True) if not reading}
        chunks.append({key[-1] for key, reading in zip(found, reads, strict=True) if reading})
    return rows, chunks, engines["woven"].graphs.capacity


def test_columns_of_one_engine_share_no_graph_of_a_split_step(launches: list[Any]) -> None:
    """Graphs keep the launch that they were captured with, and columns of one engine differ in it."""
    whole = bench(variants=("stock", "woven"))
    recurring = whole.schedule(BUDGET).recurring(103)
    rows, chunks, capacity = rehearsed(whole)
    assert rows["even_split"] == rows["tuned_split"]
    assert capacity == max(len(recurring), 2)
    # Chunks never come again.
    assert chunks == [{1}, {2}, {3}]
    # Now two and three rows are split, two of them by the even split only.
    fuse = TableRow(tokens=Bucket(lo=2, hi=2), mode="fuse")
    table = whole.engines.weave.table.model_copy(update={"min_tokens": 2, "granularity": 2, "rows": (fuse,)})
    weave = replace(whole.engines.weave, table=table)
    rows, _, capacity = rehearsed(replace(whole, engines=replace(whole.engines, weave=weave)))
    assert rows["even_split"] & rows["tuned_split"] == {(1, 1, -1)}
    assert {key[:2] for key in rows["even_split"]} == {(1, 1), (2, 1), (3, 2)}
    assert {key[:2] for key in rows["tuned_split"]} == {(1, 1), (2, 2), (3, 2)}
    assert capacity == sum(1 if step.record.batch == 1 else 2 for step in recurring)


@pytest.mark.parametrize(
    ("where", "message"), [(True, "in steps that read prompts: 0.2"), (False, "in the last step: 0.2")]
)
def test_an_engine_that_differs_from_stock_is_an_error(launches: list[Any], where: bool, message: str) -> None:
    def job(comm: CommBackend) -> tuple[str, int]:
        wrong = {"woven": lambda chunks: 0.2 if comm.rank and bool(chunks) is where else 0.0}
        runner, engines = played(comm, wrong)
        with pytest.raises(TokenWeaveError, match=f"split differs from stock {message}") as raised:
            runner.row(BUDGET)
        return str(raised.value), len(engines["stock"].given)

    (first, count), (second, _) = on_ranks(job)
    assert first == second
    passes = 0 if where else 1
    steps = bench().schedule(BUDGET)
    assert count == len(steps.loaded.steps) + 3 * len(steps.recurring(103)) + passes * len(steps.steps)


def test_logits_that_are_no_numbers_are_an_error(launches: list[Any]) -> None:
    runner, _ = played(SingleComm(), {"fuse_only": lambda _chunks: float("nan")}, variants=("stock", "fuse_only"))
    with pytest.raises(TokenWeaveError, match="fuse_only differs from stock in steps that read prompts: inf"):
        runner.row(BUDGET)


def test_no_communication_is_not_compared(launches: list[Any]) -> None:
    runner, _ = played(SingleComm(), {"no_comm": lambda _chunks: 9.0}, variants=("stock", "no_comm"), rounds=1)
    assert runner.row(BUDGET)["error"] == 0.0


def test_a_rank_that_fails_in_a_pass_fails_on_all(launches: list[Any]) -> None:
    def job(comm: CommBackend) -> str:
        def fail(_chunks: int) -> float:
            if comm.rank:
                raise TokenWeaveError("the step failed: a rank is gone")
            return 0.0

        with pytest.raises(TokenWeaveError, match="rank 1: the step failed") as raised:
            played(comm, {"fuse_only": fail})[0].row(BUDGET)
        return str(raised.value)

    assert len(set(on_ranks(job))) == 1


# --- on the runner of engines, with a GPU that is played


@pytest.fixture
def stock(trt: ModuleType, cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineStep]:
    plugins = no_plugins()
    plugins.override_launch = lambda _launch: None
    for where in (engine_module, engine_context, engine_runner, trace_measure):
        monkeypatch.setattr(where, "plugin_library", lambda: plugins)
    made = bench(tp_size=1)
    weights = RandomCheckpoint(CONFIG).rank_weights(Mapping())
    build = DecoderBuild(CONFIG, weights, made.engines.limits, made.engines.weave, "stock", Path("unused"))
    plan = DecoderMachine(trt, cuda).build(replace(build, multiple_profiles=True))
    cache = made.limits(BUDGET).cache(CONFIG, 1)
    with EngineStep(Engine.of_plan(plan, SingleComm()), describe(build, plan, "a test"), cache, graphs=1) as step:
        yield step


def test_generation_comes_from_graphs_and_chunks_do_not(stock: EngineStep, schedule: Schedule) -> None:
    runner = TraceRunner(bench(tp_size=1, variants=("stock",)), SingleComm(), {"stock": stock})
    row = runner.row(BUDGET)
    assert row["graph_steps"] == {"stock": schedule.steps_of_kinds()["decode"]}
    counters = stock.graphs.counters
    assert (counters.captured, counters.evicted, counters.fallback) == (len(schedule.recurring(103)), 0, 0)
    assert row["stock_ms"] > 0
    engine: FakeDecoder = stock.engine.tensorrt_engine
    last = engine.device[-len(schedule.steps) :]
    for one, step in zip(last, schedule.steps, strict=True):
        for name in ("input_ids", "sequence_length", "kv_cache_block_offsets", "context_lengths"):
            np.testing.assert_array_equal(one[name], step.inputs[name])
    # Small steps are of the profile that is made for them.
    profiles = engine.profiles[-len(schedule.steps) :]
    assert profiles == [int(step.record.num_tokens <= BATCH) for step in schedule.steps]


@pytest.fixture
def machine(trt: ModuleType, cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> DecoderMachine:
    """Both ranks' process, whose engines count up; one rank at a time, as there is one CUDA."""
    plugins = no_plugins()
    plugins.override_launch = lambda _launch: None
    plugins.reset_counters = lambda: None
    for where in (engine_module, engine_context, engine_runner, trace_measure):
        monkeypatch.setattr(where, "plugin_library", lambda: plugins)
    made, one_at_a_time, run = DecoderMachine(trt, cuda), threading.Lock(), EngineStep.__call__

    def call(self: EngineStep, inputs: Any) -> Any:
        with one_at_a_time:
            return run(self, inputs)

    def plan(of: E2eBench, variant: Variant, comm: CommBackend, _folder: Path, fused: int | None) -> Plan:
        assert (fused is not None) is (variant == "woven")
        network = RecordedNetwork()
        result, profiles = of.build(network, variant)
        vocabulary = of.config.local(2).vocab_size if variant == "no_comm" else of.config.vocab_size
        job = SimpleNamespace(
            config=SimpleNamespace(vocab_size=vocabulary), settings=lambda: SimpleNamespace(profiles=profiles)
        )
        data = f"{variant} of rank {comm.rank}".encode()
        made.engines[data] = engine = FakeDecoder(cuda, network, cast("DecoderBuild", job))
        return Plan(memoryview(data), result, BuildReport(), tensor_specs(engine), current_gpu())

    monkeypatch.setattr(EngineStep, "__call__", call)
    monkeypatch.setattr(trace_measure, "make_plan", plan)
    return made


def test_the_document(machine: DecoderMachine, cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    before, closed, close = set(cuda.memory), [], EngineStep.close

    def closing(self: EngineStep) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(EngineStep, "close", closing)
    kept: dict[int, list[str]] = {0: [], 1: []}

    def measure(comm: CommBackend) -> dict[str, Any]:
        made = bench(comm.rank, budgets=(BUDGET, 96), rounds=1)
        return measure_trace(made, comm, keep=lambda so_far: kept[comm.rank].append(json.dumps(so_far)))

    first, second = on_ranks(measure)
    # What a run that is cut short leaves.
    assert [[len(json.loads(one)["rows"]) for one in of_rank] for of_rank in kept.values()] == [[1, 2]] * 2
    assert json.loads(kept[0][-1]) == first
    assert len(closed) == 8
    assert not cuda.graphs
    assert set(cuda.memory) == before
    assert [row["max_num_tokens"] for row in first["rows"]] == [BUDGET, 96]
    assert first["rows"] == second["rows"]
    assert all(row["error"] == 0.0 and row["peer_ms"] is None for row in first["rows"])
    assert set(first["engines"]) == {"stock", "fuse_only", "woven", "no_comm"}
    assert [first["engines"][name]["symmetric"] for name in ("stock", "woven")] == [False, True]
    assert first["engines"]["woven"]["graphs"]["fallback"] == 0
    assert (first["min_tokens"], first["limits"]["max_seq_len"], first["trace"]["seed"]) == (32, 103, 3)
    assert "serving trace: 2 layers" in first["what"]
    json.dumps(first)
    schedules = [bench().schedule(budget) for budget in (BUDGET, 96)]
    for rank in (0, 1):
        found = machine.engines[f"woven of rank {rank}".encode()].device
        splits = [len(one[PREFIX_INPUT]) < len(one["input_ids"]) for one in found]
        assert any(splits)
        assert splits == [len(one["input_ids"]) >= 32 for one in found]
        assert len(machine.engines[f"stock of rank {rank}".encode()].device) == sum(
            len(made.loaded.steps) + 3 * len(made.recurring(103)) + len(made.steps) for made in schedules
        )


# --- what is built, on the interpreter


def trace_logits(name: str, steps: tuple[TraceStep, ...]) -> list[Any]:
    """Logits of every step on rank 0, of the engine of a column."""
    column = bench().columns()[name]
    contexts, pools = [], []
    for comm in LocalComm.group(2):
        network = RecordedNetwork()
        bench(comm.rank).engines.build(network, column.variant)
        assert verify(network) == []
        pools.append(KvCachePool(bench().limits(BUDGET).cache(CONFIG, 2)))
        contexts.append(ExecutionContext(network, comm))
        contexts[-1].pools.update(pools[-1].bindings)
    names = {contexts[0].network.get_input(i).name for i in range(contexts[0].network.num_inputs)}
    out = []
    for step in steps:
        inputs = [{n: x for n, x in given(step, pool, column.prefix(step), 1).items() if n in names} for pool in pools]
        jobs = [partial(context.run, one) for context, one in zip(contexts, inputs, strict=True)]
        out.append(run_ranks(jobs)[0]["logits"].astype(np.float64))
    return out


def test_woven_engines_compute_what_stock_does_in_every_step(schedule: Schedule) -> None:
    steps = schedule.steps
    expected = trace_logits("stock", steps)
    for column in ("tuned_split", "fuse_only"):
        for found, wanted in zip(trace_logits(column, steps), expected, strict=True):
            assert np.linalg.norm(found - wanted) < 0.03 * np.linalg.norm(wanted)
    # Negative control: the steps are no two alike.
    assert all(a.shape != b.shape or not np.allclose(a, b, rtol=0.03) for a, b in pairwise(expected))


def test_the_second_profile_is_for_steps_that_are_not_split() -> None:
    variants: tuple[Variant, ...] = ("stock", "woven")
    for variant in variants:
        _, (large, few) = bench().engines.build(RecordedNetwork(), variant)
        assert (large["input_ids"].maximum, few["input_ids"].maximum) == ((96,), (BATCH,))
        assert few["input_ids"].optimum == (BATCH,)
        assert large["context_lengths"] == few["context_lengths"]
        if variant == "woven":
            assert large[PREFIX_INPUT].optimum[0] < large["input_ids"].optimum[0]
            assert few[PREFIX_INPUT] == few["input_ids"]
