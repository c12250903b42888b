"""The CUDA runtime through cuda-bindings: calls that raise, arrays in device memory, streams.

Arrays are numpy's on the host (bfloat16 through ml-dtypes); nothing here needs torch. cuda-bindings is imported when
it is first needed.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from trtllm_tokenweave.config import read_environment
from trtllm_tokenweave.errors import TokenWeaveError, UserError

Array = NDArray[Any]


class CudaError(TokenWeaveError):
    """A call of the CUDA runtime failed."""


@cache
def cudart() -> Any:
    """The module ``cuda.bindings.runtime``.

    Raises:
        UserError: when cuda-bindings is not installed.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise _no_bindings(error) from error
    return runtime


@cache
def cuda_driver() -> Any:
    """The module ``cuda.bindings.driver``; raises as :func:`cudart`."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise _no_bindings(error) from error
    return driver


def _no_bindings(error: ImportError) -> UserError:
    what = f"cuda-bindings cannot be imported ({error})"
    return UserError(what, where="CUDA", fix="pip install 'cuda-bindings>=12.8'")


def call(name: str, *args: Any) -> Any:
    """Call a function of the CUDA runtime and return its result (None, one value, or a tuple of them).

    Raises:
        CudaError: when it does not return cudaSuccess.
    """
    runtime = cudart()
    return _result(name, getattr(runtime, name)(*args), runtime.cudaGetErrorString)


def call_driver(name: str, *args: Any) -> Any:
    """Call a function of the CUDA driver, in the context that the runtime made for this thread; else as :func:`call`.

    Raises:
        CudaError: when it does not return CUDA_SUCCESS.
    """
    driver = cuda_driver()
    return _result(name, getattr(driver, name)(*args), driver.cuGetErrorString)


def _result(name: str, returned: tuple[Any, ...], error_string: Callable[[Any], tuple[Any, Any]]) -> Any:
    code, *results = returned
    if int(code) != 0:
        raise CudaError(f"{name}: {_text(error_string(code)[1])}")
    return results[0] if len(results) == 1 else tuple(results) or None


def _text(value: Any) -> str:
    return value.split(b"\0")[0].decode() if isinstance(value, bytes) else str(value)


@dataclass(frozen=True)
class Gpu:
    """A GPU as manifests name it; ``driver`` is a CUDA version ("12.8")."""

    name: str
    compute_capability: str
    driver: str


def current_gpu() -> Gpu:
    """The device that this thread uses.

    TensorRT ends the process where there is no driver, so this is asked before TensorRT is.

    Raises:
        UserError: when there is no GPU, or no driver.
    """
    try:
        properties = call("cudaGetDeviceProperties", call("cudaGetDevice"))
    except CudaError as error:
        fix = "run this on a machine with an NVIDIA GPU and its driver"
        raise UserError(f"no GPU can be used ({error})", where="CUDA", fix=fix) from error
    return Gpu(
        name=_text(properties.name),
        compute_capability=f"{properties.major}.{properties.minor}",
        driver=_version(call("cudaDriverGetVersion")),
    )


def use_device(index: int) -> None:
    """Let this thread use a device.

    Raises:
        UserError: when there is no such device.
    """
    try:
        call("cudaSetDevice", index)
    except CudaError as error:
        fix = "start as many ranks as there are GPUs, and let CUDA_VISIBLE_DEVICES show them all"
        raise UserError(f"device {index} cannot be used ({error})", where="CUDA", fix=fix) from error


def use_device_of_rank(rank: int) -> None:
    """Let this thread use the rank's own device, or with `SHARE_GPUS` one that it shares where there are too few.

    Raises:
        UserError: when there is none for this rank.
    """
    shared = read_environment().share_gpus
    use_device(rank % max(int(call("cudaGetDeviceCount")), 1) if shared else rank)


def current_device() -> int:
    """Number of the device that this thread uses."""
    return int(call("cudaGetDevice"))


def _version(number: int) -> str:
    """12080 is "12.8"."""
    return f"{number // 1000}.{number % 1000 // 10}"


class DeviceMemory:
    """Bytes on the current device, freed by :meth:`free`, at the end of a ``with``, or with the object."""

    def __init__(self, num_bytes: int) -> None:
        # An empty tensor needs an address too.
        self.num_bytes = max(num_bytes, 1)
        self.address = int(call("cudaMalloc", self.num_bytes))
        self._finalizer = weakref.finalize(self, cudart().cudaFree, self.address)
        # While the process ends, the driver frees everything itself.
        self._finalizer.atexit = False

    def free(self) -> None:
        """Give the memory back; a second time does nothing."""
        if self._finalizer.detach() is not None:
            call("cudaFree", self.address)

    def __enter__(self) -> DeviceMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()


class DeviceArray:
    """An array in device memory of its own."""

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self._memory = DeviceMemory(self.num_bytes)

    @classmethod
    def from_numpy(cls, array: Array) -> DeviceArray:
        """A copy of ``array`` on the device."""
        made = cls(array.shape, array.dtype)
        made.copy_from(array)
        return made

    @property
    def num_bytes(self) -> int:
        """Size of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def address(self) -> int:
        """Where the first element is; never null."""
        return self._memory.address

    def copy_from(self, array: Array) -> None:
        """Overwrite the elements; done when this returns. Wait first for steps that still read them.

        Raises:
            UserError: when shape or dtype differ.
        """
        if array.shape != self.shape or array.dtype != self.dtype:
            what = f"got {array.dtype} {array.shape} for a device array of {self.dtype} {self.shape}"
            raise UserError(what, where="copy to the device")
        if self.num_bytes:
            source = np.ascontiguousarray(array)
            kind = cudart().cudaMemcpyKind.cudaMemcpyHostToDevice
            call("cudaMemcpy", self.address, source.ctypes.data, self.num_bytes, kind)
            _finish()

    def to_numpy(self) -> Array:
        """A copy on the host. Synchronise the stream that writes the array first."""
        array = np.empty(self.shape, self.dtype)
        if self.num_bytes:
            kind = cudart().cudaMemcpyKind.cudaMemcpyDeviceToHost
            call("cudaMemcpy", array.ctypes.data, self.address, self.num_bytes, kind)
        return array

    def write(self, array: Array, stream: Stream) -> None:
        """Overwrite the first elements with those of ``array``, as work of ``stream``; keep the array until it is done.

        Raises:
            UserError: they are more, of another dtype, or not in one piece.
        """
        if array.nbytes > self.num_bytes or array.dtype != self.dtype or not array.flags.c_contiguous:
            what = f"got {array.dtype} {array.shape} for a device array of {self.dtype} {self.shape}"
            raise UserError(what, where="copy to the device")
        if array.nbytes:
            kind = cudart().cudaMemcpyKind.cudaMemcpyHostToDevice
            call("cudaMemcpyAsync", self.address, array.ctypes.data, array.nbytes, kind, stream.handle)

    def read(self, target: PinnedArray, shape: tuple[int, ...], stream: Stream) -> Array:
        """Copy the first elements to the host, as work of ``stream``; wait for that before reading the result.

        Args:
            target: At least as large, of the same dtype.
            shape: Of the elements.
            stream: Where to queue the copy.

        Returns:
            A window of ``target``.
        """
        window = target.array.reshape(-1)[: math.prod(shape)].reshape(shape)
        kind = cudart().cudaMemcpyKind.cudaMemcpyDeviceToHost
        call("cudaMemcpyAsync", target.address, self.address, window.nbytes, kind, stream.handle)
        return window

    def fill(self, byte: int) -> None:
        """Set every byte; done when this returns."""
        call("cudaMemset", self.address, byte, self.num_bytes)
        _finish()

    def free(self) -> None:
        """Give the memory back; a second time does nothing."""
        self._memory.free()


