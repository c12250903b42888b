"""The tuner on two GPUs: a small table, what it was made from, and a run that goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from gpu.mpirun import needs_mpirun
from trtllm_tokenweave.table import load_table

ROOT = Path(__file__).resolve().parents[2]


def tune(*words: str) -> str:
    mpirun = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", "2"]
    command = [*mpirun, sys.executable, str(ROOT / "tuning/tune.py")]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


@needs_mpirun
def test_a_small_table_is_tuned_and_checked(tmp_path: Path) -> None:
    output, check = tmp_path / "table.json", tmp_path / "check.json"
    words = ["--preset", "llama-3.1-8b", "--layers", "1", "--tokens", "1024:2048:1024", "--budget-seconds", "60"]
    said = tune(*words, "-o", str(output), "--check", str(check), "--held-out", "1400")
    assert "2/2" in said
    table = load_table(output)
    assert [row.tokens.hi for row in table.rows] == [1024, 2048]
    document = json.loads((tmp_path / "table.measurements.json").read_text())
    candidates = [c for bucket in document["buckets"] for c in bucket["candidates"]]
    assert not [c for c in candidates if "rejected" in c]
    # Halves that no step of the run had would be right by accident.
    assert {c["offset"] for c in candidates} > {None, 0}
    assert len({c["mlp_ctas"] for c in candidates}) > 3
    assert document["counters"]["overlapped"] > 0
    row = json.loads(check.read_text())["held_out"][0]
    assert 0 < row["best_ms"] < 1.05 * row["chosen_ms"]  # by other samples than those that found the best
    assert document["measured"]["symmetric"]
    # The same table, from the engine of another process, and steps in graphs.
    tune(*words[:6], "--mode", "graph", "--table", str(output), "--check", str(check), "--held-out", "1400")
