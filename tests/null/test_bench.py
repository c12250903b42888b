"""Benchmarks without GPUs: documented figures are the results, plots are redrawn, bad use is refused."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trtllm_tokenweave.bench.plots import (
    check_markdown,
    draw_kernel,
    e2e_markdown,
    kernel_markdown,
    kernel_rows,
    loopback_markdown,
    overlap_markdown,
    small_markdown,
    stack_markdown,
    stack_ratio,
    sweep_markdown,
    timeline_markdown,
    trace_markdown,
    whole_attention_markdown,
)
from trtllm_tokenweave.bench.timeline import Kernel, is_collective, summary
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.table import TableKey, default_table, load_table, save_table

ROOT = Path(__file__).resolve().parents[2]


def result(name: str) -> Any:
    return json.loads((ROOT / "docs/results" / name).read_text())


def test_figures_of_the_documentation_come_from_the_results() -> None:
    document = (ROOT / "docs/benchmarks.md").read_text()
    kernel = result("kernel_tp2.json")
    assert kernel_markdown(kernel, 8192) in document
    assert overlap_markdown(result("overlap_tp2.json")) in document
    assert loopback_markdown(result("loopback_h200.json"), 4096) in document
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
    faster = {(row["num_tokens"], row["mode"]): f"{row['stock_ms'] / row['woven_ms']:.3f}" for row in rows}
    over = {(row["num_tokens"], row["mode"]): 100 * (row["woven_ms"] / row["no_comm_ms"] - 1) for row in rows}
    for text, counts in (
        ("At 4096 tokens it is {} (eager) and {} times (graph) as fast, at 8192 {} and {};", [4096, 8192]),
        ("at 2048 {} and {}, and at 1024 {} and {}.", [2048, 1024]),
    ):
        assert text.format(*(faster[tokens, mode] for tokens in counts for mode in ("eager", "graph"))) in document
    bounds = [row["stock_ms"] / row["no_comm_ms"] for row in rows if row["num_tokens"] >= 4096]
    assert f"is {min(bounds):.3f} to {max(bounds):.3f} times as fast as stock at 4096 and 8192" in document
    reached = [over[4096, "eager"], over[4096, "graph"], over[2048, "graph"]]
    assert max(reached) <= 0
    text = "4096 tokens ({:.1f} % eager, {:.1f} % graph) and at 2048 in graphs ({:.1f} %)"
    assert text.format(*reached) in document
    missed = [over[2048, "eager"], *(over[tokens, mode] for tokens in (8192, 1024) for mode in ("eager", "graph"))]
    assert min(missed) > 0
    text = "2048 eager ({:+.1f} %), at 8192 ({:+.1f} and {:+.1f} %) and at 1024 ({:+.1f} and {:+.1f} %)"
    assert text.format(*missed) in document
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
    hidden, trt, left, last = [], [], [], []
    for mode in ("eager", "graph"):
        kernels = [Kernel(**kernel) for kernel in stack["timeline"][f"{mode}_kernels"]["woven_budget"]]
        figures = summary(kernels)
        hidden.append(f"{100 * figures['both_us'] / figures['collective_us']:.0f}")
        others = stack["timeline"][mode]["woven_trt"]
        trt.append(f"{100 * others['both_us'] / others['collective_us']:.0f}")
        left.append(f"{(figures['collective_us'] - figures['both_us']) / 1000:.2f}")
        ending = [kernel for kernel in kernels if is_collective(kernel)][-1]
        last.append(f"{(ending.end_us - ending.start_us) / 1000:.2f}")
    assert f"Eager, {hidden[0]} % of the time of the collectives of 4 CTAs lies beside compute" in document
    assert f"and {trt[0]} % of those of 16 CTAs" in document
    assert f"{hidden[1]} and {trt[1]} %." in document
    assert "Of the {} (eager) and {} ms (graph) that 4 CTAs leave, {} and {} ms are".format(*left, *last) in document
    launch = (ROOT / "trtllm_tokenweave/table/launch.py").read_text()
    worst = 0.0
    for tokens, column in itertools.product((1024, 2048, 4096, 8192), ("woven_trt_ms", "woven_budget_ms")):
        times = {row["ctas"]: row[column] for row in stack["sweep"] if row["num_tokens"] == tokens}
        worst = max(worst, times[8] / min(times.values()) - 1)
    assert f"8 are within {100 * worst:.1f} % of the best of 4 to 16" in launch


def test_the_table_of_whole_decoders_names_what_was_measured() -> None:
    names = ("stock", "peer", "fuse_only", "even_split", "tuned_split", "no_comm")
    row = {"num_tokens": 64, "mode": "eager", **{f"{name}_ms": 2.0 for name in names}, "ctas_even": 4, "ctas_tuned": 0}
    table = e2e_markdown({"rows": [row, row | {"mode": "graph", "stock_ms": 3.0}]}, "eager")
    for line in ("| best peer | 2.00 |", "| CTAs: even split | 4 |", "| CTAs: best split | the table's |"):
        assert line in table
    assert "3.00" not in table
    assert "best peer" not in e2e_markdown({"rows": [row | {"peer_ms": None}]}, "eager")


def test_figures_of_real_attention_come_from_their_result() -> None:
    e2e, document = result("e2e_tp2.json"), (ROOT / "docs/benchmarks.md").read_text()
    for table in (e2e_markdown(e2e, "eager"), e2e_markdown(e2e, "graph"), timeline_markdown(e2e)):
        assert table in document
    text, readme = (" ".join(t.split()) for t in (document, (ROOT / "README.md").read_text()))
    rows, graph = e2e["rows"], [row for row in e2e["rows"] if row["mode"] == "graph"]

    def ratios(column: str, over: str, least: int) -> list[float]:
        found = sorted(row[column] / row[over] for row in rows if row["num_tokens"] >= least)
        return [found[0], found[-1]]

    faster = ratios("stock_ms", "tuned_split_ms", 4096)
    assert "the best split is {:.3f} to {:.3f} times as fast as stock".format(*faster) in text
    even = ratios("stock_ms", "even_split_ms", 4096)
    assert "{:.3f} to {:.3f} times with real attention".format(*even) in readme
    assert "the even one {:.3f} to {:.3f}, though they are one split at 4096 and 16384".format(*even) in text
    assert "itself is {:.3f} to {:.3f} times as fast".format(*ratios("stock_ms", "no_comm_ms", 4096)) in text
    slower = [100 * (ratio - 1) for ratio in ratios("tuned_split_ms", "no_comm_ms", 4096)]
    assert "{:.1f} to {:.1f} % slower than no communication from 4096 tokens on".format(*slower) in text
    slower = [100 * (ratio - 1) for ratio in ratios("even_split_ms", "no_comm_ms", 4096)]
    assert "(the even one {:.1f} to {:.1f} %)".format(*slower) in text
    assert "{:.1f} to {:.1f} % with real attention".format(*slower) in readme
    peer = [100 * (ratio - 1) for ratio in ratios("peer_ms", "stock_ms", 0)]
    assert f"at most {-peer[0]:.1f} % faster than stock, and up to {peer[1]:.1f} % slower (1024 tokens)" in text
    worst = 100 * (ratios("fuse_only_ms", "stock_ms", 0)[1] - 1)
    assert f"Fuse only is {worst:.1f} % slower than stock at 1024 tokens eager" in text
    figures = next([r["even_split_ms"], r["stock_ms"], r["no_comm_ms"]] for r in graph if r["num_tokens"] == 4096)
    said = "{:.2f} ms at 4096 tokens, where stock takes {:.2f} and no communication {:.2f};"
    assert said.format(*figures) in readme
    said = "stock takes {:.3f}, {:.3f}, {:.3f}, {:.3f} and {:.3f} times as long as the split step"
    assert said.format(*(row["stock_ms"] / row["even_split_ms"] for row in graph)) in readme
    same = [row for row in rows if (row["prefix_tuned"], row["ctas_tuned"]) == (row["prefix_even"], row["ctas_even"])]
    apart = max(100 * abs(row["tuned_split_ms"] / row["even_split_ms"] - 1) for row in same)
    assert f"lie up to {apart:.1f} % apart" in text
    other = [row for row in rows if row not in same]
    assert {row["num_tokens"] for row in other} == {8192}
    gained = [100 * (1 - row["tuned_split_ms"] / row["even_split_ms"]) for row in other]
    assert "half gain {:.1f} (eager) and {:.1f} % (graph)".format(*gained) in text
    assert max(gained) < apart
    assert max(row["error"] for row in rows) < 0.0175
    memory = {name: engine["memory_bytes"] / 1e9 for name, engine in e2e["engines"].items()}
    said = "stock {stock:.2f} GB, best peer {peer:.2f}, fuse only {fuse_only:.2f}, no communication {no_comm:.2f}, and"
    assert said.format(**memory) + f" the woven engine {memory['woven']:.2f}" in text
    assert f"{memory['woven'] / memory['stock']:.2f} times stock" in text
    traced = e2e["timeline"]["eager"]
    hidden = [
        100 * traced[f"{name}_split"]["both_us"] / traced[f"{name}_split"]["collective_us"]
        for name in ("tuned", "even")
    ]
    assert "{:.0f} and {:.0f} % of the time of the collectives".format(*hidden) in text
    best = traced["tuned_split"]
    assert f"rest of the best split's, {(best['collective_us'] - best['both_us']) / 1000:.2f} ms" in text
    collectives = [k for k in e2e["timeline"]["eager_kernels"]["tuned_split"] if "all_reduce_rms_norm" in k["name"]]
    last = max(collectives, key=lambda kernel: float(kernel["end_us"]))
    assert f"nothing runs beside, is {(last['end_us'] - last['start_us']) / 1000:.2f}." in text
    waits = [traced[f"{name}_split"]["collective_us"] / 1000 for name in ("even", "tuned")]
    assert "{:.2f} and {:.2f} ms of collectives hold waits".format(*waits) in text


def test_figures_of_the_smaller_engines_come_from_their_result() -> None:
    text, rows = " ".join((ROOT / "docs/benchmarks.md").read_text().split()), result("e2e_4096_tp2.json")["rows"]
    eager, graph = [row for row in rows if row["num_tokens"] == 4096]
    assert f"takes {eager['even_split_ms']:.2f} ms (eager) and {graph['even_split_ms']:.2f} (graph)" in text
    assert "{:.3f} and {:.3f} times".format(*(r["stock_ms"] / r["even_split_ms"] for r in (eager, graph))) in text
    again = "{:.3f} and {:.3f}".format(*(r["stock_ms"] / r["tuned_split_ms"] for r in (eager, graph)))
    assert all(r["prefix_tuned"] == r["prefix_even"] for r in (eager, graph))
    assert f"(the same split measured again: {again})" in text
    assert f"no communication ({eager['no_comm_ms']:.2f} and {graph['no_comm_ms']:.2f})" in text
    small = [100 * (r["even_split_ms"] / r["fuse_only_ms"] - 1) for r in rows if r["num_tokens"] == 1024]
    assert "it is {:.1f} and {:.1f} % slower than fuse only".format(*small) in text
    assert f"and took {rows[0]['fuse_only_ms']:.2f} there" in text


def test_figures_of_whole_attention_come_from_their_result() -> None:
    e2e, document = result("e2e_table_tp2.json"), (ROOT / "docs/benchmarks.md").read_text()
    rows, text = e2e["rows"], " ".join(document.split())
    for mode in ("eager", "graph"):
        assert whole_attention_markdown(e2e, mode) in document
    (shipped,) = (ROOT / "tuning/tables").glob("*_h200.json")
    assert load_table(shipped).sha256 != e2e["table"] == result("trace_tp2.json")["table"]
    assert "timeline" not in e2e
    assert max(row["error"] for row in rows) < 0.0175
    by_count = {(row["num_tokens"], row["mode"]): row for row in rows}
    # The table splits neither 1024 nor 2048 tokens; from 4096 on its choice is the even split with the same CTAs.
    for row in rows:
        assert (row["prefix_tuned"] == row["num_tokens"]) == (row["num_tokens"] < 4096)
        even = (row["prefix_even"], row["ctas_even"])
        assert (even == (row["prefix_tuned"], row["ctas_tuned"])) == (row["num_tokens"] >= 4096)

    def percent(column: str, other: str, counts: Sequence[int]) -> list[float]:
        """Of the counts, each eager and as a graph."""
        pairs = [by_count[tokens, mode] for tokens in counts for mode in ("eager", "graph")]
        return [100 * (row[f"{column}_ms"] / row[f"{other}_ms"] - 1) for row in pairs]

    cost = percent("whole_attention_even", "even_split", (2048, 4096, 1024, 8192))
    said = "costs {:.1f} (eager) and {:.1f} % (graph) at 2048 tokens, {:.1f} and {:.1f} % at 4096, "
    said += "{:.1f} and {:.1f} % at 1024, {:.1f} and {:.1f} % at 8192."
    assert said.format(*cost) in text
    slower = percent("whole_attention_even", "fuse_only", (1024, 2048, 4096))
    faster = percent("whole_attention_even", "fuse_only", (8192,))
    assert f"{min(slower):.1f} to {max(slower):.1f} % slower than fuse only up to 4096 tokens" in text
    assert f"and {-max(faster):.1f} to {-min(faster):.1f} % faster at 8192" in text
    apart = percent("tuned_split", "even_split", (4096, 8192))
    assert min(apart) > 0
    assert f"{min(apart):.1f} to {max(apart):.1f} % apart, the table's column the slower one each time" in text
    whole = [abs(share) for share in percent("whole_attention_tuned", "whole_attention_even", (4096, 8192))]
    assert f"with attention whole {min(whole):.1f} to {max(whole):.1f} %" in text
    chosen = percent("tuned_split", "even_split", (2048,))
    assert "fuse-only, {:.1f} (eager) and {:.1f} % (graph) slower than the even split".format(*chosen) in text
    best = percent("tuned_split", "even_split", (1024,))
    assert "at 1024 it is {:.1f} and {:.1f} % faster".format(*(-share for share in best)) in text
    fused = percent("even_split", "fuse_only", (1024,))
    assert "with its 4 CTAs is {:.1f} and {:.1f} % slower than fuse only there".format(*fused) in text
    assert {by_count[tokens, mode]["ctas_even"] for tokens, mode in by_count if tokens < 4096} == {4}
    behind = percent("tuned_split", "no_comm", (2048, 4096, 8192))
    assert f"is {min(behind):.1f} to {max(behind):.1f} % slower than no communication" in text
    assert f"on the same kind of machine, {e2e['date']}, without the peer" in text
    checks = [" ".join(e2e["engines"][name]["checks"]) for name in ("woven", "whole")]
    assert all(f"({n} of 32 collectives have layers" in c for n, c in zip((31, 24), checks, strict=True))
    assert "24 of 32 collectives have layers beside them, where 31 have with attention split" in text
    memory = {name: engine["memory_bytes"] for name, engine in e2e["engines"].items()}
    assert memory["woven"] == memory["whole"]
    assert f"both take {memory['whole'] / 1e9:.2f} GB, {memory['whole'] / memory['stock']:.2f} times stock" in text


def test_figures_of_the_trace_come_from_their_result() -> None:
    trace, document = result("trace_tp2.json"), (ROOT / "docs/benchmarks.md").read_text()
    rows, text = trace["rows"], " ".join(document.split())
    assert trace_markdown(trace) in document
    assert trace["date"] in text
    assert f"splits with {trace['ctas']} CTAs" in text
    assert not any(n for row in rows for n in row["graph_steps"].values())
    assert not any(row["steps"]["decode"] for row in rows)
    assert f"at most {100 * max(row['error'] for row in rows):.1f} % off" in text

    def ratios(column: str, other: str, of: Sequence[Any] = rows) -> list[float]:
        return [row[f"{column}_ms"] / row[f"{other}_ms"] for row in of]

    faster = ratios("stock", "tuned_split")
    assert f"{min(faster):.3f} to {max(faster):.3f} times as fast as stock" in text
    bound = ratios("stock", "no_comm")
    assert f"no communication itself {min(bound):.3f} to {max(bound):.3f} times" in text
    behind = [100 * (ratio - 1) for ratio in ratios("tuned_split", "no_comm")]
    assert min(behind) > 0
    assert f"{min(behind):.1f} to {max(behind):.1f} % slower than no communication" in text
    first, second, third, fourth = (100 * (ratio - 1) for ratio in ratios("tuned_split", "even_split"))
    assert f"At budget 1024 the table's column is {first:.1f} % slower than the even split" in text
    passes = rows[0]["passes_ms"]["tuned_split"]
    assert f"its two passes differ by {100 * (max(passes) / min(passes) - 1):.1f} %" in text
    assert f"at 2048 {-second:.1f} % faster" in text
    assert f"gains {-third:.1f} % over the even one at 4096" in text
    assert abs(fourth) < 0.05
    assert all(row["split_steps"]["tuned_split"] == 0 for row in rows[:2])
    unsplit = [100 * (1 - ratio) for ratio in ratios("tuned_split", "fuse_only", rows[:2])]
    assert "{:.1f} and {:.1f} % faster than the fuse-only engine".format(*unsplit) in text


def test_figures_of_the_step_in_cpp_come_from_their_result() -> None:
    (row,) = result("cpp_step_tp2.json")["rows"]
    said = f"{row['step_ms']:.3f} ms, where `enqueueV3` alone takes {row['enqueue_ms']:.3f}"
    assert said in " ".join((ROOT / "docs/cpp.md").read_text().split())


def test_figures_of_the_tuner_come_from_its_run() -> None:
    check, jitter = result("tune_tp2.json"), result("jitter_tp2.json")["jitter"]
    document = (ROOT / "docs/tuning.md").read_text()
    assert check_markdown(check) in document
    text, readme = (" ".join(t.split()) for t in (document, (ROOT / "README.md").read_text()))
    (shipped,) = (ROOT / "tuning/tables").glob("*_h200.json")
    assert load_table(shipped).sha256 == check["table_sha256"]
    assert f"in {check['gpu_seconds']:.0f} seconds" in text
    over = {row["num_tokens"]: row["chosen_over_best"][1] - 1 for row in check["held_out"]}
    worse = {tokens: 100 * share for tokens, share in over.items() if share > 0.02}
    assert f"{len(over) - len(worse)} of {len(over)} are within 2 % of the exhaustive best." in text
    assert f"{min(worse.values()):.1f} to {max(worse.values()):.1f} % slower" in readme
    assert max(row["chosen_over_fuse_only"][1] for row in check["held_out"]) < 1.01
    for column, said in (("even", "times the even split"), ("fuse_only", "times fuse-only with 132 CTAs")):
        ratios = [row["tuned_ms"] / row[f"{column}_ms"] for row in jitter]
        assert f"{min(ratios):.3f} to {max(ratios):.3f} {said}" in text
    fused = sum(row["tuned"].startswith("fuse") for row in jitter)
    assert f"Of {len(jitter)} choices {fused} are fuse-only" in text


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
        (["loopback", "--ranks", "2,9"], "--ranks: 9 is above 8"),
        (
            ["loopback", "--loaders", "bulk,stream"],
            "'bulk,stream' names another loader than auto, cp_async, bulk",
        ),
        (["loopback", "--ctas", "0"], "--ctas: a number is below 1"),
        (["plot", "missing.json"], "cannot be read"),
        (["plot", "EMPTY"], "is no result that has a plot. Fix: give the JSON of bench kernel, stack, e2e or trace"),
        (["plot", "TEXT"], "no result that has a plot: it is no JSON"),
        (["plot", "DEEP"], "no result that has a plot: it is nested too deeply"),
        (["plot", "missing.json"], "Fix: check the path"),
        (["plot", "OVERLAP"], "is no result that has a plot. Fix: give the JSON of bench kernel"),
        (["plot", "GOOD", "--hidden", "17"], "no rows of hidden size 17. Fix: give one that it has: 4096, 5120, 8192"),
        (["kernel", "--tokens", "x"], "no list of numbers"),
        (["kernel", "--tokens", "1024:512:256"], "no list of numbers. Fix: give numbers above 0, separated by commas"),
        (["kernel", "--tokens", "0"], "--tokens: a number is below 1. Fix: give numbers above 0"),
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
        (["e2e", "--table", "FIT", "-o", "FIT"], "is the table. Fix: write the result to another file"),
    ],
)
def test_bad_use(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    table = tmp_path / "table.json"
    save_table(default_table(TableKey(tp_size=2, hidden_size=64, dtype="bfloat16")), table)
    fit = tmp_path / "fit.json"
    save_table(default_table(TableKey(tp_size=2, hidden_size=8192, dtype="bfloat16")), fit)
    text = tmp_path / "text.json"
    text.write_text("rows")
    names = {
        "TABLE": str(table),
        "FIT": str(fit),
        "EMPTY": str(empty),
        "TEXT": str(text),
        "DEEP": str(deep),
        "GOOD": str(ROOT / "docs/results/kernel_tp2.json"),
        "OVERLAP": str(ROOT / "docs/results/overlap_tp2.json"),
    }
    assert main(["bench", *(names.get(word, word) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_a_report_that_cannot_be_written_leaves_no_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, plots = str(ROOT / "docs/results/kernel_tp2.json"), tmp_path / "plots"
    assert main(["bench", "plot", source, "-o", str(plots), "--report", "/proc/x.html"]) == 2
    assert "error: /proc: cannot be written" in capsys.readouterr().err
    assert not plots.exists()


def test_a_report_in_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "kernel_tp2.json"
    copy.write_text((ROOT / "docs/results/kernel_tp2.json").read_text())
    assert main(["bench", "plot", str(copy), "--report", str(tmp_path / "a" / "x.html")]) == 2
    assert f"the folder {tmp_path / 'a'} does not exist" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [copy]


@pytest.mark.parametrize("report", ["kernel.json", "link.json", "other.json", "kernel.png"])
def test_a_report_replaces_no_result(report: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy, other = tmp_path / "kernel.json", tmp_path / "other.json"
    for path in (copy, other):
        path.write_text((ROOT / "docs/results/kernel_tp2.json").read_text())
    (tmp_path / "link.json").symlink_to(copy)
    before = other.read_text()
    assert main(["bench", "plot", str(copy), "--report", str(tmp_path / report)]) == 2
    assert f"error: --report: {tmp_path / report} is " in capsys.readouterr().err
    assert copy.read_text() == other.read_text() == before
    assert not list(tmp_path.glob("*.svg"))
    page = tmp_path / "page.html"
    for _ in range(2):  # a page may be replaced
        assert main(["bench", "plot", str(copy), "--report", str(page)]) == 0


def test_a_result_with_the_name_of_a_plot_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "kernel.png"
    copy.write_text((ROOT / "docs/results/kernel_tp2.json").read_text())
    assert main(["bench", "plot", str(copy)]) == 2
    assert "is the name of one of its plots" in capsys.readouterr().err
    assert json.loads(copy.read_text())


def test_a_kernel_without_peers_is_drawn() -> None:
    variants = result("kernel_variants_tp2.json")
    assert {row["best_peer"] for row in kernel_rows(variants, 8192)} == {None}
    drawn = draw_kernel(variants, 8192).svg
    # matplotlib keeps each text as a comment beside its outlines.
    assert b"fused (ours, best CTAs)" in drawn
    assert b"best peer" not in drawn
    assert b"best peer" in draw_kernel(result("kernel_tp2.json"), 8192).svg


def test_plots_of_a_result_in_a_folder_that_takes_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (ROOT / "docs/results/kernel_tp2.json").open() as file:
        unwritable = f"/proc/self/fd/{file.fileno()}"  # its folder takes no files, not even root's
        assert main(["bench", "plot", unwritable]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: /proc/self/fd: cannot be written")
        assert "Fix: choose another folder for the plots with -o DIR" in err
        folder = tmp_path / "plots"
        assert main(["bench", "plot", unwritable, "-o", str(folder)]) == 0
    assert {path.suffix for path in folder.iterdir()} == {".png", ".svg"}
    (tmp_path / "file").touch()
    assert main(["bench", "plot", str(ROOT / "docs/results/kernel_tp2.json"), "-o", str(tmp_path / "file")]) == 2
    assert f"{tmp_path / 'file'}: is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["kernel", "overlap"])
def test_without_gpus(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("torch") is not None:
        pytest.skip("PyTorch is installed: there may be GPUs")
    assert main(["bench", name]) == 2
    assert "PyTorch is not installed" in capsys.readouterr().err
