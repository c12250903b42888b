"""Run the demo a second time under mpirun, one process a rank."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from trtllm_tokenweave.config import mpi_environment, read_environment

_SECONDS = 300


def run_under_mpi(tp_size: int, words: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Start ``demo --json`` with ``words`` on ``tp_size`` ranks, once ``say`` was told so.

    Returns:
        {"ranks", "identical", "max_logit_diff"}, or {"skipped": why}, or {"identical": False, "error": why}.
    """
    lack = _lack()
    if lack:
        return {"skipped": lack}
    say(f"running again under mpirun -n {tp_size}")
    command = ["mpirun", "-n", str(tp_size), sys.executable, "-m", "trtllm_tokenweave.cli.entry", "demo"]
    command += ["--json", "--no-mpi", "--no-gpu", "--no-report", *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env=mpi_environment(), check=False
        )
    except subprocess.TimeoutExpired:
        return {"identical": False, "error": f"no answer within {_SECONDS} s"}
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {"identical": False, "error": _last_words(done)}
    if "error" in found:
        return {"identical": False, "error": found["error"]["what"]}
    return {"ranks": tp_size, "identical": found["identical"], "max_logit_diff": found["max_logit_diff"]}


def _lack() -> str:
    """Why ranks cannot be started here; "" where they can."""
    if read_environment().launcher is not None:
        return "this process was started by mpirun itself"
    if shutil.which("mpirun") is None:
        return "mpirun is not installed. Fix: apt-get install openmpi-bin libopenmpi-dev"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed. Fix: pip install 'mpi4py>=4.0'"
    return ""


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Our own error line where there is one; mpirun frames its last words in rows of dashes."""
    lines = [line.strip() for line in done.stderr.splitlines()]
    for line in lines:
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    said = next((line for line in lines if "rank" in line and any(c.isalpha() for c in line)), "")
    return f"mpirun ended with code {done.returncode}" + (f": {said}" if said else "")
