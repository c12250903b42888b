"""A tuner with no GPU: a runner whose times are a function, and a clock that only such runs move."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trtllm_tokenweave.bench.step_timer import Timing
from trtllm_tokenweave.comm import CommBackend, LocalComm, SingleComm, run_ranks
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.table import MeasuredOn, TuningTable
from trtllm_tokenweave.tune.candidates import Candidate, Space
from trtllm_tokenweave.tune.measure import Run
from trtllm_tokenweave.tune.search import Choice
from trtllm_tokenweave.tune.store import Record
from trtllm_tokenweave.tune.tuner import TuneGoal, make_table, tune
from trtllm_tokenweave.waves import gemm_shapes, table_key

CONFIG = preset("llama-3.3-70b")
SHAPES = gemm_shapes(CONFIG, 2)
SPACE = Space(ctas=(4, 8, 12, 16, 20, 24, 32))
COUNTS = (1024, 2048, 4096)
MHZ = 1500.0
Landscape = Callable[[int, Candidate], float]


def bowl(num_tokens: int, candidate: Candidate, *, gain: float = 0.08, offset: int = 320, ctas: int = 12) -> float:
    """Milliseconds with one best split: ``gain`` below fuse-only at that offset and those CTAs, worse around it."""
    whole = num_tokens / 320
    if candidate.offset is None:
        return whole * (1 + 0.001 * abs(candidate.mlp.ctas - 96) / 32)
    away = abs(candidate.offset - offset) / 64 * 0.004
    away += (abs(candidate.attention.ctas - ctas) + abs(candidate.mlp.ctas - ctas - 4)) / 4 * 0.003
    return whole * (1 - gain + away)


@dataclass
class Clock:
    """Seconds, moved by runners."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeRunner:
    """Takes times from a landscape, with noise of its own rank, and moves its clock by them.

    Attributes:
        landscape: Milliseconds of a step.
        clock: Moved by what a sample would take.
        noise: Standard deviation of a sample, relative.
        seed: Of the noise.
        wrong: Candidates (by name) with a wrong result, and how wrong; "whole NAME": only where every row is looked at.
        fails: Called before every sample with the number of samples so far: may raise.
        sampled: What was sampled, in order.
        leads: Steps ahead of the samples of each queue.
        mhz: The clock of a sample, by the number of samples before; the landscape is that at `MHZ`.
    """

    landscape: Landscape
    clock: Clock = field(default_factory=Clock)
    noise: float = 0.0
    seed: int = 0
    wrong: dict[str, float] = field(default_factory=dict)
    fails: Callable[[int], None] = lambda _: None
    sampled: list[tuple[int, str]] = field(default_factory=list)
    verified: list[str] = field(default_factory=list)
    leads: list[int] = field(default_factory=list)
    mhz: Callable[[int], float] = lambda _: MHZ

    def __post_init__(self) -> None:
        self._noise = random.Random(self.seed)
        self.reference_tokens = 0

    def reference(self, num_tokens: int, candidate: Candidate) -> None:
        assert candidate.offset is None
        self.reference_tokens = num_tokens

    def error(self, num_tokens: int, candidate: Candidate, *, whole: bool = False) -> float:
        assert num_tokens == self.reference_tokens, "compared with the result of another step"
        self.verified.append(str(candidate))
        name = f"whole {candidate}" if whole else str(candidate)
        return self.wrong.get(name, 0.001)

    def time(self, steps: Sequence[tuple[int, Candidate]], lead: int) -> list[Timing]:
        assert lead > 0
        self.leads.append(lead)
        return [self._time_one(*step) for step in steps]

    def _time_one(self, num_tokens: int, candidate: Candidate) -> Timing:
        assert str(candidate) in self.verified, "timed before it was verified"
        self.fails(len(self.sampled))
        self.sampled.append((num_tokens, str(candidate)))
        milliseconds = self.landscape(num_tokens, candidate) * (1 + self._noise.gauss(0, self.noise))
        self.clock.now += 0.02 + 5 * milliseconds / 1000
        mhz = self.mhz(len(self.sampled))
        return Timing(milliseconds * MHZ / mhz, mhz)


@dataclass
class Tuned:
    """What a run of the tuner gave on one rank."""

    choices: list[Choice]
    table: TuningTable
    run: Run


def goal(**fields: Any) -> TuneGoal:
    values: dict[str, Any] = {"key": table_key(CONFIG, 2), "counts": COUNTS, "space": SPACE, "shapes": SHAPES}
    return TuneGoal(**(values | fields))


def measured(**fields: Any) -> MeasuredOn:
    values: dict[str, Any] = {
        "gpu": "NVIDIA H200",
        "sms": 132,
        "cuda_driver": "13.0",
        "tensorrt": "10.6.0",
        "library": "0.1.0",
        "model": "llama-3.3-70b",
        "tp_size": 2,
        "layers": 2,
        "gemms": {shape.name: (shape.n, shape.k) for shape in SHAPES},
        "max_num_tokens": 8192,
        "opt_num_tokens": 4096,
        "profiles_sha256": "0" * 64,
        "timing_cache_sha256": "1" * 64,
        "date": "2026-01-01",
    }
    return MeasuredOn(**(values | fields))


def run_tuner(
    runner: FakeRunner,
    comm: CommBackend | None = None,
    *,
    record: Record | None = None,
    file: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    **fields: Any,
) -> Tuned:
    """Tune on this rank."""
    started = runner.clock()
    run = Run(comm or SingleComm(), runner, record or Record(key={}), runner.clock, started, file, say)
    made = goal(**fields)
    choices = tune(made, run)
    return Tuned(choices, make_table(made, choices, measured()), run)


def run_on_ranks(runners: list[FakeRunner], **fields: Any) -> list[Tuned]:
    """Tune on as many ranks as there are runners."""
    comms = LocalComm.group(len(runners))
    jobs = [partial(run_tuner, runner, comm, **fields) for runner, comm in zip(runners, comms, strict=True)]
    return run_ranks(jobs)
