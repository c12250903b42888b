"""Engines on disk: what is written, what a failed write leaves, every mismatch at loading, and groups of ranks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.fake_gpu import FakeEngine, FakeRuntime
from support.stack import Stack, options, table

from trtllm_tokenweave import engine as engine_module
from trtllm_tokenweave import engine_context, tensorrt_module
from trtllm_tokenweave.builder import Plan
from trtllm_tokenweave.comm import CommBackend, LocalComm, run_ranks
from trtllm_tokenweave.device import CudaError, DeviceMemory, current_gpu
from trtllm_tokenweave.engine import Engine, config_file, manifest_file, plan_file, save_engine
from trtllm_tokenweave.engine_context import EngineContext
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.inspection import BuildReport
from trtllm_tokenweave.manifest import Manifest, read_file, sha256, tensor_specs
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.passes import weave


class Machine:
    """A process with a GPU and TensorRT, whose runtime takes what `plan` made."""

    def __init__(self, module: ModuleType, runtime: FakeRuntime) -> None:
        self.cuda, self.module = runtime, module
        self.loaded: list[bytes] = []
        self.broken = b"never"
        self._loaded_one = threading.Event()
        module.__dict__["Runtime"] = lambda _log: self

    def deserialize_cuda_engine(self, data: Any) -> FakeEngine | None:
        self.loaded.append(bytes(data))
        if self.broken in self.loaded[-1]:
            # These ranks are threads of one process, which has one log: the other is done with it.
            assert self._loaded_one.wait(timeout=20)
            tensorrt_module.LINES.record(1, "Serialization assertion failed")
            return None
        self._loaded_one.set()
        return FakeEngine(self.cuda)

    def plan(self, rank: int = 0, tp_size: int = 2, data: bytes = b"plan", **fields: Any) -> Plan:
        network = Stack(tp_size=tp_size, rank=rank).build()
        result = weave(network, options(tp_size, rank, table=table(tp_size), **fields))
        return Plan(memoryview(data), result, BuildReport(), tensor_specs(FakeEngine(self.cuda)), current_gpu())


@pytest.fixture
def machine(trt: ModuleType, cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(engine_module, "plugin_library", lambda: None)
    return Machine(trt, cuda)


@pytest.fixture
def folder(machine: Machine, tmp_path: Path) -> Path:
    """A whole engine of two ranks."""
    target = tmp_path / "a" / "engine"
    for rank in range(2):
        save_engine(machine.plan(rank, data=f"plan {rank}".encode()), target, model={"num_layers": 2})
    return target


def load(folder: Path, ranks: int = 2, **fields: Any) -> list[Engine]:
    return run_ranks([partial(Engine.load, folder, comm, **fields) for comm in LocalComm.group(ranks)])


def refusal(folder: Path, ranks: int = 2, **fields: Any) -> str:
    """The error that every one of the ranks raises; a rank left waiting would raise another."""

    def body(comm: CommBackend) -> str:
        with pytest.raises(TokenWeaveError) as caught:
            Engine.load(folder, comm, **fields)
        return f"{type(caught.value).__name__} {caught.value}"

    errors = set(run_ranks([partial(body, comm) for comm in LocalComm.group(ranks, timeout=20)]))
    assert len(errors) == 1, errors
    return errors.pop()


def edit(path: Path, **fields: Any) -> None:
    data = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


# ---- saving


def test_what_is_written(folder: Path, machine: Machine) -> None:
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "rank0.engine",
        "rank0.json",
        "rank1.engine",
        "rank1.json",
    ]
    manifest = read_file(manifest_file(folder, 1), Manifest)
    assert (manifest.rank, manifest.tp_size, manifest.mode, manifest.dtype) == (1, 2, "weave", "float32")
    assert (manifest.gpu, manifest.compute_capability) == ("Test GPU", "9.0")
    assert (manifest.cuda_driver, manifest.tensorrt) == ("13.0", "10.6.0")
    assert (manifest.plan_bytes, manifest.plan_sha256) == (6, sha256(b"plan 1"))
    assert manifest.table_sha256 == sha256(table(2).pack())
    x = manifest.tensors[0]
    assert (x.name, x.mode, x.dtype, x.shape) == ("x", "INPUT", "FLOAT", (-1, 4))
    assert x.profiles == (((1, 4), (4, 4), (8, 4)),)
    assert manifest.tensors[2].profiles == ()


@pytest.mark.parametrize("file", [plan_file, manifest_file])
def test_a_write_that_fails_leaves_the_old_engine(
    folder: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, file: Callable[[Path, int], Path]
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    writer = "write_bytes" if file is plan_file else "write_text"

    def full(path: Path, data: Any, **_: Any) -> int:
        with path.open("wb") as part:
            part.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, writer, full)
    with pytest.raises(UserError, match=r"rank0\.(engine|json)|config\.json"):
        save_engine(machine.plan(0, data=b"new"), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    monkeypatch.undo()


def test_an_engine_is_replaced_as_a_whole(folder: Path, machine: Machine) -> None:
    save_engine(machine.plan(1, data=b"newer plan"), folder)
    assert load(folder)[1].manifest.plan_sha256 == sha256(b"newer plan")


def test_a_folder_that_cannot_be_made(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is no folder"):
        save_engine(machine.plan(), tmp_path / "file" / "engine")


def test_when_one_rank_cannot_write_all_know(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "rank1.engine").mkdir()

    def body(comm: CommBackend) -> str:
        with pytest.raises(UserError) as caught:
            save_engine(machine.plan(comm.rank), tmp_path, comm)
        return str(caught.value)

    errors = set(run_ranks([partial(body, comm) for comm in LocalComm.group(2, timeout=20)]))
    assert len(errors) == 1
    assert errors.pop().startswith(f"rank 1, {tmp_path / 'rank1.engine'}: is a folder")
    assert not (tmp_path / "rank1.json").exists()


# ---- loading


def test_load(folder: Path, machine: Machine) -> None:
    engines = load(folder)
    assert sorted(machine.loaded) == [b"plan 0", b"plan 1"]
    assert [e.manifest.rank for e in engines] == [0, 1]
    assert engines[0].config.model == {"num_layers": 2}
    assert engines[0].config.table == table(2)
    for context in run_ranks([engine.context for engine in engines]):
        context.close()
    assert load(folder, table=table(2))


def test_an_engine_without_files(machine: Machine) -> None:
    comms = LocalComm.group(2)
    engines = run_ranks([partial(Engine.of_plan, machine.plan(rank), comms[rank]) for rank in range(2)])
    assert machine.loaded == [b"plan", b"plan"]
    assert [e.manifest.rank for e in engines] == [0, 1]
    assert engines[1].config.table == table(2)


def test_one_rank_needs_no_communicator(machine: Machine, tmp_path: Path) -> None:
    save_engine(machine.plan(tp_size=1), tmp_path)
    assert Engine.load(tmp_path).manifest.tp_size == 1


def test_plugins_are_registered_for_networks_that_have_them(
    folder: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(engine_module, "plugin_library", lambda: asked.append(1))
    load(folder)
    assert len(asked) == 2
    for rank in range(2):
        edit(manifest_file(folder, rank), mode="stock")
    load(folder)
    assert len(asked) == 2


Damage = Callable[[Path, Machine], None]


def manifest_edit(**fields: Any) -> Damage:
    return lambda folder, _: edit(manifest_file(folder, 1), **fields)


#: What is wrong with rank 1 or the machine, and what every rank says.
DAMAGE: dict[str, tuple[Damage, str]] = {
    "library": (manifest_edit(library="0.0.1"), "library is 0.0.1, but 0.1.0 is needed here. Fix: install trtllm-tok"),
    "tensorrt": (manifest_edit(tensorrt="10.9.0"), "tensorrt is 10.9.0, but 10.6.0 is needed here. Fix: install Tenso"),
    "gpu": (
        manifest_edit(gpu="Other GPU"),
        "gpu is Other GPU, but Test GPU is needed here. Fix: run it on a Other GPU",
    ),
    "capability": (
        manifest_edit(compute_capability="10.0"),
        "compute_capability is 10.0, but 9.0 is needed here. Fix: run it on such a GPU",
    ),
    "tp_size": (manifest_edit(tp_size=4), "tp_size is 4, but 2 is needed here. Fix: start 4 ranks (mpirun -n 4)"),
    "rank": (manifest_edit(rank=0), "rank is 0, but 1 is needed here. Fix: do not rename engine files"),
    "table": (
        manifest_edit(table_sha256="1" * 64),
        f"table_sha256 is {'1' * 64}, but {sha256(table(2).pack())} is need",
    ),
    "format": (manifest_edit(format_version=2), "format_version is 2, expected 1. Fix: build the engine again"),
    "no format": (manifest_edit(format_version=None), "format_version is None, expected 1"),
    "field": (manifest_edit(extra=1), "rank1.json: extra: unknown field"),
    "value": (manifest_edit(plan_bytes="six"), "rank1.json: plan_bytes: "),
    "missing field": (manifest_edit(gpu=None), "rank1.json: gpu: missing"),
    "no manifest": (
        lambda folder, _: manifest_file(folder, 1).unlink(),
        "rank1.json: is missing. Fix: give the folder",
    ),
    "no JSON": (lambda folder, _: write(manifest_file(folder, 1), "{"), "rank1.json: is not JSON"),
    "no plan": (lambda folder, _: plan_file(folder, 1).unlink(), "rank1.engine: is missing. Fix: give the folder"),
    "truncated": (
        lambda folder, _: write(plan_file(folder, 1), "pla"),
        "plan_bytes is 6, but 3 is needed here. Fix: the engine file is damaged",
    ),
    "corrupt": (lambda folder, _: write(plan_file(folder, 1), "plan X"), "plan_sha256 is "),
    "empty": (lambda folder, _: write(plan_file(folder, 1), ""), "plan_bytes is 6, but 0 is needed"),
    "refused": (
        lambda _, machine: setattr(machine, "broken", b"plan 1"),
        "rank1.engine: Serialization assertion failed",
    ),
}


def write(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_wrong_with_one_rank_is_said_by_all(folder: Path, machine: Machine, case: str) -> None:
    damage, message = DAMAGE[case]
    damage(folder, machine)
    said = refusal(folder)
    assert message in said
    assert " rank 1" in said
    assert said.startswith("TokenWeaveError" if case == "refused" else "UserError")


def test_a_plan_is_not_touched_when_a_manifest_is_wrong(folder: Path, machine: Machine) -> None:
    edit(manifest_file(folder, 1), gpu="Other GPU")
    refusal(folder)
    assert not machine.loaded


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "dtype differs between rank 0 and rank 1: float32 and float16"),
        ({"mode": "fuse"}, "mode differs between rank 0 and rank 1: weave and fuse"),
        ({"cuda_driver": "12.9"}, "cuda_driver differs between rank 0 and rank 1: 13.0 and 12.9"),
        ({"tensors": []}, "tensors differs between rank 0 and rank 1."),
    ],
)
def test_engines_that_were_not_built_together(
    folder: Path, machine: Machine, change: dict[str, Any], message: str
) -> None:
    edit(manifest_file(folder, 1), **change)
    said = refusal(folder)
    assert message in said
    assert "Fix: build the engines of all ranks together" in said
    assert not machine.loaded


def test_other_tables(folder: Path, machine: Machine) -> None:
    said = refusal(folder, table=table(2, min_tokens=3))
    assert "table_sha256" in said
    assert "Fix: use the table that the engine was built with" in said
    edit(config_file(folder), table=json.loads(table(2, min_tokens=3).model_dump_json()))
    assert "table_sha256" in refusal(folder)


def test_other_group_sizes(folder: Path, machine: Machine) -> None:
    assert "tp_size is 2, but 3 ranks run. Fix: start 2 (mpirun -n 2), or build it for 3" in refusal(folder, ranks=3)
    with pytest.raises(UserError, match="tp_size is 2, but 1 ranks run"):
        Engine.load(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json: is missing"),
        ("{", "config.json: is not JSON"),
        ('{"tp_size": 2}', "config.json: format_version is None, expected 1"),
        ('{"format_version": 1, "tp_size": 2}', "table: missing"),
    ],
)
def test_configurations(folder: Path, machine: Machine, text: str | None, message: str) -> None:
    if text is None:
        config_file(folder).unlink()
    else:
        config_file(folder).write_text(text)
    assert message in refusal(folder)


def test_no_gpu(folder: Path, machine: Machine) -> None:
    machine.cuda.fails["cudaGetDevice"] = 35
    assert "no GPU can be used" in refusal(folder)


def test_symmetric_memory_is_asked_of_the_library(
    folder: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the context was made, on every rank, and in the size that the context needs."""

    asked: list[tuple[int, int]] = []

    class Library:
        def tensor_memory(self, device: int, num_bytes: int) -> int:
            asked.append((device, num_bytes))
            return 4096

    monkeypatch.setattr(engine_context, "plugin_library", Library)
    engines = load(folder)
    contexts = run_ranks([partial(EngineContext, e, symmetric=True) for e in engines])
    assert asked == [(0, 1000)] * 2
    for engine, context in zip(engines, contexts, strict=True):
        assert engine.tensorrt_engine.contexts[0].memory == (4096, 1000)
        context.close()
    assert not machine.cuda.memory


