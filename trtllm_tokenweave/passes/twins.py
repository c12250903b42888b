"""Checks the halves against each other: the suffix half is the prefix half, layer by layer, on other rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_tokenweave.network import Graph, Node
from trtllm_tokenweave.passes import names
from trtllm_tokenweave.passes.rowwise import Rows, RowWise, is_chained
from trtllm_tokenweave.plugin_specs import (
    ALL_REDUCE_RMS_NORM,
    BATCH_SPLIT,
    GEMM,
    NAMESPACE,
    STREAM_JOIN,
    SUFFIX_ROWS,
    VERSION,
    Half,
)

#: Attributes of each kind of layer that twins have in common.
_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "CAST": ("to_type",),
    "ACTIVATION": ("type", "alpha", "beta"),
    "ELEMENTWISE": ("op",),
    "UNARY": ("op",),
    "REDUCE": ("op", "axes", "keep_dims"),
    "SOFTMAX": ("axes",),
    "TOPK": ("op", "k", "axes"),
    "MATRIX_MULTIPLY": ("op0", "op1"),
    "CONCATENATION": ("axis",),
    "GATHER": ("axis", "mode", "num_elementwise_dims"),
    "SHUFFLE": ("first_transpose", "second_transpose", "reshape_dims", "zero_is_placeholder"),
    "SLICE": ("start", "shape", "stride", "mode"),
}


def halves_match(graph: Graph) -> list[str]:
    """Pair every layer of the prefix half with its twin in the suffix half; what is left over is a fault.

    Besides, the prefix half is row-wise (so the suffix half is), the halves' rows are cut where the other's end, and
    they meet in the pass's concatenations only, prefix first.
    """
    starts = [n for n in graph.live if n.plugin_name == ALL_REDUCE_RMS_NORM]
    if not any(n.fields["half"] == Half.SUFFIX for n in starts):
        return []
    rows = {half: _rows(graph, half) for half in (Half.PREFIX, Half.SUFFIX)}
    if names.rows(Half.PREFIX) not in rows[Half.PREFIX] or names.rows(Half.SUFFIX) not in rows[Half.SUFFIX]:
        return ["a half has no rows: they are not taken at the region's entry"]
    problems = _cuts(graph, rows)
    return problems or _Twins(graph, rows).check()


def _rows(graph: Graph, half: Half) -> dict[str, Node]:
    """The layers of the pass that give a half its rows, by name."""

    def gives_rows(node: Node) -> bool:
        return node.kind == "SLICE" if half is Half.PREFIX else node.plugin_name == SUFFIX_ROWS

    return {n.name: n for n in graph.nodes if n in graph.live and names.is_rows(n.name, half) and gives_rows(n)}


def _cuts(graph: Graph, rows: dict[Half, dict[str, Node]]) -> list[str]:
    """Prefix [0, p), and the suffix is what is behind it, of all tensors alike; p = min(rows, n, bound)."""
    problems = []
    sizes: set[tuple[str | None, int]] = set()
    for name, prefix in rows[Half.PREFIX].items():
        suffix = rows[Half.SUFFIX].get(name.removesuffix("prefix") + "suffix")
        if suffix is None or suffix.inputs != [prefix.inputs[0], prefix.outputs[0]] or len(prefix.inputs) != 3:
            problems.append(f"layer {name} has no counterpart that takes the rows behind it of the same tensor")
            continue
        shape = graph.producer.get(prefix.inputs[2] or "")
        parts = list(shape.inputs) if shape is not None and shape.kind == "CONCATENATION" else []
        if len(parts) != 2 or graph.scalar(parts[1] or "") != graph.shape(prefix.inputs[0] or "")[1]:
            problems.append(f"layer {name} does not take whole rows")
        sizes.add((parts[0] if parts else None, int(suffix.fields["max_rows"])))
        if not graph.is_zero(prefix.inputs[1] or "") or prefix.attribute("stride") != (1, 1):
            problems.append(f"layer {name} does not take all rows from row 0 on")
    if len(sizes) != 1 or len(rows[Half.PREFIX]) != len(rows[Half.SUFFIX]):
        return [*problems, "the halves are not cut at one place"]
    ((size, max_rows),) = sizes
    bounded = graph.producer.get(size or "")
    within = graph.producer.get((bounded.inputs[0] if bounded is not None else None) or "")
    if bounded is None or within is None or (bounded.op(), within.op()) != ("MIN", "MIN"):
        return [*problems, "the prefix's size is not computed as min(rows, n, bound)"]
    if not _is_token_count(graph, within.inputs[1]):
        problems.append("the prefix's size is not bounded by the step's tokens")
    most = int(graph.scalar(bounded.inputs[1] or "") or 0)
    for node in graph.nodes:
        if node.plugin_name == BATCH_SPLIT and node in graph.live:
            needed = int(node.fields["max_num_tokens"])
            if most + max_rows < needed:
                problems.append(f"the halves hold {most} and {max_rows} tokens, a step of {node.name} up to {needed}")
    return problems


def _is_token_count(graph: Graph, name: str | None) -> bool:
    """Whether a size is dimension 0 of the reference that all collectives have for the step's tokens."""
    pick = graph.producer.get(name or "")
    shape = graph.producer.get((pick.inputs[0] if pick is not None and pick.kind == "GATHER" else None) or "")
    return shape is not None and shape.kind == "SHAPE" and shape.inputs[0] == _token_reference(graph)


def _token_reference(graph: Graph) -> str | None:
    """The tensor that stands for the step's tokens in the collectives."""
    start = next(n for n in graph.nodes if n.plugin_name == ALL_REDUCE_RMS_NORM and n in graph.live)
    return start.inputs[-3]


