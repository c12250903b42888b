"""A `trtllm-build` on PATH that knows `--plugin tokenweave`, and tuning before a build."""

from __future__ import annotations

import inspect
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support import trtllm_double
from support.trtllm_place import WEAVE, Place, ended, outside, place

from trtllm_tokenweave import shim
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.cli.tune import tune
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.trtllm import tuned
from trtllm_tokenweave.trtllm.command import run

__all__ = ["place"]  # a fixture


# ---- the shim


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """TensorRT-LLM's command: says what it was given."""
    folder = tmp_path / "stock"
    folder.mkdir()
    path = folder / "trtllm-build"
    path.write_text('#!/bin/sh\necho stock "$@"\nexit 7\n')
    path.chmod(0o755)
    return path


def put_first(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join([*map(str, folders), "/usr/bin", "/bin"]))


def test_the_shim_comes_and_goes(tmp_path: Path, stock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ours" / "bin"
    before = stock.read_bytes()
    put_first(monkeypatch, folder, stock.parent)
    assert shim.status(folder).state == "missing"
    found = shim.install(folder)
    assert (found.state, found.original, found.first) == ("active", stock, folder / "trtllm-build")
    assert shim.install(folder) == found  # again
    put_first(monkeypatch, stock.parent, folder)
    assert shim.status(folder).state == "shadowed"
    put_first(monkeypatch, stock.parent)
    assert shim.status(folder).state == "not on PATH"
    assert shim.remove(folder)
    assert not shim.remove(folder)
    assert not folder.exists()
    assert stock.read_bytes() == before


def test_the_shim_calls_the_original_in_its_place(tmp_path: Path, stock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a folder"
    put_first(monkeypatch, folder, stock.parent)
    path = shim.install(folder).path
    values = {**trtllm_double.environment(tmp_path), "PATH": os.environ["PATH"]}
    done = ended([str(path), "--checkpoint_dir", "two words", "--help"], values)
    assert (done.returncode, done.stdout) == (7, "stock --checkpoint_dir two words --help\n")


def test_the_shim_weaves_with_the_plugin(tmp_path: Path, stock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, values = outside(tmp_path)
    folder = tmp_path / "ours"
    put_first(monkeypatch, folder, stock.parent)
    path = shim.install(folder).path
    monkeypatch.chdir(trtllm_double.source_tree(tmp_path))
    done = ended([str(path), *place.woven("--workers", "2")], {**values, "PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    assert [place.record(rank)["mode"] for rank in range(2)] == ["weave"] * 2


def test_the_shims_python_may_have_any_path(tmp_path: Path, stock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / 'it\'s a "folder"' / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    put_first(monkeypatch, tmp_path / "ours", stock.parent)
    path = shim.install(tmp_path / "ours").path
    values = {**trtllm_double.environment(tmp_path), "PATH": os.environ["PATH"]}
    values["PYTHONPATH"] += os.pathsep + os.pathsep.join(filter(None, sys.path))
    done = ended([str(path), "a"], values)
    assert (done.returncode, done.stdout) == (7, "stock a\n"), done.stderr


def test_the_shim_without_an_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ours"
    put_first(monkeypatch, folder)
    path = shim.install(folder).path
    done = ended([str(path), "--help"], {**trtllm_double.environment(tmp_path), "PATH": os.environ["PATH"]})
    assert done.returncode == 127
    assert done.stderr.startswith(
        f"error: trtllm-build: TensorRT-LLM's command is not on PATH behind {path}. Fix: install"
    )
    assert len(done.stderr.splitlines()) == 1


def test_a_file_of_somebody_else_is_never_touched(stock: Path) -> None:
    before = stock.read_bytes()
    for act in (shim.install, shim.remove):
        with pytest.raises(UserError, match="is not a shim of this package, and stays as it is"):
            act(stock.parent)
    assert stock.read_bytes() == before


def test_a_link_to_somebody_elses_file_is_never_followed(tmp_path: Path, stock: Path) -> None:
    folder = tmp_path / "ours"
    folder.mkdir()
    (folder / "trtllm-build").symlink_to(stock)
    with pytest.raises(UserError, match="is not a shim"):
        shim.install(folder)
    (folder / "trtllm-build").unlink()
    (folder / "trtllm-build").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is not a shim"):
        shim.remove(folder)


def test_other_files_of_the_folder_stay(tmp_path: Path) -> None:
    shim.install(tmp_path)
    (tmp_path / "other").touch()
    assert shim.remove(tmp_path)
    assert (tmp_path / "other").exists()


def test_a_folder_that_install_did_not_make_stays(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.mkdir()
    for _ in range(2):  # also written anew
        shim.install(users)
    assert shim.remove(users)
    assert list(users.iterdir()) == []


@pytest.mark.parametrize("other", [None, "new", "new/bin"])
def test_folders_that_install_made_go_where_nothing_else_is_in_them(tmp_path: Path, other: str | None) -> None:
    for _ in range(2):
        shim.install(tmp_path / "new" / "bin")
    if other is not None:
        (tmp_path / other / "file").touch()
    assert shim.remove(tmp_path / "new" / "bin")
    left = {None: [], "new": ["new", "new/file"], "new/bin": ["new", "new/bin", "new/bin/file"]}[other]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == left


def test_a_shim_can_be_started_by_everyone(tmp_path: Path) -> None:
    assert shim.install(tmp_path).path.stat().st_mode & stat.S_IXOTH


def test_shim_commands(
    tmp_path: Path, stock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    put_first(monkeypatch, stock.parent)
    folder = tmp_path / "data" / "trtllm_tokenweave" / "bin"
    assert main(["shim", "install"]) == 0
    assert f'export PATH={folder}:"$PATH"' in capsys.readouterr().out
    assert main(["shim", "status", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "path": str(folder / "trtllm-build"),
        "original": str(stock),
        "first": str(stock),
        "state": "not on PATH",
    }
    assert main(["shim", "remove", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] is True
    assert main(["shim", "remove"]) == 0
    assert "was not there" in capsys.readouterr().out
    assert main(["shim", "install", "--folder", str(stock.parent)]) == 2


def test_install_says_first_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_first(monkeypatch)
    assert main(["shim", "install", "--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"wrote {tmp_path / 'trtllm-build'}"
    assert main(["shim", "status", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == lines[1:]


@pytest.mark.parametrize("action", ["install", "remove", "status"])
def test_an_empty_folder_name_is_not_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["shim", action, "--folder", ""]) == 2
    assert "--folder: is empty. Fix: name a folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(["shim", "install", "--folder", "."]) == 0
    assert (tmp_path / "trtllm-build").exists()


def test_the_line_for_the_shell_is_quoted(
    tmp_path: Path, stock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_first(monkeypatch, stock.parent)
    folder = tmp_path / """a "$(touch hurt)" `b` 'c'"""
    assert main(["shim", "install", "--folder", str(folder)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "export PATH" in line)
    script = line.removeprefix("put it first: ") + "; command -v trtllm-build"
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == f"{folder / 'trtllm-build'}\n"
    assert not (tmp_path / "hurt").exists()


def test_a_folder_that_path_cannot_hold_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a:b"
    assert main(["shim", "install", "--folder", str(folder)]) == 2
    assert f"{folder}: holds ':', which separates the folders of PATH. Fix: name another" in capsys.readouterr().err
    assert not folder.exists()


def test_the_status_of_somebody_elses_file(
    stock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_first(monkeypatch, stock.parent)
    assert shim.status(stock.parent).state == "foreign"
    assert main(["shim", "status", "--folder", str(stock.parent)]) == 0
    said = capsys.readouterr().out
    assert f"{stock}: is not a shim of this package, and stays as it is; name another folder (--folder)" in said
    assert "install" not in said


def test_a_failed_install_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, write: object) -> Path:
        raise UserError("cannot be written: No space left on device", where=str(path))

    old = tmp_path / "old"
    old.mkdir()
    monkeypatch.setattr(shim, "replace_file", fail)
    for folder in (old / "new" / "bin", old):
        with pytest.raises(UserError, match="No space left"):
            shim.install(folder)
    assert list(old.iterdir()) == []
    with pytest.raises(UserError, match="cannot be made"):
        shim.install(old / "new" / ("x" * 300))
    assert list(old.iterdir()) == []


# ---- tuning


def fake_mpirun(folder: Path, code: int = 0) -> Path:
    """An mpirun that notes its words and writes a table where it is told to."""
    path = folder / "bin" / "mpirun"
    path.parent.mkdir()
    table = '{"schema_version": 1, "key": {"tp_size": 2, "hidden_size": 16, "dtype": "float32"}, "min_tokens": 5}'
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\nwords = sys.argv[1:]\n"
        f"Path({str(folder / 'words')!r}).write_text('\\n'.join(words))\n"
        f"Path(words[words.index('-o') + 1]).write_text('''{table}''')\nsys.exit({code})\n"
    )
    path.chmod(0o755)
    return path.parent


def test_tuning_comes_first_and_the_build_takes_its_table(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    put_first(monkeypatch, fake_mpirun(place.folder))
    assert run(place.words(*WEAVE, "--tokenweave_tune", "--max_num_tokens", "3000")) == 0
    words = (place.folder / "words").read_text().splitlines()
    assert words[:2] == ["-n", "2"]
    assert words[5:] == [
        *("tune", "--checkpoint", str(place.folder / "checkpoint")),
        *("-o", str(place.out / tuned.TABLE), "--tokens", "1024:2816:256", "--no-symmetric"),
    ]
    assert place.record()["table"]["min_tokens"] == 5


def test_tuning_that_fails_builds_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_first(monkeypatch, fake_mpirun(place.folder, 3))
    assert main(["trtllm-build", *place.words(*WEAVE, "--tokenweave_tune")]) == 1
    assert "tuning failed with exit code 3" in capsys.readouterr().err
    assert not (place.out / "rank0.engine").exists()


@pytest.mark.parametrize("case", ["no mpirun", "below mpirun", "one rank", "few tokens", "no checkpoint"])
def test_tuning_that_cannot_run_here_says_why(place: Place, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    put_first(monkeypatch, place.folder)
    more, wanted, fix = [], "mpirun is not installed", "mpirun -n 2 trtllm-tokenweave tune --checkpoint"
    if case == "below mpirun":
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        wanted = "below an mpirun"
    if case == "one rank":
        place.tp_size, wanted, fix = 1, "tp_size is 1", "leave it out"
    if case == "few tokens":
        more, wanted, fix = ["--max_num_tokens", "1000"], "max_num_tokens is 1000", "raise --max_num_tokens"
    words = [*place.words(*WEAVE, "--tokenweave_tune"), *more]
    if case == "no checkpoint":
        words, wanted, fix = [*WEAVE, "--tokenweave_tune"], "needs the model", "--checkpoint_dir"
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(UserError, match=wanted) as raised:
        run(words)
    assert fix in raised.value.fix


def test_the_tuner_takes_these_words() -> None:
    """They are another command's: it must know them."""
    assert {"checkpoint", "output", "tokens", "symmetric"} <= set(inspect.signature(tune).parameters)
