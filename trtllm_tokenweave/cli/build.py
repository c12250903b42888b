"""`trtllm-tokenweave build`: a decoder as TensorRT engines, one a rank."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from pydantic import ValidationError

from trtllm_tokenweave.agreement import on_all_ranks
from trtllm_tokenweave.atomic import check_folder
from trtllm_tokenweave.builder import Plan
from trtllm_tokenweave.checkpoint import Checkpoint, RankWeights, open_checkpoint
from trtllm_tokenweave.cli.ranks import Progress, rank_count, start_ranks
from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.decoder import (
    TOKENIZER,
    DecoderBuild,
    build_decoder,
    check_attention,
    check_table,
    describe,
)
from trtllm_tokenweave.engine import save_engine
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.llama import NetworkOptions, weight_specs
from trtllm_tokenweave.llama.weights import replicated, window_weights
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.model_config import preset as model_preset
from trtllm_tokenweave.passes import WeaveMode, WeaveOptions
from trtllm_tokenweave.runner import GenerationLimits
from trtllm_tokenweave.table import TuningTable, load_table
from trtllm_tokenweave.table.files import table_error
from trtllm_tokenweave.table.shipped import choose_table, this_machine
from trtllm_tokenweave.waves import default_table


@dataclass(frozen=True)
class Model:
    """What to build: its shape, and a checkpoint or None for random weights."""

    config: ModelConfig
    checkpoint: Checkpoint | None
    source: str

    def weights(self, mapping: Mapping) -> RankWeights:
        """One rank's."""
        if self.checkpoint is not None:
            return self.checkpoint.rank_weights(mapping, only_this_rank=True)
        return window_weights(weight_specs(self.config, mapping), mapping, replicated(self.config, mapping))


def build(
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL]", help="GGUF file, Hugging Face or TensorRT-LLM folder.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="DIR", help="Folder of the engines.")] = None,
    preset: Annotated[str, typer.Option(help="Model shape with random weights instead, as llama-3.3-70b.")] = "",
    layers: Annotated[int | None, typer.Option(min=1, help="Build the first N decoder layers only.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float16 or bfloat16; default: the model's, bfloat16 for float32.")
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Ranks: as many as mpirun starts, 1 without it.")] = None,
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tuning table; default: a shipped one, else the default rule.")
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option(min=1, help="Steps below are not split; default: the table's.")
    ] = None,
    mode: Annotated[str, typer.Option(help="weave, fuse (no split) or stock.")] = "weave",
    split_attention: Annotated[bool, typer.Option(help="Cut attention too.")] = True,
    gemm: Annotated[
        str, typer.Option(help="GEMMs beside a collective: trt, budget (our plugin), or what the table asks for.")
    ] = "table",
    max_batch_size: Annotated[int, typer.Option(help="Most sequences of a step.")] = 8,
    max_num_tokens: Annotated[int, typer.Option(help="Most tokens of a step.")] = 8192,
    max_seq_len: Annotated[
        int | None, typer.Option(help="Longest sequence, prompt and new tokens; default: 2048, or the model's.")
    ] = None,
    tokens_per_block: Annotated[int, typer.Option(help="Tokens of a block of the KV cache.")] = 32,
    multiple_profiles: Annotated[
        bool, typer.Option("--multiple-profiles", help="Let TensorRT pick kernels for generation steps, too.")
    ] = False,
    timing_cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep TensorRT's timings here: the next build is quicker.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Build a model as TensorRT engines, woven; under mpirun one for each rank."""
    size = rank_count(tp)
    if output is None:
        raise UserError("is missing", where="--output", fix="name the folder for the engines: -o DIR")
    check_folder(output)
    if timing_cache is not None:
        check_folder(timing_cache)
    if mode not in ("weave", "fuse", "stock"):
        raise UserError(f"{mode!r} is neither weave, fuse nor stock", where="--mode")
    if gemm not in ("table", "trt", "budget"):
        raise UserError(f"{gemm!r} is neither table, trt nor budget", where="--gemm")
    source = open_model(model, preset, layers, dtype)
    config = source.config
    config.local(size)
    check_attention(config)
    longest = min(2048, config.max_position_embeddings) if max_seq_len is None else max_seq_len
    limits = NetworkOptions(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=longest,
        tokens_per_block=tokens_per_block,
    )
    if longest > config.max_position_embeddings:
        raise UserError(f"{longest} is above the model's {config.max_position_embeddings}", where="--max-seq-len")
    GenerationLimits(max_num_tokens, max_batch_size, longest, tokens_per_block=tokens_per_block)  # refuses misfits
    read_table(table, config, size, min_tokens)  # refuses misfits

    comm = start_ranks()
    progress = Progress(comm)
    chosen = on_all_ranks(comm, "table", lambda: choose_table(config, size, this_machine(), given=table))
    progress.say(chosen.said)
    tuning = with_threshold(chosen.table, min_tokens)
    mapping = Mapping(size, comm.rank, size)
    progress.say(f"reading {source.source}")
    weights = on_all_ranks(comm, "weights", lambda: source.weights(mapping))
    options = WeaveOptions(
        mapping,
        tuning,
        max_batch_size,
        max_num_tokens,
        split_attention=split_attention,
        gemm=cast("Literal['table', 'trt', 'budget']", gemm),
    )
    progress.say(f"building for {size} ranks: rank 0 first, the others use its timings")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        timings = Path(folder) if timing_cache is None else timing_cache
        timings.mkdir(parents=True, exist_ok=True)
        job = DecoderBuild(
            config,
            weights,
            limits,
            options,
            cast("WeaveMode", mode),
            timings / f"timing{comm.rank}.cache",
            progress.say_of_rank,
            multiple_profiles,
        )
        plan = build_decoder(job, comm)
    seconds = time.perf_counter() - started
    if beyond := plan.result.plan.beyond_rows():
        progress.say(f"table: {beyond}")
    progress.say("saving")
    described = describe(job, plan, source.source)
    save_engine(plan, output, comm, described.model_dump(mode="json"))
    on_all_ranks(comm, "saving the tokenizer", lambda: save_tokenizer(source, output, comm))
    if comm.rank == 0:
        document = report(plan, output, seconds) | {"refused": list(described.refused)}
        print(json.dumps(document)) if as_json else show(document)


