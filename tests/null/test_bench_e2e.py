"""What `bench e2e` builds, on the interpreter, and the figures that it makes of its measurements."""

# ruff: noqa: ARG002  (arguments of the methods that are overridden)
from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support import tuning
from support.models import small

from trtllm_tokenweave.batch import SequenceStep, StepLayout, step_inputs
from trtllm_tokenweave.bench import e2e as e2e_module
from trtllm_tokenweave.bench import e2e_run
from trtllm_tokenweave.bench.e2e import PREFIX_INPUT, VARIANTS, E2eBench, E2eRunner, Run, Split, Variant
from trtllm_tokenweave.bench.e2e_run import E2eArguments, check_arguments, read_bench, start_benchmark
from trtllm_tokenweave.bench.stack import MODES, Mode
from trtllm_tokenweave.bench.step_timer import Prepare, Timing
from trtllm_tokenweave.builder import Ranges
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.comm import CommBackend, LocalComm, SingleComm, run_ranks
from trtllm_tokenweave.config import Launcher
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.interpreter import ExecutionContext
from trtllm_tokenweave.kv_cache import BlockManager, KvCachePool
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.passes import WeaveOptions, verify, verify_ranks
from trtllm_tokenweave.plugin_specs import GEMM
from trtllm_tokenweave.recorder import RecordedNetwork
from trtllm_tokenweave.recorder.trtllm_plugins import ALL_REDUCE, AllReduceStrategy
from trtllm_tokenweave.runner import GenerationLimits
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableRow, TableSource, TuningTable, default_table
from trtllm_tokenweave.waves import table_key

CONFIG = small(max_position_embeddings=128, vocab_size=51)
TOKENS, PREFIX = 70, 48


def bench(rank: int = 0, **fields: Any) -> E2eBench:
    row = TableRow(tokens=Bucket(lo=1), mode="weave", split_offset=8, mlp=LaunchConfig(ctas=8))
    table = TuningTable(key=table_key(CONFIG, 2), granularity=16, min_tokens=32, rows=(row,))
    return E2eBench(CONFIG, WeaveOptions(Mapping(2, rank, 2), table, 1, 96), (TOKENS,), **fields)


def networks(variant: Variant) -> tuple[list[RecordedNetwork], Ranges]:
    made = [RecordedNetwork(), RecordedNetwork()]
    modes = {"fuse_only": "fuse", "woven": "weave", "whole": "weave"}
    for rank, network in enumerate(made):
        result, (ranges,) = bench(rank).build(network, variant)
        assert result.mode == modes.get(variant, "stock")
        assert verify(network) == []
    assert verify_ranks(made) == []
    return made, ranges


def logits(variant: Variant, prefix: int = PREFIX) -> list[Any]:
    """A step that prefills TOKENS tokens, on both ranks."""
    limits = GenerationLimits(96, 1, 96, 1)
    pools = [KvCachePool(limits.cache(CONFIG, 2)) for _ in range(2)]
    blocks = BlockManager(pools[0].config)
    blocks.grow(0, TOKENS)
    tokens = tuple(np.random.default_rng(5).integers(0, 51, TOKENS).tolist())
    contexts, given = [], []
    for network, comm, pool in zip(networks(variant)[0], LocalComm.group(2), pools, strict=True):
        contexts.append(ExecutionContext(network, comm))
        contexts[-1].pools.update(pool.bindings)
        names = {network.get_input(i).name for i in range(network.num_inputs)}
        inputs = step_inputs([SequenceStep(0, tokens, 0, TOKENS, True)], StepLayout(pool, blocks, 96, 2))
        inputs[PREFIX_INPUT] = np.zeros(prefix, np.int32)
        given.append({name: x for name, x in inputs.items() if name in names})
    outputs = run_ranks([partial(c.run, x) for c, x in zip(contexts, given, strict=True)])
    return [output["logits"].astype(np.float64) for output in outputs]


