"""``trtllm-build``, with ``--plugin tokenweave``: the stock command, and hooks around it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.table import load_table
from trtllm_tokenweave.trtllm import hooks, surface
from trtllm_tokenweave.trtllm.options import options_help, take_arguments
from trtllm_tokenweave.trtllm.tuned import tuned_table

PROG = "trtllm-build"


def run(argv: Sequence[str]) -> int:
    """Run ``trtllm-build`` with a command line that may hold this package's options, and return its exit code.

    Raises:
        UserError: an option is wrong, TensorRT-LLM is not installed or not served, or the model's table does not fit.
        TokenWeaveError: nothing could be fused and ``--tokenweave_strict`` is given, or the build failed.
        SystemExit: as the stock command, for its own options.
    """
    given = take_arguments(argv)
    if {"-h", "--help"} & set(given.stock):
        print(options_help())
        try:
            surface.version()
        except UserError as error:
            print(f"the options of trtllm-build itself are not shown: {error}", file=sys.stderr)
            return 0
    elif given.weave:
        options = given.options
        if options.table is not None:
            load_table(options.table)  # said before anything of TensorRT-LLM
        library = surface.load()
        if given.tune:
            options = replace(options, table=tuned_table(given.stock))
        hooks.install(library, options)
    try:
        with _command_line(given.stock):
            return int(surface.stock_main()() or 0)
    except TokenWeaveError:
        raise
    except Exception:
        traceback.print_exc()  # as the stock command would: it is not an error of ours
        raise
    finally:
        hooks.uninstall()


@contextmanager
def _command_line(stock: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = [PROG, *stock]
    try:
        yield
    finally:
        sys.argv = before
