"""The order in which the two halves' collectives are started and joined (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_tokenweave.plugin_specs import Half, SiteKind


@dataclass(frozen=True)
class Event:
    """``start``: the compute stream queues the collective of (site, half); ``join``: it waits for it."""

    action: str
    site: int
    half: Half


def serial_order(kinds: Sequence[SiteKind], attention_whole: bool = False) -> list[Event]:
    """A valid order without overlap: the prefix half's sites, each joined at once, then the suffix half's.

    Attention that is left whole starts a new group of sites: it needs both halves.
    """
    groups: list[list[int]] = []
    for site, kind in enumerate(kinds):
        if not groups or (attention_whole and kind is SiteKind.ATTENTION):
            groups.append([])
        groups[-1].append(site)
    return [
        Event(action, site, half)
        for group in groups
        for half in (Half.PREFIX, Half.SUFFIX)
        for site in group
        for action in ("start", "join")
    ]


def collective_order(kinds: Sequence[SiteKind], attention_whole: bool = False) -> list[Event]:
    """Order of starts and joins that lets each collective run beside the other half's compute.

    Compute of a half runs between the join of its previous site and the start of the next:
    attention(prefix) | comm(suffix) of the layer before; comm(prefix) | attention(suffix); mlp(prefix) | comm(suffix);
    comm(prefix) | mlp(suffix). The prefix goes first because the suffix attends to the prefix's keys and values.
    Attention that is left whole needs both halves before it, so both are joined ahead of its site.

    Args:
        kinds: What precedes each site, in execution order.
        attention_whole: Attention layers are not split.
    """
    events: list[Event] = []
    waiting: list[Event] = []
    for site, kind in enumerate(kinds):
        if attention_whole and kind is SiteKind.ATTENTION:
            events += waiting
            waiting = []
        for half in (Half.PREFIX, Half.SUFFIX):
            # The half's previous site is joined before its compute, the other half's stays in flight beside it.
            before = [e for e in waiting if e.half is half]
            events += before
            waiting = [e for e in waiting if e.half is not half]
            events.append(Event("start", site, half))
            waiting.append(Event("join", site, half))
    return events + waiting
