"""The built TensorRT plugin library: its symbols, its C interface, and TensorRT's own registry where that is at hand.

Nothing here needs a GPU. The library is the one that the package finds, see trtllm_tokenweave.libraries.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.library_tests import looked_into, run_alone

from trtllm_tokenweave import recorder
from trtllm_tokenweave.config import read_environment
from trtllm_tokenweave.libraries import find_library
from trtllm_tokenweave.plugin_library import Counters
from trtllm_tokenweave.plugin_specs import (
    ALL_REDUCE_RMS_NORM,
    GEMM,
    NAMESPACE,
    SPECS,
    STREAM_JOIN,
    SUFFIX_ROWS,
    VERSION,
)
from trtllm_tokenweave.recorder.tensor import NetworkError
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableKey, TableRow, TuningTable

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = find_library("tokenweave_trt") or Path("libtokenweave_trt.so")
EXPORTS = {
    "getCreators",
    "setLoggerFinder",
    "twPluginGetCounters",
    "twPluginLastError",
    "twPluginResetCounters",
    "twPluginOverrideLaunch",
    "twPluginTensorMemory",
    "twVersion",
}
SYSTEM_LIBRARIES = re.compile(r"lib(c|m|dl|rt|pthread)\.so\.\d+|ld-linux-\S+\.so\.\d+")
NVINFER = ("libnvinfer.so.10", "libnvinfer_plugin.so.10", "libnvonnxparser.so.10")

FieldValues = dict[str, Any]
TABLE = TuningTable(
    key=TableKey(tp_size=2, hidden_size=4096, dtype="bfloat16"),
    rows=(TableRow(tokens=Bucket(lo=1025), mode="weave", split_offset=64, mlp=LaunchConfig(ctas=8)),),
)
GOOD: dict[str, FieldValues] = {
    ALL_REDUCE_RMS_NORM: {
        "group": [0, 1],
        "tp_rank": 1,
        "type_id": recorder.DataType.BF16.value,
        "eps": 1e-5,
        "kind": 1,
        "site": 3,
        "half": 1,
        "residual_sharded": 1,
        "gather_residual": 0,
        "has_bias": 0,
        "side_stream": 1,
        "weave_hash": 5,
        "table": TABLE.pack().hex(),
    },
    STREAM_JOIN: {"num_aliased": 2, "site": 3, "half": 1, "waits": 1},
    GEMM: {"type_id": recorder.DataType.BF16.value, "transb": 1, "kind": 1, "table": TABLE.pack().hex()},
    SUFFIX_ROWS: {"site": 3, "max_rows": 128},
}
#: Outputs of these, and how their layers are named.
MADE = {
    ALL_REDUCE_RMS_NORM: (3, "AllReduceRmsNorm site 3 suffix"),
    STREAM_JOIN: (3, "StreamJoin site 3 suffix"),
    GEMM: (1, "Gemm mlp"),
    SUFFIX_ROWS: (1, "TokenWeaveSuffixRows site 3"),
}
#: Changes that both the recorded creator and the library refuse; None takes the field away.
BAD: dict[str, list[FieldValues]] = {
    ALL_REDUCE_RMS_NORM: [
        {"group": None},
        {"group": [0, -1]},
        {"tp_rank": -1},
        {"type_id": 2},
        {"eps": 2.0},
        {"kind": 2},
        {"site": -1},
        {"half": 3},
        {"residual_sharded": 2},
        {"gather_residual": -1},
        {"has_bias": 3},
        {"side_stream": 2},
        {"weave_hash": -1},
        {"strategy": 1},
    ],
    STREAM_JOIN: [{"num_aliased": -1}, {"site": -2}, {"half": 3}, {"waits": 2}, {"site": None}, {"group": [0]}],
    SUFFIX_ROWS: [{"max_rows": None}, {"max_rows": 0}, {"site": -2}, {"half": 0}],
    GEMM: [{"type_id": None}, {"type_id": 2}, {"transb": 2}, {"kind": -1}, {"kind": 2}, {"transa": 0}],
}
#: Changes that only the library can judge.
BAD_TOGETHER: list[tuple[FieldValues, str]] = [
    ({"group": list(range(9))}, "has 9 ranks"),
    ({"group": [0, 0]}, "has a rank twice"),
    ({"tp_rank": 2}, "outside the group of 2"),
    ({"group": [0, 1, 2]}, "is for 2 ranks, the group has 3"),
    ({"type_id": 0}, "is for another dtype"),
    ({"table": TABLE.pack()[:-1].hex()}, "truncated"),
]


def specs() -> dict[str, recorder.PluginSpec]:
    return {spec.name: spec for spec in SPECS if spec.name in GOOD}


def changed(name: str, change: FieldValues) -> FieldValues:
    return {k: v for k, v in (GOOD[name] | change).items() if v is not None}


def collection(module: Any, name: str, values: FieldValues) -> Any:
    """The creator's arguments, for the recorded object model or the real one."""
    types = {field.name: field.type.name for field in specs()[name].fields}
    numpy_types = {"INT8": np.int8, "INT32": np.int32, "FLOAT32": np.float32}
    fields = []
    for field, value in values.items():
        kind = types.get(field, "INT32")
        data = bytes.fromhex(value) if kind == "CHAR" else np.atleast_1d(np.asarray(value, numpy_types[kind]))
        fields.append(module.PluginField(field, data, getattr(module.PluginFieldType, kind)))
    return module.PluginFieldCollection(fields)


