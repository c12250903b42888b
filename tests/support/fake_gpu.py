"""Stand-ins for cuda.bindings.runtime and tensorrt, on host memory: they do what they are told and note what was asked.

They answer; none of them decides what the code under test decides.
"""

# ruff: noqa: ARG002, N802, N815  (CUDA's names and arguments)
from __future__ import annotations

import ctypes
import enum
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trtllm_tokenweave import tensorrt_module
from trtllm_tokenweave.device import cudart
from trtllm_tokenweave.recorder.enums import DataType

OUT_OF_MEMORY, CAPTURE_INVALID = 2, 901


class FakeRuntime:
    """CUDA's runtime: memory is the host's, work on a stream is done at once, or noted while a graph is captured.

    ``fails`` maps names of functions to the code that they return from now on.
    """

    cudaStreamNonBlocking = 1
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrMultiProcessorCount=16, cudaDevAttrClockRate=13)
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal="thread local")

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.calls: list[str] = []
        self.memory: dict[int, Any] = {}
        self.capturing: list[Callable[[], None]] | None = None
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.name, self.capability, self.driver = "Test GPU", (9, 0), 13000
        self._handles = iter(range(100, 10000))

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("cuda") or not callable(found):
            return found

        def noted(*args: Any) -> Any:
            self.calls.append(name)
            code = self.fails.get(name, 0)
            if code and name == "cudaStreamEndCapture":
                self.capturing = None  # it ends the capture also when it fails
            return (code, None) if code else found(*args)

        return noted

    def cudaGetErrorString(self, code: int) -> Any:
        return 0, f"error {int(code)}".encode()

    def cudaGetLastError(self) -> Any:
        return (0,)

    def cudaGetDevice(self) -> Any:
        return 0, 0

    def cudaSetDevice(self, index: int) -> Any:
        return (0,) if index == 0 else (101,)

    def cudaGetDeviceProperties(self, index: int) -> Any:
        major, minor = self.capability
        return 0, SimpleNamespace(name=self.name.encode() + b"\0\0", major=major, minor=minor)

    def cudaDeviceGetAttribute(self, attribute: int, _device: int) -> Any:
        return 0, {16: 3, 13: 1_980_000}[attribute]

    def cudaDriverGetVersion(self) -> Any:
        return 0, self.driver

    def cudaMalloc(self, num_bytes: int) -> Any:
        buffer = ctypes.create_string_buffer(b"\xff" * num_bytes, num_bytes)
        self.memory[ctypes.addressof(buffer)] = buffer
        return 0, ctypes.addressof(buffer)

    def cudaFree(self, address: int) -> Any:
        del self.memory[address]
        return (0,)

    def cudaMemcpy(self, target: int, source: int, num_bytes: int, kind: int) -> Any:
        ctypes.memmove(target, source, num_bytes)
        return (0,)

    def cudaMemcpyAsync(self, target: int, source: int, num_bytes: int, kind: int, stream: int) -> Any:
        assert self.capturing is None
        ctypes.memmove(target, source, num_bytes)
        return (0,)

    def cudaMallocHost(self, num_bytes: int) -> Any:
        return self.cudaMalloc(num_bytes)

    def cudaFreeHost(self, address: int) -> Any:
        return self.cudaFree(address)

    def cudaMemcpy2D(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, kind: int
    ) -> Any:
        for row in range(height):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
        return (0,)

    def cudaMemset(self, target: int, byte: int, num_bytes: int) -> Any:
        ctypes.memset(target, byte, num_bytes)
        return (0,)

    def cudaStreamCreateWithFlags(self, flags: int) -> Any:
        return 0, next(self._handles)

    def cudaStreamSynchronize(self, stream: int) -> Any:
        return (0,)

    def cudaStreamDestroy(self, stream: int) -> Any:
        return (0,)

    def cudaStreamBeginCapture(self, stream: int, mode: str) -> Any:
        assert mode == "thread local"
        self.capturing = []
        return (0,)

    def cudaStreamEndCapture(self, stream: int) -> Any:
        assert self.capturing is not None
        handle = next(self._handles)
        self.graphs[handle], self.capturing = self.capturing, None
        return 0, handle

    def cudaGraphInstantiate(self, graph: int, flags: int) -> Any:
        handle = next(self._handles)
        self.graphs[handle] = list(self.graphs[graph])
        return 0, handle

    def cudaGraphLaunch(self, executable: int, stream: int) -> Any:
        for work in self.graphs[executable]:
            work()
        return (0,)

    def cudaGraphDestroy(self, graph: int) -> Any:
        del self.graphs[graph]
        return (0,)

    def cudaGraphExecDestroy(self, executable: int) -> Any:
        del self.graphs[executable]
        return (0,)

    def submit(self, work: Callable[[], None]) -> None:
        """What a kernel launch is here."""
        if self.capturing is None:
            work()
        else:
            self.capturing.append(work)


