"""How far the ranks of a test are. Without PyTorch, whose libraries would be in the process then."""

from __future__ import annotations

import time
from collections.abc import Callable

from trtllm_tokenweave.comm import CommBackend


def progress(comm: CommBackend) -> Callable[[str], None]:
    """Prints lines, with the seconds since now, on rank 0: a run that is cut short shows where it was."""
    started = time.perf_counter()

    def say(what: str) -> None:
        if comm.rank == 0:
            print(f"{time.perf_counter() - started:6.1f} s  {what}", flush=True)

    return say
