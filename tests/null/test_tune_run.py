"""What the tuner does around the search: its runner on a stand-in for CUDA, its files, its ranks, its command."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_gpu import FakeRuntime, fake_tensorrt, install_cuda, install_tensorrt
from support.models import small
from support.tuning import FakeRunner, bowl

from trtllm_tokenweave.bench.stack_network import BATCH_INPUT, Stack
from trtllm_tokenweave.comm import CommBackend, LocalComm, SingleComm, run_ranks
from trtllm_tokenweave.device import CudaError, cudart
from trtllm_tokenweave.engine_context import Bindings
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.passes import WeaveOptions
from trtllm_tokenweave.table import TuningTable, load_table
from trtllm_tokenweave.tune import engine as engine_module
from trtllm_tokenweave.tune import run as run_module
from trtllm_tokenweave.tune.candidates import Candidate, Space
from trtllm_tokenweave.tune.engine import PREFIX_INPUT, GpuRunner, TuningEngine, steps_of
from trtllm_tokenweave.tune.run import TuneArguments, run_tune
from trtllm_tokenweave.tune.store import partial_file
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

    def cudaGetDeviceProperties(self, index: int) -> Any:  # noqa: ARG002, N802
        return 0, SimpleNamespace(name=b"Test GPU", major=9, minor=0, multiProcessorCount=132)


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
    monkeypatch.setattr(engine_module, "GAP_SECONDS", 0)
    rule = TuningTable(key=key, granularity=16, min_tokens=1)
    return GpuRunner(TuningEngine(Stack(CONFIG, options), SPACE, rule), SingleComm(), tmp_path / "cache")


def test_runner_binds_the_split_and_the_row_of_the_table(runner: GpuRunner) -> None:
    seen: list[tuple[int, int]] = []
    runner.context.spoil = lambda prefix, batch, _out: seen.append((prefix, batch))  # type: ignore[attr-defined]
    fuse = SPACE.fuse(16)
    split = Candidate(16, SPACE.launch(8), SPACE.launch(4))
    runner.reference(100, fuse)
    assert runner.error(100, split) == 0.0
    runner.prepare(100, split)
    assert runner.time() == 1.0
    # Both of these after a step on other rows.
    assert set(seen[:2]) == {(100, SPACE.batch(fuse))}
    # ceil(100 / 16) * 16 / 2 + 16
    assert set(seen[2:]) == {(72, SPACE.batch(split))}
    # Verified, one ahead of the first event, then what is timed.
    layers = runner.engine.stack.config.num_hidden_layers
    assert len(seen) == 2 + 2 + 1 + steps_of(100, layers)


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

    runner.context.spoil = spoil  # type: ignore[attr-defined]
    with pytest.raises(TokenWeaveError, match="fuse-only result of 100 tokens is not finite"):
        runner.reference(100, SPACE.fuse())
    runner.context.spoil = lambda *_: None  # type: ignore[attr-defined]
    runner.reference(100, SPACE.fuse())
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


# ---- the command's run


class Counting:
    """The plugin library, as far as a run asks for it."""

    def reset_counters(self) -> None:
        """Count from zero."""

    def counters(self) -> dict[str, int]:
        return {"overlapped": 1}


class SessionRunner(FakeRunner):
    """A fake runner in the GPU's place."""

    checks = ("chain order: ok",)
    symmetric = True

    def __enter__(self) -> SessionRunner:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to give back."""


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, cuda: EventRuntime) -> Any:
    """Runs the command's work on two threads; returns what they gave, and notes the runners."""
    install_tensorrt(monkeypatch, fake_tensorrt())
    monkeypatch.setattr(run_module, "plugin_library", Counting)
    monkeypatch.setattr(run_module, "use_device", lambda _: None)
    runners: list[SessionRunner] = []

    found = SimpleNamespace(runners=runners, fails=lambda _: None)

    def make(_engine: TuningEngine, comm: CommBackend, cache: Path) -> SessionRunner:
        cache.write_bytes(b"timings")
        runners.append(SessionRunner(bowl, fails=found.fails if comm.rank == 1 else lambda _: None))
        return runners[-1]

    monkeypatch.setattr(run_module, "GpuRunner", make)

    def go(arguments: TuneArguments) -> list[Any]:
        runners.clear()
        return run_ranks([partial(one, arguments, comm) for comm in LocalComm.group(2)])

    def one(arguments: TuneArguments, comm: CommBackend) -> Any:
        return run_module._Session(arguments, comm, 0.0).run()

    found.go = go
    return found


def arguments(folder: Path, **fields: Any) -> TuneArguments:
    values: dict[str, Any] = {
        "model": "llama-3.3-70b",
        "config": preset("llama-3.3-70b"),
        "layers": 2,
        "keys": 2048,
        "counts": (1024, 2048),
        "space": Space(),
        "output": folder / "table.json",
        "budget_seconds": 1e9,
    }
    return TuneArguments(**(values | fields))


def test_a_run_writes_the_table_and_what_it_was_made_from(session: Any, tmp_path: Path) -> None:
    first, second = session.go(arguments(tmp_path))
    assert second is None
    assert first["written"] == [str(tmp_path / "table.json"), str(tmp_path / "table.measurements.json")]
    table = load_table(tmp_path / "table.json")
    assert table.key.gpu == "Test GPU"
    measured = table.source.measured
    assert measured is not None
    assert (measured.gpu, measured.tensorrt, measured.tp_size, measured.layers) == ("Test GPU", "10.6.0", 2, 2)
    assert measured.gemms["attention.qkv"] == (5120, 8192)
    beside = json.loads((tmp_path / "table.measurements.json").read_text())
    assert beside["table_sha256"] == table.sha256
    assert [bucket["num_tokens"] for bucket in beside["buckets"]] == [1024, 2048]
    assert not partial_file(tmp_path / "table.json").exists()