class Status(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int32), ("message", ctypes.c_char * 512))


def load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    library.twVersion.restype = ctypes.c_char_p
    return library


def last_error(library: ctypes.CDLL) -> str:
    status = Status()
    library.twPluginLastError(ctypes.byref(status))
    return bytes(status.message).decode()


# ---- in a process of its own: TensorRT's real registry


def registry_report(folder: str) -> dict[str, Any]:
    """Load TensorRT and our library into it, and create every plugin from good and from bad fields."""
    for file in NVINFER:
        ctypes.CDLL(str(Path(folder, file)), mode=ctypes.RTLD_GLOBAL)
    trt = importlib.import_module(bindings() or "")
    registry = trt.get_plugin_registry()
    registry.load_library(str(LIBRARY))
    library = load()
    report: dict[str, Any] = {"version": trt.__version__}
    for name in GOOD:
        creator = registry.get_creator(name, VERSION, NAMESPACE)
        build_phase = trt.TensorRTPhase.BUILD
        good = creator.create_plugin("layer", collection(trt, name, GOOD[name]), build_phase)
        core = good.get_capability_interface(trt.PluginCapabilityType.CORE)
        build = good.get_capability_interface(trt.PluginCapabilityType.BUILD)
        runtime = good.get_capability_interface(trt.PluginCapabilityType.RUNTIME)
        report[name] = {
            "fields": [(field.name, field.type.name) for field in creator.field_names],
            "identity": [core.plugin_name, core.plugin_version, core.plugin_namespace],
            "interfaces": [type(x).__name__ for x in (core, build, runtime)],
            "outputs": build.num_outputs,
            "metadata": build.metadata_string,
            "errors": [],
        }
        for change in BAD[name] + [together for together, _ in BAD_TOGETHER if name == ALL_REDUCE_RMS_NORM]:
            bad = creator.create_plugin("layer", collection(trt, name, changed(name, change)), build_phase)
            report[name]["errors"].append("" if bad is not None else last_error(library))
    return report


def bindings() -> str | None:
    """The module that TensorRT's Python bindings are."""
    return next((name for name in ("tensorrt_bindings", "tensorrt") if importlib.util.find_spec(name)), None)


