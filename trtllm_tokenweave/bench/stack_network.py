"""The decoder layers of a model by themselves, for `trtllm-tokenweave bench stack`: x [tokens, hidden] -> out.

Attention is a stand-in that needs no KV cache: two GEMMs with a ReLU between them in the place of the two batched
products and the softmax. With ``keys`` keys each costs 2 * tokens * q * keys FLOP, which is what the causal products
of one sequence of 2 * keys tokens cost. Both projections stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.llama import NetworkOptions, weight_specs
from trtllm_tokenweave.llama.layers import Build
from trtllm_tokenweave.llama.model import decoder_layers
from trtllm_tokenweave.llama.ops import Ops
from trtllm_tokenweave.llama.weights import RankWeights
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.passes import WeaveOptions, WeavePlan, WeaveResult, weave
from trtllm_tokenweave.recorder.enums import TRT_NAMES, numpy_dtype

Variant = Literal["stock", "fuse_only", "woven", "no_comm"]
Gemm = Literal["trt", "budget"]
VARIANTS: tuple[Variant, ...] = ("stock", "fuse_only", "woven", "no_comm")


@dataclass(frozen=True)
class Stack:
    """One rank's stack.

    Attributes:
        config: Model; its layers are all in the stack.
        options: Of the weave: mapping, table, limits.
        keys: Keys of the attention stand-in.
        seed: Of the weights, which are equal on all ranks but for a shift.
    """

    config: ModelConfig
    options: WeaveOptions
    keys: int = 2048
    seed: int = 0

    @cached_property
    def specs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, dtype name) of this rank's weights: the layers', and the stand-ins' keys and values."""
        every = weight_specs(self.config, self.options.mapping)
        specs = {name: spec for name, spec in every.items() if ".layers." in name or ".ln_f." in name}
        width = self.config.local(self.options.mapping.tp_size).num_heads * self.config.head_size
        for layer in range(self.config.num_hidden_layers):
            specs[_name(layer, "keys")] = ((self.keys, width), self.config.dtype)
            specs[_name(layer, "values")] = ((width, self.keys), self.config.dtype)
        return specs

    @cached_property
    def weights(self) -> dict[str, NDArray[Any]]:
        """Every weight as a window of one buffer of normal numbers: quick to make, no two windows alike.

        Scaled by 1 / sqrt(columns), so that activations keep their size; norm weights are around 1.
        """
        dtype = numpy_dtype(TRT_NAMES[self.config.dtype])
        shapes = {name: shape for name, (shape, _) in self.specs.items()}
        # A prime, so that rows of two windows never line up.
        step = 8191
        largest = max(int(np.prod(shape)) for shape in shapes.values())
        numbers = np.random.default_rng([self.seed, self.options.mapping.tp_rank]).standard_normal(
            largest + step * len(shapes), np.float32
        )
        matrices = {columns: (numbers / np.sqrt(columns)).astype(dtype) for columns in {s[-1] for s in shapes.values()}}
        vectors = (1 + np.random.default_rng(self.seed).standard_normal(numbers.size, np.float32) / 8).astype(dtype)
        made = {}
        for start, (name, shape) in zip(range(0, step * len(shapes), step), shapes.items(), strict=True):
            source = vectors if len(shape) == 1 else matrices[shape[-1]]
            made[name] = source[start : start + int(np.prod(shape))].reshape(shape)
        return made

    def build(self, network: Any, variant: Variant, gemm: Gemm = "trt") -> WeaveResult:
        """Add the layers to an empty network and weave them; returns what the weave did.

        "stock" and "no_comm" are not woven; "no_comm" is the stack without its all-reduces: each rank goes on with
        its own partial sums. ``gemm`` is the weave's option.
        """
        config, mapping = self.config, self.options.mapping
        ops = Ops(network)
        x = network.add_input("x", getattr(ops.trt.DataType, TRT_NAMES[config.dtype].name), (-1, config.hidden_size))
        x.set_dimension_name(0, "num_tokens")
        build = Build(
            ops,
            config,
            Mapping() if variant == "no_comm" else mapping,
            NetworkOptions(max_num_tokens=self.options.max_num_tokens),
            config.local(mapping.tp_size),
            RankWeights(self.specs, mapping, self.weights),
            {},
            attend,
        )
        out = decoder_layers(build, x)
        out.name = "out"
        network.mark_output(out)
        if variant in ("stock", "no_comm"):
            return WeaveResult(WeavePlan(self.options, (), (), None))
        return weave(network, replace(self.options, split=variant == "woven", gemm=gemm))


def _name(layer: int, part: str) -> str:
    return f"transformer.layers.{layer}.attention.{part}.weight"


def attend(build: Build, qkv: Any, layer: int) -> Any:
    """The stand-in: relu(q keys^T) values^T with the columns of the queries, [T, qkv] -> [T, q]."""
    ops = build.ops
    width = build.local.num_heads * build.config.head_size
    queries = ops.slice(qkv, ops.concat([0, 0]), ops.concat([ops.dimension(qkv, 0), width]))
    scores = ops.relu(ops.matmul(queries, build.parameter(_name(layer, "keys"))))
    return ops.matmul(scores, build.parameter(_name(layer, "values")))