class FakeContext:
    """An execution context of `FakeEngine`."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.memory = (0, 0)
        self.temporary_allocator: Any = None
        self.profile = 0
        engine.contexts.append(self)

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = (address, size)

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return shape[0] <= self.engine.max_tokens and len(shape) == len(self.engine.tensors[name][2])

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def infer_shapes(self) -> list[str]:
        return self.engine.insufficient

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shapes["x"]

    def execute_async_v3(self, stream: int) -> bool:
        """Out is x times the host input's first value, which is read here, as plugins read theirs."""
        runtime, engine = self.engine.runtime, self.engine
        if engine.allocates and self.temporary_allocator is not None:
            assert self.temporary_allocator.allocate_async(engine.allocates, 256, 0, stream) is None
            return False
        if engine.refuses == "always" or (engine.refuses == "capture" and runtime.capturing is not None):
            tensorrt_module.LINES.record(1, "the test refuses this step")
            return False
        count = int(np.prod(self.shapes["x"]))
        x, out = self.addresses["x"], self.addresses["out"]
        factor = ctypes.c_int32.from_address(self.addresses["host_factor"]).value

        def work() -> None:
            source = np.ctypeslib.as_array((ctypes.c_float * count).from_address(x))
            target = np.ctypeslib.as_array((ctypes.c_float * count).from_address(out))
            target[:] = source * factor

        runtime.submit(work)
        return True


class FakeEngine:
    """An engine of inputs x [n, 4] and host_factor [1] and output out [n, 4]."""

    device_memory_size_v2 = 1000

    def __init__(self, runtime: FakeRuntime, profiles: int = 1) -> None:
        self.runtime = runtime
        self.num_optimization_profiles = profiles
        self.max_tokens = 8
        self.tensors = {
            "x": ("INPUT", "FLOAT", (-1, 4)),
            "host_factor": ("INPUT", "INT32", (1,)),
            "out": ("OUTPUT", "FLOAT", (-1, 4)),
        }
        self.insufficient: list[str] = []
        self.refuses = ""
        self.allocates = 0
        self.makes_contexts = True
        self.contexts: list[FakeContext] = []

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return self.device_memory_size_v2 // (index + 1)

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return SimpleNamespace(name=self.tensors[name][0])

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self.tensors[name][1]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name][2]

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        return [tuple(d if s < 0 else s for s in self.tensors[name][2]) for d in (1, 4, self.max_tokens)]

    def create_execution_context(self, strategy: str) -> FakeContext | None:
        assert strategy == "user managed"
        return FakeContext(self) if self.makes_contexts else None


class CreationFlag(enum.IntEnum):
    """TensorRT's NetworkDefinitionCreationFlag."""

    EXPLICIT_BATCH = 0
    STRONGLY_TYPED = 1


def fake_tensorrt(version: str = "10.6.0") -> ModuleType:
    """A module ``tensorrt`` with the enumerations that are used, and no builder."""
    module = ModuleType("tensorrt")
    module.__spec__ = importlib.machinery.ModuleSpec("tensorrt", None)
    module.__dict__.update(
        __version__=version,
        ILogger=type("ILogger", (), {}),
        IGpuAllocator=type("IGpuAllocator", (), {}),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user managed"),
        LayerInformationFormat=SimpleNamespace(JSON="json"),
        MemoryPoolType=SimpleNamespace(WORKSPACE="workspace"),
        NetworkDefinitionCreationFlag=CreationFlag,
        PreviewFeature=SimpleNamespace(ALIASED_PLUGIN_IO_10_03="aliased"),
        ProfilingVerbosity=SimpleNamespace(DETAILED="detailed", LAYER_NAMES_ONLY="names", NONE="none"),
    )
    return module


def install_tensorrt(monkeypatch: pytest.MonkeyPatch, module: ModuleType | None) -> None:
    """Let ``import tensorrt`` find ``module`` (None: nothing) until the test ends."""
    for cached in (tensorrt_module.tensorrt, tensorrt_module.logger):
        cached.cache_clear()
    if module is None:
        monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "tensorrt", module)
    tensorrt_module.LINES.take_errors()


def install_cuda(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    """Let ``from cuda.bindings import runtime`` find ``runtime`` until the test ends."""
    cudart.cache_clear()
    package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    bindings.__dict__["runtime"] = runtime
    for name, module in (("cuda", package), ("cuda.bindings", bindings), ("cuda.bindings.runtime", runtime)):
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `FakeRuntime` in CUDA's place."""
    runtime = FakeRuntime()
    install_cuda(monkeypatch, runtime)
    yield runtime
    cudart.cache_clear()


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`fake_tensorrt` in TensorRT's place."""
    module = fake_tensorrt()
    install_tensorrt(monkeypatch, module)
    yield module
    for cached in (tensorrt_module.tensorrt, tensorrt_module.logger):
        cached.cache_clear()
