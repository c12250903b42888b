"""Lay out the woven schedule of a few layers on two streams, in model units, to draw it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.passes.order import collective_order
from trtllm_tokenweave.picture import ScheduleBox, ScheduleEdge
from trtllm_tokenweave.plugin_specs import Half, SiteKind
from trtllm_tokenweave.schedule import plan_step
from trtllm_tokenweave.table import TuningTable
from trtllm_tokenweave.waves import GemmWaves, WaveModel, gemm_shapes, plan_waves

HalfName = Literal["prefix", "suffix", "whole"]
_HALVES: dict[Half, HalfName] = {Half.PREFIX: "prefix", Half.SUFFIX: "suffix"}

#: Length of a collective beside a block of compute of length 1: drawn shorter, so that it can be seen to hide.
_COLLECTIVE = 0.7


def timeline(
    config: ModelConfig, tp_size: int, table: TuningTable, num_tokens: int, layers: int = 2
) -> tuple[list[ScheduleBox], list[ScheduleEdge]]:
    """Boxes and edges of ``layers`` layers of one step, as the chain orders them.

    Args:
        config: The model, for its GEMMs.
        tp_size: Ranks.
        table: Gives the halves and the SMs that the collectives take.
        num_tokens: Tokens of the step.
        layers: Layers to draw.
    """
    step = plan_step(table, 1, num_tokens)
    model = WaveModel(attention=step.attention, mlp=step.mlp)
    waves = _waves(plan_waves(step, gemm_shapes(config, tp_size), model))
    kinds = [SiteKind.ATTENTION, SiteKind.MLP] * layers
    boxes: list[ScheduleBox] = []
    edges: list[ScheduleEdge] = []
    collective: dict[tuple[int, Half], int] = {}
    joined: dict[Half, int] = {}
    compute_free = communication_free = 0.0
    for event in collective_order(kinds):
        half, kind = _HALVES[event.half], "attention" if kinds[event.site] is SiteKind.ATTENTION else "mlp"
        if event.action == "join":
            joined[event.half] = collective[event.site, event.half]
            compute_free = max(compute_free, boxes[collective[event.site, event.half]].end)
            continue
        where = f"layer {event.site // 2}"
        compute = ScheduleBox("compute", kind, half, compute_free, 1.0, waves[kind, half], where)
        boxes.append(compute)
        compute_free = compute.end
        if event.half in joined:
            edges.append(ScheduleEdge(joined.pop(event.half), len(boxes) - 1, "join"))
        start = max(compute_free, communication_free)
        boxes.append(
            ScheduleBox("communication", "AllReduceRmsNorm", half, start, _COLLECTIVE, None, f"{where} {kind}")
        )
        communication_free = boxes[-1].end
        collective[event.site, event.half] = len(boxes) - 1
        edges.append(ScheduleEdge(len(boxes) - 2, len(boxes) - 1, "fork"))
    return boxes, edges


def _waves(found: Iterable[GemmWaves]) -> dict[tuple[str, HalfName], int]:
    """Waves of the GEMMs of a block together, by half."""
    total: dict[tuple[str, HalfName], int] = {}
    for gemm in found:
        for half, waves in (("prefix", gemm.prefix), ("suffix", gemm.suffix)):
            key: tuple[str, HalfName] = (gemm.shape.block, half)  # type: ignore[assignment]
            total[key] = total.get(key, 0) + waves
    return total
