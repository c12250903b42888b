"""When each kernel ran, and on which stream: what overlaps what (PyTorch's profiler is needed to measure)."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Of a timeline.
RECORDINGS = 3


@dataclass(frozen=True)
class Kernel:
    """One kernel of a timeline; times in microseconds from the first kernel's start, ``ctas`` of its whole grid."""

    name: str
    stream: int
    start_us: float
    end_us: float
    ctas: int = 0


def start_profiler() -> None:
    """Have the profiler set itself up, which takes most of a second the first time: a rank must not wait for it."""
    with _profiler():
        pass


def _profiler() -> Any:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA])


def record(run: Callable[[], None]) -> list[Kernel]:
    """Kernels of ``run``, which queues work and waits for it; in order of their starts.

    Of several recordings the shortest: a rank that begins late makes the collectives of the others longer.
    """
    recordings = (_record_once(run) for _ in range(RECORDINGS))
    return min(recordings, key=lambda kernels: summary(kernels)["whole_us"])


def _record_once(run: Callable[[], None]) -> list[Kernel]:
    with _profiler() as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        return parse(json.loads(trace.read_text()))


def parse(trace: dict[str, Any]) -> list[Kernel]:
    """Kernels of a Chrome trace, and copies and fills, which have no CTAs."""
    events = [e for e in trace.get("traceEvents", ()) if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    first = min((e["ts"] for e in events), default=0.0)
    kernels = [
        Kernel(
            e["name"],
            int(e["args"]["stream"]),
            round(e["ts"] - first, 1),
            round(e["ts"] + e["dur"] - first, 1),
            math.prod(e["args"].get("grid", [0])),
        )
        for e in events
    ]
    return sorted(kernels, key=lambda k: k.start_us)


def is_collective(kernel: Kernel) -> bool:
    """Whether a kernel is one of ours, or NCCL's."""
    return "all_reduce_rms_norm" in kernel.name or kernel.name.startswith("nccl")


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def summary(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Microseconds: of the whole, of compute and collectives, of both at once, and of neither."""
    ours = _union((k.start_us, k.end_us) for k in kernels if is_collective(k))
    others = _union((k.start_us, k.end_us) for k in kernels if not is_collective(k))
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in ours for b in others)
    busy = _union([*ours, *others])
    whole = busy[-1][1] - busy[0][0] if busy else 0.0
    figures = {
        "whole_us": whole,
        "compute_us": sum(b - a for a, b in others),
        "collective_us": sum(b - a for a, b in ours),
        "both_us": both,
        "idle_us": whole - sum(b - a for a, b in busy),
    }
    return {name: round(value, 1) for name, value in figures.items()}


def rows(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """A timeline as it goes into a result."""
    return [asdict(k) | {"name": k.name[:80]} for k in kernels]
