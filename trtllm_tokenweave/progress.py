"""Lines that say how far a run is."""

from __future__ import annotations

import sys


def print_progress(seconds: float, what: str) -> None:
    """A line on stderr, behind the seconds since the run began."""
    # One write, not a second for the end: ranks share stderr.
    print(f"{seconds:6.1f} s  {what}\n", end="", file=sys.stderr, flush=True)
