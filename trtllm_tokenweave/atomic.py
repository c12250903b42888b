"""Write a file aside and rename it, so that a half-written file never replaces a good one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from trtllm_tokenweave.errors import UserError

_FIX = "choose a place that you may write to"


def replace_file(path: Path, write: Callable[[Path], object]) -> Path:
    """Call ``write`` with the path of a temporary file beside ``path``, then rename that onto ``path``.

    Args:
        path: The file to make; it appears whole or not at all, as readable as any other new file.
        write: Writes the temporary file.

    Raises:
        UserError: when ``path`` is a folder, or it cannot be written.
    """
    check_target(path)
    # A link stays, and what it points to is replaced.
    target = path.resolve()
    aside: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
        os.close(handle)
        aside = Path(name)
        write(aside)
        with aside.open("rb") as written:
            os.fsync(written.fileno())
        # Temporary files are private; the result need not be.
        mask = os.umask(0)
        os.umask(mask)
        aside.chmod(0o666 & ~mask)
        aside.replace(target)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror or error}", where=str(path), fix=_FIX) from error
    finally:
        if aside is not None:
            aside.unlink(missing_ok=True)
    return path


def replace_files(files: Sequence[tuple[Path, Callable[[Path], object]]]) -> None:
    """Write all files aside, then rename them, the last one first: a write that fails changes none.

    Args:
        files: Paths, and what writes each; see :func:`replace_file`.

    Raises:
        UserError: as of :func:`replace_file`.
    """
    if not files:
        return
    (path, write), *rest = files

    def write_and_go_on(aside: Path) -> None:
        write(aside)
        replace_files(rest)

    replace_file(path, write_and_go_on)


def same_file(a: Path, b: Path) -> bool:
    """Whether two paths name one file, also through links; of files that do not exist, whether they are equal."""
    try:
        return a.samefile(b)
    except OSError:
        return a.absolute() == b.absolute()


def check_target(path: Path) -> None:
    """Refuse early what cannot become a file.

    Raises:
        UserError: when ``path`` is a folder, a device or another thing that is no file, or a file that may not be
            written; or its folder does not exist.
    """
    fix = "give the name of a file"
    try:
        if path.is_dir():
            raise UserError("is a folder", where=str(path), fix=fix)
        if path.exists() and not path.is_file():
            raise UserError("is a device, a pipe or a socket", where=str(path), fix=fix)
        if path.exists() and not path.stat().st_mode & 0o222:
            raise UserError("is write-protected", where=str(path), fix=_FIX)
        if not path.parent.is_dir():
            raise UserError(f"the folder {path.parent} does not exist", where=str(path), fix="make it first")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror or error}", where=str(path), fix=_FIX) from error


def check_folder(path: Path) -> None:
    """Refuse early a folder that cannot be made or written to.

    Raises:
        UserError: when ``path``, or the part of it that exists, is no folder or not writable.
    """
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"{existing} is no folder" if existing != path else "is no folder", where=str(path), fix=_FIX)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror or error}", where=str(path), fix=_FIX) from error
