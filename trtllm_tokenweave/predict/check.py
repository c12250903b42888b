"""The predictions against measurements: docs/results/predict_check.json.

A row compares one ratio of two times. Rows whose times the fit has seen say so in their source's role ("fit").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.predict.data import FittedMachine, Role, SourceError
from trtllm_tokenweave.predict.fit import FIT_MODEL, PIECES_MACHINE, STEPS_MACHINE, measured_steps
from trtllm_tokenweave.predict.gemm import BYTES
from trtllm_tokenweave.predict.machine import Machine, make_machine
from trtllm_tokenweave.predict.step import TILE, Workload
from trtllm_tokenweave.predict.streams import Op
from trtllm_tokenweave.predict.variants import Predictor, beside_us
from trtllm_tokenweave.table.files import read_json, read_text
from trtllm_tokenweave.table.launch import LaunchConfig
from trtllm_tokenweave.waves import GemmShape

CHECK_MODELS = ("llama-3.3-70b", FIT_MODEL, "mixtral-8x22b")
STACK_MODEL = "llama-3.3-70b"


@dataclass(frozen=True)
class CheckRow:
    """One ratio, measured and predicted, on `machine`; `case` tells rows of one source and size apart."""

    machine: str
    source: str
    role: Role
    num_tokens: int
    measured: float
    predicted: float
    case: str = ""

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.measured - 1


def check_rows(machines: Mapping[str, FittedMachine], results: Path) -> list[CheckRow]:
    """Rows of the published steps and of our own results.

    Raises:
        UserError: A file of the folder `results` is not what its bench writes.
    """
    return published_rows(machines) + own_rows(machines, results)


def published_rows(machines: Mapping[str, FittedMachine]) -> list[CheckRow]:
    """Whole steps on the machine that has them."""
    machine = make_machine(STEPS_MACHINE, machines[STEPS_MACHINE].parameters)
    return [row for model in CHECK_MODELS for row in _steps(machine, model)]


def own_rows(machines: Mapping[str, FittedMachine], results: Path) -> list[CheckRow]:
    """What `bench` left in the folder `results`; a missing file has no rows.

    Raises:
        UserError: A file is not what its bench writes.
    """
    machine = make_machine(PIECES_MACHINE, machines[PIECES_MACHINE].parameters)
    rows: list[CheckRow] = []
    for name, read in (("kernel_tp2", _kernel), ("overlap_tp2", _overlap), ("stack_tp2", _stack)):
        path = results / f"{name}.json"
        if path.exists():
            try:
                rows += read(machine, read_json(read_text(path), str(path)))
            except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
                what = f"is not what bench writes ({type(error).__name__}: {error})"
                raise UserError(what, where=str(path), fix="measure again") from error
    return rows


def check_document(rows: Iterable[CheckRow]) -> dict[str, Any]:
    """The JSON document."""
    rows = list(rows)
    return {
        "what": "ratios of two times, measured and predicted; role fit: the parameters were fitted to these times",
        "method": "docs/prediction.md",
        "command": "python -m trtllm_tokenweave.predict",
        "sources": [
            {"machine": machine, **error.model_dump()} for machine, all_ in errors(rows).items() for error in all_
        ],
        "rows": [
            {
                "source": f"{row.source}, {row.case}" if row.case else row.source,
                "num_tokens": row.num_tokens,
                "measured_ratio": round(row.measured, 4),
                "predicted_ratio": round(row.predicted, 4),
            }
            for row in rows
        ],
    }


def check_markdown(document: Mapping[str, Any]) -> str:
    """The errors as the documentation's table."""
    lines = ["| ratio | role | rows | worst | mean |", "|---|---|---|---|---|"]
    for error in document["sources"]:
        share = f"{error['worst']:+.1%} | {error['mean']:.1%}".replace("%", " %")
        lines.append(f"| {error['source']} | {error['role']} | {error['rows']} | {share} |")
    return "\n".join(lines)


def errors(rows: Iterable[CheckRow]) -> dict[str, tuple[SourceError, ...]]:
    """By machine, one for each source, in the order of the rows."""
    groups: dict[str, dict[str, list[CheckRow]]] = {}
    for row in rows:
        groups.setdefault(row.machine, {}).setdefault(row.source, []).append(row)
    return {
        machine: tuple(
            SourceError(
                source=source,
                role=found[0].role,
                rows=len(found),
                worst=round(max(found, key=lambda row: abs(row.error)).error, 5),
                mean=round(sum(abs(row.error) for row in found) / len(found), 5),
            )
            for source, found in sources.items()
        )
        for machine, sources in groups.items()
    }


