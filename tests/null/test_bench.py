"""Benchmarks without GPUs: documented figures are the results, plots are redrawn, bad use is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from trtllm_tokenweave.bench.plots import (
    draw_kernel,
    kernel_markdown,
    kernel_rows,
    overlap_markdown,
    small_markdown,
    stack_markdown,
    stack_ratio,
)
from trtllm_tokenweave.cli.app import main

ROOT = Path(__file__).resolve().parents[2]


def result(name: str) -> Any:
    return json.loads((ROOT / "docs/results" / name).read_text())


def test_figures_of_the_documentation_come_from_the_results() -> None:
    document = (ROOT / "docs/benchmarks.md").read_text()
    kernel = result("kernel_tp2.json")
    assert kernel_markdown(kernel, 8192) in document
    assert overlap_markdown(result("overlap_tp2.json")) in document
    row = next(r for r in kernel_rows(kernel, 8192) if r["num_tokens"] == 4096)
    assert f"({row['staged_16_ctas_us']} against {row['nccl_norm_us']} us there)" in document
    assert kernel["date"] in document
    readme, overlap = (ROOT / "README.md").read_text(), result("overlap_tp2.json")
    beside = min(r["eager_us"] for r in overlap["rows"])
    for figure in (row["fused_us"], round(row["nccl_norm_us"], 1), overlap["gemm_us"], beside):
        assert f" {figure}" in readme.replace("\n", " ")


def test_figures_of_the_stack_come_from_its_result() -> None:
    stack, document = result("stack_tp2.json"), (ROOT / "docs/benchmarks.md").read_text()
    assert stack_markdown(stack) in document
    assert small_markdown(stack) in document
    readme = (ROOT / "README.md").read_text().replace("\n", " ")
    for tokens, column in ((8192, "woven_ms"), (4096, "woven_ms"), (2048, "woven_ms"), (4096, "no_comm_ms")):
        assert f"{stack_ratio(stack, tokens, 'graph', column):.3f} " in readme
    assert all(row["error"] < 0.0165 for row in stack["rows"])


def test_plot_of_the_documentation_is_redrawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = draw_kernel(result("kernel_tp2.json"), 8192)
    assert drawn.png.startswith(b"\x89PNG")
    assert b"<svg" in drawn.svg
    copy = tmp_path / "kernel_tp2.json"
    copy.write_text((ROOT / "docs/results/kernel_tp2.json").read_text())
    assert main(["bench", "plot", str(copy), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["written"]
    assert {Path(path).name for path in written} == {"kernel_tp2.png", "kernel_tp2.svg"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plot", "missing.json"], "cannot be read"),
        (["plot", "EMPTY"], "no result of bench kernel"),
        (["plot", "DEEP"], "no result of bench kernel"),
        (["plot", "GOOD", "--hidden", "17"], "no rows of hidden size 17"),
        (["kernel", "--tokens", "x"], "no list of numbers"),
        (["kernel", "--hidden", "0"], "below 1"),
        (["kernel", "-o", "."], "is a folder"),
        (["stack", "--ctas", "15"], "ctas: 15 is odd"),
        (["stack", "--sweep-ctas", "4,5"], "ctas: 5 is odd"),
        (["stack", "--gemm-sms", "-3"], "gemm_sms: input should be greater"),
        (["stack", "--offset", "3"], "split_offset: 3 is not a multiple of 8"),
        (["stack", "--gemm", "trt,trt"], "neither trt, budget nor both"),
        (["stack", "--preset", "nope"], "no preset called 'nope'"),
    ],
)
def test_bad_use(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    names = {"EMPTY": str(empty), "DEEP": str(deep), "GOOD": str(ROOT / "docs/results/kernel_tp2.json")}
    assert main(["bench", *(names.get(word, word) for word in words)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["kernel", "overlap"])
def test_without_gpus(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("torch") is not None:
        pytest.skip("PyTorch is installed: there may be GPUs")
    assert main(["bench", name]) == 2
    assert "PyTorch is not installed" in capsys.readouterr().err
