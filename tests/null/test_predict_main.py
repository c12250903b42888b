"""`python -m trtllm_tokenweave.predict`: both files or neither, and errors of one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import typer.testing

from trtllm_tokenweave.predict import __main__ as command
from trtllm_tokenweave.predict.data import FOLDER

RESULTS = Path(__file__).resolve().parents[2] / "docs/results"
INPUTS = ("kernel_tp2.json", "overlap_tp2.json", "stack_tp2.json", "e2e_tp2.json")
OLD = "as it was"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Data and results of one's own, with an old file to write over in each."""
    data, results = tmp_path / "data", tmp_path / "results"
    for folder in (data, results):
        folder.mkdir()
    for name in INPUTS:
        shutil.copy(RESULTS / name, results)
    (data / "fitted.json").write_text(OLD)
    (results / "predict_check.json").write_text(OLD)
    monkeypatch.setattr(command, "FOLDER", data)
    return data, results


def run(*words: str | Path) -> typer.testing.Result:
    app = typer.Typer()
    app.command()(command.main)
    return typer.testing.CliRunner().invoke(app, list(map(str, words)))


def refused(folders: tuple[Path, Path], result: typer.testing.Result, message: str) -> None:
    data, results = folders
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    assert (data / "fitted.json").read_text() == OLD
    check = results / "predict_check.json"
    assert check.is_dir() or check.read_text() == OLD
    assert not [path for folder in folders for path in folder.iterdir() if path.suffix == ".part"]


def test_writes_both(folders: tuple[Path, Path]) -> None:
    data, results = folders
    result = run("--results", results)
    assert result.exit_code == 0, result.stderr
    made, kept = (json.loads((folder / "fitted.json").read_text()) for folder in (data, FOLDER))
    assert made["machines"].keys() == kept["machines"].keys()
    document = json.loads((results / "predict_check.json").read_text())
    assert f"| {document['sources'][0]['source']} |" in result.stdout


def test_another_folder(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(folders, run(), "docs/results: does not exist. Fix: run it where the repository lies")


@pytest.mark.parametrize("name", INPUTS)
def test_a_result_is_missing(folders: tuple[Path, Path], name: str) -> None:
    (folders[1] / name).unlink()
    refused(folders, run("--results", folders[1]), f"{name}: does not exist")


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("{}", "is not what bench writes")])
def test_a_wrong_result(folders: tuple[Path, Path], text: str, message: str) -> None:
    (folders[1] / "stack_tp2.json").write_text(text)
    refused(folders, run("--results", folders[1]), message)


def test_neither_is_written_without_the_other(folders: tuple[Path, Path]) -> None:
    check = folders[1] / "predict_check.json"
    check.unlink()
    check.mkdir()
    refused(folders, run("--results", folders[1]), "predict_check.json: is a folder")


def test_fitted_cannot_be_written(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "FOLDER", tmp_path / "none")
    refused(folders, run("--results", folders[1]), "does not exist")
