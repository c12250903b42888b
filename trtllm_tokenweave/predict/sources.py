"""The sources of the check: measured times beside what is predicted for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.predict.check import CheckRow
from trtllm_tokenweave.predict.data import About, FittedMachine, Role
from trtllm_tokenweave.predict.fit import FIT_MAX_TOKENS, FIT_MODEL, PIECES_MACHINE, STEPS_MACHINE, measured_steps
from trtllm_tokenweave.predict.gemm import BYTES
from trtllm_tokenweave.predict.machine import Machine, make_machine
from trtllm_tokenweave.predict.step import TILE, Workload
from trtllm_tokenweave.predict.streams import Op
from trtllm_tokenweave.predict.variants import Predictor, beside_us
from trtllm_tokenweave.table.files import read_json, read_text, table_error
from trtllm_tokenweave.waves import GemmShape

CHECK_MODELS = ("llama-3.3-70b", FIT_MODEL, "mixtral-8x22b")


def check_rows(machines: Mapping[str, FittedMachine], results: Mapping[Path, Any]) -> list[CheckRow]:
    """Rows of the published steps and of our own results, as `read_results` gave them.

    Raises:
        UserError: A result is not what its bench writes.
    """
    return published_rows(machines) + own_rows(machines, results)


def published_rows(machines: Mapping[str, FittedMachine]) -> list[CheckRow]:
    """Whole steps on the machine that has them."""
    machine = make_machine(STEPS_MACHINE, machines[STEPS_MACHINE].parameters)
    return [row for model in CHECK_MODELS for row in _steps(machine, model)]


def read_results(folder: Path) -> dict[Path, Any]:
    """What `bench` left in a folder; every file that the check reads has to be there.

    Raises:
        UserError: The folder or a file is missing, or is not JSON.
    """
    paths = [folder / f"{name}.json" for name in _READERS]
    for path in (folder, *paths):
        if not path.exists():
            fix = "run it where the repository lies, or name its docs/results with --results"
            raise UserError("does not exist", where=str(path), fix=fix)
    return {path: read_json(read_text(path), str(path)) for path in paths}


def own_rows(machines: Mapping[str, FittedMachine], results: Mapping[Path, Any]) -> list[CheckRow]:
    """Rows of our own results, by their paths.

    Raises:
        UserError: A result is not what its bench writes.
    """
    machine = make_machine(PIECES_MACHINE, machines[PIECES_MACHINE].parameters)
    rows: list[CheckRow] = []
    for path, document in results.items():
        try:
            rows += _READERS[path.stem](machine, document)
        except ValidationError as error:
            first = table_error(error, str(path))
            what = f"is not what bench writes: {first.what}"
            raise UserError(what, where=first.where, fix="measure again") from error
        except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
            what = f"is not what bench writes ({type(error).__name__}: {error})"
            raise UserError(what, where=str(path), fix="measure again") from error
    return rows


@dataclass(frozen=True)
class _Step:
    """One step, measured and predicted: its time by variant, "stock" among them."""

    machine: str
    source: str
    num_tokens: int
    measured_ms: Mapping[str, float]
    predicted_us: Mapping[str, float]
    about: About
    case: str = ""

    def ratio(self, variant: str, role: Role = "check") -> CheckRow:
        """A variant's time as a share of stock's."""
        measured, predicted = (times[variant] / times["stock"] for times in (self.measured_ms, self.predicted_us))
        source = f"{self.source}: {variant} / stock"
        return CheckRow(self.machine, source, role, self.num_tokens, measured, predicted, self.case, about=self.about)

    def ms(self, variant: str, role: Role = "check") -> CheckRow:
        """A variant's time in milliseconds."""
        measured, predicted = self.measured_ms[variant], self.predicted_us[variant] / 1000
        source = f"{self.source}: {variant} ms"
        return CheckRow(self.machine, source, role, self.num_tokens, measured, predicted, self.case, "ms", self.about)


