"""The command ``trtllm-tokenweave``: its subcommands, and how errors end.

Exit codes:
    0: done.
    1: the work itself failed (a check did not hold, or something unexpected).
    2: bad input or bad usage, or a file or output that cannot be read or written; nothing was written.
    130: interrupted from the keyboard.
    141: whoever read the output has gone away (``| head``), as of a program that SIGPIPE ends.

An error is one line on stderr, ``error: <where>: <what>. Fix: <fix>``. With ``--json`` stdout holds exactly one JSON
document whatever happens: the command's result, or ``{"error": {"kind", "what", "where", "fix"}}``, where kind is
"usage", "user", "failure", "unexpected" or "interrupted". A command that prints a result and still failed (say,
outputs that differ) raises ``typer.Exit(1)`` instead of an error.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.main import get_command

from trtllm_tokenweave import __version__
from trtllm_tokenweave.config import DEBUG, Environment, forget_no_columns, limit_blas_threads, read_environment
from trtllm_tokenweave.errors import CHECK_PATH, TokenWeaveError, UserError

PROG = "trtllm-tokenweave"

ErrorKind = Literal["usage", "user", "failure", "unexpected", "interrupted"]


@dataclass(frozen=True)
class Command:
    """One subcommand, known by name and summary before its module is imported.

    Attributes:
        name: The word on the command line.
        module: Module that holds it.
        attribute: A function (one command) or a ``typer.Typer`` (a group) in that module.
        summary: Its line in the list of commands.
        passes_on: Every word after its name is handed to the function (`typer.Context.args`): it runs another program.
    """

    name: str
    module: str
    attribute: str
    summary: str
    passes_on: bool = False


COMMANDS: tuple[Command, ...] = (
    Command(
        "demo",
        "trtllm_tokenweave.cli.demo",
        "demo",
        "Weave a real Llama, run it beside the stock network and show that both say the same.",
    ),
    Command(
        "build",
        "trtllm_tokenweave.cli.build",
        "build",
        "Build a model as TensorRT engines, woven; under mpirun one for each rank.",
    ),
    Command(
        "run",
        "trtllm_tokenweave.cli.run",
        "run",
        "Generate text with engines that build made; under mpirun as their ranks.",
    ),
    Command(
        "inspect",
        "trtllm_tokenweave.cli.inspect",
        "inspect_",
        "List the places of a network that can be fused, and why others cannot.",
    ),
    Command(
        "plan",
        "trtllm_tokenweave.cli.plan",
        "plan",
        "Print the split of each step size and the waves of each GEMM in either half, or predicted times.",
    ),
    Command(
        "table",
        "trtllm_tokenweave.cli.table",
        "app",
        "Show, compare, join, check and convert tuning tables.",
    ),
    Command(
        "tune",
        "trtllm_tokenweave.cli.tune",
        "tune",
        "Measure which split and how many CTAs each step size should have, and write the table.",
    ),
    Command(
        "bench",
        "trtllm_tokenweave.cli.bench",
        "app",
        "Measure the fused kernel on this machine's GPUs against its peers; redraw plots.",
    ),
    Command(
        "trtllm-build",
        "trtllm_tokenweave.cli.trtllm_build",
        "trtllm_build",
        "TensorRT-LLM's trtllm-build, with --plugin tokenweave.",
        passes_on=True,
    ),
    Command(
        "shim",
        "trtllm_tokenweave.cli.shim",
        "app",
        "Put a trtllm-build that knows --plugin tokenweave on PATH, or take it away.",
    ),
    Command(
        "model-cls-file",
        "trtllm_tokenweave.cli.trtllm_build",
        "model_cls_file",
        "Print the file that an unmodified trtllm-build takes as --model_cls_file.",
    ),
    Command(
        "mpi-run",
        "trtllm_tokenweave.cli.mpi_run",
        "mpi_run",
        "Start a program on several ranks with mpirun.",
    ),
    Command(
        "triton",
        "trtllm_tokenweave.cli.triton",
        "app",
        "Make model repositories and start Triton servers under mpirun.",
    ),
    Command(
        "doctor",
        "trtllm_tokenweave.cli.doctor",
        "doctor",
        "Say what is installed, what is missing, what each lack costs and how to get it.",
    ),
)


#: Of a command that hands its words on: also --help is another program's.
_PASSES_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def build_app(loaded: Collection[str]) -> typer.Typer:
    """Make the application.

    Args:
        loaded: Names of the commands whose modules are imported. The others are listed by their summaries only, so
            that ``--help`` need not import numpy and the rest.
    """
    app = typer.Typer(
        name=PROG,
        no_args_is_help=True,
        add_completion=False,
        help="TokenWeave for TensorRT-LLM engines: AllReduce fused with RMSNorm, and hidden behind compute.",
    )
    app.callback()(_root)
    for command in COMMANDS:
        target = getattr(importlib.import_module(command.module), command.attribute) if command.name in loaded else None
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=command.name, short_help=command.summary)
        else:
            settings = _PASSES_ON if command.passes_on else None
            app.command(command.name, short_help=command.summary, context_settings=settings)(target or _not_loaded)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; see the module's description.

    Args:
        argv: Words after the program's name, default ``sys.argv[1:]``.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    report = _ErrorReport(as_json="--json" in args)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # What the output's encoding lacks, such as a letter of a file's name, is no reason to end.
        sys.stdout.reconfigure(errors="backslashreplace")
    # The first word that is no option names the command: the options of the program itself take no values.
    named = [word for word in args if not word.startswith("-")][:1]
    if not any(command.passes_on and command.name in named for command in COMMANDS):
        limit_blas_threads()
    forget_no_columns()
    try:
        if args and not _asks_for_help(args):
            report.environment = read_environment()
        app = build_app(named)
        code = get_command(app)(args=args or ["--help"], prog_name=PROG, standalone_mode=False)
        if code == _EXIT_CODES["interrupted"]:
            return report.say("interrupted", "interrupted", KeyboardInterrupt())
        if sys.stdout is not None:
            sys.stdout.flush()
        return report.ended(code if isinstance(code, int) else 0)
    except KeyboardInterrupt as error:
        return report.say("interrupted", "interrupted", error)
    except UserError as error:
        return report.say("user", error.what, error, where=error.where, fix=error.fix)
    except TokenWeaveError as error:
        return report.say("failure", str(error), error)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and _no_working_directory():
            return report.say("user", "the working directory is gone", error, fix="cd to a folder that exists")
        if error.filename is None and drop_dead_stdout():
            return report.stdout_failed(error)
        if error.filename is not None:
            where, fix = os.fsdecode(error.filename), "check the path, and that you may read and write there"
            return report.say("user", error.strerror or type(error).__name__, error, where=where, fix=fix)
        return report.say("failure", f"{type(error).__name__}: {error}", error)
    except SystemExit as error:
        # click and rich end with 1, as a check that did not hold does, where standard output is a broken pipe.
        if isinstance(error.__context__, BrokenPipeError):
            return report.stdout_failed(error.__context__)
        raise
    except Exception as error:  # noqa: BLE001  # the last line of defence: a user should never meet a bare traceback
        if hasattr(error, "format_message"):
            return report.usage(error)
        return report.say("unexpected", f"{type(error).__name__}: {error}", error)


def _asks_for_help(args: Sequence[str]) -> bool:
    """Whether the words ask for what no variable of the environment changes, so that none can be in the way."""
    return any(word in ("--help", "--version") for word in args[: args.index("--") if "--" in args else None])


_EXIT_CODES: dict[ErrorKind, int] = {"usage": 2, "user": 2, "failure": 1, "unexpected": 1, "interrupted": 130}
_BROKEN_PIPE = 141


class _ErrorReport:
    """Prints errors: one line on stderr, and one document on stdout with ``--json``."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.environment = Environment()

    def say(self, kind: ErrorKind, what: str, error: BaseException, *, where: str = "", fix: str = "") -> int:
        """Print an error and return its exit code."""
        line = _one_line(str(UserError(what, where=where, fix=fix)))
        launcher = self.environment.launcher
        if launcher is not None and launcher.size > 1:
            # An error of another rank names that one, and all ranks print it.
            line = line if re.match(r"rank \d+[,:]", line) else f"rank {launcher.rank}: {line}"
        if kind == "unexpected" and not self.environment.debug:
            line = f"{line} (unexpected; {DEBUG.name}=1 prints the traceback)"
        print(f"error: {line}\n", end="", file=sys.stderr)  # one write, not a second for the end: ranks share stderr
        if self.environment.debug:
            print("".join(traceback.format_exception(error)), end="", file=sys.stderr)
        self._document(kind, what, where, fix)
        return self.ended(_EXIT_CODES[kind])

    def stdout_failed(self, error: OSError) -> int:
        """Report that the output could not be written; a reader that has gone away wants no report."""
        if isinstance(error, BrokenPipeError):
            return self.ended(_BROKEN_PIPE)
        fix = "send it to a place that has room and may be written to"
        return self.say("user", f"cannot be written: {error.strerror}", error, where="standard output", fix=fix)

    def usage(self, error: Any) -> int:
        """Report wrong usage (a ClickException: typer brings a click of its own, so it is known by its methods)."""
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return _EXIT_CODES["usage"]
        context = getattr(error, "ctx", None)
        what = error.format_message().rstrip(".")
        fix = f"see {PROG if context is None else context.command_path} --help"
        return self.say("usage", what, error, fix=CHECK_PATH if what.endswith("is not readable") else fix)

    def ended(self, code: int) -> int:
        """Return the exit code; a rank that failed takes the other ranks down instead of leaving them to wait."""
        launcher = self.environment.launcher
        if code and launcher is not None and launcher.size > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            abort_ranks(code)
        return code

    def _document(self, kind: ErrorKind, what: str, where: str, fix: str) -> None:
        if self.as_json:
            document = {"error": {"kind": kind, "what": _one_line(what), "where": where, "fix": fix}}
            try:
                print(json.dumps(document), flush=True)
            except OSError:  # stderr has said it
                drop_dead_stdout()


def drop_dead_stdout() -> bool:
    """Whether standard output cannot be written; then what it still holds is dropped, else Python's end fails on it.

    An end of line is written to find out: what failed before is in no buffer any more.
    """
    try:
        print(flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return True
    return False


def _no_working_directory() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def abort_ranks(code: int) -> None:
    """End the MPI job of this process with ``code``, where it has one; MPI is not loaded for it."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{PROG} {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself; `_print_version` has done the work."""


def _not_loaded() -> None:
    """Stand in for a command in the list of commands; never run."""


if __name__ == "__main__":
    sys.exit(main())
