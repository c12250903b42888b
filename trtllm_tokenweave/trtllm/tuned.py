"""``--tokenweave_tune``: a table measured on this machine's GPUs before the build, by ``trtllm-tokenweave tune``."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trtllm_tokenweave.checkpoint.config_files import read_trtllm_config
from trtllm_tokenweave.config import mpi_environment, read_environment
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.schedule import DEFAULT_GRANULARITY

#: The table's file, in the engine's folder.
TABLE = "tokenweave_table.json"

_WHERE = "--tokenweave_tune"
_LEAST, _MOST = 1024, 8192


def tuned_table(stock: Sequence[str]) -> Path:
    """Tune a table for the model of a command line, and return its file.

    A tuner is one process a GPU, as the engines' ranks will be; a build is not. So it runs under an mpirun of its own.

    Args:
        stock: The options of ``trtllm-build``.

    Raises:
        UserError: the command line names no checkpoint, the model cannot be tuned, or no mpirun can be started here.
        TokenWeaveError: tuning failed; it has said why.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint_dir", type=Path)
    parser.add_argument("--output_dir", type=Path, default=Path("engine_outputs"))
    parser.add_argument("--max_num_tokens", type=int, default=_MOST)
    given = parser.parse_known_args(list(stock))[0]
    if given.checkpoint_dir is None:
        raise UserError("needs the model", where=_WHERE, fix="give --checkpoint_dir, or a table instead")
    ranks = read_trtllm_config(given.checkpoint_dir / "config.json").tp_size
    if ranks == 1:
        raise UserError("tp_size is 1, so there is nothing to tune", where=_WHERE, fix="leave it out")
    most = min(given.max_num_tokens // DEFAULT_GRANULARITY * DEFAULT_GRANULARITY, _MOST)
    if most < _LEAST:
        what = f"max_num_tokens is {given.max_num_tokens}: steps below {_LEAST} tokens are not split"
        raise UserError(what, where=_WHERE, fix="leave it out, or raise --max_num_tokens")
    folder: Path = given.output_dir
    table = folder / TABLE
    words = ["tune", "--checkpoint", str(given.checkpoint_dir), "-o", str(table)]
    # TensorRT-LLM's runtime keeps activations in memory of its own, not in symmetric memory.
    words += ["--tokens", f"{_LEAST}:{most}:{DEFAULT_GRANULARITY}", "--no-symmetric"]
    by_hand = f"run `mpirun -n {ranks} trtllm-tokenweave {' '.join(words)}` and give --tokenweave_table {table}"
    launcher = read_environment().launcher
    if launcher is not None and launcher.size > 1:
        raise UserError("cannot start ranks below an mpirun", where=_WHERE, fix=by_hand)
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise UserError("mpirun is not installed", where=_WHERE, fix=f"install Open MPI; or elsewhere {by_hand}")
    folder.mkdir(parents=True, exist_ok=True)
    command = [mpirun, "-n", str(ranks), sys.executable, "-m", "trtllm_tokenweave.cli.entry", *words]
    code = subprocess.run(command, env=mpi_environment(), check=False).returncode
    if code:
        raise TokenWeaveError(f"{_WHERE}: tuning failed with exit code {code}")
    return table
