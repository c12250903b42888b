"""Leaves out what the machine has too few GPUs for."""

from __future__ import annotations

try:
    import torch

    GPUS = torch.cuda.device_count()
except ImportError:
    GPUS = 0

NEEDED = (
    ("test_all_gather_plugin.py", 1),
    ("test_all_reduce_plugin.py", 1),
    ("test_attention_halves.py", 1),
    ("test_engine.py", 1),
    ("test_gemm_plugin.py", 1),
    ("test_gpt_attention.py", 1),
    ("test_llama_engine.py", 1),
    ("test_loopback.py", 1),
    ("test_peer.py", 1),
    ("test_run_engine.py", 1),
    ("test_serving.py", 1),
    ("test_small_llama.py", 1),
    ("test_torch_op.py", 2),
    ("test_tune.py", 2),
    ("test_woven_engine.py", 1),
    ("test_woven_ranks.py", 1),
)

collect_ignore = [name for name, needed in NEEDED if needed > GPUS]


def pytest_report_header() -> str:
    left_out = f"; left out: {', '.join(collect_ignore)}" if collect_ignore else ""
    return f"tests/gpu: torch sees {GPUS} GPUs{left_out}"
