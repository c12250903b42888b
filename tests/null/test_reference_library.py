"""The built library of TensorRT-LLM's plugins: its symbols, and TensorRT's own registry where that is at hand.

Nothing here needs a GPU. The library is the one that the package finds, see trtllm_tokenweave.libraries.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.library_tests import looked_into, run_alone

from trtllm_tokenweave import recorder
from trtllm_tokenweave import trt as seam
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.libraries import find_library
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.recorder.plugin import PluginKey
from trtllm_tokenweave.recorder.trtllm_plugins import ALL_GATHER, ALL_REDUCE, GEMM, GPT_ATTENTION, SPECS
from trtllm_tokenweave.tensorrt_module import tensorrt

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = find_library("tokenweave_reference") or Path("libtokenweave_reference.so")
SYSTEM_LIBRARIES = re.compile(r"lib(c|m|dl|rt|pthread)\.so\.\d+|ld-linux-\S+\.so\.\d+")

FieldValues = dict[str, Any]
BF16 = recorder.DataType.BF16.value
GOOD: dict[str, FieldValues] = {
    "AllGather": {"group": [0, 1], "type_id": BF16},
    "AllReduce": {
        "group": [0, 1],
        "type_id": BF16,
        "strategy": 3,
        "fusion_op": 1,
        "eps": 1e-5,
        "affine": 1,
        "bias": 0,
        "scale": 0,
    },
    "Gemm": {"transa": 0, "transb": 1, "pad_lda": 0, "pad_ldb": 0, "type_id": BF16, "use_fp8": 0, "alpha": 1.0},
}
#: Changes that the library refuses; None takes the field away.
BAD: dict[str, list[FieldValues]] = {
    "AllGather": [{"group": None}, {"group": [1, 1]}, {"type_id": None}, {"type_id": 2}, {"site": 1}],
    "AllReduce": [{"group": None}, {"strategy": 2}, {"fusion_op": 3}, {"scale": 1}, {"type_id": 2}, {"site": 1}],
    "Gemm": [{"transa": 1}, {"transb": None}, {"use_fp8": 1}, {"pad_lda": 8}, {"type_id": 6}, {"kind": 0}],
}
#: Llama networks whose plugins are all here.
LLAMAS: dict[str, dict[str, Any]] = {
    "stock": {},
    "fused": {"reduce_fusion": True, "all_reduce_strategy": "AUTO"},
    "gemm_plugin": {"gemm_plugin": True, "nccl_dtype": "float32"},
}
#: Fields that creators take besides those that the specs list: not all releases send them.
MORE_FIELDS: dict[str, dict[str, str]] = {
    "AllGather": {},
    "AllReduce": {"config": "INT8", "counter": "INT32"},
    "Gemm": {"pad_ldc": "INT32"},
}


def types(name: str) -> dict[str, str]:
    (spec,) = (spec for spec in SPECS if spec.key == (name, "1", "tensorrt_llm"))
    return {field.name: field.type.name for field in spec.fields}


def collection(trt: Any, name: str, values: FieldValues) -> Any:
    """The creator's arguments."""
    numpy_types = {"INT8": np.int8, "INT32": np.int32, "FLOAT32": np.float32}
    known = types(name)
    given = [(field, known.get(field, "INT32"), value) for field, value in values.items() if value is not None]
    return trt.PluginFieldCollection(
        [
            trt.PluginField(
                field, np.atleast_1d(np.asarray(value, numpy_types[kind])), getattr(trt.PluginFieldType, kind)
            )
            for field, kind, value in given
        ]
    )


# ---- in a process of its own: TensorRT's real registry


def registry_report() -> dict[str, Any]:
    """Load our library into TensorRT; create, store and load every plugin, and try bad fields."""
    trt = tensorrt()
    registry = trt.get_plugin_registry()
    registry.load_library(str(LIBRARY))
    report: dict[str, Any] = {}
    for name, values in GOOD.items():
        creator = registry.get_creator(name, "1", "tensorrt_llm")
        plugin = creator.create_plugin("layer", collection(trt, name, values))
        stored = bytes(plugin.serialize())
        loaded = creator.deserialize_plugin("layer", stored)
        report[name] = {
            "fields": {field.name: field.type.name for field in creator.field_names},
            "identity": [plugin.plugin_type, plugin.plugin_version, plugin.plugin_namespace, plugin.num_outputs],
            "loaded": [loaded.plugin_type, loaded.num_outputs, bytes(loaded.serialize()) == stored],
            "refused": [
                creator.create_plugin("layer", collection(trt, name, values | change)) is None for change in BAD[name]
            ],
        }
    return report | {"llama": llama_report(registry)}


