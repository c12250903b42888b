"""The checker: what must hold in a network after each step of the pass. It trusts names and plugin fields only.

Run on any network that holds this project's plugins, also one read from a file. Every check returns sentences
that name the layer at fault; an empty list means that the network is in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_tokenweave.network import Graph, Node
from trtllm_tokenweave.passes import names
from trtllm_tokenweave.passes.rowwise import Rows, RowWise
from trtllm_tokenweave.patterns import is_all_reduce
from trtllm_tokenweave.plugin_specs import (
    ALL_REDUCE_RMS_NORM,
    ATTENTION,
    BATCH_SPLIT,
    NAMESPACE,
    STREAM_JOIN,
    VERSION,
    Half,
)

#: Constants above this many elements are weights; the pass adds none and copies none.
_WEIGHT_ELEMENTS = 64


@dataclass(frozen=True)
class Baseline:
    """What the pass must not change: inputs and outputs (name, dtype, shape) and the live weights."""

    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    weights: frozenset[str]

    @classmethod
    def of(cls, network: Any) -> Baseline:
        """Take the baseline of a network before its first edit."""
        graph = Graph(network)

        def describe(names_: Sequence[str]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
            return tuple((n, graph.dtype(n), graph.shape(n)) for n in names_)

        return cls(describe(graph.inputs), describe(graph.outputs), frozenset(n.outputs[0] for n in _weights(graph)))


def _weights(graph: Graph) -> list[Node]:
    return [
        n for n in graph.live if n.kind == "CONSTANT" and int(np.prod(n.layer.shape, dtype=np.int64)) > _WEIGHT_ELEMENTS
    ]


def verify(network: Any, baseline: Baseline | None = None) -> list[str]:
    """Check a network; returns what is wrong, in sentences.

    Args:
        network: A network definition, real or recorded.
        baseline: State before the first edit, to compare inputs, outputs and weights with.
    """
    graph = Graph(network)
    problems = [problem for check in _CHECKS for problem in check(graph)]
    if baseline is not None:
        problems += _unchanged(network, baseline)
    return problems


def chain_signature(network: Any) -> tuple[str, ...]:
    """The collectives and joins of a network in chain order; must be equal on all ranks."""
    graph = Graph(network)
    return tuple(":".join((n.plugin_name, *(str(v) for v in _site(n)))) for n in _chain(graph)[0])


def verify_ranks(networks: Sequence[Any]) -> list[str]:
    """Check that all ranks start their collectives in the same order (each rank's engine is built apart)."""
    first = chain_signature(networks[0])
    problems = []
    for rank, network in enumerate(networks[1:], start=1):
        other = chain_signature(network)
        if other != first:
            pairs = enumerate(zip(first, other, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(first), len(other)))
            problems.append(f"rank {rank} differs from rank 0 at collective {at} of the chain")
    return problems


def _ours(graph: Graph, name: str) -> list[Node]:
    return [n for n in graph.nodes if n in graph.live and n.plugin_key == (name, VERSION, NAMESPACE)]


def _site(node: Node) -> tuple[int, int]:
    return int(node.fields["site"]), int(node.fields["half"])


def _chain(graph: Graph) -> tuple[list[Node], list[str]]:
    """Follow the chain from its constant; returns the layers on it and what is wrong with it."""
    members = set(_ours(graph, ALL_REDUCE_RMS_NORM)) | set(_ours(graph, STREAM_JOIN))
    current: str | None = next((n.outputs[0] for n in graph.nodes if n.name == names.CHAIN_START), None)
    path: list[Node] = []
    while current is not None:
        readers = [r for r in graph.readers[current] if r[0] in members]
        if len(readers) > 1:
            after = path[-1].name if path else "its start"
            return path, [f"the chain forks after {after}: {[r.name for r, _ in readers]}"]
        if not readers:
            break
        node, position = readers[0]
        if position != len(node.inputs) - 1 or node in path[-1:]:
            return path, [f"layer {node.name} reads the chain at input {position}, not at its last"]
        path.append(node)
        current = node.outputs[-1]
    missing = members - set(path)
    return path, [f"layer {n.name} is not on the chain that starts at {names.CHAIN_START}" for n in _by_index(missing)]


def _by_index(nodes: set[Node]) -> list[Node]:
    return sorted(nodes, key=lambda n: n.index)


def _chain_is_linear(graph: Graph) -> list[str]:
    return _chain(graph)[1]


def _collectives_are_chained(graph: Graph) -> list[str]:
    """A stock collective between the halves' collectives would have no defined order."""
    if not any(n.fields["side_stream"] for n in _ours(graph, ALL_REDUCE_RMS_NORM)):
        return []
    path = _chain(graph)[0]
    if not path:
        return []
    region = graph.between(path[0].outputs[-1], path[-1].outputs)
    loose = [n for n in region if is_all_reduce(n) or n.plugin_name == "AllGather"]
    return [f"layer {n.name} is an unchained collective between chained ones" for n in _by_index(set(loose))]


def _alive_until_join(graph: Graph) -> list[str]:
    """Every tensor that the communication stream touches is an input of the matching join, and joined before use."""
    problems: list[str] = []
    joins = {_site(n): n for n in _ours(graph, STREAM_JOIN) if n.fields["waits"]}
    order = {node: i for i, node in enumerate(_chain(graph)[0])}
    for start in _ours(graph, ALL_REDUCE_RMS_NORM):
        if not start.fields["side_stream"]:
            continue
        join = joins.pop(_site(start), None)
        if join is None:
            problems.append(f"layer {start.name} runs on the communication stream and is never joined")
            continue
        if start in order and join in order and order[start] > order[join]:
            problems.append(f"layer {join.name} joins before {start.name} has started")
        held = set(join.inputs)
        touched = [*start.inputs[:2], *start.outputs[:2]]
        for name in touched:
            if name not in held:
                problems.append(f"tensor {name!r} of {start.name} is not kept alive by {join.name}")
        for name in start.outputs[:2]:
            early = [r.name for r, _ in graph.live_readers(name) if r is not join]
            if early or name in graph.outputs:
                problems.append(f"tensor {name!r} is read before its join by {early or 'a network output'}")
    return problems + [f"layer {join.name} joins a collective that was never started" for join in joins.values()]


def _halves_stay_apart(graph: Graph) -> list[str]:
    """Each half is row-wise, and only the pass's concatenations read both, prefix first."""
    entries = [_entries(graph, half) for half in (Half.PREFIX, Half.SUFFIX)]
    if not any(entries):
        return []
    problems: list[str] = []
    reach = [_half(graph, nodes) for nodes in entries]
    joins = {n for n in reach[0] | reach[1] if names.is_concatenate(n.name)}
    for node in _by_index((reach[0] & reach[1]) - joins):
        problems.append(f"layer {node.name} reads rows of both halves")
    for node in _by_index(joins):
        sources = [graph.producer.get(n) if n is not None else None for n in node.inputs]
        if len(sources) != 2 or any(s not in reach[i] | set(entries[i]) for i, s in enumerate(sources)):
            problems.append(f"layer {node.name} does not concatenate the prefix half and the suffix half")
    for nodes, found in zip(entries, reach, strict=True):
        checker = RowWise(graph, nodes[0].outputs[0] if nodes else "")
        checker.rows.update({n.outputs[0]: Rows.TOKEN for n in nodes})
        inner = [n for n in graph.ordered(found) if n not in joins and n.plugin_name != BATCH_SPLIT]
        problems += [f"layer {n.name}: {why}" for n, why in checker.check(inner)]
    return problems


def _entries(graph: Graph, half: Half) -> list[Node]:
    """The slices of the pass that give a half its rows."""
    return [n for n in graph.nodes if n.kind == "SLICE" and n in graph.live and names.is_rows(n.name, half)]


def _half(graph: Graph, entries: list[Node]) -> set[Node]:
    """Live layers that depend on a half's rows, other than through the chain, past its ends."""
    todo, found = [n for node in entries for n in node.outputs], set[Node]()
    while todo:
        for node, position in graph.readers[todo.pop()]:
            chained = node.plugin_key is not None and node.plugin_name in (ALL_REDUCE_RMS_NORM, STREAM_JOIN)
            if node not in graph.live or node in found or (chained and position == len(node.inputs) - 1):
                continue
            found.add(node)
            if not names.is_concatenate(node.name) and node.plugin_name != BATCH_SPLIT:
                todo.extend(node.outputs[:-1] if chained else node.outputs)
    return found


def _prefix_attends_first(graph: Graph) -> list[str]:
    """The suffix attends to the prefix's keys: its attention must depend on the prefix's, through the chain."""
    wrappers = _ours(graph, ATTENTION)
    if not wrappers:
        return []
    bit = {node: 1 << i for i, node in enumerate(w for w in wrappers if w.fields["half"] == Half.PREFIX)}
    seen: dict[Node, int] = {}
    for node in graph.ordered():
        mask = bit.get(node, 0)
        for name in node.inputs:
            producer = graph.producer.get(name) if name is not None else None
            mask |= seen.get(producer, 0) if producer is not None else 0
        seen[node] = mask
    pairs = {n.name.rsplit("/", 1)[0]: n for n in bit}
    problems = []
    for node in wrappers:
        if node.fields["half"] != Half.SUFFIX:
            continue
        partner = pairs.get(node.name.rsplit("/", 1)[0])
        if partner is None or not seen[node] & bit[partner]:
            problems.append(f"layer {node.name} may run before the prefix half's attention")
    return problems


def _host_tensors_reach_plugins_only(graph: Graph) -> list[str]:
    """host_* inputs are CPU addresses declared as device tensors: any other layer would read them on the GPU."""
    return [
        f"host tensor {name!r} is read by layer {reader.name} ({reader.kind}), which is no plugin"
        for name in graph.inputs
        if name.startswith("host_")
        for reader, _ in graph.live_readers(name)
        if reader.plugin_key is None
    ]


def _unchanged(network: Any, baseline: Baseline) -> list[str]:
    now = Baseline.of(network)
    problems = []
    for what, before, after in (("inputs", baseline.inputs, now.inputs), ("outputs", baseline.outputs, now.outputs)):
        if before != after:
            gone = [b[0] for b in before if b not in after] or [a[0] for a in after if a not in before]
            problems.append(f"the network's {what} changed: {gone}")
    added, lost = now.weights - baseline.weights, baseline.weights - now.weights
    problems += [f"weights {name!r} were added or copied" for name in sorted(added)]
    problems += [f"weights {name!r} are no longer used" for name in sorted(lost)]
    return problems


_CHECKS: tuple[Callable[[Graph], list[str]], ...] = (
    _chain_is_linear,
    _collectives_are_chained,
    _alive_until_join,
    _halves_stay_apart,
    _prefix_attends_first,
    _host_tensors_reach_plugins_only,
)
