"""Registering plugin libraries with TensorRT, and the Python side of the library's C interface."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trtllm_tokenweave import plugin_library, tensorrt_module
from trtllm_tokenweave.c_interface import LibraryError, Status
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.libraries import find_library, load_library
from trtllm_tokenweave.plugin_library import Attempt, Counters, PluginLibrary, register
from trtllm_tokenweave.table import LaunchConfig

CDLL = ctypes.CDLL
HEADER = Path(__file__).resolve().parents[2] / "plugins/trt/include/tokenweave/plugins.h"


class Registry:
    """TensorRT's registry: loading a file makes the creators known that ``holds`` lists for it."""

    def __init__(self, holds: dict[str, tuple[str, ...]]) -> None:
        self.holds, self.known, self.loads = holds, set[str](), list[str]()

    def load_library(self, path: str) -> object | None:
        self.loads.append(path)
        creators = self.holds[Path(path).name]
        if "crash" in creators:
            raise RuntimeError("undefined symbol")
        if set(creators) & self.known:
            return None
        if not creators:
            tensorrt_module.LINES.record(1, "no getCreators")
        self.known |= set(creators)
        return object() if creators else None

    def get_creator(self, name: str, version: str, namespace: str) -> object | None:
        assert (version, namespace) == ("1", "tokenweave")
        return object() if name in self.known else None


@pytest.fixture
def registry(trt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry(
        {"ours.so": ("A", "B"), "copy.so": ("A", "B"), "part.so": ("A",), "none.so": (), "bad.so": ("crash",)}
    )
    trt.__dict__["get_plugin_registry"] = lambda: made
    monkeypatch.setattr(plugin_library, "_registered", set())
    monkeypatch.setattr("ctypes.CDLL", lambda _path: None)
    for name in made.holds:
        (tmp_path / name).touch()
    return made


def test_a_library_is_registered_once(registry: Registry, tmp_path: Path) -> None:
    link = tmp_path / "link.so"
    link.symlink_to("ours.so")
    for path in (tmp_path / "ours.so", link, tmp_path / "ours.so"):
        register(path, ("A", "B"))
    assert registry.loads == [str(tmp_path / "ours.so")]


def test_another_copy_of_the_same_plugins_is_refused(registry: Registry, tmp_path: Path) -> None:
    """TensorRT would run that one, and this one's counters, errors and memory would be asked for."""
    register(tmp_path / "ours.so", ("A", "B"))
    for _ in range(2):
        with pytest.raises(UserError, match=r"copy\.so: another library has registered its plugins A, B\. Fix: load"):
            register(tmp_path / "copy.so", ("A", "B"))
    register(tmp_path / "ours.so", ("A", "B"))


def test_what_the_loader_says_comes_first(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", CDLL)
    with pytest.raises(UserError, match=r"none\.so: cannot be loaded: .*file too short"):
        register(tmp_path / "none.so")
    assert not registry.loads


def test_other_libraries(registry: Registry, tmp_path: Path) -> None:
    register(tmp_path / "part.so")
    assert registry.known == {"A"}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("gone.so", "gone.so: there is no such file. Fix: build it"),
        ("part.so", "part.so: TensorRT does not know its plugins B. Fix: build it with the headers of TensorRT 10.6.0"),
        ("none.so", "none.so: TensorRT does not know its plugins A, B: no getCreators"),
        ("bad.so", "bad.so: cannot be loaded: undefined symbol"),
    ],
)
def test_libraries_that_do_not_serve(registry: Registry, tmp_path: Path, file: str, message: str) -> None:
    tensorrt_module.LINES.record(1, "an earlier error")
    for _ in range(2):  # a failure is not remembered as a success
        with pytest.raises(UserError) as caught:
            register(tmp_path / file, ("A", "B"))
        assert message in str(caught.value)
        assert "earlier" not in str(caught.value)


def test_a_library_without_any_plugin(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.so: TensorRT does not know its plugins"):
        register(tmp_path / "none.so")


# ---- the C interface


def test_counters_mirror_the_header() -> None:
    text = HEADER.read_text(encoding="utf-8")
    struct = re.search(r"typedef struct TwPluginCounters \{(.*?)\} TwPluginCounters;", text, re.DOTALL)
    assert struct is not None
    fields = re.findall(r"^\s*(size_t|uint64_t) (\w+);", struct.group(1), re.MULTILINE)
    types = {"size_t": ctypes.c_size_t, "uint64_t": ctypes.c_uint64}
    assert [(name, types[kind]) for kind, name in fields] == list(Counters._fields_)


def test_the_library() -> None:
    if find_library("tokenweave_trt") is None:
        pytest.skip("libtokenweave_trt.so is not built (cmake --build build)")
    library = PluginLibrary(load_library("tokenweave_trt"))
    library.reset_counters()
    assert set(library.counters().values()) == {0}
    with pytest.raises(LibraryError, match="create the execution contexts first"):
        library.tensor_memory(0, 4096)
    library.override_launch(LaunchConfig(ctas=8, threads=512, gemm_sms=120))
    with pytest.raises(LibraryError, match="ctas 134, not 2 to 132"):
        library.override_launch(LaunchConfig().model_copy(update={"ctas": 134}))
    library.override_launch(None)


def test_memory_and_errors() -> None:
    def tensor_memory(device: Any, num_bytes: Any, address: Any, status: Any) -> int:
        assert (device.value, num_bytes.value) == (3, 1 << 40)
        ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))[0] = 4096
        return 0

    def last_error(status: Any) -> int:
        ctypes.cast(status, ctypes.POINTER(Status))[0].message = b"rank 1 is gone"
        return 6

    library = PluginLibrary(SimpleNamespace(twPluginTensorMemory=tensor_memory, twPluginLastError=last_error))
    assert library.tensor_memory(3, 1 << 40) == 4096
    assert library.last_error() == "rank 1 is gone"


class Said:
    """A plugin library with a last error."""

    text = "an earlier error"

    def last_error(self) -> str:
        return self.text


def test_an_error_says_what_was_said_since_the_call_began(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said()
    loaded = cache(lambda: said)
    monkeypatch.setattr(plugin_library, "plugin_library", loaded)
    assert str(Attempt().error("no step")) == "no step: TensorRT gave no reason"  # nothing is loaded
    loaded()
    tensorrt_module.LINES.record(1, "Skipping tactic 0x42")
    attempt = Attempt()
    assert str(attempt.error("no step")) == "no step: TensorRT gave no reason"
    tensorrt_module.LINES.record(1, "Error Code 2")
    said.text = "rank 1 is gone"
    assert str(attempt.error("no step")) == "no step: rank 1 is gone; Error Code 2"
    assert str(Attempt().error("no step")) == "no step: TensorRT gave no reason"


def test_reference_plugins_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_library, "find_library", lambda _name: None)
    with pytest.raises(UserError, match=r"libtokenweave_reference\.so: is not installed"):
        plugin_library.register_reference("AllReduce")