def test_all_engines_but_no_comm_compute_the_same() -> None:
    out = {variant: logits(variant) for variant in VARIANTS}
    stock = out["stock"][0]
    for variant in ("stock", "peer", "fuse_only", "woven", "whole"):
        np.testing.assert_array_equal(out[variant][0], out[variant][1])
        assert np.linalg.norm(out[variant][0] - stock) < 0.03 * np.linalg.norm(stock)
    width = out["no_comm"][0].shape[1]
    assert width == stock.shape[1] // 2  # its own columns
    assert np.linalg.norm(out["no_comm"][0] - stock[:, :width]) > 0.1 * np.linalg.norm(stock[:, :width])


def strategies(network: RecordedNetwork) -> set[Any]:
    return {n.fields["strategy"] for n in Graph(network).live if n.plugin_key == ALL_REDUCE}


def test_the_peer_reduces_in_windows_of_nccl() -> None:
    expected: dict[Variant, Any] = {"stock": AllReduceStrategy.NCCL, "peer": AllReduceStrategy.NCCL_SYMMETRIC}
    for variant, strategy in expected.items():
        assert [strategies(network) for network in networks(variant)[0]] == [{strategy}] * 2


@pytest.mark.parametrize("variant", ["stock", "woven", "no_comm"])
def test_products_are_the_gemm_plugins_where_that_is_asked_for(variant: Variant) -> None:
    network = RecordedNetwork()
    bench(gemm_plugin=True).build(network, variant)
    kinds = {n.plugin_name if n.plugin_name == GEMM else n.kind for n in Graph(network).live}
    assert GEMM in kinds
    assert "MATRIX_MULTIPLY" not in kinds
    assert "MATRIX_MULTIPLY" in {n.kind for n in Graph(networks(variant)[0][0]).live}


def test_the_split_is_an_input() -> None:
    first = logits("woven", 8)[0]
    for prefix in (33, TOKENS):
        np.testing.assert_allclose(logits("woven", prefix)[0], first, rtol=0.03, atol=0.02)


def test_the_profile_is_optimised_for_a_step_that_is_split() -> None:
    _, ranges = networks("woven")
    assert ranges["input_ids"].optimum[0] > ranges[PREFIX_INPUT].optimum[0] > ranges[PREFIX_INPUT].minimum[0] == 1
    assert ranges[PREFIX_INPUT].maximum == ranges["input_ids"].maximum
    assert PREFIX_INPUT not in networks("fuse_only")[1]


def test_engines_of_one_process_have_tables_of_their_own() -> None:
    packed = set()
    for variant in ("fuse_only", "woven", "whole"):
        result, _ = bench().build(RecordedNetwork(), variant)
        packed.add(result.plan.options.table.pack())
    assert len(packed) == 3


class Timed(E2eRunner):
    """A runner whose runs are figures: milliseconds by prefix half or variant."""

    def __init__(self, comm: CommBackend, bench: E2eBench, error: float = 0.0) -> None:
        self.comm, self.bench, self.started, self.error = comm, bench, 0.0, error
        self.stream = cast("Any", SimpleNamespace(synchronize=lambda: None))
        self.timer = cast("Any", self)
        self.bound: Run | None = None
        self.timed: list[Run] = []

    def prepare(self, run: Run, num_tokens: int, mode: Any) -> Callable[[], None]:
        assert num_tokens == TOKENS
        self.bound = run
        return lambda: None

    def logits(self, run: Run, num_tokens: int, mode: Any) -> Any:
        return np.full(4, 1 + (self.error if run.variant == "whole" else 0.0), np.float32)

    def time(self, samples: Sequence[tuple[Prepare, int]]) -> list[Timing]:
        """As `StepTimer.time`."""
        assert {count for _, count in samples} == {5}
        return [Timing(ms, 1500.0 - 10 * ms) for ms in map(self.time_one, [prepare for prepare, _ in samples])]

    def time_one(self, prepare: Prepare) -> float:
        prepare()
        assert self.bound is not None
        self.timed.append(self.bound)
        base = {"stock": 10.0, "peer": 9.5, "fuse_only": 9.0, "whole": 8.5, "no_comm": 7.0}.get(self.bound.variant, 8.0)
        split = self.bound.split or Split(56, 4)
        late = (0.0 if split.prefix == 56 else 0.25) + (0.0 if split.ctas == 4 else 0.125)
        return base + late + self.comm.rank


