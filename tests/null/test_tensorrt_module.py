"""How TensorRT is found, what versions are refused, and what its log says in errors."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.fake_gpu import FakeRuntime, fake_tensorrt, install_tensorrt

from trtllm_tokenweave import tensorrt_module
from trtllm_tokenweave.config import read_environment
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.tensorrt_module import (
    LINES,
    LogLines,
    create_builder,
    logger,
    progress_monitor,
    tensorrt,
    tensorrt_error,
)


@pytest.fixture
def lonely(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No TensorRT of any kind, whatever this machine has."""
    install_tensorrt(monkeypatch, None)
    real = importlib.util.find_spec
    hidden = ("tensorrt", "tensorrt_bindings")
    for name in hidden:
        monkeypatch.delitem(sys.modules, name, raising=False)

    def find_spec(name: str) -> Any:
        return real(name) if name not in hidden or name in sys.modules else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.delenv("TENSORRT_ROOT", raising=False)
    yield monkeypatch
    tensorrt.cache_clear()
    logger.cache_clear()


def bindings(version: str = "10.6.0") -> ModuleType:
    module = ModuleType("tensorrt_bindings")
    module.__spec__ = importlib.machinery.ModuleSpec("tensorrt_bindings", None)
    module.__dict__["__version__"] = version
    return module


def test_the_package_comes_first(lonely: pytest.MonkeyPatch) -> None:
    module = fake_tensorrt()
    lonely.setitem(sys.modules, "tensorrt", module)
    lonely.setitem(sys.modules, "tensorrt_bindings", bindings())
    assert tensorrt() is module


def test_bindings_without_a_package(lonely: pytest.MonkeyPatch) -> None:
    module = bindings()
    lonely.setitem(sys.modules, "tensorrt_bindings", module)
    assert tensorrt() is module


