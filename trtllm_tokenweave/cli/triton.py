"""`trtllm-tokenweave triton`: make model repositories and start Triton servers under mpirun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trtllm_tokenweave.cli.mpi_run import DryRun, Forward, Mpirun, MpirunArgument, Preload, Ranks, StopSeconds
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.launch import MpiOptions, forwarded
from trtllm_tokenweave.triton.launch import ServerOptions, launch
from trtllm_tokenweave.triton.repository import (
    CONTAINER_TEMPLATES,
    check_characters,
    fill_templates,
    set_values,
    write_repository,
)
from trtllm_tokenweave.triton.settings import Settings
from trtllm_tokenweave.triton.source import check_source, what_serves

app = typer.Typer(no_args_is_help=True, help="Make model repositories and start Triton servers under mpirun.")

_Repository = Annotated[Path, typer.Argument(metavar="REPOSITORY", help="Folder of the model repository.")]
_Streaming = Annotated[bool, typer.Option(help="Decoupled mode: a response a piece of text.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_DEFAULT = Settings()


@app.command("repo")
def repo(
    repository: _Repository,
    engine: Annotated[Path | None, typer.Option(help="Folder that trtllm-tokenweave build made.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Without engines, on the CPU interpreter; default: SmolLM2-135M.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Hugging Face folder, where the engine has none.")] = None,
    streaming: _Streaming = True,
    chat_template: Annotated[bool, typer.Option(help="Put the model's chat template around each text.")] = False,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens generated for requests that do not say it.")
    ] = _DEFAULT.max_tokens,
    max_batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences in flight (interpreter).")
    ] = _DEFAULT.max_batch_size,
    max_num_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a step (interpreter).")
    ] = _DEFAULT.max_num_tokens,
    max_seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a sequence (interpreter).")] = _DEFAULT.max_seq_len,
    rank_timeout_seconds: Annotated[
        float, typer.Option(min=1, help="How long a rank that does not answer is waited for.")
    ] = _DEFAULT.rank_timeout_seconds,
    as_json: _AsJson = False,
) -> None:
    """Make a repository whose model tokenweave serves without TensorRT-LLM."""
    if engine is not None and checkpoint is not None:
        raise UserError("goes without --checkpoint", where="--engine")
    for option, path in (("--engine", engine), ("--checkpoint", checkpoint), ("--tokenizer", tokenizer)):
        if path is None:
            continue
        if not path.exists():
            raise UserError("does not exist", where=f"{option} {path}")
        check_characters(str(path.resolve()), f"{option} ")
    settings = Settings(
        engine_dir=engine,
        checkpoint=checkpoint,
        tokenizer_dir=tokenizer,
        chat_template=chat_template,
        max_tokens=max_tokens,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        rank_timeout_seconds=rank_timeout_seconds,
    )
    check_source(settings)
    write_repository(repository, settings, streaming=streaming)
    _say(repository, what_serves(settings), [], as_json)


@app.command("fill")
def fill(
    repository: _Repository,
    engine: Annotated[Path, typer.Option(help="Folder that trtllm-build wrote.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the Hugging Face tokenizer.")],
    templates: Annotated[
        Path, typer.Option(help="TensorRT-LLM's all_models/inflight_batcher_llm, of the installed version.")
    ] = CONTAINER_TEMPLATES,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A placeholder's value.")
    ] = None,
    streaming: _Streaming = True,
    as_json: _AsJson = False,
) -> None:
    """Make a repository for TensorRT-LLM's backend from its templates."""
    left = fill_templates(repository, templates, engine, tokenizer, set_values(set_ or []), streaming=streaming)
    _say(repository, f"the engine {engine} by TensorRT-LLM's backend", left, as_json)


def _say(repository: Path, serves: str, left: list[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"repository": str(repository), "serves": serves, "left": left}))
        return
    print(f"wrote {repository}, which serves {serves}")
    if left:
        print(f"left to the backend's defaults: {', '.join(left)}")


@app.command("launch")
def launch_(
    repository: _Repository,
    ranks: Ranks = 1,
    tritonserver: Annotated[str, typer.Option(help="The server; default: on PATH, or the container's.")] = "",
    address: Annotated[str, typer.Option(help="Where rank 0 listens; 0.0.0.0: everywhere.")] = ServerOptions.address,
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = ServerOptions.http_port,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535)] = ServerOptions.grpc_port,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535)] = ServerOptions.metrics_port,
    rank_model: Annotated[list[str] | None, typer.Option(help="A model that all ranks load.")] = None,
    server_arg: Annotated[list[str] | None, typer.Option(help="An argument of every tritonserver.")] = None,
    preload: Preload = None,
    no_preload: Annotated[bool, typer.Option("--no-preload", help="Load no library first.")] = False,
    x: Forward = None,
    mpirun: Mpirun = "mpirun",
    mpirun_arg: MpirunArgument = None,
    ready_seconds: Annotated[float, typer.Option(min=0, help="How long until the server must be ready.")] = (
        ServerOptions.ready_seconds
    ),
    stop_seconds: StopSeconds = ServerOptions.stop_seconds,
    dry_run: DryRun = False,
) -> None:
    """Start one Triton server a rank, and wait for their end; SIGINT and SIGTERM stop them."""
    if preload is not None and no_preload:
        raise UserError("goes without --no-preload", where=f"--preload {preload}", fix="give one of the two")
    mpi = MpiOptions(mpirun=mpirun, forward=forwarded(x or ()), arguments=tuple(mpirun_arg or ()))
    options = ServerOptions(
        ranks=ranks,
        repository=repository,
        tritonserver=tritonserver,
        address=address,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        rank_models=tuple(rank_model or ()),
        arguments=tuple(server_arg or ()),
        preload=preload,
        use_preload=not no_preload,
        ready_seconds=ready_seconds,
        stop_seconds=stop_seconds,
        mpi=mpi,
    )
    launch(options, dry_run=dry_run)