def nvinfer_folder() -> Path | None:
    """The folder of TensorRT 10's libraries."""
    root = read_environment().tensorrt_root
    spec = importlib.util.find_spec("tensorrt_libs")
    folders = [root / "lib", root] if root is not None else []
    folders += [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    folders += [Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu")]
    return next((folder for folder in folders if all((folder / file).exists() for file in NVINFER)), None)


# ---- the tests


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY.name} is not built (cmake --build build)")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    folder = nvinfer_folder()
    if folder is None:
        pytest.skip("no TensorRT 10 library: set TENSORRT_ROOT to a folder that has libnvinfer.so.10")
    if bindings() is None:
        pytest.skip("no TensorRT Python bindings: pip install tensorrt_cu12_bindings")
    answer: dict[str, Any] = json.loads(run_alone(__file__, str(folder)))
    return answer


def test_nothing_else_is_exported() -> None:
    assert {line.split()[-1] for line in looked_into(LIBRARY, "nm", "-D", "--defined-only").splitlines()} == EXPORTS


def test_nothing_of_tensorrt_cuda_or_mpi_is_needed() -> None:
    undefined = [line.split()[-1] for line in looked_into(LIBRARY, "nm", "-D", "--undefined-only").splitlines()]
    foreign = re.compile(r"nvinfer|^cu[A-Z]|^cuda|^MPI_|^getInferLib|^getPluginRegistry|^getLogger|^_ZN")
    assert [name for name in undefined if foreign.search(name)] == []
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", looked_into(LIBRARY, "readelf", "-d"))
    assert needed
    assert [name for name in needed if not SYSTEM_LIBRARIES.fullmatch(name)] == []


def test_loads_without_tensorrt() -> None:
    library = load()
    assert re.fullmatch(r"\d+\.\d+\.\d+", library.twVersion().decode())
    count = ctypes.c_int32()
    library.getCreators.restype = ctypes.c_void_p
    assert library.getCreators(ctypes.byref(count))
    assert count.value == len(SPECS)


def test_counters_tell_another_library_apart() -> None:
    library = load()
    counters = Counters(ctypes.sizeof(Counters))
    assert library.twPluginGetCounters(ctypes.byref(counters), None) == 0
    assert not any(getattr(counters, field[0]) for field in Counters._fields_[1:])
    status = Status()
    assert library.twPluginGetCounters(ctypes.byref(Counters(8)), ctypes.byref(status)) == 1
    assert b"struct_bytes" in status.message


def test_tensor_memory_needs_an_engine() -> None:
    data, status = ctypes.c_void_p(), Status()
    args = (ctypes.c_int32(0), ctypes.c_uint64(64), ctypes.byref(data), ctypes.byref(status))
    assert load().twPluginTensorMemory(*args) == 1
    assert b"create the execution contexts first" in status.message


@pytest.mark.parametrize("name", GOOD)
def test_recorded_creators_refuse_the_same(name: str) -> None:
    creator = recorder.get_plugin_registry().get_creator(name, VERSION, NAMESPACE)
    assert creator is not None
    assert creator.create_plugin("layer", collection(recorder, name, GOOD[name])).plugin_type == name
    for change in BAD[name]:
        with pytest.raises(NetworkError):
            creator.create_plugin("layer", collection(recorder, name, changed(name, change)))


@pytest.mark.parametrize("name", GOOD)
def test_real_creators_have_the_fields_of_the_specs(report: dict[str, Any], name: str) -> None:
    assert report[name]["fields"] == [[field.name, field.type.name] for field in specs()[name].fields]
    assert report[name]["identity"] == [name, VERSION, NAMESPACE]
    assert report[name]["interfaces"] == ["IPluginV3OneCore", "IPluginV3OneBuildV2", "IPluginV3OneRuntime"]


@pytest.mark.parametrize("name", GOOD)
def test_real_creators_refuse_bad_fields(report: dict[str, Any], name: str) -> None:
    for change, message in zip(BAD[name], report[name]["errors"], strict=False):
        (field,) = change
        assert message.startswith(f"{name}: layer 'layer': field '{field}'"), f"{change} gave {message!r}"


def test_real_creators_refuse_fields_that_do_not_fit_together(report: dict[str, Any]) -> None:
    errors = report[ALL_REDUCE_RMS_NORM]["errors"][len(BAD[ALL_REDUCE_RMS_NORM]) :]
    for (change, words), message in zip(BAD_TOGETHER, errors, strict=True):
        assert words in message, f"{change} gave {message!r}"


@pytest.mark.parametrize("name", GOOD)
def test_real_plugins_know_their_outputs_and_place(report: dict[str, Any], name: str) -> None:
    assert (report[name]["outputs"], report[name]["metadata"]) == MADE[name]


if __name__ == "__main__":
    print(json.dumps(registry_report(sys.argv[1])))
