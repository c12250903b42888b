"""Step 3: order the halves' collectives so that each runs beside the other half's compute."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.passes import names
from trtllm_tokenweave.passes.order import Event, collective_order
from trtllm_tokenweave.passes.plan import WeavePlan
from trtllm_tokenweave.plugin_specs import Half


def join(network: Any, plan: WeavePlan) -> None:
    """Thread the chain through starts and joins in the order of :func:`collective_order`."""
    if plan.region is not None:
        kinds = [site.kind for site in plan.sites]
        thread_chain(network, collective_order(kinds, plan.region.attention == "whole"))


def thread_chain(network: Any, events: list[Event]) -> None:
    """Connect the chain in the given order; the chain alone orders collectives and joins, on every rank alike.

    A gate stands in front of the suffix half's compute that waits for no join (at the region's entry, and after an
    attention left whole). It joins the chain just before the suffix half's next start, behind the prefix half's
    collective: without it TensorRT's builder places that compute in front of the fork and nothing overlaps.
    """
    nodes = Graph(network).named
    chain = nodes[names.CHAIN_START].layer.get_output(0)
    for name in chain_names(events, nodes):
        layer = nodes[name].layer
        layer.set_input(layer.num_inputs - 1, chain)
        chain = layer.get_output(layer.num_outputs - 1)


def chain_names(events: list[Event], known: Container[str]) -> Iterator[str]:
    """Layer names on the chain in order: the events', with the gates that ``known`` holds in their places."""
    for event in events:
        if event.action == "start" and event.half is Half.SUFFIX:
            number = 0
            while names.gate(event.site, number) in known:
                yield names.gate(event.site, number)
                number += 1
        yield (names.start if event.action == "start" else names.join)(event.site, event.half)
