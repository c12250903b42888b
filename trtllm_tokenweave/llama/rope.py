"""Constants of rotary position embedding, in the layout that the attention plugin reads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.model_config import ModelConfig, RotaryScaling


def inverse_frequencies(config: ModelConfig) -> NDArray[np.float32]:
    """Angle per position of each pair of head dimensions, float32 [head_size / 2].

    base^(-2i/d) for pair i of d dimensions (RoPE, arXiv 2104.09864), then scaled: ``linear`` divides all by
    ``factor``; ``llama3`` divides those whose wavelength is long against the original context, keeps the short
    ones, and interpolates between (Llama 3.1 model card).
    """
    exponents = np.arange(0, config.head_size, 2) / config.head_size
    scaling = config.rotary_scaling
    scale = 1.0 / scaling.factor if scaling is not None and scaling.type == "linear" else 1.0
    plain = np.float32(scale) / (config.rotary_base**exponents).astype(np.float32)
    if scaling is not None and scaling.type == "llama3":
        return _llama3(plain, scaling)
    return plain


def _llama3(frequencies: NDArray[np.float32], scaling: RotaryScaling) -> NDArray[np.float32]:
    turns = scaling.original_max_position_embeddings * frequencies.astype(np.float64) / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(smooth, 0.0, 1.0)
    scaled = (1.0 - kept) * frequencies / scaling.factor + kept * frequencies
    return scaled.astype(np.float32)


def cos_sin_table(config: ModelConfig) -> NDArray[Any]:
    """Table [1, max_position_embeddings * head_size] float32: per position, (cos, sin) of each pair in turn."""
    positions = np.arange(config.max_position_embeddings, dtype=np.float32)
    angles = positions[:, None] * inverse_frequencies(config)[None, :]
    return np.stack((np.cos(angles), np.sin(angles)), axis=-1).reshape(1, -1)
