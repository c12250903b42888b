"""A model to build with the double of TensorRT-LLM, and what came out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support import trtllm_double
from support.models import small_table, tiny
from trtllm_tokenweave import recorder
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.patterns import is_all_reduce

WEAVE = ("--plugin", "tokenweave")


@dataclass
class Place:
    """A checkpoint, its table, and where engines go."""

    folder: Path
    config: ModelConfig
    tp_size: int
    architecture: str | None = None
    mapping: dict[str, int] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        return self.folder / "engines"

    @property
    def table(self) -> Path:
        return self.folder / "table.json"

    def words(self, *more: str) -> list[str]:
        checkpoint = trtllm_double.write_checkpoint(
            self.folder / "checkpoint", self.config, self.tp_size, self.architecture, **self.mapping
        )
        small_table(self.config, self.tp_size).save(self.table)
        return ["--checkpoint_dir", str(checkpoint), "--output_dir", str(self.out), *more]

    def woven(self, *more: str) -> list[str]:
        return self.words(*WEAVE, "--tokenweave_table", str(self.table), *more)

    def record(self, rank: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / f"rank{rank}.tokenweave.json").read_text())
        return found

    def told(self, rank: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / f"told{rank}.json").read_text())
        return found

    def network(self, rank: int = 0) -> recorder.RecordedNetwork:
        return recorder.load(self.out / f"network{rank}.json")

    def all_reduces(self, rank: int = 0) -> int:
        """Stock all-reduces that are left in a rank's network."""
        return sum(is_all_reduce(node) for node in Graph(self.network(rank)).live)

    def plugins(self, rank: int = 0) -> list[str]:
        return [layer.plugin.plugin_type for layer in self.network(rank).layers if hasattr(layer, "plugin")]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with trtllm_double.imported(trtllm_double.environment(tmp_path)):
        yield Place(tmp_path, tiny(), 2)
    assert "tensorrt_llm" not in sys.modules


def outside(tmp_path: Path, tp_size: int = 2) -> tuple[Place, dict[str, str]]:
    """A place, and the environment of a process of its own."""
    return Place(tmp_path, tiny(), tp_size), trtllm_double.environment(tmp_path)


def ended(command: list[str], values: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=dict(values), capture_output=True, text=True, timeout=120, check=False)
