"""The set-up of build_scripts, with a stand-in for Python: nothing is downloaded or installed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = (
    *("build_scripts/common.sh", "build_scripts/demo", "build_scripts/test", ".ci/run"),
    *("build_scripts/installed_command", "build_scripts/mpi_run"),
    *("build_scripts/triton_launch", "build_scripts/triton_repo"),
)

# What common.sh asks of Python. Every call of pip is noted in $CALLS; FAIL_PIP makes pip fail, HANG_PIP makes it wait.
PYTHON = """#!/bin/bash
case "$*" in
    *"sys.exit(sys.version_info"*) [[ -z "${OLD_PYTHON:-}" ]] ;;
    *addsitedir*) exec "$PYTHON_FOR_PATHS" "$@" ;;
    *ensurepip*) [[ -z "${NO_VENV:-}" ]] ;;
    *"python%d.%d-venv"*) echo python3.11-venv ;;
    *"sys.version_info >= (3, 11)"*) ;;
    *"sys.version.split"*) echo "${VERSION:-3.11.0}" ;;
    "-m venv "*)
        echo venv >>"$CALLS"
        mkdir -p "$3/bin"
        cp "$0" "$3/bin/python"
        printf '#!/bin/bash\\necho "ran $*"\\npwd >&2\\n' >"$3/bin/trtllm-tokenweave"
        chmod +x "$3/bin/trtllm-tokenweave" ;;
    "-m pip --version") ;;
    "-m pip install"*)
        echo "pip ${*: -1}" >>"$CALLS"
        echo "noise of pip"
        [[ -z "${HANG_PIP:-}" ]] || { echo "pid $$" >>"$CALLS"; exec sleep 60; }
        [[ -z "${FAIL_PIP:-}" ]] || { echo "no route to the index"; exit 1; } ;;
    *mpi4py*) ;;
    *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""

TOOLS = (
    *("bash", "env", "cat", "cut", "cp", "chmod", "dirname", "basename", "flock"),
    *("head", "mkdir", "pwd", "rm", "sed", "sha256sum", "sleep", "tail", "touch"),
)


