"""The results that have plots: which one a document is, and whether its rows can be drawn (pure, no GPU)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.schedule import MAX_NUM_TOKENS
from trtllm_tokenweave.table.files import read_text

DRAWN = "give the JSON of bench kernel, stack, e2e or trace, or of tune: other results have no plot"
_AGAIN = "measure again, or mend the file"

#: Fields whose values are times by name, in microseconds or milliseconds.
_TIMES = ("peers", "sweep", "by_ctas", "by_offset")
_COUNTS = ("num_tokens", "max_num_tokens", "hidden")


@dataclass(frozen=True)
class Kind:
    """One kind of result.

    Attributes:
        name: What writes it.
        rows: The field that holds its rows.
        needs: What every row must have to be drawn.
    """

    name: str
    rows: str
    needs: tuple[str, ...]


KERNEL = Kind("bench kernel", "rows", ("num_tokens", "hidden", "peers", "fused_us", "floor_us"))
STACK = Kind("bench stack or bench e2e", "rows", ("num_tokens", "stock_ms"))
TRACE = Kind("bench trace", "rows", ("max_num_tokens", "stock_ms", "kinds_ms"))
TUNE = Kind("tune", "buckets", ("num_tokens", "candidates", "chosen", "fuse_only"))
CHECK = Kind("tune --check", "held_out", ("num_tokens", "chosen_ms", "best_ms", "fuse_only_ms", "by_ctas"))
JITTER = Kind("tune --jitter", "jitter", ("num_tokens", "even_ms", "tuned_ms"))

#: Fields that rows of no other result have, by kind.
_MARKS: Mapping[Kind, frozenset[str]] = {
    TRACE: frozenset({"max_num_tokens", "kinds_ms"}),
    KERNEL: frozenset({"fused_us", "floor_us", "peers"}),
    STACK: frozenset({"stock_ms", "fuse_only_ms", "no_comm_ms", "woven_ms", "even_split_ms"}),
}


def read_result(path: Path) -> tuple[dict[str, Any], Kind]:
    """Read a result, and say of which kind it is.

    Raises:
        UserError: It cannot be read, has no plot or no rows, or a row lacks a field or has a value that no plot can
            show; names row and field.
    """
    text = read_text(path)
    try:
        document = json.loads(text, parse_int=_number)
        kind = kind_of(document)
        if kind is None:
            raise UserError("is no result that has a plot", where=str(path), fix=DRAWN)
        _check_rows(document, kind, path)
    except json.JSONDecodeError as error:
        what = f"is no result that has a plot: it is no JSON ({error})"
        raise UserError(what, where=str(path), fix=DRAWN) from None
    except RecursionError:
        raise UserError("is no result that has a plot: it is nested too deeply", where=str(path), fix=DRAWN) from None
    return document, kind


def _number(digits: str) -> int | float:
    """An integer; infinite if it is larger than any float, of which Python takes an integer."""
    return int(digits) if len(digits) < 20 else float(digits)


def kind_of(document: Any) -> Kind | None:
    """The kind of a result, by the fields that it has; None of what has no plot."""
    if not isinstance(document, Mapping) or "gemm_us" in document:  # the latter is of bench overlap
        return None
    for kind in (TUNE, CHECK, JITTER):
        if kind.rows in document:
            return kind
    rows = document.get("rows")
    names = {name for row in rows if isinstance(row, Mapping) for name in row} if isinstance(rows, list) else set()
    return next((kind for kind, marks in _MARKS.items() if names & marks), None)


def _check_rows(document: Mapping[str, Any], kind: Kind, path: Path) -> None:
    rows = document[kind.rows]
    if not isinstance(rows, list) or not rows:
        raise UserError("has no rows", where=f"{path}: {kind.rows}", fix=DRAWN)
    for index, row in enumerate(rows):
        where = f"{path}: {kind.rows}[{index}]"
        if not isinstance(row, Mapping):
            raise UserError("is no row of fields", where=where, fix=_AGAIN)
        for name in kind.needs:
            if name not in row:
                raise UserError(f"has no '{name}', which a result of {kind.name} has", where=where, fix=_AGAIN)
            if row[name] is None:
                raise UserError(f"is null, and not in a result of {kind.name}", where=f"{where}.{name}", fix=_AGAIN)
    for rows_name in (kind.rows, "sweep"):
        for field, value, time in _leaves(document.get(rows_name, []), rows_name):
            lack = _lack(value, field, time)
            if lack:
                raise UserError(lack, where=f"{path}: {field}", fix=_AGAIN)


def _leaves(value: Any, field: str, time: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """Every value that holds no others, with its field and whether it is a time."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{field}.{name}", time or name.endswith(("_ms", "_us")) or name in _TIMES)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{field}[{index}]", time)
    else:
        yield field, value, time


def _lack(value: Any, field: str, time: bool) -> str:
    """What is wrong with a value, "" for nothing; None stands for what was not measured."""
    if value is None or (isinstance(value, str) and not time):
        return ""
    finite = isinstance(value, int | float) and math.isfinite(value)
    if time:
        # A trace may have no steps of a kind.
        low = value < 0 if finite and ".kinds_ms." in field else finite and value <= 0
        return "" if finite and not low else "is no time: it has to be a finite number above 0"
    if field.rpartition(".")[2] in _COUNTS:
        fits = isinstance(value, int) and 0 < value <= MAX_NUM_TOKENS
        return "" if fits else f"is no size: it has to be a whole number of 1 to {MAX_NUM_TOKENS}"
    return "" if finite else "is no finite number"


def facts(document: Mapping[str, Any]) -> dict[str, str]:
    """How, where and when a result was measured, by name: its command, method and date, and all of its machine."""
    found = {name: str(document[name]) for name in ("command", "method", "date") if name in document}
    # The tuner's measurements have what its table has.
    machine = document.get("machine", document.get("measured"))
    if isinstance(machine, Mapping):
        found |= {name.replace("_", " "): _words(value) for name, value in machine.items()}
    return found


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_words(item)}" for name, item in value.items())
    return "; ".join(map(_words, value)) if isinstance(value, list) else str(value)