def test_neither(lonely: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no Python package tensorrt; .*tensorrt_bindings\. Fix: .*TENSORRT_ROOT"):
        tensorrt()


def test_a_root_without_the_library(lonely: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lonely.setitem(sys.modules, "tensorrt_bindings", bindings())
    lonely.setenv("TENSORRT_ROOT", str(tmp_path))
    with pytest.raises(UserError, match=r"TENSORRT_ROOT: is .*neither it nor its lib holds libnvinfer\.so\.10"):
        tensorrt()


@pytest.mark.parametrize("folder", ["", "lib"])
def test_the_library_of_the_root_is_loaded(lonely: pytest.MonkeyPatch, tmp_path: Path, folder: str) -> None:
    """It is no library here: that the loader says so proves that it was tried."""
    place = tmp_path / folder
    place.mkdir(exist_ok=True)
    (place / "libnvinfer.so.10").write_text("no library")
    lonely.setitem(sys.modules, "tensorrt_bindings", bindings())
    lonely.setenv("TENSORRT_ROOT", str(tmp_path))
    with pytest.raises(UserError, match=r"tensorrt_bindings cannot be loaded .*libnvinfer\.so\.10: "):
        tensorrt()


@pytest.mark.parametrize(
    ("version", "served"),
    [("10.5.0", False), ("10.6.0", True), ("10.16.1.post1", True), ("11.0.0", False), ("9.3.0", False)],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, served: bool) -> None:
    install_tensorrt(monkeypatch, fake_tensorrt(version))
    if served:
        assert tensorrt().__version__ == version
    else:
        with pytest.raises(UserError, match=rf"version {version} of tensorrt is not served: >= 10\.6, < 11 is needed"):
            tensorrt()
    tensorrt.cache_clear()


def test_the_real_bindings() -> None:
    """In a process of its own, because libraries can't be unloaded."""
    root = read_environment().tensorrt_root
    if root is None or not any((root / place / "libnvinfer.so.10").exists() for place in ("", "lib")):
        pytest.skip("TENSORRT_ROOT names no TensorRT 10")
    if importlib.util.find_spec("tensorrt_bindings") is None:
        pytest.skip("no TensorRT bindings: pip install tensorrt_cu12_bindings")
    code = (
        "from trtllm_tokenweave.tensorrt_module import logger, tensorrt; "
        "logger(); tensorrt().get_plugin_registry(); print(tensorrt().__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("10.")


def test_a_builder_that_cannot_be_made(lonely: pytest.MonkeyPatch) -> None:
    module = fake_tensorrt()

    LINES.record(1, "an earlier error")

    def no_builder(_log: Any) -> Any:
        LINES.record(1, "Unable to load library: libnvinfer_builder_resource.so.10.6.0")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    module.__dict__["Builder"] = no_builder
    lonely.setitem(sys.modules, "tensorrt", module)
    with pytest.raises(TokenWeaveError, match="TensorRT makes no builder: Unable to load library"):
        create_builder()


@pytest.fixture
def sdk(lonely: pytest.MonkeyPatch, tmp_path: Path, cuda: FakeRuntime) -> Path:
    """The libraries of an SDK that TENSORRT_ROOT names, all empty; the bindings that go with it are there."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnvinfer.so.10").touch()
    lonely.setenv("TENSORRT_ROOT", str(tmp_path))
    module = bindings()
    module.__dict__.update(Builder=lambda _log: "builder", ILogger=type("ILogger", (), {}))
    lonely.setitem(sys.modules, "tensorrt_bindings", module)
    lonely.setattr(tensorrt_module, "_load_libraries", lambda: None)
    return tmp_path / "lib"


KERNELS = "libnvinfer_builder_resource"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["", "_win"], [""]),
        (["_ptx", "_sm100", "_sm90", "_sm89", "_sm9", "_win_sm90"], ["_ptx", "_sm90"]),
        ([], []),
    ],
)
def test_the_builders_kernels_are_loaded_from_tensorrt_root(
    sdk: Path, lonely: pytest.MonkeyPatch, files: list[str], expected: list[str]
) -> None:
    for suffix in files:
        (sdk / f"{KERNELS}{suffix}.so.10.6.0").touch()
    loaded: list[str] = []
    lonely.setattr("ctypes.CDLL", lambda path: loaded.append(path))
    assert create_builder() == "builder"
    assert loaded == [str(sdk / f"{KERNELS}{suffix}.so.10.6.0") for suffix in expected]


def test_damaged_kernels(sdk: Path) -> None:
    (sdk / f"{KERNELS}.so.10.6.0").touch()
    with pytest.raises(UserError, match=rf"{KERNELS}\.so\.10\.6\.0: cannot be loaded: .*too short.* Fix: install"):
        create_builder()


def test_a_package_brings_its_own_kernels(lonely: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TENSORRT_ROOT may be there for the headers only."""
    lonely.setenv("TENSORRT_ROOT", str(tmp_path))
    module = fake_tensorrt()
    module.__dict__["Builder"] = lambda _log: "builder"
    lonely.setitem(sys.modules, "tensorrt", module)
    assert create_builder() == "builder"


def test_builds_say_how_far_they_are(trt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    trt.__dict__["IProgressMonitor"] = type("IProgressMonitor", (), {})
    clock = iter([0.0, 1.0, 5.0, 6.0, 11.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    said: list[str] = []
    monitor = progress_monitor(said.append)
    monitor.phase_start("Tactic Selection", None, 40)
    assert all(monitor.step_complete("Tactic Selection", step) for step in range(3))
    monitor.phase_finish("Tactic Selection")
    monitor.phase_finish("Tactic Selection")
    assert monitor.step_complete("Unknown", 4)  # never stops a build
    assert said == ["Tactic Selection: 2 of 40", "Unknown: 5 of 0"]


# ---- the log


def test_messages_go_to_logging_with_their_level(caplog: pytest.LogCaptureFixture) -> None:
    lines = LogLines("tokenweave-test")
    with caplog.at_level(logging.DEBUG, "tokenweave-test"):
        for severity, message in enumerate(("a", "b", "c", "50% d", "e")):
            lines.record(severity, message)
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert found == [("CRITICAL", "a"), ("ERROR", "b"), ("WARNING", "c"), ("INFO", "50% d"), ("DEBUG", "e")]
    assert lines.take_errors() == "a; b"


def test_only_the_newest_errors_are_kept_and_only_once() -> None:
    lines = LogLines("tokenweave-test", keep=2)
    for message in ("one", "two\nlines", "three"):
        lines.record(1, message)
    lines.record(2, "a warning")
    assert lines.take_errors() == "two lines; three"
    assert lines.take_errors() == ""


def test_errors_carry_the_log(trt: ModuleType) -> None:
    logger().log(1, "Error Code 4: no tactic")
    assert str(tensorrt_error("no plan", also="plugin says no")) == "no plan: plugin says no; Error Code 4: no tactic"
    assert str(tensorrt_error("no plan")) == "no plan: TensorRT gave no reason"
    assert logger() is logger()
    assert LINES is tensorrt_module.LINES


def test_what_tensorrt_calls_an_error_and_is_none(caplog: pytest.LogCaptureFixture) -> None:
    lines = LogLines("tokenweave-test", keep=2)
    caplog.set_level(logging.INFO, "tokenweave-test")
    lines.record(1, "the reason")
    for _ in range(9):
        lines.record(
            1, "[pluginResourceContext.cpp::getGpuAllocator::34] (Assertion mGpuAllocator != nullptr failed. )"
        )
    assert lines.take_errors() == "the reason"
    assert [record.getMessage() for record in caplog.records] == ["the reason"]
