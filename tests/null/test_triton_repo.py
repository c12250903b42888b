"""What `triton repo` writes, and what it refuses because no server could load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.models import tiny
from tokenizers import Tokenizer, models

from trtllm_tokenweave.checkpoint import RandomCheckpoint
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.decoder import DecoderModel
from trtllm_tokenweave.engine import EngineConfig, config_file, manifest_file, plan_file
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.table import TuningTable
from trtllm_tokenweave.triton.repository import read_repository
from trtllm_tokenweave.triton.settings import read_settings
from trtllm_tokenweave.waves import table_key


def _our_engine(folder: Path) -> Path:
    """What of an engine's folder is looked at before it is loaded."""
    config = tiny()
    model = DecoderModel(
        config=config,
        source="random",
        max_batch_size=8,
        max_num_tokens=64,
        max_seq_len=32,
        tokens_per_block=16,
        wanted="stock",
    )
    document = EngineConfig(tp_size=2, table=TuningTable(key=table_key(config, 2)), model=model.model_dump(mode="json"))
    (folder / "tokenizer").mkdir(parents=True)
    config_file(folder).write_text(document.text(), encoding="utf-8")
    for rank in range(2):
        manifest_file(folder, rank).touch()
        plan_file(folder, rank).touch()
    _tokenizer(folder / "tokenizer", config.vocab_size)
    return folder


def _tokenizer(folder: Path, size: int) -> None:
    words = {"<s>": 0, "hello": size - 1}
    Tokenizer(models.WordLevel(words, unk_token="<s>")).save(str(folder / "tokenizer.json"))


def test_a_repository_says_what_it_was_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "repository"
    engine = _our_engine(tmp_path / 'an "engine"')
    assert main(["triton", "repo", str(folder), "--engine", str(engine), "--max-tokens", "9", "--no-streaming"]) == 0
    assert capsys.readouterr().out == f"wrote {folder}, which serves the engines of {engine}\n"
    text = (folder / "tokenweave" / "config.pbtxt").read_text()
    assert "decoupled: false" in text
    values: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("parameters"):
            name, value = line.split(" key: ")[1].split(" value { string_value: ")
            values[json.loads(name)] = {"string_value": json.loads(value.removesuffix(" } }"))}
    settings = read_settings(values)
    assert (settings.engine_dir, settings.max_tokens, settings.checkpoint) == (engine, 9, None)
    (model,) = read_repository(folder)
    assert (model.name, model.backend, model.on_all_ranks) == ("tokenweave", "python", True)
    compile((folder / "tokenweave" / "1" / "model.py").read_text(), "model.py", "exec")


@pytest.mark.parametrize("char", [*" \t\n\"$&'()*;<>?[\\`{|", "ö"], ids=ascii)
def test_repositories_whose_path_triton_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, char: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / f"a{char}b"
    folder.mkdir()
    monkeypatch.chdir(folder)  # the whole path counts, not the part that is given
    assert main(["triton", "repo", "new"]) == 2
    said = capsys.readouterr().err
    assert f"new: holds {char!r}, which Triton cannot read there. Fix: choose one of ASCII characters" in said
    assert len(said.splitlines()) == 1
    assert list(folder.iterdir()) == []


def test_a_path_may_hold_what_a_shell_leaves_alone(tmp_path: Path) -> None:
    assert main(["triton", "repo", str(tmp_path / "a#!~^@%=,:+-._}]b")]) == 0


