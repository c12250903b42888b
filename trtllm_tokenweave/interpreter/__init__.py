"""Runs one rank of a recorded network with numpy, as a strongly typed TensorRT engine would.

``ExecutionContext`` runs a step; ``Schedule`` makes it run out of order, in TensorRT-like memory, to show missing
edges; ``registry`` holds the functions that stand for plugins.
"""

from __future__ import annotations

from trtllm_tokenweave.interpreter.context import ExecutionContext
from trtllm_tokenweave.interpreter.ledger import Event, Ledger
from trtllm_tokenweave.interpreter.registry import KernelContext, kernel
from trtllm_tokenweave.interpreter.schedule import Schedule

__all__ = ["Event", "ExecutionContext", "KernelContext", "Ledger", "Schedule", "kernel"]
