"""What `tune` does around its search: the files that it writes, goes on from and refuses, on two ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_gpu import FakeRuntime, fake_tensorrt, install_cuda, install_tensorrt
from support.tuning import FakeRunner, bowl

from trtllm_tokenweave.comm import CommBackend, LocalComm, run_ranks
from trtllm_tokenweave.device import cudart
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.table import load_table
from trtllm_tokenweave.tune import measure
from trtllm_tokenweave.tune import run as run_module
from trtllm_tokenweave.tune.candidates import Space
from trtllm_tokenweave.tune.engine import TuningEngine
from trtllm_tokenweave.tune.run import TuneArguments, run_tune
from trtllm_tokenweave.tune.store import partial_file


class Gpu(FakeRuntime):
    """A GPU with as many SMs as a H200."""

    def cudaGetDeviceProperties(self, index: int) -> Any:  # noqa: ARG002, N802
        return 0, SimpleNamespace(name=b"Test GPU", major=9, minor=0, multiProcessorCount=132)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    runtime = Gpu()
    install_cuda(monkeypatch, runtime)
    yield runtime
    cudart.cache_clear()


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
def session(monkeypatch: pytest.MonkeyPatch, cuda: Gpu) -> Any:
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


def stopped(session: Any, given: TuneArguments) -> None:
    """A run that was stopped when some samples were saved."""

    def die(number: int) -> None:
        if number == 50:
            raise TokenWeaveError("killed")

    session.fails = die
    with pytest.raises(TokenWeaveError, match="killed"):
        session.go(given)
    session.fails = lambda _: None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"config": preset("llama-3.3-70b").model_copy(update={"dtype": "float16"})}, "dtype bfloat16"),
        ({"layers": 3}, "layers 2"),
        ({"mode": "graph"}, "mode eager"),
        ({"counts": (1024,)}, "token counts"),
    ],
)
def test_samples_of_other_steps_are_refused(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(measure, "SAVE_SECONDS", 0)
    stopped(session, arguments(tmp_path))
    with pytest.raises(UserError, match=f"was begun with {message}"):
        session.go(arguments(tmp_path, **fields))
    session.go(arguments(tmp_path))


def test_samples_of_another_length_are_refused(session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a release whose samples were of other numbers of steps."""
    monkeypatch.setattr(measure, "SAVE_SECONDS", 0)
    with monkeypatch.context() as older:
        older.setattr(run_module, "steps_of", lambda _tokens, _layers: 3)
        stopped(session, arguments(tmp_path))
    with pytest.raises(UserError, match=r"was begun with steps a sample \[3, 3\], and this run has \[4, 2\]"):
        session.go(arguments(tmp_path))


def test_samples_of_an_engine_that_cannot_be_built_again_are_refused(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "SAVE_SECONDS", 0)
    stopped(session, arguments(tmp_path))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="is gone, and with it the engine that was measured") as raised:
        session.go(arguments(tmp_path, timing_cache=empty))
    assert raised.value.where == f"rank 0, {empty / 'tune_timing0.cache'}"
    session.go(arguments(tmp_path, timing_cache=empty, restart=True))


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
