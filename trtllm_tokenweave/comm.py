"""Collectives of the interpreter: one operation, ``all_gather``, over threads or MPI.

Reductions are never left to a library: every rank gathers all parts and adds them in rank order, so that results
repeat. Calls of different ranks are matched by their order alone, as on the hardware: ranks that call in different
orders get each other's wrong data. Every wait has a timeout whose message names the rank and the operation.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.errors import TokenWeaveError, UserError

T = TypeVar("T")
Array = NDArray[Any]

#: Seconds a rank waits for its peers before it gives up.
LOCAL_TIMEOUT = 20.0
MPI_TIMEOUT = 120.0

#: How often a waiting thread looks whether a peer has died or ended (a normal arrival wakes it at once).
_POLL_SECONDS = 0.02


class CommError(TokenWeaveError):
    """A collective did not complete: a peer failed, ended, or did not come in time."""


class CommBackend(Protocol):
    """A group of ranks. ``tag`` says in messages what the call is for; it does not match calls."""

    @property
    def rank(self) -> int:
        """Rank of the caller, 0 to size - 1."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather(self, tag: str, x: Array, timeout: float | None = None) -> list[Array]:
        """Return every rank's array in rank order; shapes may differ. ``x`` may be changed afterwards.

        Args:
            tag: What the call is for.
            x: This rank's array.
            timeout: Seconds to wait for peers; None: what the group was made with.

        Raises:
            CommError: when a peer does not take part.
        """

    def barrier(self) -> None:
        """Wait for all ranks."""


class SingleComm:
    """A group of one."""

    rank = 0
    size = 1

    def all_gather(self, tag: str, x: Array, timeout: float | None = None) -> list[Array]:
        """Return a copy of the array."""
        del tag, timeout
        return [x.copy()]

    def barrier(self) -> None:
        """Return at once."""


@dataclass
class _Call:
    """One collective in flight: what each rank has brought."""

    parts: dict[int, tuple[str, Array]] = field(default_factory=dict)
    readers: int = 0


