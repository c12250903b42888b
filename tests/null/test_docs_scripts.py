"""What the heads of some scripts of build_scripts say that one can call, which nothing else runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("mpi_run", "mpi-run"),
        ("triton_launch", "triton launch"),
        ("triton_repo", "triton repo"),
        ("triton_repo fill", "triton fill"),
    ],
)
def test_words_are_handed_on(script: str, command: str) -> None:
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    words = [*f"build_scripts/{script}".split(), "place", "--help"]
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    assert f"Usage: trtllm-tokenweave {command} " in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "build/plugins/trt/libtokenweave_trt.so").exists(), reason="nothing is compiled here")
def test_flashinfers_kernel_compiles(tmp_path: Path) -> None:
    made = tmp_path / "flashinfer_peer.so"
    command = [ROOT / "build_scripts" / "build_flashinfer_peer", made]
    subprocess.run(command, capture_output=True, text=True, check=True)
    exported = subprocess.run(["nm", "-D", "--defined-only", made], capture_output=True, text=True, check=True)
    assert " T flashinfer_all_reduce_norm\n" in exported.stdout
