"""The tuner's runner, on a stand-in for CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_gpu import FakeRuntime, install_cuda
from support.models import small
from support.tuning import MHZ

from trtllm_tokenweave.bench.stack_network import BATCH_INPUT, Stack
from trtllm_tokenweave.bench.step_timer import Timing
from trtllm_tokenweave.comm import CommBackend, LocalComm, SingleComm, run_ranks
from trtllm_tokenweave.device import CudaError, cudart
from trtllm_tokenweave.engine_context import Bindings
from trtllm_tokenweave.errors import TokenWeaveError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.passes import WeaveOptions
from trtllm_tokenweave.table import TuningTable
from trtllm_tokenweave.tune import engine as engine_module
from trtllm_tokenweave.tune.candidates import Candidate, Space
from trtllm_tokenweave.tune.engine import PREFIX_INPUT, GpuRunner, TuningEngine, steps_of
from trtllm_tokenweave.waves import table_key

CONFIG = small()
SPACE = Space(ctas=(4, 8), fuse_ctas=(16, 32), granularity=16)
TOKENS = 128


class EventRuntime(FakeRuntime):
    """CUDA with events that tell the steps between them: a millisecond each."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.marks: dict[int, int] = {}
        self._next_event = iter(range(1, 100))

    def cudaEventCreate(self) -> Any:  # noqa: N802
        return 0, next(self._next_event)

    def cudaEventRecord(self, event: int, stream: int) -> Any:  # noqa: ARG002, N802
        self.marks[event] = self.steps
        return (0,)

    def cudaEventElapsedTime(self, start: int, end: int) -> Any:  # noqa: N802
        return 0, float(self.marks[end] - self.marks[start])


class StepContext:
    """An execution context: out is x, spoiled where the test says so."""

    symmetric = True

    def __init__(self, cuda: EventRuntime) -> None:
        self.cuda = cuda
        self.spoil: Callable[[int, int, np.ndarray[Any, Any]], None] = lambda _prefix, _batch, _out: None
        self.bound: tuple[Bindings, Bindings] | None = None
        self.closed = False

    def bind(self, inputs: Bindings, outputs: Bindings) -> None:
        assert set(inputs) == {"x", PREFIX_INPUT, BATCH_INPUT}
        assert set(outputs) == {"out"}
        self.bound = inputs, outputs

    def enqueue(self, _stream: Any) -> None:
        assert self.bound is not None
        inputs, outputs = self.bound
        rows, width = inputs["x"].shape
        arrays = [
            np.ctypeslib.as_array((ctypes.c_uint16 * (rows * width)).from_address(b.address)).reshape(rows, width)
            for b in (inputs["x"], outputs["out"])
        ]
        arrays[1][:] = arrays[0]
        self.spoil(inputs[PREFIX_INPUT].shape[0], inputs[BATCH_INPUT].shape[0], arrays[1])
        self.cuda.steps += 1

    def step(self, inputs: Bindings, outputs: Bindings, stream: Any) -> None:
        self.bind(inputs, outputs)
        self.enqueue(stream)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventRuntime]:
    runtime = EventRuntime()
    install_cuda(monkeypatch, runtime)
    yield runtime
    cudart.cache_clear()


