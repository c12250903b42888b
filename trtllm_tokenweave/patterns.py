"""Recognise fusion sites: all-reduce -> residual add -> RMSNorm, in the forms that TensorRT-LLM emits.

Two forms (facts of TensorRT-LLM 0.17 to 1.2): a plain ``AllReduce`` plugin followed by [cast], [bias add],
[multiplier], residual add and the RMSNorm layer chain; or an ``AllReduce`` plugin with its fused
``RESIDUAL_RMS_NORM`` operation (``reduce_fusion``). Matching refuses by default and says why.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trtllm_tokenweave.network import Graph, Node
from trtllm_tokenweave.plugin_specs import NAMESPACE, SiteKind
from trtllm_tokenweave.recorder.trtllm_plugins import ALL_REDUCE

#: Plugins in which ranks meet; all ranks must reach them in one order.
COLLECTIVES = frozenset({"AllReduce", "AllGather", "ReduceScatter", "GemmAllReduce", "Send", "Recv"})
FUSION_NONE, FUSION_RESIDUAL_RMS_NORM = 0, 1
_FLOATS = ("FLOAT", "HALF", "BF16")


@dataclass(frozen=True)
class Refusal:
    """Why something was left as it was: ``stage`` is "fuse", "split" or "attention"."""

    where: str
    reason: str
    stage: str


class Refused(Exception):  # noqa: N818 - control flow inside the matchers, never seen outside
    """Raised inside a matcher with the reason."""


@dataclass(frozen=True)
class FusionSite:
    """One all-reduce -> residual add -> RMSNorm place. Tensors and layers are given by name.

    Attributes:
        all_reduce: The AllReduce layer.
        layers: Every layer that the fused operation replaces.
        x: Tensor that holds this rank's partial sums, [tokens, hidden].
        residual: Residual stream before the add, [tokens, hidden].
        sum: Residual stream after the add.
        normed: Result of the norm.
        gamma: Norm weight, [hidden] or [1, hidden].
        bias: Bias added after the reduction, or None.
        eps: Epsilon under the square root.
        group: World ranks that take part.
        kind: What computed ``x``.
    """

    all_reduce: str
    layers: tuple[str, ...]
    x: str
    residual: str
    sum: str
    normed: str
    gamma: str
    bias: str | None
    eps: float
    group: tuple[int, ...]
    kind: SiteKind


@dataclass(frozen=True)
class NormMatch:
    """An RMSNorm chain: its layers, weight, epsilon and result."""

    layers: tuple[Node, ...]
    gamma: str
    eps: float
    output: str


def is_all_reduce(node: Node) -> bool:
    """Whether a layer is an all-reduce of TensorRT-LLM."""
    return node.plugin_key == ALL_REDUCE


def is_collective(node: Node) -> bool:
    """Whether a layer is a stock collective (not one of this project's)."""
    return node.plugin_key is not None and node.plugin_key[2] != NAMESPACE and node.plugin_name in COLLECTIVES


def find_sites(graph: Graph) -> tuple[list[FusionSite], list[Refusal]]:
    """Find every fusion site among the live layers, in execution order, and the candidates that are none.

    A sum may be read by its own norm, by the next site's residual add and by nothing else; a site whose sum has
    another reader is refused. Sums that feed the residual add of a refused candidate are allowed: the fused
    operation then gathers its residual.
    """
    matches: list[FusionSite] = []
    refused: list[Refusal] = []
    for node in graph.ordered():
        if not is_all_reduce(node):
            continue
        try:
            matches.append(_match(graph, node))
        except Refused as refusal:
            refused.append(Refusal(node.name, str(refusal), "fuse"))
    kinds = _kinds(graph, matches)
    adds = _residual_adds(graph)
    matched = {name for site in matches for name in site.layers}
    sites: list[FusionSite] = []
    for site, following, kind in zip(matches, [*matches[1:], None][: len(matches)], kinds, strict=True):
        # A residual add of a later site that is not the next would read a residual stream that is gone by then.
        allowed = {n for n in adds if n.name not in matched or (following is not None and n.name in following.layers)}
        reason = _other_reader(graph, site, allowed)
        if reason:
            refused.append(Refusal(site.all_reduce, reason, "fuse"))
        else:
            sites.append(FusionSite(**{**site.__dict__, "kind": kind}))
    return sites, refused


def _match(graph: Graph, node: Node) -> FusionSite:
    fusion_op = int(node.fields.get("fusion_op", FUSION_NONE))
    if fusion_op == FUSION_NONE:
        return _match_chain(graph, node)
    if fusion_op == FUSION_RESIDUAL_RMS_NORM:
        return _match_fused(graph, node)
    raise Refused(f"fusion_op {fusion_op} is none of NONE and RESIDUAL_RMS_NORM")


def _group(node: Node) -> tuple[int, ...]:
    return tuple(int(r) for r in np.ravel(np.asarray(node.fields.get("group", ()))))


def _first(node: Node) -> str:
    if node.inputs[0] is None:
        raise Refused("input 0 is not connected")
    return node.inputs[0]


def _other_input(node: Node, name: str) -> str:
    a, b = node.inputs[:2]
    if a == b or a is None or b is None:
        raise Refused(f"layer {node.name} reads the same tensor twice")
    return b if a == name else a


def _match_chain(graph: Graph, node: Node) -> FusionSite:
    layers = [node]
    x, current = _first(node), node.outputs[0]
    bias: str | None = None
    while True:
        reader = graph.single_reader(current)
        if reader is None:
            count = len(graph.live_readers(current)) + (current in graph.outputs)
            raise Refused(f"the all-reduce result {current!r} has {count} readers, expected only the residual add")
        if reader.kind == "CAST" and graph.dtype(reader.outputs[0]) in _FLOATS:
            pass
        elif reader.kind == "ELEMENTWISE" and reader.op() == "PROD":
            factor = graph.scalar(_other_input(reader, current))
            if factor != 1.0:
                raise Refused(f"layer {reader.name} scales the branch by {factor or 'a tensor'}, only 1.0 is fused")
        elif reader.kind == "ELEMENTWISE" and reader.op() == "SUM":
            other = _other_input(reader, current)
            if not graph.is_constant(other):
                break
            if bias is not None:
                raise Refused(f"layer {reader.name} adds a second bias")
            bias = other
        else:
            raise Refused(f"layer {reader.name} ({reader.kind}) stands between the all-reduce and the residual add")
        layers.append(reader)
        current = reader.outputs[0]
    total = reader.outputs[0]
    norm = _single_norm(graph, total)
    cast_in = graph.producer.get(x)
    if graph.dtype(x) != graph.dtype(total) and cast_in is not None and cast_in.kind == "CAST":
        # A cast to the collective's own dtype; the fused operation works in the model's.
        if graph.single_reader(x) is not node:
            raise Refused(f"the cast {cast_in.name} in front of the all-reduce has another reader")
        layers.append(cast_in)
        x = _first(cast_in)
    _check_rows(graph, x, other, total)
    _check_eps(norm.eps)
    return FusionSite(
        all_reduce=node.name,
        layers=tuple(n.name for n in (*layers, reader, *norm.layers)),
        x=x,
        residual=other,
        sum=total,
        normed=norm.output,
        gamma=norm.gamma,
        bias=None if bias is None else _vector(graph, bias, graph.shape(total)[1]),
        eps=norm.eps,
        group=_group(node),
        kind=SiteKind.MLP,
    )


def _match_fused(graph: Graph, node: Node) -> FusionSite:
    flags = {k: int(node.fields.get(k, 0)) for k in ("affine", "bias", "scale", "strategy")}
    if not flags["affine"] or flags["scale"]:
        raise Refused("the fused all-reduce has no norm weight, or a scale")
    inputs = [n for n in node.inputs if n is not None]
    # Inputs are tensor, [workspace], [bias], residual, norm weight: counted from the end, the workspace is skipped.
    tail = 2 + flags["bias"]
    if len(inputs) not in (1 + tail, 2 + tail):
        raise Refused(f"the fused all-reduce has {len(inputs)} inputs, expected {1 + tail} or {2 + tail}")
    residual, gamma = inputs[-2:]
    x, layers = inputs[0], [node]
    normed, total = node.outputs[:2]
    _check_rows(graph, x, residual, total)
    _check_eps(float(node.fields["eps"]))
    hidden = graph.shape(total)[1]
    return FusionSite(
        all_reduce=node.name,
        layers=tuple(n.name for n in layers),
        x=x,
        residual=residual,
        sum=total,
        normed=normed,
        gamma=_vector(graph, gamma, hidden),
        bias=_vector(graph, inputs[-3], hidden) if flags["bias"] else None,
        eps=float(node.fields["eps"]),
        group=_group(node),
        kind=SiteKind.MLP,
    )


def _check_rows(graph: Graph, x: str, residual: str, total: str) -> None:
    for name in (x, residual):
        shape = graph.shape(name)
        if len(shape) != 2 or shape[1] < 8 or shape[1] % 8:
            raise Refused(f"tensor {name!r} has shape {shape}, expected [tokens, hidden] with hidden a multiple of 8")
        if graph.dtype(name) not in _FLOATS or graph.dtype(name) != graph.dtype(total):
            raise Refused(f"tensor {name!r} is {graph.dtype(name)}, the residual stream is {graph.dtype(total)}")
    if not graph.shape(x) == graph.shape(residual) == graph.shape(total):
        raise Refused(f"shapes of {x!r}, {residual!r} and {total!r} differ")
    if x in graph.outputs:
        raise Refused(f"the all-reduce's input {x!r} is a network output")


def _check_eps(eps: float) -> None:
    if not 0.0 <= eps <= 1.0:
        raise Refused(f"epsilon {eps} is outside 0..1")


def _vector(graph: Graph, name: str, hidden: int) -> str:
    """The [hidden] constant behind its reshape to [1, hidden], or the constant itself."""
    node = graph.producer.get(name)
    if node is not None and node.kind == "SHUFFLE" and graph.is_constant(name):
        source = node.inputs[0]
        if source is not None and graph.shape(source) == (hidden,):
            return source
    shape = graph.shape(name)
    if not graph.is_constant(name) or shape not in ((hidden,), (1, hidden)):
        raise Refused(f"tensor {name!r} with shape {shape} is no constant vector of {hidden}")
    return name


def _single_norm(graph: Graph, total: str) -> NormMatch:
    reasons: list[str] = []
    found: list[NormMatch] = []
    for node, _ in graph.live_readers(total):
        try:
            match = match_rms_norm(graph, total, node)
        except Refused as reason:
            reasons.append(str(reason))
            continue
        if match is not None and all(match.output != f.output for f in found):
            found.append(match)
    if len(found) == 1:
        return found[0]
    if found:
        raise Refused(f"the sum {total!r} feeds {len(found)} norms")
    raise Refused(reasons[0] if reasons else f"no RMSNorm reads the sum {total!r}")


def match_rms_norm(graph: Graph, source: str, first: Node) -> NormMatch | None:
    """Match the RMSNorm layer chain that starts at ``source`` through its reader ``first``.

    The chain is [cast to fp32], square, mean over the last axis, plus eps, square root, divide, [cast back],
    times weight: y = x / sqrt(mean(x^2) + eps) * weight.

    Returns:
        The match, or None where ``first`` starts no such chain.

    Raises:
        Refused: when it does start one but something in it is not as expected.
    """
    layers: list[Node] = []
    x = source
    if first.kind == "CAST" and graph.dtype(first.outputs[0]) == "FLOAT":
        layers.append(first)
        x = first.outputs[0]
    starts = [n for n, _ in graph.live_readers(x) if n.kind == "ELEMENTWISE" and _is_square(graph, n, x)]
    if not starts or (x == source and first not in starts):
        return None
    square = starts[0]
    mean = _step(graph, square, "REDUCE", "AVG")
    if int(mean.layer.axes) != 1 << (len(graph.shape(x)) - 1) or not mean.layer.keep_dims:
        raise Refused(f"layer {mean.name} does not average over the last axis")
    plus = _step(graph, mean, "ELEMENTWISE", "SUM")
    eps = graph.scalar(_other_input(plus, mean.outputs[0]))
    if eps is None:
        raise Refused(f"layer {plus.name} adds no readable epsilon")
    root = _step(graph, plus, "UNARY", "SQRT")
    divide = _step(graph, root, "ELEMENTWISE", "DIV")
    if divide.inputs[:2] != [x, root.outputs[0]]:
        raise Refused(f"layer {divide.name} does not divide the input by its root mean square")
    layers += [square, mean, plus, root, divide]
    if x != source and (x in graph.outputs or {n for n, _ in graph.live_readers(x)} != {square, divide}):
        raise Refused(f"tensor {x!r} inside the norm has another reader")
    current = divide
    after = graph.single_reader(current.outputs[0])
    if after is not None and after.kind == "CAST":
        layers.append(after)
        current = after
    scale = _step(graph, current, "ELEMENTWISE", "PROD")
    layers.append(scale)
    gamma = _vector(graph, _other_input(scale, current.outputs[0]), graph.shape(source)[-1])
    if graph.dtype(scale.outputs[0]) != graph.dtype(source):
        raise Refused(f"the norm of {source!r} changes its dtype")
    return NormMatch(tuple(layers), gamma, eps, scale.outputs[0])


def _is_square(graph: Graph, node: Node, x: str) -> bool:
    if node.op() == "PROD":
        return node.inputs[:2] == [x, x]
    return node.op() == "POW" and node.inputs[0] == x and graph.scalar(node.inputs[1] or "") == 2.0


def _step(graph: Graph, node: Node, kind: str, op: str) -> Node:
    reader = graph.single_reader(node.outputs[0])
    if reader is None or reader.kind != kind or reader.op() != op:
        raise Refused(f"layer {node.name} is not followed by one {kind} {op}")
    return reader


def _residual_adds(graph: Graph) -> set[Node]:
    """Adds whose one operand is an all-reduce result seen through casts, bias and multiplier."""
    adds: set[Node] = set()
    for node in graph.live:
        if not is_all_reduce(node):
            continue
        if len(node.outputs) > 1:
            adds.add(node)
        todo = node.outputs[:1]
        while todo:
            name = todo.pop()
            for reader, _ in graph.live_readers(name):
                others = [n for n in reader.inputs if n is not None and n != name]
                passes = reader.kind == "CAST" or (reader.kind == "ELEMENTWISE" and reader.op() in ("SUM", "PROD"))
                if passes and all(graph.is_constant(n) for n in others):
                    todo.extend(reader.outputs)
                elif reader.kind == "ELEMENTWISE" and reader.op() == "SUM":
                    adds.add(reader)
    return adds


def _other_reader(graph: Graph, site: FusionSite, allowed: set[Node]) -> str:
    if site.sum in graph.outputs:
        return f"the sum {site.sum!r} is a network output"
    own = set(site.layers)
    for reader, _ in graph.live_readers(site.sum):
        if reader.name not in own and reader not in allowed:
            return f"the sum {site.sum!r} is read by layer {reader.name}, neither its norm nor a residual add"
    return ""


def _kinds(graph: Graph, sites: list[FusionSite]) -> list[SiteKind]:
    """Attention where a GPTAttention layer lies between the previous norm and the site, else by the layer's name."""
    stop = frozenset(n for s in sites for n in (s.normed, s.residual, s.sum))
    kinds = []
    for site in sites:
        between = graph.ancestors([site.x], stop)
        attention = any(n.plugin_name in ("GPTAttention", "TokenWeaveAttention") for n in between)
        named = "attention" in site.all_reduce.lower() or "attn" in site.all_reduce.lower()
        kinds.append(SiteKind.ATTENTION if attention or named else SiteKind.MLP)
    return kinds
