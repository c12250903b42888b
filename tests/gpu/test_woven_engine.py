"""Woven stacks in TensorRT on one GPU: they compute what the stock stack does, and each edge of the pass is needed.

One rank: its collective sums over itself, and normalises all tokens. Everything else is as with more ranks.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu.woven import Built, Runner, Shape, Variant, relative_error, tokens
from trtllm_tokenweave import passes, trt
from trtllm_tokenweave.engine_context import EngineContext
from trtllm_tokenweave.errors import TokenWeaveError
from trtllm_tokenweave.inspection import parse_layers
from trtllm_tokenweave.passes import names
from trtllm_tokenweave.plugin_library import plugin_library
from trtllm_tokenweave.plugin_specs import ALL_REDUCE_RMS_NORM, STREAM_JOIN, Half
from trtllm_tokenweave.recorder import rules as recorder_rules
from trtllm_tokenweave.recorder import tensor as recorder_tensor
from trtllm_tokenweave.recorder.plugin import Fields, PluginKey
from trtllm_tokenweave.table import prefix
from trtllm_tokenweave.tensorrt_module import tensorrt

SHAPE = Shape()
SMALL, SPLIT = (1, 7, 64, 1000, 1023), (1024, 1025, 1500, 2048, 4000, 4096)
VARIANTS: tuple[Variant, ...] = ("stock", "fuse", "weave")
#: bfloat16 in every layer; GEMMs of other sizes add in another order.
TOLERANCE = 0.02
#: For controls: collectives that outlast by far what runs beside them.
SLOW = Shape(ctas=2, threads=64)
#: The same with 64 tokens in the suffix half of the largest step. Its GEMMs have fewer CTAs than there are SMs, so none
#: of them waits for SMs that the prefix half's collective has.
UNEVEN = replace(SLOW, split_offset=1984)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def built(folder: Path) -> dict[Variant, Built]:
    made = {variant: Built(SHAPE, variant, folder / variant) for variant in VARIANTS}
    made["weave"].fused_memory_bytes = made["fuse"].plan.report.memory_bytes
    return made


@pytest.fixture(scope="module")
def runners(built: dict[Variant, Built]) -> dict[Variant, Runner]:
    return {variant: engine.runner() for variant, engine in built.items()}


@pytest.fixture(autouse=True)
def _counters() -> None:
    plugin_library().reset_counters()


@pytest.mark.parametrize("count", [*SMALL, *SPLIT])
def test_woven_equals_stock(runners: dict[Variant, Runner], count: int) -> None:
    x = tokens(count, SHAPE.hidden)
    want = runners["stock"].run(x)
    for variant in ("fuse", "weave"):
        # Eager, eager with a capture, then two replays with other data.
        for attempt in range(4):
            assert relative_error(runners[variant].run(x, graph=True), want) < TOLERANCE, (variant, attempt)
        other = tokens(count, SHAPE.hidden, seed=attempt)
        assert relative_error(runners[variant].run(other, graph=True), runners["stock"].run(other)) < TOLERANCE
    assert runners["weave"].graphs.counters.fallback == 0
    assert runners["weave"].graphs.counters.graph > 0


@pytest.mark.parametrize("count", [64, 4096])
def test_what_the_plugins_did(runners: dict[Variant, Runner], count: int) -> None:
    sites = 2 * SHAPE.layers
    runners["weave"].run(tokens(count, SHAPE.hidden))
    counters = plugin_library().counters()
    split = count >= SHAPE.min_tokens
    assert counters["overlapped"] == counters["joins"] == (2 * sites if split else 0)
    assert counters["in_line"] == counters["empty"] == (0 if split else sites)
    assert counters["alias_copies"] == counters["unkept_inputs"] == counters["refused_steps"] == 0
    assert counters["unfinished_steps"] == counters["while_building"] == 0


def test_the_checks_after_the_build(built: dict[Variant, Built]) -> None:
    checks = {check.name: check for check in built["weave"].plan.report.checks}
    for name in ("chain order", "no copy between start and join", "overlap", "sizes on the host", "activation memory"):
        assert checks[name].status == "ok", str(checks[name])
    # Behind the suffix half's last collective there is nothing left to run beside it.
    assert f"{4 * SHAPE.layers - 1} of {4 * SHAPE.layers}" in checks["overlap"].detail


def test_memory_and_plan_size(built: dict[Variant, Built]) -> None:
    reports = {variant: engine.plan.report for variant, engine in built.items()}
    assert reports["weave"].memory_bytes <= 1.10 * max(reports["stock"].memory_bytes, reports["fuse"].memory_bytes)
    weights = 2 * 2 * SHAPE.layers * SHAPE.hidden * SHAPE.ffn * 2
    assert reports["weave"].plan_bytes < 1.1 * weights + (8 << 20)


# ---- the GEMM plugin


@pytest.mark.parametrize("gemm_sms", [0, 116])
def test_gemm_plugin(built: dict[Variant, Built], folder: Path, gemm_sms: int) -> None:
    x = tokens(3000, SHAPE.hidden)
    shape = Shape(gemm="budget", gemm_sms=gemm_sms)
    engine = Built(shape, "weave", folder / f"gemm{gemm_sms}")
    runner = engine.runner()
    want = built["stock"].runner().run(x)
    for attempt in range(3):
        assert relative_error(runner.run(x, graph=True), want) < TOLERANCE, attempt
    assert runner.graphs.counters.fallback == 0
    inspector = runner.context.engine.tensorrt_engine.create_engine_inspector()
    layers = parse_layers(inspector.get_engine_information(tensorrt().LayerInformationFormat.JSON))
    # Of the two products in front of a site the first, in both halves.
    assert sum("tokenweave_gemm" in found.name for found in layers) == 2 * len(engine.plan.result.plan.sites)


# ---- negative controls


def layer(network: Any, name: str) -> Any:
    return next(network.get_layer(i) for i in range(network.num_layers) if network.get_layer(i).name == name)


def without_keep_alive(network: Any) -> None:
    for site in range(2 * SHAPE.layers):
        for half in (Half.PREFIX, Half.SUFFIX):
            join = layer(network, names.join(site, half))
            for position in (2, 3):
                join.set_input(position, network.get_input(0))


def wrong(stock: Runner, built: Built, *, graph: bool = False) -> bool:
    """Whether an engine computes something else than the stock one in any of a few steps that are split.

    No two steps have the same data: what an earlier one left in memory is never right.
    """
    runner = built.runner()
    errors = []
    for count in (2048, 3000, 4096):
        if built.shape.table(1).lookup(1, count).mode == "weave":
            for seed in range(5):
                x = tokens(count, SHAPE.hidden, seed)
                want = stock.run(x)
                errors.append(relative_error(runner.run(x, graph=graph), want))
    assert runner.graphs.counters.fallback == 0
    assert (runner.graphs.counters.graph > 0) == graph
    runner.graphs.close(runner.stream)
    built.context.close()
    return max(errors) > 5 * TOLERANCE


@pytest.mark.parametrize("shape", [SLOW, UNEVEN], ids=["eager", "graph"])
def test_control_of_the_controls(runners: dict[Variant, Runner], folder: Path, shape: Shape) -> None:
    undamaged = Built(shape, "weave", folder / f"undamaged{shape.split_offset}")
    assert not wrong(runners["stock"], undamaged, graph=shape is UNEVEN)
    counters = plugin_library().counters()
    assert counters["joins"] == counters["overlapped"] > 0


def test_without_keep_alive_it_is_wrong(runners: dict[Variant, Runner], folder: Path) -> None:
    assert wrong(runners["stock"], Built(SLOW, "weave", folder / "no_keep_alive", damage=without_keep_alive))
    assert plugin_library().counters()["unkept_inputs"] > 0


def joined_only(monkeypatch: pytest.MonkeyPatch, waiting: frozenset[str]) -> None:
    """Let no joins but these wait, in networks woven from now on, and the last collective be as slow as the others."""
    add = trt.add_plugin

    def altered(network: Any, key: PluginKey, name: str, fields: Fields, inputs: list[Any]) -> Any:
        if key[0] == STREAM_JOIN and int(fields["site"]) >= 0:
            fields = {**fields, "waits": int(name in waiting)}
        elif key[0] == ALL_REDUCE_RMS_NORM:
            fields = {**fields, "last": 0}
        return add(network, key, name, fields, inputs)

    monkeypatch.setattr(trt, "add_plugin", altered)
    monkeypatch.setattr(passes, "verify", lambda *_: [])


def test_without_the_last_join_it_is_wrong(
    runners: dict[Variant, Runner], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of graphs a collective starts behind the one before, and compute goes on once it has started.

    So each start makes compute wait for all collectives but the newest, which leaves one for the joins.
    """
    joined_only(monkeypatch, frozenset())
    assert wrong(runners["stock"], Built(SLOW, "weave", folder / "no_join"))
    counters = plugin_library().counters()
    assert counters["overlapped"] > 0
    assert counters["joins"] == 0


