"""Running an engine: an execution context on memory of ours, and one step of it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.agreement import gather_json, on_all_ranks
from trtllm_tokenweave.device import CudaError, DeviceArray, DeviceMemory, Stream, current_device
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.plugin_library import Attempt, plugin_library
from trtllm_tokenweave.recorder.enums import DataType, numpy_dtype
from trtllm_tokenweave.tensorrt_module import tensorrt
from trtllm_tokenweave.trt import dims_or_none

if TYPE_CHECKING:
    from trtllm_tokenweave.engine import Engine

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Binding:
    """Where a tensor of a step is.

    Attributes:
        address: Of the first element; of the host's memory where ``host`` is set.
        shape: Its shape.
        dtype: Its numpy dtype, None: not checked.
        host: The values of an input that plugins read on the host (``host_*``), which decide what is queued.
        stands_for: What names these values, with the shape, so that they need not be compared; None: nothing does.
        owner: What keeps the memory; None: the caller does, as long as a step may use it.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None = None
    host: Array | None = None
    stands_for: bytes | None = None
    owner: object = None

    @classmethod
    def device(cls, array: DeviceArray) -> Binding:
        """A tensor in device memory."""
        return cls(array.address, array.shape, array.dtype, owner=array)

    @classmethod
    def on_host(cls, array: Array, stands_for: bytes | None = None) -> Binding:
        """A tensor on the host; the values are read when the step is queued."""
        packed = np.asarray(array, order="C")
        return cls(packed.ctypes.data, packed.shape, packed.dtype, packed, stands_for)


Bindings = Mapping[str, Binding]


