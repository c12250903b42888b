"""Device-event timing of operations that several GPUs run together."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from trtllm_tokenweave.native import Call, Group, LaunchConfig, RankTensors

Operation = Callable[[int], None]
SLEEP_CYCLES = 12_000_000  # the GPU waits about 6 ms, so that all work is queued before the first of it runs
WARM_UP = 3


class Aligner:
    """Lets all GPUs start the next operation within about a microsecond: a tiny all-reduce ends on all at once."""

    def __init__(self, group: Group) -> None:
        x = torch.zeros(group.size, 8, dtype=torch.bfloat16, device=f"cuda:{group.device}")
        weight = torch.ones(8, dtype=torch.bfloat16, device=x.device)
        self._queue = group.prepare(Call(weight), [RankTensors(x, x, x.clone(), x.clone())], LaunchConfig(ctas=1))

    def __call__(self) -> None:
        """Queue the tiny all-reduce."""
        self._queue()


def over_ranks(value: float) -> float:
    """The slowest rank's value, where there are several processes."""
    if not dist.is_initialized():
        return value
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def time_once(operation: Operation, align: Operation, iterations: int) -> float:
    """Median microseconds of one operation, of the slowest rank; operation(i) uses the i-th set of buffers."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(iterations)]
    for i in range(WARM_UP):
        operation(i)
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    torch.cuda._sleep(SLEEP_CYCLES)
    for i, (start, end) in enumerate(events):
        align(i)
        start.record()
        operation(WARM_UP + i)
        end.record()
    torch.cuda.synchronize()
    return over_ranks(statistics.median(start.elapsed_time(end) * 1000 for start, end in events))


def time_all(operations: dict[str, Operation], align: Operation, iterations: int, rounds: int = 3) -> dict[str, float]:
    """Times all operations, in another order in each round (the same on all ranks); the median over rounds."""
    shuffled = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(rounds):
        names = list(operations)
        shuffled.shuffle(names)
        for name in names:
            times[name].append(time_once(operations[name], align, iterations))
    return {name: round(statistics.median(values), 2) for name, values in times.items()}
