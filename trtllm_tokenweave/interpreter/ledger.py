"""What a run did, in order: for drawing schedules and for checking memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Stream = Literal["main", "side"]


@dataclass(frozen=True)
class Event:
    """One layer that ran.

    Attributes:
        layer: Name of the layer.
        stream: "side" for work queued on the communication stream.
        launched: When the main stream reached the layer, counted in layers from 0.
        start: When the work was done, counted in events from 0 (differs from the launch on the side stream).
        joined: False for side work that nothing waited for before the step ended.
    """

    layer: str
    stream: Stream
    launched: int
    start: int
    joined: bool = True


@dataclass
class Ledger:
    """Record of one run.

    Attributes:
        events: In the order in which the work was done.
        peak_bytes: Largest memory of layer outputs alive at once, in bytes (constants and network inputs not counted).
    """

    events: list[Event] = field(default_factory=list)
    peak_bytes: int = 0
