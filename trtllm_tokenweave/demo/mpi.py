"""Run the demo a second time under mpirun, one process a rank."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from trtllm_tokenweave.config import mpi_environment, read_environment

_SECONDS = 300


def run_under_mpi(tp_size: int, words: Sequence[str]) -> dict[str, Any]:
    """Start ``demo --json`` with ``words`` on ``tp_size`` ranks.

    Returns:
        {"ranks", "identical", "max_logit_diff"}, or {"skipped": why}, or {"identical": False, "error": why}.
    """
    if read_environment().launcher is not None:
        return {"skipped": "this process was started by mpirun itself"}
    mpirun = shutil.which("mpirun")
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        lack = "mpirun" if mpirun is None else "mpi4py"
        return {"skipped": f"{lack} is not installed: install Open MPI and the extra 'mpi'"}
    command = [mpirun, "-n", str(tp_size), sys.executable, "-m", "trtllm_tokenweave.cli.entry", "demo"]
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


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Our own error line where there is one; mpirun frames its last words in rows of dashes."""
    lines = [line.strip() for line in done.stderr.splitlines()]
    for line in lines:
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    said = next((line for line in lines if "rank" in line and any(c.isalpha() for c in line)), "")
    return f"mpirun ended with code {done.returncode}" + (f": {said}" if said else "")
