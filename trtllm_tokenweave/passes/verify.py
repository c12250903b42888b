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
from trtllm_tokenweave.passes.join import chain_names
from trtllm_tokenweave.passes.order import collective_order, serial_order
from trtllm_tokenweave.passes.rowwise import is_chained
from trtllm_tokenweave.passes.twins import halves_match
from trtllm_tokenweave.patterns import is_collective
from trtllm_tokenweave.plugin_specs import (
    ALL_REDUCE_RMS_NORM,
    ATTENTION,
    BATCH_SPLIT,
    NAMESPACE,
    STREAM_JOIN,
    VERSION,
    AttentionRole,
    Half,
    SiteKind,
)
from trtllm_tokenweave.recorder.tensor import MAX_SHAPE_TENSOR_ELEMENTS

#: Constants above this many elements are weights; the pass adds none and copies none.
_WEIGHT_ELEMENTS = 64

#: Fields of AllReduceRmsNorm that are equal in all of a network's.
_COMMON_FIELDS = ("group", "tp_rank", "type_id", "side_stream", "weave_hash", "table")

Signature = tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Baseline:
    """What the pass must not change: inputs and outputs (name, dtype, shape) and the live weights.

    ``replaced`` names layers that must be dead once the pass has replaced them.
    """

    inputs: Signature
    outputs: Signature
    weights: frozenset[str]
    replaced: frozenset[str] = frozenset()

    @classmethod
    def of(cls, network: Any, replaced: Sequence[str] = ()) -> Baseline:
        """Take the baseline of a network before its first edit."""
        return cls.of_graph(Graph(network), replaced)

    @classmethod
    def of_graph(cls, graph: Graph, replaced: Sequence[str] = ()) -> Baseline:
        """The same from a view that the caller has already."""

        def describe(names_: Sequence[str]) -> Signature:
            return tuple((n, graph.dtype(n), graph.shape(n)) for n in names_)

        weights = frozenset(n.outputs[0] for n in _weights(graph))
        return cls(describe(graph.inputs), describe(graph.outputs), weights, frozenset(replaced))


def _weights(graph: Graph) -> list[Node]:
    return [n for n in graph.live if n.kind == "CONSTANT" and graph.elements(n.outputs[0]) > _WEIGHT_ELEMENTS]


def verify(network: Any, baseline: Baseline | None = None) -> list[str]:
    """Check a network; returns what is wrong, in sentences.

    Args:
        network: A network definition, real or recorded.
        baseline: State before the first edit, to compare inputs, outputs and weights with.
    """
    graph = Graph(network)
    problems = [problem for check in _CHECKS for problem in check(graph)]
    if baseline is not None:
        problems += _unchanged(graph, baseline)
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


def _by_index(nodes: set[Node]) -> list[Node]:
    return sorted(nodes, key=lambda n: n.index)


# ---- the chain


def _chain(graph: Graph) -> tuple[list[Node], list[str]]:
    """Follow the chain from its constant; returns the layers on it and what is wrong with it."""
    members = {n for n in graph.live if is_chained(n)}
    start = graph.named.get(names.CHAIN_START)
    current = None if start is None else start.outputs[0]
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


def _chain_holds(graph: Graph) -> list[str]:
    """The chain is one line, in an order that the pass makes, and no collective stands beside it."""
    path, broken = _chain(graph)
    return (broken or _chain_is_in_order(graph, path)) + _collectives_are_chained(graph, path)


def _chain_is_in_order(graph: Graph, path: list[Node]) -> list[str]:
    """The chain visits starts and joins in one of the two orders that the pass makes."""
    starts = [n for n in path if n.plugin_name == ALL_REDUCE_RMS_NORM]
    if not starts:
        return []
    found = [n.name for n in path]
    if not starts[0].fields["side_stream"]:
        expected = [names.start(i, Half.WHOLE) for i in range(len(starts))]
        return [] if found == expected else [f"the chain visits the sites in the order {found}"]
    kinds = {_site(n)[0]: SiteKind(int(n.fields["kind"])) for n in starts}
    if sorted(kinds) != list(range(len(kinds))):
        return [f"the chain holds sites {sorted(kinds)}, some are missing"]
    halves = {_site(n)[1] for n in starts}
    if halves == {Half.PREFIX}:
        expected = [of(i, Half.PREFIX) for i in range(len(kinds)) for of in (names.start, names.join)]
        return [] if found == expected else ["the chain does not visit each start and its join in turn"]
    order = [kinds[i] for i in range(len(kinds))]
    whole = any(names.is_attention_rows(n.name) for n in graph.nodes)
    for make in (serial_order, collective_order):
        if found == list(chain_names(make(order, whole), graph.named)):
            return []
    return ["the chain visits starts and joins in an order that the pass never makes"]


