"""What Triton's model does with engines, without Triton: one rank, and two under mpirun."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.mpirun import needs_mpirun, on_ranks, room_for


@needs_mpirun
@pytest.mark.parametrize("size", [1, 2])
def test_engines_are_served(size: int, tmp_path: Path) -> None:
    if not room_for(size):
        pytest.skip(f"needs {size} GPUs")
    assert f"{size} ranks serve engines of" in on_ranks(size, "serving_ranks", str(tmp_path / "engine"), timeout=540)