def llama_report(registry: Any) -> dict[str, dict[str, list[str]]]:
    """What real creators say to the plugins of one rank's Llama networks: those made, and why the others are not."""
    config = preset("llama-3.2-1b").model_copy(update={"num_hidden_layers": 2})
    answers: dict[str, dict[str, list[str]]] = {}
    for name, options in LLAMAS.items():
        network = recorder.RecordedNetwork(name)
        build_llama(network, config, Mapping(world_size=2, rank=1, tp_size=2), None, NetworkOptions(**options))
        answers[name] = {"made": [], "refused": []}
        for layer in network.layers:
            if not isinstance(layer, recorder.IPluginV2Layer):
                continue
            plugin = layer.plugin
            key = (plugin.plugin_type, plugin.plugin_version, plugin.plugin_namespace)
            if key == GPT_ATTENTION and registry.get_creator(*key) is None:
                continue  # it is left out of a library that is built without FlashInfer
            try:
                seam.create_plugin(None, key, layer.name, plugin.fields)  # None: TensorRT's registry
                answers[name]["made"].append(key[0])
            except UserError as error:
                answers[name]["refused"].append(str(error))
    return answers


# ---- the tests


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY.name} is not built (cmake --build build)")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    try:
        tensorrt()
    except UserError as error:
        pytest.skip(str(error))
    answer: dict[str, Any] = json.loads(run_alone(__file__).splitlines()[-1])
    return answer


def test_only_tensorrts_two_functions_are_exported() -> None:
    exported = {line.split()[-1] for line in looked_into(LIBRARY, "nm", "-D", "--defined-only").splitlines()}
    assert exported == {"getCreators", "setLoggerFinder"}


def test_nothing_of_tensorrt_cuda_nccl_or_mpi_is_needed() -> None:
    undefined = [line.split()[-1] for line in looked_into(LIBRARY, "nm", "-D", "--undefined-only").splitlines()]
    foreign = re.compile(r"nvinfer|^cu[A-Z]|^cuda|^cublas|^nccl|^MPI_|^getInferLib|^getPluginRegistry|^_ZN")
    assert [name for name in undefined if foreign.search(name)] == []
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", looked_into(LIBRARY, "readelf", "-d"))
    assert needed
    assert [name for name in needed if not SYSTEM_LIBRARIES.fullmatch(name)] == []


@pytest.mark.parametrize("key", [ALL_GATHER, ALL_REDUCE, GEMM], ids=lambda key: key[0])
def test_creators_have_tensorrt_llms_fields(report: dict[str, Any], key: PluginKey) -> None:
    name = key[0]
    assert report[name]["fields"] == types(name) | MORE_FIELDS[name]
    assert report[name]["identity"][:3] == list(key)


def test_plugins_come_back_from_an_engine(report: dict[str, Any]) -> None:
    assert report["AllGather"]["loaded"] == ["AllGather", 1, True]
    assert report["AllReduce"]["loaded"] == ["AllReduce", 2, True]
    assert report["Gemm"]["loaded"] == ["Gemm", 1, True]


@pytest.mark.parametrize("name", GOOD)
def test_what_cannot_be_done_is_refused(report: dict[str, Any], name: str) -> None:
    assert report[name]["refused"] == [True] * len(BAD[name])


@pytest.mark.parametrize("name", LLAMAS)
def test_every_plugin_of_a_llama_network_is_made(report: dict[str, Any], name: str) -> None:
    answer = report["llama"][name]
    assert answer["refused"] == []
    counts = Counter(answer["made"])
    assert (counts["AllReduce"], counts["AllGather"]) == (4, 1)
    assert counts["Gemm"] == (9 if name == "gemm_plugin" else 0)
    assert counts["GPTAttention"] in (0, 2)


if __name__ == "__main__":
    print(json.dumps(registry_report()))
