"""A plugin of the reference library, made and run as TensorRT does it, but without TensorRT: by plugin_driver.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_tokenweave import trt
from trtllm_tokenweave.libraries import find_library
from trtllm_tokenweave.recorder import PluginField
from trtllm_tokenweave.recorder.enums import DataType
from trtllm_tokenweave.recorder.plugin import Fields, PluginKey

Array = NDArray[Any]
DRIVER = "tests/cpp/reference/attention/libtokenweave_plugin_driver.so"
TORCH_TYPES = {
    torch.float32: DataType.FLOAT,
    torch.float16: DataType.HALF,
    torch.bfloat16: DataType.BF16,
    torch.int32: DataType.INT32,
    torch.int64: DataType.INT64,
}


class _Field(ctypes.Structure):
    """nvinfer1::PluginField."""

    _fields_ = (("name", c_char_p), ("data", c_void_p), ("type", c_int32), ("length", c_int32))


class _Desc(ctypes.Structure):
    """nvinfer1::PluginTensorDesc; format 0 is linear."""

    _fields_ = (
        ("num_dims", c_int32),
        ("dims", c_int64 * 8),
        ("type", c_int32),
        ("format", c_int32),
        ("scale", c_float),
    )


@cache
def _driver() -> tuple[ctypes.CDLL, bytes]:
    """The driver of the build folder that the reference library stands in, and that library's path."""
    library = find_library("tokenweave_reference")
    assert library is not None, "libtokenweave_reference.so is not built (plugins/README.md)"
    driver = ctypes.CDLL(str(library.resolve().parents[2] / DRIVER))
    for function in (driver.driver_desc_bytes, driver.driver_workspace_bytes):
        function.restype = c_int64
    driver.driver_make.restype = c_void_p
    assert driver.driver_desc_bytes() == ctypes.sizeof(_Desc)
    return driver, str(library).encode()


def _desc(tensor: torch.Tensor) -> _Desc:
    return _Desc(tensor.ndim, (c_int64 * 8)(*tensor.shape), TORCH_TYPES[tensor.dtype].value, 0, 1.0)


def _descs(inputs: Sequence[torch.Tensor], output: torch.Tensor) -> Any:
    return (_Desc * (len(inputs) + 1))(*map(_desc, [*inputs, output]))


def _packed(fields: Sequence[PluginField]) -> tuple[Any, list[Array]]:
    """The fields as C has them, and what they point to."""
    arrays = [np.ascontiguousarray(field.data) for field in fields]
    packed = [
        _Field(field.name.encode(), array.ctypes.data, field.type.value, array.size)
        for field, array in zip(fields, arrays, strict=True)
    ]
    return (_Field * len(packed))(*packed), arrays


class ReferencePlugin:
    """A plugin with one output, out of an engine that was built for the sizes of ``largest`` (inputs, output)."""

    def __init__(
        self, key: PluginKey, fields: Fields, largest: tuple[Sequence[torch.Tensor], torch.Tensor], guard: int = 4096
    ) -> None:
        self._driver, library = _driver()
        packed, kept = _packed(trt.plugin_fields(key, fields))
        descs, count = _descs(*largest), len(largest[0])
        made = self._driver.driver_make(library, key[0].encode(), packed, len(kept), descs, count)
        assert made, "the plugin could not be made"
        self._plugin = c_void_p(made)
        self.workspace_bytes = self._driver.driver_workspace_bytes(self._plugin, descs, count)
        # What lies behind the workspace must stay as it is.
        self._workspace = torch.full((self.workspace_bytes + guard,), 0xAB, dtype=torch.uint8, device="cuda")

    def enqueue(self, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> bool:
        """Queue the plugin on torch's current stream; tensors may be on the CPU. False: it reported an error."""
        addresses = (c_void_p * len(inputs))(*(t.data_ptr() for t in inputs))
        status = self._driver.driver_enqueue(
            self._plugin,
            _descs(inputs, output),
            len(inputs),
            ctypes.cast(addresses, POINTER(c_void_p)),
            c_void_p(output.data_ptr()),
            c_void_p(self._workspace.data_ptr()),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        return int(status) == 0

    def check_workspace(self) -> None:
        """Fail when something was written past the workspace."""
        assert bool((self._workspace[self.workspace_bytes :] == 0xAB).all())

    def close(self) -> None:
        """Destroy the plugin."""
        self._driver.driver_destroy(self._plugin)
