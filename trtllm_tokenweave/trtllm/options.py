"""Options of ``--plugin tokenweave``: from the command line, or from the environment of an unmodified command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from trtllm_tokenweave.config import MIN_TOKENS, read_environment
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.schedule import MAX_NUM_TOKENS

PLUGIN = "tokenweave"
_PREFIX = "--tokenweave_"

# Not trtllm-build's own: behind the shim that is the stock command, which knows none of this.
_HELP_COMMAND = "see trtllm-tokenweave trtllm-build --help"

_HELP = """options of --plugin tokenweave; all others are trtllm-build's:
  --plugin tokenweave           fuse AllReduce with RMSNorm, and hide it behind compute
  --tokenweave_table FILE       tuning table; default: one that comes with this package and fits,
                                else the default rule (split at half)
  --tokenweave_min_tokens N     steps below N tokens are not split; default: the table's
  --tokenweave_split_attention {enable,disable}
                                split attention too, where it can be; default: enable
  --tokenweave_tune             measure a table on this machine's GPUs first, and build with it
  --tokenweave_strict           exit with 1 where nothing could be fused, instead of building as stock
"""


@dataclass(frozen=True)
class TokenWeaveOptions:
    """How to weave; it goes to the processes of ``--workers``.

    Attributes:
        table: Tuning table; None: the default rule.
        min_tokens: Least tokens of a step that is split; None: the table's.
        split_attention: Cut attention too.
        strict: Fail where nothing could be fused.
    """

    table: Path | None = None
    min_tokens: int | None = None
    split_attention: bool = True
    strict: bool = False


@dataclass(frozen=True)
class Arguments:
    """A command line, taken apart.

    Attributes:
        weave: ``--plugin tokenweave`` was given.
        options: Its options.
        tune: Tune first.
        stock: Everything else, in order: what ``trtllm-build`` gets.
    """

    weave: bool
    options: TokenWeaveOptions
    tune: bool
    stock: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message, where="trtllm-build", fix=_HELP_COMMAND)


def _parser() -> argparse.ArgumentParser:
    # No abbreviations: they could be options of trtllm-build.
    parser = _Parser(prog="trtllm-build", add_help=False, allow_abbrev=False)
    parser.add_argument("--plugin", choices=[PLUGIN])
    parser.add_argument(f"{_PREFIX}table", type=Path)
    parser.add_argument(f"{_PREFIX}min_tokens", type=int)
    parser.add_argument(f"{_PREFIX}split_attention", choices=["enable", "disable"])
    parser.add_argument(f"{_PREFIX}tune", action="store_true")
    parser.add_argument(f"{_PREFIX}strict", action="store_true")
    return parser


def take_arguments(argv: Sequence[str]) -> Arguments:
    """Take this package's options out of a command line of ``trtllm-build``.

    Raises:
        UserError: a value that is not accepted, an option of this package without ``--plugin tokenweave``, or one
            that does not exist.
    """
    given, stock = _parser().parse_known_args(list(argv))
    unknown = next((word for word in stock if word.startswith(_PREFIX)), None)
    if unknown is not None:
        raise UserError("there is no such option", where=unknown.partition("=")[0], fix=_HELP_COMMAND)
    values = {name: value for name, value in vars(given).items() if name != "plugin" and value not in (None, False)}
    if given.plugin is None and values:
        where = f"--{next(iter(values))}"
        raise UserError("belongs to the plugin, which was not asked for", where=where, fix="add --plugin tokenweave")
    if given.tokenweave_tune and given.tokenweave_table is not None:
        fix = "leave out one of them"
        raise UserError("makes a table, and one is given", where=f"{_PREFIX}tune, {_PREFIX}table", fix=fix)
    options = TokenWeaveOptions(
        given.tokenweave_table,
        _checked_tokens(given.tokenweave_min_tokens, f"{_PREFIX}min_tokens"),
        given.tokenweave_split_attention != "disable",
        given.tokenweave_strict,
    )
    return Arguments(given.plugin is not None, options, given.tokenweave_tune, tuple(stock))


def options_help() -> str:
    """The options, as ``--help`` prints them after TensorRT-LLM's."""
    return _HELP


def environment_options() -> TokenWeaveOptions:
    """The options of a command that knows none of ours (``--model_cls_file``), from the environment.

    Raises:
        UserError: a value that is not accepted.
    """
    values = read_environment()
    least = _checked_tokens(values.min_tokens, MIN_TOKENS.name)
    return TokenWeaveOptions(values.table, least, values.split_attention, values.strict)


def _checked_tokens(count: int | None, where: str) -> int | None:
    if count is not None and not 1 <= count <= MAX_NUM_TOKENS:
        raise UserError(f"{count} is outside of 1..{MAX_NUM_TOKENS}", where=where, fix="give a count of tokens")
    return count
