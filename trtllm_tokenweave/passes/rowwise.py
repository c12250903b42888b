"""Is a region row-wise: does row i of every tensor in it depend on row i of the region's entry only?

Only such a region may be run on the two halves of a step apart. Tensors of the region are of two classes: TOKEN
(dimension 0 is the tokens) and SIZE (integers derived from shapes, used to shape other tensors). Anything that is
not known to be row-wise is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable

import numpy as np

from trtllm_tokenweave import recorder
from trtllm_tokenweave.network import Graph, Node
from trtllm_tokenweave.patterns import Refused, is_all_reduce
from trtllm_tokenweave.plugin_specs import ALL_REDUCE_RMS_NORM, NAMESPACE, STREAM_JOIN


class Rows(enum.Enum):
    """Class of a tensor inside the region."""

    TOKEN = "token"
    SIZE = "size"


#: Stands for the number of tokens among the known elements of a SIZE tensor.
TOKENS = "tokens"
Symbols = tuple["int | str | None", ...]

#: Plugins that the split pass replaces or leaves whole; their input 0 is the only per-token one.
ATTENTION_PLUGINS = frozenset({"GPTAttention", "TokenWeaveAttention"})


def is_chained(node: Node) -> bool:
    """Whether a layer is on the chain: its last input and its last output."""
    return node.plugin_key is not None and node.plugin_key[::2] in (
        (ALL_REDUCE_RMS_NORM, NAMESPACE),
        (STREAM_JOIN, NAMESPACE),
    )


class RowWise:
    """Classifies the tensors of a region, layer by layer.

    Args:
        graph: The network.
        entry: The region's entry tensor: its dimension 0 is the tokens.
        trusted: Layers known to be row-wise as a group (those that a fused site replaces).
        sums: All-reduces count as row-wise, too. Inside of a region they do not: each half would make its own.
    """

    def __init__(self, graph: Graph, entry: str, trusted: Iterable[str] = (), *, sums: bool = False) -> None:
        self.graph = graph
        self.rows: dict[str, Rows] = {entry: Rows.TOKEN}
        self.symbols: dict[str, Symbols] = {}
        self.trusted = frozenset(trusted)
        self.sums = sums

    def check(self, nodes: Iterable[Node]) -> list[tuple[Node, str]]:
        """Classify the outputs of ``nodes`` (in topological order); returns (layer, reason) where that fails."""
        failures: list[tuple[Node, str]] = []
        for node in nodes:
            try:
                result = self._classify(node)
            except Refused as reason:
                failures.append((node, str(reason)))
                result = Rows.TOKEN
            # The chain, last output of our own layers, orders work and holds no rows.
            for name in node.outputs[:-1] if is_chained(node) else node.outputs:
                self.rows[name] = result
        return failures

    # ---- helpers

    def _row(self, name: str | None) -> Rows | None:
        return None if name is None else self.rows.get(name)

    def _static(self, name: str | None) -> None:
        """Refuse an input from outside the region that is no constant."""
        if name is not None and self._row(name) is None and not self.graph.is_constant(name):
            raise Refused(f"reads {name!r}, which is neither computed from the region's tokens nor constant")

    def _all(self, node: Node) -> list[str]:
        names = [n for n in node.inputs if n is not None]
        for name in names:
            self._static(name)
        return names

    def _sizes_only(self, names: list[str]) -> bool:
        return any(self._row(n) is Rows.SIZE for n in names) and all(self._row(n) is not Rows.TOKEN for n in names)

    def _keeps_dim0(self, names: Iterable[str]) -> None:
        for name in names:
            if self._row(name) is None and self.graph.shape(name)[0] != 1:
                raise Refused(f"combines rows with {name!r} of shape {self.graph.shape(name)}")

    def symbols_of(self, name: str) -> Symbols | None:
        """Known elements of an integer tensor: numbers, or TOKENS for the number of tokens."""
        if name in self.symbols:
            return self.symbols[name]
        shape = self.graph.shape(name)
        if len(shape) <= 1 and int(np.prod(shape, dtype=np.int64)) == 1:
            value = self.graph.scalar(name)
            if value is not None:
                return (int(value),)
        node = self.graph.producer.get(name)
        if node is not None and node.kind == "CONCATENATION":
            return self._joined(node)
        return None

    def _joined(self, node: Node) -> Symbols:
        out: list[int | str | None] = []
        for name in node.inputs:
            known = None if name is None else self.symbols_of(name)
            out.extend(known if known is not None else [None] * self.graph.shape(name or "")[0])
        return tuple(out)

    # ---- rules

    def _classify(self, node: Node) -> Rows:
        if node.name in self.trusted:
            return Rows.TOKEN
        if node.plugin_key is not None:
            return self._plugin(node)
        rule: Callable[[RowWise, Node], Rows] | None = _RULES.get(node.kind)
        if rule is None:
            raise Refused(f"layer kind {node.kind} is not known to be row-wise")
        return rule(self, node)

    def _plugin(self, node: Node) -> Rows:
        key = node.plugin_key
        assert key is not None
        first, rest = node.inputs[0], node.inputs[1:]
        if key[0] in ATTENTION_PLUGINS:
            if self._row(first) is not Rows.TOKEN or any(self._row(n) is not None for n in rest):
                raise Refused("attention reads per-token tensors besides its first input")
            return Rows.TOKEN
        if self.sums and is_all_reduce(node) and self._row(first) is Rows.TOKEN:
            return Rows.TOKEN
        creator = recorder.get_plugin_registry().get_creator(*key)
        tokens = frozenset() if creator is None else creator.spec.token_inputs(node.fields, len(node.inputs))
        if not tokens:
            raise Refused(f"plugin {key[0]} is not known to act on each token alone")
        for position, name in enumerate(node.inputs):
            if position in tokens:
                if self._row(name) is not Rows.TOKEN:
                    raise Refused(f"input {position} of plugin {key[0]} is not computed from the region's tokens")
            elif self._row(name) is not None:
                raise Refused(f"input {position} of plugin {key[0]} depends on the region's tokens")
            elif key[2] != NAMESPACE:
                self._static(name)
        return Rows.TOKEN

    def _same(self, node: Node) -> Rows:
        names = self._all(node)
        # A size survives only as an integer: in half precision it would be rounded.
        if self.graph.dtype(node.outputs[0]) in ("INT32", "INT64") and names[0] in self.symbols:
            self.symbols[node.outputs[0]] = self.symbols[names[0]]
        return Rows.SIZE if self._sizes_only(names) else Rows.TOKEN

    def _elementwise(self, node: Node) -> Rows:
        names = self._all(node)
        if self._sizes_only(names):
            return Rows.SIZE
        if any(self._row(n) is Rows.SIZE for n in names):
            raise Refused("mixes token data with sizes")
        self._keeps_dim0(names)
        return Rows.TOKEN

    def _over_axes(self, node: Node) -> Rows:
        if len(node.inputs) > 1:
            raise Refused("has a second input")
        if self._sizes_only(self._all(node)):
            return Rows.SIZE
        if int(node.layer.axes) & 1:
            raise Refused("works across tokens (axis 0)")
        return Rows.TOKEN

    def _matmul(self, node: Node) -> Rows:
        a, b = self._all(node)
        rank = len(self.graph.shape(a))
        if self._row(a) is Rows.TOKEN and self._row(b) is None:
            if rank == 2 and str(node.layer.op0.name) == "NONE":
                return Rows.TOKEN
            if rank > 2 and self.graph.shape(b)[0] == 1:
                return Rows.TOKEN
        if rank > 2 and self._row(a) is self._row(b) is Rows.TOKEN:
            return Rows.TOKEN
        raise Refused("multiplies across tokens")

    def _shuffle(self, node: Node) -> Rows:
        names = self._all(node)
        if self._sizes_only(names[:1]):
            if names[0] in self.symbols and len(self.graph.shape(node.outputs[0])) <= 1:
                self.symbols[node.outputs[0]] = self.symbols[names[0]]
            return Rows.SIZE
        for order in (node.attribute("first_transpose"), node.attribute("second_transpose")):
            if order is not None and order[:1] not in ((), (0,)):
                raise Refused("transposes the token dimension")
        source = self.graph.shape(names[0])
        if len(names) > 1:
            target = self.symbols_of(names[1])
            if target is None or target[0] != TOKENS:
                raise Refused("reshapes the token dimension")
            if not all(isinstance(d, int) for d in target[1:]):
                raise Refused("reshapes to dimensions that depend on sizes")
            return Rows.TOKEN
        dims = node.attribute("reshape_dims")
        if dims is None:
            return Rows.TOKEN
        rest = [int(np.prod(d, dtype=np.int64)) for d in (dims[1:], source[1:]) if all(v > 0 for v in d)]
        copied = dims[0] == 0 and node.layer.zero_is_placeholder
        if not copied and not (dims[0] == -1 and len(rest) == 2 and rest[0] == rest[1]):
            raise Refused("reshapes the token dimension")
        return Rows.TOKEN

    def _slice(self, node: Node) -> Rows:
        names = self._all(node)
        if self._sizes_only(names[:1]):
            known = self.symbols.get(names[0])
            given = [node.attribute(name) for name in ("start", "shape", "stride")]
            if known is not None and len(names) == 1 and all(dims is not None and len(dims) == 1 for dims in given):
                start, count, step = (dims[0] for dims in given)
                self.symbols[node.outputs[0]] = tuple(known[start + i * step] for i in range(count))
            return Rows.SIZE
        if len(node.inputs) > 4 or str(node.layer.mode.name) != "STRICT_BOUNDS":
            raise Refused("is a slice with axes, or beyond its input's bounds")

        def entries(position: int, static: str) -> Symbols:
            name = node.inputs[position] if position < len(node.inputs) else None
            if name is None:
                return node.attribute(static) or (None,)
            return self.symbols_of(name) or (None,)

        start, size, stride = entries(1, "start"), entries(2, "shape"), entries(3, "stride")
        if (start[0], size[0], stride[0]) != (0, TOKENS, 1):
            raise Refused("slices the token dimension")
        if not all(isinstance(v, int) for v in (*start[1:], *size[1:], *stride[1:])):
            raise Refused("slices by numbers that depend on sizes")
        return Rows.TOKEN

    def _concatenation(self, node: Node) -> Rows:
        names = self._all(node)
        if self._sizes_only(names):
            self.symbols[node.outputs[0]] = self._joined(node)
            return Rows.SIZE
        if int(node.layer.axis) == 0 or any(self._row(n) is not Rows.TOKEN for n in names):
            raise Refused("concatenates along the token dimension or with something that has no tokens")
        return Rows.TOKEN

    def _gather(self, node: Node) -> Rows:
        data, indices = self._all(node)
        if str(node.layer.mode.name) != "DEFAULT" or int(node.layer.num_elementwise_dims):
            raise Refused("gathers in another mode than DEFAULT")
        if self._sizes_only([data, indices]):
            known, at = self.symbols.get(data), self.symbols_of(indices)
            if known is not None and at is not None:
                self.symbols[node.outputs[0]] = tuple(known[i] if isinstance(i, int) else None for i in at)
            return Rows.SIZE
        axis = int(node.layer.axis)
        if self._row(data) is Rows.TOKEN and self._row(indices) is None and axis > 0:
            return Rows.TOKEN
        if self._row(data) is None and self._row(indices) is Rows.TOKEN and axis == 0:
            return Rows.TOKEN
        raise Refused("gathers across tokens")

    def _shape(self, node: Node) -> Rows:
        (name,) = self._all(node)
        if self._row(name) is Rows.TOKEN:
            self.symbols[node.outputs[0]] = (TOKENS, *(d if d >= 0 else None for d in self.graph.shape(name)[1:]))
        return Rows.SIZE


_RULES: dict[str, Callable[[RowWise, Node], Rows]] = {
    "CAST": RowWise._same,
    "IDENTITY": RowWise._same,
    "UNARY": RowWise._same,
    "ACTIVATION": RowWise._same,
    "ELEMENTWISE": RowWise._elementwise,
    "SELECT": RowWise._elementwise,
    "REDUCE": RowWise._over_axes,
    "SOFTMAX": RowWise._over_axes,
    "TOPK": RowWise._over_axes,
    "MATRIX_MULTIPLY": RowWise._matmul,
    "SHUFFLE": RowWise._shuffle,
    "SLICE": RowWise._slice,
    "CONCATENATION": RowWise._concatenation,
    "GATHER": RowWise._gather,
    "SHAPE": RowWise._shape,
}
