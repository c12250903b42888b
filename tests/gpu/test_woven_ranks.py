"""Woven engines on several ranks, under mpirun; they share the GPU where there is only one."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.mpirun import needs_mpirun, on_ranks


@needs_mpirun
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree_with_the_reference(size: int, tmp_path: Path) -> None:
    assert f"{size} ranks agree" in on_ranks(size, "woven_ranks", str(tmp_path))
