"""Builder settings: what is set, what is refused, and the order of things in a build."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_gpu import CreationFlag, FakeEngine, FakeRuntime
from support.stack import Stack, options, table

from trtllm_tokenweave import tensorrt_module
from trtllm_tokenweave.builder import (
    BuilderSettings,
    ShapeRange,
    build,
    check_settings,
    configure,
    opt_num_tokens,
)
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.passes import WeaveOptions, WeaveResult, names, weave
from trtllm_tokenweave.plugin_specs import Half
from trtllm_tokenweave.recorder import RecordedNetwork
from trtllm_tokenweave.schedule import plan_step
from trtllm_tokenweave.table import Bucket, TableRow

GOOD = ShapeRange((1, 16), (2, 16), (4, 16))


class FakeProfile:
    """As TensorRT's: it takes shapes, and says what it has."""

    def __init__(self) -> None:
        self.shapes: dict[str, list[tuple[int, ...]]] = {}

    def set_shape(self, name: str, low: Any, optimum: Any, high: Any) -> None:
        if not low <= optimum <= high:
            raise ValueError("minimum, optimum and maximum are out of order")
        self.shapes[name] = [low, optimum, high]

    def get_shape(self, name: str) -> list[tuple[int, ...]]:
        return self.shapes.get(name, [])


class FakeConfig:
    """As TensorRT's new ``IBuilderConfig``."""

    def __init__(self) -> None:
        self.features: dict[str, bool] = {}
        self.max_aux_streams = -1
        self.profiling_verbosity = "names"
        self.pools: dict[str, int] = {}
        self.profiles: list[FakeProfile] = []
        self.takes_profiles = self.takes_cache = True
        self.cache: Any = None

    def set_preview_feature(self, feature: str, on: bool) -> None:
        self.features[feature] = on

    def get_preview_feature(self, feature: str) -> bool:
        return self.features.get(feature, False)

    def set_memory_pool_limit(self, pool: str, size: int) -> None:
        self.pools[pool] = size

    def add_optimization_profile(self, profile: FakeProfile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1 if self.takes_profiles else -1

    def create_timing_cache(self, data: bytes) -> Any:
        return SimpleNamespace(data=data, serialize=lambda: data + b" and more") if data != b"broken" else None

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        assert ignore_mismatch is False
        self.cache = cache
        return self.takes_cache

    def get_timing_cache(self) -> Any:
        return self.cache


class TypedNetwork(RecordedNetwork):
    """A recorded network with what only TensorRT's have."""

    strongly_typed = True
    builder = SimpleNamespace(create_optimization_profile=FakeProfile)

    def get_flag(self, flag: Any) -> bool:
        assert flag is CreationFlag.STRONGLY_TYPED
        return self.strongly_typed


def woven(**fields: Any) -> tuple[TypedNetwork, WeaveResult]:
    network = TypedNetwork()
    Stack(network=network).build()
    return network, weave(network, options(**fields))


def settings(optimum: int = 128, **fields: Any) -> BuilderSettings:
    shapes = ShapeRange((1, 16), (optimum, 16), (256, 16))
    return BuilderSettings(profiles=({"x": shapes},), **fields)


def configured(result_and_network: Any, **fields: Any) -> tuple[FakeConfig, list[Any]]:
    network, result = result_and_network
    config = FakeConfig()
    return config, configure(config, network, result, settings(**fields))


# ---- configure


def test_a_woven_network_gets_what_it_needs(trt: ModuleType) -> None:
    config, profiles = configured(woven(), workspace_bytes=1 << 20)
    assert config.features == {"aliased": True}
    assert config.max_aux_streams == 0
    assert config.profiling_verbosity == "detailed"
    assert config.pools == {"workspace": 1 << 20}
    assert profiles == config.profiles
    assert profiles[0].shapes == {"x": [(1, 16), (128, 16), (256, 16)]}


def test_a_profile_can_be_made_for_the_network(trt: ModuleType) -> None:
    network, result = woven()
    asked = []

    def ranges(given: Any) -> dict[str, ShapeRange]:
        asked.append(given)
        return {"x": GOOD}

    (made,) = configure(FakeConfig(), network, result, BuilderSettings((ranges,)))
    assert asked == [network]
    assert made.shapes == {"x": [GOOD.minimum, GOOD.optimum, GOOD.maximum]}


def test_other_networks_keep_the_defaults(trt: ModuleType) -> None:
    config, _ = configured(woven(split=False), verbosity="LAYER_NAMES_ONLY")
    assert config.features == {}
    assert config.max_aux_streams == -1
    assert config.profiling_verbosity == "names"
    assert config.pools == {}


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({}, "profile 0: has no range for input 'x'"),
        (
            {"x": ShapeRange((1, 16), (2, 16), (4, 16)), "y": ShapeRange((1,), (1,), (1,))},
            "range for 'y', which is no input",
        ),
        ({"x": ShapeRange((2, 16), (1, 16), (4, 16))}, r"profile 0, input x: minimum \(2, 16\).*out of order"),
        (
            {"x": ShapeRange("1", (1, 16), (4, 16))},  # type: ignore[arg-type]
            r"profile 0, input x: minimum 1, optimum \(1, 16\).*do not fit.*Fix: let minimum",
        ),
    ],
)
def test_profiles_that_do_not_fit(trt: ModuleType, ranges: dict[str, ShapeRange], message: str) -> None:
    network, result = woven()
    with pytest.raises(UserError, match=message):
        configure(FakeConfig(), network, result, BuilderSettings((ranges,)))


