"""The graph cache, over a runtime that replays what was captured, and a context that computes out = x * factor."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from support.fake_gpu import CAPTURE_INVALID, FakeEngine, FakeRuntime

from trtllm_tokenweave.comm import SingleComm
from trtllm_tokenweave.device import CudaError, DeviceArray, Stream
from trtllm_tokenweave.engine import Engine, EngineConfig
from trtllm_tokenweave.engine_context import Binding, Bindings
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.manifest import Manifest, tensor_specs
from trtllm_tokenweave.step_graphs import StepGraphs, step_key
from trtllm_tokenweave.table import TableKey, TuningTable
from trtllm_tokenweave.tensorrt_module import LINES


def make_engine(fake: FakeEngine) -> Engine:
    table = TuningTable(key=TableKey(tp_size=1, hidden_size=8, dtype="float32"))
    manifest = Manifest(
        library="0",
        tensorrt="10.6.0",
        cuda_driver="13.0",
        gpu="Test GPU",
        compute_capability="9.0",
        tp_size=1,
        rank=0,
        dtype="float32",
        mode="stock",
        table_sha256="0" * 64,
        tensors=tensor_specs(fake),
        plan_sha256="0" * 64,
        plan_bytes=1,
    )
    return Engine(manifest, EngineConfig(tp_size=1, table=table), SingleComm(), fake)


class Runner:
    """Steps of a `StepGraphs` with buffers for ``rows`` tokens each."""

    def __init__(self, runtime: FakeRuntime, capacity: int = 2) -> None:
        self.fake = FakeEngine(runtime)
        self.context = make_engine(self.fake).context()
        self.graphs = StepGraphs(self.context, capacity)
        self.stream = Stream()
        self.buffers: dict[int, tuple[DeviceArray, DeviceArray]] = {}
        self.random = np.random.default_rng(0)

    def bindings(self, rows: int, factor: int) -> tuple[Bindings, Bindings]:
        if rows not in self.buffers:
            self.buffers[rows] = (DeviceArray((rows, 4), np.float32), DeviceArray((rows, 4), np.float32))
        x, out = self.buffers[rows]
        # A new host array every time, as a scheduler has it.
        host = Binding.on_host(np.array([factor], np.int32))
        return {"x": Binding.device(x), "host_factor": host}, {"out": Binding.device(out)}

    def step(self, rows: int, factor: int = 3) -> None:
        """One step on new data; its result is checked, however it was run."""
        inputs, outputs = self.bindings(rows, factor)
        x, out = self.buffers[rows]
        values = self.random.normal(size=(rows, 4)).astype(np.float32)
        x.copy_from(values)
        out.fill(255)
        self.graphs.step(inputs, outputs, self.stream)
        assert np.array_equal(out.to_numpy(), values * factor)

    def counts(self) -> tuple[int, int, int, int, int]:
        c = self.graphs.counters
        return c.eager, c.graph, c.captured, c.fallback, c.evicted


@pytest.fixture
def runner(cuda: FakeRuntime, trt: ModuleType) -> Iterator[Runner]:
    made = Runner(cuda)
    graphs = weakref.ref(made.graphs)
    yield made
    cuda.fails.clear()
    if (left := graphs()) is not None:
        left.close()  # before the runtime is gone


def test_a_step_is_captured_when_it_recurs_and_replayed_from_then_on(runner: Runner) -> None:
    runner.step(4)
    assert runner.counts() == (1, 0, 0, 0, 0)
    assert not runner.graphs.has(*runner.bindings(4, 3))
    runner.step(4)
    assert runner.counts() == (2, 0, 1, 0, 0)
    for replays in (1, 2, 3):
        assert runner.graphs.has(*runner.bindings(4, 3))
        runner.step(4)
        assert runner.counts() == (2, replays, 1, 0, 0)


@pytest.mark.parametrize("change", ["shape", "host value", "address"])
def test_what_a_graph_does_not_serve(runner: Runner, change: str) -> None:
    for _ in range(3):
        runner.step(4)
    kept = dict(runner.buffers)  # else the new buffers could get the old addresses
    if change == "address":
        runner.buffers.clear()
        old = runner.counts()
        runner.step(4)
    elif change == "shape":
        old = runner.counts()
        runner.step(5)
    else:
        old = runner.counts()
        runner.step(4, factor=7)
    assert runner.counts() == (old[0] + 1, *old[1:])
    kept.clear()


def test_steps_that_never_recur_cost_no_graph(runner: Runner, cuda: FakeRuntime) -> None:
    for factor in range(100):
        runner.step(4, factor)
    assert runner.counts() == (100, 0, 0, 0, 0)
    assert len(runner.fake.contexts) == 1
    assert "cudaStreamBeginCapture" not in cuda.calls


def test_the_least_recently_used_graph_goes_first(runner: Runner, cuda: FakeRuntime) -> None:
    for rows in (1, 2):
        runner.step(rows)
        runner.step(rows)
    runner.step(1)  # newer than 2 now
    runner.step(3)
    runner.step(3)
    assert runner.counts() == (6, 1, 3, 0, 1)
    assert len(cuda.graphs) == 2
    before = runner.counts()
    runner.step(1)
    assert runner.counts() == (before[0], before[1] + 1, *before[2:])
    runner.step(2)
    assert runner.counts()[0] == before[0] + 1


def test_a_graph_is_dropped_when_its_work_is_done(runner: Runner, cuda: FakeRuntime) -> None:
    for rows in (1, 2, 3):
        runner.step(rows)
        runner.step(rows)
    destroyed = cuda.calls.index("cudaGraphExecDestroy")
    assert cuda.calls[destroyed - 1] == "cudaStreamSynchronize"


@pytest.mark.parametrize("where", ["enqueue", "cudaStreamEndCapture", "cudaGraphInstantiate", "cudaStreamBeginCapture"])
def test_a_failed_capture_falls_back_and_is_not_tried_again(runner: Runner, cuda: FakeRuntime, where: str) -> None:
    if where == "enqueue":
        runner.fake.refuses = "capture"
    else:
        cuda.fails[where] = CAPTURE_INVALID
    for _ in range(4):
        runner.step(4)
    assert runner.counts() == (4, 0, 0, 1, 0)
    reason = "the test refuses this step" if where == "enqueue" else f"{where}: error 901"
    assert reason in runner.graphs.counters.reason
    assert not cuda.graphs
    if where != "cudaStreamBeginCapture":
        assert "cudaGetLastError" in cuda.calls


def test_no_context_for_a_graph_is_a_fallback(runner: Runner) -> None:
    runner.fake.makes_contexts = False
    for _ in range(3):
        runner.step(4)
    assert runner.counts() == (3, 0, 0, 1, 0)


def test_an_eager_step_that_fails_is_an_error(runner: Runner) -> None:
    runner.step(4)
    runner.fake.refuses = "always"
    for _ in range(2):
        with pytest.raises(TokenWeaveError, match="TensorRT does not run the step: the test refuses this step"):
            runner.step(4)
    assert runner.counts() == (1, 0, 0, 0, 0)


def test_every_graph_has_a_context_of_its_own_on_the_same_memory(runner: Runner) -> None:
    for rows in (1, 2):
        runner.step(rows)
        runner.step(rows)
    assert len(runner.fake.contexts) == 3
    assert len({context.memory for context in runner.fake.contexts}) == 1


def test_a_graph_keeps_the_host_values_that_it_was_captured_with(runner: Runner) -> None:
    """A graph may copy from that memory whenever it is replayed; the caller's array is gone by then, or changed."""
    inputs, outputs = runner.bindings(4, 3)
    for _ in range(2):
        runner.graphs.step(inputs, outputs, runner.stream)
    host = inputs["host_factor"].host
    assert host is not None
    host[0] = 99
    gc.collect()
    bound = runner.fake.contexts[1].addresses["host_factor"]
    assert bound != inputs["host_factor"].address
    assert ctypes.c_int32.from_address(bound).value == 3
    assert not runner.graphs.has(inputs, outputs)
    assert runner.graphs.has(*runner.bindings(4, 3))


