"""Ways to run a step: which there are, which of them can run, which to try first, and which are near each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from trtllm_tokenweave.schedule import DEFAULT_GRANULARITY, Mode, SplitPlan, split_point
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableKey, TableRow, TableSource, TuningTable
from trtllm_tokenweave.table.launch import CLUSTER
from trtllm_tokenweave.waves import DEFAULT_SMS, GemmShape, WaveModel, seed_offsets

#: Sixteen take the link's bandwidth (docs/benchmarks.md): more would only take SMs from the GEMMs.
CTAS = (4, 6, 8, 12, 16)
#: Of a collective that runs alone: nothing else needs the SMs.
FUSE_CTAS = (16, 32, 64, 96, 132)
#: Largest prefix half, as a share of the step.
MAX_PREFIX_SHARE = 0.75
#: Offsets move in rows of GEMM tiles first, in halves of them at the end.
COARSE_STEP, FINE_STEP = 128, 64


@dataclass(frozen=True)
class Candidate:
    """One way to run a step.

    Attributes:
        offset: Of the split (`schedule.split_point`); None: fuse-only.
        attention: Launch configuration of the collectives after attention.
        mlp: Of those after the MLP.
    """

    offset: int | None
    attention: LaunchConfig
    mlp: LaunchConfig

    @classmethod
    def of_plan(cls, plan: SplitPlan, granularity: int) -> Candidate:
        """What a table does with a step; a step whose suffix is empty is fuse-only."""
        if not plan.suffix:
            return cls(None, plan.attention, plan.mlp)
        return cls(plan.split - split_point(plan.num_tokens, granularity, 0), plan.attention, plan.mlp)

    @property
    def mode(self) -> Mode:
        """The mode of its row in a table."""
        return "fuse" if self.offset is None else "weave"

    def prefix(self, num_tokens: int, granularity: int) -> int:
        """Tokens of the prefix half."""
        return num_tokens if self.offset is None else split_point(num_tokens, granularity, self.offset)

    def __str__(self) -> str:
        """Its name: "fuse 132/132", "+128 16/16", with the threads and the GEMMs' SMs where these are not usual."""
        split = "fuse" if self.offset is None else f"+{self.offset}"
        return f"{split} {_launch_text(self.attention)}/{_launch_text(self.mlp)}"


def _launch_text(launch: LaunchConfig) -> str:
    text = str(launch.ctas)
    usual = LaunchConfig()
    if launch.threads != usual.threads:
        text += f"x{launch.threads}"
    if launch.gemm_sms:
        text += f"g{launch.gemm_sms}"
    return text if launch.fabric == usual.fabric else f"{launch.fabric}:{text}"


Launches = tuple[Mode, LaunchConfig, LaunchConfig]


