"""What `trtllm-tokenweave bench e2e` does around the measurement: its arguments, its ranks, its document."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_tokenweave.bench.e2e import VARIANTS, E2eBench, measure_e2e
from trtllm_tokenweave.comm import MpiComm
from trtllm_tokenweave.config import read_environment
from trtllm_tokenweave.decoder import check_attention, check_table, register_decoder_plugins
from trtllm_tokenweave.device import current_gpu, use_device
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.passes import WeaveOptions
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableRow, TuningTable, load_table
from trtllm_tokenweave.waves import default_table

#: Rows of the vocabulary that are kept: the head works on one token, and its weights would be built into each engine.
VOCABULARY = 8192


@dataclass(frozen=True)
class E2eArguments:
    """The command's options; ``table`` None: splits are tried at ``offsets``, with ``ctas`` CTAs a collective.

    ``timing_cache`` is a folder of TensorRT's timings that is kept, or None.
    """

    preset: str
    layers: int
    tokens: tuple[int, ...]
    table: Path | None
    offsets: tuple[int, ...]
    ctas: int
    engines: tuple[str, ...] = VARIANTS
    timing_cache: Path | None = None


def read_bench(arguments: E2eArguments, mapping: Mapping) -> E2eBench:
    """What the options ask for.

    Raises:
        UserError: options that do not fit.
    """
    config = preset(arguments.preset)
    if arguments.layers > config.num_hidden_layers:
        raise UserError(f"{arguments.layers}, but the model has {config.num_hidden_layers}", where="--layers")
    variants = tuple(variant for variant in VARIANTS if variant in arguments.engines)
    if len(variants) != len(arguments.engines) or "stock" not in variants:
        what, fix = f"{','.join(arguments.engines)} is no list with stock in it", f"choose of {','.join(VARIANTS)}"
        raise UserError(what, where="--engines", fix=fix)
    most = max(arguments.tokens)
    if most > config.max_position_embeddings:
        raise UserError(f"{most} is above the model's {config.max_position_embeddings} positions", where="--tokens")
    sizes = {"num_hidden_layers": arguments.layers, "vocab_size": min(config.vocab_size, VOCABULARY)}
    config = config.model_copy(update=sizes)
    config.local(mapping.tp_size)
    check_attention(config)
    if arguments.table is None:
        launch = LaunchConfig(ctas=arguments.ctas)
        row = TableRow(tokens=Bucket(lo=1), mode="weave", attention=launch, mlp=launch)
        table: TuningTable = default_table(config, mapping.tp_size).model_copy(update={"rows": (row,)})
        offsets: tuple[int, ...] | None = arguments.offsets
    else:
        table, offsets = load_table(arguments.table), None
        check_table(table, config, mapping.tp_size, str(arguments.table))
    return E2eBench(config, WeaveOptions(mapping, table, 1, most), arguments.tokens, offsets, variants)


def check_arguments(arguments: E2eArguments) -> None:
    """Refuse options that do not fit before there has to be a GPU; without mpirun, as for the table's ranks, or one.

    Raises:
        UserError: as `read_bench`.
    """
    launcher = read_environment().launcher
    if launcher is not None:
        size = launcher.size
    else:
        size = 1 if arguments.table is None else load_table(arguments.table).key.tp_size
    read_bench(arguments, Mapping(size, 0, size))


def run_e2e(arguments: E2eArguments) -> dict[str, Any] | None:
    """Measure on the ranks that mpirun started; the document on rank 0, None on the others.

    Raises:
        UserError: options that do not fit, or a machine that cannot do it.
    """
    from trtllm_tokenweave.bench.stack_run import origin  # needs torch

    launcher = read_environment().needed_ranks("bench e2e")
    bench = read_bench(arguments, Mapping(launcher.size, launcher.rank, launcher.size))
    gpu = current_gpu()
    comm = MpiComm()
    use_device(comm.rank)
    register_decoder_plugins(comm.size)
    if arguments.timing_cache is not None:
        arguments.timing_cache.mkdir(parents=True, exist_ok=True)
    document = measure_e2e(bench, comm, arguments.timing_cache)
    if comm.rank != 0:
        return None
    return {
        **origin(comm, gpu),
        "model": arguments.preset,
        "table": None if arguments.table is None else bench.weave.table.sha256,
        "ctas": None if arguments.table is not None else arguments.ctas,
        **document,
    }
