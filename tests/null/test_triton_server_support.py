"""What tests/serving takes for a server's own shared memory, where other servers run beside it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import triton_server
from support.triton_server import Server, wait_until

# Holds the file of its first word, as a rank holds that of Open MPI, whose name says nothing of the server.
_RANK = """
import mmap, pathlib, sys
with open(sys.argv[1], "r+b") as file:
    held = mmap.mmap(file.fileno(), 0)
pathlib.Path(sys.argv[2]).touch()
sys.stdin.read()
"""


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Any]]:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(triton_server, "SHARED_MEMORY", tmp_path / "shm")
    server = Server.__new__(Server)
    server._memory = set()
    server.process = SimpleNamespace(pid=f"{tmp_path.name}_{id(tmp_path)}")  # type: ignore[assignment]
    for name in ("vader_segment.vm.0.1.0", "vader_segment.vm.0.2.0", "tokenweave_1_0_x", f"{server.region}0_x"):
        (tmp_path / "shm" / name).write_bytes(b"x" * 4096)
    held, ready = tmp_path / "shm" / "vader_segment.vm.0.1.0", tmp_path / "ready"
    words = [sys.executable, "-c", _RANK, str(held), str(ready), f"prefix={server.region}0_"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE)
    wait_until("mapped", ready.exists)
    yield server, process
    process.kill()
    process.communicate()


def test_only_a_servers_own_is_left_behind(rank: tuple[Server, Any]) -> None:
    server, process = rank
    own = [f"{server.region}0_x", "vader_segment.vm.0.1.0"]
    running, *files = server.left_behind()
    assert running.startswith(sys.executable)
    assert files == own
    process.kill()
    process.wait()
    assert server.left_behind() == own  # of a process that is gone
    for name in own:
        (triton_server.SHARED_MEMORY / name).unlink()
    assert server.left_behind() == []  # another server's are still there
