"""The weights of one rank: which tensors a network needs, and the check that they are all there."""

from __future__ import annotations

from collections.abc import Mapping as Dict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.checkpoint.names import rank_shapes
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.recorder.tensor import Shape


def weight_specs(config: ModelConfig, mapping: Mapping) -> dict[str, tuple[Shape, str]]:
    """Name -> (shape, dtype name) of every tensor of one rank, under TensorRT-LLM's names.

    All have the model's dtype but the router of a mixture of experts, which is float32.

    Raises:
        UserError: when the model cannot be cut into ``mapping.tp_size`` ranks.
    """
    shapes = rank_shapes(config, mapping.tp_size)
    return {n: (s, "float32" if n.endswith("mlp.router.weight") else config.dtype) for n, s in shapes.items()}


class RankWeights:
    """Checked weights of one rank, or only their shapes.

    Raises:
        UserError: when a tensor is missing, or has another shape or dtype than this rank needs; names the tensor.
    """

    def __init__(
        self, specs: Dict[str, tuple[Shape, str]], mapping: Mapping, arrays: Dict[str, NDArray[Any]] | None
    ) -> None:
        self.specs = specs
        self.arrays = arrays
        if arrays is None:
            return
        rank = f"rank {mapping.rank} of {mapping.tp_size}"
        for name, (shape, dtype) in self.specs.items():
            array = arrays.get(name)
            if array is None:
                raise UserError(
                    f"tensor is missing from the weights of {rank}", where=name, fix="convert the checkpoint again"
                )
            if array.shape != shape:
                raise UserError(
                    f"tensor has shape {array.shape}, {rank} needs {shape}",
                    where=name,
                    fix="take the weights of this rank and tp_size, of the model that config.json describes",
                )
            if array.dtype.name != dtype:
                raise UserError(f"tensor has dtype {array.dtype.name}, {rank} needs {dtype}", where=name)

    def get(self, name: str) -> NDArray[Any] | None:
        """Values of a tensor; None when the network is built from shapes only."""
        return None if self.arrays is None else self.arrays[name]

    def joined(self, names: tuple[str, ...]) -> NDArray[Any] | None:
        """Tensors stacked along dimension 0 (a copy)."""
        return None if self.arrays is None else np.concatenate([self.arrays[n] for n in names])
