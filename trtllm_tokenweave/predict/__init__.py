"""Predicted step times: what a model would gain on a machine, from measured pieces. See docs/prediction.md.

`Predictor` puts one step together from GEMM curves, collective times by CTA count and attention, and runs the woven
order of both halves on two simulated streams. `load_machine` names the machines whose measurements the package holds.
"""

from __future__ import annotations

from trtllm_tokenweave.predict.data import GemmData, load_gemms
from trtllm_tokenweave.predict.machine import MACHINES, Machine, load_machine
from trtllm_tokenweave.predict.step import Workload
from trtllm_tokenweave.predict.variants import Gemms, Predictor, SplitTime, StepTimes

__all__ = [
    "GemmData",
    "load_gemms",
    "MACHINES",
    "Machine",
    "load_machine",
    "Workload",
    "Gemms",
    "Predictor",
    "SplitTime",
    "StepTimes",
]
