"""One process per rank, started without mpirun, so that one can die and the others live to tell."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

Body = Callable[[int, str], Any]
_counter = itertools.count()


def _enter(body: Body, rank: int, address: str, results: Connection) -> None:
    try:
        results.send(body(rank, address))
    except BaseException:  # noqa: BLE001 - the parent shows it
        results.send("error\n" + traceback.format_exc())


def run_ranks(body: Body, *, size: int = 2, timeout: float = 180.0) -> list[Any]:
    """What body(rank, bootstrap address) returned on each rank; None for a rank that died.

    Raises AssertionError with the trace of the first rank that raised, or with the ranks that did not end in time.
    """
    context = multiprocessing.get_context("spawn")
    address = f"@tokenweave-{os.getpid()}-{next(_counter)}"
    ranks = []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_enter, args=(body, rank, address, sender))
        process.start()
        sender.close()
        ranks.append((process, receiver))
    outcomes: list[Any] = []
    late = []
    for rank, (process, receiver) in enumerate(ranks):
        outcome = None
        try:
            if receiver.poll(timeout):
                outcome = receiver.recv()
            else:
                late.append(rank)
        except EOFError:
            pass
        outcomes.append(outcome)
        if rank in late:
            process.kill()
        process.join()
    assert not late, f"ranks {late} did not end within {timeout} s"
    for rank, outcome in enumerate(outcomes):
        assert not (isinstance(outcome, str) and outcome.startswith("error\n")), f"rank {rank}: {outcome}"
    return outcomes
