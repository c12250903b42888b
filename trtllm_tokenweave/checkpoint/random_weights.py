"""Random weights of any served architecture, for tests and for shapes whose real weights are not at hand."""

from __future__ import annotations

import zlib

import numpy as np

from trtllm_tokenweave.checkpoint.base import FullCheckpoint
from trtllm_tokenweave.checkpoint.dtypes import Array
from trtllm_tokenweave.checkpoint.names import full_shapes
from trtllm_tokenweave.model_config import ModelConfig


class RandomCheckpoint(FullCheckpoint):
    """A model with random weights: the same one for every tp_size and dtype (but for rounding).

    Each tensor's numbers depend on ``seed`` and its name only. Matrices are normal with standard deviation
    1/sqrt(columns), so that activations neither vanish nor explode; norm weights are near 1, biases small. With
    ``integer`` matrices and biases hold -2..2 and norm weights 1, so that sums of products are exact.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, integer: bool = False) -> None:
        kind = "integer" if integer else "normal"
        super().__init__(config, f"random weights ({kind}, seed {seed})")
        self.seed = seed
        self.integer = integer
        self._shapes = full_shapes(config)

    def read_full(self, name: str) -> Array:
        """The tensor as float32, made anew at each call."""
        shape = self._shapes[name]
        generator = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        is_norm = name.endswith("norm.weight")
        if self.integer:
            if is_norm:
                return np.ones(shape, np.float32)
            return generator.integers(-2, 3, size=shape, dtype=np.int8).astype(np.float32)
        values = generator.standard_normal(shape, dtype=np.float32)
        if is_norm:
            return 1 + np.float32(0.1) * values
        values *= np.float32(0.1 if len(shape) == 1 else shape[-1] ** -0.5)
        return values