@dataclass(frozen=True)
class Space:
    """All candidates of a tuning engine.

    Attributes:
        ctas: CTAs of collectives beside the other half's work, ascending.
        fuse_ctas: Of those that run alone, ascending.
        gemm_sms: SM targets of our GEMMs beside a collective, ascending; 0: what it leaves, and with TensorRT's GEMMs.
        threads: Of a CTA.
        granularity: Of the table.
        sms: Of the GPU.
        others: Launch configurations of tables that are to be measured too.
    """

    ctas: tuple[int, ...] = CTAS
    fuse_ctas: tuple[int, ...] = FUSE_CTAS
    gemm_sms: tuple[int, ...] = (0,)
    threads: int = LaunchConfig().threads
    granularity: int = DEFAULT_GRANULARITY
    sms: int = DEFAULT_SMS
    others: tuple[Launches, ...] = ()

    @cached_property
    def launches(self) -> tuple[Launches, ...]:
        """Every launch configuration that the engine holds, each once: its place here is how a step asks for it.

        A split comes first: it is what the engine's kernels are chosen for.
        """
        weave: list[Launches] = [
            ("weave", self.launch(attention, sms), self.launch(mlp, sms))
            for sms, attention, mlp in product(self.gemm_sms, self.ctas, self.ctas)
        ]
        fuse: list[Launches] = [("fuse", self.launch(n), self.launch(n)) for n in self.alone]
        return tuple(dict.fromkeys([*weave, *fuse, *self.others]))

    @property
    def alone(self) -> tuple[int, ...]:
        """The fuse-only CTAs that the GPU has SMs for."""
        return tuple(n for n in self.fuse_ctas if n <= self.sms) or (self.sms // CLUSTER * CLUSTER,)

    def launch(self, ctas: int, gemm_sms: int = 0) -> LaunchConfig:
        """A launch configuration of this space."""
        return LaunchConfig(ctas=ctas, threads=self.threads, gemm_sms=gemm_sms)

    def table(self, key: TableKey) -> TuningTable:
        """The tuning engine's table: one row a launch configuration, looked up by a step's number of sequences."""
        rows = (
            TableRow(batch=Bucket(lo=i, hi=i), tokens=Bucket(lo=1), mode=mode, attention=attention, mlp=mlp)
            for i, (mode, attention, mlp) in enumerate(self.launches, start=1)
        )
        text = "launch configurations by number of sequences; the split is an input of a step"
        source = TableSource(kind="capability", text=text)
        return TuningTable(key=key, granularity=self.granularity, min_tokens=1, source=source, rows=tuple(rows))

    def batch(self, candidate: Candidate) -> int:
        """Number of sequences with which a step gets the candidate's launch configuration.

        Raises:
            ValueError: the engine does not hold it.
        """
        return self.launches.index((candidate.mode, candidate.attention, candidate.mlp)) + 1

    def refusal(self, num_tokens: int, candidate: Candidate) -> str:
        """Why a candidate cannot run a step of ``num_tokens``; empty when it can."""
        if (candidate.mode, candidate.attention, candidate.mlp) not in self.launches:
            return "the engine holds no such launch configuration"
        most = max(candidate.attention.ctas, candidate.mlp.ctas)
        if candidate.offset is None:
            return "" if most <= self.sms else f"{most} CTAs are more than the GPU's {self.sms} SMs"
        if self.sms - most < CLUSTER:
            return f"{most} CTAs leave no SMs of {self.sms} to the GEMMs"
        if candidate.prefix(num_tokens, self.granularity) >= num_tokens:
            return "it leaves no suffix"
        # The row covers a whole bucket of the table, whose limit is that of its last count.
        top = -(-num_tokens // self.granularity) * self.granularity
        return "" if candidate.offset < top // 2 else "a table holds no such offset"

    # ---- where to look

    def fuse(self, ctas: int | None = None) -> Candidate:
        """Fuse-only; by default with the most CTAs."""
        launch = self.launch(self.alone[-1] if ctas is None else ctas)
        return Candidate(None, launch, launch)

    def woven(self, offset: int, ctas: int, gemm_sms: int | None = None) -> Candidate:
        """A split with equal CTAs after both blocks."""
        launch = self.launch(ctas, self.gemm_sms[0] if gemm_sms is None else gemm_sms)
        return Candidate(offset, launch, launch)

    def offsets(self, num_tokens: int, step: int = COARSE_STEP) -> tuple[int, ...]:
        """Offsets on the grid of ``step`` up to `MAX_PREFIX_SHARE`; 0 is always among them."""
        even = split_point(num_tokens, self.granularity, 0)
        last = max(int(num_tokens * MAX_PREFIX_SHARE) - even, 0)
        return tuple(n for n in range(0, last + 1, step) if even + n < num_tokens)

    def seeds(self, num_tokens: int, shapes: Sequence[GemmShape], near: Iterable[Candidate] = ()) -> list[Candidate]:
        """Splits to measure first: even, the least wasteful of wave arithmetic, some more, and what won elsewhere.

        Args:
            num_tokens: Tokens of the step.
            shapes: GEMMs of a layer.
            near: Candidates that won elsewhere, the nearest first.
        """
        near = [c for c in near if c.offset is not None]
        launch = near[0] if near else self.woven(0, self.ctas[len(self.ctas) // 2])
        model = WaveModel(launch.attention, launch.mlp, self.sms)
        offsets = self.offsets(num_tokens, FINE_STEP)
        waves = seed_offsets(shapes, model, num_tokens, granularity=self.granularity, offsets=offsets)
        # Some over the whole range, too: time over offset has a valley at each wave boundary.
        coarse = self.offsets(num_tokens)
        spread = (coarse[i * (len(coarse) - 1) // 4] for i in range(5))
        tried = dict.fromkeys([0, *(seed.offset for seed in waves[:3]), *spread])
        found = [*near, *(replace(launch, offset=n) for n in tried)]
        at = waves[0].offset if waves else 0
        # What wins says the CTAs for the next count, too: at the first one all are tried.
        found += [self.woven(at, n) for n in ((self.ctas[len(self.ctas) // 4],) if near else self.ctas)]
        return [c for c in dict.fromkeys(found) if not self.refusal(num_tokens, c)]

    def neighbours(self, num_tokens: int, candidate: Candidate, step: int) -> list[Candidate]:
        """Candidates one move away: an offset of ``step``, the next CTAs (both kinds, or one), the next SM target."""
        found: list[Candidate] = []
        if candidate.offset is None:
            found += [self.fuse(n) for n in _beside(self.alone, candidate.mlp.ctas)]
        else:
            last = max(self.offsets(num_tokens, FINE_STEP), default=0)
            moved = (candidate.offset - step, candidate.offset + step)
            found += [replace(candidate, offset=n) for n in moved if 0 <= n <= last]
            found += self._launch_neighbours(candidate)
        return [c for c in dict.fromkeys(found) if c != candidate and not self.refusal(num_tokens, c)]

    def _launch_neighbours(self, candidate: Candidate) -> Iterator[Candidate]:
        a, m = candidate.attention, candidate.mlp
        if a.ctas == m.ctas:
            for n in _beside(self.ctas, a.ctas):
                yield replace(candidate, attention=self.launch(n, a.gemm_sms), mlp=self.launch(n, m.gemm_sms))
        for n in _beside(self.ctas, a.ctas):
            yield replace(candidate, attention=self.launch(n, a.gemm_sms))
        for n in _beside(self.ctas, m.ctas):
            yield replace(candidate, mlp=self.launch(n, m.gemm_sms))
        for n in _beside(self.gemm_sms, m.gemm_sms):
            yield replace(candidate, attention=self.launch(a.ctas, n), mlp=self.launch(m.ctas, n))

    def everything(self, num_tokens: int, step: int = COARSE_STEP) -> list[Candidate]:
        """The exhaustive sweep: all offsets on the grid of ``step`` with equal CTAs, and fuse-only ones."""
        found = [self.fuse(n) for n in self.alone]
        for sms, ctas, offset in product(self.gemm_sms, self.ctas, self.offsets(num_tokens, step)):
            found.append(self.woven(offset, ctas, sms))
        return [c for c in found if not self.refusal(num_tokens, c)]


def _beside(values: Sequence[int], value: int) -> list[int]:
    """The next smaller and the next larger value."""
    below, above = [v for v in values if v < value], [v for v in values if v > value]
    return below[-1:] + above[:1]
