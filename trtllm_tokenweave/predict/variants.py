"""Predicted time of a step: stock, without communication, fused only, and woven at each split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from trtllm_tokenweave.passes.gemm import beside
from trtllm_tokenweave.passes.order import collective_order
from trtllm_tokenweave.plugin_specs import Half, SiteKind
from trtllm_tokenweave.predict.machine import Machine
from trtllm_tokenweave.predict.step import Kernels, Rows, Workload
from trtllm_tokenweave.predict.streams import Op, Streams
from trtllm_tokenweave.schedule import DEFAULT_GRANULARITY, DEFAULT_OFFSETS, split_point

# A woven run repeats itself layer after layer from the second or third on; the rest is multiplied.
SIMULATED_LAYERS = 6
_KINDS = (SiteKind.ATTENTION, SiteKind.MLP)
#: GEMMs of woven steps: cuBLAS's in a framework ("library"), TensorRT's ("trt"), or TensorRT's but for the first behind
#: each collective, which keeps to the SMs that the collective beside it leaves ("budget").
Gemms = Literal["library", "trt", "budget"]


@dataclass(frozen=True)
class SplitTime:
    """One way to weave a step, and its time."""

    offset: int
    prefix: int
    suffix: int
    attention_ctas: int
    mlp_ctas: int
    us: float


@dataclass(frozen=True)
class StepTimes:
    """Microseconds of one step of all layers.

    Attributes:
        num_tokens: Tokens of the step.
        stock_us: All-reduce, then residual add and RMSNorm.
        no_comm_us: The same without its all-reduces; every rank still normalises all tokens, so that a woven step may
            be faster.
        fuse_only_us: AllReduceRmsNorm, not split.
        fuse_only_ctas: Its CTAs.
        even: The best with offset 0, or None where no split leaves a suffix.
        best: The best of all offsets and CTA counts, or None.
    """

    num_tokens: int
    stock_us: float
    no_comm_us: float
    fuse_only_us: float
    fuse_only_ctas: int
    even: SplitTime | None
    best: SplitTime | None


class Predictor:
    """Predicts steps of one workload on one machine; `gemms`: of woven steps."""

    def __init__(self, machine: Machine, workload: Workload, gemms: Gemms = "budget") -> None:
        self.machine = machine
        self.workload = workload
        self.gemms = gemms
        kernels = Kernels(machine, workload)

        @cache  # the same halves return with other CTAs
        def block(kind: SiteKind, rows: Rows, slower: float) -> tuple[Op, ...]:
            return tuple(op.slowed(slower) for op in kernels.block(kind, rows))

        self._block = block
        self._slowdowns: dict[int, float] = {}

    def notes(self, counts: Iterable[int] = ()) -> tuple[str, ...]:
        """What predictions take over from other shapes, group sizes or, in steps of `counts` tokens, other sizes."""
        notes, steps = [], sorted(set(counts))
        data, tp_size = self.machine.data, self.workload.tp_size
        if self.workload.config.moe is not None:
            notes.append("mixtures of experts are predicted badly (docs/prediction.md): do not rely on it")
        if tp_size != data.tp_size:
            how = "taken as they are" if data.fabric == "multimem" else "scaled by traffic"
            notes.append(f"collectives were measured at tp_size {data.tp_size} and are {how}")
        guessed = [s.name for s in self.workload.shapes if not self.machine.gemms.is_measured(s)]
        if guessed:
            fit = self.machine.gemms.fit
            notes.append(
                f"no measured curve for {', '.join(guessed)}: wave model (of measured ones it is off by "
                f"{fit.rms:.0%} rms, at most {fit.worst:.0%})"
            )
        for what, (low, high) in self._measured_tokens().items():
            outside = [str(count) for count in steps if not low <= count <= high]
            if outside:
                notes.append(
                    f"{what} were measured at {low} to {high} tokens: extrapolated for {', '.join(outside)} (the same "
                    "time below, a straight line above)"
                )
        return tuple(notes)

    def _measured_tokens(self) -> dict[str, tuple[int, int]]:
        """Fewest and most tokens of whole steps whose pieces were measured; of a GEMM with groups none was."""
        sizes, token = self.machine.collective_sizes(self.workload.tp_size), self.workload.activation(1)
        gemms = [self.machine.gemms.measured_tokens(shape) for shape in self.workload.shapes if shape.groups == 1]
        return {
            "GEMMs": (max(low for low, _ in gemms), min(high for _, high in gemms)),
            "collectives and norms": (math.ceil(sizes[0] / token), math.floor(sizes[1] / token)),
        }

    def predict(self, num_tokens: int, offsets: Iterable[int] = DEFAULT_OFFSETS) -> StepTimes:
        """All variants of a step of `num_tokens` >= 1 tokens."""
        even = self.best_split(num_tokens, (0,))
        others = self.best_split(num_tokens, (offset for offset in sorted(set(offsets)) if offset))
        fuse_only_us, ctas = self.fuse_only_us(num_tokens)
        return StepTimes(
            num_tokens=num_tokens,
            stock_us=self.stock_us(num_tokens),
            no_comm_us=self.no_comm_us(num_tokens),
            fuse_only_us=fuse_only_us,
            fuse_only_ctas=ctas,
            even=even,
            best=min((split for split in (even, others) if split is not None), key=lambda s: s.us, default=None),
        )

    def flops(self, num_tokens: int) -> float:
        """Of a step on one rank."""
        return self.workload.config.num_hidden_layers * sum(op.flops for op in self._whole(num_tokens, 1.0))

    def no_comm_us(self, num_tokens: int) -> float:
        """Stock without its all-reduces."""
        return self._serial(num_tokens, self.machine.norm_us(self.workload.activation(num_tokens)))

    def stock_us(self, num_tokens: int) -> float:
        """All-reduce, then residual add and RMSNorm, at every site."""
        size = self.workload.activation(num_tokens)
        site_us = self.machine.all_reduce_us(size, self.workload.tp_size) + self.machine.norm_us(size)
        return self._serial(num_tokens, site_us)

    def fuse_only_us(self, num_tokens: int, ctas: int | None = None) -> tuple[float, int]:
        """AllReduceRmsNorm at every site with `ctas` CTAs (one of `data.fused`; None: the best), and their number."""
        size, tp_size = self.workload.activation(num_tokens), self.workload.tp_size
        if ctas is None:
            site_us, ctas = self.machine.best_fused(size, tp_size)
        else:
            site_us = self.machine.fused_us(ctas, size, tp_size)
        return self._serial(num_tokens, site_us), ctas

    def best_split(self, num_tokens: int, offsets: Iterable[int]) -> SplitTime | None:
        """The fastest of the offsets that leave a suffix, with the fastest CTAs for each; None if none does.

        Both kinds get the same CTAs first; then each kind alone is changed, and what helps is kept.
        """
        counts = self.machine.beside_ctas
        best: SplitTime | None = None
        for offset in offsets:
            if split_point(num_tokens, DEFAULT_GRANULARITY, offset) >= num_tokens:
                continue
            found = min((self.woven(num_tokens, offset, c, c) for c in counts), key=lambda s: s.us)
            found = min((self.woven(num_tokens, offset, c, found.mlp_ctas) for c in counts), key=lambda s: s.us)
            found = min((self.woven(num_tokens, offset, found.attention_ctas, c) for c in counts), key=lambda s: s.us)
            if best is None or found.us < best.us:
                best = found
        return best

    def woven(self, num_tokens: int, offset: int, attention_ctas: int, mlp_ctas: int) -> SplitTime:
        """One split with given CTAs. All splits of a step have the clock of the even one: they compute the same."""
        split = SplitTime(offset, *self._halves(num_tokens, offset), attention_ctas, mlp_ctas, us=0.0)
        return replace(split, us=self._woven_us(num_tokens, split, self._woven_slowdown(num_tokens)))

    def _halves(self, num_tokens: int, offset: int) -> tuple[int, int]:
        prefix = split_point(num_tokens, DEFAULT_GRANULARITY, offset)
        return prefix, num_tokens - prefix

    def _woven_us(self, num_tokens: int, split: SplitTime, slower: float) -> float:
        """Both streams, simulated in the order that the pass gives them, with compute at 1 / slower of its clock."""
        workload, machine = self.workload, self.machine
        lengths = workload.sequences(num_tokens)
        halves = {
            Half.PREFIX: Rows(lengths, 0, split.prefix),
            Half.SUFFIX: Rows(lengths, split.prefix, num_tokens),
        }
        ctas = {SiteKind.ATTENTION: split.attention_ctas, SiteKind.MLP: split.mlp_ctas}
        layers = workload.config.num_hidden_layers
        simulated = min(layers, SIMULATED_LAYERS)
        parameters = machine.parameters
        streams = Streams(machine.sms, parameters.beside, parameters.fork_us, dealt=self.gemms != "library")
        ends: list[float] = []
        kinds = _KINDS * simulated
        for event in collective_order(kinds):
            key = event.site, event.half
            if event.action == "join":
                streams.join(key)
                continue
            kind, rows = kinds[event.site], halves[event.half]
            first, *others = self._block(kind, rows, slower)
            if self.gemms == "budget":
                first = replace(first, budget=machine.sms - ctas[beside(kinds, event.site, event.half)])
            for op in (first, *others):
                streams.run(op)
            size = workload.activation(rows.count)
            streams.start(key, machine.fused_us(ctas[kind], size, workload.tp_size), ctas[kind])
            if kind is SiteKind.MLP and event.half is Half.SUFFIX:
                ends.append(streams.now)
        us = streams.finish() + self._once(num_tokens)
        if layers > simulated:
            us += (layers - simulated) * (ends[-1] - ends[-2])
        # The halves are cut out at the front and joined at the end, each time with a copy of all rows.
        return us + 2 * machine.memory_us(2 * workload.activation(num_tokens))

    def _woven_slowdown(self, num_tokens: int) -> float:
        if num_tokens not in self._slowdowns:
            counts = self.machine.beside_ctas
            ctas = counts[len(counts) // 2]
            split = SplitTime(0, *self._halves(num_tokens, 0), ctas, ctas, us=0.0)
            self._slowdowns[num_tokens] = self._slowdown(
                num_tokens, lambda slower: self._woven_us(num_tokens, split, slower)
            )
        return self._slowdowns[num_tokens]

    def _serial(self, num_tokens: int, site_us: float) -> float:
        """One kernel after the other, with `site_us` at each site."""
        layers = self.workload.config.num_hidden_layers
        rest = len(_KINDS) * layers * site_us + self._once(num_tokens)

        def time(slower: float) -> float:
            return layers * sum(op.us for op in self._whole(num_tokens, slower)) + rest

        return time(self._slowdown(num_tokens, time))

    def _slowdown(self, num_tokens: int, time: Callable[[float], float]) -> float:
        return slowdown(time, self.flops(num_tokens), self.machine.parameters.sustained_flops_per_us)

    def _whole(self, num_tokens: int, slower: float) -> tuple[Op, ...]:
        """A layer's kernels over the whole step."""
        rows = Rows(self.workload.sequences(num_tokens), 0, num_tokens)
        return tuple(op for kind in _KINDS for op in self._block(kind, rows, slower))

    def _once(self, num_tokens: int) -> float:
        # The norm ahead of the first layer follows no all-reduce.
        return self.machine.parameters.step_us + self.machine.norm_us(self.workload.activation(num_tokens))


def slowdown(time: Callable[[float], float], flops: float, sustained: float | None) -> float:
    """Full clock / clock in a step that reaches the power limit, at least 1.

    A FLOP takes energy in proportion to the voltage squared, and the voltage follows the clock. Averaged over a step
    (the limit acts over milliseconds), the power of compute is then in proportion to ``flops / time / slowdown^2``, and
    the limit is where that reaches `sustained`: ``slowdown^2 * time(slowdown) = flops / sustained``.

    Args:
        time: Microseconds of the step at a slowdown; does not fall.
        flops: Of the step.
        sustained: FLOP per microsecond at the full clock, or None for no limit.
    """
    if sustained is None or flops <= sustained * time(1.0):
        return 1.0
    low, high = 1.0, math.sqrt(flops / sustained / time(1.0))
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if middle**2 * time(middle) > flops / sustained else (middle, high)
    return (low + high) / 2


def beside_us(machine: Machine, gemm: Op, held_us: float, ctas: int) -> float:
    """A GEMM that starts when a collective of `held_us` has become resident; without the wait for that."""
    streams = Streams(machine.sms, machine.parameters.beside)
    streams.start("collective", held_us, ctas)
    streams.run(gemm)
    return streams.now
