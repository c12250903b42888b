"""The demonstration: a real model, stock and woven, side by side on the interpreter."""

from __future__ import annotations

from trtllm_tokenweave.demo.model import DemoOptions, DemoResult, run_demo
from trtllm_tokenweave.demo.recorded import NetworkCheck, check_network

__all__ = ["DemoOptions", "DemoResult", "NetworkCheck", "check_network", "run_demo"]
