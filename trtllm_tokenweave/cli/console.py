"""How commands talk to people."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from trtllm_tokenweave.config import read_environment


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that colours only what is marked up, and nothing under mpirun, whose ranks get a fake terminal."""
    under_mpi = read_environment().launcher is not None
    return Console(stderr=stderr, quiet=quiet, highlight=False, color_system=None if under_mpi else "auto")


def print_whole(console: Console, view: Table) -> None:
    """Print a table of numbers, none cut off: where it needs more than the terminal's width, it takes it."""
    width = console.width
    console.width = max(width, Measurement.get(console, console.options.update(max_width=10_000), view).maximum)
    console.print(view)
    console.width = width
