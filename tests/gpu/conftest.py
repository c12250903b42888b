"""Leaves out what the machine has too few GPUs for."""

from __future__ import annotations

try:
    import torch

    GPUS = torch.cuda.device_count()
except ImportError:
    GPUS = 0

collect_ignore = [
    name for name, needed in (("test_loopback.py", 1), ("test_peer.py", 2), ("test_torch_op.py", 2)) if needed > GPUS
]


def pytest_report_header() -> str:
    left_out = f"; left out: {', '.join(collect_ignore)}" if collect_ignore else ""
    return f"tests/gpu: torch sees {GPUS} GPUs{left_out}"
