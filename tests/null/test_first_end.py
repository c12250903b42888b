"""Which process of an mpirun ended first: real processes, and what Open MPI says."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fake_tritonserver import server_words

from trtllm_tokenweave import first_end
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.first_end import FirstEnd, Member

SECONDS = 60.0
Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts scripts of bash, which nobody waits for."""
    started: list[subprocess.Popen[bytes]] = []

    def make(script: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["/bin/bash", "-c", script], stdin=subprocess.PIPE))
        return started[-1]

    yield make
    for process in started:
        process.kill()
        process.communicate()


def _go(process: subprocess.Popen[bytes]) -> None:
    """Let a script that reads go on, and wait until it has ended; its code stays to be asked for."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    end = time.monotonic() + SECONDS
    while ") Z " not in Path(f"/proc/{process.pid}/stat").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)


def _helper(words: list[str]) -> str:
    return "the backend" if "stub" in words else ""


@pytest.mark.parametrize(
    ("script", "how"),
    [("exit 3", "exit code 3"), ("exit 0", "exit code 0"), ("kill -KILL $$", "signal 9, SIGKILL")],
)
def test_a_rank_that_ends(start: Start, script: str, how: str) -> None:
    ranks = [start("read"), start(f"read; {script}")]
    first = FirstEnd()
    found = [(process.pid, rank) for rank, process in enumerate(ranks)]
    first.look(found)
    first.look(found)
    assert str(first) == ""
    _go(ranks[1])
    first.look(found[:1])
    assert str(first) == f"rank 1, pid {ranks[1].pid}: {how}"
    _go(ranks[0])  # ends later
    first.look([])
    assert str(first).startswith("rank 1")


def test_a_rank_that_was_waited_for_is_named_without_its_code_until_mpirun_says_it(start: Start) -> None:
    rank = start("read; exit 3")
    first = FirstEnd()
    first.look([(rank.pid, 1)])
    _go(rank)
    rank.wait()
    first.look([])
    assert str(first) == f"rank 1, pid {rank.pid}"
    for line in ("  Process name: [[20209,1],1]\n", "  Exit code:    3\n"):
        first.hear(line)
    assert str(first) == f"rank 1, pid {rank.pid}: exit code 3"


def test_a_helper_that_ends_before_its_rank(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(first_end, "_SCAN_SECONDS", 0.0)
    os.mkfifo(tmp_path / "go")
    # The rank is a shell, which waits for its children at once where it is not stopped.
    rank = start(f"bash -c 'read < {tmp_path}/go; exit 4' stub & kill -STOP $$")
    first = FirstEnd(_helper)
    end = time.monotonic() + SECONDS
    while len(first._known) < 2:
        first.look([(rank.pid, 2)])
        assert time.monotonic() < end
    (child,) = [pid for pid, member in first._known.items() if member.what]
    (tmp_path / "go").write_text("\n")
    while not str(first):
        first.look([(rank.pid, 2)])
        assert time.monotonic() < end
    assert str(first) == f"the backend of rank 2, pid {child}: exit code 4"
    first.hear("mpirun noticed that process rank 2 with PID 0 on node vm exited on signal 15 (Terminated).\n")
    assert str(first).startswith("the backend of rank 2")


def _seen(members: list[Member], monkeypatch: pytest.MonkeyPatch) -> FirstEnd:
    """What saw these members run, and then all ended between two looks."""
    first = FirstEnd()
    first._known = {member.pid: member for member in members}
    monkeypatch.setattr(first_end, "_ended", lambda member: member)
    first.look([])
    return first


RANK, CRASHED = Member(1, 11), Member(1, 11, how="signal 11, SIGSEGV")
BACKEND = Member(0, 20, "the Python backend", "signal 9, SIGKILL")


def test_a_helper_that_ends_beside_a_rank_is_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(_seen([BACKEND], monkeypatch)).startswith("the Python backend of rank 0")
    assert str(_seen([BACKEND, CRASHED], monkeypatch)) == "rank 1, pid 11: signal 11, SIGSEGV"
    first = _seen([BACKEND, RANK], monkeypatch)
    assert str(first) == "rank 1, pid 11"
    first.hear("mpirun noticed that process rank 1 with PID 11 on node vm exited on signal 11 (Segmentation fault).\n")
    assert str(first) == "rank 1, pid 11: signal 11, SIGSEGV"


def test_of_ranks_that_vanish_together_none_is_named_before_mpirun_does(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _seen([Member(0, 10), RANK], monkeypatch)
    assert str(first) == ""
    first.hear("mpirun noticed that process rank 1 with PID 11 on node vm exited on signal 9 (Killed).\n")
    assert str(first) == "rank 1: signal 9, SIGKILL"


@pytest.mark.parametrize("error", [FileNotFoundError, ProcessLookupError])
def test_a_process_may_vanish_while_its_children_are_listed(
    error: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanishes(*_: object) -> Iterator[Path]:
        yield Path("/nowhere/children") if error is FileNotFoundError else Path("/")
        raise error

    monkeypatch.setattr(Path, "glob", vanishes)
    first = FirstEnd(_helper)
    first.look([(os.getpid(), 0)])
    assert str(first) == ""


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["mpirun noticed that process rank 3 with PID 0 on node vm exited on signal 9 (Killed)."],
            "signal 9, SIGKILL",
        ),
        (["prterun noticed that process rank 3 with PID 71 on node vm exited on signal 11 (x)."], "signal 11, SIGSEGV"),
        (["mpirun noticed that process rank 3 with PID 0 on node vm exited on signal 99 (?)."], "signal 99"),
        (["  Process name: [[20209,1],3]", "  Exit code:    7"], "exit code 7"),
        (["   Process name: [prterun-vm-12@1,3]", "   Exit code:    7"], "exit code 7"),
        (["MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD"], "MPI_Abort"),
        # Only the first: the others follow from it.
        (
            [
                "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD",
                "  Process name: [[20209,1],0]",
                "  Exit code:    7",
            ],
            "MPI_Abort",
        ),
    ],
)
def test_what_open_mpi_says(lines: list[str], said: str) -> None:
    first = FirstEnd()
    for line in ["Exit code:    9", "of a program", *lines]:
        first.hear(f"{line}\n")
    assert str(first) == f"rank 3: {said}"


def test_nothing_is_said_where_nothing_is_known() -> None:
    first = FirstEnd()
    first.look([])
    first.hear("Exit code: 3\n")
    assert str(first) == ""


# ---- the launcher of servers


@pytest.mark.parametrize(
    ("variables", "first"),
    [
        ({"STUB": "kill -KILL $$", "MPI_TELLS": "1"}, r"the Python backend of rank 1, pid \d+: signal 9, SIGKILL"),
        ({"STUB": "exit 3"}, r"the Python backend of rank 1, pid \d+: exit code 3"),
        # A backend that ends as it should: what ended first is the server.
        ({"STUB": "exit 0", "MPI_TELLS": "1"}, r"rank 1, pid \d+: exit code 1"),
        ({"EARLY": "5", "MPI_TELLS": "1"}, r"rank 0(, pid \d+)?: exit code 5"),
    ],
)
def test_the_last_line_has_the_process_that_ended_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    variables: dict[str, str],
    first: str,
) -> None:
    if "STUB" in variables:
        # The rank that is still there ends as mpirun would end it.
        variables = {**variables, "LASTS": "6", "DEAF": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["triton", "repo", str(tmp_path / "repository")]) == 0
    assert main(server_words(tmp_path, tmp_path / "repository", monkeypatch)) == 1
    said = capfd.readouterr().err.splitlines()[-1]
    code = variables.get("EARLY", "1")
    assert re.fullmatch(
        rf"error: the servers ended with code {code} before they were ready \(first {first}\); "
        "their last messages say why",
        said,
    ), said
