"""Plots of the tuner's results and of steps against stock, from their JSON (pure, no GPU)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Any

from trtllm_tokenweave.bench.results import CHECK, JITTER, STACK, TRACE, TUNE, Kind, kind_of
from trtllm_tokenweave.picture import Picture, drawing_style, save_figure
from trtllm_tokenweave.schedule import DEFAULT_GRANULARITY, split_point
from trtllm_tokenweave.waves import GemmShape, Tile, wave_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Document = Mapping[str, Any]
_COLORS = ("#2f6db5", "#d9772b", "#8a3ea8", "#3b8f4d", "#b03a48", "#c2a12c", "#5f6b7a")
_TITLES = {
    "stock": "stock",
    "fuse_only": "fuse only",
    "woven": "woven",
    "even": "even split",
    "tuned": "tuned split",
    "no_comm": "no communication",
    "peer": "best peer kernel",
}
#: Curves of one plot of CTAs: more could not be told apart.
_MAX_CURVES = 6


def _figure(title: str, draw: Callable[[Axes], None], caption: str) -> Picture:
    from matplotlib.figure import Figure

    with drawing_style():
        figure = Figure(figsize=(8, 4.5), facecolor="white", layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
        return save_figure(figure, caption, dpi=130)


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)


def tune_pictures(document: Document) -> dict[str, Picture]:
    """Pictures of the file beside a tuned table, by name: waves, heat map, CTAs.

    Args:
        document: A ``*.measurements.json``.
    """
    found = {"waves": draw_waves(document), "heat_map": draw_heat_map(document)}
    ctas = draw_ctas(document)
    return found if ctas is None else {**found, "ctas": ctas}


def _chosen(bucket: Document) -> Document:
    return next(c for c in bucket["candidates"] if c["name"] == bucket["chosen"])


def draw_waves(document: Document) -> Picture:
    """Waves of each GEMM by the tokens of a half, on the SMs that are left, with the halves of the chosen splits."""
    measured = document["measured"]
    shapes = [GemmShape(name, "mlp", n=n, k=k) for name, (n, k) in measured["gemms"].items()]
    splits = [(b["num_tokens"], _chosen(b)) for b in document["buckets"] if _chosen(b)["offset"] is not None]
    used = [max(c["attention_ctas"], c["mlp_ctas"]) for _, c in splits]
    left = measured["sms"] - (round(statistics.median(used)) // 2 * 2 if used else 0)
    longest = max(b["num_tokens"] for b in document["buckets"])
    tokens = range(32, longest * 3 // 4 + 1, 32)
    prefixes = [split_point(n, DEFAULT_GRANULARITY, c["offset"]) for n, c in splits]
    halves = {"prefix": prefixes, "suffix": [n - p for (n, _), p in zip(splits, prefixes, strict=True)]}

    def waves(shape: GemmShape, count: int) -> int:
        return wave_count(shape.tiles(count, Tile()), left)

    def draw(axes: Axes) -> None:
        for shape, color in zip(shapes, _COLORS, strict=False):
            axes.step(tokens, [waves(shape, n) for n in tokens], color=color, label=shape.name, lw=1.2)
            for (name, counts), marker in zip(halves.items(), ("o", "x"), strict=True):
                label = f"chosen {name} halves" if shape is shapes[-1] else None
                heights = [waves(shape, n) for n in counts]
                axes.plot(counts, heights, marker, color=color, ms=4, label=label, ls="none")
        _finish(axes, f"tokens of a half (waves on {left} of {measured['sms']} SMs, tiles of 128 x 256)", "waves")

    return _figure("Waves of a layer's GEMMs, and the halves that were chosen", draw, "Waves by tokens of a half.")


def draw_heat_map(document: Document) -> Picture:
    """The fastest candidate of each offset over fuse-only, by tokens; what was not measured is blank."""
    buckets = document["buckets"]
    offsets = sorted({c["offset"] for b in buckets for c in b["candidates"] if c["offset"] is not None})

    def ratio(bucket: Document, offset: int) -> float:
        times = {c["name"]: c["median_ms"] for c in bucket["candidates"] if "median_ms" in c}
        at = [times[c["name"]] for c in bucket["candidates"] if c["offset"] == offset and c["name"] in times]
        return min(at) / times[bucket["fuse_only"]] if at else float("nan")

    grid = [[ratio(bucket, offset) for bucket in buckets] for offset in offsets]

    def draw(axes: Axes) -> None:
        tokens = [b["num_tokens"] for b in buckets]
        mesh = axes.pcolormesh(_edges(tokens), _edges(offsets), grid, cmap="RdYlBu_r", vmin=0.9, vmax=1.1)
        axes.figure.colorbar(mesh, ax=axes, label="time over fuse-only")
        splits = [(b["num_tokens"], _chosen(b)["offset"]) for b in buckets if _chosen(b)["offset"] is not None]
        axes.plot([n for n, _ in splits], [o for _, o in splits], "ko", ms=4, label="chosen")
        _finish(axes, "tokens of the step", "offset, tokens")

    return _figure("Time over fuse-only by offset and tokens", draw, "Heat map of offset by tokens.")


def _edges(values: Sequence[int]) -> list[float]:
    """Borders half way between values."""
    if len(values) < 2:
        return [value + side for value in values for side in (-32.0, 32.0)]
    middle = [(a + b) / 2 for a, b in pairwise(values)]
    return [2 * values[0] - middle[0], *middle, 2 * values[-1] - middle[-1]]


def draw_ctas(document: Document) -> Picture | None:
    """Time by CTAs after the MLP, the fastest of those after attention, at the offset of the fastest split.

    None where too few were measured.
    """
    curves: dict[int, list[tuple[int, float]]] = {}
    for bucket in document["buckets"]:
        best = next((c for c in bucket["candidates"] if c["name"] == bucket["best_split"]), None)
        if best is None:
            continue
        fastest: dict[int, float] = {}
        for c in bucket["candidates"]:
            if c["offset"] == best["offset"] and "median_ms" in c:
                ctas = c["mlp_ctas"]
                fastest[ctas] = min(fastest.get(ctas, c["median_ms"]), c["median_ms"])
        if len(fastest) > 1:
            curves[bucket["num_tokens"]] = sorted(fastest.items())
    if not curves:
        return None
    step = -(-len(curves) // _MAX_CURVES)
    drawn = dict(list(curves.items())[::-1][::step][::-1])

    def draw(axes: Axes) -> None:
        for (tokens, points), color in zip(drawn.items(), _COLORS, strict=False):
            least = min(ms for _, ms in points)
            axes.plot([n for n, _ in points], [ms / least for _, ms in points], "o-", color=color, label=f"{tokens}")
        _finish(axes, "CTAs of the collectives after the MLP", "time over the best of these")

    return _figure("CTA sensitivity of split steps, by tokens", draw, "Time by CTAs of the collectives.")


def check_pictures(document: Document) -> dict[str, Picture]:
    """Pictures of the check at held-out counts, by name: choices against the best, CTAs."""
    rows = document["held_out"]

    def choices(axes: Axes) -> None:
        tokens = [row["num_tokens"] for row in rows]
        for name, color in (("chosen", _COLORS[0]), ("fuse_only", _COLORS[1])):
            ratios = [row[f"{name}_ms"] / row["best_ms"] for row in rows]
            axes.plot(
                tokens, ratios, "o-", color=color, label="the table's choice" if name == "chosen" else "fuse only"
            )
        axes.axhline(1, color=_COLORS[-1], lw=1, label="best of an exhaustive sweep")
        axes.axhline(1.02, color=_COLORS[-1], lw=1, ls=":", label="2 % above")
        _finish(axes, "tokens of the step (none of these was tuned)", "time over the best")

    def ctas(axes: Axes) -> None:
        step = -(-len(rows) // _MAX_CURVES)
        for row, color in zip(rows[::step], _COLORS, strict=False):
            points = sorted((int(n), ms) for n, ms in row["by_ctas"].items())
            ratios = [ms / row["fuse_only_ms"] for _, ms in points]
            axes.plot([n for n, _ in points], ratios, "o-", color=color, label=str(row["num_tokens"]))
        _finish(axes, "CTAs of the collectives", "time of the best split over fuse-only")

    return {
        "choices": _figure("The table's choices at other token counts", choices, "Time over the best by tokens."),
        "ctas": _figure("CTA sensitivity of split steps, by tokens", ctas, "Time over fuse-only by CTAs."),
    }


def draw_jitter(document: Document) -> Picture:
    """Time a token of the even split and of the table's choice."""
    rows = document["jitter"]

    def draw(axes: Axes) -> None:
        for name, color in zip(("even", "tuned", "fuse_only"), _COLORS, strict=False):
            points = [(r["num_tokens"], r[f"{name}_ms"]) for r in rows if name != "fuse_only" or "fuse_only_ms" in r]
            per_token = [1000 * ms / n for n, ms in points]
            axes.plot([n for n, _ in points], per_token, color=color, label=_TITLES[name], lw=1.2)
        _finish(axes, "tokens of the step", "microseconds a token")

    return _figure("Even against tuned split", draw, "Microseconds a token by tokens, even and tuned split.")


