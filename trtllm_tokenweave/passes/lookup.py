"""The table lookup inside the network: from the step's tokens and sequences to the rows of either half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trtllm_tokenweave import trt
from trtllm_tokenweave.passes import names

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trtllm_tokenweave.table import PrefixLookup


class SizeMath:
    """Arithmetic on [1]-shaped INT64 shape tensors with element-wise layers only.

    Comparisons are written as clamp(difference, 0, 1): MIN, MAX, SUM, SUB, PROD and FLOOR_DIV of INT64 are
    evaluated on the host by every TensorRT from 10.6 on.
    """

    def __init__(self, network: Any) -> None:
        self.network = network
        self.ops = trt.object_model(network).ElementWiseOperation
        self._constants: dict[tuple[int, ...], Any] = {}

    def const(self, *values: int) -> Any:
        """An INT64 constant of the given values, made once."""
        if values not in self._constants:
            name = f"{names.PREFIX}/lookup/constant_{len(self._constants)}"
            self._constants[values] = trt.constant(self.network, np.asarray(values, np.int64), name=name)
        return self._constants[values]

    def op(self, a: Any, b: Any, op: str) -> Any:
        """Element-wise ``op`` of two tensors, or a tensor and an int."""
        a, b = (self.const(v) if isinstance(v, int) else v for v in (a, b))
        layer = self.network.add_elementwise(a, b, getattr(self.ops, op))
        layer.name = f"{names.PREFIX}/lookup/{op.lower()}_{layer_number(self.network)}"
        return layer.get_output(0)

    def clamp(self, a: Any, low: int, high: int) -> Any:
        """min(max(a, low), high)."""
        return self.op(self.op(a, low, "MAX"), high, "MIN")

    def size(self, tensor: Any, axis: int, name: str) -> Any:
        """Dimension ``axis`` of a tensor, as [1]."""
        shape = self.network.add_shape(tensor)
        shape.name = f"{names.PREFIX}/lookup/{name}/shape"
        picked = self.network.add_gather(shape.get_output(0), self.const(axis), 0)
        picked.name = f"{names.PREFIX}/lookup/{name}"
        return picked.get_output(0)

    def join(self, *parts: Any) -> Any:
        """Concatenation of [1]-shaped sizes and ints into one shape tensor."""
        layer = self.network.add_concatenation([self.const(p) if isinstance(p, int) else p for p in parts])
        layer.axis = 0
        layer.name = f"{names.PREFIX}/lookup/concat_{layer_number(self.network)}"
        return layer.get_output(0)

    def pick(self, chunks: Sequence[NDArray[np.int64]], index: Any) -> Any:
        """Element ``index`` of the concatenated chunks: one constant each, joined by comparisons."""
        result: Any = None
        low = 0
        for chunk in chunks:
            local = self.clamp(self.op(index, low, "SUB"), 0, len(chunk) - 1)
            gather = self.network.add_gather(self.const(*(int(v) for v in chunk)), local, 0)
            gather.name = f"{names.PREFIX}/lookup/rows_{low}"
            found = gather.get_output(0)
            if result is None:
                result = found
            else:
                reached = self.clamp(self.op(index, low - 1, "SUB"), 0, 1)
                result = self.op(result, self.op(reached, self.op(found, result, "SUB"), "PROD"), "SUM")
            low += len(chunk)
        return result


def layer_number(network: Any) -> int:
    """Index of the newest layer: makes generated names unique."""
    return int(network.num_layers) - 1


def prefix_size(math: SizeMath, lookup: PrefixLookup, tokens: Any, sequences: Any, given: Any = None) -> Any:
    """Rows of the prefix as a [1]-shaped INT64 tensor.

    Computes what ``PrefixLookup.evaluate`` computes: prefix = min(n, rows[batch bucket, token bucket] + below *
    min_tokens, max_prefix) with below = 1 under the threshold. The maximum is a constant: without it TensorRT sizes
    the half for the whole step. (The suffix's bound is a field of TokenWeaveSuffixRows.)

    Args:
        math: Builder of the size arithmetic.
        lookup: The table in the form of a grid.
        tokens: Tensor whose dimension 0 is the step's tokens.
        sequences: Tensor whose dimension 0 is the step's sequences.
        given: Tensor whose dimension 0 takes the place of rows[...] + below * min_tokens, or None.
    """
    n = math.size(tokens, 0, "num_tokens")
    rows = _looked_up(math, lookup, n, sequences) if given is None else math.size(given, 0, "prefix_tokens")
    return math.op(math.op(rows, n, "MIN"), lookup.max_prefix, "MIN")


def _looked_up(math: SizeMath, lookup: PrefixLookup, n: Any, sequences: Any) -> Any:
    """rows[batch bucket, token bucket] + below * min_tokens."""
    buckets = lookup.prefix.shape[1]
    index = math.op(math.op(n, lookup.granularity - 1, "SUM"), lookup.granularity, "FLOOR_DIV")
    if lookup.batch_starts:
        b = math.size(sequences, 0, "batch_size")
        for start in lookup.batch_starts:
            reached = math.clamp(math.op(b, start - 1, "SUB"), 0, 1)
            index = math.op(index, math.op(reached, buckets, "PROD"), "SUM")
    rows = math.pick(lookup.chunks(), index)
    below = math.clamp(math.op(lookup.min_tokens, n, "SUB"), 0, 1)
    return math.op(rows, math.op(below, lookup.min_tokens, "PROD"), "SUM")
