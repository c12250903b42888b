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
    sweep_markdown,
    timeline_markdown,
)
from trtllm_tokenweave.bench.timeline import Kernel, is_collective, summary
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.table import TableKey, default_table, save_table

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
    variants = {r["num_tokens"]: r["sweeps"] for r in result("kernel_variants_tp2.json")["rows"]}
    text = " ".join(document.split())
    for tokens, ctas in ((64, "64"), (128, "64"), (256, "132"), (64, "16")):
        assert all(str(variants[tokens][loader][ctas]) in text for loader in ("push", "auto"))
    stream, bulk = variants[4096]["stream"], variants[4096]["bulk"]
    assert f"{stream['8']} against {bulk['8']} us with 8 CTAs" in text
    best = min(us for sweep in variants[4096].values() for us in sweep.values())
    assert f"12 CTAs reach {stream['12'] / best:.2f} of the best" in text
    readme, overlap = (ROOT / "README.md").read_text(), result("overlap_tp2.json")
    beside = min(r["eager_us"] for r in overlap["rows"])
    for figure in (row["fused_us"], round(row["nccl_norm_us"], 1), overlap["gemm_us"], beside):
        assert f" {figure}" in readme.replace("\n", " ")


def test_figures_of_the_stack_come_from_its_result() -> None:
    stack, document = result("stack_tp2.json"), (ROOT / "docs/benchmarks.md").read_text()
    assert stack_markdown(stack) in document
    assert small_markdown(stack) in document
    assert sweep_markdown(stack) in document
    assert timeline_markdown(stack) in document
    readme = " ".join((ROOT / "README.md").read_text().split())
    woven, bound = (
        [f"{stack_ratio(stack, tokens, 'graph', column, 'budget'):.3f}" for tokens in (8192, 4096, 2048, 1024)]
        for column in ("woven_ms", "no_comm_ms")
    )
    for text in (
        "{} times stock at 8192 tokens, {} at 4096, {} at 2048 and {} at 1024".format(*woven),
        "no communication at all takes {}, {}, {} and {}".format(*bound),
    ):
        assert text in readme
    assert all(row["error"] < 0.0165 for row in stack["rows"])


def test_text_about_the_stack_is_its_result() -> None:
    stack, document = result("stack_tp2.json"), " ".join((ROOT / "docs/benchmarks.md").read_text().split())
    rows = [row for row in stack["rows"] if row["gemm"] == "budget"]
    faster = [row["stock_ms"] / row["woven_ms"] for row in rows]
    assert (round(min(faster), 2), round(max(faster), 2)) == (1.07, 1.09)
    assert "it is 1.07 times (8192 tokens) to 1.09 times (2048 tokens) as fast" in document
    over = [(row["num_tokens"] == 1024, 100 * (row["woven_ms"] / row["no_comm_ms"] - 1)) for row in rows]
    edges = [edge([share for small, share in over if small is at]) for at in (False, True) for edge in (min, max)]
    assert "by {:.1f} to {:.1f} % from 2048 tokens on, by {:.1f} to {:.1f} % at 1024".format(*edges) in document
    memory = {name: engine["memory_bytes"] for name, engine in stack["engines"].items()}
    shares = {name: f"{bytes_ / memory['stock']:.2f}" for name, bytes_ in memory.items()}
    text = "fuse only {fuse_only}, woven {woven_trt} with TensorRT's GEMMs and {woven_budget} with budget GEMMs"
    assert text.format(**shares) in document
    assert f"no communication {shares['no_comm']}." in document
    for name, text in (
        ("graph_ms", "cost the GPU {:.2f} to {:.2f} times"),
        ("enqueue_ms", "and the CPU {:.2f} to {:.2f} times"),
    ):
        ratios = [row[f"woven_trt_{name}"] / row[f"fuse_only_{name}"] for row in stack["small"]]
        assert text.format(min(ratios), max(ratios)) in document
    assert f"{stack['counters']['staged']} copied" in document
    hidden, left, last = [], [], []
    for mode in ("eager", "graph"):
        kernels = [Kernel(**kernel) for kernel in stack["timeline"][f"{mode}_kernels"]["woven_budget"]]
        figures = summary(kernels)
        hidden.append(f"{figures['both_us'] / figures['collective_us']:.2f}")
        left.append(f"{(figures['collective_us'] - figures['both_us']) / 1000:.2f}")
        ending = [kernel for kernel in kernels if is_collective(kernel)][-1]
        last.append(f"{(ending.end_us - ending.start_us) / 1000:.2f}")
    assert hidden == ["0.95", "0.95"]
    assert "95 % of the time of the collectives of 4 CTAs lies beside compute" in document
    assert "Of the {} (eager) and {} ms (graph) that 4 CTAs leave, {} and {} ms are".format(*left, *last) in document
    beyond = [f"{row['woven_ms'] - row['no_comm_ms']:.2f}" for row in rows if row["num_tokens"] == 4096]
    assert "no communication in the rows above, {} and {} ms".format(*beyond) in document


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
        (["plot", "EMPTY"], "no result with a plot: it has no 'rows'"),
        (["plot", "TEXT"], "no result with a plot: it is no JSON"),
        (["plot", "DEEP"], "no result with a plot: it is nested too deeply"),
        (["plot", "GOOD", "--hidden", "17"], "no rows of hidden size 17"),
        (["kernel", "--tokens", "x"], "no list of numbers"),
        (["kernel", "--hidden", "0"], "below 1"),
        (["kernel", "--ctas", "4,0"], "below 1"),
        (["kernel", "--loaders", "auto,dma"], "another loader than auto, cp_async"),
        (["kernel", "-o", "."], "is a folder"),
        (["stack", "--ctas", "15"], "ctas: 15 is odd"),
        (["stack", "--sweep-ctas", "4,5"], "ctas: 5 is odd"),
        (["stack", "--gemm-sms", "-3"], "gemm_sms: input should be greater"),
        (["stack", "--offset", "3"], "split_offset: 3 is not a multiple of 8"),
        (["stack", "--gemm", "trt,trt"], "neither trt, budget nor both"),
        (["stack", "--preset", "nope"], "no preset called 'nope'"),
        (["stack", "--table", "nope.json"], "nope.json: cannot be read"),
        (["stack", "--table", "TABLE"], "key.hidden_size: made for hidden_size 64"),
    ],
)
def test_bad_use(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    table = tmp_path / "table.json"
    save_table(default_table(TableKey(tp_size=2, hidden_size=64, dtype="bfloat16")), table)
    text = tmp_path / "text.json"
    text.write_text("rows")
    names = {
        "TABLE": str(table),
        "EMPTY": str(empty),
        "TEXT": str(text),
        "DEEP": str(deep),
        "GOOD": str(ROOT / "docs/results/kernel_tp2.json"),
    }
    assert main(["bench", *(names.get(word, word) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_a_report_in_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "kernel_tp2.json"
    copy.write_text((ROOT / "docs/results/kernel_tp2.json").read_text())
    assert main(["bench", "plot", str(copy), "--report", str(tmp_path / "a" / "x.html")]) == 2
    assert f"the folder {tmp_path / 'a'} does not exist" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [copy]


@pytest.mark.parametrize("name", ["kernel", "overlap"])
def test_without_gpus(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("torch") is not None:
        pytest.skip("PyTorch is installed: there may be GPUs")
    assert main(["bench", name]) == 2
    assert "PyTorch is not installed" in capsys.readouterr().err