def test_no_capacity_means_eager(cuda: FakeRuntime, trt: ModuleType) -> None:
    runner = Runner(cuda, capacity=0)
    for _ in range(3):
        runner.step(4)
    assert runner.counts() == (3, 0, 0, 0, 0)


def test_close_drops_everything(runner: Runner, cuda: FakeRuntime) -> None:
    for _ in range(2):
        runner.step(4)
    runner.graphs.close(runner.stream)
    assert not cuda.graphs
    runner.context.close()
    assert all(address != runner.context.address for address in cuda.memory)


def test_close_goes_on_after_an_error(cuda: FakeRuntime, trt: ModuleType) -> None:
    runner = Runner(cuda, capacity=3)
    for rows in (1, 2, 3):
        runner.step(rows)
        runner.step(rows)
    assert len(cuda.graphs) == 3
    cuda.fails["cudaStreamSynchronize"] = 700
    with pytest.raises(CudaError, match="cudaStreamSynchronize: error 700"):
        runner.graphs.close()
    assert not cuda.graphs
    del cuda.fails["cudaStreamSynchronize"]
    runner.graphs.close(runner.stream)


def test_graphs_go_with_their_owner(runner: Runner, cuda: FakeRuntime) -> None:
    for _ in range(2):
        runner.step(4)
    memory = runner.context.address
    assert cuda.graphs
    del runner.graphs, runner.context, runner.fake
    gc.collect()
    assert not cuda.graphs
    assert memory not in cuda.memory