def measured(job: Callable[[Timed], Any], **fields: Any) -> list[Any]:
    def body(comm: CommBackend) -> Any:
        return job(Timed(comm, bench(comm.rank, **fields)))

    return run_ranks([partial(body, comm) for comm in LocalComm.group(2)])


def test_rows_hold_the_slower_ranks_times_and_the_best_split() -> None:
    def job(runner: Timed) -> Any:
        even, best, sweep = runner.splits(TOKENS)
        return even, best, sweep, runner.rows(TOKENS, even, best), runner.timed

    first, second = measured(job, offsets=(0, 8, 16, 24, 32, 40), ctas=(8, 4))
    assert first == second
    even, best, sweep, rows, _ = first
    assert (even, best) == (Split(40, 4), Split(56, 4))
    # CTAs, then offsets, of which the others leave no suffix of 70 tokens.
    assert [(row["offset"], row["ctas"]) for row in sweep] == [(0, 8), (0, 4), (0, 4), (8, 4), (16, 4), (24, 4)]
    assert [row["woven_ms"] for row in sweep] == [9.375, 9.25, 9.25, 9.25, 9.0, 9.25]
    assert [row["mode"] for row in rows] == ["eager", "graph"]
    expected = {
        "num_tokens": TOKENS,
        "stock_ms": 11.0,
        "peer_ms": 10.5,
        "fuse_only_ms": 10.0,
        "even_split_ms": 9.25,
        "tuned_split_ms": 9.0,
        "whole_attention_even_ms": 9.75,
        "whole_attention_tuned_ms": 9.5,
        "no_comm_ms": 8.0,
    }
    clocks = {name.removesuffix("_ms"): round(1500 - 10 * ms) for name, ms in expected.items() if name != "num_tokens"}
    splits = {"prefix_even": 40, "ctas_even": 4, "prefix_tuned": 56, "ctas_tuned": 4}
    assert rows[0] == {**expected, **splits, "error": 0.0, "mode": "eager", "mhz": clocks}


@pytest.mark.parametrize("gemm", ["trt", "budget"])
def test_woven_engines_have_the_gemms_that_the_table_was_measured_with(gemm: str) -> None:
    given = bench()
    source = TableSource(kind="measurement", measured=tuning.measured(gemm=gemm))
    table = given.weave.table.model_copy(update={"source": source})
    network = RecordedNetwork()
    replace(given, weave=replace(given.weave, table=table)).build(network, "woven")
    assert any(n.plugin_name == GEMM for n in Graph(network).live) is (gemm == "budget")


def test_engines_can_be_left_out() -> None:
    splits = Split(40), Split(PREFIX)
    (row, _), _ = measured(lambda runner: runner.rows(TOKENS, *splits), variants=("stock", "no_comm"))
    assert measured(lambda runner: runner.splits(TOKENS), variants=("stock",)) == [(*splits, [])] * 2
    assert {name for name in row if name.endswith("_ms")} == {"stock_ms", "no_comm_ms", "peer_ms"}
    assert row["error"] == 0.0


def test_a_table_says_the_split() -> None:
    (even, tuned, sweep), _ = measured(lambda runner: runner.splits(TOKENS), offsets=None)
    assert (even, tuned) == (Split(40, 4), Split(48))
    assert [row["ctas"] for row in sweep] == [4, 8]


def test_a_table_that_says_the_even_split_says_its_launch_too() -> None:
    """A step has one graph a split: the same split with other CTAs would replay it."""

    def job(runner: Timed) -> Any:
        row = TableRow(tokens=Bucket(lo=1), mode="weave", split_offset=0, mlp=LaunchConfig(ctas=8))
        table = runner.bench.weave.table.model_copy(update={"rows": (row,)})
        runner.bench = replace(runner.bench, weave=replace(runner.bench.weave, table=table))
        return runner.splits(TOKENS)

    assert measured(job, offsets=None) == [(Split(40), Split(40), [])] * 2


