"""Errors that reach a user, and the one line each of them prints."""

from __future__ import annotations

from dataclasses import fields
from numbers import Integral, Real
from typing import Any, cast

#: How to mend that a file is not there, or not readable.
CHECK_PATH = "check the path, and that you may read it"

#: Characters of a wrong value that an error shows.
_SHOWN = 60


class TokenWeaveError(Exception):
    """Base of every error raised on purpose by this package."""


class UserError(TokenWeaveError):
    """Bad input: the command line prints it on one line and exits with code 2.

    Args:
        what: What was wrong, as a clause ("tensor has shape (3, 4), expected (4, 4)").
        where: The file, field, layer or rank at fault.
        fix: What the user can do about it.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}. Fix: {self.fix}" if self.fix else text


#: What the annotations of fields are in words, and the types that they take.
_KINDS: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "int": ("a whole number", Integral),
    "float": ("a number", Real),
    "bool": ("True or False", bool),
    "str": ("a string", str),
    "None": ("None", type(None)),
}


def check_fields(made: object, prefix: str = "") -> None:
    """Refuse plain fields of a dataclass that hold what is not of their kind: numbers, strings, True or False, None.

    Fields of other kinds are not looked at. The dataclass's module has its annotations as strings.

    Args:
        made: The dataclass.
        prefix: What stands before a field's name in the error, such as "option ".

    Raises:
        UserError: names the field, its value and what it takes.
    """
    for field in fields(cast("Any", made)):
        kinds = [_KINDS.get(name) for name in str(field.type).split(" | ")]
        known = [kind for kind in kinds if kind is not None]
        if len(known) == len(kinds):
            check_kind(getattr(made, field.name), *known, where=f"{prefix}{field.name}")


def check_kind(value: object, *kinds: tuple[str, type | tuple[type, ...]], where: str) -> None:
    """Refuse a value that is of none of some kinds.

    Args:
        value: The value.
        kinds: Each in words, with its types. True and False are no numbers.
        where: What the error names.

    Raises:
        UserError: the value is of none of them.
    """
    if not any(isinstance(value, types) and (types is bool or not isinstance(value, bool)) for _, types in kinds):
        words = " or ".join(word for word, _ in kinds)
        said = repr(value)
        said = said if len(said) <= _SHOWN else f"{said[:_SHOWN]}..."
        what = "is None" if value is None else f"{said} is {_a(type(value).__name__)}"
        raise UserError(f"{what}, not {words}", where=where, fix=f"give {words}")


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
