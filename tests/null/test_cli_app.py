from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from trtllm_tokenweave import __version__
from trtllm_tokenweave.cli import app as cli
from trtllm_tokenweave.errors import TokenWeaveError, UserError

Body = Callable[[], None]


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TLLM_TOKENWEAVE_DEBUG", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Body], None]:
    """Replace all commands by one, `work`, that takes --json and runs a given function."""

    def install(body: Body) -> None:
        def work(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
            body()

        module: Any = sys.modules[__name__]
        monkeypatch.setattr(module, "work", work, raising=False)
        monkeypatch.setattr(cli, "COMMANDS", (cli.Command("work", __name__, "work", "Work."),))

    return install


def raiser(error: BaseException) -> Body:
    def body() -> None:
        raise error

    return body


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"trtllm-tokenweave {__version__}\n"


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    names = {command.name for command in cli.COMMANDS}
    assert {"demo", "build", "run", "inspect", "plan", "table", "bench", "doctor"} <= names
    assert all(f"│ {command.name} " in out for command in cli.COMMANDS)


def test_help_imports_nothing_heavy() -> None:
    heavy = ("numpy", "matplotlib", "mpi4py", "tensorrt", "torch")
    code = (
        "import sys; from trtllm_tokenweave.cli.app import main; main(['--help']);"
        f"sys.exit(', '.join(name for name in {heavy!r} if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
    assert done.returncode == 0


@pytest.mark.parametrize("name", [command.name for command in cli.COMMANDS])
def test_each_command_has_help_and_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert name in out
    # Groups, whose commands have it, and another program's options.
    if name not in ("table", "bench", "shim", "trtllm-build", "triton", "mpi-run"):
        assert "--json" in out


def test_success_prints_nothing_else(command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]) -> None:
    command(lambda: print("{}"))
    assert cli.main(["work", "--json"]) == 0
    assert capsys.readouterr() == ("{}\n", "")


def test_user_error_is_one_line_and_exit_2(command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]) -> None:
    command(raiser(UserError("is no\n GGUF file", where="a.gguf", fix="give another")))
    assert cli.main(["work"]) == 2
    assert capsys.readouterr() == ("", "error: a.gguf: is no GGUF file. Fix: give another\n")
    assert cli.main(["work", "--json"]) == 2
    out, err = capsys.readouterr()
    expected = {"kind": "user", "what": "is no GGUF file", "where": "a.gguf", "fix": "give another"}
    assert json.loads(out) == {"error": expected}
    assert err.count("\n") == 1


