"""A failure of one rank is the same failure on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest

from trtllm_tokenweave.agreement import gather_json, on_all_ranks
from trtllm_tokenweave.comm import CommBackend, CommError, LocalComm, SingleComm, run_ranks
from trtllm_tokenweave.errors import TokenWeaveError, UserError


def test_results_are_each_ranks_own() -> None:
    comms = LocalComm.group(3)
    assert run_ranks([partial(on_all_ranks, c, "t", partial(pow, c.rank, 2)) for c in comms]) == [0, 1, 4]
    assert run_ranks([partial(gather_json, c, "t", {"rank": c.rank, "x": "ü" * c.rank}) for c in comms])[1] == [
        {"rank": 0, "x": ""},
        {"rank": 1, "x": "ü"},
        {"rank": 2, "x": "üü"},
    ]


def outcomes(action: Callable[[CommBackend], object]) -> list[Exception]:
    """What every rank of three raises; a rank that waits for ever would fail with a CommError instead."""

    def body(comm: LocalComm) -> Exception:
        with pytest.raises(TokenWeaveError) as caught:
            on_all_ranks(comm, "test", lambda: action(comm))
        return caught.value

    return run_ranks([partial(body, c) for c in LocalComm.group(3, timeout=10)])


def test_a_users_error_of_one_rank_is_raised_on_all() -> None:
    def action(comm: CommBackend) -> None:
        if comm.rank == 1:
            raise UserError("is missing", where="rank1.engine", fix="copy it")

    errors = outcomes(action)
    assert {str(e) for e in errors} == {"rank 1, rank1.engine: is missing. Fix: copy it"}
    assert all(type(e) is UserError for e in errors)


@pytest.mark.parametrize("error", [TokenWeaveError("TensorRT says no"), OSError("disk on fire"), MemoryError()])
def test_other_errors_of_one_rank_are_raised_on_all(error: Exception) -> None:
    def action(comm: CommBackend) -> None:
        if comm.rank == 2:
            raise error

    errors = outcomes(action)
    assert {str(e) for e in errors} == {f"rank 2: {str(error) or 'MemoryError'}"}
    assert all(type(e) is TokenWeaveError for e in errors)
    assert errors[2].__cause__ is error


def test_the_first_of_several_is_named() -> None:
    def action(comm: CommBackend) -> None:
        if comm.rank:
            raise UserError(f"broken {comm.rank}")

    assert {str(e) for e in outcomes(action)} == {"rank 1: broken 1"}


def test_an_action_may_take_longer_than_the_groups_limit() -> None:
    def body(comm: LocalComm, timeout: float | None) -> None:
        on_all_ranks(comm, "long", lambda: time.sleep(0.4 * comm.rank), timeout)

    run_ranks([partial(body, c, 20.0) for c in LocalComm.group(2, timeout=0.1)])
    with pytest.raises(CommError, match=r"waits in 'long': no answer within 0\.1 s"):
        run_ranks([partial(body, c, None) for c in LocalComm.group(2, timeout=0.1)])


def test_a_single_rank_is_not_named() -> None:
    def action() -> None:
        raise UserError("is missing", where="here")

    with pytest.raises(UserError, match=r"^here: is missing$"):
        on_all_ranks(SingleComm(), "t", action)