def open_model(path: Path | None, preset: str, layers: int | None, dtype: str | None) -> Model:
    """The model that the options name, cut to its first ``layers`` layers.

    Raises:
        UserError: the options name none or two, or one that is not served.
    """
    if (path is None) == (not preset):
        fix = "name a checkpoint, or a shape with random weights: --preset llama-3.3-70b"
        raise UserError("give one of MODEL and --preset", where="build", fix=fix)
    checkpoint: Checkpoint | None = None
    if path is None:
        config, source = model_preset(preset).with_dtype(dtype), f"random weights of {preset}"
    else:
        # GGUF files have no dtype of their own.
        checkpoint = open_checkpoint(path, dtype="bfloat16" if dtype is None and path.is_file() else dtype)
        if dtype is None and checkpoint.config.dtype == "float32":
            checkpoint = open_checkpoint(path, dtype="bfloat16")
        config, source = checkpoint.config, checkpoint.source
    if layers is not None:
        if layers > config.num_hidden_layers:
            raise UserError(f"{layers}, but the model has {config.num_hidden_layers}", where="--layers")
        config = config.model_copy(update={"num_hidden_layers": layers})
    return Model(config, checkpoint, source)


def read_table(path: Path | None, config: ModelConfig, tp_size: int, min_tokens: int | None) -> TuningTable:
    """The table of a file, or the default rule's; with another threshold where that is given.

    Raises:
        UserError: it is no table, or one of another model or number of ranks.
    """
    table = default_table(config, tp_size) if path is None else load_table(path)
    if path is not None:
        check_table(table, config, tp_size, str(path))
    return with_threshold(table, min_tokens)


def with_threshold(table: TuningTable, min_tokens: int | None) -> TuningTable:
    """The table with another ``min_tokens``, where that is given.

    Raises:
        UserError: no table can have it.
    """
    if min_tokens is None:
        return table
    try:
        return TuningTable.model_validate(table.model_dump() | {"min_tokens": min_tokens})
    except ValidationError as error:
        raise table_error(error, "--min-tokens") from error


def save_tokenizer(model: Model, folder: Path, comm: CommBackend) -> None:
    """Write the model's tokenizer beside the engines, where it has one; rank 0 does it."""
    tokenizer = model.checkpoint.tokenizer() if model.checkpoint is not None and comm.rank == 0 else None
    if tokenizer is not None:
        tokenizer.save(folder / TOKENIZER)


def report(plan: Plan, folder: Path, seconds: float) -> dict[str, Any]:
    """What was built, as plain data."""
    woven = plan.result.plan
    return {
        "folder": str(folder),
        "tp_size": woven.options.mapping.tp_size,
        "mode": plan.result.mode,
        "sites": len(woven.sites),
        "attention": woven.region.attention if woven.region is not None else None,
        "plan_bytes": plan.report.plan_bytes,
        "memory_bytes": plan.report.memory_bytes,
        "seconds": round(seconds, 1),
        "checks": [str(check) for check in plan.report.checks],
    }


def show(document: dict[str, Any]) -> None:
    """Print what was built."""
    gib = 2**30
    print(
        f"{document['folder']}: {document['mode']}, {document['sites']} sites fused, tp_size {document['tp_size']}; "
        f"engine {document['plan_bytes'] / gib:.2f} GiB, activations {document['memory_bytes'] / gib:.2f} GiB a rank"
    )
    for reason in document["refused"]:
        print(f"left as it was: {reason}")
    for check in document["checks"]:
        print(check)
