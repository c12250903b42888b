"""What `trtllm-tokenweave bench trace` does around the measurement: its arguments, its ranks, its document."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trtllm_tokenweave.bench.e2e import E2eBench
from trtllm_tokenweave.bench.e2e_run import (
    Keep,
    expected_mapping,
    measured,
    read_engines,
    read_model,
    read_table,
    start_benchmark,
)
from trtllm_tokenweave.bench.trace import make_trace
from trtllm_tokenweave.bench.trace_measure import TraceBench, measure_trace
from trtllm_tokenweave.config import read_environment
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.passes import WeaveOptions

#: Attention that is cut in halves; left whole: "whole".
ENGINES = ("stock", "peer", "fuse_only", "woven", "no_comm")


@dataclass(frozen=True)
class TraceArguments:
    """The command's options.

    ``table`` None: the default rule alone. ``ctas``: of a collective at even splits. ``min_tokens`` None: the table's.
    ``timing_cache`` is a folder of TensorRT's timings that is kept, or None.
    """

    preset: str
    layers: int
    requests: int = 60
    seed: int = 0
    chunks: tuple[int, ...] = (1024, 2048, 4096, 8192)
    max_batch_size: int = 64
    rounds: int = 2
    tail: bool = True
    table: Path | None = None
    ctas: int = 8
    min_tokens: int | None = None
    multiple_profiles: bool = False
    engines: tuple[str, ...] = ENGINES
    timing_cache: Path | None = None


def read_bench(arguments: TraceArguments, mapping: Mapping) -> TraceBench:
    """What the options ask for.

    Raises:
        UserError: options that do not fit.
    """
    config, variants = read_model(arguments.preset, arguments.layers, mapping), read_engines(arguments.engines)
    # The engine without collectives puts out a rank's columns alone, which are no whole vocabulary otherwise.
    columns = config.vocab_size // mapping.tp_size**2 * mapping.tp_size**2
    config = config.model_copy(update={"vocab_size": columns})
    trace, batch = make_trace(arguments.requests, arguments.seed), arguments.max_batch_size
    for budget in arguments.chunks:
        try:
            longest = trace.limits(budget, batch).max_seq_len
        except UserError as error:
            raise UserError(error.what, where="--chunks", fix=error.fix) from None
    if longest > config.max_position_embeddings:
        what = f"a request has {longest} tokens, the model {config.max_position_embeddings} positions"
        raise UserError(what, where="--preset", fix="choose another model: the lengths are those of the trace")
    table = read_table(arguments.table, arguments.ctas, config, mapping)
    if arguments.min_tokens is not None:
        table = table.model_copy(update={"min_tokens": arguments.min_tokens})
    weave = WeaveOptions(mapping, table, batch, max(arguments.chunks))
    if "woven" in variants or "whole" in variants:
        check_splits(weave)
    profiles = arguments.multiple_profiles
    return TraceBench(
        engines=E2eBench(config, weave, variants=variants, max_seq_len=longest, multiple_profiles=profiles),
        trace=trace,
        budgets=arguments.chunks,
        ctas=arguments.ctas,
        tuned=arguments.table is not None,
        rounds=arguments.rounds,
        tail=arguments.tail,
    )


def check_splits(weave: WeaveOptions) -> None:
    """Refuse a table that splits no step, before the engines that differ by it are built.

    Raises:
        UserError: it splits none.
    """
    table, most = weave.table, weave.max_num_tokens
    if not table.prefix_lookup(weave.max_batch_size, most).splits:
        what = f"no step of up to {most} tokens is split, as the table says (from {table.min_tokens} tokens on)"
        fix = "raise it, lower --min-tokens, or leave woven and whole out of --engines"
        raise UserError(what, where="--chunks", fix=fix)


def check_arguments(arguments: TraceArguments) -> None:
    """Refuse options that do not fit before there has to be a GPU.

    Raises:
        UserError: as `read_bench`.
    """
    read_bench(arguments, expected_mapping(arguments.table))


def run_trace(arguments: TraceArguments, keep: Keep = lambda _document: None) -> dict[str, Any] | None:
    """Measure on the ranks that mpirun started; the document on rank 0, None on the others.

    Args:
        arguments: The command's options.
        keep: Called on rank 0 with the document so far, whenever a budget is done.

    Raises:
        UserError: options that do not fit, or a machine that cannot do it.
    """
    from trtllm_tokenweave.bench.stack_run import origin  # needs torch

    launcher = read_environment().needed_ranks("bench trace")
    bench = read_bench(arguments, Mapping(launcher.size, launcher.rank, launcher.size))
    comm, gpu = start_benchmark(launcher, arguments.timing_cache)

    def whole(document: dict[str, Any]) -> dict[str, Any]:
        table = None if arguments.table is None else bench.engines.weave.table.sha256
        return {**origin(comm, gpu), "model": arguments.preset, "table": table, "ctas": arguments.ctas, **document}

    return measured(comm, partial(measure_trace, bench, comm, arguments.timing_cache), whole, keep)
