"""The command `tune`: its options, and the override of launch configurations by the environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tuning import CONFIG, SPACE

from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.cli.tune import token_range
from trtllm_tokenweave.config import LAUNCH, read_environment
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.plugin_library import launch_of_environment
from trtllm_tokenweave.table import LaunchConfig
from trtllm_tokenweave.tune import run as run_module
from trtllm_tokenweave.tune.candidates import CTAS, FUSE_CTAS
from trtllm_tokenweave.tune.run import TuneArguments

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[TuneArguments]:
    """What the command hands on."""
    found: list[TuneArguments] = []

    def run(arguments: TuneArguments) -> dict[str, Any]:
        found.append(arguments)
        return {"written": [str(arguments.output)]}

    monkeypatch.setattr(run_module, "run_tune", run)
    return found


def test_defaults_are_the_range_of_the_shipped_tables(given: list[TuneArguments], tmp_path: Path) -> None:
    assert main(["tune", "-o", str(tmp_path / "t.json")]) == 0
    (arguments,) = given
    assert arguments.counts == tuple(range(1024, 8193, 256))
    assert (arguments.layers, arguments.budget_seconds, arguments.mode) == (4, 285, "eager")
    assert (arguments.space.ctas, arguments.space.fuse_ctas, arguments.space.gemm_sms) == (CTAS, FUSE_CTAS, (0,))
    assert arguments.gemm == "budget"
    assert arguments.config.hidden_size == 8192
    assert arguments.symmetric


def test_options_are_handed_on(given: list[TuneArguments], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--preset", "llama-3.1-8b", "--dtype", "float16", "--tokens", "512:2048:512", "--ctas", "16,8"]
    words += [
        "--gemm",
        "budget",
        "--gemm-sms",
        "124,116",
        "--mode",
        "graph",
        "--no-symmetric",
        "--exhaustive",
        "--restart",
        "--json",
    ]
    words += ["--jitter", str(tmp_path / "j.json"), "--jitter-tokens", "64:256:64"]
    assert main(["tune", "-o", str(tmp_path / "t.json"), *words]) == 0
    (arguments,) = given
    assert arguments.counts == (512, 1024, 1536, 2048)
    assert (arguments.space.ctas, arguments.space.gemm_sms, arguments.gemm) == ((8, 16), (116, 124), "budget")
    assert (arguments.mode, arguments.symmetric, arguments.exhaustive) == ("graph", False, True)
    assert (arguments.config.dtype, arguments.model) == ("float16", "llama-3.1-8b")
    assert arguments.jitter_counts == (64, 128, 192, 256)
    assert json.loads(capsys.readouterr().out)["written"] == [str(tmp_path / "t.json")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to do"),
        (["-o", "OUT", "--table", "T"], "none is tuned"),
        (["--table", "T"], "not how"),
        (["-o", "missing/t.json"], "does not exist"),
        (["-o", "OUT", "--check", "OUT"], "two options name this file"),
        (["--table", "T", "--jitter", "T"], "two options name this file"),
        (["-o", "OUT", "--preset", "x"], "llama-3.3-70b"),
        (["-o", "OUT", "--preset", "llama-3.1-8b", "--checkpoint", "T"], "one of --preset and --checkpoint"),
        (["-o", "OUT", "--dtype", "int8"], "bfloat16"),
        (["-o", "OUT", "--tokens", "1000:2000:250"], "1000 is not a multiple of 256"),
        (["-o", "OUT", "--tokens", "2048:1024:256"], "is no range"),
        (["-o", "OUT", "--tokens", "256:99999999:256"], "is above"),
        (["-o", "OUT", "--ctas", "7"], "--ctas: 7 is not an even number"),
        (["-o", "OUT", "--fuse-ctas", "134"], "--fuse-ctas: 134"),
        (["-o", "OUT", "--gemm", "mine"], "choose one of trt, budget"),
        (["-o", "OUT", "--gemm", "trt", "--gemm-sms", "116"], "TensorRT's own GEMMs have no target"),
        (["-o", "OUT", "--mode", "fast"], "choose one of eager, graph"),
        (["-o", "OUT", "--held-out", "a"], "no list of numbers"),
    ],
)
def test_bad_use_is_refused(
    given: list[TuneArguments], words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"OUT": str(tmp_path / "t.json"), "T": str(tmp_path / "old.json")}
    assert main(["tune", *(places.get(word, word) for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert not given


def test_without_mpirun_it_says_how_to_start_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "-o", str(tmp_path / "t.json")]) == 2
    assert "mpirun -n 2 trtllm-tokenweave tune" in capsys.readouterr().err


def test_the_script_is_the_command() -> None:
    command = [sys.executable, str(ROOT / "tuning/tune.py"), "--tokens", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert "nothing to do" in done.stderr


def test_the_script_without_the_package_says_how_to_get_it() -> None:
    command = [sys.executable, "-I", "-S", str(ROOT / "tuning/tune.py"), "--help"]  # -S: without installed packages
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "has no module trtllm_tokenweave. Fix: run ./build_scripts/demo (or pip install .) first" in line


def test_ranges_hold_their_end() -> None:
    assert token_range("64:256:64", "--x") == (64, 128, 192, 256)
    assert token_range("256,64,64", "--x") == (64, 256)


# ---- the override


@pytest.mark.parametrize(
    ("text", "launch"),
    [
        ("", None),
        ("ctas=8", LaunchConfig(ctas=8)),
        (" ctas = 8 , threads=512,gemm_sms=120", LaunchConfig(ctas=8, threads=512, gemm_sms=120)),
    ],
)
def test_the_environment_names_a_launch_configuration(text: str, launch: LaunchConfig | None) -> None:
    assert launch_of_environment(read_environment({LAUNCH.name: text})) == launch


@pytest.mark.parametrize(
    "text", ["8", "ctas=", "ctas=8,ctas=8", "ctas=7", "ctas=-8", "fabric=peer", "ctas=8,", "ctas=999"]
)
def test_a_launch_configuration_that_no_table_may_have_is_refused(text: str) -> None:
    with pytest.raises(UserError) as raised:
        launch_of_environment(read_environment({LAUNCH.name: text}))
    assert raised.value.where == LAUNCH.name


def test_tuning_under_an_override_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {LAUNCH.name: "ctas=8", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    arguments = TuneArguments("m", CONFIG, 2, 8, (1024,), SPACE, output=tmp_path / "t.json")
    with pytest.raises(UserError, match=LAUNCH.name):
        run_module.run_tune(arguments)
