"""What TensorRT made of a woven network: the checks that follow a build.

The engine inspector's JSON lists the layers in execution order. A check whose information is missing there says
"unknown", never "ok".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.passes import names
from trtllm_tokenweave.plugin_specs import ALL_REDUCE_RMS_NORM, NAMESPACE, STREAM_JOIN, Half
from trtllm_tokenweave.recorder.enums import DataType
from trtllm_tokenweave.tensorrt_module import tensorrt

if TYPE_CHECKING:
    from trtllm_tokenweave.passes import WeaveResult

CheckStatus = Literal["ok", "warning", "failed", "unknown"]

#: More activation memory than predicted by this factor is worth a warning.
MEMORY_RATIO = 1.10

#: A plan also holds kernels and TensorRT's own bookkeeping; weights may be padded. Measured: 101.0 MB for 100.7 MB of
#: weights, 1212 MB for 1210 MB.
WEIGHT_RATIO = 1.10
WEIGHT_SLACK = 32 << 20

#: Layers that bring a size from the device to the host, as trtexec's profiles name them.
_SIZE_FROM_DEVICE = re.compile(r"device\w*to\w*host", re.IGNORECASE)

#: Layers of other profiles than the first carry this, as do their tensors.
_PROFILE = re.compile(r" \[profile (\d+)\]$")


@dataclass(frozen=True)
class EngineLayer:
    """One layer of an engine; tensors are None where the inspector does not list them."""

    name: str
    kind: str = ""
    inputs: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Pair:
    """A collective on the communication stream and the join that waits for it.

    ``passed`` of the collective's outputs come out of the join under new names; as many of its inputs are kept alive.
    """

    start: str
    join: str
    passed: int


@dataclass(frozen=True)
class Expected:
    """What the network promises about its engine.

    Attributes:
        chain: Layer names of all collectives, joins and gates, in chain order.
        pairs: Which join belongs to which collective.
        constant_bytes: Size of all constants that are used, each counted once.
        memory_bytes: Predicted activation memory, None where nothing is known to compare with.
    """

    chain: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()
    constant_bytes: int = 0
    memory_bytes: int | None = None


def expect(network: Any, result: WeaveResult, fused_memory_bytes: int | None = None) -> Expected:
    """What to expect of the engine of a woven network.

    Args:
        network: The network, real or recorded, after the weave.
        result: What the weave did to it.
        fused_memory_bytes: Activation memory of the engine of the same network with ``split=False`` (or of the stock
            network), as `BuildReport.memory_bytes` reported it.
    """
    graph = Graph(network)
    # The chain is a total order, so that every order of the layers contains it.
    ours = [n for n in graph.ordered() if n.plugin_key and n.plugin_key[2] == NAMESPACE]
    chained = [n for n in ours if n.plugin_name in (ALL_REDUCE_RMS_NORM, STREAM_JOIN)]
    pairs = tuple(
        Pair(names.start(int(n.fields["site"]), Half(int(n.fields["half"]))), n.name, int(n.fields["num_aliased"]))
        for n in chained
        if n.plugin_name == STREAM_JOIN and n.fields["waits"]
    )
    region = result.plan.region
    ratio = 1.0 if region is None else max(1.0, region.lookup.activation_ratio)
    return Expected(
        chain=tuple(n.name for n in chained),
        pairs=pairs,
        constant_bytes=_constant_bytes(graph),
        memory_bytes=None if fused_memory_bytes is None else round(fused_memory_bytes * ratio),
    )


def _constant_bytes(graph: Graph) -> int:
    """Size of all constants that are used; dtypes that this package has no name for count one byte an element."""
    sizes = {member.name: member.itemsize for member in DataType}
    constants = [n.outputs[0] for n in graph.live if n.kind == "CONSTANT"]
    return sum(graph.elements(name) * sizes.get(graph.dtype(name), 1) for name in constants)


@dataclass(frozen=True)
class Check:
    """One question about an engine and its answer; ``detail`` has the figures."""

    name: str
    status: CheckStatus
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.status}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True)
class BuildReport:
    """The checks of one engine.

    Attributes:
        checks: All of them, whatever their outcome.
        num_layers: Layers in the engine.
        memory_bytes: Activation memory that one execution context needs.
        plan_bytes: Size of the plan.
    """

    checks: tuple[Check, ...] = field(default_factory=tuple)
    num_layers: int = 0
    memory_bytes: int = 0
    plan_bytes: int = 0

    @property
    def failed(self) -> tuple[Check, ...]:
        """Checks that did not hold: the engine must not be used."""
        return tuple(c for c in self.checks if c.status == "failed")


def inspect_plan(engine: Any, expected: Expected, plan_bytes: int) -> BuildReport:
    """Check an engine against what its network promised.

    Args:
        engine: The deserialised plan (``ICudaEngine``).
        expected: See :func:`expect`.
        plan_bytes: Size of the plan.
    """
    text = engine.create_engine_inspector().get_engine_information(tensorrt().LayerInformationFormat.JSON)
    layers = parse_layers(text)
    memory = int(engine.device_memory_size_v2)
    checks = (
        *check_layers(layers, expected),
        check_memory(memory, expected.memory_bytes),
        check_weights(plan_bytes, expected.constant_bytes),
    )
    return BuildReport(checks, len(layers), memory, plan_bytes)


# ---- the inspector's JSON


def parse_layers(text: str) -> list[EngineLayer]:
    """Layers in execution order; empty for anything that is not the inspector's JSON.

    With profiling verbosity LAYER_NAMES_ONLY a layer is its name, with NONE there are no names.
    """
    try:
        data = json.loads(text)
    except ValueError:
        return []
    listed = data.get("Layers") if isinstance(data, dict) else None
    return [_layer(entry) for entry in listed if entry] if isinstance(listed, list) else []


def _layer(entry: Any) -> EngineLayer:
    if not isinstance(entry, dict):
        return EngineLayer(str(entry))
    name, kind = str(entry.get("Name", "")), str(entry.get("LayerType", ""))
    return EngineLayer(name, kind, _tensors(entry.get("Inputs")), _tensors(entry.get("Outputs")))


def _tensors(entries: Any) -> tuple[str, ...] | None:
    if not isinstance(entries, list):
        return None
    found = [str(entry.get("Name") or "") if isinstance(entry, dict) else str(entry) for entry in entries]
    return tuple(found) if all(found) else None


def _by_profile(layers: Iterable[EngineLayer]) -> dict[int, list[EngineLayer]]:
    """Layers of each optimisation profile, in order, with the names of the first."""

    def plain(tensors: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if tensors is None else tuple(_PROFILE.sub("", name) for name in tensors)

    found: dict[int, list[EngineLayer]] = {}
    for layer in layers:
        match = _PROFILE.search(layer.name)
        stripped = EngineLayer(_PROFILE.sub("", layer.name), layer.kind, plain(layer.inputs), plain(layer.outputs))
        found.setdefault(int(match.group(1)) if match else 0, []).append(stripped)
    return found


# ---- the checks


def check_layers(layers: Sequence[EngineLayer], expected: Expected) -> list[Check]:
    """The checks of the layer list: the chain's order, and where the network is split copies, overlap and sizes."""
    if not expected.chain:
        return []
    order, copies, overlap, sizes = "chain order", "no copy between start and join", "overlap", "sizes on the host"
    names_of = (order, copies, overlap, sizes) if expected.pairs else (order,)
    if not any(layer.name for layer in layers):
        why = "the engine lists no layers: build with detailed profiling verbosity"
        return [Check(name, "unknown", why) for name in names_of]
    profiles = _by_profile(layers)
    problem = next((p for listed in profiles.values() if (p := _order_problem(listed, expected.chain))), "")
    checks = [Check(order, "failed" if problem else "ok", problem or f"{len(expected.chain)} layers")]
    if not expected.pairs:
        return checks
    if problem:
        checks += [Check(name, "unknown", problem) for name in (copies, overlap)]
    else:
        checks += [_copies(copies, profiles.values(), expected.pairs), _overlap(overlap, profiles.values(), expected)]
    return [*checks, _sizes(sizes, layers)]


