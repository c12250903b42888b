"""A decoder's engine on `fake_gpu`: it counts up, each next token one above the last, and notes what it was given."""

# ruff: noqa: ARG002  (TensorRT's arguments)
from __future__ import annotations

import ctypes
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.fake_gpu import FakeContext, FakeEngine, FakeRuntime
from trtllm_tokenweave import tensorrt_module
from trtllm_tokenweave.builder import Plan
from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.decoder import DecoderBuild
from trtllm_tokenweave.device import current_gpu
from trtllm_tokenweave.engine_runner import is_host
from trtllm_tokenweave.inspection import BuildReport
from trtllm_tokenweave.manifest import tensor_specs
from trtllm_tokenweave.recorder import RecordedNetwork
from trtllm_tokenweave.recorder.enums import DataType, numpy_dtype
from trtllm_tokenweave.trt import dims_or_none

Array = NDArray[Any]


def _read(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    count = int(np.prod(shape))
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address))
    found: Array = raw.view(dtype).reshape(shape)
    return found


class DecoderContext(FakeContext):
    """Reads host inputs when a step is queued, and device inputs when its work is done, as plugins and kernels do."""

    engine: FakeDecoder

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        low, _, high = self.engine.get_tensor_profile_shape(name, self.profile)
        return len(shape) == len(low) and all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (self.shapes["last_token_ids"][0], self.engine.tensors["logits"][2][1])

    def _tensor(self, name: str) -> Array:
        return _read(self.addresses[name], self.shapes[name], numpy_dtype(self.engine.get_tensor_dtype(name)))

    def execute_async_v3(self, stream: int) -> bool:
        runtime, engine = self.engine.runtime, self.engine
        if engine.refuses == "always" or (engine.refuses == "capture" and runtime.capturing is not None):
            tensorrt_module.LINES.record(1, "the test refuses this step")
            return False
        inputs = [name for name, (mode, *_) in engine.tensors.items() if mode == "INPUT"]
        engine.host.append({name: self._tensor(name).copy() for name in inputs if is_host(name)})

        def work() -> None:
            given = {name: self._tensor(name).copy() for name in inputs if not is_host(name)}
            engine.device.append(given)
            engine.profiles.append(self.profile)
            last = given["input_ids"][given["last_token_ids"] - 1]
            shape = self.get_tensor_shape("logits")
            logits = _read(self.addresses["logits"], shape, np.dtype(np.float32))
            logits[:] = 0
            logits[np.arange(len(last)), (last + 1) % engine.vocab_size] = 1

        runtime.submit(work)
        return True


class FakeDecoder(FakeEngine):
    """An engine with the tensors of a decoder's network."""

    def __init__(self, runtime: FakeRuntime, network: RecordedNetwork, build: DecoderBuild) -> None:
        super().__init__(runtime)
        self.vocab_size = build.config.vocab_size
        inputs = [network.get_input(i) for i in range(network.num_inputs)]
        (output,) = (network.get_output(i) for i in range(network.num_outputs))
        self.tensors = {
            str(t.name): (mode, t.dtype.name, dims_or_none(t.shape) or ())
            for mode, tensors in (("INPUT", inputs), ("OUTPUT", [output]))
            for t in tensors
        }
        self.ranges = [given(network) if callable(given) else given for given in build.settings().profiles]
        self.num_optimization_profiles = len(self.ranges)
        self.host: list[dict[str, Array]] = []
        self.device: list[dict[str, Array]] = []
        self.profiles: list[int] = []  # of each entry of `device`

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        if name not in self.ranges[index]:
            return [self.tensors[name][2]] * 3
        found = self.ranges[index][name]
        return [found.minimum, found.optimum, found.maximum]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self.tensors[name][1]]

    def create_execution_context(self, strategy: str) -> FakeContext | None:
        return DecoderContext(self) if self.makes_contexts else None


class DecoderMachine:
    """A process with a GPU and TensorRT: `build` stands for its builder, and its runtime loads what that made."""

    def __init__(self, module: ModuleType, runtime: FakeRuntime) -> None:
        self.runtime = runtime
        self.engines: dict[bytes, FakeDecoder] = {}
        self.builds: list[DecoderBuild] = []
        module.__dict__["Runtime"] = lambda _log: self

    def build(self, job: DecoderBuild, _comm: CommBackend | None = None) -> Plan:
        network = RecordedNetwork()
        result = job.make_network(network)
        data = f"plan {len(self.engines)} of {job.config.num_hidden_layers} layers".encode()
        engine = self.engines[data] = FakeDecoder(self.runtime, network, job)
        self.builds.append(job)
        return Plan(memoryview(data), result, BuildReport(), tensor_specs(engine), current_gpu())

    def deserialize_cuda_engine(self, data: Any) -> FakeDecoder | None:
        return self.engines.get(bytes(data))


def no_plugins() -> SimpleNamespace:
    """Stands for the plugin library where nothing is queued on a GPU."""
    return SimpleNamespace(last_error=lambda: "", counters=dict, tensor_memory=lambda _device, _bytes: 0)
