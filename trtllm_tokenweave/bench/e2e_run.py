"""What `trtllm-tokenweave bench e2e` does around the measurement: its arguments, its ranks, its document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trtllm_tokenweave.bench.e2e import VARIANTS, E2eBench, Variant, measure_e2e
from trtllm_tokenweave.comm import CommBackend, MpiComm
from trtllm_tokenweave.config import Launcher, prepare_benchmark, read_environment
from trtllm_tokenweave.decoder import check_attention, check_table, register_decoder_plugins
from trtllm_tokenweave.device import Gpu, current_gpu, use_device
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig, preset
from trtllm_tokenweave.passes import WeaveOptions
from trtllm_tokenweave.plugin_library import register_reference
from trtllm_tokenweave.recorder.trtllm_plugins import GEMM
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableRow, TuningTable, load_table
from trtllm_tokenweave.waves import default_table

#: Rows of the vocabulary that are kept: the head works on one token, and its weights would be built into each engine.
VOCABULARY = 8192


#: Is told a document so far.
Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class E2eArguments:
    """The command's options; ``table`` None: splits are tried at ``offsets``. ``ctas``: tried for the even split.

    ``timing_cache`` is a folder of TensorRT's timings that is kept, or None.
    """

    preset: str
    layers: int
    tokens: tuple[int, ...]
    table: Path | None
    offsets: tuple[int, ...]
    ctas: tuple[int, ...]
    engines: tuple[str, ...] = VARIANTS
    timing_cache: Path | None = None
    gemm_plugin: bool = False


def read_bench(arguments: E2eArguments, mapping: Mapping) -> E2eBench:
    """What the options ask for.

    Raises:
        UserError: options that do not fit.
    """
    config, variants = read_model(arguments.preset, arguments.layers, mapping), read_engines(arguments.engines)
    most = max(arguments.tokens)
    if most > config.max_position_embeddings:
        raise UserError(f"{most} is above the model's {config.max_position_embeddings} positions", where="--tokens")
    table = read_table(arguments.table, arguments.ctas[0], config, mapping)
    offsets = arguments.offsets if arguments.table is None else None
    options = WeaveOptions(mapping, table, 1, most)
    return E2eBench(
        config, options, arguments.tokens, offsets, arguments.ctas, variants, gemm_plugin=arguments.gemm_plugin
    )


def read_model(name: str, layers: int, mapping: Mapping) -> ModelConfig:
    """The first layers of a preset, with a small vocabulary.

    Raises:
        UserError: there is none of that name, or it has fewer layers, or cannot be run on so many ranks.
    """
    config = preset(name)
    if layers > config.num_hidden_layers:
        raise UserError(f"{layers}, but the model has {config.num_hidden_layers}", where="--layers")
    config = config.model_copy(update={"num_hidden_layers": layers, "vocab_size": min(config.vocab_size, VOCABULARY)})
    config.local(mapping.tp_size)
    check_attention(config)
    return config


def read_engines(names: tuple[str, ...]) -> tuple[Variant, ...]:
    """The engines to build, in order.

    Raises:
        UserError: one is unknown or named twice, or the stock engine is not among them.
    """
    variants = tuple(variant for variant in VARIANTS if variant in names)
    if len(variants) != len(names) or "stock" not in variants:
        what, fix = f"{','.join(names)} is no list with stock in it", f"choose of {','.join(VARIANTS)}"
        raise UserError(what, where="--engines", fix=fix)
    return variants


def read_table(file: Path | None, ctas: int, config: ModelConfig, mapping: Mapping) -> TuningTable:
    """The table in a file, else the default rule with so many CTAs a collective.

    Raises:
        UserError: the file cannot be read, or is for another model or number of ranks.
    """
    if file is None:
        launch = LaunchConfig(ctas=ctas)
        row = TableRow(tokens=Bucket(lo=1), mode="weave", attention=launch, mlp=launch)
        return default_table(config, mapping.tp_size).model_copy(update={"rows": (row,)})
    table = load_table(file)
    check_table(table, config, mapping.tp_size, str(file))
    return table


def expected_mapping(table: Path | None) -> Mapping:
    """What options are checked with before there has to be a GPU: mpirun's ranks, else the table's, or one.

    Raises:
        UserError: the table cannot be read.
    """
    launcher = read_environment().launcher
    if launcher is not None:
        size = launcher.size
    else:
        size = 1 if table is None else load_table(table).key.tp_size
    return Mapping(size, 0, size)


def check_arguments(arguments: E2eArguments) -> None:
    """Refuse options that do not fit before there has to be a GPU.

    Raises:
        UserError: as `read_bench`.
    """
    read_bench(arguments, expected_mapping(arguments.table))


def start_benchmark(launcher: Launcher, timing_cache: Path | None) -> tuple[CommBackend, Gpu]:
    """Meet the other ranks, with plugins registered and the folder of timings made.

    Raises:
        UserError: there is no GPU for this rank, or no library, or the environment replaces the launches.
    """
    read_environment().check_launch()
    prepare_benchmark()
    gpu = current_gpu()
    comm = MpiComm()
    use_device(comm.rank)
    register_decoder_plugins(launcher.size)
    if timing_cache is not None:
        timing_cache.mkdir(parents=True, exist_ok=True)
    return comm, gpu


def measured(
    comm: CommBackend,
    measure: Callable[[Keep], dict[str, Any]],
    whole: Callable[[dict[str, Any]], dict[str, Any]],
    keep: Keep,
) -> dict[str, Any] | None:
    """What ``measure`` returns, made ``whole``, on rank 0, None on the others; so is what it keeps on the way."""

    def keep_on_rank_0(document: dict[str, Any]) -> None:
        if comm.rank == 0:
            keep(whole(document))

    document = measure(keep_on_rank_0)
    return whole(document) if comm.rank == 0 else None


def run_e2e(arguments: E2eArguments, keep: Keep = lambda _document: None) -> dict[str, Any] | None:
    """Measure on the ranks that mpirun started; the document on rank 0, None on the others.

    Args:
        arguments: The command's options.
        keep: Called on rank 0 with the document so far, whenever a token count is done.

    Raises:
        UserError: options that do not fit, or a machine that cannot do it.
    """
    from trtllm_tokenweave.bench.stack_run import origin  # needs torch

    launcher = read_environment().needed_ranks("bench e2e")
    bench = read_bench(arguments, Mapping(launcher.size, launcher.rank, launcher.size))
    comm, gpu = start_benchmark(launcher, arguments.timing_cache)
    if arguments.gemm_plugin:
        register_reference(GEMM[0])

    def whole(document: dict[str, Any]) -> dict[str, Any]:
        table = None if arguments.table is None else bench.weave.table.sha256
        return {**origin(comm, gpu), "model": arguments.preset, "table": table, **document}

    return measured(comm, partial(measure_e2e, bench, comm, arguments.timing_cache), whole, keep)
