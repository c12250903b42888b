"""How commands talk to people."""

from __future__ import annotations

from rich.console import Console

from trtllm_tokenweave.config import read_environment


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that colours only what is marked up, and nothing under mpirun, whose ranks get a fake terminal."""
    under_mpi = read_environment().launcher is not None
    return Console(stderr=stderr, quiet=quiet, highlight=False, color_system=None if under_mpi else "auto")