def test_with_closes_in_order_also_after_an_error(cuda: FakeRuntime, trt: ModuleType) -> None:
    runner = Runner(cuda)

    def run() -> None:
        with (
            Stream() as runner.stream,
            make_engine(runner.fake).context() as runner.context,
            StepGraphs(runner.context) as runner.graphs,
        ):
            cuda.calls.clear()
            for _ in range(2):
                runner.step(4)
            runner.fake.refuses = "always"
            runner.step(5)

    with pytest.raises(TokenWeaveError, match="the test refuses"):
        run()
    order = [call for call in cuda.calls if call in ("cudaGraphExecDestroy", "cudaFree", "cudaStreamDestroy")]
    assert order == ["cudaGraphExecDestroy", "cudaFree", "cudaStreamDestroy"]


def test_a_closed_context_runs_nothing(runner: Runner) -> None:
    bound = runner.bindings(4, 3)
    for _ in range(2):
        runner.graphs.step(*bound, runner.stream)
    assert runner.graphs.has(*bound)
    runner.context.close()
    for run in (
        lambda: runner.graphs.step(*bound, runner.stream),
        lambda: runner.context.step(*bound, runner.stream),
        lambda: runner.context.enqueue(runner.stream),
        runner.context.sibling,
    ):
        with pytest.raises(TokenWeaveError, match="the execution context is closed: make another one"):
            run()
    runner.context.close()


def test_keys_do_not_depend_on_the_order_of_names(runner: Runner) -> None:
    inputs, outputs = runner.bindings(4, 3)
    assert step_key({name: inputs[name] for name in sorted(inputs, reverse=True)}, outputs) == step_key(inputs, outputs)
    assert step_key(outputs, inputs) != step_key(inputs, outputs)


def test_a_name_stands_for_host_values_of_one_shape() -> None:
    def key(values: list[int], stands_for: bytes | None = None) -> bytes:
        return step_key({"host_factor": Binding.on_host(np.array(values, np.int32), stands_for)}, {})

    assert key([1, 2], b"a") == key([1, 2], b"a")
    assert len({key([1, 2]), key([1, 3]), key([1, 2], b"a"), key([1, 2], b"b"), key([1, 2, 3], b"a")}) == 5


# ---- the context itself


def test_a_context_has_memory_of_its_own(runner: Runner, cuda: FakeRuntime) -> None:
    address, size = runner.fake.contexts[0].memory
    assert size == 1000
    assert address in cuda.memory


def test_what_is_bound_lives_until_the_next_call(runner: Runner, cuda: FakeRuntime) -> None:
    x, out = DeviceArray.from_numpy(np.ones((4, 4), np.float32)), DeviceArray((4, 4), np.float32)
    address, alive = x.address, weakref.ref(x)
    inputs = {"x": Binding.device(x), "host_factor": Binding.on_host(np.array([[3], [4]], np.int32)[::2, 0])}
    runner.context.bind(inputs, {"out": Binding.device(out)})
    del x, inputs
    gc.collect()
    assert address in cuda.memory
    runner.context.enqueue(runner.stream)
    assert np.array_equal(out.to_numpy(), np.full((4, 4), 3))
    runner.context.bind(*runner.bindings(2, 3))
    gc.collect()
    assert alive() is None
    assert address not in cuda.memory


