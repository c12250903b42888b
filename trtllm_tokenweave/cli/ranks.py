"""Commands that run on the ranks that mpirun started, one process a GPU."""

from __future__ import annotations

import time

from trtllm_tokenweave.agreement import on_all_ranks
from trtllm_tokenweave.comm import CommBackend, MpiComm, SingleComm
from trtllm_tokenweave.config import read_environment
from trtllm_tokenweave.decoder import prepare_rank
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.progress import print_progress

#: Seconds that ranks wait for another one's files: those of a large model take minutes, and not the same on all ranks.
#: A rank that ends takes the others with it at once.
FILE_TIMEOUT = 3600.0


def rank_count(tp: int | None) -> int:
    """Ranks of the command: those that mpirun started, else this process.

    Args:
        tp: What the user says that they are; None: nothing.

    Raises:
        UserError: the user says another number.
    """
    launcher = read_environment().launcher
    size = 1 if launcher is None else launcher.size
    if tp is not None and tp != size:
        fix = "leave it out" if tp == 1 else f"mpirun -n {tp} trtllm-tokenweave ..., one process a GPU"
        raise UserError(f"{tp}, but {size} process{'es run' if size > 1 else ' runs'}", where="--tp", fix=fix)
    return size


def start_ranks() -> CommBackend:
    """Meet the other ranks, and let each have its GPU, TensorRT and the plugins; collective.

    Raises:
        UserError: on all ranks, the first thing that one of them lacks.
    """
    comm: CommBackend = MpiComm(timeout=FILE_TIMEOUT) if rank_count(None) > 1 else SingleComm()
    on_all_ranks(comm, "starting", lambda: prepare_rank(comm))
    return comm


class Progress:
    """Lines of progress on stderr, with the seconds since this was made."""

    def __init__(self, comm: CommBackend) -> None:
        self.comm = comm
        self.started = time.perf_counter()

    def say(self, what: str) -> None:
        """A line for all ranks; rank 0 prints it."""
        if self.comm.rank == 0:
            self._print(what)

    def say_of_rank(self, what: str) -> None:
        """A line of this rank alone."""
        self._print(what if self.comm.size == 1 else f"rank {self.comm.rank}: {what}")

    def _print(self, what: str) -> None:
        print_progress(time.perf_counter() - self.started, what)