def test_no_profile(trt: ModuleType) -> None:
    network, result = woven()
    with pytest.raises(UserError, match="optimisation profiles: there is none"):
        configure(FakeConfig(), network, result, BuilderSettings(()))


def test_a_profile_that_tensorrt_refuses(trt: ModuleType) -> None:
    network, result = woven()
    config = FakeConfig()
    config.takes_profiles = False
    with pytest.raises(UserError, match="profile 0: TensorRT refuses it"):
        configure(config, network, result, settings())


def test_timing_cache(trt: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    assert configured(woven(), timing_cache=path)[0].cache.data == b""
    path.write_bytes(b"old")
    assert configured(woven(), timing_cache=path)[0].cache.data == b"old"


@pytest.mark.parametrize("data", ["broken", "other GPU"])
def test_timing_caches_that_do_not_fit(trt: ModuleType, tmp_path: Path, data: str) -> None:
    path = tmp_path / "cache"
    path.write_text(data)
    network, result = woven()
    config = FakeConfig()
    config.takes_cache = False
    with pytest.raises(UserError, match="cache: is no timing cache of this TensorRT and GPU"):
        configure(config, network, result, settings(timing_cache=path))


# ---- check_settings


def test_good_settings_pass(trt: ModuleType) -> None:
    network, result = woven()
    config, profiles = configured((network, result))
    check_settings(config, network, profiles, result)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("alias", "preview feature ALIASED_PLUGIN_IO_10_03 is off.*Fix: config.set_preview_feature"),
        ("aux", "max_aux_streams is 2.*Fix: set it to 0"),
        ("typed", "not strongly typed.*Fix: create it with"),
    ],
)
def test_each_missing_setting_refuses_the_weave_only(trt: ModuleType, what: str, message: str) -> None:
    for split in (True, False):
        network, result = woven(split=split)
        config, profiles = configured((network, result))
        if what == "alias":
            config.set_preview_feature("aliased", False)
        elif what == "aux":
            config.max_aux_streams = 2
        else:
            network.strongly_typed = False
        if split:
            with pytest.raises(UserError, match=message):
                check_settings(config, network, profiles, result)
        else:
            check_settings(config, network, profiles, result)


def profile(low: int, optimum: int, high: int, name: str = "x") -> FakeProfile:
    made = FakeProfile()
    made.set_shape(name, (low, 16), (optimum, 16), (high, 16))
    return made


def checked(profiles: list[FakeProfile], **fields: Any) -> list[str]:
    network, result = woven(**fields)
    config, _ = configured((network, result))
    return [str(check) for check in check_settings(config, network, profiles, result)]


def test_an_optimum_that_is_not_split(trt: ModuleType) -> None:
    high = table(min_tokens=100)
    checked([profile(1, 100, 256)], table=high)
    with pytest.raises(UserError, match=r"profile 0, input x: its optimum of 99 tokens in 1 sequences is not split"):
        checked([profile(1, 99, 256)], table=high)
    with pytest.raises(UserError, match="optimise for 256 tokens"):
        checked([profile(1, 8, 256)], table=high)


