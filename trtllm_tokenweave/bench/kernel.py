"""AllReduceRmsNorm on two GPUs against its peers: `trtllm-tokenweave bench kernel`.

Every candidate is verified before it is timed. Times are medians of device events of the slower rank, in microseconds;
the ranks are aligned before each run, all work is queued ahead, buffers rotate, candidates change places each round.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trtllm_tokenweave.bench import peers
from trtllm_tokenweave.bench.processes import run_ranks
from trtllm_tokenweave.bench.timing import Aligner, Operation, over_ranks, time_all
from trtllm_tokenweave.c_interface import UNSUPPORTED, LibraryError
from trtllm_tokenweave.config import prepare_benchmark
from trtllm_tokenweave.libraries import ROOT
from trtllm_tokenweave.native import (
    AUTO,
    BULK,
    CP_ASYNC,
    PUSH,
    Call,
    Group,
    LaunchConfig,
    RankTensors,
    library,
)

LOADERS = {"auto": AUTO, "cp_async": CP_ASYNC, "bulk": BULK, "push": PUSH}
CTAS = (4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 132)
EPS = 1e-5
BYTES = 3 << 30  # of symmetric memory
PEER_BYTES = 512 << 20  # of inputs, for a peer
DTYPE = torch.bfloat16
TOLERANCE = 5e-3  # of a result, relative to its norm: two roundings to bf16


@dataclass(frozen=True)
class KernelBench:
    """What to measure: hidden sizes, token counts, whether the peers take part, loaders (of LOADERS) and CTAs."""

    hidden: tuple[int, ...] = (8192,)
    tokens: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    peers: bool = True
    loaders: tuple[str, ...] = ("auto",)
    ctas: tuple[int, ...] = CTAS


@dataclass
class Bench:
    """What one rank holds while it measures."""

    group: Group
    align: Aligner
    hidden: int
    arguments: KernelBench
    call: Call
    norm: peers.AddNorm
    unfused: dict[str, peers.NcclWindow | peers.TorchTwoShot]
    flashinfer: peers.Flashinfer | None

    def sets(self, tokens: int) -> tuple[list[RankTensors], list[tuple[int, int]]]:
        """Input and normed in symmetric memory, as many as fit; and their offsets there."""
        shape, size = (tokens, self.hidden), tokens * self.hidden * DTYPE.itemsize
        count = max(2, min(64, BYTES // (2 * size), (2 << 30) // size))
        rows = -(-tokens // self.group.size)
        made, offsets = [], []
        for k in range(count):
            offsets.append((2 * k * size, (2 * k + 1) * size))
            source, normed = (self.group.tensor(self.group.rank, shape, DTYPE, at) for at in offsets[-1])
            source.normal_()
            residual = torch.randn(rows, self.hidden, device=source.device).to(DTYPE)
            made.append(RankTensors(source, residual, normed, torch.empty_like(residual)))
        return made, offsets

    def measure(self, tokens: int) -> dict[str, Any]:
        """One row of the results and the sweep behind it."""
        sets, offsets = self.sets(tokens)
        operations: dict[str, Operation] = {}
        swept = {}
        for loader, ctas in itertools.product(self.arguments.loaders, self.arguments.ctas):
            if ctas <= 2 * max(8, -(-tokens // 2)) or loader == "push":
                swept[f"{loader}@{ctas}"] = self.fused(sets, LaunchConfig(loader=LOADERS[loader], ctas=ctas))
        for name, operation in swept.items():
            if self.possible(operation, sets, name):
                operations[name] = operation
        operations["default"] = self.fused(sets, LaunchConfig())
        staged = [RankTensors(t.input.clone(), t.residual, torch.empty_like(t.input), t.residual_out) for t in sets[:8]]
        operations["staged@16"] = self.fused(staged, LaunchConfig(ctas=16))
        operations["staged"] = self.fused(staged, LaunchConfig())
        operations["floor"] = peers.floor(self.group, [(t.input, t.normed) for t in sets], offsets)
        others = self.candidates(sets) if self.arguments.peers else {}
        for name, peer in others.items():
            self.verify(peer, name)
            operations[name] = peer.run
        for name, operation in operations.items():
            if name != "floor" and name not in others and name not in swept:
                over = staged if name.startswith("staged") else sets
                self.verify(peers.Peer(operation, over, gathers_residual=False), name)
        whole = peers.whole(sets[:8], [t.input for t in sets[:8]])
        norm_only = [self.norm.prepare(t.input, t) for t in whole]
        operations["norm"] = lambda i: norm_only[i % len(norm_only)]()
        times = time_all(operations, lambda _: self.align(), 30 if tokens <= 2048 else 15)
        best = min((name for name in swept if name in times), key=lambda name: times[name])
        sweeps: dict[str, dict[str, float]] = {loader: {} for loader in self.arguments.loaders}
        for name in swept:
            if name in times:
                loader, ctas_text = name.split("@")
                sweeps[loader][ctas_text] = times[name]
        return {
            "num_tokens": tokens,
            "hidden": self.hidden,
            "dtype": "bfloat16",
            "ctas": int(best.split("@")[1]),
            "loader": best.split("@")[0],
            "fused_us": times[best],
            "nccl_norm_us": times.get("nccl+norm"),
            "peers": {name: times[name] for name in others},
            "floor_us": times["floor"],
            "default_us": times["default"],
            "staged_us": times["staged"],
            "staged_16_ctas_us": times["staged@16"],
            "norm_us": times["norm"],
            "sweep": sweeps[self.arguments.loaders[0]],
            "sweeps": sweeps,
        }

    def possible(self, operation: Operation, sets: list[RankTensors], name: str) -> bool:
        """Whether the library can do it at this size; then it was verified."""
        try:
            self.verify(peers.Peer(operation, sets, gathers_residual=False), name)
        except LibraryError as error:
            if error.code != UNSUPPORTED:
                raise
            return False
        return True

    def fused(self, sets: list[RankTensors], launch: LaunchConfig) -> Operation:
        """The kernel over these tensors."""
        queues = [self.group.prepare(self.call, [t], launch) for t in sets]
        return lambda i: queues[i % len(queues)]()

    def candidates(self, sets: list[RankTensors]) -> dict[str, peers.Peer]:
        """All peers over problems like those of `sets`."""
        few = sets[: max(2, min(16, PEER_BYTES // (sets[0].input.numel() * DTYPE.itemsize)))]
        plain = peers.whole(few, [torch.randn_like(t.input) for t in few])
        found = {"nccl+norm": peers.nccl(plain, self.norm)}
        for name, unfused in self.unfused.items():
            found[name] = unfused.peer(few, self.norm)
        if self.flashinfer is not None:
            again = peers.whole(few, [t.input for t in plain])
            found["flashinfer_one_shot"] = self.flashinfer.peer(again, self.call, one_shot=True)
            found["flashinfer_two_shot"] = self.flashinfer.peer(again, self.call, one_shot=False)
        return found

    def verify(self, peer: peers.Peer, name: str) -> None:
        """One run on fresh data against fp32: a wrong collective is often a fast one."""
        t = peer.sets[0]
        t.input.normal_()
        if not peer.gathers_residual:
            residual = self.gathered(t.residual)[: t.input.shape[0]].float()
        else:
            dist.broadcast(t.residual, 0)
            residual = t.residual.float()
        total = residual + sum(x.float() for x in self.gathered(t.input).view(self.group.size, *t.input.shape))
        want = normalised(total, self.call)
        t.normed.fill_(float("nan"))
        torch.cuda.synchronize()
        dist.barrier()
        peer.run(0)
        torch.cuda.synchronize()
        self.group.check()
        check_error(over_ranks(relative_error(t.normed, want)), name, t)

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors, one after the other."""
        out = torch.empty(
            self.group.size * tensor.shape[0], *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device
        )
        dist.all_gather_into_tensor(out, tensor.contiguous())
        return out


