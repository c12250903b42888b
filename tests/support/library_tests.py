"""How tests of compiled libraries look at them: with the tools of binutils, and in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def looked_into(library: Path, *command: str) -> str:
    """What a command says of a library, its last argument; skips the test where there is no such command."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}: install binutils")
    return subprocess.run([*command, str(library)], capture_output=True, text=True, check=True).stdout


def run_alone(script: str, *arguments: str) -> str:
    """What a test file prints when it is run as a program, because libraries can't be unloaded again."""
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