def test_collectives_are_launched_as_a_run_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[LaunchConfig | None] = []
    library = SimpleNamespace(override_launch=wanted.append)
    monkeypatch.setattr(e2e_module, "plugin_library", lambda: library)
    for run in (Run("stock"), Run("woven", Split(40, 8)), Run("woven", Split(40))):
        E2eRunner.override(object.__new__(E2eRunner), run)
    assert wanted == [None, LaunchConfig(ctas=8), None]


def test_an_engine_that_differs_from_stock_is_not_timed() -> None:
    def job(comm: CommBackend) -> str:
        runner = Timed(comm, bench(comm.rank), error=0.2 if comm.rank else 0.0)
        with pytest.raises(TokenWeaveError, match="whole_attention_even differs from stock at 70 tokens") as raised:
            runner.rows(TOKENS, Split(40), Split(PREFIX))
        assert not runner.timed
        return str(raised.value)

    assert len(set(run_ranks([partial(job, comm) for comm in LocalComm.group(2)]))) == 1


def test_a_split_is_verified_before_it_is_tried() -> None:
    def job(comm: CommBackend) -> str:
        runner = Timed(comm, bench(comm.rank))

        def logits(run: Run, _num_tokens: int, _mode: Any) -> Any:
            return np.full(4, 1.2 if comm.rank and run.split == Split(56, 4) else 1.0, np.float32)

        cast("Any", runner).logits = logits
        with pytest.raises(
            TokenWeaveError, match=r"split 1 \(\+16, 4 CTAs\) differs from stock at 70 tokens"
        ) as raised:
            runner.sweep(TOKENS, [Split(40, 4), Split(56, 4)])
        assert not runner.timed
        return str(raised.value)

    assert len(set(run_ranks([partial(job, comm) for comm in LocalComm.group(2)]))) == 1


class PlayedEngine:
    """An engine with its context, whose output is its input. ``stale``: that of the step before, as without a join."""

    def __init__(self, *, stale: bool = False, lost: bool = False) -> None:
        self.stale, self.bound, self.before = stale, 0.0, 0.0
        self.context, self.graphs = self, PlayedGraphs(self, lost=lost)
        self.output = np.zeros(1, np.float32)

    def bind(self, inputs: Any, _outputs: Any) -> None:
        self.bound = inputs["tokens"]

    def enqueue(self, _stream: Any) -> None:
        self.output[:] = self.before if self.stale else self.bound
        self.before = self.bound

    def step(self, inputs: Any, outputs: Any, stream: Any) -> None:
        self.bind(inputs, outputs)
        self.enqueue(stream)

    def fill(self, value: int) -> None:
        assert value == 0xFF
        self.output[:] = np.nan

    def to_numpy(self) -> Any:
        return self.output.copy()


class PlayedGraphs:
    """Runs a step, then captures it. ``lost``: replays do nothing."""

    def __init__(self, engine: PlayedEngine, *, lost: bool) -> None:
        self.engine, self.lost, self.captured = engine, lost, False
        self.counters = SimpleNamespace(fallback=0, reason="")

    def has(self, _inputs: Any, _outputs: Any) -> bool:
        return self.captured

    def step(self, inputs: Any, outputs: Any, stream: Any) -> None:
        if not (self.captured and self.lost):
            self.engine.step(inputs, outputs, stream)
        self.captured = True


class PlayedRunner(E2eRunner):
    def __init__(self, engine: PlayedEngine) -> None:
        self.comm, self.bench, self.started = SingleComm(), bench(), 0.0
        self.stream = cast("Any", SimpleNamespace(synchronize=lambda: None))
        self.engines, self._outputs = cast("Any", {"woven": engine}), cast("Any", {"woven": engine})

    def bindings(self, run: Run, num_tokens: int, *, other: bool = False) -> Any:
        return {"tokens": 3.0 if other else 2.0}, {}