def test_one_run_can_tune_and_check(session: Any, tmp_path: Path) -> None:
    check, jitter = tmp_path / "check.json", tmp_path / "jitter.json"
    fields = {"check": check, "held_out": (1400, 2000), "jitter": jitter, "jitter_counts": (1024, 1088)}
    session.go(arguments(tmp_path, **fields))
    document = json.loads(check.read_text())
    assert document["gpu_seconds"] > 0
    for row in document["held_out"]:
        assert row["best_ms"] <= row["chosen_ms"] <= 1.02 * row["best_ms"]
        assert row["chosen_ms"] <= row["fuse_only_ms"]
        assert set(row["by_ctas"]) == {str(n) for n in Space().ctas}
        assert min(row["by_ctas"].values()) == min(row["by_offset"].values())
    assert [row["num_tokens"] for row in document["held_out"]] == [1400, 2000]
    for row in json.loads(jitter.read_text())["jitter"]:
        assert row["tuned_ms"] <= row["even_ms"]
    # The table by itself again, with its seconds from the file beside it.
    check.unlink()
    session.go(arguments(tmp_path, output=None, table=tmp_path / "table.json", check=check, held_out=(1400,)))
    again = json.loads(check.read_text())
    assert again["table_sha256"] == document["table_sha256"]
    assert again["gpu_seconds"] == document["gpu_seconds"]


def test_a_run_goes_on_where_one_was_killed(session: Any, tmp_path: Path) -> None:
    def die(number: int) -> None:
        if number == 100:
            raise TokenWeaveError("killed")

    session.fails = die
    with pytest.raises(TokenWeaveError, match="killed"):
        session.go(arguments(tmp_path))
    partial = partial_file(tmp_path / "table.json")
    # Two real seconds have not passed; a bucket that was done is there all the same.
    session.fails = lambda _: None
    if partial.exists():
        with pytest.raises(UserError, match="was begun with layers 2, and this run has 3"):
            session.go(arguments(tmp_path, layers=3))
        session.go(arguments(tmp_path, layers=3, restart=True))
    session.go(arguments(tmp_path))
    assert load_table(tmp_path / "table.json").rows


def test_a_table_of_another_machine_is_not_checked(session: Any, tmp_path: Path) -> None:
    session.go(arguments(tmp_path))
    table = load_table(tmp_path / "table.json")
    measured = table.source.measured
    assert measured is not None
    for field, value in (("tensorrt", "10.7.0"), ("library", "0.0.1"), ("gpu", "Other GPU")):
        source = table.source.model_copy(update={"measured": measured.model_copy(update={field: value})})
        table.model_copy(update={"source": source}).save(tmp_path / "other.json")
        given = arguments(tmp_path, output=None, table=tmp_path / "other.json", check=tmp_path / "c.json")
        with pytest.raises(UserError, match=f"measured with {field} {value}"):
            session.go(given)


def test_a_table_is_checked_with_the_gemms_that_it_was_measured_with(session: Any, tmp_path: Path) -> None:
    session.go(arguments(tmp_path, gemm="trt"))
    fields = {"output": None, "table": tmp_path / "table.json", "check": tmp_path / "c.json", "held_out": (1400,)}
    with pytest.raises(UserError, match="measured with other GEMMs than budget") as raised:
        session.go(arguments(tmp_path, gemm="budget", **fields))
    assert raised.value.fix == "give --gemm trt"
    session.go(arguments(tmp_path, gemm="trt", **fields))


def test_a_damaged_file_beside_the_table_is_one_error_on_all_ranks(session: Any, tmp_path: Path) -> None:
    session.go(arguments(tmp_path))
    given = arguments(
        tmp_path, output=None, table=tmp_path / "table.json", check=tmp_path / "c.json", held_out=(1400,), gemm="trt"
    )
    (tmp_path / "table.measurements.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        session.go(given)
    (tmp_path / "table.measurements.json").write_text("[]")
    session.go(given)
    assert "gpu_seconds" not in json.loads((tmp_path / "c.json").read_text())


def test_a_check_that_is_cut_short_leaves_what_it_has(session: Any, tmp_path: Path) -> None:
    session.go(arguments(tmp_path))
    check = tmp_path / "c.json"
    given = arguments(tmp_path, output=None, table=tmp_path / "table.json", check=check, held_out=(1400, 2000))

    def die(_number: int) -> None:
        if check.exists():
            raise TokenWeaveError("killed")

    session.fails = die
    with pytest.raises(TokenWeaveError, match="killed"):
        session.go(given)
    assert [row["num_tokens"] for row in json.loads(check.read_text())["held_out"]] == [1400]


def test_usual_counts_beyond_the_engine_are_not_checked(session: Any, tmp_path: Path) -> None:
    session.go(arguments(tmp_path, check=tmp_path / "c.json"))
    rows = json.loads((tmp_path / "c.json").read_text())["held_out"]
    assert [row["num_tokens"] for row in rows] == [1088, 1400, 1856]
    with pytest.raises(UserError, match="a row for none of the usual counts"):
        session.go(arguments(tmp_path, counts=(1024,), output=tmp_path / "one.json", check=tmp_path / "c.json"))


def test_one_rank_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one rank") as raised:
        run_tune(arguments(tmp_path))
    assert "mpirun" in raised.value.fix
