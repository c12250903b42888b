"""`trtllm-tokenweave mpi-run`: start a program on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.launch import AUTO, Job, MpiOptions, find_mpirun, find_program, forwarded, mpirun_command, shown
from trtllm_tokenweave.libraries import find_library

Ranks = Annotated[int, typer.Option("--ranks", "-n", min=1, help="Ranks, each on a GPU of its own.")]
Preload = Annotated[
    Path | None, typer.Option(help="Library that the ranks load first (LD_PRELOAD); auto: this package's.")
]
Forward = Annotated[
    list[str] | None, typer.Option("-x", metavar="NAME[=VALUE]", help="Variable that ranks on other machines get too.")
]
Mpirun = Annotated[str, typer.Option(help="Open MPI's mpirun.")]
MpirunArgument = Annotated[list[str] | None, typer.Option(help="An argument of mpirun: --mpirun-arg=--tag-output.")]
StopSeconds = Annotated[float, typer.Option(min=0, help="How long ranks may take to end when they are told to.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the command and start nothing.")]


def mpi_run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What each rank runs.")],
    ranks: Ranks = 2,
    preload: Preload = None,
    x: Forward = None,
    mpirun: Mpirun = "mpirun",
    mpirun_arg: MpirunArgument = None,
    stop_seconds: StopSeconds = 20.0,
    dry_run: DryRun = False,
) -> None:
    """Start a program on several ranks with mpirun; SIGINT and SIGTERM are passed on.

    The exit code is the program's, as mpirun hands it on; 2 is also bad input of this command.
    """
    find_program(command[0], "give a program that is installed")
    options = MpiOptions(
        mpirun=find_mpirun(mpirun),
        preload=None if preload is None else _library(preload),
        forward=forwarded(x or ()),
        arguments=tuple(mpirun_arg or ()),
    )
    words = mpirun_command([command] * ranks, options)
    if dry_run:
        print(shown(words))
        return
    code = Job(words, stop_seconds=stop_seconds).run()
    if code:
        raise typer.Exit(code)


def _library(given: Path) -> Path:
    path = find_library("tokenweave_preload") if given == AUTO else given
    if path is None or not path.is_file():
        what = "there is no libtokenweave_preload.so" if given == AUTO else "is no file"
        fix = "pip install . (README.md), or build it (plugins/README.md)"
        raise UserError(
            what, where=f"--preload {given}", fix=fix if given == AUTO else "give a library, or auto for ours"
        )
    return path.resolve()