def _collectives_are_chained(graph: Graph, path: list[Node]) -> list[str]:
    """A stock collective that is neither before nor after all chained ones would have no defined order."""
    if not path or not any(n.fields["side_stream"] for n in _ours(graph, ALL_REDUCE_RMS_NORM)):
        return []
    ordered = graph.ancestors([n for n in path[0].inputs if n is not None])
    for name in path[-1].outputs:
        ordered |= graph.descendants(name)
    loose = {n for n in graph.live if is_collective(n)} - ordered
    return [f"layer {n.name} is an unchained collective beside chained ones" for n in _by_index(loose)]


# ---- collectives and joins


def _collectives_fit_together(graph: Graph) -> list[str]:
    """Fields, references and residual streams of the collectives agree with one another."""
    starts = {_site(n): n for n in _ours(graph, ALL_REDUCE_RMS_NORM)}
    problems: list[str] = []
    if not starts:
        return problems
    first = next(iter(starts.values()))
    for key, node in starts.items():
        for field in _COMMON_FIELDS:
            if not np.array_equal(np.asarray(node.fields[field]), np.asarray(first.fields[field])):
                problems.append(f"field {field} of {node.name} differs from that of {first.name}")
        if node.inputs[-3:-1] != first.inputs[-3:-1]:
            problems.append(f"layer {node.name} has other step references than {first.name}")
        problems += _residual(graph, starts, key)
    return problems


def _residual(graph: Graph, starts: dict[tuple[int, int], Node], key: tuple[int, int]) -> list[str]:
    """A collective takes the residual of the site before it, as that site puts it out, or a full one."""
    (site, half), node = key, starts[key]
    name = node.inputs[1] or ""
    source = graph.producer.get(name)
    while source is not None and source.plugin_name == STREAM_JOIN and source.fields["waits"]:
        name = source.inputs[source.outputs.index(name)] or ""
        source = graph.producer.get(name)
    sharded = bool(node.fields["residual_sharded"])
    before = starts.get((site - 1, half))
    if source is not None and source.plugin_name == ALL_REDUCE_RMS_NORM and name == source.outputs[1]:
        if _site(source)[1] != half:
            return [f"layer {node.name} takes the residual of {source.name}, another half"]
        if sharded and source is not before:
            return [f"layer {node.name} takes a shard of {source.name}, not of the site before it"]
        if source is before and sharded == bool(source.fields["gather_residual"]):
            return [f"layer {node.name} and {source.name} disagree on whether the residual is sharded"]
        if half != Half.WHOLE and source is not before:
            return [f"layer {node.name} takes the residual of {source.name}, not of the site before it"]
        return []
    if sharded:
        return [f"layer {node.name} takes a shard that no collective made"]
    if half != Half.WHOLE and site > 0:
        return [f"layer {node.name} takes a residual that does not come from the site before it"]
    return []


def _alive_until_join(graph: Graph) -> list[str]:
    """Every tensor that the communication stream touches is an input of the matching join, and joined before use."""
    problems: list[str] = []
    joins: dict[tuple[int, int], Node] = {}
    for node in _ours(graph, STREAM_JOIN):
        if node.fields["waits"]:
            if _site(node) in joins:
                problems.append(f"layer {node.name} joins what {joins[_site(node)].name} joins")
            joins[_site(node)] = node
    for start in _ours(graph, ALL_REDUCE_RMS_NORM):
        if not start.fields["side_stream"]:
            continue
        join = joins.pop(_site(start), None)
        if join is None:
            problems.append(f"layer {start.name} runs on the communication stream and is never joined")
            continue
        if join.inputs[:2] != start.outputs[:2] or int(join.fields["num_aliased"]) != 2:
            problems.append(f"layer {join.name} does not pass on the results of {start.name}")
        for name in start.inputs[:2]:
            if name not in join.inputs[2:-1]:
                problems.append(f"tensor {name!r} of {start.name} is not kept alive by {join.name}")
        for name in start.outputs[:2]:
            early = [r.name for r, _ in graph.live_readers(name) if r is not join]
            if early or name in graph.outputs:
                problems.append(f"tensor {name!r} is read before its join by {early or 'a network output'}")
    return problems + [f"layer {join.name} joins a collective that was never started" for join in joins.values()]


