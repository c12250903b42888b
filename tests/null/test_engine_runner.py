"""The step function over an engine that counts up, on a fake GPU: what is bound, what recurs, what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.fake_decoder import DecoderMachine, FakeDecoder, no_plugins
from support.fake_gpu import CAPTURE_INVALID, OUT_OF_MEMORY, FakeRuntime
from support.models import small

from trtllm_tokenweave import engine as engine_module
from trtllm_tokenweave import engine_context, engine_runner
from trtllm_tokenweave.checkpoint import RandomCheckpoint
from trtllm_tokenweave.comm import CommBackend, LocalComm, SingleComm, run_ranks
from trtllm_tokenweave.decoder import DecoderBuild, describe
from trtllm_tokenweave.engine import Engine
from trtllm_tokenweave.engine_runner import (
    EngineStep,
    engine_generator,
    engine_limits,
    engine_step,
    recurring,
)
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.llama import NetworkOptions
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.passes import WeaveMode, WeaveOptions
from trtllm_tokenweave.recorder import RecordedNetwork
from trtllm_tokenweave.runner import GenerationLimits
from trtllm_tokenweave.table import Bucket, TableRow, TuningTable
from trtllm_tokenweave.waves import table_key

CONFIG = small(vocab_size=97, max_position_embeddings=1024)
OPTIONS = NetworkOptions(max_batch_size=4, max_num_tokens=48, max_seq_len=600, tokens_per_block=8)


class Ranks:
    """Makes step functions of the ranks of one engine."""

    def __init__(self, module: ModuleType, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine, self.runtime = DecoderMachine(module, runtime), runtime
        self.plugins = no_plugins()
        for where in (engine_module, engine_context, engine_runner):
            monkeypatch.setattr(where, "plugin_library", lambda: self.plugins)

    def step(
        self, comm: CommBackend | None = None, mode: WeaveMode = "weave", profiles: int = 1, **limits: Any
    ) -> EngineStep:
        ranks = comm or SingleComm()
        build = replace(make_build(20, ranks, mode), multiple_profiles=profiles > 1)
        plan = self.machine.build(build)
        model = describe(build, plan, "a test")
        return engine_step(Engine.of_plan(plan, ranks), model, engine_limits(model, max_new_tokens=8, **limits))


def make_build(min_tokens: int, ranks: CommBackend, mode: WeaveMode) -> DecoderBuild:
    mapping = Mapping(ranks.size, ranks.rank, ranks.size)
    row = TableRow(tokens=Bucket(lo=1), mode="weave")
    table = TuningTable(key=table_key(CONFIG, ranks.size), granularity=16, min_tokens=min_tokens, rows=(row,))
    weave = WeaveOptions(mapping, table, OPTIONS.max_batch_size, OPTIONS.max_num_tokens)
    weights = RandomCheckpoint(CONFIG).rank_weights(mapping)
    return DecoderBuild(CONFIG, weights, OPTIONS, weave, mode, Path("unused"))


@pytest.fixture
def ranks(trt: ModuleType, cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(trt, cuda, monkeypatch)


@pytest.fixture
def step(ranks: Ranks) -> Iterator[EngineStep]:
    with ranks.step() as made:
        yield made


def fake(step: EngineStep) -> FakeDecoder:
    engine: FakeDecoder = step.engine.tensorrt_engine
    return engine


def limits_of(step: EngineStep, **fields: Any) -> GenerationLimits:
    return engine_limits(step.model, **({"max_new_tokens": 8} | fields))


def generate(step: EngineStep, prompts: list[list[int]], **fields: Any) -> list[list[int]]:
    limits = limits_of(step, **fields)
    return engine_generator(step, limits).generate(prompts).tokens


def counted(prompt: list[int], count: int = 8) -> list[int]:
    return [(prompt[-1] + 1 + i) % CONFIG.vocab_size for i in range(count)]


PROMPTS = [[5] * 3, [40] * 60, [96], [7] * 20, [50] * 9]


def test_chunks_mixed_steps_and_graphs_give_the_engines_tokens(step: EngineStep) -> None:
    assert generate(step, PROMPTS) == [counted(p) for p in PROMPTS]
    kinds = {tuple(sorted(set(given["host_request_types"].tolist()))) for given in fake(step).host}
    assert kinds == {(0,), (0, 1), (1,)}
    assert step.ladder.steps["stock", "graph"] > 0
    assert step.graphs.counters.fallback == 0


def test_what_an_engine_is_given(step: EngineStep) -> None:
    engine_generator(step, limits_of(step, max_new_tokens=1)).generate([[11, 12, 13]])
    (host,), (device,) = fake(step).host, fake(step).device
    assert device["input_ids"].tolist() == [11, 12, 13]
    assert device["position_ids"].tolist() == [0, 1, 2]
    assert (device["sequence_length"].tolist(), device["last_token_ids"].tolist()) == ([3], [3])
    assert not device["cache_indirection"].any()
    assert device["kv_cache_block_offsets"][0, 0, :, 0].tolist() == [0, 1]
    assert host["host_kv_cache_pool_pointers"].tolist() == [[step.pool.pages.address, 0]]
    assert host["host_past_key_value_lengths"].tolist() == [3]
    assert set(host) | set(device) | {"logits"} == set(fake(step).tensors)


def test_generation_is_replayed_while_lengths_grow(step: EngineStep) -> None:
    """Tokens, lengths and block tables change in every step; a length past a multiple of 256 is another graph."""
    assert generate(step, [[3] * 250], max_new_tokens=20) == [counted([3], 20)]
    # 250 tokens in chunks of 48: six eager steps. 19 steps of generation: lengths 251 to 256, then 257 to 269.
    assert step.ladder.steps == {("stock", "eager"): 6 + 2 + 2, ("stock", "graph"): 4 + 11}
    assert step.graphs.counters.captured == 2
    lengths = [given["sequence_length"].tolist() for given in fake(step).device[6:]]
    assert lengths == [[251 + i] for i in range(19)]
    assert step.ladder.reasons["no graph: a prompt is read"] == 6
    assert step.ladder.reasons["no graph yet: it is made when a step recurs"] == 4


def test_steps_with_chunks_keep_their_host_values(step: EngineStep) -> None:
    generate(step, [[3] * 40, [4] * 9])
    for given in fake(step).host:
        if (given["host_request_types"] == 0).any():
            assert (given["host_past_key_value_lengths"] < 60).all()
            context = given["host_request_types"] == 0
            assert (given["host_context_lengths"][context] <= given["host_past_key_value_lengths"][context]).all()


def test_recurring_host_values_stay_inside_the_engines_limits() -> None:
    """The reference attention checks them in eager steps: lengths, and K pages of the primary pool before V pages."""
    table = np.array([[[[6, 12], [7, 13]]]], np.int32)
    inputs = {
        "host_request_types": np.array([1], np.int32),
        "host_context_lengths": np.array([33], np.int32),
        "host_past_key_value_lengths": np.array([540], np.int32),
        "host_kv_cache_block_offsets": table,
        "kv_cache_block_offsets": table,
    }
    made = recurring(inputs, 600)
    assert made["host_past_key_value_lengths"].tolist() == [599]  # 600 tokens with the new one, not 768
    assert recurring(inputs, 2048)["host_past_key_value_lengths"].tolist() == [767]
    assert made["host_context_lengths"].tolist() == [1]
    assert made["host_kv_cache_block_offsets"].tolist() == [[[[0, 0], [1, 1]]]]
    assert made["kv_cache_block_offsets"] is table
    again = recurring(inputs | {"host_kv_cache_block_offsets": table + 1}, 600)
    assert again["host_kv_cache_block_offsets"] is made["host_kv_cache_block_offsets"]
    for name, given in made.items():
        assert (given.dtype, given.shape) == (inputs[name].dtype, inputs[name].shape)
    mixed = inputs | {"host_request_types": np.array([0], np.int32)}
    assert recurring(mixed, 600) is mixed


@pytest.mark.parametrize("past", [255, 256])
def test_the_longest_sequence_decides_the_rounded_length(past: int) -> None:
    pasts = np.array([3, past], np.int32)
    inputs = {
        "host_request_types": np.ones(2, np.int32),
        "host_context_lengths": np.ones(2, np.int32),
        "host_past_key_value_lengths": pasts,
        "host_kv_cache_block_offsets": np.zeros((1, 2, 2, 4), np.int32),
    }
    made = recurring(inputs, 2048)["host_past_key_value_lengths"]
    assert made.tolist() == [255 if past == 255 else 511] * 2
    assert (made >= pasts).all()


def test_a_capture_that_fails_is_counted_with_its_reason(ranks: Ranks, cuda: FakeRuntime) -> None:
    with ranks.step() as step:
        cuda.fails["cudaStreamEndCapture"] = CAPTURE_INVALID
        assert generate(step, [[3]]) == [counted([3])]
        assert step.ladder.steps == {("stock", "eager"): 8}
        assert step.ladder.reasons["no graph: cudaStreamEndCapture: error 901"] == 1


def test_a_step_that_the_engine_refuses_is_an_error(step: EngineStep) -> None:
    fake(step).refuses = "always"
    with pytest.raises(TokenWeaveError, match="TensorRT does not run the step: the test refuses this step"):
        generate(step, [[1]])


def test_plugins_that_fail_in_a_step_are_an_error(ranks: Ranks) -> None:
    """Their kernels put out NaN and note why: a rank that does not come, say."""
    with closing(Pair(ranks)) as pair:
        said = iter(["", "rank 1 did not come"])
        ranks.plugins.last_error = lambda: next(said)
        with pytest.raises(TokenWeaveError, match="the step failed: rank 1 did not come"):
            generate(pair.steps[0], [[1]])


class Pair:
    """Both ranks of a woven engine, made together."""

    def __init__(self, ranks: Ranks, mode: WeaveMode = "weave", profiles: int = 1) -> None:
        comms = LocalComm.group(2, timeout=20)
        self.steps = run_ranks([partial(ranks.step, comm, mode, profiles) for comm in comms])

    def close(self) -> None:
        for step in self.steps:
            step.close()


@pytest.mark.parametrize("mode", ["weave", "fuse"])
def test_the_ladder_says_what_was_run(ranks: Ranks, mode: WeaveMode) -> None:
    with closing(Pair(ranks, mode)) as pair:
        step = pair.steps[0]
        assert step.engine.manifest.mode == mode
        assert generate(step, [[9] * 40], max_new_tokens=3) == [counted([9], 3)]
        woven = {("weave", "eager"): 1, ("fuse", "eager"): 2} if mode == "weave" else {("fuse", "eager"): 3}
        assert step.ladder.steps == woven
        few = "steps of so few tokens are not split (the engine's table)"
        assert step.ladder.reasons[few] == (2 if mode == "weave" else 0)
        document = step.ladder.document()
        assert document["steps"] == {f"{m} {run}": n for (m, run), n in sorted(woven.items())}
        assert document["step_seconds"].keys() == document["steps"].keys()
        assert all(seconds > 0 for seconds in document["step_seconds"].values())


def test_an_engine_that_is_less_than_was_wanted_says_why(step: EngineStep) -> None:
    generate(step, [[1]], max_new_tokens=1)
    why = "it has no AllReduce layer, so there is nothing to fuse (tp_size 1?)"
    assert step.ladder.reasons[f"the engine is built stock: {why}"] == 1


def test_no_room_for_the_cache_is_every_ranks_error(ranks: Ranks, cuda: FakeRuntime) -> None:
    allocate = cuda.cudaMalloc

    def cuda_malloc(num_bytes: int) -> Any:
        return (OUT_OF_MEMORY, None) if num_bytes > 10**8 else allocate(num_bytes)

    cuda.cudaMalloc = cuda_malloc  # type: ignore[method-assign]

    def body(comm: LocalComm) -> str:
        with pytest.raises(UserError) as caught:
            ranks.step(comm, num_blocks=10**6 if comm.rank else 0)
        return str(caught.value)

    said = set(run_ranks([partial(body, comm) for comm in LocalComm.group(2, timeout=20)]))
    assert len(said) == 1
    text = said.pop()
    assert text.startswith("rank 1, KV cache: 0.5 GiB cannot be had (cudaMalloc: error 2). Fix: give it fewer blocks")


def test_a_full_cache_makes_sequences_wait(ranks: Ranks) -> None:
    with ranks.step(num_blocks=4) as step:
        limits = limits_of(step, num_blocks=4)
        made = engine_generator(step, limits).generate([[1] * 9, [20] * 9, [30] * 9])
        assert made.tokens == [counted(p) for p in ([1], [20], [30])]
        assert max(s.batch for s in made.steps) == 1
        with pytest.raises(UserError, match="prompt 0: needs 6 KV-cache blocks, there are 4"):
            engine_generator(step, limits).generate([[1] * 40])


def test_everything_is_given_back(ranks: Ranks, cuda: FakeRuntime) -> None:
    before = set(cuda.memory)
    with ranks.step() as step:
        generate(step, [[3], [4]])
        assert cuda.graphs
        assert set(cuda.memory) > before
    assert not cuda.graphs
    assert set(cuda.memory) == before


@pytest.mark.parametrize(
    ("min_tokens", "tokens"), [(20, [(1, 48, 48), (1, 4, 4)]), (4, [(1, 48, 48), (1, 3, 3)]), (1, [(1, 48, 48)])]
)
def test_the_second_profile_holds_steps_of_few_tokens_that_are_not_split(
    min_tokens: int, tokens: list[tuple[int, int, int]]
) -> None:
    build = replace(make_build(min_tokens, LocalComm.group(2)[0], "weave"), multiple_profiles=True)
    network = RecordedNetwork()
    build.make_network(network)
    ranges = [given(network) if callable(given) else given for given in build.settings().profiles]
    found = [tuple(size for (size,) in vars(each["input_ids"]).values()) for each in ranges]
    assert found == tokens
    assert [each["context_lengths"] for each in ranges] == [ranges[0]["context_lengths"]] * len(ranges)
    assert len(replace(build, multiple_profiles=False).settings().profiles) == 1


def test_a_table_that_splits_nothing_has_one_optimum_for_few_tokens_already() -> None:
    build = replace(make_build(9000, LocalComm.group(2)[0], "weave"), multiple_profiles=True)
    assert len(build.settings().profiles) == 1


@pytest.mark.parametrize("profiles", [1, 2])
def test_steps_of_generation_rows_run_in_the_profile_that_is_made_for_them(ranks: Ranks, profiles: int) -> None:
    """Contexts take turns, and each graph is of the profile that its steps have when they run eagerly."""
    with closing(Pair(ranks, profiles=profiles)) as pair:
        step = pair.steps[0]
        assert generate(step, PROMPTS) == [counted(p) for p in PROMPTS]
        assert step.graphs.counters.graph > 0
        counts = [len(given["input_ids"]) for given in fake(step).device]
        assert fake(step).profiles == [int(profiles == 2 and count <= 4) for count in counts]
        assert {count <= 4 for count in counts} == {True, False}


def test_profiles_share_the_symmetric_memory_that_an_engine_asks_for_once(ranks: Ranks) -> None:
    asked: list[int] = []

    def tensor_memory(_device: int, num_bytes: int) -> int:
        asked.append(num_bytes)
        return 4096

    ranks.plugins.tensor_memory = tensor_memory
    with closing(Pair(ranks, profiles=2)) as pair:
        for step in pair.steps:
            assert [(c.address, c.num_bytes) for c in step.contexts] == [(4096, 1000), (4096, 500)]
            assert [context.profile for context in fake(step).contexts] == [0, 1]
    assert asked == [1000, 1000]


def test_a_profile_that_needs_more_than_it_shares_is_refused(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDecoder, "get_device_memory_size_for_profile_v2", lambda _, index: 1000 + index)
    with pytest.raises(TokenWeaveError, match="rank 0: profile 1 needs 1001 bytes of activations, and shares 1000"):
        Pair(ranks, profiles=2)
    Pair(ranks, "stock", profiles=2).close()  # memory of their own


def test_every_profile_has_the_memory_that_it_needs(ranks: Ranks) -> None:
    with ranks.step(mode="stock", profiles=2) as step:
        generate(step, [[3]])
        sizes = {context.profile: context.memory[1] for context in fake(step).contexts}
        assert sizes == {0: 1000, 1: 500}
        assert [context.profile for context in fake(step).contexts].count(1) > 1  # a graph's among them