def test_other_error_of_ours_is_exit_1(command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]) -> None:
    command(raiser(TokenWeaveError("rank 1 gave up")))
    assert cli.main(["work", "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == "error: rank 1 gave up\n"
    assert json.loads(out)["error"]["kind"] == "failure"


def test_unexpected_error_hides_the_traceback_unless_asked(
    command: Callable[[Body], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command(raiser(ZeroDivisionError("oops")))
    assert cli.main(["work"]) == 1
    err = capsys.readouterr().err
    assert err == "error: ZeroDivisionError: oops (unexpected; TLLM_TOKENWEAVE_DEBUG=1 prints the traceback)\n"
    monkeypatch.setenv("TLLM_TOKENWEAVE_DEBUG", "1")
    assert cli.main(["work"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ZeroDivisionError: oops\nTraceback")


def test_interrupt_is_exit_130(command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]) -> None:
    command(raiser(KeyboardInterrupt()))
    assert cli.main(["work", "--json"]) == 130
    out, err = capsys.readouterr()
    assert err.strip() == "error: interrupted"
    assert json.loads(out)["error"]["kind"] == "interrupted"


def test_exit_code_of_a_command_is_kept(command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]) -> None:
    command(raiser(typer.Exit(1)))
    assert cli.main(["work", "--json"]) == 1
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("args", [["nonsense"], ["work", "--nonsense"], ["work", "extra"]])
def test_wrong_usage_is_exit_2(
    args: list[str], command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raiser(AssertionError("must not run")))
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "--help" in err
    assert cli.main([*args, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "usage"
    assert error["what"]


def test_bad_environment_is_a_user_error(
    command: Callable[[Body], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command(raiser(AssertionError("must not run")))
    monkeypatch.setenv("TLLM_TOKENWEAVE_DEBUG", "perhaps")
    assert cli.main(["work"]) == 2
    assert "TLLM_TOKENWEAVE_DEBUG" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["work", "--help"]])
def test_a_bad_environment_is_in_no_ones_way_to_the_help(
    words: list[str], command: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    command(raiser(AssertionError("must not run")))
    monkeypatch.setenv("TLLM_TOKENWEAVE_DEBUG", "perhaps")
    assert cli.main(words) == 0
    assert cli.main(["work", "--", "--help"]) == 2


def test_errors_name_the_rank_under_mpirun(
    command: Callable[[Body], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command(raiser(UserError("no")))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert cli.main(["work"]) == 2
    assert capsys.readouterr().err == "error: rank 1: no\n"


def test_an_error_of_another_rank_is_one_write_with_that_rank_alone(
    command: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            written.extend([text] if text else [])  # an empty one is no write to the system
            return len(text)

    monkeypatch.setattr(sys, "stderr", Pipe())
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    for error, line in (
        (UserError("no GPU", where="rank 0, CUDA"), "error: rank 0, CUDA: no GPU\n"),
        (TokenWeaveError("rank 0: broken"), "error: rank 0: broken\n"),
        (TokenWeaveError("rank 0 gave up"), "error: rank 1: rank 0 gave up\n"),
    ):
        command(raiser(error))
        cli.main(["work"])
        assert written == [line]
        written.clear()


def run_program(words: list[str], stdout: int) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "trtllm_tokenweave.cli.entry", *words]
    # Named, since readline, which pytest loads, sets COLUMNS behind Python's back.
    env = dict(os.environ)
    return subprocess.run(program, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env, check=False)


@pytest.mark.parametrize("words", ["plan --preset llama-3.2-1b --json", "plan --preset llama-3.2-1b", "--version"])
def test_standard_output_without_room_is_one_line(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = run_program(words.split(), full.fileno())
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output: cannot be written: No space left on device. Fix: ")
    assert done.stderr.count("\n") == 1


def test_an_error_is_said_though_its_document_has_no_room() -> None:
    with Path("/dev/full").open("w") as full:
        done = run_program(["plan", "--preset", "nope", "--json"], full.fileno())
    assert done.returncode == 2
    assert done.stderr.startswith("error: preset: no preset called 'nope'")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_has_gone_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run_program(["--version"], writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("how", ["print", "rich"])
def test_a_reader_that_goes_away_in_between_is_no_error(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # with it, Python itself overlooks a write that is cut short
    # More than a pipe holds, by print (which click answers for) and by rich; neither may end as a failed check does.
    words = ["plan", "--preset", "llama-3.3-70b", "--tokens", ",".join(map(str, range(1024, 2048)))]
    program = [sys.executable, "-m", "trtllm_tokenweave.cli.entry", *words, *(["--json"] if how == "print" else [])]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    with process.stderr:
        assert (process.stderr.read(), process.wait()) == (b"", 141)


def test_an_exit_of_another_cause_is_kept(command: Callable[[Body], None]) -> None:
    command(raiser(SystemExit(1)))
    with pytest.raises(SystemExit, match="1"):
        cli.main(["work"])


def test_what_is_no_terminal_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    words = ["inspect", "--preset", "llama-3.2-1b"]
    done = run_program(words, subprocess.PIPE)
    document = json.loads(run_program([*words, "--json"], subprocess.PIPE).stdout)
    assert done.returncode == 0
    assert f"\nsplit from {document['region']['entry']}, attention {document['region']['attention']}\n" in done.stdout
    monkeypatch.setenv("COLUMNS", "40")  # what the user asks for
    assert max(map(len, run_program(words, subprocess.PIPE).stdout.splitlines())) <= 40


@pytest.mark.parametrize("columns", ["0", "00", ""])
def test_no_columns_at_all_count_as_not_set(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    words = ["plan", "--preset", "llama-3.2-1b"]
    wanted = run_program(words, subprocess.PIPE).stdout
    monkeypatch.setenv("COLUMNS", columns)
    assert run_program(words, subprocess.PIPE).stdout == wanted
    assert "CTAs: of the attention/MLP collective; own: " in wanted
    assert "Usage: trtllm-tokenweave" in run_program(["--help"], subprocess.PIPE).stdout


def test_a_working_directory_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cli.main(["inspect", "--preset", "llama-3.2-1b", "-o", "a.json"]) == 2
    assert capsys.readouterr().err == "error: the working directory is gone. Fix: cd to a folder that exists\n"


@pytest.mark.parametrize(("kind", "number"), [(FileNotFoundError, errno.ENOENT), (PermissionError, errno.EACCES)])
@pytest.mark.parametrize("name", ["nox/f", b"nox/f"])
def test_an_error_of_the_system_that_names_a_file(
    kind: type[OSError],
    number: int,
    name: str | bytes,
    command: Callable[[Body], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(raiser(kind(number, os.strerror(number), name)))
    assert cli.main(["work", "--json"]) == 2
    out, err = capsys.readouterr()
    fix = "check the path, and that you may read and write there"
    assert err == f"error: nox/f: {os.strerror(number)}. Fix: {fix}\n"
    said = {"kind": "user", "what": os.strerror(number), "where": "nox/f", "fix": fix}
    assert json.loads(out) == {"error": said}


@pytest.mark.parametrize("words", ["inspect nox/f", "shim install --folder nox", "mpi-run --preload nox/f -- true"])
def test_a_folder_that_may_not_be_looked_into(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    stat = Path.stat

    def refuse(path: Path, **options: Any) -> Any:  # root may look into all
        if "nox" in path.parts:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    assert cli.main(words.split()) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"error: \S*nox\S*: .*[Pp]ermission denied. Fix: .*\n", err), err


def test_a_letter_that_the_output_cannot_show_is_no_error(
    command: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    command(lambda: print("t\xe4 b.json"))
    assert cli.main(["work"]) == 0
    assert written.getvalue() == b"t\\xe4 b.json\n"


def test_an_error_of_the_system_that_is_not_standard_outputs(
    command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raiser(OSError(28, "No space left on device")))
    assert cli.main(["work", "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == "error: OSError: [Errno 28] No space left on device\n"
    assert json.loads(out)["error"]["kind"] == "failure"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan --preset llama-3.2-1b --tp 0", "Invalid value for '--tp'"),
        ("inspect --preset llama-3.2-1b --tp 0", "Invalid value for '--tp'"),
        ("build --preset llama-3.2-1b -o OUT --tp 0", "Invalid value for '--tp'"),
        ("inspect --preset llama-3.2-1b --rank 9", "--rank: rank 9 is not there: tp_size is 8. Fix: give 0 to 7"),
        ("inspect --preset llama-3.2-1b --rank -1", "--rank: rank -1 is not there: tp_size is 8. Fix: give 0 to 7"),
        (
            "inspect --preset llama-3.2-1b --tp 1 --rank 1",
            "--rank: rank 1 is not there: tp_size is 1. Fix: leave it out",
        ),
        ("inspect", "inspect: give one of NETWORK, --preset and --checkpoint. Fix: name the network or engine"),
        ("inspect nope.json", "nope.json: cannot be read: No such file or directory. Fix: check the path"),
        ("build -o OUT", "build: give one of MODEL and --preset. Fix: name a checkpoint, or a shape"),
        ("tune -o OUT --tokens 1024:512:256", "--tokens: '1024:512:256' is no range. Fix: write START:STOP:STEP, as"),
    ],
)
def test_errors_name_the_option_and_the_fix(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words.split()) == 2
    assert message in capsys.readouterr().err
    assert not Path("OUT").exists()


def test_a_file_that_may_not_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "table.json"
    file.touch()
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may read all
    assert cli.main(["table", "show", str(file)]) == 2
    assert "is not readable. Fix: check the path, and that you may read it" in " ".join(capsys.readouterr().err.split())
