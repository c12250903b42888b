"""The CUDA library's C interface (plugins/include/tokenweave/tokenweave.h), over torch tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from trtllm_tokenweave.c_interface import MESSAGE_BYTES, OK, LibraryError, Status
from trtllm_tokenweave.libraries import load_library

AUTO, PEER, MULTIMEM, SOFT_MULTICAST = -1, 0, 1, 2
CP_ASYNC, BULK, PUSH = 0, 1, 2
CUDA_MEMORY, NCCL_MEMORY = 0, 1
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 7}


class GroupConfig(ctypes.Structure):
    """TwGroupConfig."""

    _fields_ = (
        ("struct_bytes", c_size_t),
        ("rank", c_int32),
        ("size", c_int32),
        ("device", c_int32),
        ("loopback", c_int32),
        ("allow_multicast", c_int32),
        ("timeout_ms", c_uint32),
        ("trap_on_fault", c_int32),
        ("tensor_bytes", c_uint64),
        ("staging_bytes", c_uint64),
        ("config_hash", c_uint64),
        ("bootstrap", c_char_p),
        ("mpi_ranks", POINTER(c_int32)),
    )


class GroupInfo(ctypes.Structure):
    """TwGroupInfo."""

    _fields_ = (
        ("struct_bytes", c_size_t),
        ("rank", c_int32),
        ("size", c_int32),
        ("local_ranks", c_int32),
        ("max_ctas", c_int32),
        ("fabric", c_int32),
        ("multicast_reason", ctypes.c_char * MESSAGE_BYTES),
        ("memory", c_int32),
        ("memory_reason", ctypes.c_char * MESSAGE_BYTES),
    )


class Tensors(ctypes.Structure):
    """TwAllReduceRmsNormTensors."""

    _fields_ = (("input", c_void_p), ("residual", c_void_p), ("normed", c_void_p), ("residual_out", c_void_p))


class Op(ctypes.Structure):
    """TwAllReduceRmsNorm."""

    _fields_ = (
        ("struct_bytes", c_size_t),
        ("dtype", c_int32),
        ("num_tokens", c_int32),
        ("hidden", c_int32),
        ("residual_sharded", c_int32),
        ("gather_residual", c_int32),
        ("staged", c_int32),
        ("eps", c_float),
        ("norm_weight", c_void_p),
        ("bias", c_void_p),
    )


class Launch(ctypes.Structure):
    """TwLaunchConfig."""

    _fields_ = (
        ("struct_bytes", c_size_t),
        ("fabric", c_int32),
        ("loader", c_int32),
        ("ctas", c_int32),
        ("threads", c_int32),
        ("cluster_size", c_int32),
        ("launch_completion", c_void_p),
    )


@cache
def library() -> ctypes.CDLL:
    """The CUDA library.

    Raises:
        UserError: when there is none, or it cannot be loaded.
    """
    return load_library("tokenweave")


@dataclass(frozen=True)
class LaunchConfig:
    """Mirrors TwLaunchConfig."""

    fabric: int = AUTO
    loader: int = AUTO
    ctas: int = 0
    threads: int = 0
    cluster_size: int = 0
    launch_completion: int = 0  # a cudaEvent_t


@dataclass(frozen=True)
class Call:
    """One AllReduceRmsNorm: what is equal on all ranks."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    eps: float = 1e-5
    residual_sharded: bool = True
    gather_residual: bool = False
    staged: bool = False


@dataclass(frozen=True)
class RankTensors:
    """The tensors of one rank; shapes as in tokenweave.h."""

    input: torch.Tensor
    residual: torch.Tensor
    normed: torch.Tensor
    residual_out: torch.Tensor


class _Memory:
    """Device memory for torch.as_tensor."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Group:
    """Owns a TwGroup."""

    def __init__(self, size: int, *, rank: int = 0, device: int = 0, **fields: Any) -> None:
        self.size, self.rank, self.device = size, rank, device
        self.loopback = bool(fields.get("loopback", 0))
        self._library = library()
        self._group = c_void_p()
        config = GroupConfig(struct_bytes=sizeof(GroupConfig), rank=rank, size=size, device=device, **fields)
        self._call("twGroupCreate", byref(config), byref(self._group))

    def _call(self, function: str, *args: Any) -> None:
        status = Status()
        if getattr(self._library, function)(*args, byref(status)) != OK:
            raise LibraryError(status)

    def close(self) -> None:
        """Destroys the group; raises what twGroupDestroy says."""
        group, self._group = self._group, c_void_p()
        self._call("twGroupDestroy", group)

    def check(self) -> None:
        """Raises the fault that a kernel reported."""
        self._call("twGroupCheck", self._group)

    def info(self) -> GroupInfo:
        """What the group is made of."""
        info = GroupInfo(struct_bytes=sizeof(GroupInfo))
        self._call("twGroupGetInfo", self._group, byref(info))
        return info

    def memory(self, rank: int) -> torch.Tensor:
        """The tensor memory of a rank, as bytes."""
        address, num_bytes = c_void_p(), c_size_t()
        self._call("twGroupTensorMemory", self._group, rank, byref(address), byref(num_bytes))
        return torch.as_tensor(_Memory(address.value or 0, num_bytes.value), device=f"cuda:{self.device}")

    def tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """A tensor in the rank's tensor memory, `offset` bytes from its start."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.memory(rank)[offset : offset + num_bytes].view(dtype).view(shape)

    def prepare(
        self, call: Call, tensors: list[RankTensors], launch: LaunchConfig = LaunchConfig()
    ) -> Callable[[], None]:
        """The operation as a function that queues it on torch's current stream; its tensors must outlive it."""
        tokens, hidden = tensors[0].input.shape
        op = Op(
            struct_bytes=sizeof(Op),
            dtype=DTYPES[tensors[0].input.dtype],
            num_tokens=tokens,
            hidden=hidden,
            residual_sharded=call.residual_sharded,
            gather_residual=call.gather_residual,
            staged=call.staged,
            eps=call.eps,
            norm_weight=call.weight.data_ptr(),
            bias=None if call.bias is None else call.bias.data_ptr(),
        )
        pointers = (Tensors * len(tensors))(
            *(
                Tensors(t.input.data_ptr(), t.residual.data_ptr(), t.normed.data_ptr(), t.residual_out.data_ptr())
                for t in tensors
            )
        )
        how = Launch(
            sizeof(Launch),
            launch.fabric,
            launch.loader,
            launch.ctas,
            launch.threads,
            launch.cluster_size,
            launch.launch_completion,
        )

        def queue() -> None:
            stream = c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
            self._call("twAllReduceRmsNorm", self._group, byref(op), pointers, byref(how), stream)

        return queue

    def run(self, call: Call, tensors: list[RankTensors], launch: LaunchConfig = LaunchConfig()) -> None:
        """Queues the operation on torch's current stream."""
        self.prepare(call, tensors, launch)()
