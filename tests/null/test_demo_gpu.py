"""The demo's run through TensorRT: when it is skipped, what it starts, and what it says. The commands are stand-ins."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.fake_gpu import FakeRuntime, install_tensorrt

from trtllm_tokenweave.cli.demo import _gpu_lines
from trtllm_tokenweave.demo import gpu
from trtllm_tokenweave.demo.gpu import GpuRun, run_on_gpus
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.table import TableKey, TuningTable

CONFIG = preset("smollm2-135m")


def make_table(ranks: int, dtype: str) -> TuningTable:
    document = {"key": {"tp_size": ranks, "hidden_size": 576, "dtype": dtype}, "granularity": 16}
    return TuningTable.model_validate_json(json.dumps(document))


RUN = GpuRun(Path("/model.gguf"), CONFIG, ("one", "two"), make_table, 4, 96)


class Commands:
    """Stands for mpirun and the command line; notes what was started."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []
        self.tables: list[TableKey] = []
        self.tokens: dict[str, list[list[int]]] = {"stock": [[1], [2]], "weave": [[1], [2]]}
        self.fails = self.says_nothing = ""

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.started.append(command)
        words = command[command.index("trtllm_tokenweave.cli.entry") + 1 :]
        if words[0] == self.fails:
            said = "error: rank 1: the engine is broken\n-----\nerror: rank 0: too\n"
            return subprocess.CompletedProcess(command, 2, "", said)
        if words[0] == self.says_nothing:
            return subprocess.CompletedProcess(command, 0, "\n", "")
        if words[0] == "build":
            self.tables.append(TuningTable.load(Path(words[words.index("--table") + 1])).key)
            return subprocess.CompletedProcess(command, 0, '{"mode": "x"}\n', "  1.0 s  building\n")
        tokens = self.tokens[Path(words[1]).name]
        document = {
            "prompts": [{"tokens": t} for t in tokens],
            "tokens_per_second": 100.0 * len(self.started),
            "steps": {"weave graph": 3},
            "step_seconds": {"weave graph": 0.0123},
        }
        return subprocess.CompletedProcess(command, 0, json.dumps(document) + "\n", "")


@pytest.fixture
def commands(trt: ModuleType, cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """A machine with two GPUs, TensorRT, the libraries and mpirun."""
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    made = Commands()
    cuda.cudaGetDeviceCount = lambda: (0, 2)  # type: ignore[attr-defined]
    monkeypatch.setattr(subprocess, "run", made)
    monkeypatch.setattr(gpu, "find_library", lambda name: Path(f"lib{name}.so"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    return made


def test_stock_and_woven_engines_are_built_and_run_on_all_gpus(commands: Commands) -> None:
    said: list[str] = []
    found = run_on_gpus(RUN, said.append)
    assert (found["ranks"], found["same"], found["of"]) == (2, 2, 2)
    # Ranks on all cores: mpirun's default is one core each, and TensorRT's builder has threads.
    assert [c[:5] for c in commands.started] == [["mpirun", "--bind-to", "none", "-n", "2"]] * 4
    words = [c[8:] for c in commands.started]
    assert [w[0] for w in words] == ["build", "run", "build", "run"]
    assert words[2][words[2].index("--mode") + 1] == "weave"
    assert words[1][2:] == ["--max-new-tokens", "64", "--prompt", "one", "--prompt", "two", "--json"]
    assert {(key.tp_size, key.dtype) for key in commands.tables} == {(2, "bfloat16")}
    assert said == [
        "building the stock engine for 2 GPU(s); TensorRT takes a minute or so",
        "generating with the stock engine",
        "building the weave engine for 2 GPU(s); TensorRT takes a minute or so",
        "generating with the weave engine",
    ]
    assert _gpu_lines(found) == [
        "TensorRT, 2 GPU(s), bfloat16, stock: 200.0 tokens/s; steps: 3 weave graph (4.10 ms each)",
        "TensorRT, 2 GPU(s), bfloat16, weave: 400.0 tokens/s; steps: 3 weave graph (4.10 ms each)",
        "TensorRT: stock and woven engines say the same to 2 of 2 prompts",
    ]


def test_other_tokens_are_said(commands: Commands) -> None:
    commands.tokens["weave"] = [[1], [3]]
    found = run_on_gpus(RUN, lambda _: None)
    assert found["same"] == 1
    assert _gpu_lines(found)[-1] == "TensorRT: stock and woven engines say the same to 1 of 2 prompts"


def test_one_gpu_has_nothing_to_weave(commands: Commands, cuda: FakeRuntime) -> None:
    cuda.cudaGetDeviceCount = lambda: (0, 1)  # type: ignore[attr-defined]
    found = run_on_gpus(RUN, lambda _: None)
    assert list(found["engines"]) == ["stock"]
    assert [c[0] for c in commands.started] == [sys.executable] * 2
    assert len(_gpu_lines(found)) == 1


def test_no_more_ranks_than_heads(commands: Commands, cuda: FakeRuntime) -> None:
    cuda.cudaGetDeviceCount = lambda: (0, 16)  # type: ignore[attr-defined]
    assert run_on_gpus(RUN, lambda _: None)["ranks"] == 9


@pytest.mark.parametrize("command", ["build", "run"])
def test_a_command_that_fails_is_an_error(commands: Commands, command: str) -> None:
    commands.fails = command
    found = run_on_gpus(RUN, lambda _: None)
    assert found == {"error": f"{command}: rank 1: the engine is broken"}
    assert _gpu_lines(found) == [f"TensorRT: failed: {command}: rank 1: the engine is broken"]


def test_a_command_that_puts_out_nothing_is_an_error(commands: Commands) -> None:
    commands.says_nothing = "build"
    assert run_on_gpus(RUN, lambda _: None) == {"error": "build: it put out no JSON document"}


def _no_gpu(cuda: FakeRuntime, _patch: pytest.MonkeyPatch) -> None:
    cuda.fails["cudaGetDevice"] = 35


def _no_tensorrt(_cuda: FakeRuntime, patch: pytest.MonkeyPatch) -> None:
    install_tensorrt(patch, None)


def _no_libraries(_cuda: FakeRuntime, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gpu, "find_library", lambda _name: None)


def _under_mpirun(_cuda: FakeRuntime, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("OMPI_COMM_WORLD_RANK", "0")
    patch.setenv("OMPI_COMM_WORLD_SIZE", "1")


@pytest.mark.parametrize(
    ("take", "why"),
    [
        (_no_gpu, "CUDA: no GPU can be used"),
        (_no_tensorrt, "TensorRT"),
        (_no_libraries, "libtokenweave_trt.so is not built"),
        (_under_mpirun, "this process was started by mpirun itself"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    commands: Commands, cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch, take: Callable[..., None], why: str
) -> None:
    take(cuda, monkeypatch)
    found = run_on_gpus(RUN, lambda _: None)
    assert found["skipped"].startswith(why)
    (line,) = _gpu_lines(found)
    assert line.startswith("TensorRT: skipped: ")
    assert "\n" not in line
    assert not commands.started


def test_nothing_is_said_where_it_was_not_asked_for() -> None:
    assert _gpu_lines(None) == []
