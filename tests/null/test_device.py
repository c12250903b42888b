"""Arrays and calls over a CUDA runtime whose memory is the host's."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from support.fake_gpu import OUT_OF_MEMORY, FakeRuntime

from trtllm_tokenweave import device
from trtllm_tokenweave.device import (
    CudaError,
    DeviceArray,
    DeviceMemory,
    Gpu,
    PinnedArray,
    Stream,
    current_gpu,
    use_device,
)
from trtllm_tokenweave.errors import UserError


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int64, np.bool_])
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 8)])
def test_arrays_come_back(cuda: FakeRuntime, dtype: type, shape: tuple[int, ...]) -> None:
    values: NDArray[Any] = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    array = DeviceArray.from_numpy(values)
    back = array.to_numpy()
    assert back.dtype == values.dtype
    assert np.array_equal(back, values)
    assert array.address != 0
    array.free()
    assert not cuda.memory


def test_strided_arrays_are_packed(cuda: FakeRuntime) -> None:
    values = np.arange(24.0).reshape(4, 6).T[::2]
    assert np.array_equal(DeviceArray.from_numpy(values).to_numpy(), values)


def test_fill(cuda: FakeRuntime) -> None:
    array = DeviceArray((2,), np.int16)
    array.fill(1)
    assert array.to_numpy().tolist() == [0x0101, 0x0101]


@pytest.mark.parametrize("values", [np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float16)])
def test_copies_of_another_kind_are_refused(cuda: FakeRuntime, values: Any) -> None:
    array = DeviceArray((3, 2), np.float32)
    with pytest.raises(UserError, match=r"for a device array of float32 \(3, 2\)"):
        array.copy_from(values)


def test_memory_is_freed_once(cuda: FakeRuntime) -> None:
    with DeviceMemory(100) as memory:
        assert len(cuda.memory) == 1
    memory.free()
    assert not cuda.memory
    forgotten = DeviceMemory(1)
    del forgotten
    assert not cuda.memory


def test_a_failed_allocation_names_the_call(cuda: FakeRuntime) -> None:
    cuda.fails["cudaMalloc"] = OUT_OF_MEMORY
    with pytest.raises(CudaError, match="cudaMalloc: error 2"):
        DeviceMemory(100)


def test_steps_write_and_read_the_first_elements(cuda: FakeRuntime) -> None:
    stream, array = Stream(), DeviceArray.from_numpy(np.full((4, 3), 9, np.int32))
    array.write(np.arange(0, 12, 2, dtype=np.int32), stream)
    assert array.to_numpy().reshape(-1).tolist() == [0, 2, 4, 6, 8, 10, *[9] * 6]
    pinned = PinnedArray((4, 3), np.int32)
    window = array.read(pinned, (2, 3), stream)
    assert window.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert np.shares_memory(window, pinned.array)
    array.write(np.zeros((0, 3), np.int32), stream)
    assert cuda.calls.count("cudaMemcpyAsync") == 2
    for wrong in (np.zeros(13, np.int32), np.zeros(2, np.float32), np.zeros(8, np.int32)[::2]):
        with pytest.raises(UserError, match="for a device array of int32"):
            array.write(wrong, stream)
    pinned.free()
    pinned.free()
    array.free()
    assert not cuda.memory


def test_gpu(cuda: FakeRuntime) -> None:
    assert current_gpu() == Gpu("Test GPU", "9.0", driver="13.0")


def test_a_machine_without_a_gpu_is_a_users_error(cuda: FakeRuntime) -> None:
    cuda.fails["cudaGetDevice"] = 35
    with pytest.raises(UserError, match=r"no GPU can be used \(cudaGetDevice: error 35\)"):
        current_gpu()


def test_use_device(cuda: FakeRuntime) -> None:
    use_device(0)
    with pytest.raises(UserError, match="device 3 cannot be used"):
        use_device(3)


def test_a_rank_has_a_device_of_its_own_or_shares_one(cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(device, "use_device", used.append)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    cuda.cudaGetDeviceCount = lambda: (0, 2)  # type: ignore[attr-defined]
    for shared in ("", "0", "1"):
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", shared)
        for rank in range(4):
            device.use_device_of_rank(rank)
    assert used == [0, 1, 2, 3] * 2 + [0, 1, 0, 1]
    # Without a device the error is CUDA's own.
    cuda.cudaGetDeviceCount = lambda: (0, 0)  # type: ignore[attr-defined]
    device.use_device_of_rank(3)
    assert used[-1] == 0


def test_streams(cuda: FakeRuntime) -> None:
    stream = Stream()
    stream.synchronize()
    stream.destroy()
    stream.destroy()
    stream.synchronize()
    assert cuda.calls[-2:] == ["cudaStreamSynchronize", "cudaStreamDestroy"]
    assert cuda.calls.count("cudaStreamDestroy") == 1
    with Stream() as other:
        other.synchronize()
    forgotten = Stream()
    del forgotten
    assert cuda.calls.count("cudaStreamDestroy") == 3


def test_without_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    device.cudart.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UserError, match=r"cuda-bindings cannot be imported .*Fix: pip install 'cuda-bindings>=12\.8'"):
        device.cudart()
