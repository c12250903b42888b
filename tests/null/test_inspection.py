"""The checks after a build, on layer lists in the form of TensorRT's engine inspector."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.stack import Stack, options

from trtllm_tokenweave.inspection import (
    BuildReport,
    Check,
    EngineLayer,
    Expected,
    Pair,
    check_layers,
    check_memory,
    check_weights,
    expect,
    parse_layers,
)
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.passes import WeaveResult, names, weave
from trtllm_tokenweave.plugin_specs import Half

#: The form of one layer in TensorRT's documentation of the inspector, with dynamic shapes.
DOCUMENTED = """{"Layers": [
  {"Name": "Reformatting CopyNode for Input Tensor 0 to conv1", "LayerType": "Reformat",
   "Inputs": [{"Name": "x", "Location": "Device", "Dimensions": [-1, 3, 224, 224],
               "Format/Datatype": "N/A due to dynamic shapes"}],
   "Outputs": [{"Name": "Reformatted Input Tensor 0 to conv1", "Location": "Device", "Dimensions": [-1, 3, 224, 224],
                "Format/Datatype": "N/A due to dynamic shapes"}],
   "ParameterType": "Reformat", "Origin": "REFORMAT", "TacticValue": "0x00000000000003ea", "StreamId": 0,
   "Metadata": ""},
  {"Name": "__myl_MulAdd_myl0_1", "LayerType": "kgen",
   "Inputs": [{"Name": "Reformatted Input Tensor 0 to conv1", "Dimensions": [-1, 3, 224, 224]}],
   "Outputs": [{"Name": "y", "Dimensions": [-1, 3, 224, 224]}], "TacticName": "__myl_MulAdd_0x1234", "StreamId": 0}
 ], "Bindings": ["x", "y"]}"""


def woven(**fields: Any) -> tuple[Any, WeaveResult]:
    network = Stack(**fields).build()
    return network, weave(network, options())


def layer_list(network: Any) -> list[dict[str, Any]]:
    """What the inspector would list for an engine that runs the network's layers in a topological order."""

    def tensors(found: list[str | None]) -> list[dict[str, Any]]:
        return [{"Name": name, "Location": "Device", "Dimensions": [-1, 16]} for name in found if name]

    return [
        {"Name": n.name, "LayerType": n.kind, "Inputs": tensors(n.inputs), "Outputs": tensors([*n.outputs])}
        for n in Graph(network).ordered()
        if n.kind != "CONSTANT"
    ]


def run(layers: list[Any], expected: Expected) -> dict[str, Check]:
    return {check.name: check for check in check_layers(parse_layers(json.dumps({"Layers": layers})), expected)}


def statuses(checks: dict[str, Check]) -> list[str]:
    order = ("chain order", "no copy between start and join", "overlap", "sizes on the host")
    return [checks[name].status for name in order]


NETWORK, RESULT = woven()
EXPECTED = expect(NETWORK, RESULT)
START, JOIN = names.start(1, Half.PREFIX), names.join(1, Half.PREFIX)


def test_the_documented_form() -> None:
    first, second = parse_layers(DOCUMENTED)
    assert (first.kind, first.inputs) == ("Reformat", ("x",))
    assert second.inputs == first.outputs == ("Reformatted Input Tensor 0 to conv1",)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "not JSON", '{"Layers": 3}', '{"Layers": []}'])
def test_anything_else_lists_nothing_and_checks_nothing(text: str) -> None:
    assert parse_layers(text) == []
    assert {check.status for check in check_layers(parse_layers(text), EXPECTED)} == {"unknown"}


def test_missing_keys() -> None:
    text = json.dumps({"Layers": ["a", {}, {"Name": "b", "Inputs": [{}], "Outputs": [{"Name": "t"}]}, {"Name": "c"}]})
    assert parse_layers(text) == [EngineLayer("a"), EngineLayer("b", "", None, ("t",)), EngineLayer("c")]


def test_a_network_promises_its_chain() -> None:
    assert RESULT.mode == "weave"
    starts = [name for name in EXPECTED.chain if "all_reduce" in name]
    assert len(starts) == len(EXPECTED.pairs) == 8  # two layers, two sites, two halves
    assert starts[:2] == [names.start(0, Half.PREFIX), names.start(0, Half.SUFFIX)]
    assert names.gate(0) in EXPECTED.chain
    assert Pair(START, JOIN, 2) in EXPECTED.pairs
    assert EXPECTED.memory_bytes is None


