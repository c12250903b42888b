"""The tuning engine: one network whose split and launch configuration are inputs of a step."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.models import small
from support.stack import run

from trtllm_tokenweave.bench.stack_network import BATCH_INPUT, Stack
from trtllm_tokenweave.builder import opt_num_tokens
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.passes import WeaveOptions, names, verify, weave
from trtllm_tokenweave.plugin_specs import ALL_REDUCE_RMS_NORM, GEMM, Half
from trtllm_tokenweave.recorder import RecordedNetwork
from trtllm_tokenweave.schedule import plan_step
from trtllm_tokenweave.table import TuningTable
from trtllm_tokenweave.tune.candidates import Candidate, Space
from trtllm_tokenweave.tune.engine import PREFIX_INPUT, TuningEngine, steps_of
from trtllm_tokenweave.waves import table_key

CONFIG = small()
KEY = table_key(CONFIG, 2)
SPACE = Space(ctas=(4, 8), fuse_ctas=(16, 32), granularity=16)


def stack(rank: int, space: Space = SPACE) -> Stack:
    options = WeaveOptions(Mapping(2, rank, 2), space.table(KEY), len(space.launches), 128, prefix_input=PREFIX_INPUT)
    return Stack(CONFIG, options, keys=24)


def built(gemm: Any = "trt") -> list[RecordedNetwork]:
    made = [RecordedNetwork(), RecordedNetwork()]
    for rank, network in enumerate(made):
        assert stack(rank).build(network, "woven", gemm).mode == "weave"
        assert verify(network) == []
    return made


def step(tokens: int, prefix: int, batch: int = 1) -> dict[str, Any]:
    x = np.random.default_rng(3).standard_normal((tokens, CONFIG.hidden_size)).astype(ml_dtypes.bfloat16)
    return {"x": x, PREFIX_INPUT: np.zeros(prefix, np.int32), BATCH_INPUT: np.zeros(batch, np.int32)}


def test_one_network_runs_every_split_and_all_give_the_fuse_only_result() -> None:
    networks, halves = built(), []
    expected = run(networks, step(70, 70))[0]["out"].astype(np.float32)
    for prefix in (70, 1, 8, 35, 69, 100):
        for out in run(networks, step(70, prefix), seed=5):
            error = np.linalg.norm(out["out"].astype(np.float32) - expected) / np.linalg.norm(expected)
            assert error < 0.01, prefix
        halves.append(prefix)
    # Not by accident: what the halves are is read from the input.
    graph = Graph(networks[0])
    rows = graph.named[names.rows(Half.PREFIX)].inputs[2]
    assert rows is not None
    assert PREFIX_INPUT in {t for n in graph.ancestors([rows]) for t in n.inputs}


def test_without_the_option_the_split_is_looked_up() -> None:
    network = RecordedNetwork()
    options = WeaveOptions(Mapping(2, 0, 2), TuningTable(key=KEY, granularity=16, min_tokens=1), 8, 128)
    Stack(CONFIG, options, keys=24).build(network, "woven")
    assert Graph(network).inputs == ["x"]


@pytest.mark.parametrize("name", ["prefix", "x"])
def test_an_input_that_is_not_there_or_no_vector_refuses_the_split(name: str) -> None:
    network = RecordedNetwork()
    options = WeaveOptions(Mapping(2, 0, 2), TuningTable(key=KEY, granularity=16, min_tokens=1), 8, 128)
    Stack(CONFIG, options, keys=24).build(network, "stock")
    from dataclasses import replace

    result = weave(network, replace(options, prefix_input=name))
    assert result.mode == "fuse"
    assert [(r.where, r.stage) for r in result.plan.refused] == [(name, "split")]


def test_the_number_of_sequences_picks_the_launch_configuration_of_both_kinds() -> None:
    table = stack(0).options.table
    for mode, attention, mlp in SPACE.launches:
        candidate = Candidate(0 if mode == "weave" else None, attention, mlp)
        plan = plan_step(table, SPACE.batch(candidate), 64)
        assert (plan.attention, plan.mlp, plan.mode) == (attention, mlp, mode)
    assert len({SPACE.batch(Candidate(0, SPACE.launch(a), SPACE.launch(m))) for a in (4, 8) for m in (4, 8)}) == 4
    with pytest.raises(ValueError):
        SPACE.batch(Candidate(0, SPACE.launch(12), SPACE.launch(4)))


def test_collectives_and_gemms_read_the_sequences_of_the_step() -> None:
    for network in built("budget"):
        graph = Graph(network)
        plugins = [n for n in graph.live if n.plugin_name in (ALL_REDUCE_RMS_NORM, GEMM)]
        assert {n.plugin_name for n in plugins} == {ALL_REDUCE_RMS_NORM, GEMM}
        for node in plugins:
            assert BATCH_INPUT in node.inputs
            assert TuningTable.unpack(bytes(node.fields["table"])) == SPACE.table(KEY)  # type: ignore[arg-type]


def test_profile_is_optimised_for_the_step_that_a_final_engine_is() -> None:
    rule = TuningTable(key=KEY)
    big = WeaveOptions(Mapping(2, 0, 2), SPACE.table(KEY), len(SPACE.launches), 8192, prefix_input=PREFIX_INPUT)
    engine = TuningEngine(Stack(CONFIG, big), SPACE, rule)
    best = opt_num_tokens(rule, 8192, 1)
    profile = engine.profile
    assert profile["x"].optimum == (best, CONFIG.hidden_size)
    assert profile["x"].maximum == (8192, CONFIG.hidden_size)
    # The suffix half's kernels are chosen for the other half of it.
    assert profile[PREFIX_INPUT].optimum == (best // 2,)
    assert profile[PREFIX_INPUT].maximum == (8192,)
    assert profile[BATCH_INPUT].maximum == (len(SPACE.launches),)


def test_small_steps_that_the_rule_does_not_split_can_be_tuned() -> None:
    small_steps = WeaveOptions(Mapping(2, 0, 2), SPACE.table(KEY), len(SPACE.launches), 512, prefix_input=PREFIX_INPUT)
    engine = TuningEngine(Stack(CONFIG, small_steps), SPACE, TuningTable(key=KEY))
    assert engine.profile["x"].optimum == (512, CONFIG.hidden_size)


def test_samples_are_of_few_long_or_some_short_steps() -> None:
    assert [steps_of(n, 4) for n in (1, 512, 1024, 2048, 8192, 65536)] == [5, 4, 2, 1, 1, 1]
    assert steps_of(2048, 1) == 4