def test_profiles_for_small_steps_need_no_split(trt: ModuleType) -> None:
    high = table(min_tokens=100)
    checked([profile(1, 8, 64), profile(65, 200, 256)], table=high)
    with pytest.raises(UserError, match="profile 1, input x"):
        checked([profile(1, 8, 64), profile(65, 80, 256)], table=high)
    with pytest.raises(UserError, match="none of 1 holds a step that is split"):
        checked([profile(1, 8, 64)], table=high)


def test_a_profile_beyond_what_was_woven(trt: ModuleType) -> None:
    """Steps above the lookup's range would lose rows: constants bound its halves."""
    with pytest.raises(UserError, match="its maximum of 257 tokens is above the 256 that the network was woven for"):
        checked([profile(1, 128, 257)])


def test_limits_beyond_all_profiles_are_noted(trt: ModuleType) -> None:
    assert checked([profile(1, 128, 256)]) == []
    assert checked([profile(1, 64, 64), profile(1, 128, 255)]) == [
        "limits: warning (max_num_tokens 256 is above the 255 of the largest profile (input x): give it 255)"
    ]
    # A profile that does not say its range may have as many.
    assert checked([profile(1, 128, 255), profile(1, 1, 256, name="other")]) == []


def test_sequences_beyond_all_profiles_are_noted(trt: ModuleType) -> None:
    network, result = woven()
    config, _ = configured((network, result))
    result = replace(result, plan=replace(result.plan, batch_ref="context_lengths"))
    both = profile(1, 128, 256)
    both.set_shape("context_lengths", (1,), (4,), (7,))
    (note,) = check_settings(config, network, [both], result)
    assert note.detail == "max_batch_size 8 is above the 7 of the largest profile (input context_lengths): give it 7"
    assert note.status == "warning"
    both.set_shape("context_lengths", (1,), (4,), (8,))
    assert check_settings(config, network, [both], result) == ()