def test_constants_are_counted_once() -> None:
    weights = 8 * 16 * 24 * 4  # two layers, two sites, up and down, float32
    # Beside them norm weights, the lookup's constants and the chain.
    assert weights < EXPECTED.constant_bytes < weights + 1024


def test_the_prediction_knows_how_much_room_the_table_asks_for() -> None:
    expected = expect(NETWORK, RESULT, fused_memory_bytes=1000)
    assert RESULT.plan.region is not None
    assert expected.memory_bytes == round(1000 * max(1.0, RESULT.plan.region.lookup.activation_ratio))


def test_a_good_engine() -> None:
    checks = run(layer_list(NETWORK), EXPECTED)
    assert statuses(checks) == ["ok"] * 4, checks
    assert checks["overlap"].detail.endswith("of 8 collectives have layers beside them")


def test_fused_only_networks_have_an_order_only() -> None:
    network = Stack().build()
    result = weave(network, options(split=False))
    assert result.mode == "fuse"
    (order,) = run(layer_list(network), expect(network, result)).values()
    assert (order.name, order.status) == ("chain order", "ok")
    layers = layer_list(network)
    del layers[position(layers, names.start(1, Half.WHOLE))]
    (order,) = run(layers, expect(network, result)).values()
    assert order.status == "failed"
    assert check_layers([], Expected()) == []  # and stock networks not even that


def test_names_alone_prove_the_order_and_nothing_about_copies() -> None:
    checks = run([layer["Name"] for layer in layer_list(NETWORK)], EXPECTED)
    assert statuses(checks) == ["ok", "unknown", "ok", "ok"]


Change = Callable[[list[dict[str, Any]]], None]


def position(layers: list[dict[str, Any]], name: str) -> int:
    return [layer["Name"] for layer in layers].index(name)


def swap_collectives(layers: list[dict[str, Any]]) -> None:
    a, b = (position(layers, names.start(1, half)) for half in (Half.PREFIX, Half.SUFFIX))
    layers[a], layers[b] = layers[b], layers[a]


def lose_join(layers: list[dict[str, Any]]) -> None:
    del layers[position(layers, JOIN)]


def list_join_twice(layers: list[dict[str, Any]]) -> None:
    layers.append(layers[position(layers, JOIN)])


def copy_result(layers: list[dict[str, Any]]) -> None:
    """A reformat between the collective and its join: it reads what is still being written."""
    at = position(layers, JOIN)
    source = layers[at]["Inputs"][0]
    copied = {"Name": f"Reformatted {source['Name']}"}
    layers[at] = layers[at] | {"Inputs": [copied, *layers[at]["Inputs"][1:]]}
    layers.insert(at, {"Name": "copy", "LayerType": "Reformat", "Inputs": [source], "Outputs": [copied]})


def copy_kept(layers: list[dict[str, Any]]) -> None:
    """A copy of what the join keeps alive, made before the collective: the original may be overwritten."""
    at = position(layers, JOIN)
    kept = layers[at]["Inputs"][2]
    copied = {"Name": f"Reformatted {kept['Name']}"}
    layers[at] = layers[at] | {"Inputs": [*layers[at]["Inputs"][:2], copied, *layers[at]["Inputs"][3:]]}
    layers.insert(position(layers, START), {"Name": "copy", "LayerType": "NoOp", "Inputs": [kept], "Outputs": [copied]})


def read_early(layers: list[dict[str, Any]]) -> None:
    result = layers[position(layers, START)]["Outputs"][0]
    layers.insert(position(layers, JOIN), {"Name": "early", "LayerType": "gemm", "Inputs": [result], "Outputs": []})


def rename(layers: list[dict[str, Any]]) -> None:
    """Names that do not match, and nothing that says where they come from."""
    layers[position(layers, JOIN)]["Inputs"][0] = {"Name": "(Unnamed)"}


def hide_tensors(layers: list[dict[str, Any]]) -> None:
    del layers[position(layers, START)]["Outputs"]


