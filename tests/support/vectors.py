"""Files of test vectors that two languages read: written by a script beside them, checked by a test."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "vectors"


def write_or_check(path: Path, text: str) -> int:
    """What a script does: writes its file, or with --check compares it. Returns the exit code."""
    if "--check" in sys.argv[1:]:
        fresh = path.exists() and path.read_text(encoding="utf-8") == text
        print(f"{path.name} is {'fresh' if fresh else 'stale: run this script without --check'}")
        return 0 if fresh else 1
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path.name}")
    return 0


def assert_fresh(script: str, file: str) -> None:
    """A file holds what its script, a module of the folder, makes."""
    made = import_module(f"vectors.{script}").text()
    command = f"PYTHONPATH=tests python -m vectors.{script}"
    assert (FOLDER / file).read_text(encoding="utf-8") == made, f"stale: run {command}"