@pytest.mark.parametrize("mode", MODES)
def test_what_a_step_leaves_behind_does_not_look_right(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2e_module, "plugin_library", lambda: SimpleNamespace(override_launch=lambda _: None))

    def logits(**fields: bool) -> float:
        runner = PlayedRunner(PlayedEngine(**fields))
        return float(runner.logits(Run("woven", Split(40, 4)), TOKENS, mode)[0])

    assert logits() == 2.0
    assert logits(stale=True) == 3.0
    assert np.isnan(logits(lost=True)) == (mode == "graph")


def test_a_step_on_other_tokens_has_the_same_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2e_module, "DeviceArray", SimpleNamespace(from_numpy=lambda x: x))
    monkeypatch.setattr(e2e_module, "Binding", SimpleNamespace(on_host=lambda x: x, device=lambda x: x))
    runner: Any = PlayedRunner(PlayedEngine())
    cache = GenerationLimits(96, 1, 96, 1).cache(CONFIG, 2)
    runner.pool, runner.blocks = KvCachePool(cache), BlockManager(cache)
    runner.blocks.grow(0, 96)
    runner.ids, runner._inputs = np.arange(96) % CONFIG.vocab_size, {}
    first, other = runner.inputs(TOKENS), runner.inputs(TOKENS, other=True)
    assert runner.inputs(TOKENS) is first
    assert {name for name in first if first[name].tobytes() != other[name].tobytes()} == {"input_ids"}
    assert np.mean(first["input_ids"] == other["input_ids"]) < 0.1
    assert {name: x.shape for name, x in first.items()} == {name: x.shape for name, x in other.items()}


def test_launches_of_the_environment_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWEAVE_LAUNCH", "ctas=8")
    with pytest.raises(UserError, match="TOKENWEAVE_LAUNCH: would be measured instead of every candidate"):
        start_benchmark(Launcher(0, 2), None)


def test_nccl_has_the_ctas_that_results_name_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SYM_CTAS", "1")  # what it was before is put back
    monkeypatch.delenv("NCCL_SYM_CTAS")

    def gpu() -> None:
        raise UserError(f"NCCL has {os.environ.get('NCCL_SYM_CTAS')}", where="here")

    monkeypatch.setattr(e2e_run, "current_gpu", gpu)
    with pytest.raises(UserError, match="NCCL has 64"):
        start_benchmark(Launcher(0, 2), None)


def test_a_token_count_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[E2eArguments] = []

    def check(arguments: E2eArguments) -> None:
        seen.append(arguments)
        raise UserError("enough", where="here")

    monkeypatch.setattr(e2e_run, "check_arguments", check)
    assert main(["bench", "e2e", "--tokens", "4096,1024,4096"]) == 2
    assert seen[0].tokens == (4096, 1024)


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--tokens", "1,x"], "--tokens: '1,x' is no list of numbers"),
        (["--offsets", "0"], "--offsets: a number is below 1"),
        (["--ctas", "7"], "bench e2e: "),
        (["--preset", "nothing"], "preset: no preset called 'nothing'"),
        (["--engines", "foo"], "--engines: foo is no list with stock in it"),
        (["--table", "nope.json"], "nope.json: cannot be read"),
        (["--layers", "81"], "--layers: 81, but the model has 80"),
        (["-o", "/nowhere/x.json"], "/nowhere/x.json: the folder /nowhere does not exist"),
    ):
        assert main(["bench", "e2e", *words, "--json"]) == 2
        error = json.loads(capsys.readouterr().out)["error"]
        assert message in f"{error['where']}: {error['what']}"