def draw_speed_up(document: Document, mode: str, words: str = "tokens of the step") -> Picture:
    """Speed-up over stock of every variant of ``mode`` by tokens; the variants are the rows' other ``*_ms`` columns."""
    rows = sorted((r for r in document["rows"] if r.get("mode", mode) == mode), key=lambda r: int(r["num_tokens"]))
    gemms = list(dict.fromkeys(r.get("gemm", "") for r in rows))
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for column, value in row.items():
            name = column.removesuffix("_ms")
            if name in (column, "stock") or not isinstance(value, (int, float)):
                continue
            title = _TITLES.get(name, name.replace("_", " "))
            if name == "woven" and len(gemms) > 1:
                title += f", {row['gemm']} GEMMs"
            elif row.get("gemm", gemms[0]) != gemms[0]:
                continue
            curves.setdefault(title, []).append((row["num_tokens"], row["stock_ms"] / value))

    def draw(axes: Axes) -> None:
        axes.axhline(1, color=_COLORS[-1], lw=1, label="stock")
        for (title, points), color in zip(curves.items(), cycle(_COLORS[:-1]), strict=False):
            line = "--" if title == _TITLES["no_comm"] else "o-"
            axes.plot([n for n, _ in points], [s for _, s in points], line, color=color, label=title)
        counts = sorted({row["num_tokens"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(n) for n in counts])
        _finish(axes, words, "speed-up over stock")

    return _figure(f"Speed-up over stock, {mode}", draw, f"Speed-up over stock by tokens, {mode}.")


def trace_pictures(document: Document) -> dict[str, Picture]:
    """Pictures of `bench trace`, by name: speed-up of all steps, and of those that read prompts."""
    rows = [{**row, "num_tokens": row["max_num_tokens"]} for row in document["rows"]]
    reading = [
        {
            "num_tokens": row["num_tokens"],
            **{f"{name}_ms": ms["prefill"] + ms["mixed"] for name, ms in row["kinds_ms"].items()},
        }
        for row in rows
    ]
    return {
        f"speed_up_{name}": draw_speed_up({"rows": of}, mode, "most tokens of a step")
        for name, mode, of in (("trace", "all steps", rows), ("reading", "steps that read prompts", reading))
    }


def stack_pictures(document: Document) -> dict[str, Picture]:
    """Pictures of `bench stack` or `bench e2e`, by name: speed-up in each mode, and the sweep of CTAs or of offsets."""
    modes = dict.fromkeys(row.get("mode", "steps") for row in document["rows"])
    found = {f"speed_up_{mode}": draw_speed_up(document, mode) for mode in modes}
    return found | (sweep_pictures(document["sweep"]) if document.get("sweep") else {})


def sweep_pictures(sweep: Sequence[Document]) -> dict[str, Picture]:
    """Pictures of what was tried, by name.

    `bench stack` tries CTAs. `bench e2e` tries CTAs at the even split, where it has several, then offsets with the best
    of them, the even split once more: each picture holds what was measured side by side.
    """
    if "offset" not in sweep[0]:
        return {"ctas": draw_sweep(sweep, "ctas")}
    used = {row["num_tokens"]: row.get("ctas") for row in sweep}
    ctas = [row for row in reversed(sweep) if not row["offset"] and "ctas" in row]
    offsets = [row for row in sweep if row.get("ctas") == used[row["num_tokens"]]]
    found = {"ctas": draw_sweep(ctas, "ctas")} if len({row["ctas"] for row in ctas}) > 1 else {}
    if any(row["offset"] for row in offsets):
        found["offsets"] = draw_sweep(offsets, "offset")
    return found


def draw_sweep(sweep: Sequence[Document], x: str) -> Picture:
    """Time of the fastest woven engine over the best by ``x`` (ctas or offset), by tokens; the last row of a point."""
    columns = [name for name in sweep[0] if name.endswith("_ms")]
    column = min(columns, key=lambda name: min(float(row[name]) for row in sweep))

    def draw(axes: Axes) -> None:
        for tokens, color in zip(sorted({r["num_tokens"] for r in sweep}), cycle(_COLORS), strict=False):
            points = sorted({r[x]: r[column] for r in sweep if r["num_tokens"] == tokens}.items())
            least = min(ms for _, ms in points)
            axes.plot([n for n, _ in points], [ms / least for _, ms in points], "o-", color=color, label=f"{tokens}")
        words = "CTAs of the collectives" if x == "ctas" else "offset of the split, tokens"
        _finish(axes, words, "time over the best")

    if x == "offset":
        return _figure("Time of the woven step by offset, by tokens", draw, "Time by offsets of the split.")
    gemms = column.removesuffix("_ms").replace("_", ", ")
    of = "the even split" if gemms == "woven" else f"{gemms} GEMMs"
    return _figure(f"CTA sensitivity of {of}, by tokens", draw, "Time by CTAs of the collectives.")


#: What draws each kind of result but the kernel's, which has one plot a hidden size.
_DRAW: Mapping[Kind, Callable[[Document], dict[str, Picture]]] = {
    TUNE: tune_pictures,
    CHECK: check_pictures,
    JITTER: lambda document: {"jitter": draw_jitter(document)},
    TRACE: trace_pictures,
    STACK: stack_pictures,
}


def pictures_of(document: Document) -> dict[str, Picture]:
    """The pictures of any of these results, by name; none for what is not one of them."""
    kind = kind_of(document)
    return {} if kind is None or kind not in _DRAW else _DRAW[kind](document)