def normalised(total: torch.Tensor, call: Call) -> torch.Tensor:
    """RMSNorm in fp32 of the sum over ranks and residual, [num_tokens, hidden]."""
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + call.eps) * call.weight.float()


def relative_error(normed: torch.Tensor, want: torch.Tensor) -> float:
    """Of a result, relative to the norm of what it should be."""
    return float((normed.float() - want).norm() / want.norm())


def check_error(error: float, name: str, tensors: RankTensors) -> None:
    """Refuse to time what is wrong: a wrong collective is often a fast one.

    Raises:
        AssertionError: the error is too large, or no number.
    """
    if not error < TOLERANCE:
        raise AssertionError(f"{name}: relative error {error} at {tuple(tensors.input.shape)}")


AnyPeer = TypeVar("AnyPeer")


def optional(make: Callable[[int], AnyPeer], num_bytes: int) -> AnyPeer | None:
    """A peer, or None with the reason on the terminal where this torch or NCCL does not have it."""
    try:
        return make(num_bytes)
    except (RuntimeError, AttributeError, TypeError) as exception:
        print(f"no {make}: {str(exception).splitlines()[0]}", flush=True)
        return None


def body(rank: int, address: str, arguments: KernelBench) -> list[dict[str, Any]]:
    """One rank of the benchmark."""
    prepare_benchmark()
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method="tcp://127.0.0.1:29517",
        rank=rank,
        world_size=2,
        device_id=torch.device("cuda", rank),
    )
    rows = []
    for hidden in arguments.hidden:
        max_bytes = max(arguments.tokens) * hidden * 2
        group = Group(
            2, rank=rank, device=rank, bootstrap=address.encode(), tensor_bytes=BYTES, staging_bytes=max_bytes
        )
        weight = (1 + 0.1 * torch.randn(hidden, generator=torch.Generator().manual_seed(0))).to(DTYPE).cuda()
        call = Call(weight, None, EPS)
        flashinfer = None
        if (ROOT / "build/flashinfer_peer.so").exists():
            flashinfer = peers.Flashinfer(rank, address + "-flashinfer", max_bytes)
        norm = peers.AddNorm(call)
        num_bytes = max(PEER_BYTES, 2 * max_bytes)
        unfused = {
            "nccl_window+norm": optional(peers.NcclWindow, num_bytes),
            "torch_two_shot+norm": optional(peers.TorchTwoShot, num_bytes),
        }
        there = {name: peer for name, peer in unfused.items() if peer is not None}
        bench = Bench(group, Aligner(group), hidden, arguments, call, norm, there, flashinfer)
        for tokens in arguments.tokens:
            rows.append(bench.measure(tokens))
            torch.cuda.empty_cache()
            if rank == 0:
                print(json.dumps(rows[-1]), flush=True)
                if len(arguments.loaders) > 1:
                    print(compact(rows[-1]), flush=True)
        group.close()
    return rows


def compact(row: dict[str, Any]) -> str:
    """The sweeps of one row as a table of microseconds, and how much slower than the best of all."""
    lines = [
        f"{row['num_tokens']} tokens: floor {row['floor_us']}, default {row['default_us']}, best {row['fused_us']}"
    ]
    for loader, sweep in row["sweeps"].items():
        cells = (f"{ctas:>4}: {us:7.2f} {us / row['fused_us']:5.3f}" for ctas, us in sweep.items())
        lines.append(f"  {loader:9}" + " |".join(cells))
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    gpus = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        "gpus": gpus.stdout.strip().splitlines(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "library": library().twVersion().decode(),
        "environment": prepare_benchmark(),
    }


def command() -> str:
    """How this program was started, without the folder of the output."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return " ".join(["trtllm-tokenweave", *words])


def measure_kernel(arguments: KernelBench) -> dict[str, Any]:
    """Measure on two GPUs of this machine, one process each; returns the JSON document."""
    rows = run_ranks(partial(body, arguments=arguments), timeout=560)[0]
    return {
        "what": "AllReduceRmsNorm on two GPUs, us: medians of device events, the slower rank, aligned before each run",
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "command": command(),
        "machine": machine(),
        "rows": rows,
    }
