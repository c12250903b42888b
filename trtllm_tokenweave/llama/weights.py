"""The weights of one rank: which tensors a network needs, and the check that they are all there."""

from __future__ import annotations

import math
from collections.abc import Mapping as Dict
from collections.abc import Set
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.checkpoint.names import rank_shapes
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.recorder.enums import TRT_NAMES, numpy_dtype
from trtllm_tokenweave.recorder.tensor import Shape


def weight_specs(config: ModelConfig, mapping: Mapping) -> dict[str, tuple[Shape, str]]:
    """Name -> (shape, dtype name) of every tensor of one rank, under TensorRT-LLM's names.

    All have the model's dtype but the router of a mixture of experts, which is float32.

    Raises:
        UserError: when the model cannot be cut into ``mapping.tp_size`` ranks.
    """
    shapes = rank_shapes(config, mapping.tp_size)
    return {n: (s, "float32" if n.endswith("mlp.router.weight") else config.dtype) for n, s in shapes.items()}


#: Numbers that `window_weights` draws: a quarter of a billion takes seconds, and few tensors are larger.
_MOST_NUMBERS = 1 << 28
#: Between the starts of windows. A prime, so that rows of two windows never line up.
_WINDOW_STEP = 8191


def window_weights(
    specs: Dict[str, tuple[Shape, str]], mapping: Mapping, shared: Set[str], seed: int = 0
) -> dict[str, NDArray[Any]]:
    """Random weights that are quick to make: windows of one buffer of normal numbers, no two alike.

    Matrices are scaled by 1 / sqrt(columns), so that activations keep their size; norm weights are around 1, biases
    small. A rank's numbers are its own: models of two tp_sizes differ.

    Args:
        specs: See :func:`weight_specs`.
        mapping: The rank.
        shared: Names of the tensors that are equal on all ranks.
        seed: Of the numbers.
    """
    largest = max(math.prod(shape) for shape, _ in specs.values())
    count = min(largest, _MOST_NUMBERS) + _WINDOW_STEP * len(specs)

    @cache
    def normal(*rank: int) -> NDArray[np.float32]:
        return np.random.default_rng([seed, *rank]).standard_normal(count, np.float32)

    @cache
    def scaled(kind: str, columns: int, dtype: str, *rank: int) -> NDArray[Any]:
        numbers = normal(*rank) / (np.sqrt(columns) if kind == "matrix" else 8)
        return (numbers + 1 if kind == "norm" else numbers).astype(numpy_dtype(TRT_NAMES[dtype]))

    made = {}
    for index, (name, (shape, dtype)) in enumerate(specs.items()):
        kind = "bias" if name.endswith("bias") else "norm" if len(shape) == 1 else "matrix"
        columns = shape[-1] if kind == "matrix" else 0
        numbers = scaled(kind, columns, dtype, *(() if name in shared else (mapping.tp_rank,)))
        made[name] = _window(numbers, _WINDOW_STEP * index, math.prod(shape)).reshape(shape)
    return made


def _window(numbers: NDArray[Any], start: int, size: int) -> NDArray[Any]:
    """``size`` numbers from ``start`` on; where there are not so many, pieces from other starts follow (a copy)."""
    if start + size <= len(numbers):
        return numbers[start : start + size]
    pieces = []
    while size:
        pieces.append(numbers[start : start + size])
        size -= len(pieces[-1])
        start = (start + _WINDOW_STEP) % len(numbers)
    return np.concatenate(pieces)


def replicated(config: ModelConfig, mapping: Mapping) -> frozenset[str]:
    """Names of the tensors that all ranks hold whole."""
    whole = rank_shapes(config, 1)
    return frozenset(name for name, shape in rank_shapes(config, mapping.tp_size).items() if shape == whole[name])


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