def test_a_binding_keeps_its_array(cuda: FakeRuntime) -> None:
    binding = Binding.device(DeviceArray((4, 4), np.float32))
    gc.collect()
    assert binding.address in cuda.memory
    strided = Binding.on_host(np.arange(6, dtype=np.int32)[::2])
    gc.collect()
    assert [ctypes.c_int32.from_address(strided.address + 4 * i).value for i in range(3)] == [0, 2, 4]
    assert Binding.on_host(np.array(5)).shape == ()


def test_nothing_is_queued_before_it_is_bound(runner: Runner) -> None:
    with pytest.raises(TokenWeaveError, match="no tensors are bound"):
        runner.context.enqueue(runner.stream)
    runner.step(4)
    inputs, outputs = runner.bindings(9, 3)
    with pytest.raises(UserError, match="does not fit the engine"):
        runner.context.bind(inputs, outputs)
    with pytest.raises(TokenWeaveError, match="no tensors are bound: `bind` was not called, or it failed"):
        runner.context.enqueue(runner.stream)


def test_errors_of_earlier_calls_are_no_reasons(runner: Runner) -> None:
    LINES.record(1, "Skipping tactic 0x42 due to insufficient memory")
    runner.fake.insufficient = ["x"]
    with pytest.raises(TokenWeaveError, match="cannot tell the shapes of x: TensorRT gave no reason"):
        runner.step(4)


#: What replaces an input or an output (None: it is left out), and what is said about it.
BAD: dict[str, tuple[str, str, Binding | None, str]] = {
    "missing": ("inputs", "x", None, "step: input 'x' is not given"),
    "unknown": ("outputs", "y", Binding(1, (4, 4)), "step: the engine has no output 'y'"),
    "swapped": ("inputs", "out", Binding(1, (4, 4)), "the engine has no input 'out'"),
    "dtype": ("inputs", "x", Binding(1, (4, 4), np.dtype(np.float16)), "tensor x: has dtype float16, expected float32"),
    "too many": (
        "inputs",
        "x",
        Binding(1, (9, 4)),
        r"tensor x: shape \(9, 4\) does not fit the engine: \(1, 4\) to \(8",
    ),
    "output": ("outputs", "out", Binding(1, (3, 4)), r"out: has shape \(3, 4\), the engine puts out \(4, 4\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_tensors_that_do_not_fit(runner: Runner, case: str) -> None:
    inputs, outputs = (dict(b) for b in runner.bindings(4, 3))
    side, name, binding, message = BAD[case]
    changed = inputs if side == "inputs" else outputs
    if binding is None:
        del changed[name]
    else:
        changed[name] = binding
    with pytest.raises(UserError, match=message):
        runner.context.step(inputs, outputs, runner.stream)


def test_shapes_that_stay_unknown(runner: Runner) -> None:
    runner.fake.insufficient = ["x"]
    with pytest.raises(TokenWeaveError, match="TensorRT cannot tell the shapes of x"):
        runner.step(4)


def test_an_engine_that_allocates_inside_a_step_is_refused(runner: Runner) -> None:
    runner.fake.allocates = 4096
    with pytest.raises(TokenWeaveError, match="wants to allocate 4096 bytes inside a step"):
        runner.step(4)
    runner.fake.allocates = 0
    runner.step(4)


def test_allocation_can_be_allowed(cuda: FakeRuntime, trt: ModuleType) -> None:
    runner = Runner(cuda)
    runner.fake.allocates = 4096
    runner.graphs = StepGraphs(make_engine(runner.fake).context(allow_allocation=True))
    runner.step(4)


@pytest.mark.parametrize("profile", [-1, 2])
def test_profiles(cuda: FakeRuntime, trt: ModuleType, profile: int) -> None:
    engine = make_engine(FakeEngine(cuda, profiles=2))
    engine.context(profile=1)
    assert engine.tensorrt_engine.contexts[0].profile == 1
    with pytest.raises(UserError, match=f"there is no profile {profile}"):
        engine.context(profile=profile)


def test_no_context(cuda: FakeRuntime, trt: ModuleType) -> None:
    fake = FakeEngine(cuda)
    fake.makes_contexts = False
    with pytest.raises(TokenWeaveError, match="TensorRT makes no execution context"):
        make_engine(fake).context()
