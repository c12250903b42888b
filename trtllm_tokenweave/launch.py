"""Starting programs on several ranks with Open MPI's mpirun, and stopping them so that they can tidy up.

mpirun gives ranks that it ends a second at most. So it is started in a session of its own, where a signal from the
terminal does not reach it, and the ranks of this machine are sent the signal that the launcher got: they end by
themselves, and mpirun after them. What is left after the time limit is ended by mpirun, and then by force.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from trtllm_tokenweave.config import launch_additions, launch_environment, read_environment
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.first_end import FirstEnd

#: The word that stands for this package's own library as the one to preload.
AUTO = Path("auto")

#: Where POSIX shared memory lies.
SHARED_MEMORY = Path("/dev/shm")

_POLL_SECONDS = 0.1
_FORCE_SECONDS = 10.0
#: How long what ranks wrote last is waited for.
_LAST_WORDS_SECONDS = 2.0


@dataclass(frozen=True)
class MpiOptions:
    """How ranks are started.

    Attributes:
        mpirun: The program.
        preload: Library that the ranks load first (LD_PRELOAD), before those that LD_PRELOAD names already.
        forward: Environment variables that ranks on other machines are given too (mpirun's -x): NAME, or NAME=VALUE.
        arguments: More arguments of mpirun, for example ("--hostfile", "hosts").
    """

    mpirun: str = "mpirun"
    preload: Path | None = None
    forward: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


def find_program(name: str, fix: str) -> str:
    """The path of a program.

    Raises:
        UserError: there is none.
    """
    found = shutil.which(name)
    if found is None:
        raise UserError("is no program on this machine" if "/" in name else "is not on PATH", where=name, fix=fix)
    return found


def find_mpirun(name: str = "mpirun") -> str:
    """The path of Open MPI's mpirun.

    Raises:
        UserError: there is none, or it is another MPI's, whose options are others; or this process is a rank itself,
            where Open MPI starts no others.
    """
    if read_environment().launcher is not None:
        raise UserError("cannot start ranks below an mpirun", where=name, fix="call this command without mpirun")
    fix = "install Open MPI (Debian, Ubuntu: apt-get install openmpi-bin)"
    path = find_program(name, fix)
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    if not any(word in said.stdout + said.stderr for word in ("Open MPI", "OpenRTE", "prte")):
        raise UserError("is not Open MPI's", where=path, fix=f"{fix} and give its path as --mpirun")
    return path


def mpirun_command(ranks: Sequence[Sequence[str]], options: MpiOptions) -> list[str]:
    """The one command ``mpirun ... -n 1 RANK0 : -n 1 RANK1 ...``; ranks in a row that are alike share their ``-n``.

    Args:
        ranks: The command of each rank.
        options: How they are started.

    Raises:
        UserError: LD_PRELOAD is forwarded beside a library to preload.
    """
    if options.preload is not None and "LD_PRELOAD" in map(_name, options.forward):
        fix = "set LD_PRELOAD without -x: it is put behind the library of --preload"
        raise UserError("goes without --preload", where="-x LD_PRELOAD", fix=fix)
    # -x holds for one part of the command only.
    exports: list[str] = []
    if options.preload is not None:
        value = ":".join([str(options.preload), *filter(None, [launch_environment().get("LD_PRELOAD")])])
        exports += ["-x", f"LD_PRELOAD={value}"]
    for name in options.forward:
        exports += ["-x", name]
    parts: list[tuple[int, Sequence[str]]] = []
    for command in ranks:
        if parts and list(parts[-1][1]) == list(command):
            parts[-1] = (parts[-1][0] + 1, command)
        else:
            parts.append((1, command))
    # By default each rank is bound to a core or two, on which all threads of a server would crowd.
    words = [options.mpirun, "--bind-to", "none", *options.arguments]
    for number, (count, command) in enumerate(parts):
        words += [":"] * bool(number) + ["-n", str(count), *exports, *command]
    return words


def forwarded(names: Sequence[str] = ()) -> tuple[str, ...]:
    """Variables that ranks on other machines need too: ours and the CUDA libraries' that are set, and ``names``.

    Args:
        names: NAME, which is set, or NAME=VALUE.

    Raises:
        UserError: one of ``names`` is not set, or has no name before the ``=``.
    """
    environment = launch_environment()
    for name in names:
        if not _name(name):
            raise UserError("has no name", where=f"-x {name}", fix="as in -x NAME, or -x NAME=VALUE")
        if "=" not in name and name not in environment:
            raise UserError("is not set", where=f"-x {name}", fix="set it, give a value (NAME=VALUE), or leave it out")
    prefixes = ("TOKENWEAVE_", "TLLM_", "TRTLLM_", "NCCL_", "CUDA_VISIBLE_DEVICES", "TENSORRT_ROOT")
    given = set(map(_name, names))
    return tuple(dict.fromkeys([*names, *sorted(n for n in set(environment) - given if n.startswith(prefixes))]))


def _name(word: str) -> str:
    return word.partition("=")[0]


def shown(command: Sequence[str]) -> str:
    """The command as a shell takes it, with the variables that are added to the user's."""
    added = [f"{name}={shlex.quote(value)}" for name, value in launch_additions().items()]
    return " ".join([*added, shlex.join(command)])


class Job:
    """One run of mpirun.

    Args:
        command: What `mpirun_command` made.
        stop_seconds: How long ranks may take to end by themselves.
        first_end: Is shown the ranks while the job runs.
    """

    def __init__(self, command: Sequence[str], *, stop_seconds: float, first_end: FirstEnd | None = None) -> None:
        self.signal = 0
        self._first_end = first_end
        self._command = command
        self._stop_seconds = stop_seconds

    def run(self, watch: Callable[[], None] = lambda: None, hear: Callable[[str], None] | None = None) -> int:
        """Start it and wait for the end, passing SIGINT and SIGTERM on; call from the main thread, once.

        Args:
            watch: Called every now and then while it runs; what it raises stops the job.
            hear: Called, in another thread, with each line that goes to stderr.

        Returns:
            mpirun's exit code. ``signal`` is the number of the signal that was passed on, or 0.

        Raises:
            TokenWeaveError: ranks had to be killed.
        """
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        jobs: set[str] = set()
        try:
            with (
                _heard(hear) as stderr,
                subprocess.Popen(
                    self._command, env=launch_environment(), start_new_session=True, stderr=stderr
                ) as process,
            ):
                try:
                    while process.poll() is None and not self.signal:
                        ranks = _ranks(process)
                        jobs |= {rank.job for rank in ranks}
                        if self._first_end is not None:
                            self._first_end.look((rank.pid, rank.rank) for rank in ranks)
                        watch()
                        time.sleep(_POLL_SECONDS)
                    self._stop(process, self.signal)
                except BaseException:
                    with suppress(TokenWeaveError):
                        self._stop(process, signal.SIGTERM)
                    raise
                return process.returncode
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            _tidy(jobs)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number

    def _stop(self, process: subprocess.Popen[bytes], number: int) -> None:
        """End it where it still runs: ranks first, also those that are being started."""
        end = time.monotonic() + self._stop_seconds
        told: set[int] = set()
        while process.poll() is None:
            if time.monotonic() > end:
                _kill(process)
                raise TokenWeaveError(f"ranks did not end within {self._stop_seconds:g} s and were killed")
            for rank in _ranks(process):
                if rank.pid not in told:
                    told.add(rank.pid)
                    with suppress(ProcessLookupError):
                        os.kill(rank.pid, number)
            time.sleep(_POLL_SECONDS)


@contextmanager
def _heard(hear: Callable[[str], None] | None) -> Iterator[int | None]:
    """A pipe to take for stderr, whose lines ``hear`` gets and this process's stderr too; None where nobody hears."""
    if hear is None:
        yield None
        return
    readable, writable = os.pipe()
    thread = threading.Thread(target=_pass_on, args=(readable, hear), daemon=True)
    thread.start()
    try:
        yield writable
    finally:
        os.close(writable)
        # A process that outlives mpirun may hold the pipe.
        thread.join(_LAST_WORDS_SECONDS)


def _pass_on(readable: int, hear: Callable[[str], None]) -> None:
    with open(readable, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            # Nobody may read our stderr any longer: the ranks must not wait for that.
            with suppress(OSError, ValueError):
                sys.stderr.write(line)
                sys.stderr.flush()
            hear(line)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_FORCE_SECONDS)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class _Rank(NamedTuple):
    pid: int
    rank: int
    job: str


def _ranks(process: subprocess.Popen[bytes]) -> list[_Rank]:
    """The ranks on this machine with their job's id; mpirun's other children carry ranks elsewhere."""
    found = []
    with suppress(OSError):
        for children in Path(f"/proc/{process.pid}/task").glob("*/children"):
            for pid in children.read_text().split():
                entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                values = dict(entry.decode(errors="replace").partition("=")[::2] for entry in entries)
                if (rank := values.get("OMPI_COMM_WORLD_RANK", "")).isdigit():
                    found.append(_Rank(int(pid), int(rank), values.get("PMIX_NAMESPACE", "")))
    return found


def _tidy(jobs: set[str]) -> None:
    """Remove the shared memory that Open MPI leaves where ranks were killed."""
    for job in jobs:
        if job.isdigit():
            for segment in SHARED_MEMORY.glob(f"*_segment.*.{int(job):x}.*"):
                segment.unlink(missing_ok=True)
