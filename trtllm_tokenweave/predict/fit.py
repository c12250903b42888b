"""Fits a machine's parameters to measurements; docs/prediction.md lists which.

A machine whose whole steps were measured is fitted to those of one model, stock and without communication; never to
woven ones, and never to the model that the check is about. Of another, times are taken as measured, and the speed of
attention from the machine with steps. What compute loses to a collective beside it was measured on h200-peer alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.predict.curve import Fit, fit_positive
from trtllm_tokenweave.predict.data import (
    FittedMachine,
    MachineData,
    MeasuredStep,
    Parameters,
    machine_data,
)
from trtllm_tokenweave.predict.machine import make_machine
from trtllm_tokenweave.predict.step import TILE, Workload
from trtllm_tokenweave.predict.streams import Op
from trtllm_tokenweave.predict.variants import Predictor, beside_us
from trtllm_tokenweave.waves import GemmShape

STEPS_MACHINE, PIECES_MACHINE = "h100-multimem", "h200-peer"
# Its steps fit the parameters; the other models' check them.
FIT_MODEL = "qwen2.5-72b"
# The collectives were measured up to here, so that larger steps would fit an extrapolation; the check has them all.
FIT_MAX_TOKENS = 32768
# Where the sustained rate is looked for, FLOP per microsecond: a tenth to twice of what the GPU does at its best.
_SUSTAINED = np.geomspace(1e8, 2e9, 301)
_BESIDE = np.arange(0, 0.31, 0.01)


def fit_all() -> dict[str, FittedMachine]:
    """Parameters of every machine."""
    steps = fit_to_steps(STEPS_MACHINE)
    pieces = fit_to_pieces(PIECES_MACHINE, steps.parameters.attention_flops_per_us)
    steps = steps.model_copy(
        update={
            "parameters": steps.parameters.model_copy(update={"beside": pieces.parameters.beside}),
            "fitted_to": {
                **steps.fitted_to,
                "beside": f"nothing: taken from {PIECES_MACHINE}",
                "fork_us": "nothing: taken as 0",
            },
        }
    )
    return {PIECES_MACHINE: pieces, STEPS_MACHINE: steps}


def measured_steps(data: MachineData, model: str) -> tuple[MeasuredStep, ...]:
    """The rows of one model."""
    assert data.steps is not None
    return tuple(row for row in data.steps.rows if row.model == model)


def fit_to_steps(name: str) -> FittedMachine:
    """GEMM scale, attention, step and sustained rate, from stock steps and steps without communication.

    Only steps of up to FIT_MAX_TOKENS tokens.

    For a given sustained rate the slowdown of each measured step is known, and its time linear in the other three:
    ``slowdown * (gemm_scale * GEMMs + FLOPs / speed) + step + the rest``. The rate is the best of a grid.
    """
    data = machine_data(name)
    rows = [row for row in measured_steps(data, FIT_MODEL) if row.num_tokens <= FIT_MAX_TOKENS]
    unit = Parameters(attention_flops_per_us=1.0)

    def times(parameters: Parameters) -> NDArray[np.float64]:
        made = Predictor(make_machine(name, parameters), Workload(preset(FIT_MODEL), data.tp_size))
        return np.array(
            [made.no_comm_us(row.num_tokens) for row in rows] + [made.stock_us(row.num_tokens) for row in rows]
        )

    one = times(unit)
    gemms = times(unit.model_copy(update={"gemm_scale": 2.0})) - one
    flops = times(unit.model_copy(update={"attention_flops_per_us": 0.5})) - one
    measured = 1000 * np.array([row.no_comm for row in rows] + [row.stock for row in rows])
    made = Predictor(make_machine(name, unit), Workload(preset(FIT_MODEL), data.tp_size))
    rates = np.tile([made.flops(row.num_tokens) for row in rows], 2) / measured

    def fit(sustained: float) -> Fit:
        slower = np.sqrt(np.maximum(rates / sustained, 1.0))
        features = np.stack([slower * gemms, slower * flops, np.ones(len(measured))], axis=1)
        return fit_positive(features, measured, one - gemms - flops)

    sustained = min(_SUSTAINED, key=lambda rate: fit(rate).rms)
    found = fit(sustained)
    scale, per_flop, step_us = found.coefficients
    return FittedMachine(
        parameters=Parameters(
            gemm_scale=_digits(scale),
            attention_flops_per_us=_digits(1 / per_flop),
            step_us=_digits(step_us),
            sustained_flops_per_us=_digits(sustained),
        ),
        fitted_to={
            "gemm_scale, attention_flops_per_us, step_us, sustained_flops_per_us": f"steps of {FIT_MODEL}, stock and "
            f"without communication, {rows[0].num_tokens} to {rows[-1].num_tokens} tokens"
        },
        rms=round(found.rms, 4),
        worst=round(found.worst, 4),
    )


def fit_to_pieces(name: str, attention_flops_per_us: float) -> FittedMachine:
    """What a collective costs a GEMM beside it, from chains of both."""
    data = machine_data(name)
    assert data.beside_gemm is not None
    rows = [(gemm, beside) for gemm in data.beside_gemm.gemms for beside in gemm.beside]

    def errors(beside: float) -> list[float]:
        machine = make_machine(name, Parameters(attention_flops_per_us=attention_flops_per_us, beside=beside))
        found = []
        for gemm, row in rows:
            flops = 2.0 * gemm.m * gemm.n * gemm.k
            op = Op(gemm.alone.gemm_us, GemmShape("", "mlp", gemm.n, gemm.k).tiles(gemm.m, TILE), flops)
            found.append(beside_us(machine, op, row.held_us, row.ctas) / row.gemm_us - 1)
        return found

    # Absolute, not squared errors: in one of the rows the collective's clusters did not pack.
    beside = round(float(min(_BESIDE, key=lambda share: sum(map(abs, errors(share))))), 2)
    left = errors(beside)
    return FittedMachine(
        parameters=Parameters(attention_flops_per_us=attention_flops_per_us, beside=beside, fork_us=data.fork_us),
        fitted_to={
            "gemm_scale": "nothing: taken as 1",
            "step_us": "nothing: taken as 0",
            "sustained_flops_per_us": "nothing: no limit",
            "attention_flops_per_us": f"nothing: taken from {STEPS_MACHINE}, which has the same SMs",
            "beside": "GEMMs beside a collective (beside_gemm), least absolute errors",
            "fork_us": "nothing: the gap that forks leave between kernels, less that of others (stack_tp2, timeline)",
        },
        rms=round(float(np.sqrt(np.mean(np.square(left)))), 4),
        worst=round(max(map(abs, left)), 4),
    )


def _digits(value: float) -> float:
    """Five digits, so that the file does not change with the last bits of a linear algebra library."""
    return float(f"{value:.5g}")
