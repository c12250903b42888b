"""Run the demo's model through TensorRT too, where the machine can: one process a GPU, stock and woven."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_tokenweave.config import mpi_environment, read_environment
from trtllm_tokenweave.device import call, current_gpu
from trtllm_tokenweave.errors import TokenWeaveError
from trtllm_tokenweave.launch import MpiOptions, mpirun_command
from trtllm_tokenweave.libraries import find_library
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.table import TuningTable
from trtllm_tokenweave.tensorrt_module import tensorrt

#: Most seconds of a command: TensorRT tries kernels for a minute or so a rank.
_SECONDS = 1200
_NEW_TOKENS = 64


@dataclass(frozen=True)
class GpuRun:
    """What to run.

    Attributes:
        checkpoint: The model's file or folder.
        config: Its shape.
        prompts: User messages.
        table: Makes the tuning table of that many ranks, for a dtype.
        max_batch_size: Sequences in flight.
        max_num_tokens: Most tokens of a step.
    """

    checkpoint: Path
    config: ModelConfig
    prompts: Sequence[str]
    table: Callable[[int, str], TuningTable]
    max_batch_size: int
    max_num_tokens: int


def lack() -> str:
    """What the machine lacks for TensorRT, in words; empty where it lacks nothing."""
    if read_environment().launcher is not None:
        return "this process was started by mpirun itself"
    try:
        current_gpu()
        tensorrt()
    except TokenWeaveError as error:
        return str(error)
    for name in ("tokenweave_trt", "tokenweave_reference"):
        if find_library(name) is None:
            return f"lib{name}.so is not built (plugins/README.md)"
    return ""


def gpu_ranks(config: ModelConfig) -> int:
    """Ranks to run: as many as there are GPUs, at most one a head; one where mpirun cannot start more."""
    able = shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None
    gpus = int(call("cudaGetDeviceCount"))
    return min(gpus, config.num_attention_heads) if able else 1


def run_on_gpus(run: GpuRun, progress: Callable[[str], None]) -> dict[str, Any]:
    """Build the engines, and generate with each.

    Returns:
        {"ranks", "engines": {mode: the document of `run`}, "same": prompts with equal tokens, "of": prompts}, or
        {"skipped": why}, or {"error": why}.
    """
    missing = lack()
    if missing:
        return {"skipped": missing}
    ranks = gpu_ranks(run.config)
    # One rank has nothing to communicate, and so nothing to weave.
    modes = ("stock", "weave") if ranks > 1 else ("stock",)
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = {mode: _build_and_run(run, ranks, mode, Path(folder), progress) for mode in modes}
    except TokenWeaveError as error:
        return {"error": str(error)}
    tokens = [[prompt["tokens"] for prompt in document["prompts"]] for document in found.values()]
    same = sum(all(one == first for one in others) for first, *others in zip(*tokens, strict=True))
    return {"ranks": ranks, "engines": found, "same": same, "of": len(run.prompts)}


def _build_and_run(run: GpuRun, ranks: int, mode: str, folder: Path, progress: Callable[[str], None]) -> dict[str, Any]:
    table = folder / "table.json"
    run.table(ranks, "bfloat16").save(table)
    engine = folder / mode
    limits = ["--max-batch-size", str(run.max_batch_size), "--max-num-tokens", str(run.max_num_tokens)]
    # Both engines have the same GEMMs: the second build times few kernels.
    words = ["--dtype", "bfloat16", "--mode", mode, "--table", str(table), *limits]
    words += ["--timing-cache", str(folder / "timings")]
    progress(f"building the {mode} engine for {ranks} GPU(s); TensorRT takes a minute or so")
    _command(ranks, ["build", str(run.checkpoint), "-o", str(engine), *words])
    progress(f"generating with the {mode} engine")
    prompts = [word for prompt in run.prompts for word in ("--prompt", prompt)]
    return _command(ranks, ["run", str(engine), "--max-new-tokens", str(_NEW_TOKENS), *prompts])


def _command(ranks: int, words: Sequence[str]) -> dict[str, Any]:
    """Run one of this program's commands on the ranks; its document.

    Raises:
        TokenWeaveError: it failed, or takes too long.
    """
    command = [sys.executable, "-m", "trtllm_tokenweave.cli.entry", *words, "--json"]
    if ranks > 1:
        command = mpirun_command([command] * ranks, MpiOptions())
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env=mpi_environment(), check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TokenWeaveError(f"{words[0]}: no answer within {_SECONDS} s") from error
    errors = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
    if done.returncode or errors:
        raise TokenWeaveError(f"{words[0]}: {errors[0] if errors else f'ended with code {done.returncode}'}")
    try:
        document: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise TokenWeaveError(f"{words[0]}: it put out no JSON document") from error
    return document
