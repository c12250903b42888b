"""Starts programs of this package on several ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trtllm_tokenweave.config import read_environment

TESTS = Path(__file__).resolve().parents[1]
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")


def room_for(ranks: int) -> bool:
    """Whether each rank has a GPU, or may share one (NCCL_MULTI_RANK_GPU_ENABLE=1, with NCCL 2.30 or newer)."""
    shared = read_environment().share_gpus and bool(torch.cuda.nccl.version() >= (2, 30))
    return shared or torch.cuda.device_count() >= ranks


def on_ranks(size: int, module: str, *arguments: str, timeout: float = 300, mpirun: bool = True) -> str:
    """What ``python -m gpu.<module> arguments...`` prints on ``size`` ranks, which all have to succeed.

    Without ``mpirun`` there is one rank, which nothing started.
    """
    ranks = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(size)]
    command = ranks if mpirun else []
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, sys.executable, "-m", f"gpu.{module}", *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