def _steps(machine: Machine, model: str) -> Iterator[CheckRow]:
    """Published steps; those beyond the fit's sizes are a source of their own where the others were fitted."""
    data = machine.data
    made = Predictor(machine, Workload(preset(model), data.tp_size), "library")
    for row in measured_steps(data, model):
        time = made.predict(row.num_tokens)
        assert time.best is not None
        beyond = row.num_tokens > FIT_MAX_TOKENS
        step = _Step(
            machine.name,
            f"arXiv:2505.11329, {model}, tp {data.tp_size}",
            row.num_tokens,
            {"stock": row.stock, "no communication": row.no_comm, "best split": row.weave},
            {"stock": time.stock_us, "no communication": time.no_comm_us, "best split": time.best.us},
            made.workload.config.kind,
            "extrapolated" if beyond else "",
        )
        role: Role = "fit" if model == FIT_MODEL and not beyond else "check"
        # A source has one role.
        serial = replace(step, source=f"{step.source}, beyond the fit") if model == FIT_MODEL and beyond else step
        yield serial.ratio("no communication", role)
        yield step.ratio("best split")
        yield serial.ms("stock", role)
        yield step.ms("best split")


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
    """A GEMM beside the collective against one after the other, from the times of either alone.

    `beside_gemm`, to which `beside` is fitted, has the same GEMM and collective, with 4 to 32 CTAs too.
    """
    tokens, k, n = (int(size) for size in re.findall(r"\d+", document["what"])[:3])
    gemm = Op(document["gemm_us"], GemmShape("", "mlp", n, k).tiles(tokens, TILE), 2.0 * tokens * n * k)
    for row in document["rows"]:
        beside = beside_us(machine, gemm, row["collective_us"], row["ctas"]) + machine.parameters.fork_us
        ratios = row["eager_us"] / row["sequence_us"], beside / (gemm.us + row["collective_us"])
        source, case = "overlap_tp2: GEMM beside collective / in sequence", f"{row['ctas']} CTAs"
        yield CheckRow(machine.name, source, "same setting as the fit", tokens, *ratios, case)


_Ms = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _OwnRow(BaseModel):
    """Milliseconds of a step in our engines but the woven one."""

    model_config = ConfigDict(strict=True)

    num_tokens: Annotated[int, Field(gt=0)]
    mode: str
    stock_ms: _Ms
    no_comm_ms: _Ms
    fuse_only_ms: _Ms


class _StackRow(_OwnRow):
    """A step of `bench stack`.

    Attributes:
        gemm: Whose GEMMs the woven engine has.
        ctas: Of its collectives.
        gemm_sms: Of its GEMMs with a budget; 0: it has none.
    """

    gemm: Literal["trt", "budget"]
    ctas: int
    gemm_sms: int
    woven_ms: _Ms


class _StackResult(BaseModel):
    """What the check needs of a result of `bench stack`.

    Attributes:
        what: Layers, hidden size, tp_size and keys of the stand-in attention, in words.
        model: The preset.
        offset: Of the split.
        symmetric: Collectives work in place; else they copy.
        rows: The steps.
    """

    model_config = ConfigDict(strict=True)

    what: str
    model: str
    offset: int
    symmetric: bool
    rows: list[_StackRow]


