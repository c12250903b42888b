"""What `trtllm-tokenweave bench stack` does around the measurement: its arguments, its ranks, its document."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from trtllm_tokenweave.bench.kernel import command, machine
from trtllm_tokenweave.bench.stack import StackBench, measure_stack
from trtllm_tokenweave.bench.stack_network import Gemm, Stack
from trtllm_tokenweave.comm import CommBackend, MpiComm
from trtllm_tokenweave.config import prepare_benchmark, read_environment
from trtllm_tokenweave.device import Gpu, current_gpu, use_device
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.passes import WeaveOptions
from trtllm_tokenweave.plugin_library import plugin_library, register_reference
from trtllm_tokenweave.table import TableRow, default_table
from trtllm_tokenweave.table.shipped import choose_table, this_machine
from trtllm_tokenweave.tensorrt_module import tensorrt
from trtllm_tokenweave.waves import table_key


@dataclass(frozen=True)
class StackArguments:
    """The command's options; ``row`` is the one row of the engines' table, unless ``table`` names another."""

    preset: str
    layers: int
    tokens: tuple[int, ...]
    gemms: tuple[str, ...]
    row: TableRow
    sweep_ctas: tuple[int, ...]
    symmetric: bool
    table: Path | None = None
    timing_cache: Path | None = None


def origin(comm: CommBackend, gpu: Gpu) -> dict[str, Any]:
    """The command and the machine, as results hold them."""
    versions = {"tensorrt": str(tensorrt().__version__), "cuda_driver": gpu.driver}
    return {"command": f"mpirun -n {comm.size} {command()}", "machine": machine() | versions}


def run_stack(arguments: StackArguments) -> dict[str, Any] | None:
    """Measure on the ranks that mpirun started; the document on rank 0, None on the others.

    Raises:
        UserError: options that do not fit, or a machine that cannot do it.
    """
    launcher = read_environment().needed_ranks("bench stack")
    config = preset(arguments.preset).model_copy(update={"num_hidden_layers": arguments.layers})
    config.local(launcher.size)
    prepare_benchmark()
    gpu = current_gpu()
    table = default_table(table_key(config, launcher.size)).model_copy(update={"rows": (arguments.row,)})
    said = f"table: one row, offset {arguments.row.split_offset}, {arguments.row.attention.ctas} CTAs"
    if arguments.table is not None:
        chosen = choose_table(config, launcher.size, this_machine(), given=arguments.table)
        table, said = chosen.table, chosen.said
    comm = MpiComm()
    if comm.rank == 0:
        print(said, file=sys.stderr, flush=True)
    use_device(comm.rank)
    plugin_library()
    register_reference("AllReduce")
    options = WeaveOptions(Mapping(comm.size, comm.rank, comm.size), table, 8, max(arguments.tokens))
    gemms = cast("tuple[Gemm, ...]", arguments.gemms)
    bench = StackBench(
        Stack(config, options),
        arguments.tokens,
        gemms=gemms,
        symmetric=arguments.symmetric,
        sweep_ctas=arguments.sweep_ctas if arguments.table is None else (),
        timing_cache=arguments.timing_cache,
    )
    document = measure_stack(bench, comm)
    if comm.rank != 0:
        return None
    return {
        **origin(comm, gpu),
        "model": arguments.preset,
        "offset": arguments.row.split_offset,
        "symmetric": arguments.symmetric,
        "table_sha256": table.sha256,
        **document,
    }