class SteadyClock:
    """A GPU that never changes its clock."""

    def __init__(self, _stream: Any) -> None:
        self.marks = 0

    def begin(self, marks: int) -> None:
        self.room, self.marks = marks, 0

    def mark(self) -> None:
        self.marks += 1
        assert self.marks <= self.room

    def mhz(self) -> list[float]:
        return [MHZ] * (self.marks // 2)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, cuda: EventRuntime, tmp_path: Path) -> GpuRunner:
    """A runner whose engine is `StepContext`."""
    key = table_key(CONFIG, 2)
    options = WeaveOptions(Mapping(2, 0, 2), SPACE.table(key), len(SPACE.launches), TOKENS, prefix_input=PREFIX_INPUT)
    report = SimpleNamespace(checks=("chain order: ok",), memory_bytes=5)
    plan = SimpleNamespace(result=SimpleNamespace(mode="weave"), report=report)
    made = SimpleNamespace(context=lambda **_: StepContext(cuda))
    monkeypatch.setattr(engine_module, "build_on_all_ranks", lambda *_: plan)
    monkeypatch.setattr(engine_module, "Engine", SimpleNamespace(of_plan=lambda *_: made))
    monkeypatch.setattr(engine_module, "SmClock", SteadyClock)
    rule = TuningTable(key=key, granularity=16, min_tokens=1)
    return GpuRunner(TuningEngine(Stack(CONFIG, options), SPACE, rule), SingleComm(), tmp_path / "cache")


def test_runner_binds_the_split_and_the_row_of_the_table(runner: GpuRunner) -> None:
    seen: list[tuple[int, int]] = []
    runner.context.spoil = lambda prefix, batch, _out: seen.append((prefix, batch))  # type: ignore[attr-defined]
    fuse = SPACE.fuse(16)
    split = Candidate(16, SPACE.launch(8), SPACE.launch(4))
    runner.reference(100, fuse)
    assert runner.error(100, split) == 0.0
    assert runner.time([(100, split), (60, fuse)], lead=3) == [Timing(1.0, MHZ)] * 2
    # Both of these after a step on other rows.
    assert set(seen[:2]) == {(100, SPACE.batch(fuse))}
    # Verified, then the lead, one ahead of the first event, and what is timed; ceil(100 / 16) * 16 / 2 + 16.
    layers = runner.engine.stack.config.num_hidden_layers
    ours = 2 + 3 + 1 + steps_of(100, layers)
    assert seen[2:] == [(72, SPACE.batch(split))] * ours + [(60, SPACE.batch(fuse))] * (1 + steps_of(60, layers))


@pytest.mark.parametrize("row", [0, 55, 56, 99])
def test_runner_sees_one_wrong_row(runner: GpuRunner, row: int) -> None:
    split = Candidate(0, SPACE.launch(8), SPACE.launch(4))

    def spoil(prefix: int, _batch: int, out: np.ndarray[Any, Any]) -> None:
        if prefix < 100:
            out[row] = out[row] ^ 0x8000  # the other sign

    runner.context.spoil = spoil  # type: ignore[attr-defined]
    runner.reference(100, SPACE.fuse())
    assert runner.error(100, SPACE.fuse()) == 0.0
    assert runner.error(100, split) == pytest.approx(2.0)


def test_runner_looks_at_every_row_only_where_it_is_asked_to(
    runner: GpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SAMPLED_ROWS", 10)
    monkeypatch.setattr(engine_module, "CUT_ROWS", 2)
    runner.reference(100, SPACE.fuse())

    def spoil(_prefix: int, _batch: int, out: np.ndarray[Any, Any]) -> None:
        out[21] = 0

    runner.context.spoil = spoil  # type: ignore[attr-defined]
    split = Candidate(0, SPACE.launch(8), SPACE.launch(4))
    assert runner.error(100, split) == 0.0
    assert runner.error(100, split, whole=True) == pytest.approx(1.0)


def test_runner_sees_rows_that_are_not_written_and_results_that_are_no_numbers(runner: GpuRunner) -> None:
    nan = 0x7FC0

    def spoil(prefix: int, _batch: int, out: np.ndarray[Any, Any]) -> None:
        out[prefix - 1 :] = nan

    assert runner.reference_tokens == 0
    runner.reference(64, SPACE.fuse())
    assert runner.reference_tokens == 64
    runner.context.spoil = spoil  # type: ignore[attr-defined]
    with pytest.raises(TokenWeaveError, match="fuse-only result of 100 tokens is not finite"):
        runner.reference(100, SPACE.fuse())
    assert runner.reference_tokens == 0
    runner.context.spoil = lambda *_: None  # type: ignore[attr-defined]
    runner.reference(100, SPACE.fuse())
    assert runner.reference_tokens == 100
    runner.context.spoil = spoil  # type: ignore[attr-defined]
    assert runner.error(100, Candidate(0, SPACE.launch(8), SPACE.launch(4))) == float("inf")


def test_runner_sees_rows_that_a_step_takes_over_from_the_one_before(runner: GpuRunner) -> None:
    split = Candidate(0, SPACE.launch(8), SPACE.launch(4))
    inner: list[np.ndarray[Any, Any]] = []

    def stale(prefix: int, _batch: int, out: np.ndarray[Any, Any]) -> None:
        """A collective that is not waited for: its rows are what the memory held."""
        now, before = out.copy(), inner[-1] if inner else out.copy()
        inner.append(now)
        if prefix < 100:
            out[prefix:] = before[prefix:]

    runner.context.spoil = stale  # type: ignore[attr-defined]
    runner.reference(100, SPACE.fuse())
    assert runner.error(100, SPACE.fuse()) == 0.0
    assert runner.error(100, split) > 0.5


@pytest.mark.parametrize(("in_symmetric_memory", "fallbacks"), [(True, 0), (True, 3), (False, 0)])
def test_runner_says_where_collectives_found_their_tensors(
    runner: GpuRunner, monkeypatch: pytest.MonkeyPatch, *, in_symmetric_memory: bool, fallbacks: int
) -> None:
    library = SimpleNamespace(counters=lambda: {"offset_fallbacks": fallbacks})
    monkeypatch.setattr(engine_module, "plugin_library", lambda: library)
    runner.context.symmetric = in_symmetric_memory
    assert runner.symmetric is (in_symmetric_memory and not fallbacks)


def test_graphs_are_verified_not_the_eager_step(runner: GpuRunner) -> None:
    """What is timed is what was looked at: a graph that is wrong is seen, though the same step is right eagerly."""
    from dataclasses import replace

    runner.engine = replace(runner.engine, mode="graph")
    context = runner.context
    graphs = WrongGraphs(context)
    runner.graphs = graphs  # type: ignore[assignment]
    split = Candidate(0, SPACE.launch(8), SPACE.launch(4))
    runner.reference(100, SPACE.fuse())
    assert runner.error(100, split) == 0.0
    graphs.wrong = True
    assert runner.error(100, split) > 0.5


class WrongGraphs:
    """Graphs that are there at once, and may leave out the step."""

    counters = SimpleNamespace(fallback=0, reason="")

    def __init__(self, context: Any) -> None:
        self.context, self.wrong = context, False

    def has(self, *_bound: Bindings) -> bool:
        return True

    def step(self, inputs: Bindings, outputs: Bindings, stream: Any) -> None:
        if not self.wrong:
            self.context.step(inputs, outputs, stream)


class FewGraphs:
    """Room for three graphs; the one that was run the longest ago makes room. Capturing waits, so not among samples."""

    counters = SimpleNamespace(fallback=0, reason="")

    def __init__(self, context: Any, cuda: EventRuntime) -> None:
        self.context, self.cuda, self.kept = context, cuda, list[int]()

    def has(self, inputs: Bindings, _outputs: Bindings) -> bool:
        return inputs[PREFIX_INPUT].shape[0] in self.kept

    def step(self, inputs: Bindings, outputs: Bindings, stream: Any) -> None:
        prefix = inputs[PREFIX_INPUT].shape[0]
        if prefix in self.kept:
            self.kept.remove(prefix)
        else:
            assert not self.cuda.marks, "captured between samples"
        self.kept = [*self.kept, prefix][-3:]
        self.context.step(inputs, outputs, stream)


def test_no_graph_is_captured_between_samples(runner: GpuRunner, cuda: EventRuntime) -> None:
    from dataclasses import replace

    runner.engine = replace(runner.engine, mode="graph")
    graphs = FewGraphs(runner.context, cuda)
    runner.graphs = graphs  # type: ignore[assignment]
    old, unused, other, new = (Candidate(offset, SPACE.launch(8), SPACE.launch(4)) for offset in (0, 8, 16, 24))
    for candidate in (old, unused, other):
        runner.reference_tokens = 100
        runner.error(100, candidate)
    assert len(runner.time([(100, other), (100, old), (100, new)], lead=1)) == 3


def test_a_rank_without_memory_is_an_error_on_all(runner: GpuRunner, tmp_path: Path) -> None:
    class Full(GpuRunner):
        def _arrays(self) -> Any:
            raise CudaError("cudaMalloc: out of memory")

    errors: list[str] = []

    def make(kind: type[GpuRunner], comm: CommBackend) -> None:
        try:
            kind(runner.engine, comm, tmp_path / "cache")
        except TokenWeaveError as error:
            errors.append(str(error))

    run_ranks([partial(make, kind, comm) for kind, comm in zip((GpuRunner, Full), LocalComm.group(2), strict=True)])
    assert errors == ["rank 1: cudaMalloc: out of memory"] * 2


def test_runner_gives_everything_back(runner: GpuRunner, cuda: EventRuntime) -> None:
    cuda.fails["cudaStreamSynchronize"] = 700
    with pytest.raises(TokenWeaveError, match="the first error"), runner:
        raise TokenWeaveError("the first error")
    assert runner.context.closed  # type: ignore[attr-defined]
    with pytest.raises(CudaError), runner:
        pass