def test_an_optimum_that_cannot_be_told(trt: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    checked([profile(1, 1, 256, name="other")])
    assert "profiles [0]: cannot tell whether their optimum is split: 'x' is no input with a range" in caplog.text


def test_profiles_after_one_that_cannot_be_told_are_checked(trt: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    high = table(min_tokens=100)
    unknown = [profile(1, 1, 256, name="other"), profile(1, 1, 256, name="other")]
    with pytest.raises(UserError, match="profile 2, input x: its optimum of 99 tokens"):
        checked([*unknown, profile(1, 99, 256)], table=high)
    (record,) = caplog.records
    assert "profiles [0, 1]: cannot tell" in record.getMessage()


# ---- opt_num_tokens


@given(
    min_tokens=st.integers(1, 400),
    max_num_tokens=st.integers(1, 600),
    max_batch=st.integers(1, 64),
    offset=st.sampled_from([0, 8, 64]),
    fuse_from=st.sampled_from([None, 9, 17]),
)
def test_the_optimum_splits_wherever_any_step_does(
    min_tokens: int, max_num_tokens: int, max_batch: int, offset: int, fuse_from: int | None
) -> None:
    rows = [TableRow(tokens=Bucket(lo=129, hi=256), batch=Bucket(hi=8), mode="weave", split_offset=offset)]
    if fuse_from is not None:
        rows.append(TableRow(tokens=Bucket(lo=1), batch=Bucket(lo=fuse_from), mode="fuse"))
    made = table(min_tokens=min_tokens, rows=tuple(rows))
    optimum = opt_num_tokens(made, max_num_tokens, max_batch)
    batch = (max_batch + 1) // 2
    splits = [n for n in range(1, max_num_tokens + 1) if plan_step(made, batch, n).mode == "weave"]
    assert 1 <= optimum <= max_num_tokens
    if splits:
        assert optimum == splits[-1]
    else:
        assert optimum == min(max_batch, max_num_tokens)


# ---- build


class FakeBuild:
    """TensorRT's builder and runtime for recorded networks; notes IS_BUILDING at every call."""

    def __init__(self, module: ModuleType, runtime: FakeRuntime) -> None:
        self.network, self.config = TypedNetwork(), FakeConfig()
        self.plan: bytes | None = b"the plan"
        self.engine: Any = FakeEngine(runtime)
        self.building: list[str | None] = []
        self.drop = ""
        module.__dict__.update(Builder=lambda _log: self, Runtime=lambda _log: self)

    def create_network(self, flags: int) -> TypedNetwork:
        assert flags == 2
        return self.network

    def create_builder_config(self) -> FakeConfig:
        return self.config

    def build_serialized_network(self, network: Any, config: Any) -> bytes | None:
        assert network is self.network
        assert config is self.config
        self.building.append(os.environ.get("IS_BUILDING"))
        if self.plan is None:
            tensorrt_module.LINES.record(1, "Error Code 9: no room")
        return self.plan

    def deserialize_cuda_engine(self, data: bytes) -> Any:
        assert data == self.plan
        self.building.append(os.environ.get("IS_BUILDING"))
        layers = [
            {"Name": n.name, "Inputs": [{"Name": t} for t in n.inputs], "Outputs": [{"Name": t} for t in n.outputs]}
            for n in Graph(self.network).ordered()
            if n.name != self.drop
        ]
        text = json.dumps({"Layers": layers})
        if self.engine is not None:
            inspector = SimpleNamespace(get_engine_information=lambda _form: text)
            self.engine.create_engine_inspector = lambda: inspector
        return self.engine


@pytest.fixture
def fake(trt: ModuleType, cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    monkeypatch.delenv("IS_BUILDING", raising=False)
    return FakeBuild(trt, cuda)


def make(network: Any, weave_options: WeaveOptions | None = None) -> WeaveResult:
    Stack(network=network).build()
    return weave(network, weave_options or options())


def test_build(fake: FakeBuild, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    plan = build(make, settings(timing_cache=cache, fused_memory_bytes=900))
    assert bytes(plan.data) == b"the plan"
    assert plan.num_bytes == 8
    assert plan.result.mode == "weave"
    assert plan.gpu.name == "Test GPU"
    assert [t.name for t in plan.tensors] == ["x", "host_factor", "out"]
    assert {c.name: c.status for c in plan.report.checks} == {
        "chain order": "ok",
        "no copy between start and join": "ok",
        "overlap": "ok",
        "sizes on the host": "ok",
        "activation memory": "warning",
        "weights stored once": "unknown",
    }
    assert plan.report.memory_bytes == 1000
    assert cache.read_bytes() == b" and more"
    assert fake.building == ["1", "1"]
    assert "IS_BUILDING" not in os.environ


def test_the_report_of_a_build_has_what_its_settings_waste(fake: FakeBuild) -> None:
    plan = build(lambda network: make(network, options(max_num_tokens=512)), settings())
    assert [str(check) for check in plan.report.checks if check.name == "limits"] == [
        "limits: warning (max_num_tokens 512 is above the 256 of the largest profile (input x): give it 256)"
    ]


def test_is_building_becomes_what_it_was(fake: FakeBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IS_BUILDING", "0")
    fake.plan = None
    with pytest.raises(TokenWeaveError):
        build(make, settings())
    assert fake.building == ["1"]
    assert os.environ["IS_BUILDING"] == "0"


def test_no_plan(fake: FakeBuild, tmp_path: Path) -> None:
    fake.plan = None
    with pytest.raises(TokenWeaveError, match="TensorRT built no engine: Error Code 9: no room"):
        build(make, settings(timing_cache=tmp_path / "cache"))
    assert not list(tmp_path.iterdir())


def test_a_plan_that_cannot_be_read(fake: FakeBuild) -> None:
    fake.engine = None
    with pytest.raises(TokenWeaveError, match="TensorRT cannot read the plan that it built"):
        build(make, settings())


def test_an_engine_that_fails_its_check_is_not_handed_out(fake: FakeBuild) -> None:
    fake.drop = names.join(0, Half.PREFIX)
    with pytest.raises(TokenWeaveError, match=r"the engine fails its check: chain order: failed .*has no layer"):
        build(make, settings())


def test_bad_settings_end_the_build_before_it_starts(fake: FakeBuild) -> None:
    with pytest.raises(UserError, match="is not split"):
        build(lambda n: make(n, options(table=table(min_tokens=200))), settings())
    assert not fake.building


def test_without_a_gpu_tensorrt_is_not_touched(fake: FakeBuild, cuda: FakeRuntime, trt: ModuleType) -> None:
    """Its builder ends the process where there is no driver."""
    cuda.fails["cudaGetDevice"] = 35
    trt.__dict__["Builder"] = None
    with pytest.raises(UserError, match="no GPU can be used"):
        build(make, settings())
