"""Redraw the benchmark's plots from their JSON, and the tables of the documentation (pure, no GPU)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_tokenweave.picture import Picture, drawing_style, save_figure

_STYLE: Mapping[str, tuple[str, str]] = {
    "fused (ours, best CTAs)": ("#2f6db5", "-"),
    "NCCL, then norm": ("#d9772b", "-"),
    "best peer": ("#8a3ea8", "-"),
    "floor: pull + push, all SMs": ("#5f6b7a", "--"),
}


_ENGINES = {
    "fuse_only": "fuse only",
    "woven_trt": "woven, TensorRT's GEMMs",
    "woven_budget": "woven, budget GEMMs",
    "no_comm": "no communication",
}

_E2E = {
    "stock_ms": "stock",
    "peer_ms": "best peer",
    "fuse_only_ms": "fuse only",
    "even_split_ms": "even split",
    "tuned_split_ms": "best split: the table's, or of those tried",
    "whole_attention_even_ms": "even split, attention left whole",
    "whole_attention_tuned_ms": "table's or best split, attention left whole",
    "no_comm_ms": "no communication",
}


def kernel_rows(document: Mapping[str, Any], hidden: int) -> list[dict[str, Any]]:
    """Rows of one hidden size, by token count, each with its best peer (None where peers were not timed)."""
    rows = [dict(row) for row in document["rows"] if row["hidden"] == hidden]
    for row in rows:
        row["best_peer"] = min(row["peers"], key=row["peers"].get, default=None)
        row["best_peer_us"] = row["peers"].get(row["best_peer"])
    return sorted(rows, key=lambda row: int(row["num_tokens"]))


def kernel_markdown(document: Mapping[str, Any], hidden: int) -> str:
    """The kernel's figures as a Markdown table; every number is the JSON's, or a ratio of two of them."""
    rows = kernel_rows(document, hidden)
    lines: list[tuple[str, Sequence[str]]] = [
        ("tokens", [str(r["num_tokens"]) for r in rows]),
        ("fused, us", [f"{r['fused_us']:.1f}" for r in rows]),
        ("at CTAs", [str(r["ctas"]) for r in rows]),
        ("NCCL + norm / fused", [f"{r['nccl_norm_us'] / r['fused_us']:.2f}" for r in rows]),
        ("best peer / fused", [f"{r['best_peer_us'] / r['fused_us']:.2f}" for r in rows]),
        ("fused / floor", [f"{r['fused_us'] / r['floor_us']:.2f}" for r in rows]),
        ("16 CTAs / best", [f"{r['sweep']['16'] / r['fused_us']:.2f}" for r in rows]),
        ("8 CTAs / best", [f"{r['sweep']['8'] / r['fused_us']:.2f}" for r in rows]),
        ("staged, us", [f"{r['staged_us']:.1f}" for r in rows]),
    ]
    return _markdown(lines)


def overlap_markdown(document: Mapping[str, Any]) -> str:
    """The overlap's figures as a Markdown table."""
    rows = [row for row in document["rows"] if row["ctas"] <= 16]
    lines = [
        ("CTAs of the collective", [str(r["ctas"]) for r in rows]),
        ("eager, us", [f"{r['eager_us']:.0f}" for r in rows]),
        ("CUDA graph, us", [f"{r['graph_us']:.0f}" for r in rows]),
        ("one after the other, us", [f"{r['sequence_us']:.0f}" for r in rows]),
        ("eager / GEMM alone", [f"{r['eager_us'] / document['gemm_us']:.3f}" for r in rows]),
    ]
    return _markdown(lines)


def loopback_markdown(document: Mapping[str, Any], num_tokens: int) -> str:
    """Microseconds of virtual ranks at one token count as a Markdown table; a line: so many ranks, a loader."""
    rows = [row for row in document["rows"] if row["num_tokens"] == num_tokens]
    columns = sorted({row["ctas"] for row in rows})
    us = {(row["ranks"], row["loader"], row["ctas"]): row["us"] for row in rows}
    kinds = dict.fromkeys((ranks, loader) for ranks, loader, _ in us)
    lines = [("CTAs of each rank", [str(ctas) for ctas in columns])]
    for ranks, loader in kinds:
        lines.append((f"{ranks} ranks, `{loader}`, us", [f"{us[ranks, loader, ctas]:.0f}" for ctas in columns]))
    return _markdown(lines)


