"""The decoder layers of a model by themselves, for `trtllm-tokenweave bench stack`: x [tokens, hidden] -> out.

Attention is a stand-in that needs no KV cache: two GEMMs with a ReLU between them in the place of the two batched
products and the softmax. With ``keys`` keys each costs 2 * tokens * q * keys FLOP, which is what the causal products
of one sequence of 2 * keys tokens cost. Both projections stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from numpy.typing import NDArray

from trtllm_tokenweave.llama import NetworkOptions, weight_specs
from trtllm_tokenweave.llama.layers import Build
from trtllm_tokenweave.llama.model import decoder_layers
from trtllm_tokenweave.llama.ops import Ops
from trtllm_tokenweave.llama.weights import RankWeights, window_weights
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.passes import WeaveOptions, WeavePlan, WeaveResult, weave
from trtllm_tokenweave.recorder.enums import TRT_NAMES
from trtllm_tokenweave.table import TuningTable

Variant = Literal["stock", "fuse_only", "woven", "no_comm"]
Gemm = Literal["trt", "budget"]
VARIANTS: tuple[Variant, ...] = ("stock", "fuse_only", "woven", "no_comm")
#: Input whose dimension 0 is the step's sequences, as the pass knows it; only with a run-time split.
BATCH_INPUT = "context_lengths"


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
        """Random ones; norm weights are equal on all ranks."""
        shared = {name for name, (shape, _) in self.specs.items() if len(shape) == 1}
        return window_weights(self.specs, self.options.mapping, shared, self.seed)

    def build(self, network: Any, variant: Variant, gemm: Gemm = "trt") -> WeaveResult:
        """Add the layers to an empty network and weave them; returns what the weave did.

        With ``options.prefix_input`` the split and the number of sequences are inputs (`BATCH_INPUT`).
        "stock" and "no_comm" are not woven; "no_comm" is the stack without its all-reduces: each rank goes on with
        its own partial sums. ``gemm`` is the weave's option.
        """
        config, mapping = self.config, self.options.mapping
        ops = Ops(network)
        x = network.add_input("x", getattr(ops.trt.DataType, TRT_NAMES[config.dtype].name), (-1, config.hidden_size))
        x.set_dimension_name(0, "num_tokens")
        if self.options.prefix_input is not None:
            # Only dimensions are read: they are the split of a step, and its row of the table.
            for name in (self.options.prefix_input, BATCH_INPUT):
                network.add_input(name, ops.trt.DataType.INT32, (-1,))
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
        table = self.options.table if gemm == "budget" else _for_trt(self.options.table)
        return weave(network, replace(self.options, split=variant == "woven", gemm=gemm, table=table))


def _for_trt(table: TuningTable) -> TuningTable:
    """The table for TensorRT's GEMMs, which keep to no SM target.

    It always differs from the given one: ranks and contexts of the two woven engines of a process find one another by
    their tables.
    """
    rows = [
        row.model_copy(update={k: getattr(row, k).model_copy(update={"gemm_sms": 0}) for k in ("attention", "mlp")})
        for row in table.rows
    ]
    source = table.source.model_copy(update={"text": f"{table.source.text} (TensorRT's GEMMs)"})
    return table.model_copy(update={"rows": tuple(rows), "source": source})


def _name(layer: int, part: str) -> str:
    return f"transformer.layers.{layer}.attention.{part}.weight"


def attend(build: Build, qkv: Any, layer: int) -> Any:
    """The stand-in: relu(q keys^T) values^T with the columns of the queries, [T, qkv] -> [T, q]."""
    ops = build.ops
    width = build.local.num_heads * build.config.head_size
    queries = ops.slice(qkv, ops.concat([0, 0]), ops.concat([ops.dimension(qkv, 0), width]))
    scores = ops.relu(ops.matmul(queries, build.parameter(_name(layer, "keys"))))
    return ops.matmul(scores, build.parameter(_name(layer, "values")))
