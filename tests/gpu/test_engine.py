"""A small engine on a real GPU: built, saved, loaded, and run eagerly and from CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from trtllm_tokenweave import trt as seam
from trtllm_tokenweave.builder import BuilderSettings, Plan, ShapeRange, build
from trtllm_tokenweave.device import DeviceArray, Stream
from trtllm_tokenweave.engine import Engine, save_engine
from trtllm_tokenweave.engine_context import Binding
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.inspection import parse_layers
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.passes import WeaveOptions, WeaveResult, weave
from trtllm_tokenweave.step_graphs import StepGraphs
from trtllm_tokenweave.table import TableKey, TuningTable
from trtllm_tokenweave.tensorrt_module import tensorrt

HIDDEN, MAX_TOKENS = 64, 512
TABLE = TuningTable(key=TableKey(tp_size=1, hidden_size=HIDDEN, dtype="float32"))
RNG = np.random.default_rng(7)
#: Small integers: sums are exact in any order, with TF32 too.
WEIGHTS = [RNG.integers(-1, 2, (HIDDEN, HIDDEN)).astype(np.float32) for _ in range(2)]


@pytest.fixture(scope="module", autouse=True)
def needs_tensorrt() -> None:
    try:
        tensorrt()
    except UserError as error:
        pytest.skip(str(error))


def make_network(network: Any) -> WeaveResult:
    """out = relu(x @ W0) @ W1; it has no collective, so that the pass leaves it as it is."""
    trt = tensorrt()
    tensor = network.add_input("x", trt.float32, (-1, HIDDEN))
    plain = trt.MatrixOperation.NONE
    for index, weight in enumerate(WEIGHTS):
        constant = seam.constant(network, weight, name=f"weight {index}")
        tensor = network.add_matrix_multiply(tensor, plain, constant, plain).get_output(0)
        if index == 0:
            tensor = network.add_activation(tensor, trt.ActivationType.RELU).get_output(0)
    tensor.name = "out"
    network.mark_output(tensor)
    return weave(network, WeaveOptions(Mapping(), TABLE, max_batch_size=1, max_num_tokens=MAX_TOKENS))


def reference(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(np.maximum(x @ WEIGHTS[0], 0) @ WEIGHTS[1], np.float32)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "timing"


@pytest.fixture(scope="module")
def plan(cache: Path) -> Plan:
    shapes = ShapeRange((1, HIDDEN), (128, HIDDEN), (MAX_TOKENS, HIDDEN))
    return build(make_network, BuilderSettings(({"x": shapes},), timing_cache=cache))


@pytest.fixture(scope="module")
def engine(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("engine")
    save_engine(plan, folder)
    return Engine.load(folder)


def test_the_build(plan: Plan, cache: Path) -> None:
    assert plan.result.mode == "stock"
    assert plan.report.num_layers > 0
    assert not plan.report.failed
    assert cache.stat().st_size > 0


def test_the_inspectors_form_is_the_one_that_the_checks_read(engine: Engine) -> None:
    inspector = engine.tensorrt_engine.create_engine_inspector()
    text = inspector.get_engine_information(tensorrt().LayerInformationFormat.JSON)
    layers = parse_layers(text)
    assert layers, text
    assert all(layer.name and layer.kind for layer in layers), text
    assert any("x" in (layer.inputs or ()) for layer in layers), text
    assert any("out" in (layer.outputs or ()) for layer in layers), text


def test_manifest(engine: Engine) -> None:
    (x, out) = sorted(engine.manifest.tensors, key=lambda t: t.mode)
    assert (x.name, x.dtype, x.shape, out.name) == ("x", "FLOAT", (-1, HIDDEN), "out")
    assert x.profiles == (((1, HIDDEN), (128, HIDDEN), (MAX_TOKENS, HIDDEN)),)


def test_steps(engine: Engine) -> None:
    """Every token count comes five times, on new data and into poisoned outputs."""
    context, stream = engine.context(), Stream()
    graphs = StepGraphs(context, capacity=2)
    rng = np.random.default_rng(3)
    for rows in (1, 100, MAX_TOKENS):
        x, out = DeviceArray((rows, HIDDEN), np.float32), DeviceArray((rows, HIDDEN), np.float32)
        for _ in range(5):
            values = rng.integers(-2, 3, (rows, HIDDEN)).astype(np.float32)
            x.copy_from(values)
            out.fill(255)
            graphs.step({"x": Binding.device(x)}, {"out": Binding.device(out)}, stream)
            stream.synchronize()
            assert np.array_equal(out.to_numpy(), reference(values))
    counters = graphs.counters
    assert (counters.eager, counters.graph, counters.captured, counters.fallback, counters.evicted) == (6, 9, 3, 0, 1)
    graphs.close(stream)
    context.close()


def test_a_step_outside_of_the_profile_is_refused(engine: Engine) -> None:
    context, stream = engine.context(), Stream()
    x = DeviceArray((MAX_TOKENS + 1, HIDDEN), np.float32)
    with pytest.raises(UserError, match="does not fit the engine"):
        context.step({"x": Binding.device(x)}, {"out": Binding.device(x)}, stream)
