"""Plots of the tuner's results and of stacks: what is drawn is what the JSON says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.tuning import FakeRunner, bowl, measured, run_tuner

from trtllm_tokenweave.bench import tune_plots
from trtllm_tokenweave.bench.tune_plots import pictures_of
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.table import TableKey, default_table
from trtllm_tokenweave.table.files import save_table
from trtllm_tokenweave.tune.candidates import Candidate
from trtllm_tokenweave.tune.tuner import measurements

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tuned() -> dict[str, Any]:
    found = run_tuner(FakeRunner(bowl))
    return {"what": "a test", "measured": measured().model_dump(), "buckets": measurements(found.run, found.choices)}


class Axes:
    """Notes what is drawn."""

    def __init__(self) -> None:
        self.lines: dict[str, tuple[list[float], list[float]]] = {}
        self.grid_: list[list[float]] = []
        self.figure = self

    def plot(self, x: Any, y: Any, *_: Any, label: str | None = None, **__: Any) -> None:
        self.lines[label or str(len(self.lines))] = (list(x), list(y))

    step = plot

    def pcolormesh(self, _x: Any, _y: Any, grid: list[list[float]], **_: Any) -> None:
        self.grid_ = grid

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> Axes:
    found = Axes()
    monkeypatch.setattr(tune_plots, "_figure", lambda _title, draw, _caption: draw(found))
    return found


def test_the_halves_of_the_chosen_splits_lie_on_the_wave_curves(tuned: dict[str, Any], axes: Axes) -> None:
    tune_plots.draw_waves(tuned)
    chosen = [(b["num_tokens"], b["chosen"]) for b in tuned["buckets"]]
    prefixes = axes.lines["chosen prefix halves"][0]
    assert prefixes == [n // 2 + int(name.split()[0]) for n, name in chosen]
    assert axes.lines["chosen suffix halves"][0] == [n - p for (n, _), p in zip(chosen, prefixes, strict=True)]
    # 12 to 16 CTAs are taken; 28672 columns in tiles of 256 are 112 tiles a row of 128 tokens.
    curve = dict(zip(*axes.lines["mlp.fc+gate"], strict=True))
    assert curve[128] == math.ceil(112 / 116)
    assert curve[1024] == math.ceil(8 * 112 / 116)


def test_the_heat_map_is_the_ratio_to_fuse_only_and_blank_where_nothing_was_measured(
    tuned: dict[str, Any], axes: Axes
) -> None:
    tune_plots.draw_heat_map(tuned)
    values = [v for row in axes.grid_ for v in row]
    assert any(math.isnan(v) for v in values)
    best = min(v for v in values if not math.isnan(v))
    assert best == pytest.approx(0.92, abs=0.005)
    assert axes.lines["chosen"][0] == [b["num_tokens"] for b in tuned["buckets"]]


def test_the_curve_of_ctas_is_at_the_best_splits_offset(tuned: dict[str, Any], axes: Axes) -> None:
    tune_plots.draw_ctas(tuned)
    x, y = axes.lines["4096"]
    assert min(y) == 1.0
    assert len(x) > 2
    assert x[y.index(1.0)] == 16


def test_speed_up_is_stock_over_each_variant(axes: Axes) -> None:
    document = json.loads((ROOT / "docs/results/stack_tp2.json").read_text())
    tune_plots.draw_speed_up(document, "graph")
    row = next(r for r in document["rows"] if (r["num_tokens"], r["mode"], r["gemm"]) == (4096, "graph", "budget"))
    x, y = axes.lines["woven, budget GEMMs"]
    assert dict(zip(x, y, strict=True))[4096] == row["stock_ms"] / row["woven_ms"]
    assert len(axes.lines["no communication"][0]) == 4
    assert "woven, trt GEMMs" in axes.lines


@pytest.mark.parametrize("by", ["ctas", "offset"])
def test_the_sweep_is_over_its_best(axes: Axes, by: str) -> None:
    sweep = [{"num_tokens": 64, by: n, "gemm_sms": 0, "woven_trt_ms": ms} for n, ms in ((8, 3.0), (4, 2.0))]
    tune_plots.draw_sweep(sweep, by)
    assert axes.lines["64"] == ([4, 8], [1.0, 1.5])


def test_a_sweep_of_ctas_and_offsets_is_two_pictures(axes: Axes) -> None:
    """As `bench e2e` tries them: CTAs at the even split, then offsets with the best, beside the even split again."""
    tried = {64: [(0, 8, 4.0), (0, 4, 5.0), (0, 8, 4.4), (128, 8, 4.0)], 32: [(0, 4, 2.0), (0, 8, 3.0), (0, 4, 2.0)]}
    tried[32].append((128, 4, 3.0))
    sweep = [
        {"num_tokens": n, "offset": offset, "ctas": ctas, "woven_ms": ms}
        for n, rows in tried.items()
        for offset, ctas, ms in rows
    ]
    drawn: dict[str, Any] = {}
    pictures = []
    for rows in (sweep, sweep[:2], [row for row in sweep if row["ctas"] == 8]):
        axes.lines.clear()
        pictures.append(list(tune_plots.sweep_pictures(rows)))
        drawn[str(len(rows))] = dict(axes.lines)
    assert pictures == [["ctas", "offsets"], ["ctas"], ["offsets"]]
    # The offsets' picture, drawn last, and that of CTAs alone.
    assert drawn["8"] == {"64": ([0, 128], [1.1, 1.0]), "32": ([0, 128], [1.0, 1.5])}
    assert drawn["2"] == {"64": ([4, 8], [1.25, 1.0])}


def test_every_variant_of_a_row_is_drawn(axes: Axes) -> None:
    names = (
        "peer",
        "fuse_only",
        "even_split",
        "tuned_split",
        "whole_attention_even",
        "whole_attention_tuned",
        "no_comm",
    )
    row = {"num_tokens": 64, "stock_ms": 2.0, **{f"{name}_ms": 1.0 for name in names}}
    tune_plots.draw_speed_up({"rows": [row]}, "graph")
    assert len(axes.lines) == len(names)


def test_choices_and_ctas_of_a_check(axes: Axes) -> None:
    row = {"num_tokens": 1400, "chosen_ms": 2.2, "best_ms": 2.0, "fuse_only_ms": 4.0, "by_ctas": {"16": 2.0, "8": 3.0}}
    tune_plots.check_pictures({"held_out": [row]})
    ratios = {name: y for name, (_, y) in axes.lines.items()}
    assert ratios["the table's choice"] == [1.1]
    assert ratios["fuse only"] == [2.0]
    assert dict(zip(*axes.lines["1400"], strict=True)) == {8: 0.75, 16: 0.5}


def test_jitter_is_time_a_token(axes: Axes) -> None:
    rows = [{"num_tokens": n, "even_ms": n / 100, "tuned_ms": n / 110, "fuse_only_ms": n / 90} for n in (1024, 1088)]
    tune_plots.draw_jitter({"jitter": rows})
    assert axes.lines["even split"] == ([1024, 1088], [10.0, 10.0])


def test_every_result_is_drawn_by_one_command(tuned: dict[str, Any], tmp_path: Path) -> None:
    results = {
        "table.measurements": (tuned, ["waves", "heat_map", "ctas"]),
        "stack": (json.loads((ROOT / "docs/results/stack_tp2.json").read_text()), ["speed_up_eager", "speed_up_graph"]),
        "e2e": (json.loads((ROOT / "docs/results/e2e_tp2.json").read_text()), ["speed_up_graph", "offsets"]),
        "trace": (json.loads((ROOT / "docs/results/trace_tp2.json").read_text()), ["speed_up_trace"]),
        "jitter": ({"jitter": [{"num_tokens": n, "even_ms": 2.0, "tuned_ms": 1.0} for n in (64, 128)]}, ["jitter"]),
    }
    for stem, (document, names) in results.items():
        path = tmp_path / f"{stem}.json"
        path.write_text(json.dumps(document))
        page = tmp_path / f"{stem}.html"
        assert main(["bench", "plot", str(path), "--report", str(page)]) == 0
        for name in names:
            assert (tmp_path / f"{stem}_{name}.png").read_bytes().startswith(b"\x89PNG")
            assert "<svg" in (tmp_path / f"{stem}_{name}.svg").read_text()
        text = page.read_text()
        assert text.count("data:image/svg+xml") == len(pictures_of(document))
        assert "http://" not in text.replace("http://www.w3.org", "")


def test_the_page_says_how_where_and_when(tmp_path: Path) -> None:
    document = json.loads((ROOT / "docs/results/stack_tp2.json").read_text())
    path, page = tmp_path / "stack.json", tmp_path / "stack.html"
    path.write_text(json.dumps(document | {"command": "bench <b>stack</b> & more"}))
    assert main(["bench", "plot", str(path), "--report", str(page)]) == 0
    text = page.read_text()
    machine = document["machine"]
    for said in (document["date"], document["method"], machine["gpus"][0], machine["tensorrt"], "NCCL_NVLS_ENABLE=0"):
        assert said in text
    assert "<td>bench &lt;b&gt;stack&lt;/b&gt; &amp; more</td>" in text
    assert "<b>" not in text


def test_buckets_without_a_split_are_drawn(tuned: dict[str, Any]) -> None:
    def losing(num_tokens: int, candidate: Candidate) -> float:
        return bowl(num_tokens, candidate, gain=-0.02)

    found = run_tuner(FakeRunner(losing), counts=(2048,))
    document = {"measured": tuned["measured"], "buckets": measurements(found.run, found.choices)}
    assert set(pictures_of(document)) >= {"waves", "heat_map"}


@pytest.mark.parametrize(
    "document", [{"buckets": [{}]}, {"held_out": [{}]}, {"jitter": [{}]}, {"rows": []}, {"rows": [{"stock_ms": 1}]}]
)
def test_a_damaged_result_is_refused(
    document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    assert main(["bench", "plot", str(path)]) == 2
    assert "bad.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["docs/results/build_memory_tp2.json", "docs/results/cpp_step_tp2.json", "docs/results/predict_check.json"]
)
def test_what_has_no_plot_is_told_from_what_has(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plot", str(ROOT / name)]) == 2
    assert f"{Path(name).name}: is no result that has a plot. Fix: give the JSON of" in capsys.readouterr().err


def test_a_table_has_no_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.json"
    save_table(default_table(TableKey(tp_size=2, hidden_size=64, dtype="bfloat16")), path)
    assert main(["bench", "plot", str(path)]) == 2
    assert "is no result that has a plot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("stack", "rows.3.stock_ms", None, "rows[3]: has no 'stock_ms', which a result of bench stack"),
        ("kernel", "rows.2.hidden", None, "rows[2]: has no 'hidden', which a result of bench kernel"),
        ("stack", "rows.3.stock_ms", "null", "rows[3].stock_ms: is null, and not in a result of bench stack"),
        *(("stack", "rows.1.stock_ms", value, "rows[1].stock_ms: is no time") for value in ("0", "-1", "NaN", '"1"')),
        *(
            ("e2e", "sweep.1.woven_ms", value, "sweep[1].woven_ms: is no time")
            for value in ("Infinity", "1" + "0" * 400)
        ),
        ("kernel", "rows.2.peers.nccl+norm", "1e999", "rows[2].peers.nccl+norm: is no time"),
        ("kernel", "rows.2.num_tokens", "0", "rows[2].num_tokens: is no size"),
        ("kernel", "rows.2.num_tokens", "1" + "0" * 400, "rows[2].num_tokens: is no size"),
        ("kernel", "rows.2.ctas", "1" + "0" * 400, "rows[2].ctas: is no finite number"),
        ("tune", "held_out.0.by_ctas.4", "0.0", "held_out[0].by_ctas.4: is no time"),
        ("kernel", "rows.2.num_tokens", "64", ""),  # what is in order is drawn
    ],
)
def test_values_that_no_plot_can_show_are_refused(
    name: str, field: str, value: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((ROOT / f"docs/results/{name}_tp2.json").read_text())
    *parents, last = (int(part) if part.isdigit() and part != "4" else part for part in field.split("."))
    at = document
    for part in parents:
        at = at[part]
    assert last in at
    del at[last]
    if value is not None:
        at[last] = "VALUE"
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(document).replace('"VALUE"', value or ""))
    assert main(["bench", "plot", str(path)]) == (2 if said else 0)
    assert f"{path}: {said}" in capsys.readouterr().err or not said
    assert bool(said) == (list(tmp_path.iterdir()) == [path])


def test_a_trace_may_lack_a_kind_of_steps(tmp_path: Path) -> None:
    row = {"max_num_tokens": 64, "stock_ms": 2.0, "woven_ms": 1.0}
    kinds = {name: {"prefill": 1.0, "mixed": 1.0, "decode": 0.0} for name in ("stock", "woven")}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"rows": [row | {"kinds_ms": kinds}]}))
    assert main(["bench", "plot", str(path)]) == 0
