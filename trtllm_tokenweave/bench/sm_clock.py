"""The clock of a GPU's SMs between two points of a stream, read from the counters that SMs keep.

A GPU at its power limit changes its clock several times a second, by several percent: more than what the ways to run a
step differ by. What it was while a sample ran cannot be asked for afterwards, nor often enough; but cycles and
nanoseconds can be counted.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.device import DeviceArray, Stream, call, call_driver, cudart, current_device
from trtllm_tokenweave.errors import TokenWeaveError

#: Writes cycles and nanoseconds of the SM that it runs on to that SM's place in a row.
_KERNEL = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry sm_clocks(.param .u64 row)
{
    .reg .u32 %sm;
    .reg .u64 %at, %first, %cycles, %nanoseconds;
    ld.param.u64 %first, [row];
    mov.u32 %sm, %smid;
    mad.wide.u32 %at, %sm, 16, %first;
    mov.u64 %cycles, %clock64;
    mov.u64 %nanoseconds, %globaltimer;
    st.global.v2.u64 [%at], {%cycles, %nanoseconds};
    ret;
}
\0"""
#: Places of a row: SMs are not numbered without gaps.
_PLACES = 1024
#: CTAs for each SM, so that the kernel reaches nearly all.
_CTAS_PER_SM = 2
#: The counters are read one after the other: what a clock may seem to be above the highest.
_ROUNDING = 1.02


class SmClock:
    """Marks points of a stream, and tells the clock between them.

    Args:
        stream: Where marks are queued; each takes some microseconds.

    Raises:
        CudaError: the kernel cannot be loaded.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        names, device = cudart().cudaDeviceAttr, current_device()
        sms = call("cudaDeviceGetAttribute", names.cudaDevAttrMultiProcessorCount, device)
        khz = call("cudaDeviceGetAttribute", names.cudaDevAttrClockRate, device)
        self._ctas, self._highest = _CTAS_PER_SM * int(sms), int(khz) / 1e3
        self._rows = DeviceArray((0, _PLACES, 2), np.uint64)
        self._marks = 0
        # The module is never unloaded: it lives as long as the process's context.
        self._kernel = call_driver("cuModuleGetFunction", call_driver("cuModuleLoadData", _KERNEL), b"sm_clocks")
        # A kernel that is not loaded yet would wait for the GPU when it is first queued.
        self.begin(1)
        self.mark()
        stream.synchronize()

    def begin(self, marks: int) -> None:
        """Make room for so many marks, and forget those before; no work of the stream may be left."""
        if marks > self._rows.shape[0]:
            self._rows = DeviceArray((marks, _PLACES, 2), np.uint64)
        self._rows.fill(0)
        self._marks = 0

    def mark(self) -> None:
        """Queue a mark."""
        row = self._rows.address + self._marks * _PLACES * 16
        arguments = ((row,), (ctypes.c_void_p,))
        call_driver("cuLaunchKernel", self._kernel, self._ctas, 1, 1, 1, 1, 1, 0, self.stream.handle, arguments, 0)
        self._marks += 1

    def mhz(self) -> list[float]:
        """MHz between the first and the second mark, between the third and the fourth, and so on; after the stream's
        work is done.

        Raises:
            TokenWeaveError: no SM tells a clock that the GPU can have.
        """
        marks = self._rows.to_numpy()[: self._marks]
        return [self._between(first, second) for first, second in zip(marks[::2], marks[1::2], strict=True)]

    def _between(self, first: NDArray[np.uint64], second: NDArray[np.uint64]) -> float:
        """Median over the SMs that both marks reached; rows of cycles and nanoseconds.

        Of an SM that is another one for the second mark, as it happens under MPS, the counters have nothing in common.
        """
        both = (first[:, 1] > 0) & (second[:, 1] > first[:, 1]) & (second[:, 0] > first[:, 0])
        cycles, nanoseconds = (second[both] - first[both]).astype(np.float64).T
        mhz = cycles / nanoseconds * 1e3
        possible = mhz[mhz <= _ROUNDING * self._highest]
        if not possible.size:
            told = f"{float(np.median(mhz)):.0f} MHz, above the highest, {self._highest:.0f}" if mhz.size else "nothing"
            fix = "let no other process use this GPU meanwhile"
            raise TokenWeaveError(f"the clock of the SMs cannot be read: their counters tell {told}. Fix: {fix}")
        return float(np.median(possible))
