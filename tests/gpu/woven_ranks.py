"""Woven engines on the ranks that mpirun started; test_woven_ranks.py starts them.

Ranks share GPUs where there are more of them: their kernels then take turns, which is slow and right.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import ml_dtypes
import numpy as np
from support.stack import Stack

from gpu.progress import progress
from gpu.woven import Array, Built, Runner, Shape, Variant, relative_error, tokens
from trtllm_tokenweave.comm import MpiComm
from trtllm_tokenweave.device import call, use_device
from trtllm_tokenweave.engine import Engine, save_engine
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.plugin_library import PluginLibrary, plugin_library
from trtllm_tokenweave.recorder import RecordedNetwork

SHAPE = Shape(hidden=1024, ffn=2048, layers=2, ctas=8)
COUNTS = (1, 2, 7, 1000, 1024, 1501, 4095)
TOLERANCE = 0.02
#: Room for the shift of the last of many ranks.
MAX_SHIFT = 8 << 20


@dataclass(frozen=True)
class Layout:
    """Where activations lie: ``shift`` bytes further in symmetric memory than those of the rank before."""

    symmetric: bool
    shift: int = 0


LAYOUTS = (Layout(False), Layout(True), Layout(True, 1 << 20))


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


@contextmanager
def activations_shifted(shift: int) -> Iterator[None]:
    """Contexts made inside find their symmetric memory ``shift`` bytes further."""
    plain = PluginLibrary.tensor_memory

    def shifted(self: PluginLibrary, device: int, num_bytes: int) -> int:
        return plain(self, device, num_bytes + MAX_SHIFT) + shift

    with patch.object(PluginLibrary, "tensor_memory", shifted):
        yield


def check(engine: Engine, variant: Variant, layout: Layout, cases: Sequence[tuple[Array, Array]]) -> None:
    """Run an engine on all ranks, on inputs whose results are known."""
    comm, shift = engine.comm, layout.shift
    with activations_shifted(shift * comm.rank):
        context = engine.context(symmetric=layout.symmetric)
    runner = Runner(context)
    plugin_library().reset_counters()
    for x, want in cases:
        for attempt in range(4):
            got = runner.run(x, graph=True)
            error = relative_error(got, want)
            said = plugin_library().last_error()
            assert error < TOLERANCE, f"{variant} {len(x)} tokens, run {attempt}: relative error {error} {said}"
            for other in comm.all_gather("out", got):
                np.testing.assert_array_equal(other, got)
    assert runner.graphs.counters.fallback == 0, runner.graphs.counters
    # Ranks that were built together differ in nothing.
    assert context.symmetric == layout.symmetric
    counters = plugin_library().counters()
    if layout.symmetric and not shift:
        # The network's output lies elsewhere; in a fused engine the last collective writes it.
        assert counters["staged"] == (counters["in_line"] // (2 * SHAPE.layers) if variant == "fuse" else 0)
    else:
        assert counters["staged"] > 0, counters
    assert (counters["offset_fallbacks"] > 0) == (layout.symmetric and shift > 0), counters
    runner.graphs.close(runner.stream)
    context.close()


def main(folder: Path) -> None:
    """Run every variant in every layout on this rank; raises where something is wrong."""
    comm = MpiComm()
    say = progress(comm)
    use_device(comm.rank % call("cudaGetDeviceCount"))

    # The reference and the plans take most of the time, and are the same in every layout.
    inputs = [tokens(count, SHAPE.hidden) for count in COUNTS]
    wanted = np.split(reference(np.concatenate(inputs), comm.size), np.cumsum(COUNTS)[:-1])
    say("reference")
    variants: tuple[Variant, ...] = ("fuse", "weave")
    for variant in variants:
        save_engine(Built(SHAPE, variant, folder / variant, comm).plan, folder / variant, comm)
        say(f"{variant}: built")
        for layout in LAYOUTS:
            check(Engine.load(folder / variant, comm), variant, layout, list(zip(inputs, wanted, strict=True)))
            say(f"{variant}: {layout}")
    say(f"{comm.size} ranks agree")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
