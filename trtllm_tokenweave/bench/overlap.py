"""A GEMM beside the collective of the other half, on two GPUs: `trtllm-tokenweave bench overlap`.

One step of a woven layer: the collective runs on a side stream while the main stream multiplies; then both join. Times
are microseconds a step, of the slower rank, over chains of steps.
"""

from __future__ import annotations

import datetime as dt
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trtllm_tokenweave.bench.kernel import EPS, command, machine
from trtllm_tokenweave.bench.processes import run_ranks
from trtllm_tokenweave.bench.timing import Aligner, over_ranks
from trtllm_tokenweave.native import Call, Group, LaunchConfig, RankTensors

M, K, N = 2048, 8192, 14336
HIDDEN = 8192
CTAS = (4, 6, 8, 12, 16, 20, 24, 32)
STEPS = 10
REPEATS = 8
GAP_SECONDS = 0.03
Step = Callable[[], None]


class Overlap:
    """The tensors and streams of one rank."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.align = Aligner(group)
        self.left = torch.randn(M, K, device="cuda").bfloat16()
        self.right = (torch.randn(K, N, device="cuda") / K**0.5).bfloat16()
        self.product = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
        size = M * HIDDEN * 2
        source = group.tensor(group.rank, (M, HIDDEN), torch.bfloat16)
        normed = group.tensor(group.rank, (M, HIDDEN), torch.bfloat16, size)
        residual = torch.randn(M // 2, HIDDEN, device="cuda").bfloat16()
        self.tensors = RankTensors(source.normal_(), residual, normed, torch.empty_like(residual))
        self.call = Call(torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16), None, EPS)
        self.side = torch.cuda.Stream(priority=-1)
        self.fork, self.join, self.started = (torch.cuda.Event() for _ in range(3))
        self.started.record()  # torch makes the event when it is first recorded

    def gemm(self) -> None:
        """The main stream's half."""
        torch.mm(self.left, self.right, out=self.product)

    def collective(self, ctas: int, *, announce: bool = False) -> Step:
        """The other half's; `announce` fires self.started once its CTAs are resident."""
        event = self.started.cuda_event if announce else 0
        return self.group.prepare(self.call, [self.tensors], LaunchConfig(ctas=ctas, launch_completion=event))

    def beside(self, collective: Step, *, announced: bool) -> Step:
        """Both at once. Where announced, the GEMM waits until the collective has its SMs."""

        def step() -> None:
            main = torch.cuda.current_stream()
            self.fork.record()
            self.side.wait_event(self.fork)
            with torch.cuda.stream(self.side):
                collective()
                self.join.record()
            if announced:
                main.wait_event(self.started)
            self.gemm()
            main.wait_event(self.join)

        return step

    def in_graph(self, step: Step) -> Step:
        """STEPS steps as one graph."""
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(STEPS):
                step()
        replay: Step = graph.replay
        return replay

    def time(self, run: Step, steps: int) -> float:
        """Median microseconds a step; run() makes `steps` of them."""
        times = []
        for _ in range(REPEATS):
            run()
            torch.cuda.synchronize()
            time.sleep(GAP_SECONDS)
            dist.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(4_000_000)
            self.align()
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1000 / steps)
        return round(over_ranks(statistics.median(times)), 1)

    def chain(self, step: Step) -> float:
        """Time of a step in an eager chain."""

        def run() -> None:
            for _ in range(STEPS):
                step()

        return self.time(run, STEPS)

    def measure(self, ctas: int) -> dict[str, Any]:
        """One row."""
        plain, announcing = self.collective(ctas), self.collective(ctas, announce=True)

        def sequence() -> None:
            plain()
            self.gemm()

        plain()
        torch.cuda.synchronize()
        want = self.tensors.normed.clone()
        self.tensors.normed.zero_()
        eager = self.beside(announcing, announced=True)
        row = {
            "ctas": ctas,
            "collective_us": self.chain(plain),
            "sequence_us": self.chain(sequence),
            "plain_fork_us": self.chain(self.beside(plain, announced=False)),
            "eager_us": self.chain(eager),
            "graph_us": self.time(self.in_graph(self.beside(plain, announced=False)), STEPS),
        }
        self.group.check()
        assert torch.equal(self.tensors.normed, want)
        return row


def body(rank: int, address: str) -> dict[str, Any]:
    """One rank of the benchmark."""
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29519", rank=rank, world_size=2)
    group = Group(
        2, rank=rank, device=rank, bootstrap=address.encode(), tensor_bytes=4 * M * HIDDEN, staging_bytes=1 << 20
    )
    overlap = Overlap(group)
    result = {"gemm_us": overlap.chain(overlap.gemm), "rows": [overlap.measure(ctas) for ctas in CTAS]}
    result["gemm_again_us"] = overlap.chain(overlap.gemm)
    group.close()
    return result


def measure_overlap() -> dict[str, Any]:
    """Measure on two GPUs of this machine, one process each; returns the JSON document."""
    measured = run_ranks(body, timeout=200)[0]
    return {
        "what": f"GEMM {M}x{K}x{N} beside AllReduceRmsNorm of {M} tokens, hidden {HIDDEN}, bf16; us a step",
        "method": f"chains of {STEPS} steps, median of {REPEATS}, {GAP_SECONDS} s between; eager: the GEMM waits for "
        "the launch-completion event of the collective; graph and plain_fork: it does not",
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "command": command(),
        "machine": machine(),
        **measured,
    }
