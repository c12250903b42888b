"""Time of a model's GEMMs on one GPU by token count: `trtllm-tokenweave bench gemm`, for `plan --predict --gemm`.

Each size is timed alone: medians of device events around one torch.mm. Large products run before each fifteen, so that
the clock is that of a GPU under load, as in an engine's step: at its power limit one is a fifth slower than
after a rest. Weights rotate, so that none is in the L2 cache.
"""

from __future__ import annotations

import datetime as dt
import math
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from trtllm_tokenweave.bench.kernel import command
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.predict.data import GemmCurve, GemmData
from trtllm_tokenweave.waves import gemm_shapes

# Steps of 64 show the waves; above, a token costs what the one before did.
TOKENS = (*range(64, 2049, 64), *range(2560, 8193, 512))
REPEATS, ROUNDS = 15, 4
#: Milliseconds of the products that run before a sample, in which the host queues it.
LOAD_MS = 6.0
WEIGHT_BYTES = 256 << 20  # of all copies of a weight together: several L2 caches
CHAIN = 200
SLEEP_CYCLES = 10_000_000  # five milliseconds: the same for a kernel that load would slow down


def measure_gemms(config: ModelConfig, tp_sizes: Sequence[int], tokens: Sequence[int] = TOKENS) -> GemmData:
    """Measure the GEMMs of a model at these tp sizes, grouped ones (experts) left out.

    Raises:
        UserError: A tp_size cannot be served.
    """
    sizes = sorted({(s.n, s.k) for tp in tp_sizes for s in gemm_shapes(config, tp) if s.groups == 1})
    curves = [GemmCurve(n=n, k=k, points=tuple(_curve(n, k, tokens))) for n, k in sizes]
    properties = torch.cuda.get_device_properties(0)
    return GemmData(
        what="bf16 GEMMs [num_tokens, k] x [k, n] alone on the GPU, microseconds by num_tokens",
        command=command(),
        source=f"trtllm-tokenweave bench gemm: torch.mm, medians of {REPEATS * ROUNDS} device events, under load",
        date=dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        machine=f"one {properties.name}",
        versions={"torch": torch.__version__, "cuda": str(torch.version.cuda)},
        dtype="bfloat16",
        sms=properties.multi_processor_count,
        event_us=_event_us(),
        curves=tuple(curves),
    )


def _curve(n: int, k: int, tokens: Sequence[int]) -> list[tuple[int, float]]:
    copies = max(2, -(-WEIGHT_BYTES // (2 * n * k)))
    weights = [torch.randn(k, n, device="cuda").bfloat16() for _ in range(copies)]
    left = torch.randn(max(tokens), k, device="cuda").bfloat16()
    out = torch.empty(max(tokens), n, device="cuda", dtype=torch.bfloat16)
    times: dict[int, list[float]] = {count: [] for count in tokens}
    order, shuffled = list(tokens), random.Random(0)

    def load(runs: int) -> None:
        for i in range(runs):
            torch.mm(left, weights[i % copies], out=out)

    alone = statistics.median(_events(lambda _: load(1), REPEATS, lambda: load(1)))
    runs = math.ceil(LOAD_MS * 1000 / alone)
    for _ in range(ROUNDS):
        shuffled.shuffle(order)
        for count in order:

            def run(i: int, count: int = count) -> None:
                torch.mm(left[:count], weights[i % copies], out=out[:count])

            times[count] += _events(run, REPEATS, partial(load, runs))
    return [(count, round(statistics.median(times[count]), 1)) for count in tokens]


def _events(run: Callable[[int], None], repeats: int, ahead: Callable[[], None]) -> list[float]:
    """Microseconds of each run; they are queued while the GPU does what ``ahead`` queues."""
    for i in range(3):
        run(i)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    ahead()
    for i, (start, end) in enumerate(pairs):
        start.record()
        run(i)
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 for start, end in pairs]


def _event_us() -> float:
    """What events add to a kernel: a tiny one timed alone, less its share of a graph of them."""
    tiny = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            tiny.add_(1)

    def ahead() -> None:
        torch.cuda._sleep(SLEEP_CYCLES)

    alone = statistics.median(_events(lambda _: tiny.add_(1), 5 * REPEATS, ahead))
    chained = statistics.median(_events(lambda _: graph.replay(), REPEATS, ahead)) / CHAIN
    return round(max(alone - chained, 0.0), 1)