class EngineContext:
    """An execution context whose activations live in memory that this object brings.

    One step at a time: the contexts of an engine share the communication stream, and siblings the memory too. Made by
    all ranks of the engine together. Closed by :meth:`close` or at the end of a ``with``.

    Args:
        engine: The engine.
        symmetric: Take the memory from the plugin library, so that collectives find their tensors in symmetric
            memory and need no copies. All ranks say the same, before their first step. Where the ranks' engines differ
            in size, memory of one's own serves, with a warning.
        profile: Optimisation profile.
        allow_allocation: Let TensorRT allocate memory inside a step, as it does for sizes that depend on data. A
            woven network has none: such an engine computes wrong splits, and is refused at its first step.

    Raises:
        TokenWeaveError: on all ranks, when TensorRT of one makes no context, or there is no memory for it.
    """

    def __init__(
        self, engine: Engine, *, symmetric: bool = False, profile: int = 0, allow_allocation: bool = False
    ) -> None:
        self.engine = engine
        self.profile = profile
        self._allocator = None if allow_allocation else _refusing_allocator()
        self._owned: DeviceMemory | None = None
        self._is_sibling = False
        #: Keeps the memory that TensorRT has addresses of; None while these are not set, or only in part.
        self._bound: tuple[Binding, ...] | None = None
        self._stream: Stream | None = None
        # First all contexts: a rank that cannot make its own must not leave the others waiting for memory.
        self._context: Any = on_all_ranks(engine.comm, "execution contexts", self._create)
        self.num_bytes = max(self._activation_bytes(), 1)
        self.symmetric = symmetric and self._same_on_all_ranks()
        self.address = on_all_ranks(engine.comm, "activations", self._allocate)
        self._context.set_device_memory(self.address, self.num_bytes)

    def _create(self) -> Any:
        trt, engine = tensorrt(), self.engine.tensorrt_engine
        if not 0 <= self.profile < engine.num_optimization_profiles:
            what = f"there is no profile {self.profile}"
            raise UserError(what, where="engine", fix=f"it has {engine.num_optimization_profiles}, counted from 0")
        attempt = Attempt()
        context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise attempt.error("TensorRT makes no execution context")
        if self._allocator is not None:
            context.temporary_allocator = self._allocator
        if engine.num_optimization_profiles > 1:
            attempt = Attempt()
            with Stream() as stream:
                chosen = context.set_optimization_profile_async(self.profile, stream.handle)
                stream.synchronize()
            if not chosen:
                raise attempt.error(f"TensorRT does not take profile {self.profile}")
        return context

    def _activation_bytes(self) -> int:
        """What the profile needs: one for few tokens needs a fraction of what the largest does."""
        engine = self.engine.tensorrt_engine
        if engine.num_optimization_profiles == 1:
            return int(engine.device_memory_size_v2)
        return int(engine.get_device_memory_size_for_profile_v2(self.profile))

    def _same_on_all_ranks(self) -> bool:
        """Whether the ranks' engines need as many bytes: else their tensors do not lie at the same offsets.

        Ranks whose tensors lie elsewhere all the same copy them: the plugins find out.
        """
        sizes = gather_json(self.engine.comm, "size of symmetric activations", self.num_bytes)
        if len(set(sizes)) == 1:
            return True
        what = "activations stay out of symmetric memory: the ranks' engines need %s bytes; use build_on_all_ranks"
        logging.getLogger(__name__).warning(what, sizes)
        return False

    def _allocate(self) -> int:
        if self.symmetric:
            return plugin_library().tensor_memory(current_device(), self.num_bytes)
        self._owned = DeviceMemory(self.num_bytes)
        return self._owned.address

    def sibling(self, profile: int | None = None) -> EngineContext:
        """Another context on the same memory, for steps that never run beside this one's.

        TensorRT leaves undefined what a CUDA graph does after the context that it was captured from has changed, so
        every graph has a context of its own. Close siblings first.

        Args:
            profile: Optimisation profile; None: this one's.

        Raises:
            TokenWeaveError: TensorRT makes no context, or the other profile needs more memory.
        """
        self.check_open()
        made = copy.copy(self)  # it keeps the memory, but does not give it back
        made._is_sibling, made._bound, made._stream = True, None, None
        if profile is not None:
            made.profile = profile
        made._context = made._create()
        made.num_bytes = max(made._activation_bytes(), 1)
        if made.num_bytes > self.num_bytes:
            what = f"profile {made.profile} needs {made.num_bytes} bytes of activations, and shares {self.num_bytes}"
            raise TokenWeaveError(what)
        made._context.set_device_memory(self.address, made.num_bytes)
        return made

    def check_open(self) -> None:
        """Refuse to go on after :meth:`close`.

        Raises:
            TokenWeaveError: it is closed.
        """
        if self._context is None:
            raise TokenWeaveError("the execution context is closed: make another one")

    def wait(self) -> None:
        """Wait for the steps that were queued.

        Raises:
            CudaError: when one failed.
        """
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Give the context back when its steps are done, and its memory where it is this object's own."""
        with suppress(CudaError):
            self.wait()
        # The context goes first: it may still name the memory.
        self._context, self._bound, self._stream = None, None, None
        if self._owned is not None and not self._is_sibling:
            self._owned.free()

    def __enter__(self) -> EngineContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def step(self, inputs: Bindings, outputs: Bindings, stream: Stream) -> None:
        """Queue one step; nothing is waited for.

        Args:
            inputs: Every input of the engine, by name.
            outputs: Every output.
            stream: Where to queue it.

        Raises:
            UserError: tensors that do not fit the engine.
            TokenWeaveError: TensorRT or a plugin refuses the step; carries their messages.
        """
        self.bind(inputs, outputs)
        self.enqueue(stream)

    def bind(self, inputs: Bindings, outputs: Bindings) -> None:
        """Set shapes and addresses; what owns the memory is kept until the next call.

        Raises:
            UserError: a name, dtype or shape that does not fit the engine.
            TokenWeaveError: TensorRT refuses them, or the context is closed.
        """
        self.check_open()
        specs = {spec.name: spec for spec in self.engine.manifest.tensors}
        for mode, bindings in (("INPUT", inputs), ("OUTPUT", outputs)):
            names = {name for name, spec in specs.items() if spec.mode == mode}
            _same_names(mode.lower(), names, set(bindings))
        attempt = Attempt()
        self._bound = None
        for name, binding in (*inputs.items(), *outputs.items()):
            wanted = numpy_dtype(DataType[specs[name].dtype])
            if binding.dtype is not None and binding.dtype != wanted:
                raise UserError(f"has dtype {binding.dtype}, expected {wanted}", where=f"tensor {name}")
            if specs[name].mode == "INPUT" and not self._context.set_input_shape(name, binding.shape):
                ranges = specs[name].profiles
                fits = f"{ranges[self.profile][0]} to {ranges[self.profile][2]}" if ranges else f"{specs[name].shape}"
                raise UserError(f"shape {binding.shape} does not fit the engine: {fits}", where=f"tensor {name}")
            if not self._context.set_tensor_address(name, binding.address):
                raise attempt.error(f"TensorRT does not take the address of tensor {name}")
        missing = self._context.infer_shapes()
        if missing:
            raise attempt.error(f"TensorRT cannot tell the shapes of {', '.join(missing)}")
        for name, binding in outputs.items():
            shape = dims_or_none(self._context.get_tensor_shape(name))
            if shape != binding.shape:
                raise UserError(f"has shape {binding.shape}, the engine puts out {shape}", where=f"tensor {name}")
        self._bound = (*inputs.values(), *outputs.values())

    def enqueue(self, stream: Stream) -> None:
        """Queue a step on what :meth:`bind` set.

        Raises:
            TokenWeaveError: see :meth:`step`.
        """
        self.check_open()
        if self._bound is None:
            raise TokenWeaveError("no tensors are bound: `bind` was not called, or it failed")
        if self._allocator is not None:
            self._allocator.refused_bytes = 0
        self._stream = stream
        attempt = Attempt()
        if self._context.execute_async_v3(stream.handle):
            return
        if self._allocator is not None and self._allocator.refused_bytes:
            raise TokenWeaveError(
                f"the engine wants to allocate {self._allocator.refused_bytes} bytes inside a step: TensorRT computes "
                "sizes on the GPU, and a split that depends on them is wrong"
            )
        raise attempt.error("TensorRT does not run the step")


def _same_names(mode: str, needed: set[str], given: set[str]) -> None:
    for name in sorted(needed - given):
        raise UserError(f"{mode} {name!r} is not given", where="step", fix=f"give all: {sorted(needed)}")
    for name in sorted(given - needed):
        raise UserError(f"the engine has no {mode} {name!r}", where="step", fix=f"it has {sorted(needed)}")


def _refusing_allocator() -> Any:
    """An allocator for a context's temporary storage that gives none and notes what was wanted."""
    trt = tensorrt()

    class RefusingAllocator(trt.IGpuAllocator):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IGpuAllocator.__init__(self)
            self.refused_bytes = 0

        def allocate(self, size: int, alignment: int, flags: int) -> None:
            del alignment, flags
            self.refused_bytes += size

        def allocate_async(self, size: int, alignment: int, flags: int, stream: int) -> None:
            del stream
            self.allocate(size, alignment, flags)

        def reallocate(self, address: int, alignment: int, new_size: int) -> None:
            self.allocate(new_size, alignment, address)

        def deallocate(self, memory: Any) -> bool:
            del memory
            return True

        def deallocate_async(self, memory: Any, stream: int) -> bool:
            del memory, stream
            return True

    return RefusingAllocator()