def _order_problem(layers: Sequence[EngineLayer], chain: Sequence[str]) -> str:
    """What is wrong with the order of the chain's layers; empty when nothing is."""
    wanted = set(chain)
    listed = [layer.name for layer in layers if layer.name in wanted]
    missing = [name for name in chain if name not in listed]
    if missing:
        return f"the engine has no layer {missing[0]!r} ({len(missing)} of {len(chain)} are missing)"
    if len(listed) != len(chain):
        return f"the engine lists {len(listed)} layers for {len(chain)} names of the chain"
    at = next((i for i, (a, b) in enumerate(zip(listed, chain, strict=True)) if a != b), None)
    return "" if at is None else f"place {at} of the chain is {listed[at]!r}, expected {chain[at]!r}"


def _copies(name: str, profiles: Iterable[Sequence[EngineLayer]], pairs: Sequence[Pair]) -> Check:
    """Whether each join takes what its collective wrote and read, and nobody reads results before it."""
    unknown = ""
    for layers in profiles:
        at = {layer.name: i for i, layer in enumerate(layers)}
        for pair in pairs:
            start, join = layers[at[pair.start]], layers[at[pair.join]]
            between = layers[at[pair.start] + 1 : at[pair.join]]
            if start.inputs is None or start.outputs is None or join.inputs is None:
                unknown = unknown or f"the tensors of {pair.start!r} or {pair.join!r} are not listed"
                continue
            results = start.outputs[: pair.passed]
            early = next((layer for layer in between if set(results) & set(layer.inputs or ())), None)
            if early is not None:
                return Check(name, "failed", f"{early.kind} layer {early.name!r} reads results before {pair.join!r}")
            silent = next((layer.name for layer in between if layer.inputs is None), None)
            if silent is not None:
                unknown = unknown or f"the inputs of {silent!r} are not listed"
            for tensor in (*results, *start.inputs[: pair.passed]):
                if tensor in join.inputs:
                    continue
                writer = next(
                    (x for x in layers if set(x.outputs or ()) & set(join.inputs) and x.inputs == (tensor,)), None
                )
                if writer is not None:
                    return Check(
                        name, "failed", f"{writer.kind} layer {writer.name!r} copies {tensor!r} for {pair.join!r}"
                    )
                unknown = unknown or f"{pair.join!r} does not list {tensor!r} of {pair.start!r}"
    if unknown:
        return Check(name, "unknown", unknown)
    return Check(name, "ok", f"{len(pairs)} collectives")


