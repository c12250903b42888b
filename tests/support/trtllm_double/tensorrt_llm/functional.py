from __future__ import annotations

from collections.abc import Sequence

from ._strict import Strict, seal


class DimRange(Strict):
    def __init__(self, shape: Sequence[tuple[int, int, int]], names: Sequence[str]) -> None:
        self.min, self.opt, self.max = ([dim[i] for dim in shape] for i in range(3))
        self.dimension_names = list(names)


class Tensor(Strict):
    def __init__(self, profiles: list[DimRange]) -> None:
        self.profiles = profiles


seal(__name__)
