"""`trtllm-tokenweave plan --predict` and `bench gemm`: what they print, and what they refuse."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from support.tuning import measured

from trtllm_tokenweave import __version__
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.predict.data import FOLDER, fitted, machine_data
from trtllm_tokenweave.predict.machine import MACHINES
from trtllm_tokenweave.table import TableSource, TuningTable
from trtllm_tokenweave.table.measured import layer_gemms
from trtllm_tokenweave.waves import gemm_shapes, table_key

ROOT = Path(__file__).resolve().parents[2]
LLAMA = preset("llama-3.3-70b")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is wrapped, whatever ran before."""
    monkeypatch.setenv("COLUMNS", "400")


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", "--preset", "llama-3.3-70b", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("--predict", "--machine", "h100-multimem", "--tokens", "64,2048,16384", "--batch", "100")
    code, out, _ = call(capsys, *words)
    assert code == 0
    assert "left out, fewer tokens than the 100 sequences: 64" in out
    for part in (
        "prefill of 100 sequences, h100-multimem",
        "stock ms",
        "no comm",
        "1024+1024",
        "keep off the SMs",
        "arXiv:2505.11329",
    ):
        assert part in out
    (error,) = (e for e in fitted().errors["h100-multimem"] if "llama" in e.source and "split / " in e.source)
    assert f"worst {error.worst:+.1%}" in out
    (error,) = (e for e in fitted().errors["h100-multimem"] if "llama" in e.source and "stock ms" in e.source)
    assert f"milliseconds off where checked: worst {error.worst:+.1%}" in out
    assert "qwen2.5-72b" in out
    assert "mixtral" not in out  # of another kind
    assert "note: GEMMs were measured at 64 to 4608 tokens: extrapolated for 16384" in out
    code, out, _ = call(capsys, *words, "--json")
    document = json.loads(out)
    assert document["skipped"] == [64]
    step = document["steps"][0]
    assert step["ratios"]["best"] == pytest.approx(step["best"]["us"] / step["stock_us"], abs=1e-4)
    assert {e["role"] for e in document["errors"]} == {"check"}
    assert {e["unit"] for e in document["errors"]} == {"ratio", "ms"}
    assert len(document["notes"]) == 1


@pytest.mark.parametrize("machine", MACHINES)
def test_command_and_page_say_what_stock_is(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    stock = machine_data(machine).stock
    _, out, _ = call(capsys, "--predict", "--machine", machine, "--tokens", "256")
    assert f"stock here: {stock}; ours: " in out
    assert re.search(rf"\| `{machine}` \|.*; stock is {re.escape(stock)} \|", (ROOT / "docs/prediction.md").read_text())
    assert "NVLS off" in machine_data("h200-peer").stock


def test_command_heads_the_split_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "--predict", "--tokens", "16384")
    (head,) = (line for line in out.splitlines() if line.startswith("tokens"))
    assert "best split ms" in head
    assert len(head) <= 80


def test_command_says_of_parts_only_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--predict", "--machine", "h200-peer", "--tokens", "256")
    _, out, _ = call(capsys, *words)
    said = [line for line in out.splitlines() if "off where checked" in line]
    assert [line for line in said if "e2e_tp2" in line] == said[:-1] != []
    parts = [e for e in json.loads(call(capsys, *words, "--json")[1])["errors"] if e["about"] == "parts"]
    worst = max((e["worst"] for e in parts), key=abs)
    mean = sum(e["mean"] * e["rows"] for e in parts) / sum(e["rows"] for e in parts)
    assert f"worst {worst:+.1%}, mean {mean:.1%}" in said[-1]
    assert f"({len(parts)} checks)" in said[-1]
    assert "docs/prediction.md" in out


def test_command_says_that_no_step_of_a_kind_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for machine, unchecked in (("h200-peer", True), ("h100-multimem", False)):
        assert main(["plan", "--preset", "mixtral-8x22b", "--predict", "--machine", machine, "--tokens", "256"]) == 0
        out = capsys.readouterr().out
        assert ("no step of a mixture of experts was checked" in out) == unchecked
        assert ("mixtral-8x22b, tp 8: stock ms" in out) != unchecked


def test_command_takes_the_gemms_of_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shapes = layer_gemms(gemm_shapes(LLAMA, 2))
    source = TableSource(kind="measurement", measured=measured(library=__version__, gemms=shapes, gemm="trt"))
    file = tmp_path / "table.json"
    file.write_text(TuningTable(key=table_key(LLAMA, 2), source=source).model_dump_json())
    words = ("--predict", "--tp", "2", "--tokens", "4096", "--json")
    documents = [json.loads(call(capsys, *words, *more)[1]) for more in ((), ("--table", str(file)))]
    assert [document["machine"]["woven_gemms"] for document in documents] == ["budget", "trt"]
    assert documents[0]["steps"][0]["stock_us"] == documents[1]["steps"][0]["stock_us"]
    assert documents[0]["steps"][0]["even"]["us"] != documents[1]["steps"][0]["even"]["us"]


def test_a_gpu_is_not_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--predict", "--tp", "2", "--tokens", "4096")
    said = "--gpu says whose table is taken; times are those of h200-peer (--machine)"
    notes = [json.loads(call(capsys, *words, "--json", *more)[1])["notes"] for more in ((), ("--gpu", "NVIDIA B200"))]
    assert notes[1] == [said, *notes[0]]
    for more, noted in (((), False), (("--gpu", "NVIDIA B200"), True)):
        out = " ".join(call(capsys, *words, *more)[1].split())
        assert (f"note: {said}" in out) is noted


def test_command_takes_curves_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    curves = json.loads((FOLDER / "gemm_h200.json").read_text())
    for curve in curves["curves"]:
        curve["points"] = [[tokens, 2 * us] for tokens, us in curve["points"]]
    own = tmp_path / "own.json"
    own.write_text(json.dumps({**curves, "source": "twice as slow"}))
    times = []
    for more in ((), ("--gemm", str(own))):
        code, out, _ = call(capsys, "--predict", "--tp", "2", "--tokens", "4096", "--json", *more)
        assert code == 0
        times.append(json.loads(out)["steps"][0]["stock_us"])
    assert 1.5 < times[1] / times[0] < 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tp", "0"), "below 1"),
        (("--tp", "128"), "larger than the model's 64 attention heads"),
        (("--preset", "llama-9"), "no preset called"),
        (("-o", "."), "is a folder"),
    ],
)
def test_bench_gemm_refuses(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gemm", *words]) == 2
    assert message in capsys.readouterr().err


def test_bench_gemm_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("torch") is not None:
        pytest.skip("PyTorch is installed: there may be GPUs")
    assert main(["bench", "gemm"]) == 2
    assert "PyTorch is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--machine", "h200-peer"), "add --predict"),
        (("--gemm", "x.json"), "add --predict"),
        (("--predict", "--machine", "abacus"), "choose one of h200-peer"),
        (("--predict", "--gemm", "none.json"), "cannot be read"),
        (("--predict", "--gemm", str(ROOT / "README.md")), "is no result of bench gemm"),
        (("--predict", "--table", "x.json"), "x.json"),
        (("--predict", "--sms", "66"), "leave out --sms"),
        (("--predict", "--tp", "1"), "no collectives"),
        (("--predict", "--tokens", "0"), "a count is below 1"),
    ],
)
def test_command_refuses(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