@dataclass
class Clone:
    """A copy of the scripts in a folder of their own, and a PATH that holds nothing but a few tools."""

    root: Path
    bin: Path
    calls: Path

    def run(self, script: str = "build_scripts/demo", *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(script, *args, **env)
        out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, script: str, *args: str, **env: str) -> subprocess.Popen[str]:
        """Start a script in a process group of its own, as a shell on a terminal does."""
        environ = {"PATH": str(self.bin), "CALLS": str(self.calls), "TLLM_TOKENWEAVE_APT": "0", **env}
        return subprocess.Popen(
            [str(self.root / script), *args],
            env=environ,
            cwd=self.bin,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell's background job, as these tests may be, ignores it, and its children with it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def waits_in(self, process: subprocess.Popen[str]) -> int:
        """The process that the script waits for: one that HANG_PIP made wait."""
        while process.poll() is None:
            found = re.search(r"pid (\d+)\n", self.calls.read_text(encoding="utf-8") if self.calls.exists() else "")
            if found is not None:
                return int(found[1])
            time.sleep(0.01)
        raise AssertionError(process.communicate())

    def called(self) -> list[str]:
        """What was called since the last time this was asked."""
        lines = self.calls.read_text(encoding="utf-8").splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return lines

    def add(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)


def runs(process: int) -> bool:
    """Whether a process runs: one that nobody has waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False


FRESH = ["venv", "pip .[dev]", "pip build_scripts/requirements-demo.txt"]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    root, tools = tmp_path / "a clone", tmp_path / "bin"
    shutil.copytree(ROOT / "build_scripts", root / "build_scripts")
    shutil.copytree(ROOT / ".ci", root / ".ci")
    (root / "pyproject.toml").write_text("[project]\n", encoding="utf-8")
    tools.mkdir()
    for tool in TOOLS:
        path = shutil.which(tool)
        assert path is not None, f"{tool} is not installed"
        (tools / tool).symlink_to(path)
    made = Clone(root, tools, tmp_path / "calls")
    made.add("python3", PYTHON)
    return made


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    assert os.access(ROOT / script, os.X_OK) == (not script.endswith(".sh"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_name_no_place_of_one_machine(script: str) -> None:
    text = (ROOT / script).read_text(encoding="utf-8")
    assert re.search(r"https?:|/home/|/root/|/work/|/opt/|--index-url|--trusted-host", text) is None


def test_first_run_sets_up_and_repeats_do_not(clone: Clone) -> None:
    first = clone.run("build_scripts/demo", "--json", "two words")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "ran demo --json two words\n"
    assert re.search(r"Python packages .* done +\d+ s", first.stderr)
    assert "noise of pip" not in first.stderr
    assert first.stderr.endswith(f"{clone.bin}\n")  # the caller's folder
    assert clone.called() == FRESH
    again = clone.run()
    assert (again.returncode, clone.called()) == (0, [])
    assert again.stdout == "ran demo\n"


def test_no_mpi_is_one_clear_line(clone: Clone) -> None:
    done = clone.run()
    (line,) = [line for line in done.stderr.splitlines() if "no MPI" in line]
    assert "sudo apt-get install openmpi-bin libopenmpi-dev" in line


def test_mpi_brings_mpi4py(clone: Clone) -> None:
    clone.run()
    clone.called()
    clone.add("mpirun", "#!/bin/bash\n")
    done = clone.run()
    assert "no MPI" not in done.stderr
    assert clone.called() == ["pip .[dev,mpi]", FRESH[2]]


def test_changed_packages_are_installed_into_the_same_environment(clone: Clone) -> None:
    clone.run()
    clone.called()
    (clone.root / "pyproject.toml").write_text("[project]\nname = 'x'\n", encoding="utf-8")
    clone.run()
    assert clone.called() == FRESH[1:]


@pytest.mark.parametrize("damage", ["interrupted", "broken", "other python", "moved"])
def test_environments_that_cannot_be_trusted_are_made_anew(clone: Clone, damage: str) -> None:
    clone.run()
    clone.called()
    env = {}
    if damage == "interrupted":
        (clone.root / ".venv" / ".tokenweave-unfinished").touch()
    elif damage == "broken":
        (clone.root / ".venv" / "bin" / "python").unlink()
    elif damage == "other python":
        env = {"VERSION": "3.12.1"}
    else:
        clone.root = clone.root.rename(clone.root.with_name("elsewhere"))
    done = clone.run(**env)
    assert done.returncode == 0, done.stderr
    assert clone.called() == FRESH


@pytest.mark.parametrize("script", ["demo", "test"])
@pytest.mark.parametrize("words", [["--help"], ["-h"], ["-k", "x", "--help"]])
def test_help_says_what_it_takes_and_starts_nothing(clone: Clone, script: str, words: list[str]) -> None:
    before = sorted(clone.root.iterdir())
    done = clone.run(f"build_scripts/{script}", *words)
    assert (done.returncode, done.stderr, clone.called()) == (0, "", [])
    assert done.stdout.startswith(f"build_scripts/{script} ")
    for word in ("download", "MB in" if script == "test" else "MB on disk", "two cores"):
        assert word in done.stdout
    assert sorted(clone.root.iterdir()) == before


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_fetch_sdk_has_help(clone: Clone, word: str) -> None:
    done = clone.run("build_scripts/fetch_sdk", word)
    assert (done.returncode, done.stderr) == (0, "")
    assert "build_scripts/fetch_sdk tritonserver" in done.stdout
    assert done.stdout.endswith("to call pip with.\n")
    wrong = clone.run("build_scripts/fetch_sdk", "gcc")
    assert (wrong.returncode, wrong.stdout, wrong.stderr) == (2, "", done.stdout)


@pytest.mark.parametrize("folder", ["include", "."])
def test_tensorrt_headers_of_an_sdk(clone: Clone, tmp_path: Path, folder: str) -> None:
    held = tmp_path / "sdk" / folder
    held.mkdir(parents=True)
    (held / "NvInfer.h").touch()
    done = clone.run("build_scripts/fetch_sdk", "tensorrt", TENSORRT_ROOT=str(tmp_path / "sdk"))
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.strip()).samefile(held)


@pytest.mark.parametrize("cargo", [None, "#!/bin/bash\nexit 1\n"])
@pytest.mark.parametrize("root", ["", "/nowhere"])
def test_without_tensorrt_headers_the_variable_is_named(clone: Clone, root: str, cargo: str | None) -> None:
    if any(Path("/usr/include").glob("**/NvInfer.h")):
        pytest.skip("this system has TensorRT's headers")
    if cargo is not None:
        clone.add("cargo", cargo)
    done = clone.run("build_scripts/fetch_sdk", "tensorrt", TENSORRT_ROOT=root)
    assert (done.returncode, done.stdout) == (1, "")
    why = "there is no cargo" if cargo is None else "cargo cannot fetch"
    assert f"fetch_sdk: no TensorRT headers: {why}" in done.stderr
    assert done.stderr.splitlines()[-1].partition(" Fix: ")[2].startswith("set TENSORRT_ROOT to ")
    said = "fetch_sdk: TENSORRT_ROOT is /nowhere, and neither it nor its include holds NvInfer.h: looking elsewhere\n"
    assert done.stderr.startswith(said) == bool(root)
    assert done.stderr.count("neither it nor") == bool(root)


def test_scripts_agree_on_what_the_sdk_takes(clone: Clone) -> None:
    sizes = [clone.run(f"build_scripts/{name}", "--help").stdout for name in ("fetch_sdk", "test")]
    (fetch,) = re.findall(r"\.sdk/ \((up to [\d.]+ .B)", sizes[0])
    (test,) = re.findall(r"(up to [\d.]+ .B) in \.sdk", sizes[1])
    assert fetch == test


@pytest.mark.parametrize("name", [".venv-setup.log", ".venv-lock"])
def test_a_checkout_that_cannot_be_written_is_one_line(clone: Clone, name: str) -> None:
    (clone.root / name).mkdir()  # root may write to every file
    done = clone.run()
    assert (done.returncode, done.stdout, clone.called()) == (1, "", [])
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {clone.root / name} cannot be written, and ")
    assert f"Fix: copy {clone.root} to a folder that you may write to" in line


def test_a_working_directory_that_is_gone_is_one_line(clone: Clone, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f'cd "{gone}" && rmdir "{gone}" && exec "{clone.root}/build_scripts/demo"'
    environ = {"PATH": f"{clone.bin}:/usr/bin:/bin", "CALLS": str(clone.calls), "TLLM_TOKENWEAVE_APT": "0"}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, clone.called()) == (1, [])
    # The shells themselves say that they cannot find out where they are.
    (line,) = [line for line in done.stderr.splitlines() if "getcwd" not in line]
    assert line == f"error: the working directory {gone} is gone. Fix: cd to a folder that exists"


@pytest.mark.parametrize(("locale", "code"), [("C", 1), ("C.UTF-8", 0)])
def test_a_path_that_the_locale_lacks_is_refused_before_anything_is_fetched(
    clone: Clone, locale: str, code: int
) -> None:
    if sys.version_info >= (3, 13):
        pytest.skip("this Python reads .pth files as UTF-8 first")
    root = clone.root.with_name("cl\u00f6ne")
    clone.root.rename(root)
    done = replace(clone, root=root).run(LC_ALL=locale, PYTHON_FOR_PATHS=sys.executable)
    assert done.returncode == code
    assert clone.called() == ([] if code else FRESH)
    if code:
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: Python cannot read the path ")
        assert "in this locale (C). Fix: export LC_ALL=C.UTF-8, or copy" in line


def test_failed_install_says_why_and_is_repaired_by_the_next_run(clone: Clone) -> None:
    failed = clone.run(FAIL_PIP="1")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "    | no route to the index" in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith("error: could not install the Python packages")
    assert clone.called() == FRESH[:2]
    assert clone.run().returncode == 0
    assert clone.called() == FRESH


@pytest.mark.parametrize("script", ["demo", "test"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_set_up_says_so_and_leaves_nothing_running(
    clone: Clone, script: str, number: signal.Signals, code: int
) -> None:
    process = clone.start(f"build_scripts/{script}", HANG_PIP="1")
    waiting = clone.waits_in(process)
    # A terminal sends its signal to the whole group, `kill` to the one process.
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "")
    assert err.splitlines()[-1] == "error: interrupted"
    assert err.count("error") == 1
    limit = time.monotonic() + 20  # of the minute that it would wait
    while runs(waiting):
        assert time.monotonic() < limit
        time.sleep(0.01)
    clone.called()
    assert clone.run().returncode == 0
    assert clone.called() == FRESH


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"OLD_PYTHON": "1"}, "no Python >= 3.10 found. Install it: sudo apt-get install python3 python3-venv"),
        ({"OLD_PYTHON": "1", "PYTHON": "python3"}, "PYTHON=python3 is not a Python >= 3.10"),
        ({"NO_VENV": "1"}, "Install what it lacks: sudo apt-get install python3.11-venv"),
    ],
)
def test_lacks_are_one_line_with_the_remedy(clone: Clone, env: dict[str, str], message: str) -> None:
    done = clone.run(**env)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in done.stderr
    assert clone.called() == []


def test_apt_get_is_used_where_it_may_be(clone: Clone) -> None:
    clone.add("apt-get", '#!/bin/bash\necho "apt $*" >>"$CALLS"\n[[ "$*" != *install* ]]\n')
    clone.add("sudo", '#!/bin/bash\nshift\n[[ "$1" == true ]] || exec "$@"\n')
    clone.add("true", "#!/bin/bash\n")
    done = clone.run(TLLM_TOKENWEAVE_APT="1")
    install = "apt install -y --no-install-recommends openmpi-bin libopenmpi-dev"
    # It failed, so the package lists were fetched and it was tried once more; then the set-up went on without.
    assert clone.called() == [install, "apt update", install, *FRESH]
    assert done.returncode == 0
    assert "no MPI" in done.stderr


def test_all_checks_run_and_the_last_lines_sum_up(clone: Clone) -> None:
    clone.run()
    for name, code in (("ruff", 0), ("mypy", 1)):
        path = clone.root / ".venv" / "bin" / name
        path.write_text(f"#!/bin/bash\nexit {code}\n", encoding="utf-8")
        path.chmod(0o755)
    python = clone.root / ".venv" / "bin" / "python"
    python.write_text(
        PYTHON.replace("*mpi4py*) ;;", '*mpi4py*|*api_reference*) ;;\n    *pytest*) echo "$*" ;;'), encoding="utf-8"
    )
    done = clone.run(".ci/run", "-k", "two words")
    assert done.returncode == 1
    assert "-m pytest tests/null -n " in done.stdout
    assert "-k two words\n" in done.stdout
    summary = done.stdout.split("== summary")[1].splitlines()
    lines = [re.sub(r"  +(\d+ s$)?", " ", line).strip() for line in summary[1:-1]]
    # What a machine lacks for C++ depends on the machine; the clone's has no compiler at least.
    (cpp,) = [line for line in lines if line.startswith("C++ ")]
    assert cpp.startswith("C++ skipped: not installed: g++")
    assert [line for line in lines if line != cpp] == [
        "ruff check passed",
        "ruff format passed",
        "mypy FAILED (exit 1)",
        "API reference passed",
        "tests/null passed",
        "tests/ranks skipped: mpirun is not installed (sudo apt-get install openmpi-bin libopenmpi-dev)",
        "tests/serving skipped: mpirun is not installed (sudo apt-get install openmpi-bin libopenmpi-dev)",
    ]
    assert summary[-1] == "FAILED"
