"""Serving on all ranks: rank 0 takes requests, and every rank runs the same steps.

Before each step the ranks exchange what rank 0 has decided: the sequences that begin, and those that are cancelled.
With the same orders every rank's generator does the same. While nothing is in flight the exchange goes on as a
heartbeat, so that a rank that died is noticed within the time limit of the ranks' communicator, whatever the load.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from trtllm_tokenweave.agreement import gather_json
from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.runner import Generator

Ended = Literal["", "eos", "length"]


class Listener(Protocol):
    """Where the results of a request go. Called by the thread that runs :meth:`Service.run`."""

    def tokens(self, tokens: Sequence[int], ended: Ended) -> None:
        """Take the next tokens; ``ended`` says why there are no more, "" while there are."""

    def failed(self, what: str, *, refused: bool = False) -> None:
        """Take the news that there will be no more tokens. ``refused``: the request itself was wrong."""

    def is_cancelled(self) -> bool:
        """Whether nobody wants the results any more."""


@dataclass(frozen=True)
class Request:
    """One sequence to generate."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    listener: Listener


@dataclass
class Counts:
    """What rank 0 has served since it began, and what is open now."""

    completed: int = 0
    refused: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    open: int = 0


@dataclass(frozen=True)
class ServiceOptions:
    """How it is served.

    Attributes:
        max_queue_size: Requests that wait or run; more are refused.
        cancel_seconds: How often it is looked whether requests are cancelled.
        heartbeat_seconds: How often idle ranks exchange that they are alive; well below the ranks' time limit.
    """

    max_queue_size: int = 1000
    cancel_seconds: float = 0.1
    heartbeat_seconds: float = 0.5


class Service:
    """Serves requests with a generator; each rank makes one and runs it.

    ``exchanged`` is when the last exchange began, by `time.monotonic`: a rank that hangs in a step does not get there.

    Args:
        comm: The ranks. Its time limit is how long a rank that does not answer is waited for.
        generator: This rank's; nothing is in flight.
        options: See `ServiceOptions`.
        on_step: Rank 0: called with the counts after each exchange in which they changed.
    """

    def __init__(
        self,
        comm: CommBackend,
        generator: Generator,
        options: ServiceOptions | None = None,
        on_step: Callable[[Counts], None] | None = None,
    ) -> None:
        self.comm = comm
        self.generator = generator
        self.options = options or ServiceOptions()
        self.on_step = on_step
        self.counts, self._told = Counts(), Counts()
        self._changed = threading.Condition()
        self._arrived: deque[Request] = deque()
        self._open: dict[int, Listener] = {}
        self._stopping = False
        self._closed = ""
        self._looked = 0.0
        self.exchanged = time.monotonic()

    # ---- called from any thread

    def add(self, request: Request) -> None:
        """Rank 0: take a request; its listener hears the rest.

        Raises:
            TokenWeaveError: no more requests are taken.
        """
        with self._changed:
            if self._closed or self._stopping:
                raise TokenWeaveError(self._closed or "the server is stopping")
            most = self.options.max_queue_size
            if len(self._arrived) + len(self._open) >= most:
                raise TokenWeaveError(f"{most} requests wait or run already, no more are taken (max_queue_size)")
            self._arrived.append(request)
            self._changed.notify_all()

    def count_refused(self) -> None:
        """Rank 0: count a wrong request that was refused, here or before it came here."""
        with self._changed:
            self.counts.refused += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Any rank: take no more requests, finish what has begun, then end :meth:`run` on all ranks."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    # ---- the loop

    def run(self) -> None:
        """Serve until a rank is stopped. Whatever ends it, requests that are still open have failed.

        Raises:
            CommError: a rank did not answer in time.
            TokenWeaveError: a step failed, or the ranks do not do the same.
        """
        closed = "the server has stopped"
        try:
            while self._exchange():
                self._deliver()
        except Exception as error:
            closed = f"the server is going down: {error}"
            raise
        finally:
            self.close(closed)

    def _exchange(self) -> bool:
        """Bring all ranks to the same orders; False when it is time to end."""
        told = self._decide() if self.comm.rank == 0 else {"stop": self._stopping}
        self.exchanged = time.monotonic()
        said = gather_json(self.comm, "exchange of requests", told)
        if self.comm.rank == 0 and any(other["stop"] for other in said[1:]):
            self.stop()
        orders = said[0]
        if orders["stop"]:
            return False
        if self.comm.rank != 0:
            self._follow(orders["begin"])
        for number in orders["cancel"]:
            self.generator.cancel(number)
        return True

    def _decide(self) -> dict[str, Any]:
        """Rank 0: wait until there is something to do, or for a heartbeat, and say what is to be done."""
        with self._changed:
            if not self._arrived and not self._stopping and not self.generator.busy:
                self._changed.wait(self.options.heartbeat_seconds)
            arrived = list(self._arrived)
            stop = self._stopping and not arrived and not self._open
        begin = []
        for request in arrived:
            order = self._begin(request)
            # One by one: whatever a later one raises, each request is either open or arrived, and is failed once.
            with self._changed:
                self._arrived.popleft()
            if order is not None:
                begin.append(order)
        return {"begin": begin, "cancel": self._cancelled(), "stop": stop}

    def _begin(self, request: Request) -> dict[str, Any] | None:
        try:
            number = self.generator.submit(request.prompt, request.max_new_tokens)
        except UserError as error:
            self.count_refused()
            # The generator's word for what requests call max_tokens.
            fix = error.fix.replace("max_new_tokens", "max_tokens")
            request.listener.failed(str(UserError(error.what, where="request", fix=fix)), refused=True)
            return None
        self._open[number] = request.listener
        self.counts.prompt_tokens += len(request.prompt)
        return {"number": number, "prompt": request.prompt, "most": request.max_new_tokens}

    def _cancelled(self) -> list[int]:
        """Rank 0: sequences whose results nobody wants any more."""
        now = time.monotonic()
        if now - self._looked < self.options.cancel_seconds:
            return []
        self._looked = now
        gone = [number for number, listener in self._open.items() if listener.is_cancelled()]
        for number in gone:
            self._open.pop(number).failed("cancelled")
        self.counts.cancelled += len(gone)
        return gone

    def _follow(self, begin: Sequence[dict[str, Any]]) -> None:
        """Other ranks: begin what rank 0 has begun."""
        for order in begin:
            number = self.generator.submit(order["prompt"], order["most"])
            if number != order["number"]:
                raise TokenWeaveError(
                    f"rank {self.comm.rank} is not in step: its sequence {number} is rank 0's {order['number']}"
                )

    def _deliver(self) -> None:
        """Run a step; on rank 0 hand out what it produced."""
        busy = self.generator.busy
        produced = self.generator.step()
        if self.comm.rank != 0:
            return
        self.counts.steps += busy
        self.counts.generated_tokens += len(produced)
        for token in produced:
            self._open[token.number].tokens([token.token], token.ended)
            if token.ended:
                del self._open[token.number]
                self.counts.completed += 1
        self.counts.open = len(self._open)
        if self.on_step is not None and self.counts != self._told:
            self._told = replace(self.counts)
            self.on_step(self._told)

    def close(self, why: str) -> None:
        """Take no more requests, and fail those that are open: when :meth:`run` ends, or hangs."""
        with self._changed:
            self._closed = why
            left = [*self._open.values(), *(request.listener for request in self._arrived)]
            self._open.clear()
            self._arrived.clear()
        self.counts.failed += len(left)
        for listener in left:
            listener.failed(why)