def _steps(machine: Machine, model: str) -> Iterator[CheckRow]:
    data = machine.data
    made = Predictor(machine, Workload(preset(model), data.tp_size))
    name = f"arXiv:2505.11329, {model}, tp {data.tp_size}"
    measured = measured_steps(data, model)
    times = [made.predict(row.num_tokens) for row in measured]
    role: Role = "fit" if model == FIT_MODEL else "check"
    for row, time in zip(measured, times, strict=True):
        ratios = row.no_comm / row.stock, time.no_comm_us / time.stock_us
        yield CheckRow(machine.name, f"{name}: no communication / stock", role, row.num_tokens, *ratios)
    for row, time in zip(measured, times, strict=True):
        if time.best is not None:
            ratios = row.weave / row.stock, time.best.us / time.stock_us
            yield CheckRow(machine.name, f"{name}: best split / stock", "check", row.num_tokens, *ratios)


def _kernel(machine: Machine, document: Any) -> Iterator[CheckRow]:
    """The fused kernel against NCCL and a norm, at other hidden sizes than the machine's times come from."""
    data = machine.data
    smallest = min(tokens for tokens, _ in data.all_reduce) * data.hidden_size
    for row in document["rows"]:
        hidden, tokens = row["hidden"], row["num_tokens"]
        # Below the smallest activation that was measured there is nothing to predict from.
        if hidden == data.hidden_size or tokens * hidden < smallest:
            continue
        size = tokens * hidden * BYTES
        # What is compared was timed with one pair of events for each of the two.
        fused = machine.best_fused(size, data.tp_size)[0] + data.event_us
        unfused = machine.all_reduce_us(size, data.tp_size) + machine.norm_us(size) + data.event_us
        ratios = row["fused_us"] / row["nccl_norm_us"], fused / unfused
        yield CheckRow(machine.name, f"kernel_tp2, hidden {hidden}: fused / NCCL + norm", "check", tokens, *ratios)


def _overlap(machine: Machine, document: Any) -> Iterator[CheckRow]:
    """A GEMM beside the collective against one after the other, from the times of either alone."""
    tokens, k, n = (int(size) for size in re.findall(r"\d+", document["what"])[:3])
    gemm = Op(document["gemm_us"], GemmShape("", "mlp", n, k).tiles(tokens, TILE), 2.0 * tokens * n * k)
    for row in document["rows"]:
        beside = beside_us(machine, gemm, row["collective_us"], row["ctas"]) + machine.parameters.fork_us
        ratios = row["eager_us"] / row["sequence_us"], beside / (gemm.us + row["collective_us"])
        source, case = "overlap_tp2: GEMM beside collective / in sequence", f"{row['ctas']} CTAs"
        yield CheckRow(machine.name, source, "check", tokens, *ratios, case)


def _stack(machine: Machine, document: Any) -> Iterator[CheckRow]:
    """Decoder layers with stand-in attention, woven by the default rule, with TensorRT's GEMMs."""
    found = re.search(r"(\d+) decoder layers, hidden (\d+), tp_size (\d+).* (\d+) keys", document["what"])
    if found is None:
        raise ValueError("layers, hidden size, tp_size and keys are not in `what`")
    layers, hidden, tp_size, keys = map(int, found.groups())
    config = preset(STACK_MODEL).model_copy(update={"num_hidden_layers": layers})
    if config.hidden_size != hidden:
        raise ValueError(f"hidden {hidden} is not that of {STACK_MODEL}")
    made = Predictor(machine, Workload(config, tp_size, stand_in_keys=keys))
    ctas = LaunchConfig().ctas
    for row in document["rows"]:
        if row["gemm"] != "trt":
            continue
        tokens = row["num_tokens"]
        predicted = {
            "no_comm": made.no_comm_us(tokens),
            "fuse_only": made.fuse_only_us(tokens)[0],
            "woven": made.woven(tokens, 0, ctas, ctas).us,
        }
        for variant, us in predicted.items():
            ratios = row[f"{variant}_ms"] / row["stock_ms"], us / made.stock_us(tokens)
            yield CheckRow(machine.name, f"stack_tp2, {row['mode']}: {variant} / stock", "check", tokens, *ratios)