def test_engines_of_two_sizes_have_memory_of_their_own(
    folder: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their tensors lie at other offsets, so that no rank could find them on another."""
    monkeypatch.setattr(engine_context, "plugin_library", lambda: pytest.fail("symmetric memory was asked for"))
    engines = load(folder)
    engines[1].tensorrt_engine.device_memory_size_v2 = 2000
    contexts = run_ranks([partial(EngineContext, e, symmetric=True) for e in engines])
    assert not any(context.symmetric for context in contexts)
    assert "the ranks' engines need [1000, 2000] bytes" in caplog.text
    for context in contexts:
        context.close()
    assert not machine.cuda.memory


def test_a_plan_of_another_rank_keeps_its_mapping(machine: Machine, tmp_path: Path) -> None:
    plan = machine.plan(1)
    assert plan.result.plan.options.mapping == Mapping(2, 1, 2)
    assert save_engine(replace(plan, data=memoryview(b"x")), tmp_path).rank == 1
    assert not config_file(tmp_path).exists()


def no_context(engines: list[Engine], symmetric: bool) -> set[str]:
    """What the ranks say where none gets a context."""

    def body(engine: Engine) -> str:
        with pytest.raises(TokenWeaveError) as caught:
            engine.context(symmetric=symmetric)
        return str(caught.value)

    return set(run_ranks([partial(body, engine) for engine in engines]))


@pytest.mark.parametrize(("symmetric", "sizes"), [(True, (1000, 1000)), (True, (1000, 2000)), (False, (1000, 1000))])
def test_a_rank_without_a_context_leaves_nobody_waiting(
    folder: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, symmetric: bool, sizes: tuple[int, int]
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(engine_context, "plugin_library", lambda: asked.append(1))
    engines = load(folder)
    for engine, size in zip(engines, sizes, strict=True):
        engine.tensorrt_engine.device_memory_size_v2 = size
    engines[1].tensorrt_engine.makes_contexts = False
    errors = no_context(engines, symmetric)
    assert errors == {"rank 1: TensorRT makes no execution context: TensorRT gave no reason"}
    assert not asked
    assert not machine.cuda.memory


def test_a_rank_without_memory_is_every_ranks_error(
    folder: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def memory(num_bytes: int) -> DeviceMemory:
        if num_bytes == 2000:
            raise CudaError("cudaMalloc: out of memory")
        return DeviceMemory(num_bytes)

    monkeypatch.setattr(engine_context, "DeviceMemory", memory)
    engines = load(folder)
    engines[1].tensorrt_engine.device_memory_size_v2 = 2000
    assert no_context(engines, symmetric=False) == {"rank 1: cudaMalloc: out of memory"}


@pytest.mark.parametrize("what", ["save", "of_plan"])
def test_a_rank_that_makes_no_manifest_is_every_ranks_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    real = engine_module.make_manifest

    def make_manifest(plan: Plan) -> Manifest:
        if plan.result.plan.options.mapping.rank == 1:
            raise UserError("is broken", where="table")
        return real(plan)

    monkeypatch.setattr(engine_module, "make_manifest", make_manifest)

    def body(comm: CommBackend) -> str:
        plan = machine.plan(comm.rank)
        use = partial(save_engine, plan, tmp_path, comm) if what == "save" else partial(Engine.of_plan, plan, comm)
        with pytest.raises(UserError) as caught:
            use()
        return str(caught.value)

    errors = set(run_ranks([partial(body, comm) for comm in LocalComm.group(2)]))
    assert errors == {"rank 1, table: is broken"}
