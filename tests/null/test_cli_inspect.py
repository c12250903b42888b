"""`trtllm-tokenweave inspect`, and `demo --network`: what they print, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.models import Model, tiny
from support.stack import Stack
from support.tuning import CONFIG, measured

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.passes import verify
from trtllm_tokenweave.recorder import store
from trtllm_tokenweave.table import TableKey, TableSource, TuningTable
from trtllm_tokenweave.waves import table_key


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    """Run with --json; returns exit code, document, stderr."""
    code = main([*words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "network.json"
    store.save(Model(tiny(), 2).networks()[0], path)
    return path


def test_largest_preset(capsys: pytest.CaptureFixture[str]) -> None:
    code, document, _ = call(capsys, "inspect", "--preset", "llama-3.3-70b", "--tp", "8")
    assert code == 0
    assert len(document["sites"]) == 160
    assert document["refused"] == []
    assert document["mode"] == "weave"
    assert document["seconds"].keys() == {"build", "weave", "verify"}
    site = document["sites"][1]
    assert site["kind"] == "mlp"
    assert site["gamma"] == "transformer.layers.1.input_layernorm.weight_output_0"
    assert site["eps"] == pytest.approx(1e-5)
    assert site["all_reduce"].endswith("layers/0/mlp/proj/PLUGIN_V2_AllReduce_0")


def test_recorded_network(capsys: pytest.CaptureFixture[str], recorded: Path) -> None:
    code, document, _ = call(capsys, "inspect", str(recorded))
    assert code == 0
    assert [s["kind"] for s in document["sites"]] == ["attention", "mlp"] * 2


def test_text_output(capsys: pytest.CaptureFixture[str], recorded: Path) -> None:
    assert main(["inspect", str(recorded), "--no-split-attention"]) == 0
    out = capsys.readouterr().out
    assert "4 sites, mode weave" in out
    assert "attention whole" in out
    assert "split_attention is switched off" in out


def test_woven_network_is_saved_and_loads(capsys: pytest.CaptureFixture[str], recorded: Path, tmp_path: Path) -> None:
    woven = tmp_path / "woven.json"
    code, _, _ = call(capsys, "inspect", str(recorded), "-o", str(woven))
    assert code == 0
    network = store.load(woven, trt.get_plugin_registry())
    assert verify(network) == []
    assert sum(layer.name.startswith("tokenweave/site_") for layer in network.layers) >= 4 * 4


@pytest.mark.parametrize(("words", "mode"), [((), "weave"), (("--max-num-tokens", "64"), "fuse")])
def test_an_already_woven_network_is_said_to_be_one(
    capsys: pytest.CaptureFixture[str], recorded: Path, tmp_path: Path, words: tuple[str, ...], mode: str
) -> None:
    woven = str(tmp_path / "woven.json")
    code, document, _ = call(capsys, "inspect", str(recorded), "-o", woven, *words)
    assert (code, document["mode"], document["already_woven"]) == (0, mode, None)
    code, document, _ = call(capsys, "inspect", woven)
    assert (code, document["mode"], document["already_woven"]) == (0, mode, {"mode": mode, "sites": 4})
    assert main(["inspect", woven]) == 0
    assert f"already woven: 4 sites, mode {mode}" in capsys.readouterr().out
    code, document, _ = call(capsys, "demo", "--network", woven)
    assert code == 2
    assert document["error"]["what"] == f"is already woven: 4 sites, mode {mode}"
    assert "before it is woven" in document["error"]["fix"]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.mark.parametrize("output", ["network.json", "table.json"])
def test_other_inputs_are_not_replaced(capsys: pytest.CaptureFixture[str], recorded: Path, output: str) -> None:
    table = str(other_model(recorded.parent))
    before = contents(recorded.parent)
    words = [str(recorded), "--table", table, "-o", str(recorded.parent / output)]
    code, document, _ = call(capsys, "inspect", *words)
    assert code == 2
    assert "is a file of the input" in document["error"]["what"]
    assert contents(recorded.parent) == before


def read_twice(stack: Stack, index: int, reduced: trt.ITensor, _total: trt.ITensor) -> None:
    if index == 1:
        reduced.name = "probe"
        stack.network.mark_output(reduced)


def mixing(stack: Stack, index: int, x: trt.ITensor) -> trt.ITensor:
    mean = stack.network.add_reduce(x, trt.ReduceOperation.AVG, 1, True).outputs[0]
    return stack.binary(x, mean, "SUB") if index == 2 else x


@pytest.mark.parametrize(
    ("stack", "sites", "stage", "reason"),
    [
        (Stack(twist=read_twice), 3, "fuse", "has 2 readers"),
        (Stack(inner=mixing), 4, "split", "works across tokens"),
    ],
)
def test_refused_places_are_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, stack: Stack, sites: int, stage: str, reason: str
) -> None:
    path = tmp_path / "network.json"
    store.save(stack.build(), path)
    code, document, _ = call(capsys, "inspect", str(path))
    assert code == 0
    assert len(document["sites"]) == sites
    assert document["mode"] == "fuse"
    assert any(r["stage"] == stage and reason in r["reason"] and r["where"] for r in document["refused"])


def other_model(folder: Path) -> Path:
    path = folder / "table.json"
    TuningTable(key=TableKey(tp_size=4, hidden_size=8192, dtype="bfloat16", model_kind="dense")).save(path)
    return path


def newer_schema(folder: Path) -> Path:
    path = other_model(folder)
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"schema_version": 99}))
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "llama-9"], "no preset called 'llama-9'"),
        ([], "give one of NETWORK, --preset and --checkpoint"),
        (["--preset", "llama-3.2-1b", "--tp", "64"], "tp_size"),
        (["--preset", "llama-3.2-1b", "--tp", "8", "--rank", "8"], "rank 8"),
        (["missing.json"], "missing.json"),
        (["--preset", "llama-3.2-1b", "--tp", "8", "--table", "TABLE"], "key.tp_size"),
        (["--preset", "llama-3.2-1b", "--tp", "8", "--table", "NEWER"], "newer"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], message: str
) -> None:
    words = [
        str(other_model(tmp_path)) if w == "TABLE" else str(newer_schema(tmp_path)) if w == "NEWER" else w
        for w in words
    ]
    output = tmp_path / "out.json"
    code, document, err = call(capsys, "inspect", *words, "-o", str(output))
    assert code == 2
    assert message in document["error"]["what"] + document["error"]["where"]
    assert len(err.strip().splitlines()) == 1
    assert not output.exists()


@pytest.mark.parametrize(
    ("preset", "fields", "message"),
    [
        ("llama-3.3-70b", {}, ""),
        ("qwen2.5-72b", {}, "measured with mlp.fc+gate [M, 8192] x [8192, 28672], but [M, 8192] x [8192, 29568]"),
        ("llama-3.3-70b", {"library": "0.0.9"}, "measured with library 0.0.9, but"),
    ],
)
def test_a_table_is_checked_against_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, preset: str, fields: dict[str, Any], message: str
) -> None:
    path = tmp_path / "table.json"
    source = TableSource(kind="measurement", measured=measured(**fields))
    TuningTable(key=table_key(CONFIG, 2, gpu="NVIDIA H200"), source=source).save(path)
    code, document, _ = call(capsys, "inspect", "--preset", preset, "--tp", "2", "--table", str(path))
    assert code == (2 if message else 0)
    if message:
        assert message in document["error"]["what"]
        assert document["error"]["where"] == str(path)


@pytest.mark.parametrize(
    ("key", "fields", "message"),
    [
        ({}, {}, ""),
        ({"tp_size": 4}, {}, "made for tp_size 4, but 2 is needed"),
        ({"hidden_size": 8192}, {}, "made for hidden_size 8192, but"),
        ({"dtype": "float16"}, {}, "made for dtype float16, but"),
        ({}, {"library": "0.0.9"}, "measured with library 0.0.9, but"),
    ],
)
def test_a_table_is_checked_against_a_recorded_network(
    capsys: pytest.CaptureFixture[str], recorded: Path, key: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    path = recorded.parent / "table.json"
    source = TableSource(kind="measurement", measured=measured(**fields))
    made = table_key(tiny(), 2, gpu="NVIDIA H200").model_copy(update=key)
    TuningTable(key=made, source=source).save(path)
    code, document, _ = call(capsys, "inspect", str(recorded), "--table", str(path))
    assert code == (2 if message else 0)
    if message:
        assert message in document["error"]["what"]
        assert document["error"]["where"].startswith(str(path))


def test_network_without_collectives(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    network = trt.RecordedNetwork()
    network.mark_output(network.add_identity(network.add_input("x", trt.float32, (-1, 8))).outputs[0])
    store.save(network, tmp_path / "n.json")
    code, document, _ = call(capsys, "inspect", str(tmp_path / "n.json"))
    assert code == 2
    assert "nothing to fuse" in document["error"]["what"]
