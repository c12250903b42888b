"""Builds in several processes, and those of an unmodified `trtllm-build` with the model class file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from support.trtllm_place import Place, ended, outside, place

from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.config import mpi_environment
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.trtllm import hooks
from trtllm_tokenweave.trtllm.command import run
from trtllm_tokenweave.trtllm.surface import stock_main

__all__ = ["place"]  # a fixture

COMMAND = (sys.executable, "-m", "trtllm_tokenweave.cli.entry", "trtllm-build")


# ---- workers, mpirun


def test_workers_weave_in_processes_of_their_own(tmp_path: Path) -> None:
    place, values = outside(tmp_path, 4)
    done = ended([*COMMAND, *place.woven("--workers", "2")], values)
    assert done.returncode == 0, done.stderr
    assert [place.record(rank)["mode"] for rank in range(4)] == ["weave"] * 4
    assert len({place.told(rank)["process"] for rank in range(4)}) == 2
    assert done.stderr.count("sites fused and split") == 4


def test_a_worker_that_fails_takes_the_command_down(tmp_path: Path) -> None:
    place, values = outside(tmp_path)
    done = ended([*COMMAND, *place.woven("--workers", "2", "--opt_num_tokens", "4")], values)
    assert done.returncode == 1
    assert "its optimum of 4 tokens in 4 sequences is not split" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: TensorRT-LLM: Engine building failed")


def test_the_model_class_file_with_workers(tmp_path: Path) -> None:
    place, values = outside(tmp_path)
    words = place.words("--workers", "2", *model_class("AutoModel"))
    done = ended(stock_command(tmp_path, *words), values | {"TOKENWEAVE_TABLE": str(place.table)})
    assert done.returncode == 0, done.stderr
    assert [place.record(rank)["mode"] for rank in range(2)] == ["weave"] * 2


@pytest.mark.mpi
def test_mpirun_builds_its_ranks_in_turn(tmp_path: Path) -> None:
    place, values = outside(tmp_path, 4)
    words = ["mpirun", "-n", "3", *COMMAND, *place.woven()]
    done = ended(words, {**mpi_environment(), **values})
    assert done.returncode == 0, done.stderr
    assert [place.record(rank)["mode"] for rank in range(4)] == ["weave"] * 4
    assert len({place.told(rank)["process"] for rank in range(4)}) == 3


@pytest.mark.mpi
def test_mpirun_ends_with_an_error_of_one_rank(tmp_path: Path) -> None:
    place, values = outside(tmp_path, 2)
    words = ["mpirun", "-n", "2", *COMMAND, *place.woven("--opt_num_tokens", "4")]
    done = ended(words, {**mpi_environment(), **values})
    assert done.returncode == 2
    assert "its optimum of 4 tokens in 4 sequences is not split" in done.stderr


# ---- the model class file


def model_class(name: str) -> list[str]:
    return ["--model_cls_file", str(model_class_file()), "--model_cls_name", name]


def model_class_file() -> Path:
    return Path(hooks.__file__).with_name("model_cls.py")


def stock_command(folder: Path, *words: str) -> list[str]:
    """TensorRT-LLM's own script, which knows nothing of this package."""
    script = folder / "stock-trtllm-build"
    text = (
        "import sys\nfrom tensorrt_llm.commands.build import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    script.write_text(text)
    return [sys.executable, str(script), *words]


def test_the_file_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model-cls-file"]) == 0
    assert capsys.readouterr().out == f"{model_class_file()}\n"
    assert model_class_file().is_file()


@pytest.mark.parametrize("name", ["AutoModel", "LlamaForCausalLM", "LLaMAForCausalLM"])
def test_an_unmodified_command_weaves(place: Place, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    words = place.words(*model_class(name))
    for variable, value in (("TABLE", str(place.table)), ("SPLIT_ATTENTION", "0"), ("MIN_TOKENS", "20")):
        monkeypatch.setenv(f"TOKENWEAVE_{variable}", value)
    monkeypatch.setattr(sys, "argv", ["trtllm-build", *words])
    try:
        stock_main()()
    finally:
        hooks.uninstall()
    record = place.record()
    assert (record["mode"], record["attention"], record["table"]["min_tokens"]) == ("weave", "whole", 20)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_command_that_runs_the_module_weaves(tmp_path: Path, workers: str) -> None:
    place, values = outside(tmp_path)
    words = place.words("--workers", workers, *model_class("AutoModel"))
    command = [sys.executable, "-m", "tensorrt_llm.commands.build", *words]
    done = ended(command, values | {"TOKENWEAVE_TABLE": str(place.table)})
    assert done.returncode == 0, done.stderr
    assert [place.record(rank)["mode"] for rank in range(2)] == ["weave"] * 2


def test_an_unmodified_command_can_be_strict(tmp_path: Path) -> None:
    place, values = outside(tmp_path, 1)
    done = ended(stock_command(tmp_path, *place.words(*model_class("AutoModel"))), values | {"TOKENWEAVE_STRICT": "1"})
    assert done.returncode == 1
    assert "nothing could be fused: tp_size is 1" in done.stderr


def test_an_unknown_model_name(tmp_path: Path) -> None:
    place, values = outside(tmp_path)
    done = ended(stock_command(tmp_path, *place.words(*model_class("Lama"))), values)
    assert done.returncode == 1
    assert "--model_cls_name: TensorRT-LLM has no model 'Lama'" in done.stderr


def test_options_of_the_command_line_win_over_the_file(place: Place) -> None:
    assert run(place.woven("--tokenweave_split_attention", "disable", *model_class("AutoModel"))) == 0
    assert place.record()["attention"] == "whole"


def test_importing_the_file_as_a_module_changes_nothing(place: Place) -> None:
    from tensorrt_llm.commands import build

    before = build.parallel_build
    importlib.reload(importlib.import_module("trtllm_tokenweave.trtllm.model_cls"))
    assert build.parallel_build is before


@pytest.mark.parametrize("value", ["some", "-1"])
def test_a_wrong_variable(place: Place, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TOKENWEAVE_MIN_TOKENS", value)
    monkeypatch.setattr(sys, "argv", ["trtllm-build", *place.words(*model_class("AutoModel"))])
    with pytest.raises(UserError) as raised:
        stock_main()()
    assert raised.value.where == "TOKENWEAVE_MIN_TOKENS"
