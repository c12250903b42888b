"""The decoder layers that `bench stack` builds, on the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from support.models import small
from support.stack import run

from trtllm_tokenweave.bench import stack as stack_module
from trtllm_tokenweave.bench import timeline
from trtllm_tokenweave.bench.rank_timing import steps_of
from trtllm_tokenweave.bench.stack import StackBench, StackRunner
from trtllm_tokenweave.bench.stack_network import VARIANTS, Gemm, Stack, Variant
from trtllm_tokenweave.bench.step_timer import Prepare, Timing
from trtllm_tokenweave.bench.timeline import Kernel
from trtllm_tokenweave.comm import CommBackend, LocalComm, SingleComm, run_ranks
from trtllm_tokenweave.device import CudaError
from trtllm_tokenweave.errors import TokenWeaveError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.passes import WeaveOptions, verify
from trtllm_tokenweave.patterns import is_all_reduce
from trtllm_tokenweave.plugin_specs import ALL_REDUCE_RMS_NORM
from trtllm_tokenweave.recorder import RecordedNetwork
from trtllm_tokenweave.step_graphs import StepCounters
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableRow, TuningTable
from trtllm_tokenweave.waves import table_key

CONFIG = small()
TABLE = TuningTable(key=table_key(CONFIG, 2), granularity=16, min_tokens=1, rows=())


def stack(rank: int) -> Stack:
    return Stack(CONFIG, WeaveOptions(Mapping(2, rank, 2), TABLE, 8, 128), keys=24)


def networks(variant: Variant) -> list[RecordedNetwork]:
    made = [RecordedNetwork(), RecordedNetwork()]
    modes = {"stock": "stock", "no_comm": "stock", "fuse_only": "fuse", "woven": "weave"}
    for rank, network in enumerate(made):
        assert stack(rank).build(network, variant).mode == modes[variant]
        assert verify(network) == []
    return made


def test_engines_of_one_process_carry_different_tables() -> None:
    """Also of a table without SM targets: the plugins' groups of ranks are told apart by them."""
    carried = []
    for gemm in ("trt", "budget"):
        network = RecordedNetwork()
        stack(0).build(network, "woven", gemm)
        layers = [n for n in Graph(network).live if n.plugin_name == ALL_REDUCE_RMS_NORM]
        carried.append({bytes(n.fields["table"]) for n in layers})  # type: ignore[arg-type]
    assert [len(tables) for tables in carried] == [1, 1]
    assert carried[0] != carried[1]