class _Group:
    """What the ranks of a LocalComm group share."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.condition = threading.Condition()
        self.calls: dict[int, _Call] = {}
        self.broken = ""


class LocalComm:
    """Virtual ranks in one process, one thread each; make them with :meth:`group`, run them with `run_ranks`."""

    def __init__(self, group: _Group, rank: int) -> None:
        self._group = group
        self._sequence = 0
        self.rank = rank
        self.size = group.size

    @classmethod
    def group(cls, size: int, timeout: float = LOCAL_TIMEOUT) -> list[LocalComm]:
        """Make one communicator per rank.

        Args:
            size: Number of ranks.
            timeout: Seconds to wait for peers.
        """
        if size < 1:
            raise UserError(f"a group needs at least one rank, not {size}", where="comm")
        shared = _Group(size, timeout)
        return [cls(shared, rank) for rank in range(size)]

    def all_gather(self, tag: str, x: Array, timeout: float | None = None) -> list[Array]:
        """See :class:`CommBackend`."""
        group, sequence = self._group, self._sequence
        self._sequence += 1
        part = np.array(x, copy=True, order="C")
        with group.condition:
            call = group.calls.setdefault(sequence, _Call())
            call.parts[self.rank] = (tag, part)
            if len(call.parts) == group.size:
                group.condition.notify_all()
            else:
                self._wait(call, tag, group.timeout if timeout is None else timeout)
            call.readers += 1
            if call.readers == group.size:
                del group.calls[sequence]
        return [call.parts[rank][1] for rank in range(group.size)]

    def barrier(self) -> None:
        """See :class:`CommBackend`."""
        self.all_gather("barrier", np.zeros(0, np.int8))

    def _wait(self, call: _Call, tag: str, timeout: float) -> None:
        """Wait with the condition held until every rank has brought its part."""
        group = self._group
        deadline = time.monotonic() + timeout
        while len(call.parts) < group.size:
            missing = [rank for rank in range(group.size) if rank not in call.parts]
            reason = group.broken or _dead_peer(missing)
            if not reason and time.monotonic() >= deadline:
                reason = f"no answer within {timeout:g} s from rank {', '.join(map(str, missing))}"
            if reason:
                group.broken = group.broken or f"the group is broken since rank {self.rank} gave up in {tag!r}"
                group.condition.notify_all()
                raise CommError(f"rank {self.rank} waits in {tag!r}: {reason}")
            group.condition.wait(_POLL_SECONDS)


class _Scope:
    """State of the ranks of one `run_ranks` call, looked at by waiting ranks."""

    def __init__(self, size: int) -> None:
        self.ended = [False] * size
        self.errors: list[tuple[int, BaseException]] = []


_current = threading.local()


def _dead_peer(missing: Sequence[int]) -> str:
    """Why the missing ranks will never come; empty while they still may."""
    scope: _Scope | None = getattr(_current, "scope", None)
    if scope is None:
        return ""
    if scope.errors:
        rank, error = scope.errors[0]
        return f"rank {rank} failed: {error}"
    gone = [rank for rank in missing if rank < len(scope.ended) and scope.ended[rank]]
    return f"rank {gone[0]} has ended" if gone else ""


def run_ranks(fns: Sequence[Callable[[], T]]) -> list[T]:
    """Run one callable per rank, each in its own thread, and return their results in rank order.

    A rank that fails, or ends while others wait for it, releases the others. A single callable runs in the caller's
    thread. Each rank's matrix products get an equal share of the cores: ranks that all ask for all cores are an order
    of magnitude slower.

    Raises:
        Exception: the first error of any rank (the cause, not the waiters' errors that follow from it).
    """
    if len(fns) == 1:
        return [fns[0]()]
    scope = _Scope(len(fns))
    results: list[T | None] = [None] * len(fns)

    def body(rank: int) -> None:
        _current.scope = scope
        try:
            results[rank] = fns[rank]()
        except BaseException as error:  # noqa: BLE001  (handed to the caller below)
            scope.errors.append((rank, error))
        finally:
            scope.ended[rank] = True

    # Daemons: an interrupted program does not wait for ranks that wait for each other.
    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(len(fns))
    ]
    with blas_threads_shared_by(len(fns)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if scope.errors:
        raise scope.errors[0][1]
    return results  # type: ignore[return-value]


@cache
def _thread_pools() -> Any:
    """The process's BLAS thread pools (finding them takes milliseconds)."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def blas_threads_shared_by(ranks: int) -> AbstractContextManager[Any]:
    """Context in which each of ``ranks`` ranks on this machine uses its share of the cores for matrix products.

    The setting is the process's, made when this is called and undone when the context ends.
    """
    if ranks < 2:
        return nullcontext()
    share = max(1, (os.cpu_count() or 1) // ranks)
    limited: AbstractContextManager[Any] = _thread_pools().limit(limits=share, user_api="blas")
    return limited


class MpiComm:
    """The ranks of an MPI communicator (mpi4py is imported here and nowhere else).

    Args:
        comm: An mpi4py communicator; COMM_WORLD by default.
        timeout: Seconds to wait for peers.

    Raises:
        UserError: when mpi4py or the MPI library is missing.
    """

    #: Rank, then dtype, then up to this many dimensions, travel ahead of the data.
    MAX_RANK = 8

    def __init__(self, comm: Any = None, timeout: float = MPI_TIMEOUT) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"mpi4py cannot be used ({error})", where="MPI", fix="install Open MPI and pip install 'mpi4py>=4.0'"
            ) from error
        self._comm = comm if comm is not None else MPI.COMM_WORLD
        self._byte = MPI.BYTE
        self.timeout = timeout
        self.rank = int(self._comm.Get_rank())
        self.size = int(self._comm.Get_size())
        # Kept for good: the ranks of one machine are there as long as the process is.
        self._threads = blas_threads_shared_by(int(self._comm.Split_type(MPI.COMM_TYPE_SHARED).Get_size()))

    def all_gather(self, tag: str, x: Array, timeout: float | None = None) -> list[Array]:
        """See :class:`CommBackend`. Two messages: shapes and dtypes, then the bytes."""
        from trtllm_tokenweave.recorder.enums import DataType, dtype_of, numpy_dtype

        if x.ndim > self.MAX_RANK:
            raise UserError(f"array has rank {x.ndim}, at most {self.MAX_RANK} can be sent", where=tag)
        header = np.full(self.MAX_RANK + 2, 0, np.int64)
        header[: x.ndim + 2] = (dtype_of(x, tag).value, x.ndim, *x.shape)
        headers = np.empty((self.size, header.size), np.int64)
        self._finish(self._comm.Iallgather(header, headers), tag, timeout)
        dtypes = [numpy_dtype(DataType(int(h[0]))) for h in headers]
        shapes = [tuple(int(d) for d in h[2 : 2 + int(h[1])]) for h in headers]
        counts = [d.itemsize * int(np.prod(s, dtype=np.int64)) for d, s in zip(dtypes, shapes, strict=True)]
        starts = [sum(counts[:i]) for i in range(self.size)]
        data = np.empty(sum(counts), np.uint8)
        own = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        request = self._comm.Iallgatherv([own, own.size, self._byte], [data, counts, starts, self._byte])
        self._finish(request, tag, timeout)
        # Slices start at any byte; copies give each part its own aligned memory.
        return [
            data[start : start + count].copy().view(dtype).reshape(shape)
            for start, count, dtype, shape in zip(starts, counts, dtypes, shapes, strict=True)
        ]

    def barrier(self) -> None:
        """See :class:`CommBackend`."""
        self._finish(self._comm.Ibarrier(), "barrier")

    def abort(self, code: int = 1) -> None:
        """End all ranks at once: what a rank does that fails while others wait for it."""
        self._comm.Abort(code)

    def finalize(self) -> None:
        """End MPI in this process: for programs whose end does not, such as servers that embed Python; collective."""
        from mpi4py import MPI

        MPI.Finalize()

    def _finish(self, request: Any, tag: str, timeout: float | None = None) -> None:
        """Wait for a request, giving way to other processes on a machine with fewer cores than ranks."""
        limit = self.timeout if timeout is None else timeout
        start = time.monotonic()
        spins = 0
        while not request.Test():
            spins += 1
            if spins > 200:
                waited = time.monotonic() - start
                # Who has waited long has nothing to do: a server's ranks wait for the next request.
                time.sleep(50e-6 if waited < 0.05 else 1e-3)
                if waited > limit:
                    raise CommError(f"rank {self.rank} waits in {tag!r}: no answer within {limit:g} s")
