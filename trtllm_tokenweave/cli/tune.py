"""`trtllm-tokenweave tune`: measure which split and launch configuration each step size should have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trtllm_tokenweave.atomic import check_target
from trtllm_tokenweave.checkpoint import open_checkpoint
from trtllm_tokenweave.cli.bench import numbers
from trtllm_tokenweave.cli.table import print_json
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.model_config import preset as model_preset
from trtllm_tokenweave.schedule import DEFAULT_GRANULARITY, MAX_NUM_TOKENS
from trtllm_tokenweave.table.launch import CLUSTER, MAX_CTAS, MAX_GEMM_SMS
from trtllm_tokenweave.tune.candidates import CTAS, FUSE_CTAS, Space

DEFAULT_PRESET = "llama-3.3-70b"


def tune(
    preset: Annotated[str, typer.Option(help="Model shape; llama-3.3-70b by default.")] = "",
    checkpoint: Annotated[Path | None, typer.Option(help="GGUF file, Hugging Face or TensorRT-LLM folder.")] = None,
    dtype: Annotated[str, typer.Option(help="dtype of the model; default: its own.")] = "",
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="OUT", help="The table to write.")] = None,
    tokens: Annotated[str, typer.Option(metavar="START:STOP:STEP", help="Token counts.")] = "1024:8192:256",
    budget_seconds: Annotated[float, typer.Option(min=1, help="Most seconds, engines included.")] = 285,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the tuning engine.")] = 4,
    keys: Annotated[int, typer.Option(min=1, help="Keys of its attention stand-in.")] = 2048,
    ctas: Annotated[str, typer.Option(help="CTAs beside the other half's work.")] = ",".join(map(str, CTAS)),
    fuse_ctas: Annotated[str, typer.Option(help="CTAs of fuse-only steps.")] = ",".join(map(str, FUSE_CTAS)),
    gemm: Annotated[
        str, typer.Option(help="GEMMs beside a collective: trt, or budget (cuBLAS's, which keep off its SMs).")
    ] = "budget",
    gemm_sms: Annotated[str, typer.Option(help="With budget: SM targets; default: what the collective leaves.")] = "",
    mode: Annotated[str, typer.Option(help="How steps run: eager or graph.")] = "eager",
    symmetric: Annotated[bool, typer.Option(help="Activations in symmetric memory, else collectives copy.")] = True,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Measure every candidate.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Throw away what an unfinished run measured.")] = False,
    timing_cache: Annotated[Path | None, typer.Option(metavar="FOLDER", help="TensorRT's timing caches.")] = None,
    table: Annotated[Path | None, typer.Option(metavar="FILE", help="Check this table; none is tuned.")] = None,
    check: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Compare the table with an exhaustive sweep; write it here.")
    ] = None,
    held_out: Annotated[str, typer.Option(metavar="N,N...", help="Token counts of --check.")] = "",
    jitter: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Compare even and tuned split by token count; write it here.")
    ] = None,
    jitter_tokens: Annotated[str, typer.Option(metavar="START:STOP:STEP", help="Of --jitter.")] = "1024:8192:64",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Tune a table for a model on this machine's GPUs: run it under mpirun, one process a GPU.

    A run that was stopped goes on where it was: its samples are beside the output. --check and --jitter measure the
    table of this run, or that of --table.
    """
    _check_outputs(output, table, (check, jitter))
    name, config = _model(preset, checkpoint, dtype)
    space = _space(ctas, fuse_ctas, gemm_sms, budget=_one_of(gemm, ("trt", "budget"), "--gemm") == "budget")
    counts = token_range(tokens, "--tokens")
    wrong = [n for n in counts if n % DEFAULT_GRANULARITY]
    if wrong:
        what = f"{wrong[0]} is not a multiple of {DEFAULT_GRANULARITY}"
        raise UserError(what, where="--tokens", fix="rows of a table end on its granularity")
    jittered = token_range(jitter_tokens, "--jitter-tokens")
    from trtllm_tokenweave.tune.run import TuneArguments, run_tune

    document = run_tune(
        TuneArguments(
            model=name,
            config=config,
            layers=layers,
            keys=keys,
            counts=counts,
            space=space,
            gemm="budget" if gemm == "budget" else "trt",
            symmetric=symmetric,
            mode="graph" if _one_of(mode, ("eager", "graph"), "--mode") == "graph" else "eager",
            budget_seconds=budget_seconds,
            exhaustive=exhaustive,
            output=output,
            table=table,
            check=check,
            held_out=numbers(held_out, "--held-out") if held_out else (),
            jitter=jitter,
            jitter_counts=jittered,
            restart=restart,
            timing_cache=timing_cache,
        )
    )
    if document is not None:
        _finish(document, as_json)


