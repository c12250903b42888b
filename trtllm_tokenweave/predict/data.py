"""The measurements that predictions start from: JSON files beside this module, and of `bench gemm`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.model_config import DType
from trtllm_tokenweave.table.files import read_text
from trtllm_tokenweave.waves import MAX_SMS

FOLDER = Path(__file__).parent / "data"

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# "same setting as the fit": other times than the fit's, but of the same GEMM and collective, CTAs in the same range.
Role = Literal["check", "same setting as the fit", "fit"]
Unit = Literal["ratio", "ms"]
# Whole steps with real attention of a dense model or of a mixture of experts; parts: a kernel by itself, or layers with
# a stand-in for attention.
About = Literal["dense", "moe", "parts"]
_Count = Annotated[int, Field(gt=0, le=2**30)]
# What timing a single kernel with events adds to it: what an empty kernel reads so, less what it reads in a chain.
# Kernels of a step follow each other, so that it is taken off every value.
EventUs = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Points = Annotated[tuple[tuple[_Count, _Positive], ...], Field(min_length=2)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GemmCurve(_Frozen):
    """One GEMM [num_tokens, k] x [k, n]: microseconds by num_tokens."""

    n: _Count
    k: _Count
    points: Points


class GemmData(_Frozen):
    """GEMMs of one GPU; ``command`` made them, where it is one of ours."""

    what: str
    command: str = ""
    source: str
    date: str
    machine: str
    versions: dict[str, str]
    dtype: DType
    sms: Annotated[int, Field(ge=2, le=MAX_SMS)]
    event_us: EventUs
    curves: Annotated[tuple[GemmCurve, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _longer_than_events(self) -> GemmData:
        shortest = min(us for curve in self.curves for _, us in curve.points)
        if shortest <= self.event_us:
            raise ValueError(f"a GEMM takes {shortest} us, not longer than event_us {self.event_us}")
        return self


class Alone(_Frozen):
    """A GEMM in a chain of GEMMs by themselves."""

    gemm_us: _Positive


class Beside(Alone):
    """The same beside a collective that holds `ctas` SMs for `held_us`."""

    ctas: _Count
    held_us: _Positive


class BesideGemm(_Frozen):
    """One GEMM [m, k] x [k, n], alone and beside collectives."""

    m: _Count
    k: _Count
    n: _Count
    alone: Alone
    beside: tuple[Beside, ...]


class BesideData(_Frozen):
    """What a GEMM loses to a collective."""

    what: str
    source: str
    gemms: tuple[BesideGemm, ...]


class MeasuredStep(_Frozen):
    """Milliseconds of one prefill step."""

    model: str
    num_tokens: _Count
    stock: _Positive
    no_comm: _Positive
    weave: _Positive


class StepData(_Frozen):
    """Whole steps that were measured on the machine."""

    what: str
    rows: tuple[MeasuredStep, ...]


class MachineData(_Frozen):
    """One machine: its collectives (microseconds by tokens at `hidden_size`, of `tp_size` GPUs) and its GEMMs' file.

    Attributes:
        what: In words.
        source: Where the numbers come from.
        date: When they were measured or published.
        machine: GPUs, link, versions.
        stock: The stock network's all-reduce and norm, in words.
        fabric: Of the fused kernel.
        tp_size: GPUs of the measurement.
        hidden_size: Of the measurement.
        dtype: Of the measurement.
        sms: Of one GPU.
        event_us: See EventUs.
        gemm: File of GemmData.
        all_reduce: The stock all-reduce.
        norm: Residual add and RMSNorm of all rows.
        fused: AllReduceRmsNorm by CTAs, in place; 0: as many as the kernel takes by itself.
        staged: The same where the kernel copies its input and its result, where it was measured.
        beside_gemm: What a GEMM loses to a collective, where it was measured.
        fork_us: What compute waits for a collective to become resident, where it was measured: in an engine, beyond the
            gap between any two kernels.
        steps: Whole steps, where they were measured.
    """

    what: str
    source: str
    date: str
    machine: str
    stock: str
    fabric: Literal["peer", "multimem"]
    tp_size: Annotated[int, Field(ge=2)]
    hidden_size: _Count
    dtype: DType
    sms: Annotated[int, Field(ge=2, le=MAX_SMS)]
    event_us: EventUs
    gemm: str
    all_reduce: Points
    norm: Points
    fused: dict[int, Points]
    staged: dict[int, Points] = {}
    beside_gemm: BesideData | None = None
    fork_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    steps: StepData | None = None


class Parameters(_Frozen):
    """What `fit` found for a machine; docs/prediction.md says from which data.

    Attributes:
        gemm_scale: Time of a GEMM in a step / on its curve, at the full clock.
        attention_flops_per_us: Speed of causal attention, at the full clock.
        step_us: Of a whole step, whatever its size (embedding, logits, sampling, host).
        sustained_flops_per_us: The most FLOP per microsecond that the power limit allows at the full clock, on average
            over a step (None: the clock never falls); see `variants.slowdown`.
        beside: Share of its speed that compute loses while a collective runs beside it, beyond the SMs.
        fork_us: What the compute stream waits for each collective to become resident.
    """

    gemm_scale: _Positive = 1.0
    attention_flops_per_us: _Positive
    step_us: Annotated[float, Field(ge=0)] = 0.0
    sustained_flops_per_us: _Positive | None = None
    beside: Annotated[float, Field(ge=0, lt=1)] = 0.0
    fork_us: Annotated[float, Field(ge=0)] = 0.0


class FittedMachine(_Frozen):
    """Parameters, what each was fitted to, and the relative errors that the fit leaves on that."""

    parameters: Parameters
    fitted_to: dict[str, str]
    rms: float
    worst: float


class SourceError(_Frozen):
    """Prediction against measurement over the rows of one source: relative errors of a ratio, or of milliseconds."""

    source: str
    role: Role
    about: About
    unit: Unit
    rows: int
    worst: float
    mean: float


class Fitted(_Frozen):
    """The file fitted.json: parameters by machine and the errors of the check."""

    machines: dict[str, FittedMachine]
    errors: dict[str, tuple[SourceError, ...]]


@cache
def machine_data(name: str) -> MachineData:
    """A machine's file, by the machine's name."""
    return MachineData.model_validate_json((FOLDER / f"{name.replace('-', '_')}.json").read_text())


@cache
def fitted() -> Fitted:
    """What `python -m trtllm_tokenweave.predict` wrote."""
    return Fitted.model_validate_json((FOLDER / "fitted.json").read_text())


def load_gemms(path: Path) -> GemmData:
    """Read GEMM curves.

    Raises:
        UserError: The file cannot be read or is no result of `bench gemm`; names the field.
    """
    try:
        return GemmData.model_validate_json(read_text(path))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"is no result of bench gemm: {first['msg'].removeprefix('Value error, ')}",
            where=f"{path}: {field}" if field else str(path),
            fix="measure again with `trtllm-tokenweave bench gemm`",
        ) from error
