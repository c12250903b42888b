"""The generator and the tokenizer behind the model `tokenweave`: TensorRT engines, or the CPU interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trtllm_tokenweave.agreement import on_all_ranks
from trtllm_tokenweave.checkpoint import Checkpoint, Tokenizer, open_checkpoint, require_tokenizer, smollm2_gguf
from trtllm_tokenweave.checkpoint.tokenizer import load_folder_tokenizer
from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.runner import GenerationLimits, Generator
from trtllm_tokenweave.triton.settings import Settings


@dataclass(frozen=True)
class Source:
    """What serves requests on one rank."""

    generator: Generator
    tokenizer: Tokenizer
    what: str


def what_serves(settings: Settings) -> str:
    """What `open_source` opens, in words."""
    if settings.engine_dir is not None:
        return f"the engines of {settings.engine_dir}"
    model = "SmolLM2-135M" if settings.checkpoint is None else str(settings.checkpoint)
    return f"{model} on the CPU interpreter (for TensorRT engines: --engine)"


def check_source(settings: Settings) -> None:
    """Refuse, without a GPU, what `open_source` could not load or would serve no request with its default length.

    Raises:
        UserError: a file is missing, damaged or does not fit, or the limits do not fit together.
    """
    if settings.engine_dir is not None:
        limits, fix = _check_engine(settings, settings.engine_dir), "build the engine with a larger --max-seq-len"
    else:
        limits, fix = _interpreter_limits(settings), "raise --max-seq-len"
        if settings.checkpoint is None and settings.tokenizer_dir is None:
            smollm2_gguf()  # it has its tokenizer
        else:
            _checkpoint_and_tokenizer(settings)
    if limits.max_new_tokens >= limits.max_seq_len:
        raise UserError(
            f"{limits.max_new_tokens} leaves no room for a prompt: max_seq_len is {limits.max_seq_len}",
            where="max_tokens",
            fix=f"lower --max-tokens, or {fix}",
        )


def _check_engine(settings: Settings, folder: Path) -> GenerationLimits:
    from trtllm_tokenweave.decoder import TOKENIZER, DecoderModel
    from trtllm_tokenweave.engine import load_config, manifest_file, plan_file
    from trtllm_tokenweave.engine_runner import engine_limits
    from trtllm_tokenweave.manifest import missing

    config = load_config(folder)
    for rank in range(config.tp_size):
        for path in (manifest_file(folder, rank), plan_file(folder, rank)):
            if not path.is_file():
                raise missing(path)
    model = DecoderModel.of_config(config, folder)
    _folder_tokenizer(settings.tokenizer_dir or folder / TOKENIZER, model.config.vocab_size)
    return engine_limits(model, max_new_tokens=settings.max_tokens)


@contextmanager
def open_source(settings: Settings, comm: CommBackend) -> Iterator[Source]:
    """Load this rank's part of the model; collective over ``comm``, whose time limit is that of loading.

    Yields:
        The source; at the end of the ``with`` what it holds is given back.

    Raises:
        UserError, TokenWeaveError: on all ranks, when a file of one is missing, damaged or does not fit.
    """
    if settings.engine_dir is not None:
        with _open_engine(settings, comm) as source:
            yield source
    else:
        yield on_all_ranks(comm, "loading the checkpoint", lambda: _open_checkpoint(settings, comm))


@contextmanager
def _open_engine(settings: Settings, comm: CommBackend) -> Iterator[Source]:
    from trtllm_tokenweave.decoder import TOKENIZER, DecoderModel, prepare_rank
    from trtllm_tokenweave.engine import Engine
    from trtllm_tokenweave.engine_runner import engine_generator, engine_limits, engine_step

    folder = settings.engine_dir
    assert folder is not None
    place = settings.tokenizer_dir or folder / TOKENIZER
    tokenizer = on_all_ranks(comm, "loading the tokenizer", lambda: _folder_tokenizer(place))
    on_all_ranks(comm, "loading the plugins", lambda: prepare_rank(comm))
    engine = Engine.load(folder, comm)
    model = on_all_ranks(comm, "reading the engine's model", lambda: DecoderModel.of_config(engine.config, folder))
    limits = engine_limits(model, max_new_tokens=settings.max_tokens, eos_ids=tokenizer.eos_ids)
    with engine_step(engine, model, limits) as step:
        yield Source(engine_generator(step, limits), tokenizer, f"engines of {folder}, {engine.manifest.mode}")


def _folder_tokenizer(folder: Path, vocab_size: int | None = None) -> Tokenizer:
    tokenizer = load_folder_tokenizer(folder, vocab_size)
    if tokenizer is None:
        raise UserError(
            "there is no tokenizer.json",
            where=str(folder),
            fix="give the model's Hugging Face folder as --tokenizer (tokenizer_dir)",
        )
    return tokenizer


def _checkpoint_and_tokenizer(settings: Settings) -> tuple[Checkpoint, Tokenizer]:
    checkpoint: Checkpoint = open_checkpoint(settings.checkpoint or smollm2_gguf(), dtype="float32")
    place = settings.tokenizer_dir
    if place is None:
        return checkpoint, require_tokenizer(checkpoint)
    return checkpoint, _folder_tokenizer(place, checkpoint.config.vocab_size)


def _interpreter_limits(settings: Settings, eos_ids: frozenset[int] = frozenset()) -> GenerationLimits:
    return GenerationLimits(
        max_num_tokens=settings.max_num_tokens,
        max_batch_size=settings.max_batch_size,
        max_seq_len=settings.max_seq_len,
        max_new_tokens=settings.max_tokens,
        eos_ids=eos_ids,
    )


def _open_checkpoint(settings: Settings, comm: CommBackend) -> Source:
    """The network as the demo makes it, woven where there are ranks to overlap, run by the CPU interpreter."""
    from trtllm_tokenweave.demo import DemoOptions
    from trtllm_tokenweave.demo.model import demo_table
    from trtllm_tokenweave.interpreter import ExecutionContext
    from trtllm_tokenweave.llama import NetworkOptions, build_llama
    from trtllm_tokenweave.passes import WeaveOptions, weave
    from trtllm_tokenweave.recorder import RecordedNetwork
    from trtllm_tokenweave.runner import make_generator

    checkpoint, tokenizer = _checkpoint_and_tokenizer(settings)
    limits = _interpreter_limits(settings, tokenizer.eos_ids)
    mapping = Mapping(comm.size, comm.rank, comm.size)
    options = NetworkOptions(
        max_batch_size=limits.max_batch_size, max_num_tokens=limits.max_num_tokens, max_seq_len=limits.max_seq_len
    )
    network = RecordedNetwork(checkpoint.source)
    weights = checkpoint.rank_weights(mapping, only_this_rank=comm.size > 1)
    build_llama(network, checkpoint.config, mapping, weights, options)
    mode = "stock"
    if comm.size > 1:
        table = demo_table(checkpoint, DemoOptions(tp_size=comm.size))
        result = weave(network, WeaveOptions(mapping, table, limits.max_batch_size, limits.max_num_tokens))
        mode = result.mode
    context = ExecutionContext(network, comm)
    generator = make_generator([context], checkpoint.config, comm.size, limits)
    return Source(generator, tokenizer, f"{checkpoint.source} on the CPU interpreter, {mode}")
