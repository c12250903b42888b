"""Timelines of kernels, from traces as PyTorch's profiler writes them."""

from __future__ import annotations

from typing import Any

import pytest

from trtllm_tokenweave.bench.timeline import Kernel, is_collective, parse, rows, summary

OURS = "void tokenweave::all_reduce_rms_norm_kernel<__nv_bfloat16>(tokenweave::KernelArgs)"


def event(name: str, stream: int, start: float, duration: float, category: str = "kernel") -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start, "dur": duration, "args": {"stream": stream}}


def test_a_trace_becomes_kernels_in_order() -> None:
    trace = {
        "traceEvents": [
            event("b", 7, 1010.0, 5.0),
            event("enqueue", 7, 900.0, 1.0, "cpu_op"),
            event("copy", 7, 1005.0, 5.0, "gpu_memcpy"),
            event("a", 9, 1000.0, 20.04),
        ]
    }
    copied = Kernel("copy", 7, 5.0, 10.0)
    assert parse(trace) == [Kernel("a", 9, 0.0, 20.0), copied, Kernel("b", 7, 10.0, 15.0)]
    trace["traceEvents"][0]["args"]["grid"] = [66, 2, 1]
    assert [k.ctas for k in parse(trace)] == [0, 0, 132]
    assert parse({}) == []


@pytest.mark.parametrize(
    ("name", "expected"), [(OURS, True), ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", True), ("sm90_xmma_gemm", False)]
)
def test_collectives_are_told_by_their_names(name: str, expected: bool) -> None:
    assert is_collective(Kernel(name, 1, 0, 1)) is expected


def test_overlap_is_counted_once() -> None:
    kernels = [
        Kernel("gemm", 1, 0, 100),
        Kernel(OURS, 2, 40, 140),
        Kernel("norm", 1, 90, 120),  # over the end of the GEMM
        Kernel(OURS, 2, 200, 210),
    ]
    assert summary(kernels) == {
        "whole_us": 210.0,
        "compute_us": 120.0,
        "collective_us": 110.0,
        "both_us": 80.0,
        "idle_us": 60.0,
    }
    assert summary([])["whole_us"] == 0.0


def test_rows() -> None:
    (row,) = rows([Kernel(OURS * 2, 2, 40, 140)])
    assert row == {"name": (OURS * 2)[:80], "stream": 2, "start_us": 40, "end_us": 140, "ctas": 0}
