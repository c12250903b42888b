"""Starting ranks: the command, and a stand-in for mpirun that starts real processes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_mpirun import fake_mpirun

from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.launch import Job, MpiOptions, find_mpirun, forwarded, mpirun_command

SECONDS = 60.0


@pytest.fixture
def mpirun(tmp_path: Path) -> str:
    return fake_mpirun(tmp_path)


def _script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "program"
    path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def _wait(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_command_with_a_part_for_each_kind_of_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    options = MpiOptions("mpirun", Path("/lib/p.so"), ("A",), ("--hostfile", "hosts"))
    words = mpirun_command([["server", "0"], ["server", "1"], ["server", "1"]], options)
    exports = ["-x", "LD_PRELOAD=/lib/p.so", "-x", "A"]
    assert words == [
        *("mpirun", "--bind-to", "none", "--hostfile", "hosts"),
        *("-n", "1", *exports, "server", "0"),
        *(":", "-n", "2", *exports, "server", "1"),
    ]


def test_a_preload_comes_before_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/other.so")
    assert "LD_PRELOAD=/lib/p.so:/usr/lib/other.so" in mpirun_command([["a"]], MpiOptions(preload=Path("/lib/p.so")))
    assert "-x" not in mpirun_command([["a"]], MpiOptions())


def test_variables_that_ranks_need_are_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("TOKENWEAVE_", "NCCL_", "TLLM_", "TRTLLM_"))]:
        monkeypatch.delenv(name)
    for name in ("CUDA_VISIBLE_DEVICES", "TENSORRT_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("MINE", "1")
    assert forwarded() == ("NCCL_DEBUG",)
    assert forwarded(["MINE", "NCCL_DEBUG"]) == ("MINE", "NCCL_DEBUG")
    with pytest.raises(UserError, match="-x NOT_SET: is not set"):
        forwarded(["NOT_SET"])
    assert forwarded(["NOT_SET=a=b", "NCCL_DEBUG=INFO"]) == ("NOT_SET=a=b", "NCCL_DEBUG=INFO")  # in the set one's place


def test_ranks_run_and_their_worst_code_is_returned(mpirun: str, tmp_path: Path) -> None:
    program = _script(
        tmp_path, f'echo "$MINE" >"{tmp_path}/rank$OMPI_COMM_WORLD_RANK"; exit $((OMPI_COMM_WORLD_RANK * 3))'
    )
    command = mpirun_command([[program]] * 3, MpiOptions(mpirun, None, ("MINE=word",)))
    assert Job(command, stop_seconds=SECONDS).run() == 6
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(3)] == ["word\n"] * 3


def test_what_ranks_say_is_heard_and_passed_on(mpirun: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = _script(tmp_path, 'echo "out"; echo "one" >&2; printf "\\377two" >&2')  # no UTF-8, and no end of the line
    heard: list[str] = []
    command = mpirun_command([[program]], MpiOptions(mpirun))
    assert Job(command, stop_seconds=SECONDS).run(hear=heard.append) == 0
    assert heard == ["one\n", "\ufffdtwo"]
    assert tuple(capfd.readouterr()) == ("out\n", "one\n\ufffdtwo")
    assert Job(command, stop_seconds=SECONDS).run() == 0
    assert len(heard) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_ranks_which_end_by_themselves(mpirun: str, tmp_path: Path, number: signal.Signals) -> None:
    name = signal.Signals(number).name[3:]
    program = _script(
        tmp_path,
        f"""trap 'echo {name} >"{tmp_path}/got$OMPI_COMM_WORLD_RANK"; exit 0' {name}
        touch "{tmp_path}/up$OMPI_COMM_WORLD_RANK"
        while :; do sleep 0.02; done""",
    )
    up = [tmp_path / f"up{rank}" for rank in range(2)]
    job = Job(mpirun_command([[program]] * 2, MpiOptions(mpirun)), stop_seconds=SECONDS)

    def send() -> None:
        _wait(lambda: all(path.exists() for path in up))
        os.kill(os.getpid(), number)

    def ignore(*_: object) -> None:
        """Where the job ended early, the signal must not reach the tests."""

    before = signal.signal(number, ignore)
    sender = threading.Thread(target=send)
    sender.start()
    assert job.run() == 0
    sender.join()
    assert job.signal == number
    assert signal.getsignal(number) is ignore
    signal.signal(number, before)
    assert [(tmp_path / f"got{rank}").read_text() for rank in range(2)] == [f"{name}\n"] * 2


def test_ranks_that_do_not_end_are_killed_and_named(mpirun: str, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    # It stops mpirun, which then ends nobody.
    program = _script(
        tmp_path,
        f'trap "" TERM; kill -STOP $PPID; echo $$ >"{pid}.part"; mv "{pid}.part" "{pid}"; while :; do sleep 0.02; done',
    )
    job = Job(mpirun_command([[program]], MpiOptions(mpirun)), stop_seconds=0.1)

    def watch() -> None:
        if pid.exists():
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trtllm_tokenweave.launch._FORCE_SECONDS", 0.1)
        with pytest.raises(TokenWeaveError, match=r"ranks did not end within 0.1 s and were killed"):
            job.run(watch)
    _wait(lambda: not Path(f"/proc/{pid.read_text().strip()}").exists() or _is_zombie(int(pid.read_text())))


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_shared_memory_of_the_job_and_no_other_is_removed(
    mpirun: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtllm_tokenweave.launch.SHARED_MEMORY", tmp_path)
    monkeypatch.setenv("JOB", str(0x17820001))
    mine, other = tmp_path / "vader_segment.host.0.17820001.1", tmp_path / "vader_segment.host.0.17830001.1"
    for path in (mine, other):
        path.touch()
    program = _script(tmp_path, "sleep 0.5")
    assert Job(mpirun_command([[program]], MpiOptions(mpirun)), stop_seconds=SECONDS).run() == 0
    assert not mine.exists()
    assert other.exists()


def test_mpirun_that_is_missing_or_another_mpis(mpirun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_mpirun(mpirun) == mpirun
    with pytest.raises(UserError, match=r"/nowhere/mpirun: is no program on this machine\. Fix: install Open MPI"):
        find_mpirun("/nowhere/mpirun")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"mpirun: is not on PATH\. Fix: install Open MPI"):
        find_mpirun("mpirun")
    monkeypatch.setenv("MPI_SAYS", "HYDRA build details")
    with pytest.raises(UserError, match="is not Open MPI's"):
        find_mpirun(mpirun)


def test_mpi_run_prints_what_it_would_start(mpirun: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["mpi-run", "-n", "3", "--mpirun", mpirun, "--dry-run", "--mpirun-arg=--tag-output", "-x", "PATH"]
    assert main([*words, "--", "echo", "two words", "-n"]) == 0
    said = shlex.split(capsys.readouterr().out)
    assert said[said.index(mpirun) :][:5] == [mpirun, "--bind-to", "none", "--tag-output", "-n"]
    assert said[-3:] == ["echo", "two words", "-n"]
    assert said[said.index("--tag-output") + 2] == "3"


def test_mpi_run_runs_and_hands_the_code_on(mpirun: str, tmp_path: Path) -> None:
    program = _script(tmp_path, 'exit "$1"')
    assert main(["mpi-run", "--mpirun", mpirun, "--", program, "0"]) == 0
    assert main(["mpi-run", "--mpirun", mpirun, "--", program, "7"]) == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "no-such-program"], "no-such-program: is not on PATH"),
        (["--preload", "/nowhere.so", "--", "echo"], "--preload /nowhere.so: is no file. Fix: give a library, or auto"),
        (["-x", "NOT_SET", "--", "echo"], "-x NOT_SET: is not set"),
        (["-x", "=b", "--", "echo"], "-x =b: has no name. Fix: as in -x NAME, or"),
        (
            ["-x", "LD_PRELOAD=/b.so", "--preload", __file__, "--", "echo"],
            "-x LD_PRELOAD: goes without --preload. Fix: set LD_PRELOAD without -x",
        ),
        (["--stop-seconds", "-1", "--", "echo"], "--stop-seconds"),
    ],
)
def test_mpi_run_refuses(mpirun: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mpi-run", "--mpirun", mpirun, *words]) == 2
    assert message in capsys.readouterr().err


def test_mpi_run_finds_our_preload_library(
    mpirun: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    library = tmp_path / "libtokenweave_preload.so"
    monkeypatch.setattr("trtllm_tokenweave.cli.mpi_run.find_library", {"tokenweave_preload": library}.get)
    words = ["mpi-run", "--mpirun", mpirun, "--dry-run", "--preload", "auto", "-x", "A=b", "--", "echo"]
    assert main(words) == 2
    assert "--preload auto: there is no libtokenweave_preload.so. Fix: pip install ." in capsys.readouterr().err
    library.touch()
    assert main(words) == 0
    assert f"-x LD_PRELOAD={library} -x A=b " in capsys.readouterr().out


def test_mpi_run_inside_an_mpi_job_says_so(
    mpirun: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert main(["mpi-run", "--mpirun", mpirun, "--", "hostname"]) == 2
    said = capsys.readouterr()
    what = f"{mpirun}: cannot start ranks below an mpirun. Fix: call this command without mpirun"
    assert (said.out, said.err) == ("", f"error: {what}\n")


@pytest.mark.parametrize("script", ["mpi_run", "triton_launch", "triton_repo"])
def test_scripts_call_the_installed_command(script: str, tmp_path: Path) -> None:
    """A copy of the scripts without .venv takes the command on PATH, and installs nothing where there is none."""
    folder = tmp_path / "build_scripts"
    folder.mkdir()
    for name in (script, "installed_command"):
        source = Path(__file__).resolve().parents[2] / "build_scripts" / name
        (folder / name).write_bytes(source.read_bytes())
        (folder / name).chmod(0o755)
    environ = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([folder / script, "a b"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: trtllm-tokenweave is not installed. Fix: ")
    command = tmp_path / "bin" / "trtllm-tokenweave"
    command.parent.mkdir()
    command.write_text('#!/bin/bash\nprintf "%s|" "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    environ["PATH"] = f"{command.parent}:{environ['PATH']}"
    done = subprocess.run([folder / script, "a b"], env=environ, capture_output=True, text=True, check=True)
    begin = {"mpi_run": "mpi-run|", "triton_launch": "triton|launch|", "triton_repo": "triton|repo|"}[script]
    assert done.stdout == f"{begin}a b|"
