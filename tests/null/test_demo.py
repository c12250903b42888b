"""The demo: its verdict, its files, and what it says when networks differ."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.models import Model, tiny
from support.stack import Stack

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.config import mpi_environment
from trtllm_tokenweave.demo import model as demo_model
from trtllm_tokenweave.demo import mpi
from trtllm_tokenweave.demo.mpi import run_under_mpi
from trtllm_tokenweave.demo.timeline import timeline
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.passes import WeaveOptions, names, weave
from trtllm_tokenweave.plugin_specs import Half
from trtllm_tokenweave.recorder import RecordedNetwork, store
from trtllm_tokenweave.table import TuningTable
from trtllm_tokenweave.waves import table_key

SHORT = ["--max-new-tokens", "2", "--no-mpi", "--prompt", "The capital of France is?", "--prompt", "Count: one, two,"]


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main(["demo", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_smollm2_says_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, document = call(capsys, *SHORT, "--out", str(tmp_path / "out"))
    assert code == 0
    assert document["identical"] is True
    assert [p["identical"] for p in document["prompts"]] == [True, True]
    assert document["max_logit_diff"] < 1e-2
    assert any(step["woven"] for step in document["split_steps"])
    assert len(document["sites"]) == 60
    page = Path(document["report"]).read_text()
    assert "http" not in page.replace("http://www.w3.org", "")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"report.html", "schedule.png", "schedule.svg"}


@pytest.mark.slow
def test_a_fault_in_the_woven_network_is_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a suffix half that normalises by another weight must end in other tokens and exit code 1."""

    def faulty(network: RecordedNetwork, options: WeaveOptions) -> Any:
        result = weave(network, options)
        last = len(result.plan.sites) - 1
        layer = next(x for x in network.layers if x.name == names.start(last, Half.PREFIX))
        other = next(x for x in network.layers if x.name == names.start(last - 1, Half.PREFIX))
        layer.set_input(2, other.inputs[2])  # type: ignore[arg-type]
        return result

    monkeypatch.setattr(demo_model, "weave", faulty)
    code, document = call(capsys, *SHORT, "--out", str(tmp_path / "out"))
    assert code == 1
    assert document["identical"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "1"], "has no communication to hide"),
        (["--tp", "64"], "tp_size"),
        (["--tp", "0"], "tp_size"),
        (["--prompt", " "], "prompt 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--max-new-tokens", "99999999"], "exceed the model's"),
        (["--network", "x.json", "--tp", "2"], "--network"),
        (["--checkpoint", "nothing.gguf"], "nothing.gguf"),
        (["--checkpoint", "BAD"], "GGUF"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], message: str) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model at all")
    words = [str(bad) if w == "BAD" else w for w in words]
    code, document = call(capsys, *words, "--no-mpi", "--out", str(tmp_path / "out"))
    assert code == 2
    assert message in document["error"]["what"] + document["error"]["where"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("make", [lambda: Model(tiny(), 2).networks()[0], lambda: Stack(layers=1).build()])
def test_recorded_network_with_weights_is_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, make: Any) -> None:
    path = tmp_path / "network.json"
    store.save(make(), path)
    code, document = call(capsys, "--network", str(path))
    assert code == 0
    assert document["mode"] == "weave"
    assert document["skipped"] is None
    assert document["relative_diff"] < 1e-4


def test_recorded_shapes_are_woven_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    class Shapes(Stack):
        def weight(self, name: str, index: int, shape: tuple[int, int]) -> trt.ITensor:
            weights = trt.Weights(trt.float32, shape[0] * shape[1])
            layer = self.network.add_constant(shape, weights)
            layer.name = f"site{index}/{name}"
            return layer.outputs[0]

    path = tmp_path / "network.json"
    store.save(Shapes().build(), path)
    code, document = call(capsys, "--network", str(path))
    assert code == 0
    assert "shapes only" in document["skipped"]
    assert document["max_diff"] is None


def test_recorded_network_with_unknown_inputs_is_woven_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    stack = Stack(layers=1)
    stack.build()
    network = stack.network
    ids = network.add_input("ids", trt.int32, (-1,))
    shape = network.add_shape(ids).outputs[0]
    shape.name = "n"
    network.mark_output(shape)
    store.save(network, tmp_path / "n.json")
    code, document = call(capsys, "--network", str(tmp_path / "n.json"))
    assert code == 0
    assert "its meaning is not known" in document["skipped"]


def test_second_run_is_skipped_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "mpirun is not installed. Fix: apt-get" in run_under_mpi(3, [], said.append)["skipped"]
    (tmp_path / "mpirun").write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "mpi4py is not installed. Fix: pip" in run_under_mpi(3, [], said.append)["skipped"]
    assert said == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    assert run_under_mpi(3, [], said.append)["error"] == "mpirun ended with code 3"
    assert said == ["running again under mpirun -n 3"]
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert "started by mpirun itself" in run_under_mpi(3, [], said.append)["skipped"]


def test_last_words_of_a_second_run_that_died() -> None:
    ours = subprocess.CompletedProcess([], 2, "", "-----\nerror: rank 1: no such file\n-----\n")
    assert mpi._last_words(ours) == "rank 1: no such file"
    killed = "-----\nmpirun noticed that process rank 1 with PID 7 exited on signal 9 (Killed).\n-----\n"
    assert "rank 1 with PID 7 exited on signal 9" in mpi._last_words(subprocess.CompletedProcess([], 137, "", killed))


@pytest.mark.mpi
def test_a_rank_that_fails_takes_the_others_down() -> None:
    """One rank has no checkpoint: the job ends at once with its reason, instead of waiting for it."""
    program = [sys.executable, "-m", "trtllm_tokenweave.cli.entry", "demo", "--no-report", "--max-new-tokens", "1"]
    good, bad = ["-n", "1", *program], ["-n", "1", *program, "--checkpoint", "nowhere"]
    done = subprocess.run(
        ["mpirun", *good, ":", *bad], capture_output=True, text=True, timeout=120, env=mpi_environment(), check=False
    )
    assert done.returncode == 2
    assert "error: rank 1: nowhere: does not exist" in done.stderr


def test_timeline_hides_all_but_the_last_collective() -> None:
    config = preset("llama-3.3-70b")
    table = TuningTable(key=table_key(config, 8), min_tokens=1024)
    boxes, edges = timeline(config, 8, table, 4096, layers=2)
    compute = [b for b in boxes if b.lane == "compute"]
    assert [(b.label, b.half) for b in compute[:4]] == [
        ("attention", "prefix"), ("attention", "suffix"), ("mlp", "prefix"), ("mlp", "suffix"),
    ]  # fmt: skip
    assert all(a.end == b.start for a, b in pairwise(compute)), "compute never waits"
    assert all(b.waves is not None and b.waves > 0 for b in compute)
    assert sum(e.kind == "fork" for e in edges) == 8
    assert sum(e.kind == "join" for e in edges) == 6
