"""Collectives over threads, and what happens to the others when one rank fails, ends or stays away."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_tokenweave import comm as comm_module
from trtllm_tokenweave.comm import CommError, LocalComm, MpiComm, SingleComm, run_ranks
from trtllm_tokenweave.errors import UserError


def test_gathers_different_shapes_and_dtypes_in_rank_order() -> None:
    dtypes = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.int64)]

    def body(comm: LocalComm) -> None:
        for step in range(3):
            x = np.full((comm.rank, 2), step * 10 + comm.rank, dtypes[comm.rank])
            parts = comm.all_gather("t", x)
            x[...] = -1  # the caller may change its array afterwards
            for rank, part in enumerate(parts):
                assert part.shape == (rank, 2)
                assert part.dtype == dtypes[rank]
                assert (part == step * 10 + rank).all()
        comm.barrier()

    run_ranks([partial(body, c) for c in LocalComm.group(3)])


def test_single_rank() -> None:
    comm = SingleComm()
    x = np.arange(3)
    (part,) = comm.all_gather("t", x)
    assert np.array_equal(part, x)
    assert part is not x
    comm.barrier()
    (local,) = LocalComm.group(1)
    assert run_ranks([lambda: (local.all_gather("t", x)[0].sum(), local.rank, local.size)]) == [(3, 0, 1)]


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 8), rounds=st.integers(0, 20))
def test_many_ranks_and_rounds(size: int, rounds: int) -> None:
    def body(comm: LocalComm) -> int:
        total = 0
        for i in range(rounds):
            total += sum(int(p[0]) for p in comm.all_gather("t", np.array([comm.rank * i])))
        return total

    wanted = sum(sum(range(size)) * i for i in range(rounds))
    assert run_ranks([partial(body, c) for c in LocalComm.group(size)]) == [wanted] * size


def test_calls_match_by_order_not_by_tag() -> None:
    """Ranks that call in different orders get each other's wrong data, as on the hardware."""

    def body(comm: LocalComm) -> list[float]:
        calls = [("a", 1.0), ("b", 2.0)]
        if comm.rank:
            calls.reverse()
        return [float(sum(p[0] for p in comm.all_gather(tag, np.array([v])))) for tag, v in calls]

    assert run_ranks([partial(body, c) for c in LocalComm.group(2)]) == [[3.0, 3.0], [3.0, 3.0]]


def _failing(comms: list[LocalComm], bad: Callable[[LocalComm], object]) -> Callable[[], object]:
    def body(comm: LocalComm) -> object:
        if comm.rank == 1:
            return bad(comm)
        return comm.all_gather("site 3", np.zeros(1))

    return lambda: run_ranks([partial(body, c) for c in comms])


def test_a_failed_rank_releases_the_others_and_its_error_is_raised() -> None:
    def bad(comm: LocalComm) -> None:
        raise UserError("broken", where="here")

    # A timeout far above the test's: only the release can end the wait.
    with pytest.raises(UserError, match="here: broken"):
        _failing(LocalComm.group(3, timeout=600), bad)()


def test_a_rank_that_ends_early_releases_the_others() -> None:
    with pytest.raises(CommError, match=r"rank [02] waits in 'site 3': rank 1 (has ended|failed)|broken"):
        _failing(LocalComm.group(3, timeout=600), lambda _comm: None)()


def test_a_rank_that_stays_away_is_named_after_the_timeout() -> None:
    release = threading.Event()

    def late(comm: LocalComm) -> None:
        release.wait(10)

    comms = LocalComm.group(2, timeout=0.2)

    def waiting() -> None:
        try:
            comms[0].all_gather("site 3", np.zeros(1))
        finally:
            release.set()

    with pytest.raises(CommError, match=r"rank 0 waits in 'site 3': no answer within 0\.2 s from rank 1"):
        run_ranks([waiting, lambda: late(comms[1])])


def test_a_broken_group_stays_broken() -> None:
    comms = LocalComm.group(2, timeout=0.1)
    for _ in range(2):
        with pytest.raises(CommError):
            comms[0].all_gather("t", np.zeros(1))
    assert issubclass(CommError, Exception)
    with pytest.raises(CommError, match="group is broken since rank 0 gave up in 't'"):
        # Rank 1 finds the call of rank 0 (0 and 1) complete, the third one never is.
        [comms[1].all_gather("u", np.zeros(1)) for _ in range(3)]


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks that each start a thread per core run ten times slower than with a thread each."""
    asked = []

    class Pools:
        def limit(self, limits: int, user_api: str) -> AbstractContextManager[None]:
            asked.append((limits, user_api))
            return nullcontext()

    monkeypatch.setattr(comm_module, "_thread_pools", Pools)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for ranks in (1, 3, 16):
        assert run_ranks([lambda: 7] * ranks) == [7] * ranks
    assert asked == [(2, "blas"), (1, "blas")]


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(UserError, match="at least one rank"):
        LocalComm.group(0)


def test_mpi_missing_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UserError, match=r"MPI: mpi4py cannot be used .* Fix: install Open MPI"):
        MpiComm()
