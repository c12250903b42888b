from __future__ import annotations

from ._strict import Strict, seal


class Mapping(Strict):
    def __init__(
        self, world_size: int = 1, rank: int = 0, tp_size: int = 1, pp_size: int = 1, cp_size: int = 1
    ) -> None:
        self.world_size, self.tp_size, self.pp_size, self.cp_size = world_size, tp_size, pp_size, cp_size
        self._double_rank = rank


seal(__name__)
