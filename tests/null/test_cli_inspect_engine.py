"""`inspect ENGINE`: what a saved engine was built for, and the table that it carries."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.fake_gpu import FakeEngine, FakeRuntime
from support.stack import Stack, options, table

from trtllm_tokenweave import recorder
from trtllm_tokenweave.builder import Plan
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.device import current_gpu
from trtllm_tokenweave.engine import config_file, save_engine
from trtllm_tokenweave.inspection import BuildReport
from trtllm_tokenweave.manifest import tensor_specs
from trtllm_tokenweave.passes import weave
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableRow

ROW = TableRow(tokens=Bucket(lo=17, hi=32), mode="weave", split_offset=8, mlp=LaunchConfig(ctas=6))


def save(cuda: FakeRuntime, folder: Path, model: dict[str, Any], **fields: Any) -> Path:
    """The engines of two ranks."""
    for rank in range(2):
        result = weave(Stack(rank=rank).build(), options(2, rank, table=table(2, rows=(ROW,)), **fields))
        specs = tensor_specs(FakeEngine(cuda))
        plan = Plan(memoryview(f"plan {rank}".encode()), result, BuildReport(), specs, current_gpu())
        save_engine(plan, folder, model=model)
    return folder


@pytest.fixture
def engine(trt: ModuleType, cuda: FakeRuntime, tmp_path: Path) -> Path:
    return save(cuda, tmp_path / "engine", {"num_layers": 2})


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = main(["inspect", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_folder_shows_its_table(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, engine)
    assert code == 0
    text = " ".join(out.split())
    for part in ("weave, tp_size 2", "Test GPU", "TensorRT 10.6.0", "rank 1:", "17..32", "auto 6x1024", "min_tokens 1"):
        assert part in text, part


@pytest.mark.parametrize(
    ("model", "split", "steps"),
    [
        ({"max_num_tokens": 64}, True, "steps of 33 to 64 tokens"),
        ({"max_num_tokens": 32}, True, None),
        ({}, True, "steps of 33 or more tokens"),  # an engine that does not say it
        ({"max_num_tokens": 64}, False, None),
    ],
)
def test_what_happens_to_steps_above_the_tables_rows(
    trt: ModuleType,
    cuda: FakeRuntime,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: dict[str, Any],
    split: bool,
    steps: str | None,
) -> None:
    folder = save(cuda, tmp_path / "engine", model, split=split)
    said = f"{steps} are above its rows: the default rule splits them at half, with 8 CTAs"
    code, out, _ = run(capsys, folder)
    assert code == 0
    assert ("above its rows" in out) == (steps is not None)
    assert f"table: {said}" in " ".join(out.split()) or steps is None
    code, out, _ = run(capsys, folder, "--json")
    assert json.loads(out)["beyond_rows"] == (None if steps is None else said)


@pytest.mark.parametrize("name", ["rank1.engine", "rank1.json"])
def test_one_engine_of_a_folder(engine: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = run(capsys, engine / name, "--json")
    assert code == 0
    document: dict[str, Any] = json.loads(out)
    assert [m["rank"] for m in document["manifests"]] == [1]
    assert document["table"]["rows"][0]["split_offset"] == 8
    assert document["table"]["sha256"] == table(2, rows=(ROW,)).sha256
    assert document["model"] == {"num_layers": 2}


def test_a_table_that_is_not_the_engines_is_refused(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(engine)
    data = json.loads(path.read_text())
    data["table"]["rows"] = []
    path.write_text(json.dumps(data))
    code, out, err = run(capsys, engine)
    assert (code, out) == (2, "")
    assert "table_sha256" in err


@pytest.mark.parametrize("name", ["config.json", "rank1.json"])
def test_a_missing_file_is_named(engine: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (engine / name).unlink()
    code, _, err = run(capsys, engine)
    assert code == 2
    assert name in err


def test_what_is_no_engine_is_refused(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.engine").write_text("")
    for words in ((tmp_path,), (tmp_path / "x.engine",), (engine, "--output", tmp_path / "o.json")):
        assert run(capsys, *words)[0] == 2
    # A recorded network may have any name.
    recorder.save(Stack().build(), tmp_path / "rank0.json")
    assert run(capsys, tmp_path / "rank0.json")[0] == 0


RECORD: dict[str, Any] = {
    "format_version": 1,
    "library": "1.0",
    "tensorrt_llm": "1.1.0",
    "tensorrt": "10.9.0",
    "rank": 0,
    "mode": "weave",
    "sites": 4,
    "attention": "whole",
    "refused": [{"where": "attention", "reason": "max_draft_len is 3", "stage": "attention"}],
    "table": {"sha256": "ab12", "source": "default", "min_tokens": 1024, "beyond_rows": "steps of 4 to 8"},
    "max_num_tokens": 8192,
    "max_batch_size": 8,
    "opt_num_tokens": [64, 4096],
}


def trtllm_engine(folder: Path, **more: Any) -> Path:
    folder.mkdir()
    config_file(folder).write_text(json.dumps({"version": "1.1.0", "pretrained_config": {}, "build_config": {}} | more))
    return folder


def test_an_engine_of_trtllm_build_shows_what_was_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trtllm_engine(tmp_path / "engine", tokenweave=RECORD)
    code, out, _ = run(capsys, folder)
    assert code == 0
    text = " ".join(out.split())
    for part in (
        "made by trtllm-build, weave, 4 sites fused, attention whole",
        "TensorRT-LLM 1.1.0, TensorRT 10.9.0",
        "steps up to 8192 tokens and 8 sequences, optimised for 64, 4096",
        "tuning table: default, min_tokens 1024, sha256 ab12 table: steps of 4 to 8 attention",
        "attention: attention: max_draft_len is 3",
        "serve it with TensorRT-LLM (docs/trtllm_build.md)",
    ):
        assert part in text, part
    code, out, _ = run(capsys, folder / "rank0.engine", "--json")
    assert code == 0
    assert json.loads(out)["tokenweave"] == RECORD | {"chain_sha256": ""}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "made without this package: there is nothing of it to show. Fix: build it with --plugin tokenweave"),
        ({"tokenweave": RECORD | {"mode": "knit"}}, "config.json: tokenweave: mode: "),
    ],
)
def test_an_engine_of_trtllm_build_without_a_record(
    more: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, trtllm_engine(tmp_path / "engine", **more))
    assert (code, out) == (2, "")
    assert message in err
