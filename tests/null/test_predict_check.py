"""The check of predictions: published and measured ratios, and files that are what the code gives."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from trtllm_tokenweave.bench.timeline import Kernel, is_collective
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.predict.check import CheckRow, check_document, check_markdown, errors
from trtllm_tokenweave.predict.data import FOLDER, Fitted, fitted, machine_data
from trtllm_tokenweave.predict.fit import FIT_MAX_TOKENS, fit_all
from trtllm_tokenweave.predict.sources import check_rows, own_rows, read_results

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/results"


@pytest.fixture(scope="module")
def fresh() -> tuple[Fitted, list[CheckRow]]:
    machines = fit_all()
    rows = check_rows(machines, read_results(RESULTS))
    return Fitted(machines=machines, errors=errors(rows)), rows


def same(made: Any, kept: Any) -> bool:
    """Equal but for the last digits, which may differ with the linear algebra library."""
    if isinstance(made, dict):
        return isinstance(kept, dict) and made.keys() == kept.keys() and all(same(made[k], kept[k]) for k in made)
    if isinstance(made, list):
        return isinstance(kept, list) and len(made) == len(kept) and all(map(same, made, kept))
    if isinstance(made, float) and isinstance(kept, float):
        return made == pytest.approx(kept, rel=2e-4, abs=1.5e-4)
    return bool(made == kept)


AGAIN = "run `python -m trtllm_tokenweave.predict` and commit both files"


def test_committed_files_are_what_the_code_gives(fresh: tuple[Fitted, list[CheckRow]]) -> None:
    made, rows = fresh
    assert same(made.model_dump(mode="json"), json.loads((FOLDER / "fitted.json").read_text())), AGAIN
    document = json.loads((RESULTS / "predict_check.json").read_text())
    assert same(check_document(rows), document), AGAIN
    for row in document["rows"]:
        unit = "ms" if row["source"].removesuffix(", extrapolated").endswith(" ms") else "ratio"
        assert set(row) == {"source", "num_tokens", f"measured_{unit}", f"predicted_{unit}"}
    assert check_markdown(document) in (ROOT / "docs/prediction.md").read_text()


def test_a_stale_file_is_noticed(fresh: tuple[Fitted, list[CheckRow]]) -> None:
    document = check_document(fresh[1])
    stale = json.loads(json.dumps(document))
    stale["rows"][1]["predicted_ratio"] += 0.001
    assert not same(document, stale)
    stale = json.loads(json.dumps(document))
    stale["rows"].pop()
    assert not same(document, stale)


def test_the_documentation_names_every_miss(fresh: tuple[Fitted, list[CheckRow]]) -> None:
    text = (ROOT / "docs/prediction.md").read_text()
    missed = [row for row in fresh[1] if abs(row.error) > 0.05 and "mixtral" not in row.source]
    assert missed
    for row in missed:
        assert f"{row.num_tokens} tokens ({row.error:+.1%}".replace("%", " %") in text, row


def test_the_machine_has_the_measured_forks() -> None:
    """After a new stack_tp2.json, set fork_us of h200_peer.json to this; then fit and check."""
    traced = json.loads((RESULTS / "stack_tp2.json").read_text())["timeline"]
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for mode, name in itertools.product(("eager", "graph"), ("woven_trt", "woven_budget")):
        kernels = [Kernel(**kernel) for kernel in traced[f"{mode}_kernels"][name]]
        starts = [kernel.start_us for kernel in kernels if is_collective(kernel)]
        for before, after in itertools.pairwise(kernel for kernel in kernels if not is_collective(kernel)):
            fork = any(before.end_us - 1 <= start <= after.start_us + 1 for start in starts)
            gaps[fork].append(after.start_us - before.end_us)
    assert round(median(gaps[True]) - median(gaps[False]), 1) == machine_data("h200-peer").fork_us


def test_the_machine_has_the_measured_collectives() -> None:
    """After a new kernel_tp2.json, copy its times of hidden 8192 to h200_peer.json; then fit and check."""
    data = machine_data("h200-peer")
    rows = [row for row in json.loads((RESULTS / "kernel_tp2.json").read_text())["rows"] if row["hidden"] == 8192]
    assert data.norm == tuple((row["num_tokens"], row["norm_us"]) for row in rows)
    for ctas, points in data.fused.items():
        sweeps = ((row["num_tokens"], row["sweep"].get(str(ctas)) if ctas else row["default_us"]) for row in rows)
        assert points == tuple(point for point in sweeps if point[1] is not None)
    for ctas, name in ((0, "staged_us"), (16, "staged_16_ctas_us")):
        assert data.staged[ctas] == tuple((row["num_tokens"], row[name]) for row in rows)
    assert set(data.staged) == {0, 16}


def off(rows: Sequence[CheckRow], source: str) -> list[float]:
    found = [abs(row.error) for row in rows if source in row.source]
    assert found
    return found


def test_the_paper_is_reproduced(fresh: tuple[Fitted, list[CheckRow]]) -> None:
    rows = [row for row in fresh[1] if row.num_tokens <= FIT_MAX_TOKENS]
    assert max(off(rows, "llama-3.3-70b, tp 8: no communication")) < 0.05
    woven = off(rows, "llama-3.3-70b, tp 8: best split /")
    assert len(woven) == 6
    # One of six misses 5 %: docs/prediction.md says which.
    assert sorted(woven)[-2] < 0.05
    assert max(woven) < 0.07
    assert max(off(rows, "qwen2.5-72b, tp 8: best split")) < 0.05
    assert max(off(rows, "llama-3.3-70b, tp 8: stock ms")) < 0.05


def test_our_own_measurements_are_reproduced(fresh: tuple[Fitted, list[CheckRow]]) -> None:
    assert max(off(fresh[1], "kernel_tp2")) < 0.055
    assert max(off(fresh[1], "overlap_tp2")) < 0.035
    stack = [row for row in fresh[1] if "stack_tp2" in row.source]
    assert max(off(stack, "fuse_only / stock")) < 0.02
    assert max(off(fresh[1], "even split / stock")) < 0.035
    assert max(off([row for row in fresh[1] if "e2e_tp2" in row.source], "no_comm / stock")) < 0.022
    large = [row for row in fresh[1] if row.num_tokens >= 4096]
    assert max(off(large, "woven, trt / stock")) < 0.025
    assert max(off([row for row in fresh[1] if row.num_tokens >= 2048], "woven, budget / stock")) < 0.02
    assert max(off(fresh[1], "stack_tp2, eager: stock ms")) < 0.05


def test_roles(fresh: tuple[Fitted, list[CheckRow]]) -> None:
    rows = fresh[1]
    fit = {(row.source.split(": ", 1)[1], row.num_tokens) for row in rows if row.role == "fit"}
    sizes = [2**i for i in range(10, 16)]
    assert fit == {(what, tokens) for what in ("no communication / stock", "stock ms") for tokens in sizes}
    assert all("qwen2.5-72b" in row.source for row in rows if row.role == "fit")
    assert {row.source.split(":")[0] for row in rows if row.role == "same setting as the fit"} == {"overlap_tp2"}
    # The reason for that role.
    data = machine_data("h200-peer").beside_gemm
    assert data is not None
    gemm = data.gemms[0]
    overlap = json.loads((RESULTS / "overlap_tp2.json").read_text())
    assert f"GEMM {gemm.m}x{gemm.k}x{gemm.n} beside" in overlap["what"]
    fitted_to, measured = [row.ctas for row in gemm.beside], [row["ctas"] for row in overlap["rows"]]
    assert (min(fitted_to), max(fitted_to)) == (min(measured), max(measured)) == (4, 32)
    document = check_document(rows)
    assert "the same GEMM and collective" in document["roles"]["same setting as the fit"]
    assert "| overlap_tp2: GEMM beside collective / in sequence | same setting as the fit |" in check_markdown(document)


def test_published_steps_beyond_the_fit_are_checked(fresh: tuple[Fitted, list[CheckRow]]) -> None:
    found = [row for row in fresh[1] if row.num_tokens > FIT_MAX_TOKENS]
    assert len(found) == 3 * 4
    assert {(row.num_tokens, row.role, row.case) for row in found} == {(65536, "check", "extrapolated")}
    qwen = [error for error in fresh[0].errors["h100-multimem"] if "qwen" in error.source and error.role == "check"]
    assert {error.rows for error in qwen if "beyond the fit" in error.source} == {1}
    assert next(e for e in qwen if e.source.endswith("best split / stock")).worst > 0.05


def test_a_source_has_one_role_and_unit(fresh: tuple[Fitted, list[CheckRow]]) -> None:
    kinds: dict[str, set[tuple[str, str]]] = {}
    for row in fresh[1]:
        kinds.setdefault(row.source, set()).add((row.role, row.unit))
    assert all(len(kind) == 1 for kind in kinds.values())


STACK = {
    "what": "8 decoder layers, hidden 8192, tp_size 2, bfloat16; attention a stand-in of 2048 keys; ms a step",
    "model": "llama-3.3-70b",
    "offset": 0,
    "symmetric": True,
}
ROW = {"num_tokens": 4096, "stock_ms": 60.0, "fuse_only_ms": 57.0, "woven_ms": 54.0, "no_comm_ms": 55.0, "error": 0.001}


def stack_document(ctas: int = 16, **changes: Any) -> dict[str, Any]:
    """A result of `bench stack`."""
    gemms: tuple[dict[str, Any], ...] = ({"gemm": "trt", "gemm_sms": 0}, {"gemm": "budget", "gemm_sms": 132 - ctas})
    rows = [{**ROW, "mode": mode, "ctas": ctas, **gemm} for mode in ("eager", "graph") for gemm in gemms]
    return {**STACK, "rows": rows, **changes}


def stack_rows(**changes: Any) -> dict[str, CheckRow]:
    """Rows of eager steps, by what they compare."""
    rows = own_rows(fitted().machines, {Path("stack_tp2.json"): stack_document(**changes)})
    return {row.source.split(": ")[1]: row for row in rows if "eager" in row.source}


def test_a_measured_stack_joins_the_check() -> None:
    rows = stack_rows()
    woven = {f"woven, {gemm}{what}": ms for gemm in ("trt", "budget") for what, ms in ((" / stock", 0.9), (" ms", 54))}
    measured = {"no_comm / stock": 55 / 60, "fuse_only / stock": 57 / 60, "stock ms": 60, **woven}
    assert {name: row.measured for name, row in rows.items()} == pytest.approx(measured)
    assert all(0.5 < row.predicted < 1 for row in rows.values() if row.unit == "ratio")
    stock, budget = rows["stock ms"], rows["woven, budget ms"]
    assert (stock.unit, budget.unit) == ("ms", "ms")
    assert budget.predicted / stock.predicted == pytest.approx(rows["woven, budget / stock"].predicted)


def test_a_stack_is_predicted_as_it_ran() -> None:
    def predicted(name: str, **changes: Any) -> float:
        return stack_rows(**changes)[name].predicted

    copies = {"symmetric": False}
    assert predicted("fuse_only / stock") < predicted("fuse_only / stock", **copies)
    for gemm in ("trt", "budget"):
        woven = predicted(f"woven, {gemm} / stock")
        assert woven != predicted(f"woven, {gemm} / stock", ctas=8)
        assert woven != predicted(f"woven, {gemm} / stock", offset=512)
        assert woven < predicted(f"woven, {gemm} / stock", **copies)
    small = {"model": "llama-3.1-8b", "what": str(STACK["what"]).replace("8192", "4096")}
    assert predicted("stock ms", **small) < predicted("stock ms") / 2


def test_few_ctas_serve_gemms_with_a_budget_only() -> None:
    few, many = (
        {gemm: stack_rows(ctas=ctas)[f"woven, {gemm} ms"].predicted for gemm in ("trt", "budget")} for ctas in (4, 16)
    )
    assert few["budget"] < few["trt"]
    assert few["budget"] < many["budget"]
    assert few["trt"] > many["trt"]


@pytest.mark.parametrize("changes", [{"ctas": 6}, {"ctas": 8, "symmetric": False}])
def test_a_stack_with_collectives_that_were_not_measured(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="were not measured with") as caught:
        stack_rows(**changes)
    assert caught.value.where == "stack_tp2.json: ctas"


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in stack_document().items() if name not in names}


def changed(**values: Any) -> dict[str, Any]:
    """A result whose rows with a budget have other values."""
    document = stack_document()
    document["rows"] = [row | (values if row["gemm"] == "budget" else {}) for row in document["rows"]]
    return document


def e2e_document(**changes: Any) -> dict[str, Any]:
    """A result of `bench e2e`."""
    times = {"stock_ms": 60.0, "fuse_only_ms": 57.0, "even_split_ms": 54.0, "no_comm_ms": 55.0, "peer_ms": None}
    row = {"num_tokens": 4096, "mode": "graph", "ctas_even": 4, **times}
    what = "prefill of one sequence: 8 layers, hidden 8192, vocabulary 8192, tp_size 2, bfloat16"
    engines = {"stock": {"symmetric": False}, "woven": {"symmetric": True}}
    document = {"what": what, "model": "llama-3.3-70b", "gemm_plugin": False, "engines": engines, "rows": [row]}
    return document | changes


def test_measured_decoders_join_the_check() -> None:
    def rows(**changes: Any) -> dict[str, CheckRow]:
        found = own_rows(fitted().machines, {Path("e2e_tp2.json"): e2e_document(**changes)})
        return {row.source.removeprefix("e2e_tp2, graph: "): row for row in found}

    found, half = rows(), rows(what=str(e2e_document()["what"]).replace("8 layers", "4 layers"))
    ratios = {"no_comm / stock": 55 / 60, "fuse_only / stock": 57 / 60, "even split / stock": 0.9}
    assert {name: row.measured for name, row in found.items()} == pytest.approx(
        {**ratios, "stock ms": 60, "even split ms": 54}
    )
    assert half["stock ms"].predicted == pytest.approx(found["stock ms"].predicted / 2, rel=0.02)
    # Attention is the real one: it grows with the square of the tokens.
    (row,) = e2e_document()["rows"]
    twice = rows(rows=[row | {"num_tokens": 8192}])
    assert twice["stock ms"].predicted > 2.03 * found["stock ms"].predicted


@pytest.mark.parametrize(
    ("name", "document", "what"),
    [
        ("stack_tp2", stack_document(what="a stack"), "are not in `what`"),
        ("stack_tp2", stack_document(what=str(STACK["what"]).replace("8192", "4096")), "hidden 4096 is not that"),
        ("stack_tp2", stack_document(model="llama-3.1-8b"), "hidden 8192 is not that"),
        ("stack_tp2", stack_document(rows=[{"gemm": "trt"}]), "missing"),
        ("stack_tp2", stack_document(symmetric="no"), "valid boolean"),
        ("stack_tp2", changed(gemm_sms=100), "gemm_sms 100 is not what 16 CTAs leave of 132 SMs"),
        ("stack_tp2", changed(gemm="cublas"), "'trt' or 'budget'"),
        *(("stack_tp2", without(name), "missing") for name in ("model", "offset", "symmetric", "rows")),
        ("e2e_tp2", e2e_document(what="a decoder"), "are not in `what`"),
        ("e2e_tp2", e2e_document(rows=[{"num_tokens": 4096}]), "missing"),
        ("e2e_tp2", e2e_document(gemm_plugin=True), "are not predicted"),
        ("e2e_tp2", e2e_document(engines={"woven": {"symmetric": False}}), "are not predicted"),
        ("kernel_tp2", {"rows": [{}]}, "KeyError"),
        ("overlap_tp2", [], "TypeError"),
    ],
)
def test_wrong_results(name: str, document: Any, what: str) -> None:
    with pytest.raises(UserError, match="is not what bench writes") as caught:
        own_rows(fitted().machines, {Path(f"{name}.json"): document})
    assert caught.value.where.startswith(f"{name}.json")
    assert what in caught.value.what
    assert "\n" not in str(caught.value)
