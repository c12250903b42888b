"""How commands talk to people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from trtllm_tokenweave.config import columns_are_given, read_environment

#: Columns where nothing is to be wrapped.
_UNLIMITED = 100_000


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that colours only what is marked up, and nothing under mpirun, whose ranks get a fake terminal.

    Lines are wrapped on a terminal, and where COLUMNS says at how many; in a pipe or a file, for grep, they are not.
    """
    under_mpi = read_environment().launcher is not None
    console = Console(stderr=stderr, quiet=quiet, highlight=False, color_system=None if under_mpi else "auto")
    # The console's own word for what it writes to is "terminal" also where FORCE_COLOR is set.
    if (under_mpi or not console.file.isatty()) and not columns_are_given():
        console.width = _UNLIMITED
    return console


def print_whole(console: Console, view: Table) -> None:
    """Print a table of numbers, none cut off: where it needs more than the terminal's width, it takes it."""
    width = console.width
    console.width = max(width, Measurement.get(console, console.options.update(max_width=_UNLIMITED), view).maximum)
    console.print(view)
    console.width = width


def steps_said(document: dict[str, Any]) -> str:
    """How many steps were run how, and how long one took, from the ladder's document."""
    seconds = document["step_seconds"]
    steps = document["steps"].items()
    return ", ".join(f"{count} {rung} ({seconds[rung] / count * 1e3:.2f} ms each)" for rung, count in steps)
