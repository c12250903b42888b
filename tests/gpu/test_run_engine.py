"""The C++ example generates the tokens that `trtllm-tokenweave run` generates, with one rank and with two.

The example is built before, on any machine, as docs/cpp.md shows:

    cmake --install build --prefix build/prefix
    cmake -S plugins/examples -B build/example -DCMAKE_PREFIX_PATH=$PWD/build/prefix ...
    cmake --build build/example
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.mpirun import needs_mpirun, room_for
from trtllm_tokenweave.checkpoint import smollm2_gguf
from trtllm_tokenweave.config import mpi_environment, read_environment

ROOT = Path(__file__).resolve().parents[2]
PREFIX = ROOT / "build" / "prefix"
PROGRAM = ROOT / "build" / "example" / "run_engine"
OVERHEAD = ROOT / "build" / "tests" / "cpp" / "engine" / "tokenweave_step_overhead"
PROMPTS = ["1,2,3,4,5", "100,200,300", ",".join(str(7 * i % 1000) for i in range(700))]
NEW_TOKENS = "24"

pytestmark = [needs_mpirun, pytest.mark.skipif(not PROGRAM.exists(), reason=f"{PROGRAM} is not built")]


def library_folders() -> list[str]:
    """Where libnvinfer is, and our libraries side by side."""
    root = read_environment().tensorrt_root
    spec = importlib.util.find_spec("tensorrt_libs")
    found = [] if spec is None else list(spec.submodule_search_locations or ())
    return [str(PREFIX / "lib"), *found, *([] if root is None else [str(root / "lib"), str(root)])]


def mpirun(size: int, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([*library_folders(), os.environ.get("LD_LIBRARY_PATH", "")])
    modules = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        ["mpirun", "-n", str(size), *map(str, command)],
        env={**mpi_environment(), "PYTHONPATH": modules, "LD_LIBRARY_PATH": paths, **variables},
        capture_output=True,
        text=True,
        timeout=540,
    )


def on_ranks(size: int, *command: str | Path) -> str:
    """What a command prints on its ranks, which all have to succeed."""
    done = mpirun(size, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=[1, 2])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Number of ranks, and the folder of their engines."""
    size = int(request.param)
    if not room_for(size):
        pytest.skip(f"needs {size} GPUs")
    folder = tmp_path_factory.mktemp("engine")
    limits = ["--max-batch-size", "4", "--max-num-tokens", "512", "--max-seq-len", "1024", "--min-tokens", "256"]
    command = ["-m", "trtllm_tokenweave.cli.entry", "build", str(smollm2_gguf()), "-o", str(folder), *limits]
    on_ranks(size, sys.executable, *command)
    return size, folder


def test_a_rank_without_a_gpu_of_its_own_is_refused(built: tuple[int, Path]) -> None:
    size, folder = built
    if size == 1:
        pytest.skip("rank 0 has a GPU")
    done = mpirun(2, PROGRAM, folder, "--prompt-ids", "1", CUDA_VISIBLE_DEVICES="0", NCCL_MULTI_RANK_GPU_ENABLE="")
    assert done.returncode == 2
    assert "rank 1: error: CUDA: device 1 of 1 cannot be used (" in done.stderr


def test_both_languages_generate_the_same(built: tuple[int, Path]) -> None:
    size, folder = built
    prompts = [word for prompt in PROMPTS for word in ("--prompt-ids", prompt)]
    options = [*prompts, "--max-new-tokens", NEW_TOKENS]
    run = [sys.executable, "-m", "trtllm_tokenweave.cli.entry", "run", str(folder), *options, "--ignore-eos", "--json"]
    python = json.loads(on_ranks(size, *run).splitlines()[-1])
    tokens = re.findall(r"^prompt \d+: (.*)$", on_ranks(size, PROGRAM, folder, *options), re.MULTILINE)
    assert [[int(t) for t in line.split()] for line in tokens] == [entry["tokens"] for entry in python["prompts"]]


@pytest.mark.skipif(not OVERHEAD.exists(), reason=f"{OVERHEAD} is not built")
def test_a_step_costs_little_over_enqueue(built: tuple[int, Path]) -> None:
    """Prints both times, for docs/results; how close they are is judged there, not here."""
    size, folder = built
    said = on_ranks(size, OVERHEAD, folder, "4", "200")
    print(said)
    assert re.search(r"step [\d.]+ ms, enqueueV3 alone [\d.]+ ms, ratio [\d.]+", said)
