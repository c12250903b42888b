"""What the fused kernel is compared with. Each peer is verified by its caller before it is timed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

from trtllm_tokenweave.bench.timing import Operation
from trtllm_tokenweave.libraries import ROOT
from trtllm_tokenweave.native import Call, Group, RankTensors

Finish = Callable[[torch.Tensor, RankTensors], None]


@dataclass(frozen=True)
class Peer:
    """`run(i)` is what is timed, over `sets` of tensors; the outputs of set i are in sets[i]."""

    run: Operation
    sets: list[RankTensors]
    gathers_residual: bool = True


@cache
def bench_library() -> ctypes.CDLL:
    """bench_kernels.cu."""
    return ctypes.CDLL(str(ROOT / "build/tests/cpp/libtokenweave_bench.so"))


class AddNorm:
    """A separate add + RMSNorm of one kernel."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def prepare(self, summed: torch.Tensor, t: RankTensors) -> Callable[[], None]:
        """normed, residual_out = of summed + residual."""
        tokens, hidden = summed.shape
        tensors = (summed, t.residual, t.normed, t.residual_out, self._call.weight)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        eps = ctypes.c_float(self._call.eps)

        def queue() -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            bench_library().bench_add_norm(*pointers, tokens, hidden, eps, stream)

        return queue


def whole(sets: list[RankTensors], inputs: list[torch.Tensor]) -> list[RankTensors]:
    """The same problem with a whole residual, as all peers have it."""
    made = []
    for t, x in zip(sets, inputs, strict=True):
        residual = torch.randn_like(t.input)
        made.append(RankTensors(x, residual, torch.empty_like(t.input), torch.empty_like(t.input)))
    return made


def unfused(reduce: Callable[[torch.Tensor], object], sets: list[RankTensors], norm: AddNorm) -> Peer:
    """An all-reduce in place, then the norm."""
    norms = [norm.prepare(t.input, t) for t in sets]

    def run(i: int) -> None:
        reduce(sets[i % len(sets)].input)
        norms[i % len(sets)]()

    return Peer(run, sets)


def nccl(sets: list[RankTensors], norm: AddNorm) -> Peer:
    """NCCL's all-reduce on ordinary memory."""
    return unfused(dist.all_reduce, sets, norm)


class NcclWindow:
    """NCCL's all-reduce on symmetric windows; NCCL_SYM_CTAS is the caller's."""

    def __init__(self, num_bytes: int) -> None:
        backend = dist.group.WORLD._get_backend(torch.device("cuda"))
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self._memory = torch.zeros(num_bytes // 2, device="cuda", dtype=torch.bfloat16)
        backend.register_mem_pool(self._pool, symm=True)

    def peer(self, sets: list[RankTensors], norm: AddNorm) -> Peer:
        """An all-reduce over tensors like those of `sets`."""
        return unfused(dist.all_reduce, whole(sets, cut(self._memory, sets)), norm)


class TorchTwoShot:
    """torch's two-shot all-reduce over symmetric memory."""

    def __init__(self, num_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self._name = dist.group.WORLD.group_name
        self._memory = symmetric.empty(num_bytes // 2, device="cuda", dtype=torch.bfloat16)
        symmetric.rendezvous(self._memory, self._name)

    def peer(self, sets: list[RankTensors], norm: AddNorm) -> Peer:
        """An all-reduce over tensors like those of `sets`."""
        reduce = torch.ops.symm_mem.two_shot_all_reduce_
        return unfused(lambda x: reduce(x, "sum", self._name), whole(sets, cut(self._memory, sets)), norm)


def cut(memory: torch.Tensor, sets: list[RankTensors]) -> list[torch.Tensor]:
    """As many tensors as there are sets, of their shape, one after the other in memory."""
    shape = sets[0].input.shape
    return [memory[k * shape.numel() : (k + 1) * shape.numel()].view(shape).normal_() for k in range(len(sets))]


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("rank", "tokens", "hidden", "one_shot")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("workspace", "input", "residual", "residual_out", "normed", "weight")),
        ("stream", ctypes.c_void_p),
    )


class Flashinfer:
    """TensorRT-LLM's fused kernel as ported by FlashInfer; see flashinfer_peer.cu."""

    def __init__(self, rank: int, address: str, max_bytes: int) -> None:
        self._library = ctypes.CDLL(str(ROOT / "build/flashinfer_peer.so"))
        flags = 2 << 20
        comm, lamport = 2 * max_bytes, 2 * max_bytes
        self._group = Group(
            2, rank=rank, device=rank, bootstrap=address.encode(), tensor_bytes=comm + flags + 3 * lamport
        )
        own = self._group.memory(rank)
        own[comm + flags :].view(torch.int16).fill_(-32768)  # lamport buffers start as -0
        counters = torch.tensor([0, 0, 0, lamport, 0, 0, 0, 0], dtype=torch.int32, device=f"cuda:{rank}")
        bases = [self._group.memory(r).data_ptr() for r in range(2)]
        pointers = [base + at for at in (0, comm, comm + flags) for base in bases]
        self._counters = counters
        self._workspace = torch.tensor([*pointers, counters.data_ptr()], dtype=torch.int64, device=counters.device)
        self._rank = rank
        torch.cuda.synchronize()
        dist.barrier()

    def peer(self, sets: list[RankTensors], call: Call, *, one_shot: bool) -> Peer:
        """The fused operation over these tensors."""
        stream = torch.cuda.current_stream().cuda_stream
        calls = []
        for t in sets:
            made = _Call(self._rank, *t.input.shape, one_shot, call.eps, self._workspace.data_ptr(), t.input.data_ptr())
            made.residual, made.residual_out = t.residual.data_ptr(), t.residual_out.data_ptr()
            made.normed, made.weight, made.stream = t.normed.data_ptr(), call.weight.data_ptr(), stream
            calls.append(made)

        def run(i: int) -> None:
            code = self._library.flashinfer_all_reduce_norm(ctypes.byref(calls[i % len(calls)]))
            if code != 0:
                raise RuntimeError(f"FlashInfer: error {code}")

        return Peer(run, sets)


def floor(group: Group, sets: list[tuple[torch.Tensor, torch.Tensor]], offsets: list[tuple[int, int]]) -> Operation:
    """Pull half of the rows and push half of them, on all SMs, nothing else."""
    other = group.memory(1 - group.rank).data_ptr()
    ctas = torch.cuda.get_device_properties(group.device).multi_processor_count
    half = sets[0][0].numel() * sets[0][0].itemsize // 2

    def run(i: int) -> None:
        (source, target), (source_at, target_at) = sets[i % len(sets)], offsets[i % len(sets)]
        shift = group.rank * half
        pointers = [target.data_ptr() + shift, other + source_at + shift, other + target_at + shift]
        arguments = [ctypes.c_void_p(p) for p in [*pointers, source.data_ptr() + shift]]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        bench_library().bench_pull_and_push(*arguments, ctypes.c_size_t(half), ctas, stream)

    return run
