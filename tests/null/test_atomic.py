"""Files are replaced whole, and only files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trtllm_tokenweave.atomic import check_target, replace_file
from trtllm_tokenweave.errors import UserError


def write(path: Path) -> Path:
    return replace_file(path, lambda aside: aside.write_text("new"))


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    for _ in range(2):
        assert write(tmp_path / "a").read_text() == "new"
    assert [found.name for found in tmp_path.iterdir()] == ["a"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    def fail(aside: Path) -> None:
        aside.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        replace_file(tmp_path / "a", fail)
    assert (tmp_path / "a").read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["a"]


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to(target)
    assert write(link) == link
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    pipe, protected = tmp_path / "pipe", tmp_path / "protected"
    os.mkfifo(pipe)
    protected.write_text("old")
    protected.chmod(0o444)
    for path, message in (
        (Path(os.devnull), "is a device, a pipe or a socket"),
        (pipe, "is a device, a pipe or a socket"),
        (protected, "is write-protected"),
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "a", "does not exist"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(UserError, match=message):
            check_target(path)
        with pytest.raises(UserError, match=message):
            write(path)
    assert pipe.is_fifo()
    assert protected.read_text() == "old"