@pytest.mark.parametrize(("size", "refused"), [("", ""), ("3", ""), ("16", "9 attention heads")])
def test_arguments_are_checked_for_the_ranks_that_there_are(
    size: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if size:
        for name, value in (("SIZE", size), ("RANK", "0"), ("LOCAL_RANK", "0")):
            monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    arguments = E2eArguments("smollm2-135m", 8, (1024,), None, (0,), (8,))
    if refused:
        with pytest.raises(UserError, match=refused):
            check_arguments(arguments)
    else:
        check_arguments(arguments)


def test_a_table_for_other_ranks_is_good_until_ranks_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = E2eArguments("llama-3.3-70b", 8, (1024,), tmp_path / "table.json", (0,), (8,))
    default_table(table_key(preset("llama-3.3-70b"), 8)).save(tmp_path / "table.json")
    check_arguments(arguments)
    for name, value in (("SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(UserError, match="made for tp_size 8, but 2 is needed"):
        check_arguments(arguments)


def test_arguments_become_a_bench(tmp_path: Path) -> None:
    arguments = E2eArguments("llama-3.3-70b", 8, (1024, 4096), None, (0, 128), (8, 4))
    made = read_bench(arguments, Mapping(2, 1, 2))
    assert (made.config.num_hidden_layers, made.config.vocab_size, made.weave.max_num_tokens) == (8, 8192, 4096)
    assert made.weave.table.rows[0].mlp.ctas == 8
    with pytest.raises(UserError, match="--layers: 81, but the model has 80"):
        read_bench(replace(arguments, layers=81), Mapping(2, 0, 2))
    for engines in ("fuse_only", "stock,other", "stock,stock"):
        with pytest.raises(UserError, match=f"--engines: {engines} is no list with stock in it"):
            read_bench(replace(arguments, engines=tuple(engines.split(","))), Mapping(2, 0, 2))
    with pytest.raises(UserError, match="--tokens: 200000 is above the model's 131072 positions"):
        read_bench(replace(arguments, tokens=(200000,)), Mapping(2, 0, 2))
    file = tmp_path / "table.json"
    made.weave.table.save(file)
    tabled = read_bench(replace(arguments, table=file), Mapping(2, 0, 2))
    assert (tabled.weave.table, tabled.offsets) == (made.weave.table, None)
    with pytest.raises(UserError, match="made for tp_size 2, but 4 is needed"):
        read_bench(replace(arguments, table=file), Mapping(4, 0, 4))


class Finished:
    """A runner that has measured; rows of the token count that ``fails`` cannot be had."""

    fails = 0

    def __init__(self, bench: E2eBench, comm: CommBackend, _folder: Path) -> None:
        self.bench, self.comm = bench, comm
        self.engines: dict[str, Any] = {}

    def splits(self, num_tokens: int) -> Any:
        return Split(8), Split(16), [{"num_tokens": num_tokens}]

    def rows(self, num_tokens: int, even: Split, tuned: Split) -> Any:
        if num_tokens == self.fails:
            raise TokenWeaveError("the GPU fell off the bus")
        return [{"num_tokens": num_tokens, "prefix_even": even.prefix, "prefix_tuned": tuned.prefix}]

    def timelines(self, num_tokens: int, even: Split, tuned: Split) -> Any:
        return {"num_tokens": num_tokens}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("fails", [0, 64])
def test_a_run_that_is_cut_short_leaves_what_it_has(fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(override_launch=lambda _: None, reset_counters=lambda: None, counters=dict)
    monkeypatch.setattr(e2e_module, "plugin_library", lambda: library)
    monkeypatch.setattr(e2e_module, "E2eRunner", Finished)
    monkeypatch.setattr(Finished, "fails", fails)
    kept: list[Any] = []
    made = replace(bench(), tokens=(32, 64))

    def measure() -> Any:
        return e2e_module.measure_e2e(made, SingleComm(), keep=lambda so_far: kept.append(json.dumps(so_far)))

    if fails:
        with pytest.raises(TokenWeaveError, match="fell off the bus"):
            measure()
    else:
        document = measure()
        assert document["timeline"] == {"num_tokens": 64}
        assert [row["num_tokens"] for row in document["rows"]] == [32, 64]
    documents = [json.loads(text) for text in kept]
    assert [[row["num_tokens"] for row in one["rows"]] for one in documents] == [[32], [32, 64]][: 1 if fails else 2]
    assert not any("timeline" in one for one in documents)