@pytest.mark.parametrize("option", ["--engine", "--checkpoint", "--tokenizer"])
def test_values_that_triton_cannot_read(tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mö del"
    path.mkdir()
    (tmp_path / "link").symlink_to(path)
    for given in (path, tmp_path / "link"):
        assert main(["triton", "repo", str(tmp_path / "new"), option, str(given)]) == 2
        said = capsys.readouterr().err
        assert f"{option} {path}: holds 'ö', which Triton cannot read there. Fix: choose one of ASCII" in said
        assert len(said.splitlines()) == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "/nowhere"], "--engine /nowhere: does not exist"),
        (["--engine", "/", "--checkpoint", "/"], "--engine: goes without --checkpoint"),
        (["--max-tokens", "0"], "max-tokens"),
        (["--max-batch-size", "1000000000"], "limits: max_num_tokens 256 is less than max_batch_size 1000000000"),
        (["--max-num-tokens", "1", "--max-batch-size", "8"], "limits: max_num_tokens 1 is less than max_batch_size 8"),
        (
            ["--max-seq-len", "10", "--max-tokens", "64"],
            "max_tokens: 64 leaves no room for a prompt: max_seq_len is 10. Fix: lower --max-tokens, or raise",
        ),
        (["--max-seq-len", "64"], "max_tokens: 64 leaves no room for a prompt"),
    ],
)
def test_repositories_that_cannot_be_made(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["triton", "repo", str(tmp_path / "new"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_default_length_and_one_token_of_a_prompt_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["triton", "repo", str(tmp_path / "new"), "--max-seq-len", "65"]) == 0
    what = "which serves SmolLM2-135M on the CPU interpreter (for TensorRT engines: --engine)"
    assert what in capsys.readouterr().out


def _damage(engine: Path, case: str) -> None:
    if case == "nothing":
        for path in [p for p in engine.rglob("*") if p.is_file()]:
            path.unlink()
    elif case == "empty":
        config_file(engine).write_text("{}", encoding="utf-8")
    elif case == "trtllm":
        config_file(engine).write_text('{"pretrained_config": {}, "build_config": {}}', encoding="utf-8")
    elif case == "other":
        document = json.loads(config_file(engine).read_text())
        config_file(engine).write_text(json.dumps(document | {"model": {}}), encoding="utf-8")
    elif case == "rank":
        plan_file(engine, 1).unlink()
    elif case == "tokenizer":
        (engine / "tokenizer" / "tokenizer.json").unlink()
    elif case == "ids":
        _tokenizer(engine / "tokenizer", tiny().vocab_size + 1)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nothing", "config.json: is missing. Fix: give the folder of a whole engine, or build it again"),
        ("empty", "config.json: format_version is None, expected 1"),
        ("trtllm", "config.json: is of an engine that trtllm-build made. Fix: serve it with TensorRT-LLM"),
        ("other", "config.json: model: is empty. Fix: build the engine with trtllm-tokenweave build"),
        ("rank", "rank1.engine: is missing"),
        (
            "tokenizer",
            "tokenizer: there is no tokenizer.json. Fix: give the model's Hugging Face folder as --tokenizer",
        ),
        ("ids", "the tokenizer has ids up to"),
        ("length", "max_tokens: 32 leaves no room for a prompt: max_seq_len is 32. Fix: lower --max-tokens, or build"),
    ],
)
def test_engines_that_could_not_be_served(
    tmp_path: Path, case: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = _our_engine(tmp_path / "engine")
    words = ["triton", "repo", "--engine", str(engine), "--max-tokens", "32" if case == "length" else "31"]
    assert main([*words, str(tmp_path / "whole")]) == (2 if case == "length" else 0)
    capsys.readouterr()
    _damage(engine, case)
    assert main([*words, str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_needs_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = RandomCheckpoint(tiny(), seed=1)
    monkeypatch.setattr("trtllm_tokenweave.triton.source.open_checkpoint", lambda _path, **_: checkpoint)
    words = ["triton", "repo", str(tmp_path / "new"), "--checkpoint", str(tmp_path)]
    assert main(words) == 2
    assert "has no tokenizer. Fix: put tokenizer.json into the folder" in capsys.readouterr().err
    assert main([*words, "--tokenizer", str(tmp_path)]) == 2
    assert "there is no tokenizer.json" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    _tokenizer(tmp_path, 8)
    assert main([*words, "--tokenizer", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "holds no model"),
        ('name: "m"\n', "names no backend"),
        ('backend: "python"\nmax_batch_size: ${size}\n', "${size} has no value"),
        ('backend: "python"\n', "has no version folder"),
    ],
)
def test_repositories_that_triton_could_not_load(tmp_path: Path, config: str | None, message: str) -> None:
    with pytest.raises(UserError, match="is no folder"):
        read_repository(tmp_path / "nowhere")
    if config is not None:
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.pbtxt").write_text(config)
    with pytest.raises(UserError) as caught:
        read_repository(tmp_path)
    assert message in str(caught.value)
