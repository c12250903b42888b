"""SmolLM2-135M through TensorRT on one GPU and on two: the tokens are the interpreter's, woven or not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpu.mpirun import on_ranks, room_for

#: Seconds: TensorRT times kernels for half a minute or more a rank.
TIMEOUT = 540

needs_two = pytest.mark.skipif(
    not room_for(2) or shutil.which("mpirun") is None, reason="needs mpirun and two GPUs (NCCL)"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all variants: they share TensorRT's timings."""
    return tmp_path_factory.mktemp("llama")


def test_one_gpu(tmp_path: Path) -> None:
    said = on_ranks(1, "llama_ranks", "stock", str(tmp_path / "stock"), timeout=TIMEOUT, mpirun=False)
    print(said)
    assert "1 ranks agree with the interpreter" in said


@needs_two
@pytest.mark.parametrize("variant", ["stock", "fuse", "weave", "whole", "profiles"])
def test_two_gpus(variant: str, folder: Path) -> None:
    said = on_ranks(2, "llama_ranks", variant, str(folder / variant), timeout=TIMEOUT)
    print(said)
    assert "2 ranks agree with the interpreter" in said
