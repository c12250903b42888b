"""Errors that reach a user, and the one line each of them prints."""

from __future__ import annotations

#: How to mend that a file is not there, or not readable.
CHECK_PATH = "check the path, and that you may read it"


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
