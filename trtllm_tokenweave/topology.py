"""One topological order for layers of every kind: producers first, ties in order of creation."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Protocol, TypeVar

from trtllm_tokenweave.errors import UserError


class Indexed(Protocol):
    """A layer: hashable, named, and numbered in order of creation."""

    @property
    def index(self) -> int:
        """Its number."""

    @property
    def name(self) -> str:
        """Its name."""


Layer = TypeVar("Layer", bound=Indexed)


def producers_first(producers: Mapping[Layer, Collection[Layer]]) -> list[Layer]:
    """The layers, each after those that it reads; of the layers that are ready, the one created first comes first.

    Args:
        producers: For each layer, the layers whose outputs it reads, all of them keys too.

    Raises:
        UserError: when they form a cycle; names the first layer of it.
    """
    sorter = TopologicalSorter(producers)
    try:
        sorter.prepare()
    except CycleError as error:
        stuck: Layer = min(error.args[1], key=lambda layer: layer.index)
        raise UserError("takes part in a cycle", where=f"layer {stuck.name}") from None
    # Indices are unique, so that layers themselves are never compared.
    ready: list[tuple[int, Layer]] = []
    order: list[Layer] = []
    while sorter.is_active():
        for layer in sorter.get_ready():
            heapq.heappush(ready, (layer.index, layer))
        layer = heapq.heappop(ready)[1]
        order.append(layer)
        sorter.done(layer)
    return order