class _Twins:
    def __init__(self, graph: Graph, rows: dict[Half, dict[str, Node]]) -> None:
        self.graph = graph
        self.rows = rows
        self.problems: list[str] = []
        #: Tensor of the prefix half -> tensor of the suffix half.
        self.twin: dict[str, str] = {}
        self.matched: set[Node] = set()
        self.gates: set[Node] = set()

    def check(self) -> list[str]:
        self._pair_entries()
        prefix = self._reach([n.outputs[0] for n in self.rows[Half.PREFIX].values()])
        if not self.problems:
            for node in self.graph.ordered(prefix):
                self._pair(node)
        suffix = self._reach([n.outputs[0] for n in self.rows[Half.SUFFIX].values()])
        if not self.problems:
            for node in sorted(suffix - self.matched - self.gates, key=lambda n: n.index):
                self._fault(node, "belongs to the suffix half and has no twin in the prefix half")
        checker = RowWise(self.graph, next(iter(self.rows[Half.PREFIX].values())).outputs[0])
        checker.rows.update({n.outputs[0]: Rows.TOKEN for n in self.rows[Half.PREFIX].values()})
        inner = [n for n in self.graph.ordered(prefix) if not _ends_half(n)]
        return self.problems + [f"layer {n.name}: {why}" for n, why in checker.check(inner)]

    def _fault(self, node: Node, what: str) -> None:
        if len(self.problems) < 5:  # One fault leaves many layers without a twin.
            self.problems.append(f"layer {node.name} {what}")

    def _pair_entries(self) -> None:
        """Rows of the halves correspond; the suffix's are read through a gate, but at the entry of whole attention."""
        whole = any(names.is_attention_rows(n) for n in self.rows[Half.PREFIX])
        for name, node in self.rows[Half.PREFIX].items():
            given = self.rows[Half.SUFFIX][name.removesuffix("prefix") + "suffix"].outputs[0]
            gate = self.graph.single_reader(given)
            if not (whole and name == names.rows(Half.PREFIX)):
                if gate is None or gate.plugin_name != STREAM_JOIN or gate.fields["waits"] or gate.inputs[0] != given:
                    self._fault(node, "and its counterpart: the suffix half's rows are not held by a gate")
                    continue
                self.gates.add(gate)
                given = gate.outputs[0]
            self.twin[node.outputs[0]] = given
        for node in self.graph.nodes:
            if node.plugin_name == BATCH_SPLIT and node in self.graph.live:
                if node.inputs[0] != self.graph.named[names.rows(Half.PREFIX)].outputs[0]:
                    self._fault(node, "does not read the prefix half's rows")
                if node.inputs[1] != _token_reference(self.graph):
                    self._fault(node, "has another reference for the step's tokens than the collectives")
                half = len(node.outputs) // 2
                self.twin.update(zip(node.outputs[:half], node.outputs[half:], strict=True))

    def _reach(self, entries: list[str]) -> set[Node]:
        """Live layers that depend on a half's rows, other than through the chain or past its ends."""
        todo, found = list(entries), set[Node]()
        while todo:
            for node, position in self.graph.readers[todo.pop()]:
                chain = is_chained(node) and position == len(node.inputs) - 1
                # The suffix's rows are taken by the prefix's, of which only the number is read.
                counted = node.plugin_name == SUFFIX_ROWS and position == 1
                if node not in self.graph.live or node in found or chain or counted:
                    continue
                found.add(node)
                if not _ends_half(node):
                    todo.extend(node.outputs[:-1] if is_chained(node) else node.outputs)
        return found

    def _pair(self, node: Node) -> None:
        if node.plugin_name == BATCH_SPLIT:
            return
        if names.is_concatenate(node.name):
            prefix, suffix = (*node.inputs, None, None)[:2]
            if len(node.inputs) != 2 or int(node.layer.axis) != 0 or self.twin.get(prefix or "") != suffix:
                self._fault(node, "does not concatenate the prefix half and the suffix half")
            self.matched.add(node)
            return
        expected = [None if n is None else self.twin.get(n, n) for n in node.inputs]
        position = next((i for i, n in enumerate(node.inputs) if n in self.twin), None)
        if position is None:
            self._fault(node, "reads no row of its half")
            return
        for other, at in self.graph.readers[expected[position] or ""]:
            if at == position and other in self.graph.live and self._equal(node, other, expected):
                self.matched.add(other)
                count = len(node.outputs) - (1 if is_chained(node) else 0)
                self.twin.update(zip(node.outputs[:count], other.outputs[:count], strict=True))
                return
        self._fault(node, "of the prefix half has no twin in the suffix half")

    def _equal(self, node: Node, other: Node, expected: list[str | None]) -> bool:
        if other in self.matched or (node.kind, node.plugin_key) != (other.kind, other.plugin_key):
            return False
        count = len(expected) - (1 if is_chained(node) else 0)
        if len(other.inputs) != len(expected) or other.inputs[:count] != expected[:count]:
            return False
        if node.plugin_key is not None:
            return _fields(node) == _fields(other) and _halves(node, other)
        return all(node.attribute(name) == other.attribute(name) for name in _ATTRIBUTES.get(node.kind, ()))


def _ends_half(node: Node) -> bool:
    return names.is_concatenate(node.name) or node.plugin_name == BATCH_SPLIT


def _halves(node: Node, other: Node) -> bool:
    given = node.fields.get("half"), other.fields.get("half")
    return given in ((None, None), (Half.PREFIX, Half.SUFFIX))


def _fields(node: Node) -> dict[str, Any]:
    """Fields that twins have in common: not their half, nor which collective is beside a GEMM."""
    own = ("half", "kind") if node.plugin_key == (GEMM, VERSION, NAMESPACE) else ("half",)
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in node.fields.items() if k not in own}