def test_all_variants_but_no_comm_compute_the_same() -> None:
    x = {"x": np.random.default_rng(3).standard_normal((70, CONFIG.hidden_size)).astype(ml_dtypes.bfloat16)}
    out = {variant: [r["out"].astype(np.float32) for r in run(networks(variant), x)] for variant in VARIANTS}
    for variant in ("stock", "fuse_only", "woven"):
        np.testing.assert_array_equal(out[variant][0], out[variant][1])
        error = np.linalg.norm(out[variant][0] - out["stock"][0]) / np.linalg.norm(out["stock"][0])
        assert error < 0.02
    assert np.linalg.norm(out["no_comm"][0] - out["stock"][0]) > 0.2 * np.linalg.norm(out["stock"][0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_stock_stack_has_all_reduces_left(variant: Variant) -> None:
    graph = Graph(networks(variant)[0])
    count = sum(is_all_reduce(node) for node in graph.live)
    assert count == (2 * CONFIG.num_hidden_layers if variant == "stock" else 0)


def test_weights_differ_by_rank_and_layer_and_norms_do_not() -> None:
    first, second = stack(0).weights, stack(1).weights
    layers = [f"transformer.layers.{i}" for i in range(2)]
    for name in (f"{layers[0]}.attention.qkv.weight", f"{layers[0]}.attention.keys.weight"):
        assert not np.array_equal(first[name], second[name])
    assert not np.array_equal(first[f"{layers[0]}.mlp.proj.weight"], first[f"{layers[1]}.mlp.proj.weight"])
    for name, weight in first.items():
        assert weight.flags.c_contiguous
        assert weight.dtype == ml_dtypes.bfloat16
        if weight.ndim == 1:
            np.testing.assert_array_equal(weight, second[name])


def test_the_weaves_gemms_are_an_argument() -> None:
    shared = stack(0)
    names = [node.plugin_name for gemm in ("trt", "budget") for node in woven_by(shared, gemm).live]
    assert names.count("Gemm")
    assert not [node for node in woven_by(shared, "trt").live if node.plugin_name == "Gemm"]


def woven_by(shared: Stack, gemm: Gemm) -> Graph:
    network = RecordedNetwork()
    shared.build(network, "woven", gemm)
    return Graph(network)


class FakeGraphs:
    """Graphs of one rank: a step is captured at once, or never; they cannot be closed."""

    def __init__(self, captures: bool) -> None:
        self.captures, self.captured = captures, False
        self.counters = StepCounters(reason="no memory")

    def has(self, *_: Any) -> bool:
        return self.captured

    def step(self, *_: Any) -> None:
        self.captured = self.captures
        self.counters.fallback += not self.captures

    def close(self) -> None:
        raise CudaError("cudaGraphExecDestroy: error 700")


class Prepared(StackRunner):
    """A runner with engines that only have graphs."""

    def __init__(self, comm: CommBackend, captures: bool = True) -> None:
        self.comm = comm
        self.stream = cast("Any", SimpleNamespace(synchronize=self.fail))
        self.closed: list[str] = []
        self.launches = {}
        self.engines = {name: self.running(name, captures) for name in ("stock", "fuse_only")}

    def running(self, name: str, captures: bool) -> Any:
        graphs, context = FakeGraphs(captures), SimpleNamespace(close=lambda: self.closed.append(name))
        return SimpleNamespace(graphs=graphs, context=context)

    def fail(self) -> None:
        raise CudaError("cudaStreamSynchronize: error 700")

    def bindings(self, _tokens: int) -> tuple[Any, Any]:
        return {}, {}


def test_a_capture_that_fails_on_one_rank_is_every_ranks_error() -> None:
    def job(comm: CommBackend) -> str:
        with pytest.raises(TokenWeaveError) as raised:
            Prepared(comm, captures=comm.rank == 0).queue("stock", 64, "graph")
        return str(raised.value)

    assert set(on_two_ranks(job)) == {"rank 1: stock, 64 tokens: no memory"}
    assert len(on_two_ranks(lambda comm: Prepared(comm).queue("stock", 64, "graph"))) == 2


def test_close_goes_on_after_an_error() -> None:
    runner = Prepared(SingleComm())
    with pytest.raises(CudaError, match="error 700"):
        runner.close()
    assert sorted(runner.closed) == ["fuse_only", "stock"]


class Timed(StackRunner):
    """A runner whose engines are figures: milliseconds by name; notes what was queued."""

    def __init__(self, times: dict[str, float], comm: CommBackend, errors: dict[str, float] | None = None) -> None:
        self.comm, self.started, self.times, self.errors = comm, 0.0, times, errors or {}
        self.bench = StackBench(stack(comm.rank), (1024,), (1,))
        self.engines = dict.fromkeys(times)  # type: ignore[assignment]
        self.launches = {}
        self.stream = cast("Any", SimpleNamespace(synchronize=lambda: None))
        self.timer = cast("Any", self)
        self.order: list[str] = []

    def queue(self, name: str, *_: Any) -> Any:
        return lambda: self.order.append(name)

    def result(self, name: str, *_: Any) -> Any:
        return np.full(4, 1 + self.errors.get(name, 0.0), np.float32)

    def time(self, samples: Sequence[tuple[Prepare, int]]) -> list[Timing]:
        """As `StepTimer.time`."""
        found = []
        for prepare, count in samples:
            assert count in (steps_of(1024), steps_of(8192))
            prepare()()
            found.append(Timing(self.times[self.order[-1]] + self.comm.rank, 1500.0 - self.times[self.order[-1]]))
        return found


TIMES = {"stock": 10.0, "fuse_only": 9.0, "woven_trt": 8.0, "woven_budget": 7.0, "no_comm": 6.0}


def on_two_ranks(job: Callable[[CommBackend], Any]) -> list[Any]:
    return run_ranks([partial(job, comm) for comm in LocalComm.group(2)])


def test_rows_are_those_of_the_slower_rank_and_ranks_agree_on_the_order() -> None:
    runners: list[Timed] = []

    def job(comm: CommBackend) -> Any:
        runners.append(Timed(TIMES, comm))
        return runners[-1].rows(1024)

    first, second = on_two_ranks(job)
    assert first == second
    assert [(row["mode"], row["gemm"], row["woven_ms"]) for row in first] == [
        ("eager", "trt", 9.0),
        ("eager", "budget", 8.0),
        ("graph", "trt", 9.0),
        ("graph", "budget", 8.0),
    ]
    expected = {"num_tokens": 1024, "stock_ms": 11.0, "fuse_only_ms": 10.0, "no_comm_ms": 7.0, "error": 0.0}
    clocks = {"stock": 1490.0, "fuse_only": 1491.0, "no_comm": 1494.0}
    for row in first:
        assert expected.items() <= row.items()
        assert row["mhz"] == {**clocks, "woven": 1492.0 if row["gemm"] == "trt" else 1493.0}
    assert runners[0].order == runners[1].order
    rounds = [runners[0].order[i : i + 5] for i in range(0, len(runners[0].order), 5)]
    assert all(sorted(names) == sorted(TIMES) for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1


@pytest.mark.parametrize("error", [0.06, float("nan")])
def test_an_engine_that_differs_from_stock_is_not_timed(error: float) -> None:
    runners: list[Timed] = []

    def job(comm: CommBackend) -> str:
        runners.append(Timed(TIMES, comm, {"fuse_only": error} if comm.rank else None))
        with pytest.raises(TokenWeaveError, match="fuse_only differs from stock at 1024 tokens") as raised:
            runners[-1].rows(1024)
        return str(raised.value)

    assert len(set(on_two_ranks(job))) == 1
    assert not any(runner.order for runner in runners)


class Swept(Timed):
    """A runner whose woven engines take as long as the SMs that their launch asks for."""

    def queue(self, name: str, tokens: int, mode: Any = "eager") -> Any:
        launch = self.launches.get((name, tokens))
        if launch is not None:
            self.times[name] = float(launch.ctas if name == "woven_trt" else launch.gemm_sms)
        return super().queue(name, tokens, mode)


def swept(**errors: float) -> Swept:
    runner = Swept(dict(TIMES), SingleComm(), errors)
    row = TableRow(tokens=Bucket(lo=1), mode="weave", mlp=LaunchConfig(ctas=8, threads=512, gemm_sms=120))
    table = TABLE.model_copy(update={"rows": (row,)})
    woven = Stack(CONFIG, WeaveOptions(Mapping(2, 0, 2), table, 8, 128))
    runner.bench = StackBench(woven, (1024,), (1,), sweep_ctas=(4, 16))
    return runner


def test_each_engine_keeps_what_was_best_in_the_sweep() -> None:
    runner = swept()
    assert runner.sweep(1024) == [
        {"num_tokens": 1024, "ctas": 4, "gemm_sms": 124, "woven_trt_ms": 4.0, "woven_budget_ms": 124.0},
        {"num_tokens": 1024, "ctas": 16, "gemm_sms": 112, "woven_trt_ms": 16.0, "woven_budget_ms": 112.0},
    ]
    best = {"woven_trt": LaunchConfig(ctas=4, threads=512, gemm_sms=124)}
    best["woven_budget"] = LaunchConfig(ctas=16, threads=512, gemm_sms=112)
    assert runner.launches == {(name, 1024): launch for name, launch in best.items()}
    rows = runner.rows(1024)
    assert [(r["gemm"], r["ctas"], r["gemm_sms"], r["woven_ms"]) for r in rows if r["mode"] == "graph"] == [
        ("trt", 4, 0, 4.0),
        ("budget", 16, 112, 112.0),
    ]


def test_nothing_is_swept_where_a_table_says_what_to_do() -> None:
    runner = swept()
    runner.bench = replace(runner.bench, sweep_ctas=())
    assert runner.sweep(1024) == []
    assert not runner.launches


def test_a_wrong_result_ends_a_sweep() -> None:
    with pytest.raises(TokenWeaveError, match="woven_trt differs from stock"):
        swept(woven_trt=0.2).sweep(1024)


def test_every_rank_has_started_its_profiler_before_the_first_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def record(run: Callable[[], None]) -> list[Kernel]:
        events.append("record")
        run()
        return [Kernel("gemm", 7, 0.0, 10.0, 132)]

    monkeypatch.setattr(timeline, "start_profiler", lambda: events.append("start"))
    monkeypatch.setattr(timeline, "record", record)
    first, second = on_two_ranks(lambda comm: Timed(dict(TIMES), comm).timelines(4096))
    assert events == ["start"] * 2 + ["record"] * 2 * 2 * len(TIMES)
    assert first == second
    assert set(first) == {"num_tokens", "eager", "eager_kernels", "graph", "graph_kernels"}
    assert set(first["graph_kernels"]) == {"stock", "woven_trt", "woven_budget"}


def test_a_profiler_that_does_not_start_on_one_rank_is_every_ranks_error(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = iter([True, False])  # one of them, whichever asks second

    def start() -> None:
        if not next(starts):
            raise TokenWeaveError("no CUPTI")

    def job(comm: CommBackend) -> None:
        with pytest.raises(TokenWeaveError, match="no CUPTI"):
            Timed(dict(TIMES), comm).timelines(4096)

    monkeypatch.setattr(timeline, "start_profiler", start)
    monkeypatch.setattr(timeline, "record", lambda _: pytest.fail("recorded"))
    on_two_ranks(job)


class Library:
    """Notes overrides, as the plugin library would take them."""

    def __init__(self) -> None:
        self.launches: list[LaunchConfig | None] = []

    def override_launch(self, launch: LaunchConfig | None) -> None:
        self.launches.append(launch)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_step_is_queued_or_captured_with_its_own_launch(monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    library, own = Library(), LaunchConfig(ctas=4)
    monkeypatch.setattr(stack_module, "plugin_library", lambda: library)
    runner = Prepared(SingleComm())
    for running in runner.engines.values():
        cast("Any", running.context).__dict__.update(bind=lambda *_: None, enqueue=lambda *_: None)
    runner.launches["stock", 64] = own
    runner.queue("stock", 64, mode)()
    runner.queue("fuse_only", 64, mode)()
    assert library.launches == ([own, own, None, None] if mode == "eager" else [own, None])


def test_of_several_recordings_the_shortest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter((50.0, 40.0, 45.0))
    monkeypatch.setattr(timeline, "_record_once", lambda _run: [Kernel("gemm", 7, 0.0, next(ends))])
    assert timeline.record(lambda: None) == [Kernel("gemm", 7, 0.0, 40.0)]
    assert next(ends, None) is None
