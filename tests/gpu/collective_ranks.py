"""AllGather and AllReduce of the reference library on the ranks that mpirun started.

test_all_gather_plugin.py starts them.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from gpu.plugin_network import TYPE_IDS, Input, PluginEngine
from gpu.progress import progress
from gpu.test_all_reduce_plugin import fields
from trtllm_tokenweave.comm import MpiComm
from trtllm_tokenweave.device import use_device_of_rank
from trtllm_tokenweave.plugin_library import register_reference
from trtllm_tokenweave.recorder.plugin import FieldValue
from trtllm_tokenweave.recorder.trtllm_plugins import ALL_GATHER, ALL_REDUCE, AllReduceStrategy

HIDDEN = 512
ROWS = (0, 1, 7, 1000)


def parts(size: int, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The tensors of all ranks: small integers, whose sums are exact."""
    make = torch.Generator(device="cuda").manual_seed(rows)
    return [torch.randint(-8, 9, (rows, HIDDEN), generator=make, device="cuda").to(dtype) for _ in range(size)]


def main() -> None:
    """Compare both plugins with torch; raises where something is wrong."""
    comm = MpiComm()
    use_device_of_rank(comm.rank)
    register_reference("AllGather", "AllReduce")
    # NCCL's windows want a GPU for each rank.
    own = torch.cuda.device_count() >= comm.size
    strategies = (AllReduceStrategy.NCCL, *([AllReduceStrategy.NCCL_SYMMETRIC] if own else []))
    say = progress(comm)

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        group = np.arange(comm.size, dtype=np.int32)
        shared: dict[str, FieldValue] = {"group": group, "type_id": TYPE_IDS[dtype]}
        given = [Input(dtype, (-1, HIDDEN), smallest=0)]
        gather = PluginEngine(ALL_GATHER, shared, given)
        for rows in ROWS:
            tensors = parts(comm.size, rows, dtype)
            (gathered,) = gather.run([tensors[comm.rank]])
            assert torch.equal(gathered, torch.cat(tensors)), (dtype, rows)
        for strategy in strategies:
            total = PluginEngine(ALL_REDUCE, fields(dtype, strategy, group=group), given)
            for rows in ROWS:
                tensors = parts(comm.size, rows, dtype)
                mine, want = tensors[comm.rank], torch.stack(tensors).sum(0).to(dtype)
                (summed,) = total.run([mine])
                assert torch.equal(summed, want), (strategy, dtype, rows)
                if rows:
                    (summed,) = total.capture_and_replay([mine], partial(mine.mul_, 2))
                    assert torch.equal(summed, 2 * want), (strategy, dtype, rows, "replayed")
        say(f"{dtype}: {[strategy.name for strategy in strategies]}")
    comm.barrier()
    say(f"{comm.size} ranks agree")


if __name__ == "__main__":
    main()
