"""Woven Llamas of all forms give the stock network's logits, with two ranks, which share a GPU where they may."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.mpirun import needs_mpirun, on_ranks, room_for


@needs_mpirun
@pytest.mark.skipif(not room_for(2), reason="NCCL wants a GPU for each rank")
def test_woven_networks_give_the_stock_logits(tmp_path: Path) -> None:
    assert "2 ranks agree" in on_ranks(2, "small_llama_ranks", str(tmp_path))
