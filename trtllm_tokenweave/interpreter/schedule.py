"""How a run may depart from the recorded order."""

from __future__ import annotations

import random
from dataclasses import dataclass

#: How eagerly queued side-stream work runs after each layer of the main stream; 0: not before its join.
_EAGERNESS = (0.0, 0.0, 0.05, 0.3, 1.0)


@dataclass(frozen=True)
class Schedule:
    """Seeded out-of-order execution in TensorRT-like memory.

    Each rank draws its own order from the seed. Layers of the main stream run in any order that their inputs allow.
    Work of the side stream runs first in, first out, at any moment from its launch to its join. Every tensor lives in
    a buffer that is poisoned and reused after its last reader.

    Attributes:
        seed: Any integer.
        adversarial: False keeps the recorded order and runs side work at its launch, in the same memory.
    """

    seed: int = 0
    adversarial: bool = True

    def source(self, rank: int, step: int) -> random.Random:
        """Random numbers of one rank's run."""
        return random.Random(f"{self.seed}/{rank}/{step}")

    def eagerness(self, source: random.Random) -> float:
        """Chance that the oldest queued work runs after a layer."""
        return source.choice(_EAGERNESS) if self.adversarial else 1.0
