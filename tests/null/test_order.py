"""The order of starts and joins."""

from __future__ import annotations

import pytest

from trtllm_tokenweave.passes.order import Event, collective_order
from trtllm_tokenweave.plugin_specs import Half, SiteKind

KINDS = [SiteKind.ATTENTION, SiteKind.MLP] * 3


def short(events: list[Event]) -> str:
    return " ".join(f"{e.action[0].upper()}{e.site}{e.half.name[0].lower()}" for e in events)


def test_split_attention() -> None:
    assert short(collective_order(KINDS[:2])) == "S0p S0s J0p S1p J0s S1s J1p J1s"


def test_whole_attention_waits_for_both_halves() -> None:
    order = short(collective_order(KINDS[:4], attention_whole=True))
    assert order == "S0p S0s J0p S1p J0s S1s J1p J1s S2p S2s J2p S3p J2s S3s J3p J3s"


@pytest.mark.parametrize("whole", [False, True])
def test_every_collective_is_started_then_joined_before_its_half_goes_on(whole: bool) -> None:
    events = collective_order(KINDS, whole)
    at = {(e.action, e.site, e.half): i for i, e in enumerate(events)}
    assert len(at) == len(events) == 4 * len(KINDS)
    for site in range(len(KINDS)):
        for half in (Half.PREFIX, Half.SUFFIX):
            assert at["start", site, half] < at["join", site, half]
            if site:
                assert at["join", site - 1, half] < at["start", site, half]
        assert at["start", site, Half.PREFIX] < at["start", site, Half.SUFFIX], (
            "the suffix attends to the prefix's keys"
        )


def test_split_attention_keeps_one_collective_in_flight_while_computing() -> None:
    """Between the first start and the last, the compute stream never has joined everything."""
    events = collective_order(KINDS)
    flying = 0
    for event in events[:-2]:
        flying += 1 if event.action == "start" else -1
        assert flying >= 1
