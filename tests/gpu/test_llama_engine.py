"""SmolLM2-135M through TensorRT on one GPU and on two: the tokens are the interpreter's, woven or not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
#: Seconds: TensorRT times kernels for half a minute or more a rank.
TIMEOUT = 540

needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or shutil.which("mpirun") is None, reason="needs mpirun and two GPUs (NCCL)"
)


def start(command: list[str], variant: str, folder: Path) -> str:
    """What the ranks print, in all."""
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, sys.executable, "-m", "gpu.llama_ranks", variant, str(folder)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all variants: they share TensorRT's timings."""
    return tmp_path_factory.mktemp("llama")


def test_one_gpu(tmp_path: Path) -> None:
    assert "1 ranks agree with the interpreter" in start([], "stock", tmp_path / "stock")


@needs_two
@pytest.mark.parametrize("variant", ["stock", "fuse", "weave", "whole", "profiles"])
def test_two_gpus(variant: str, folder: Path) -> None:
    mpirun = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", "2"]
    assert "2 ranks agree with the interpreter" in start(mpirun, variant, folder / variant)
