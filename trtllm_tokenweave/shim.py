"""A ``trtllm-build`` in a folder of its own, in front of TensorRT-LLM's on PATH; nothing of TensorRT-LLM is changed."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

from trtllm_tokenweave.atomic import replace_file
from trtllm_tokenweave.config import data_folder, search_path
from trtllm_tokenweave.errors import UserError

NAME = "trtllm-build"

#: The second line of every shim: what is recognised before a file is replaced or removed.
MARK = "# shim of trtllm-tokenweave"

#: The third line, with the number of folders that `install` made, innermost first: what `remove` may take away.
_MADE = "# folders made for it: "

#: A program of the shell's that Python takes for a string and an import: so its path may hold spaces, and Python looks
#: for modules beside it, as for TensorRT-LLM's own command. ``python -m`` would look in the working folder first, and
#: TensorRT-LLM's source tree has a tensorrt_llm that nobody has built.
_TEXT = """#!/bin/sh
{mark}
{made}
'''exec' {python} "$0" "$@"
' '''
import sys

from trtllm_tokenweave.shim import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
"""

State = Literal["missing", "foreign", "active", "shadowed", "not on PATH"]


@dataclass(frozen=True)
class Shim:
    """What there is.

    Attributes:
        path: The shim's file, whether it exists or not.
        state: "foreign" where somebody else's file is in its place; "active" where the shell finds it first; "shadowed"
            where it finds ``first`` before.
        original: The stock command behind it, None where there is none.
        first: What the shell finds, None where nothing.
    """

    path: Path
    state: State
    original: Path | None
    first: Path | None


def default_folder() -> Path:
    """The folder of the shim where the user names none."""
    return data_folder() / "trtllm_tokenweave" / "bin"


def install(folder: Path) -> Shim:
    """Write the shim, or write it anew.

    Raises:
        UserError: the folder holds a ``trtllm-build`` of somebody else, cannot be written to, or cannot be on PATH.
    """
    path = folder / NAME
    if os.pathsep in str(folder):
        what = f"holds {os.pathsep!r}, which separates the folders of PATH"
        raise UserError(what, where=str(folder), fix="name another folder (--folder)")
    if path.exists() or path.is_symlink():
        _check_ours(path)

    new = list(takewhile(lambda place: not place.exists(), (folder, *folder.parents)))
    made = f"{_MADE}{len(new) or _folders_made(path)}"

    def write(aside: Path) -> None:
        aside.write_text(_TEXT.format(mark=MARK, made=made, python=shlex.quote(sys.executable)))

    try:
        _make(folder)
        replace_file(path, write)
        path.chmod(path.stat().st_mode | 0o111)
    except BaseException:
        for place in new:
            with suppress(OSError):
                place.rmdir()
        raise
    return status(folder)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot be made: {error.strerror or error}", where=str(folder), fix="name another") from error


def remove(folder: Path) -> bool:
    """Remove the shim, and folders that `install` made where nothing else is in them; returns whether there was one.

    Raises:
        UserError: the file is somebody else's, or cannot be removed.
    """
    path = folder / NAME
    if not path.exists() and not path.is_symlink():
        return False
    _check_ours(path)
    made = _folders_made(path)
    try:
        path.unlink()
        for place in [folder, *folder.parents][:made]:
            if any(place.iterdir()):
                break
            place.rmdir()
    except OSError as error:
        raise UserError(f"cannot be removed: {error.strerror or error}", where=str(path)) from error
    return True


def status(folder: Path) -> Shim:
    """Whether the shim is there and found, and what is behind it."""
    path = folder / NAME
    found = _on_path()
    first = found[0] if found else None
    state: State = "missing"
    if _is_ours(path):
        ours = [index for index, other in enumerate(found) if _same(other, path)]
        state = "not on PATH" if not ours else "shadowed" if ours[0] else "active"
    elif path.exists() or path.is_symlink():
        state = "foreign"
    return Shim(path, state, _original(), first)


def main(argv: Sequence[str]) -> int:
    """What a shim runs: this package's build with ``--plugin``, else the stock command in this process's place.

    Args:
        argv: The shim's own path, then the command line.
    """
    words = list(argv[1:])
    if not any(word == "--plugin" or word.startswith(("--plugin=", "--tokenweave_")) for word in words):
        original = _original()
        if original is not None:
            os.execv(original, [str(original), *words])
        what = f"TensorRT-LLM's command is not on PATH behind {argv[0]}"
        fix = "install TensorRT-LLM (trtllm-tokenweave doctor says which), or put its folder on PATH behind the shim's"
        print(f"error: {UserError(what, where=NAME, fix=fix)}", file=sys.stderr)
        return 127  # as the shell where it finds no command
    from trtllm_tokenweave.cli.app import main as command

    return command([NAME, *words])


def _on_path() -> list[Path]:
    candidates = (folder / NAME for folder in search_path())
    return [path for path in candidates if path.is_file() and os.access(path, os.X_OK)]


def _original() -> Path | None:
    return next((path for path in _on_path() if not _is_shim(path)), None)


def _is_shim(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4096).split(b"\n")[1:2] == [MARK.encode()]
    except OSError:
        return False


def _folders_made(path: Path) -> int:
    """What the third line of our shim says; 0 where there is none."""
    lines = path.read_text().split("\n") if _is_ours(path) else []
    number = lines[2].removeprefix(_MADE) if len(lines) > 2 else ""
    return int(number) if number.isdecimal() else 0


def _is_ours(path: Path) -> bool:
    return not path.is_symlink() and path.is_file() and _is_shim(path)


def _check_ours(path: Path) -> None:
    if not _is_ours(path):
        what = "is not a shim of this package, and stays as it is"
        raise UserError(what, where=str(path), fix="name another folder (--folder), in front of this one on PATH")


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