def _stack(machine: Machine, document: Any) -> Iterator[CheckRow]:
    """Decoder layers with stand-in attention, run as the result says."""
    result = _StackResult.model_validate(document)
    found = re.search(r"(\d+) decoder layers, hidden (\d+), tp_size (\d+).* (\d+) keys", result.what)
    if found is None:
        raise ValueError("layers, hidden size, tp_size and keys are not in `what`")
    layers, hidden, tp_size, keys = map(int, found.groups())
    config = preset(result.model).model_copy(update={"num_hidden_layers": layers})
    if config.hidden_size != hidden:
        raise ValueError(f"hidden {hidden} is not that of {result.model}")
    machine = machine if result.symmetric else machine.staged
    workload = Workload(config, tp_size, stand_in_keys=keys)
    for row in result.rows:
        if row.ctas not in machine.data.fused:
            how = "in place" if result.symmetric else "that copy"
            raise UserError(
                f"collectives {how} were not measured with {row.ctas} CTAs",
                where="stack_tp2.json: ctas",
                fix=f"measure the stack with one of {', '.join(map(str, sorted(machine.data.fused)))}",
            )
        if row.gemm == "budget" and row.gemm_sms != machine.sms - row.ctas:
            raise ValueError(f"gemm_sms {row.gemm_sms} is not what {row.ctas} CTAs leave of {machine.sms} SMs")
        made, woven = Predictor(machine, workload, row.gemm), f"woven, {row.gemm}"
        split = made.woven(row.num_tokens, result.offset, row.ctas, row.ctas)
        step = _own_step(made, "stack_tp2", row, woven, (row.woven_ms, split.us))
        # The other engines are the same in both rows.
        if row.gemm == "trt":
            yield from (step.ratio(variant) for variant in ("no_comm", "fuse_only"))
            yield step.ms("stock")
        yield step.ratio(woven)
        yield step.ms(woven)


def _own_step(made: Predictor, result: str, row: _OwnRow, woven: str, times: tuple[float, float]) -> _Step:
    """A step of our engines; ``times`` of the one called ``woven`` are measured ms and predicted us."""
    measured = {"stock": row.stock_ms, "no_comm": row.no_comm_ms, "fuse_only": row.fuse_only_ms, woven: times[0]}
    tokens, workload = row.num_tokens, made.workload
    predicted = {
        "stock": made.stock_us(tokens),
        "no_comm": made.no_comm_us(tokens),
        "fuse_only": made.fuse_only_us(tokens, 0)[0],
        woven: times[1],
    }
    about: About = "parts" if workload.stand_in_keys else workload.config.kind
    return _Step(made.machine.name, f"{result}, {row.mode}", tokens, measured, predicted, about)


class _E2eRow(_OwnRow):
    """A step of `bench e2e`, and CTAs of the even split's collectives."""

    ctas_even: int
    even_split_ms: _Ms


class _E2eEngine(BaseModel):
    """Whether an engine's collectives work in place; else they copy."""

    model_config = ConfigDict(strict=True)

    symmetric: bool


class _E2eResult(BaseModel):
    """What the check needs of a result of `bench e2e`.

    Attributes:
        what: Layers and tp_size, in words.
        model: The preset.
        gemm_plugin: Whether all products are cuBLAS's.
        engines: By name.
        rows: The steps.
    """

    model_config = ConfigDict(strict=True)

    what: str
    model: str
    gemm_plugin: bool
    engines: dict[str, _E2eEngine]
    rows: list[_E2eRow]


def _e2e(machine: Machine, document: Any) -> Iterator[CheckRow]:
    """Prefill of one sequence with real attention; collectives work in place, GEMMs behind them have a budget."""
    result = _E2eResult.model_validate(document)
    found = re.search(r"(\d+) layers.* tp_size (\d+)", result.what)
    if found is None:
        raise ValueError("layers and tp_size are not in `what`")
    layers, tp_size = map(int, found.groups())
    if result.gemm_plugin or not result.engines["woven"].symmetric:
        raise ValueError("products by the Gemm plugin, or collectives that copy, are not predicted")
    config = preset(result.model).model_copy(update={"num_hidden_layers": layers})
    made = Predictor(machine, Workload(config, tp_size), "budget")
    for row in result.rows:
        split = made.woven(row.num_tokens, 0, row.ctas_even, row.ctas_even)
        step = _own_step(made, "e2e_tp2", row, "even split", (row.even_split_ms, split.us))
        yield from (step.ratio(variant) for variant in ("no_comm", "fuse_only", "even split"))
        yield from (step.ms(variant) for variant in ("stock", "even split"))


_READERS: Mapping[str, Callable[[Machine, Any], Iterator[CheckRow]]] = {
    "kernel_tp2": _kernel,
    "overlap_tp2": _overlap,
    "stack_tp2": _stack,
    "e2e_tp2": _e2e,
}
