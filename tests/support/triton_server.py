"""A Triton server under mpirun, as a user starts it, and what it must not leave behind."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

SECONDS = 300.0
"""Longest wait for anything. Machines that many share are slow: only what never comes is a failure."""

SHARED_MEMORY = Path("/dev/shm")

COMMAND = (sys.executable, "-m", "trtllm_tokenweave.cli.entry")


def tritonserver() -> str | None:
    """The server: on PATH, or beside this Python (build_scripts/fetch_sdk tritonserver)."""
    return shutil.which("tritonserver") or shutil.which(str(Path(sys.prefix) / "tritonserver"))


def wait_until(what: str, holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Wait for a condition; fails with ``what`` when it never comes."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in sockets]


class Server:
    """Makes a repository and starts `triton launch` on it.

    Args:
        folder: For the repository and the log.
        ranks: Servers under mpirun.
        repository_options: Options of `triton repo`.
    """

    def __init__(self, folder: Path, ranks: int, *repository_options: str) -> None:
        self.log_file = folder / "log.txt"
        repository = folder / "repository"
        subprocess.run([*COMMAND, "triton", "repo", str(repository), *repository_options], check=True)
        self.http, self.grpc, self.metrics = free_ports(3)
        words = ["triton", "launch", str(repository), "--ranks", str(ranks), "--tritonserver", str(tritonserver())]
        words += ["--http-port", str(self.http), "--grpc-port", str(self.grpc), "--metrics-port", str(self.metrics)]
        self._memory: set[str] = set()
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen([*COMMAND, *words], stdout=log, stderr=subprocess.STDOUT)

    @property
    def log(self) -> str:
        """What launcher and servers have said, without Triton's tables."""
        lines = self.log_file.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if not line.startswith(("|", "+")))

    def wait_ready(self) -> None:
        """Wait for the launcher's word."""
        wait_until("ready", lambda: "ready after" in self.log or self.process.poll() is not None)
        assert self.process.poll() is None, self.log
        self._memory |= self._mapped()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the launcher a signal and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(SECONDS)

    def processes(self) -> dict[int, list[str]]:
        """Command lines of all processes of this server's ranks, by process id."""
        return {pid: words for pid, words in _processes().items() if any(self.region in word for word in words)}

    def backend(self, rank: int) -> int:
        """Process of a rank's model."""
        (found,) = [
            pid
            for pid, words in self.processes().items()
            if words[0].endswith("_stub") and any(f"{self.region}{rank}_" in word for word in words)
        ]
        return found

    @property
    def region(self) -> str:
        """Beginning of the names of the servers' shared memory."""
        return f"tokenweave_{self.process.pid}_"

    def left_behind(self) -> list[str]:
        """Processes and shared memory of this server that should be gone, whatever others run on this machine."""
        gone = [" ".join(words)[:200] for words in self.processes().values()]
        self._memory |= self._mapped()
        there = (path.name for path in SHARED_MEMORY.iterdir())
        return gone + sorted(name for name in there if name in self._memory or name.startswith(self.region))

    def _mapped(self) -> set[str]:
        """Names of the shared memory that processes of this server hold, Open MPI's too."""
        names = set()
        for pid in self.processes():
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                    path = Path(line.split(maxsplit=5)[-1])
                    names |= {path.name} if path.parent == SHARED_MEMORY else set()
        return names


def _processes() -> dict[int, list[str]]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if words[0]:
            found[int(path.parent.name)] = words
    return found
