"""Under mpirun: an error of one rank is every rank's error, and nobody waits for ever."""

from __future__ import annotations

import time

import pytest

from trtllm_tokenweave.agreement import gather_json, on_all_ranks
from trtllm_tokenweave.comm import MpiComm
from trtllm_tokenweave.errors import UserError

pytestmark = pytest.mark.mpi


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    pytest.importorskip("mpi4py")
    comm = MpiComm(timeout=60)
    failing = comm.size - 1

    def action() -> str:
        if comm.rank == failing:
            raise UserError("is missing", where="file", fix="copy it")
        return "fine"

    with pytest.raises(UserError) as caught:
        on_all_ranks(comm, "test", action)
    rank = f"rank {failing}, " if comm.size > 1 else ""
    assert gather_json(comm, "messages", str(caught.value)) == [f"{rank}file: is missing. Fix: copy it"] * comm.size
    assert on_all_ranks(comm, "again", lambda: comm.rank) == comm.rank


def test_an_action_may_take_longer_than_the_groups_limit() -> None:
    pytest.importorskip("mpi4py")
    comm = MpiComm(timeout=0.2)
    assert on_all_ranks(comm, "long", lambda: time.sleep(0.5 * comm.rank), 60.0) is None
