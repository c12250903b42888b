"""Woven engines on the ranks that mpirun started; test_woven_ranks.py starts them.

Ranks share GPUs where there are more of them: their kernels then take turns, which is slow and right.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from support.stack import Stack

from gpu.woven import Array, Built, Shape, Variant, relative_error, tokens
from trtllm_tokenweave.comm import MpiComm
from trtllm_tokenweave.device import call
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.plugin_library import plugin_library
from trtllm_tokenweave.recorder import RecordedNetwork

SHAPE = Shape(hidden=1024, ffn=2048, layers=2, ctas=8)
COUNTS = (1, 2, 7, 1000, 1024, 1501, 4095)
TOLERANCE = 0.02


def reference(x: Array, tp_size: int) -> Array:
    """The stack in float32, rounded where the network's tensors are bfloat16."""
    to = ml_dtypes.bfloat16

    def norm(h: Array, stack: Stack, index: int) -> Array:
        wide = h.astype(np.float32)
        y = wide / np.sqrt(np.mean(wide * wide, axis=1, keepdims=True) + np.float32(1e-5))
        normed: Array = (y * stack.gamma(index).astype(np.float32)).astype(to)
        return normed

    stacks = [SHAPE.stack(Mapping(tp_size, rank, tp_size), RecordedNetwork()) for rank in range(tp_size)]
    h, y = x, norm(x, stacks[0], 0)
    for index in range(2 * SHAPE.layers):
        total = h.astype(np.float32)
        for stack in stacks:
            up, down = (
                stack.weight(name, index, shape).producer.weights.numpy().astype(np.float32)  # type: ignore[union-attr]
                for name, shape in (("up", (SHAPE.hidden, SHAPE.ffn)), ("down", (SHAPE.ffn, SHAPE.hidden)))
            )
            act = np.maximum((y.astype(np.float32) @ up).astype(to), to(0)).astype(np.float32)
            total += (act @ down).astype(to).astype(np.float32)
        h = total.astype(to)
        y = norm(h, stacks[0], index + 1)
    return y


def main(folder: Path) -> None:
    """Run every variant on this rank; raises where something is wrong."""
    comm = MpiComm()
    call("cudaSetDevice", comm.rank % call("cudaGetDeviceCount"))
    variants: tuple[Variant, ...] = ("fuse", "weave")
    for symmetric in (False, True):
        for variant in variants:
            built = Built(SHAPE, variant, folder / f"{variant}{symmetric}", comm, symmetric=symmetric)
            runner = built.runner()
            plugin_library().reset_counters()
            for count in COUNTS:
                x = tokens(count, SHAPE.hidden)
                want = reference(x, comm.size)
                for attempt in range(4):
                    got = runner.run(x, graph=True)
                    error = relative_error(got, want)
                    assert error < TOLERANCE, f"{variant} {count} tokens, run {attempt}: relative error {error}"
                    for other in comm.all_gather("out", got):
                        np.testing.assert_array_equal(other, got)
            assert runner.graphs.counters.fallback == 0, runner.graphs.counters
            # Ranks that were built together differ in nothing.
            assert built.context.symmetric == symmetric
            assert (plugin_library().counters()["staged"] == 0) == symmetric
            runner.graphs.close(runner.stream)
            built.context.close()
    if comm.rank == 0:
        print(f"{comm.size} ranks agree", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
