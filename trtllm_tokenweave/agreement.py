"""A step that all ranks take together: when it fails on one, it fails on all with the same error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from trtllm_tokenweave.comm import CommBackend, CommError
from trtllm_tokenweave.errors import TokenWeaveError, UserError

T = TypeVar("T")


def gather_json(comm: CommBackend, tag: str, value: Any, timeout: float | None = None) -> list[Any]:
    """Every rank's ``value`` (plain data), in rank order; ``timeout`` as in `CommBackend.all_gather`."""
    data = np.frombuffer(json.dumps(value).encode(), np.int8)
    return [json.loads(part.tobytes()) for part in comm.all_gather(tag, data, timeout)]


def slowest(comm: CommBackend, value: float) -> float:
    """The largest of the ranks' values, on every rank."""
    return float(max(gather_json(comm, "slowest rank", value)))


def on_all_ranks(comm: CommBackend, tag: str, action: Callable[[], T], timeout: float | None = None) -> T:
    """Run ``action`` on every rank of ``comm`` and wait until all have.

    Args:
        comm: The ranks.
        tag: What the action is, for messages.
        action: What to do.
        timeout: Seconds that a rank which is done waits for the others; None: what the group was made with.

    Raises:
        UserError, TokenWeaveError: on every rank the error of the first rank that failed, which it names.
    """
    error: Exception | None = None
    try:
        result = action()
    except CommError:
        raise
    except Exception as caught:  # noqa: BLE001  (the other ranks must learn of any)
        error = caught
    errors = gather_json(comm, tag, _outcome(error), timeout)
    rank = next((rank for rank, outcome in enumerate(errors) if outcome is not None), None)
    if rank is None:
        return result
    raise _error(errors[rank], f"rank {rank}" if comm.size > 1 else "") from error


def _outcome(error: Exception | None) -> dict[str, Any] | None:
    if error is None:
        return None
    if isinstance(error, UserError):
        return {"what": error.what, "where": error.where, "fix": error.fix, "user": True}
    return {"what": str(error) or type(error).__name__, "where": "", "fix": "", "user": False}


def _error(outcome: dict[str, Any], rank: str) -> TokenWeaveError:
    where = ", ".join(part for part in (rank, outcome["where"]) if part)
    if outcome["user"]:
        return UserError(outcome["what"], where=where, fix=outcome["fix"])
    return TokenWeaveError(f"{where}: {outcome['what']}" if where else outcome["what"])