def _overlap(name: str, profiles: Iterable[Sequence[EngineLayer]], expected: Expected) -> Check:
    """How many collectives have layers of other kinds between their start and their join."""
    pairs, ours = expected.pairs, set(expected.chain)
    beside = []
    for layers in profiles:
        at = {layer.name: i for i, layer in enumerate(layers)}
        spans = [layers[at[pair.start] + 1 : at[pair.join]] for pair in pairs]
        beside.append(sum(any(layer.name not in ours for layer in span) for span in spans))
    detail = f"{min(beside)} of {len(pairs)} collectives have layers beside them"
    return Check(name, "ok" if min(beside) else "warning", detail)


def _sizes(name: str, layers: Sequence[EngineLayer]) -> Check:
    """Whether the split is computed on the host; what TensorRT computes on the GPU instead is wrong."""
    found = next((layer.name for layer in layers if _SIZE_FROM_DEVICE.search(f"{layer.kind} {layer.name}")), None)
    if found is not None:
        return Check(name, "failed", f"{found!r} brings a size from the device to the host")
    return Check(name, "ok", "no layer brings a size from the device to the host")


def check_memory(memory_bytes: int, predicted_bytes: int | None) -> Check:
    """Whether the activations take what was predicted; halves without constant bounds would take twice as much."""
    name = "activation memory"
    if predicted_bytes is None:
        return Check(name, "unknown", f"{memory_bytes} bytes; no fuse-only engine to compare with")
    detail = f"{memory_bytes} bytes, {memory_bytes / max(predicted_bytes, 1):.2f} of the predicted {predicted_bytes}"
    return Check(name, "ok" if memory_bytes <= MEMORY_RATIO * predicted_bytes else "warning", detail)


def check_weights(plan_bytes: int, constant_bytes: int) -> Check:
    """Whether the weights that both halves read are in the plan once."""
    name = "weights stored once"
    detail = f"plan of {plan_bytes} bytes for {constant_bytes} bytes of constants"
    if constant_bytes <= WEIGHT_SLACK:
        return Check(name, "unknown", f"{detail}: too few to tell")
    limit = WEIGHT_RATIO * constant_bytes + WEIGHT_SLACK
    return Check(name, "ok" if plan_bytes <= limit else "warning", detail)
