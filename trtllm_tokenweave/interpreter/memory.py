"""Activation memory as TensorRT has it: every tensor has a buffer, which is reused after the tensor's last reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: Smallest buffer in bytes; sizes are powers of two from here, so that tensors of different shapes meet in one buffer.
_SMALLEST = 512


@dataclass
class Buffer:
    """Memory of one tensor and of those that alias it.

    Attributes:
        storage: The bytes.
        dtype: Of the tensor, for the poison.
        pending: Reads that the main stream has still to launch.
        permanent: Never freed (network outputs).
    """

    storage: NDArray[np.uint8]
    dtype: np.dtype[Any]
    pending: int = 0
    permanent: bool = False


def poison_value(dtype: np.dtype[Any]) -> float | int | bool:
    """What undefined memory holds: NaN, or a number that no index, length or sum can be."""
    if dtype.kind == "b":
        return True
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return int(info.min) // 2 if info.min else int(info.max)
    return float("nan")


def poison(storage: NDArray[np.uint8], dtype: np.dtype[Any]) -> None:
    """Overwrite a buffer."""
    storage.view(dtype)[:] = poison_value(dtype)


class Memory:
    """Buffers from a last-in, first-out list of free ones per size class."""

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self.live_bytes = 0
        self.peak_bytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, Buffer]:
        """Return a poisoned array and its buffer."""
        count = int(np.prod(shape, dtype=np.int64))
        size = max(_SMALLEST, 1 << (count * dtype.itemsize - 1).bit_length()) if count else _SMALLEST
        free = self._free.setdefault(size, [])
        storage = free.pop() if free else np.empty(size, np.uint8)
        poison(storage, dtype)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return storage.view(dtype)[:count].reshape(shape), Buffer(storage, dtype)

    def release(self, buffer: Buffer) -> None:
        """Poison a buffer and put it on top of its free list."""
        poison(buffer.storage, buffer.dtype)
        self.live_bytes -= buffer.storage.size
        self._free[buffer.storage.size].append(buffer.storage)
