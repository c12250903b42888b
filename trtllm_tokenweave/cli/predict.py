"""`trtllm-tokenweave plan --predict`: predicted times of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from trtllm_tokenweave.cli.console import print_whole
from trtllm_tokenweave.predict import Gemms, Predictor, StepTimes, Workload, load_gemms, load_machine
from trtllm_tokenweave.predict.data import SourceError, fitted

DEFAULT_MACHINE = "h200-peer"
_GEMMS: Mapping[Gemms, str] = {
    "library": "cuBLAS's GEMMs",
    "trt": "TensorRT's GEMMs",
    "budget": "GEMMs that keep off the SMs of the collective beside them",
}
_FABRICS = {"peer": "peer memory, without multicast", "multimem": "multicast"}
_KINDS = {"dense": "dense model", "moe": "mixture of experts"}


@dataclass(frozen=True)
class Prediction:
    """Steps of one workload on one machine.

    Attributes:
        preset: The model's name.
        predictor: What predicts.
        steps: The steps.
    """

    preset: str
    predictor: Predictor
    steps: tuple[StepTimes, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What these steps take over from other measurements than their own."""
        return self.predictor.notes(step.num_tokens for step in self.steps)

    @property
    def errors(self) -> tuple[SourceError, ...]:
        """How far predictions for this machine were off where they were checked."""
        found = fitted().errors.get(self.predictor.machine.name, ())
        return tuple(error for error in found if error.role == "check")

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        machine, workload = self.predictor.machine, self.predictor.workload
        return {
            "model": {"preset": self.preset, "tp_size": workload.tp_size, "batch": workload.batch},
            "machine": {
                "name": machine.name,
                "what": machine.data.what,
                "stock": machine.data.stock,
                "fabric": machine.data.fabric,
                "source": machine.data.source,
                "date": machine.data.date,
                "gemms": machine.gemms.data.source,
                "woven_gemms": self.predictor.gemms,
                "parameters": machine.parameters.model_dump(mode="json"),
            },
            "notes": list(self.notes),
            "errors": [error.model_dump(mode="json") for error in self.errors],
            "steps": [_rounded({**asdict(step), "ratios": _ratios(step)}) for step in self.steps],
        }

    def show(self, console: Console) -> None:
        """Print the table and how far to trust it."""
        machine, workload = self.predictor.machine, self.predictor.workload
        title = f"{self.preset}, tp_size {workload.tp_size}, prefill of {_sequences(workload.batch)}, {machine.name}"
        view = Table(
            *("tokens", "stock ms", "best split ms", "no comm", "fused", "even", "best", "halves", "CTAs"),
            title=title,
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        view.show_edge = False
        for column in view.columns:
            column.no_wrap = True
        for step in self.steps:
            ratios, best = _ratios(step), step.best
            view.add_row(
                str(step.num_tokens),
                _ms(step.stock_us),
                "-" if best is None else _ms(best.us),
                *("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios.values()),
                "-" if best is None else f"{best.prefix}+{best.suffix}",
                "-" if best is None else f"{best.attention_ctas}/{best.mlp_ctas}",
            )
        print_whole(console, view)
        stock = f"stock here: {machine.data.stock}; ours: {_FABRICS[machine.data.fabric]}"
        console.print(stock, markup=False, highlight=False)
        console.print(
            "Predicted, not measured; ratios to stock. No comm: stock without its all-reduces. Fused: not split. Even, "
            "best: woven at half and at the best split, with "
            f"{_GEMMS[self.predictor.gemms]}. CTAs: of the best split's attention/MLP collective.",
            highlight=False,
        )
        console.print(f"collectives: {machine.data.source} ({machine.data.date})", markup=False, highlight=False)
        console.print(f"GEMMs: {machine.gemms.data.source} ({machine.gemms.data.date})", markup=False, highlight=False)
        for note in self.notes:
            console.print(f"note: {note}", markup=False, highlight=False)
        for text in self._trust():
            console.print(text, markup=False, highlight=False)

    def _trust(self) -> Iterator[str]:
        """How far whole steps of such a model were off, and in one line how far parts were."""
        kind = self.predictor.workload.config.kind
        whole = [error for error in self.errors if error.about == kind]
        for error in whole:
            what = "ratios" if error.unit == "ratio" else "milliseconds"
            yield f"{what} off where checked: worst {error.worst:+.1%}, mean {error.mean:.1%}, {error.source}"
        if not whole:
            yield f"no step of a {_KINDS[kind]} was checked on {self.predictor.machine.name}"
        parts = [error for error in self.errors if error.about == "parts"]
        if parts:
            worst = max((error.worst for error in parts), key=abs)
            mean = sum(error.mean * error.rows for error in parts) / sum(error.rows for error in parts)
            what = f"kernels, and layers with a stand-in for attention ({len(parts)} checks)"
            yield f"ratios and milliseconds off where checked: worst {worst:+.1%}, mean {mean:.1%}, {what}"
        yield "all checks: docs/prediction.md; those of this machine: --json"


def make_prediction(
    preset: str, workload: Workload, machine: str | None, gemm: Path | None, counts: Sequence[int], gemms: Gemms
) -> Prediction:
    """Predict steps of these token counts; `gemm` is a file of curves, `gemms` what woven steps have.

    Raises:
        UserError: No such machine, or `gemm` is no file of GEMM curves of its GPU.
    """
    curves = None if gemm is None else load_gemms(gemm)
    predictor = Predictor(load_machine(machine or DEFAULT_MACHINE, curves), workload, gemms)
    return Prediction(preset, predictor, tuple(predictor.predict(count) for count in counts))


def _ratios(step: StepTimes) -> dict[str, float | None]:
    times = {
        "no_comm": step.no_comm_us,
        "fuse_only": step.fuse_only_us,
        "even": None if step.even is None else step.even.us,
        "best": None if step.best is None else step.best.us,
    }
    return {name: None if us is None else us / step.stock_us for name, us in times.items()}


def _rounded(value: Any) -> Any:
    """Times and ratios to four digits after the point; more would be noise of the arithmetic."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def _ms(us: float) -> str:
    return f"{us / 1000:.2f}"


def _sequences(batch: int) -> str:
    return f"{batch} sequence{'' if batch == 1 else 's'}"
