"""Figures of the model `tokenweave` among those that Triton's metrics port shows."""

from __future__ import annotations

import sys
from typing import Any, Literal

import triton_python_backend_utils as pb_utils

from trtllm_tokenweave.triton.service import Counts

_Kind = Literal["COUNTER", "GAUGE"]

#: Name of the family, its kind, what it is, and the counts that it shows by label.
_FAMILIES: tuple[tuple[str, _Kind, str, dict[str, dict[str, str]]], ...] = (
    (
        "tokenweave_requests_total",
        "COUNTER",
        "Requests by how they ended",
        {name: {"outcome": name} for name in ("completed", "refused", "cancelled")},
    ),
    (
        "tokenweave_tokens_total",
        "COUNTER",
        "Tokens of prompts that were taken, and generated tokens",
        {"prompt_tokens": {"kind": "prompt"}, "generated_tokens": {"kind": "generated"}},
    ),
    ("tokenweave_steps_total", "COUNTER", "Steps of the engine", {"steps": {}}),
    ("tokenweave_open_requests", "GAUGE", "Requests that wait or run", {"open": {}}),
)


class Metrics:
    """Triton's custom metrics for `Counts`; does nothing where the server has none.

    Args:
        model: Name of the model, a label of each figure.
    """

    def __init__(self, model: str) -> None:
        # A metric must not outlive its family, nor the family the call of finalize.
        self._families: list[Any] = []
        self._metrics: dict[str, tuple[_Kind, Any]] = {}
        self._said = Counts()
        try:
            for name, kind, description, labels in _FAMILIES:
                family = pb_utils.MetricFamily(
                    name=name, description=description, kind=getattr(pb_utils.MetricFamily, kind)
                )
                self._families.append(family)
                for field, label in labels.items():
                    self._metrics[field] = (kind, family.Metric(labels={"model": model, **label}))
        except pb_utils.TritonModelException as error:
            self.close()
            print(f"{model}: no metrics: {error}", file=sys.stderr, flush=True)

    def update(self, counts: Counts) -> None:
        """Show these counts."""
        for field, (kind, metric) in self._metrics.items():
            value, before = getattr(counts, field), getattr(self._said, field)
            if value != before:
                metric.set(value) if kind == "GAUGE" else metric.increment(value - before)
                setattr(self._said, field, value)

    def close(self) -> None:
        """Give them back."""
        self._metrics.clear()
        self._families.clear()