def hide_inputs_between(layers: list[dict[str, Any]]) -> None:
    layers.insert(position(layers, JOIN), {"Name": "silent", "LayerType": "kgen"})


def size_from_device(layers: list[dict[str, Any]]) -> None:
    layers.insert(0, {"Name": "[DeviceToShapeHostCopy 2]", "LayerType": "DeviceToShapeHost"})


CHANGES: list[tuple[Change, list[str], str]] = [
    (swap_collectives, ["failed", "unknown", "unknown", "ok"], "place "),
    (lose_join, ["failed", "unknown", "unknown", "ok"], f"no layer {JOIN!r} (1 of "),
    (list_join_twice, ["failed", "unknown", "unknown", "ok"], "the engine lists"),
    (copy_result, ["ok", "failed", "ok", "ok"], "Reformat layer 'copy' reads results before"),
    (copy_kept, ["ok", "failed", "ok", "ok"], "NoOp layer 'copy' copies"),
    (read_early, ["ok", "failed", "ok", "ok"], "gemm layer 'early' reads results before"),
    (rename, ["ok", "unknown", "ok", "ok"], f"{JOIN!r} does not list"),
    (hide_tensors, ["ok", "unknown", "ok", "ok"], "are not listed"),
    (hide_inputs_between, ["ok", "unknown", "ok", "ok"], "the inputs of 'silent' are not listed"),
    (size_from_device, ["ok", "ok", "ok", "failed"], "brings a size from the device to the host"),
]


@pytest.mark.parametrize(("change", "wanted", "words"), CHANGES, ids=lambda v: getattr(v, "__name__", ""))
def test_what_is_wrong_is_seen(change: Change, wanted: list[str], words: str) -> None:
    layers = layer_list(NETWORK)
    change(layers)
    checks = run(layers, EXPECTED)
    assert statuses(checks) == wanted, checks
    assert any(words in check.detail for check in checks.values())


@pytest.mark.parametrize("change", [copy_result, swap_collectives])
def test_every_profile_is_looked_at(change: Change) -> None:
    def renamed(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        text = json.dumps(layers)
        return json.loads(  # type: ignore[no-any-return]
            text, object_hook=lambda d: d | {"Name": f"{d['Name']} [profile 1]"}
        )

    both = layer_list(NETWORK) + renamed(layer_list(NETWORK))
    assert statuses(run(both, EXPECTED)) == ["ok"] * 4
    second = layer_list(NETWORK)
    change(second)
    assert "failed" in statuses(run(layer_list(NETWORK) + renamed(second), EXPECTED))


def test_an_engine_in_which_nothing_overlaps() -> None:
    """All compute of both halves first, then all collectives: what the builder makes where a gate is missing."""
    layers = layer_list(NETWORK)
    chain = [layer for layer in layers if layer["Name"] in EXPECTED.chain]
    rest = [layer for layer in layers if layer["Name"] not in EXPECTED.chain]
    assert run(rest + chain, EXPECTED)["overlap"].status == "warning"


# ---- sizes


@pytest.mark.parametrize(
    ("memory", "predicted", "status"),
    [(276, 268, "ok"), (537, 268, "warning"), (5, 0, "warning"), (5, None, "unknown")],
)
def test_memory(memory: int, predicted: int | None, status: str) -> None:
    """276 and 537 MB for 268 are what halves with and without constant bounds took."""
    scale = 1_000_000
    check = check_memory(memory * scale, None if predicted is None else predicted * scale)
    assert (check.name, check.status) == ("activation memory", status)
    assert str(memory * scale) in check.detail


@pytest.mark.parametrize(
    ("plan", "constants", "status"),
    [(1212, 1210, "ok"), (2420, 1210, "warning"), (101, 100.7, "ok"), (202, 100.7, "warning"), (20, 10, "unknown")],
)
def test_weights(plan: float, constants: float, status: str) -> None:
    check = check_weights(int(plan * 1e6), int(constants * 1e6))
    assert (check.name, check.status) == ("weights stored once", status)


def test_only_failures_forbid_an_engine() -> None:
    checks = tuple(Check(status, status) for status in ("ok", "warning", "unknown", "failed"))
    assert [c.name for c in BuildReport(checks).failed] == ["failed"]
    assert str(Check("a", "ok", "b")) == "a: ok (b)"