# ---- attention, inputs and outputs


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


def _attention_follows_its_batch_split(graph: Graph) -> list[str]:
    """A half's attention takes the device's lengths from a batch split, and cuts the host's lengths that it read."""
    problems = []
    splits = _ours(graph, BATCH_SPLIT)
    for node in _ours(graph, ATTENTION):
        roles = [int(role) for role in np.ravel(np.asarray(node.fields["roles"]))]
        device, host = (
            [node.inputs[roles.index(role)] for role in pair]
            for pair in (
                (AttentionRole.SEQUENCE_LENGTH, AttentionRole.CONTEXT_LENGTHS),
                (AttentionRole.HOST_REQUEST_TYPES, AttentionRole.HOST_CONTEXT_LENGTHS),
            )
        )
        first = 2 * int(node.fields["half"])
        split = next((s for s in splits if s.outputs[first : first + 2] == device), None)
        if split is None:
            problems.append(f"layer {node.name} does not take its half's lengths from a batch split")
        elif split.inputs[2:4] != host:
            problems.append(f"layer {node.name} reads other host lengths than {split.name}")
    return problems


def _host_tensors_reach_plugins_only(graph: Graph) -> list[str]:
    """host_* inputs are CPU addresses declared as device tensors: any layer that reads them would do so on the GPU."""
    return [
        f"host tensor {name!r} is read by layer {reader.name} ({reader.kind}), which is no plugin"
        for name in graph.inputs
        if name.startswith("host_")
        for reader, _ in graph.live_readers(name)
        if reader.plugin_key is None and reader.kind != "SHAPE"
    ]


def _nothing_of_ours_is_dead(graph: Graph) -> list[str]:
    """What the pass adds is used: a layer that nobody reads stands for one that was left in its place."""
    dead = (n for n in graph.nodes if n not in graph.live and n.plugin_key is not None and n.plugin_key[2] == NAMESPACE)
    return [f"layer {n.name} is not used" for n in dead]


def _sizes_are_small(graph: Graph) -> list[str]:
    """What the halves' sizes are looked up in: TensorRT takes larger shape tensors for data, without a word."""
    slices = [n for n in graph.nodes if n in graph.live and names.is_rows(n.name, Half.PREFIX)]
    shaped = frozenset(name for n in graph.nodes if n.kind == "SHAPE" for name in n.inputs if name is not None)
    sources = graph.ancestors((name for n in slices for name in n.inputs[1:] if name is not None), shaped)
    return [
        f"layer {n.name} holds {graph.elements(n.outputs[0])} elements of a lookup, at most "
        f"{MAX_SHAPE_TENSOR_ELEMENTS} are evaluated correctly by TensorRT"
        for n in _by_index(sources)
        if n.kind == "CONSTANT" and graph.elements(n.outputs[0]) > MAX_SHAPE_TENSOR_ELEMENTS
    ]


def _unchanged(graph: Graph, baseline: Baseline) -> list[str]:
    now = Baseline.of_graph(graph)
    problems = []
    for what, before, after in (("inputs", baseline.inputs, now.inputs), ("outputs", baseline.outputs, now.outputs)):
        if before != after:
            gone = [b[0] for b in before if b not in after] or [a[0] for a in after if a not in before]
            problems.append(f"the network's {what} changed: {gone}")
    added, lost = now.weights - baseline.weights, baseline.weights - now.weights
    problems += [f"weights {name!r} were added or copied" for name in sorted(added)]
    problems += [f"weights {name!r} are no longer used" for name in sorted(lost)]
    alive = {n for n in graph.live if n.name in baseline.replaced}
    return problems + [f"layer {n.name} was replaced and is still in use" for n in _by_index(alive)]


_CHECKS: tuple[Callable[[Graph], list[str]], ...] = (
    _chain_holds,
    _collectives_fit_together,
    _alive_until_join,
    halves_match,
    _prefix_attends_first,
    _attention_follows_its_batch_split,
    _host_tensors_reach_plugins_only,
    _sizes_are_small,
    _nothing_of_ours_is_dead,
)
