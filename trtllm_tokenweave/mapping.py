"""Which rank of a tensor-parallel group this is (TensorRT-LLM's ``Mapping``, tensor parallelism only)."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_tokenweave.errors import UserError, check_fields


@dataclass(frozen=True)
class Mapping:
    """Placement of one rank; ``world_size`` equals ``tp_size`` because pipeline parallelism is not served."""

    world_size: int = 1
    rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        check_fields(self, "mapping.")
        if self.tp_size < 1 or self.world_size != self.tp_size:
            raise UserError(
                f"world_size {self.world_size} must equal tp_size {self.tp_size} and be at least 1",
                where="mapping",
                fix="use tensor parallelism only (pp_size 1, cp_size 1)",
            )
        if not 0 <= self.rank < self.world_size:
            what = f"rank {self.rank} is outside 0..{self.world_size - 1}"
            raise UserError(what, where="mapping", fix="use one of these ranks")

    @property
    def tp_rank(self) -> int:
        """Position inside the tensor-parallel group."""
        return self.rank % self.tp_size

    @property
    def tp_group(self) -> tuple[int, ...]:
        """World ranks of the tensor-parallel group, in rank order."""
        return tuple(range(self.tp_size))