def _check_outputs(output: Path | None, table: Path | None, others: tuple[Path | None, ...]) -> None:
    if output is None and table is None:
        raise UserError("there is nothing to do", where="tune", fix="give -o OUT to tune, or --table FILE to check")
    if output is not None and table is not None:
        raise UserError("a table is given, and none is tuned", where="--output", fix="leave out one of them")
    if table is not None and others == (None, None):
        raise UserError("is to be measured, but not how", where="--table", fix="give --check JSON or --jitter JSON")
    files = [path for path in (output, table, *others) if path is not None]
    for path in files:
        if path != table:
            check_target(path)
        if files.count(path) > 1:
            raise UserError("two options name this file", where=str(path), fix="give each a file of its own")


def _model(preset: str, checkpoint: Path | None, dtype: str) -> tuple[str, ModelConfig]:
    if preset and checkpoint is not None:
        raise UserError("give one of --preset and --checkpoint", where="tune")
    if checkpoint is not None:
        name, config = checkpoint.name, open_checkpoint(checkpoint).config
    else:
        name = preset or DEFAULT_PRESET
        config = model_preset(name)
    if dtype:
        known: tuple[Literal["bfloat16"], Literal["float16"]] = ("bfloat16", "float16")
        config = config.model_copy(update={"dtype": _one_of(dtype, known, "--dtype")})
    return name, config


def _space(ctas: str, fuse_ctas: str, gemm_sms: str, *, budget: bool) -> Space:
    if gemm_sms and not budget:
        raise UserError("TensorRT's own GEMMs have no target", where="--gemm-sms", fix="leave it out, or --gemm budget")
    return Space(
        ctas=_ctas(ctas, "--ctas"),
        fuse_ctas=_ctas(fuse_ctas, "--fuse-ctas"),
        gemm_sms=_ctas(gemm_sms, "--gemm-sms", MAX_GEMM_SMS) if gemm_sms else (0,),
    )


def _ctas(text: str, option: str, most: int = MAX_CTAS) -> tuple[int, ...]:
    values = tuple(sorted(set(numbers(text, option))))
    odd = [n for n in values if n % CLUSTER or n > most]
    if odd:
        what = f"{odd[0]} is not an even number up to {most}"
        raise UserError(what, where=option, fix="collectives and GEMMs launch in clusters of 2")
    return values


def _one_of(value: str, known: tuple[str, ...], option: str) -> str:
    if value not in known:
        raise UserError(f"{value!r} is unknown", where=option, fix=f"choose one of {', '.join(known)}")
    return value


def token_range(text: str, option: str) -> tuple[int, ...]:
    """Token counts of START:STOP:STEP, STOP included, or of a comma-separated list.

    Raises:
        UserError: neither, or a count outside of 1 to `schedule.MAX_NUM_TOKENS`.
    """
    if ":" not in text:
        counts: Sequence[int] = sorted(set(numbers(text, option)))
    else:
        try:
            start, stop, step = (int(part) for part in text.split(":"))
        except ValueError:
            start, stop, step = 0, 0, 0
        if min(start, stop, step) < 1 or stop < start:
            raise UserError(f"{text!r} is no range", where=option, fix="write START:STOP:STEP, as 512:1024:256")
        counts = range(start, stop + 1, step)
    if counts[-1] > MAX_NUM_TOKENS:
        raise UserError(f"{counts[-1]} is above {MAX_NUM_TOKENS}", where=option, fix="give smaller counts")
    return tuple(counts)


def _finish(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    for path in document["written"]:
        print(f"wrote {path}")
