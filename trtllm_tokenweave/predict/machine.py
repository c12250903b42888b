"""A machine as the prediction sees it: times of single operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.predict.curve import Curve, Fit, fit_positive
from trtllm_tokenweave.predict.data import FOLDER, GemmData, MachineData, Parameters, fitted, load_gemms, machine_data
from trtllm_tokenweave.predict.gemm import BYTES, GemmModel

MACHINES = ("h200-peer", "h100-multimem")

# Collectives beside compute are tried up to this many CTAs: both fabrics are saturated by half of it, and a quarter
# of the SMs is more than any published configuration takes.
MAX_BESIDE_CTAS = 32


@dataclass(frozen=True)
class Machine:
    """Times in microseconds, sizes in bytes of the activation [tokens, hidden] that an operation works on.

    Attributes:
        name: One of MACHINES.
        data: Its measurements.
        parameters: What was fitted to them.
        gemms: GEMM times.
    """

    name: str
    data: MachineData
    parameters: Parameters
    gemms: GemmModel

    @property
    def sms(self) -> int:
        """SMs of one GPU."""
        return self.data.sms

    @cached_property
    def beside_ctas(self) -> tuple[int, ...]:
        """CTA counts for a collective beside compute."""
        return tuple(c for c in sorted(self.data.fused) if 0 < c <= MAX_BESIDE_CTAS)

    @property
    def staged(self) -> Machine:
        """The same machine where collectives copy their input and their result instead of working in place."""
        return replace(self, data=self.data.model_copy(update={"fused": self.data.staged}))

    def norm_us(self, size: int) -> float:
        """Residual add and RMSNorm of all rows."""
        return self._norm(size)

    def memory_us(self, moved: float) -> float:
        """A kernel that does nothing but read and write `moved` bytes: launch + bytes / bandwidth, from the norm's."""
        launch, per_byte = self.memory.coefficients
        return launch + per_byte * moved

    def all_reduce_us(self, size: int, tp_size: int) -> float:
        """The stock all-reduce."""
        return self._all_reduce(self._traffic(size, tp_size))

    def fused_us(self, ctas: int, size: int, tp_size: int) -> float:
        """AllReduceRmsNorm with that many CTAs, one of `data.fused`.

        Raises:
            UserError: they were not measured.
        """
        if ctas not in self._fused:
            fix = f"choose one of {', '.join(map(str, sorted(self._fused)))}"
            raise UserError(f"{ctas} CTAs were not measured on {self.name}", where="ctas", fix=fix)
        return self._fused[ctas](self._traffic(size, tp_size))

    def best_fused(self, size: int, tp_size: int) -> tuple[float, int]:
        """AllReduceRmsNorm with all SMs to choose from: (time, CTAs)."""
        return min((self.fused_us(ctas, size, tp_size), ctas) for ctas in self._fused if ctas)

    def collective_sizes(self, tp_size: int) -> tuple[float, float]:
        """The smallest and the largest activation whose all-reduce and norm were measured."""
        per_byte = self._traffic(1, tp_size)
        curves = (self._norm.xs, [x / per_byte for x in self._all_reduce.xs])
        return max(xs[0] for xs in curves), min(xs[-1] for xs in curves)

    @cached_property
    def memory(self) -> Fit:
        """Launch and time of a byte, fitted to the norm, which reads input and residual and writes both."""
        return fit_positive([(1.0, 4.0 * size) for size in self._norm.xs], self._norm.ys)

    def _traffic(self, size: int, tp_size: int) -> float:
        # Over peer pointers each rank pulls and pushes 2 (tp - 1) / tp of the activation. The switch adds up and
        # copies by itself, so that with multicast it is the activation once, for any number of ranks.
        if self.data.fabric == "multimem":
            return size
        measured = self.data.tp_size
        return size * (tp_size - 1) / tp_size * measured / (measured - 1)

    def _by_size(self, points: tuple[tuple[int, float], ...]) -> Curve:
        sized = ((tokens * self.data.hidden_size * BYTES, us) for tokens, us in points)
        return Curve.through(sized, self.data.event_us)

    @cached_property
    def _norm(self) -> Curve:
        return self._by_size(self.data.norm)

    @cached_property
    def _all_reduce(self) -> Curve:
        return self._by_size(self.data.all_reduce)

    @cached_property
    def _fused(self) -> dict[int, Curve]:
        return {ctas: self._by_size(points) for ctas, points in self.data.fused.items()}


def make_machine(name: str, parameters: Parameters, gemms: GemmData | None = None) -> Machine:
    """A machine with given parameters; `gemms` replaces its curves."""
    data = machine_data(name)
    return Machine(name, data, parameters, GemmModel(gemms or load_gemms(FOLDER / data.gemm)))


def load_machine(name: str, gemms: GemmData | None = None) -> Machine:
    """The machine called `name` as fitted. Curves of one's own are taken as they are, without the fitted scale.

    Raises:
        UserError: There is none, or the curves are of a GPU with another number of SMs.
    """
    if name not in MACHINES:
        raise UserError(f"no machine called {name!r}", where="--machine", fix=f"choose one of {', '.join(MACHINES)}")
    parameters = fitted().machines[name].parameters
    if gemms is not None:
        sms = machine_data(name).sms
        if gemms.sms != sms:
            what = f"measured on a GPU of {gemms.sms} SMs, {name} has {sms}"
            raise UserError(what, where="--gemm", fix="measure on that GPU")
        parameters = parameters.model_copy(update={"gemm_scale": 1.0})
    return make_machine(name, parameters, gemms)
