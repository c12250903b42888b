"""The built library of TensorRT-LLM's plugins: its symbols, and TensorRT's own registry where that is at hand.

Nothing here needs a GPU. The library is the one that the package finds, see trtllm_tokenweave.libraries.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.library_tests import looked_into, run_alone

from trtllm_tokenweave import recorder
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.libraries import find_library
from trtllm_tokenweave.recorder.trtllm_plugins import ALL_REDUCE, GEMM, SPECS
from trtllm_tokenweave.tensorrt_module import tensorrt

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = find_library("tokenweave_reference") or Path("libtokenweave_reference.so")
SYSTEM_LIBRARIES = re.compile(r"lib(c|m|dl|rt|pthread)\.so\.\d+|ld-linux-\S+\.so\.\d+")

FieldValues = dict[str, Any]
BF16 = recorder.DataType.BF16.value
GOOD: dict[str, FieldValues] = {
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
    "AllReduce": [{"group": None}, {"strategy": 2}, {"fusion_op": 3}, {"scale": 1}, {"type_id": 2}, {"site": 1}],
    "Gemm": [{"transa": 1}, {"transb": None}, {"use_fp8": 1}, {"pad_lda": 8}, {"type_id": 6}, {"kind": 0}],
}
#: Fields that creators take besides those that the specs list: not all releases send them.
MORE_FIELDS = {"AllReduce": {"config": "INT8", "counter": "INT32"}, "Gemm": {"pad_ldc": "INT32"}}


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
    return report


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


@pytest.mark.parametrize(("name", "key"), [("AllReduce", ALL_REDUCE), ("Gemm", GEMM)])
def test_creators_have_tensorrt_llms_fields(report: dict[str, Any], name: str, key: tuple[str, str, str]) -> None:
    assert report[name]["fields"] == types(name) | MORE_FIELDS[name]
    assert report[name]["identity"][:3] == list(key)


def test_plugins_come_back_from_an_engine(report: dict[str, Any]) -> None:
    assert report["AllReduce"]["loaded"] == ["AllReduce", 2, True]
    assert report["Gemm"]["loaded"] == ["Gemm", 1, True]


@pytest.mark.parametrize("name", GOOD)
def test_what_cannot_be_done_is_refused(report: dict[str, Any], name: str) -> None:
    assert report[name]["refused"] == [True] * len(BAD[name])


if __name__ == "__main__":
    print(json.dumps(registry_report()))
