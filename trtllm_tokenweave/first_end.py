"""Which process of an mpirun ended first, and how: seen in /proc, and told by mpirun.

The ranks are mpirun's children, so their exit codes are not ours to ask for. A process that has ended has its code in
/proc until it is waited for, which may be at once; of ranks Open MPI says it afterwards.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

#: What Open MPI 4 and 5 say of the first rank that ended by a signal (some releases with PID 0), that ended with a code
#: which is not 0, and that ended all others.
_SIGNALLED = re.compile(r"noticed that process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
_PROCESS_NAME = re.compile(r"^\s*Process name: \[.+,(\d+)\]\s*$")
_EXIT_CODE = re.compile(r"^\s*Exit code:\s+(\d+)\s*$")
_ABORTED = re.compile(r"MPI_ABORT was invoked on rank (\d+) in communicator MPI_COMM_WORLD")

_PROC = Path("/proc")
#: Servers have hundreds of threads, each of which may have children.
_SCAN_SECONDS = 1.0


@dataclass(frozen=True)
class Member:
    """A process of a job: a rank, or one that a rank has started.

    Attributes:
        rank: The rank.
        pid: Its process id; 0 where it is not known.
        what: What it is to the rank; "" for the rank itself.
        how: How it ended, in words; "" where that is not known.
    """

    rank: int
    pid: int
    what: str = ""
    how: str = ""

    @property
    def failed(self) -> bool:
        """Whether it is known to have ended as it should not."""
        return self.how not in ("", _exit(0))

    def __str__(self) -> str:
        name = f"{self.what} of rank {self.rank}" if self.what else f"rank {self.rank}"
        return name + (f", pid {self.pid}" if self.pid else "") + (f": {self.how}" if self.how else "")


class FirstEnd:
    """Watches a job, and keeps the member that ended first; in words ("": none) by ``str``.

    Args:
        helper: What a process is to the rank that has started it, from the words of its command; "": its end means
            nothing.
    """

    def __init__(self, helper: Callable[[list[str]], str] = lambda _words: "") -> None:
        self._helper = helper
        self._known: dict[int, Member] = {}
        self._first: Member | None = None
        self._told = False
        self._named: int | None = None
        self._scanned = -_SCAN_SECONDS
        # What mpirun says is heard in another thread.
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return "" if self._first is None else str(self._first)

    def look(self, ranks: Iterable[tuple[int, int]]) -> None:
        """Look whether a member has ended since the last time; call it often.

        Args:
            ranks: Process id and rank of each that runs.
        """
        with self._lock:
            self._look(ranks)

    def _look(self, ranks: Iterable[tuple[int, int]]) -> None:
        ended = [found for member in self._known.values() if (found := _ended(member)) is not None]
        for member in ended:
            del self._known[member.pid]
        if self._first is None:
            self._first = _first_of(ended)
        scan = time.monotonic() - self._scanned >= _SCAN_SECONDS
        for pid, rank in ranks:
            self._known.setdefault(pid, Member(rank, pid))
            for child in _children(pid) if scan else ():
                if child not in self._known and (what := self._helper(_words(child))):
                    self._known[child] = Member(rank, child, what)
        if scan:
            self._scanned = time.monotonic()

    def hear(self, line: str) -> None:
        """Take what mpirun says of ranks: it knows which was first, and its code."""
        with self._lock:
            self._hear(line)

    def _hear(self, line: str) -> None:
        if found := _SIGNALLED.search(line):
            self._tell(int(found[1]), _signal(int(found[2])))
        elif found := _ABORTED.search(line):
            self._tell(int(found[1]), "MPI_Abort")
        elif found := _PROCESS_NAME.search(line):
            self._named = int(found[1])
        elif self._named is not None and (found := _EXIT_CODE.search(line)):
            self._tell(self._named, _exit(int(found[1])))

    def _tell(self, rank: int, how: str) -> None:
        seen = self._first
        if self._told or (seen is not None and seen.what):
            return
        self._told = True
        known = [*self._known.values(), *([seen] if seen is not None else [])]
        pid = next((member.pid for member in known if member.rank == rank and not member.what), 0)
        self._first = Member(rank, pid, how=how)


def _first_of(ended: list[Member]) -> Member | None:
    """Of members that ended between two looks the one that was first, as far as that can be told.

    A helper that ends beside a rank may only follow it, as one that is told to end does; of ranks whose code is gone
    nothing tells which was first.
    """
    ranks = [member for member in ended if not member.what]
    failed = [member for member in ranks or ended if member.failed]
    return failed[0] if failed else ranks[0] if len(ranks) == 1 else None


def _exit(code: int) -> str:
    return f"exit code {code}"


def _signal(number: int) -> str:
    with suppress(ValueError):
        return f"signal {number}, {signal.Signals(number).name}"
    return f"signal {number}"


def _children(pid: int) -> Iterator[int]:
    """Process ids of a process's children; none where it is gone, also while it is looked at, or another user's."""
    with suppress(OSError):
        for path in _PROC.glob(f"{pid}/task/*/children"):
            yield from map(int, path.read_text().split())


def _words(pid: int) -> list[str]:
    with suppress(OSError):
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return [""]


def _ended(member: Member) -> Member | None:
    """The member and how it ended; None while it runs."""
    try:
        # The name, which may hold anything, ends with the last parenthesis.
        stat = (_PROC / str(member.pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return member
    if stat[0] not in ("Z", "X"):
        return None
    code = os.waitstatus_to_exitcode(int(stat[-1]))
    return replace(member, how=_signal(-code) if code < 0 else _exit(code))