def test_in_a_graph_it_is_wrong_without_the_others(
    runners: dict[Variant, Runner], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph has no edges but forks and joins; without the last join there would be none."""
    joined_only(monkeypatch, frozenset({names.join(2 * SHAPE.layers - 1, Half.SUFFIX)}))
    assert wrong(runners["stock"], Built(UNEVEN, "weave", folder / "last_join"), graph=True)
    counters = plugin_library().counters()
    assert counters["overlapped"] == 2 * 2 * SHAPE.layers * counters["joins"] > 0


def many_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prefix, recorder_rules, recorder_tensor):
        monkeypatch.setattr(module, "MAX_SHAPE_TENSOR_ELEMENTS", 1000)


class Fine(Shape):
    """Looks 257 rows up."""

    def table(self, tp_size: int) -> Any:
        return super().table(tp_size).model_copy(update={"granularity": 16})


def test_a_lookup_of_more_than_64_elements_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many_elements(monkeypatch)
    with pytest.raises(TokenWeaveError, match="holds 257 elements of a lookup, at most 64"):
        _ = Built(Fine(), "weave", folder / "many").plan


def test_and_is_refused_in_the_engine_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the pass's own check: the check after the build, or the first step, sees what TensorRT made of it."""
    many_elements(monkeypatch)
    monkeypatch.setattr(passes, "verify", lambda *_: [])
    seen = "sizes on the host: failed|wants to allocate|chain order: failed|no copy between start and join: failed"
    with pytest.raises(TokenWeaveError, match=seen):
        Built(Fine(), "weave", folder / "many").runner().run(tokens(4096, SHAPE.hidden))


def test_two_contexts_at_once_are_refused(folder: Path) -> None:
    engine = Built(Shape(layers=2, ctas=2), "weave", folder / "twice").engine
    contexts: list[EngineContext] = [engine.context(), engine.context()]
    runners = [Runner(context) for context in contexts]
    x = tokens(4096, SHAPE.hidden)
    errors: list[TokenWeaveError] = []

    def work(runner: Runner) -> None:
        try:
            for _ in range(20):
                runner.context.step(*runner.bindings(len(x)), runner.stream)
        except TokenWeaveError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(runner,)) for runner in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for runner in runners:
        runner.stream.synchronize()
    assert errors
    assert all("two execution contexts" in str(error) for error in errors)