def _markdown(lines: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A table of named lines, the first of which is its head."""
    head, *body = (f"| {name} | {' | '.join(cells)} |" for name, cells in lines)
    return "\n".join([head, "|---" * (len(lines[0][1]) + 1) + "|", *body]) + "\n"


def draw_kernel(document: Mapping[str, Any], hidden: int) -> Picture:
    """Time over the floor by token count; peers only where all rows have them."""
    from matplotlib.figure import Figure

    rows = kernel_rows(document, hidden)
    tokens = [row["num_tokens"] for row in rows]
    floor = [row["floor_us"] for row in rows]
    curves = {
        "fused (ours, best CTAs)": [row["fused_us"] for row in rows],
        "NCCL, then norm": [row["nccl_norm_us"] for row in rows],
        "best peer": [row["best_peer_us"] for row in rows],
        "floor: pull + push, all SMs": floor,
    }
    with drawing_style():
        figure = Figure(figsize=(8, 4.5), facecolor="white", layout="constrained")
        axes = figure.add_subplot()
        for name, values in curves.items():
            if None in values:
                continue
            color, line = _STYLE[name]
            axes.plot(tokens, [v / f for v, f in zip(values, floor, strict=True)], line, color=color, label=name, lw=2)
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [str(t) for t in tokens])
        axes.set_ylim(0.9, None)
        axes.set_xlabel(f"tokens (hidden {hidden}, bf16, two GPUs)")
        axes.set_ylabel("time over the floor")
        axes.set_title("AllReduce + residual add + RMSNorm", loc="left", fontweight="bold")
        machine = document["machine"]
        axes.text(
            1, 1.02, f"{machine['gpus'][0]}, {document['date']}", transform=axes.transAxes, ha="right", fontsize=8
        )
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        return save_figure(figure, f"Time over the floor by tokens, hidden size {hidden}.", dpi=130)


def stack_row(document: Mapping[str, Any], tokens: int, mode: str, gemm: str) -> Mapping[str, Any]:
    """A row of `bench stack`."""
    rows: Sequence[Mapping[str, Any]] = document["rows"]
    return next(r for r in rows if (r["num_tokens"], r["mode"], r["gemm"]) == (tokens, mode, gemm))


def stack_ratio(document: Mapping[str, Any], tokens: int, mode: str, column: str, gemm: str = "trt") -> float:
    """A column of `bench stack` over the stock engine's, both of one row."""
    row = stack_row(document, tokens, mode, gemm)
    return float(row[column] / row["stock_ms"])


def stack_markdown(document: Mapping[str, Any]) -> str:
    """The steps of `bench stack` that are split, as a table for the documentation."""
    counts = sorted({r["num_tokens"] for r in document["rows"]})
    lines = [("", [str(n) for n in counts])]
    columns = (
        ("fuse only", "fuse_only_ms", "trt"),
        ("no communication", "no_comm_ms", "trt"),
        ("woven, TensorRT's GEMMs", "woven_ms", "trt"),
        ("woven, budget GEMMs", "woven_ms", "budget"),
    )
    for title, _, gemm in columns[2:]:
        ctas = [str(stack_row(document, n, "graph", gemm)["ctas"]) for n in counts]
        lines.append((f"CTAs of the collectives: {title}", ctas))
    for mode in ("eager", "graph"):
        stock = {r["num_tokens"]: r["stock_ms"] for r in document["rows"] if r["mode"] == mode}
        lines.append((f"{mode}: stock, ms", [f"{stock[n]:.1f}" for n in counts]))
        for title, column, gemm in columns:
            ratios = [f"{stack_ratio(document, n, mode, column, gemm):.3f}" for n in counts]
            lines.append((f"{mode}: {title} / stock", ratios))
        bound = [stack_row(document, n, mode, "budget") for n in counts]
        over = [_over(r["woven_ms"], r["no_comm_ms"]) for r in bound]
        lines.append((f"{mode}: woven, budget GEMMs, over no communication", over))
    return _markdown(lines)


def _over(time: float, other: float) -> str:
    """How much longer ``time`` is, in percent."""
    return f"{time / other - 1:+.1%}".replace("%", " %")


def e2e_markdown(document: Mapping[str, Any], mode: str) -> str:
    """The steps of `bench e2e` in one mode as a table for the documentation."""
    rows = [r for r in document["rows"] if r["mode"] == mode]
    lines = [(f"ms a step, {mode}", [str(r["num_tokens"]) for r in rows])]
    measured = {column: title for column, title in _E2E.items() if rows[0].get(column) is not None}
    lines += [(title, [f"{r[column]:.2f}" for r in rows]) for column, title in measured.items()]
    for column, title in (("ctas_even", "even split"), ("ctas_tuned", "best split")):
        if column in rows[0]:
            lines.append((f"CTAs: {title}", [str(r[column] or "the table's") for r in rows]))
    if "prefix_tuned" in rows[0]:
        lines.append(("tokens of the prefix half: best split", [str(r["prefix_tuned"]) for r in rows]))
    for title, column in (("best split", "tuned_split_ms"), ("no communication", "no_comm_ms")):
        lines.append((f"stock / {title}", [f"{r['stock_ms'] / r[column]:.3f}" for r in rows]))
    for title, column in (("no communication", "no_comm_ms"), ("fuse only", "fuse_only_ms")):
        lines.append((f"best split, over {title}", [_over(r["tuned_split_ms"], r[column]) for r in rows]))
    return _markdown(lines)


def whole_attention_markdown(document: Mapping[str, Any], mode: str) -> str:
    """Attention split beside attention whole, of `bench e2e` in one mode with a table, for the documentation."""
    rows = [r for r in document["rows"] if r["mode"] == mode]
    lines = [(f"ms a step, {mode}", [str(r["num_tokens"]) for r in rows])]
    for title, column in (
        ("stock", "stock_ms"),
        ("fuse only", "fuse_only_ms"),
        ("even split", "even_split_ms"),
        ("even split, attention whole", "whole_attention_even_ms"),
        ("the table's choice", "tuned_split_ms"),
        ("the table's choice, attention whole", "whole_attention_tuned_ms"),
        ("no communication", "no_comm_ms"),
    ):
        lines.append((title, [f"{r[column]:.2f}" for r in rows]))
    for title, column, other in (
        ("even split: attention whole, over split", "whole_attention_even_ms", "even_split_ms"),
        ("the table's choice: attention whole, over split", "whole_attention_tuned_ms", "tuned_split_ms"),
        ("even split, attention whole, over fuse only", "whole_attention_even_ms", "fuse_only_ms"),
        ("the table's choice, over even split", "tuned_split_ms", "even_split_ms"),
        ("the table's choice, over no communication", "tuned_split_ms", "no_comm_ms"),
    ):
        lines.append((title, [_over(r[column], r[other]) for r in rows]))
    return _markdown(lines)


def trace_markdown(document: Mapping[str, Any]) -> str:
    """The budgets of `bench trace` with a table, as a table for the documentation."""
    rows = document["rows"]
    lines = [("most tokens of a step", [str(r["max_num_tokens"]) for r in rows])]
    engines = {
        "stock": "stock",
        "fuse only": "fuse_only",
        "even split": "even_split",
        "the table's split": "tuned_split",
        "no communication": "no_comm",
    }
    lines += [(f"{title}, tokens/s", [f"{r['tokens_per_s'][e]:.0f}" for r in rows]) for title, e in engines.items()]
    for title, engine in list(engines.items())[1:]:
        lines.append((f"stock / {title}", [f"{r['stock_ms'] / r[f'{engine}_ms']:.3f}" for r in rows]))
    for title in ("even split", "no communication"):
        over = [_over(r["tuned_split_ms"], r[f"{engines[title]}_ms"]) for r in rows]
        lines.append((f"the table's split, over {title}", over))
    lines.append(("steps", [str(sum(r["steps"].values())) for r in rows]))
    split = [f"{r['split_steps']['even_split']}, {r['split_steps']['tuned_split']}" for r in rows]
    return _markdown([*lines, ("of them split: even, the table's", split)])


def check_markdown(document: Mapping[str, Any]) -> str:
    """A tuned table at token counts that were not tuned, as a table for the documentation: medians of pairs."""
    rows = document["held_out"]
    lines = [("tokens", [str(r["num_tokens"]) for r in rows])]
    lines += [(name, [r[name] for r in rows]) for name in ("chosen", "best")]
    for title, column in (("best", "chosen_over_best"), ("fuse only", "chosen_over_fuse_only")):
        lines.append((f"chosen / {title}", [f"{r[column][1]:.3f}" for r in rows]))
    return _markdown(lines)


def sweep_markdown(document: Mapping[str, Any]) -> str:
    """The sweep of `bench stack` as a table for the documentation: milliseconds by CTAs of the collectives."""
    counts = sorted({r["num_tokens"] for r in document["sweep"]})
    lines = [("", [str(n) for n in counts])]
    for title, column in (("budget GEMMs", "woven_budget_ms"), ("TensorRT's GEMMs", "woven_trt_ms")):
        for ctas in sorted({r["ctas"] for r in document["sweep"]}):
            times = {r["num_tokens"]: r[column] for r in document["sweep"] if r["ctas"] == ctas}
            lines.append((f"{title}, {ctas} CTAs, ms", [f"{times[n]:.2f}" for n in counts]))
    return _markdown(lines)


def timeline_markdown(document: Mapping[str, Any]) -> str:
    """Where one step's time went, milliseconds: every figure of the timelines of `bench stack` and `bench e2e`."""
    traced = document["timeline"]
    lines = [("one step, ms", ["whole", "compute", "collectives", "both at once", "neither"])]
    for mode in ("eager", "graph"):
        for name, figures in traced.get(mode, {}).items():
            cells = [figures[f"{part}_us"] / 1000 for part in ("whole", "compute", "collective", "both", "idle")]
            title = _ENGINES.get(name) or _E2E.get(f"{name}_ms", name)
            lines.append((f"{mode}: {title}", [f"{cell:.2f}" for cell in cells]))
    return _markdown(lines)


def small_markdown(document: Mapping[str, Any]) -> str:
    """The steps of `bench stack` that are not split, as a table for the documentation."""
    rows = document["small"]
    lines = [("tokens", [str(r["num_tokens"]) for r in rows])]
    for title, name in (("fuse only", "fuse_only"), ("woven", "woven_trt")):
        for what, column in (("graph, ms", "graph_ms"), ("enqueue on the CPU, ms", "enqueue_ms")):
            lines.append((f"{title}, {what}", [f"{r[f'{name}_{column}']:.2f}" for r in rows]))
    return _markdown(lines)