class PinnedArray:
    """An array in page-locked host memory, which copies reach at the full speed of the link; given back with it."""

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        wanted = np.dtype(dtype)
        num_bytes = max(math.prod(shape) * wanted.itemsize, 1)
        self.address = int(call("cudaMallocHost", num_bytes))
        self._finalizer = weakref.finalize(self, cudart().cudaFreeHost, self.address)
        self._finalizer.atexit = False
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(self.address))
        self.array: Array = raw[: math.prod(shape) * wanted.itemsize].view(wanted).reshape(shape)

    def free(self) -> None:
        """Give the memory back; a second time does nothing."""
        if self._finalizer.detach() is not None:
            call("cudaFreeHost", self.address)


def _finish() -> None:
    """Wait for the default stream: copies from pageable memory return early, and our streams do not wait for it."""
    call("cudaStreamSynchronize", 0)


class Stream:
    """A CUDA stream that does not wait for the default stream (TensorRT synchronises on that one).

    Given back by :meth:`destroy`, at the end of a ``with``, or with the object.
    """

    def __init__(self) -> None:
        self._stream = call("cudaStreamCreateWithFlags", cudart().cudaStreamNonBlocking)
        self._finalizer = weakref.finalize(self, cudart().cudaStreamDestroy, self._stream)
        self._finalizer.atexit = False

    @property
    def handle(self) -> int:
        """The cudaStream_t."""
        return int(self._stream)

    def synchronize(self) -> None:
        """Wait for all work on the stream; for none after :meth:`destroy`.

        Raises:
            CudaError: also for errors of earlier, asynchronous work.
        """
        if self._finalizer.alive:
            call("cudaStreamSynchronize", self._stream)

    def destroy(self) -> None:
        """Give the stream back when its work is done; a second time does nothing."""
        if self._finalizer.detach() is not None:
            call("cudaStreamDestroy", self._stream)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()
