"""One attention layer that is fed step by step, on the GPU and in numpy: the interpreter's kernel is the oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu.reference_plugin import ReferencePlugin
from trtllm_tokenweave.attention_roles import attention_inputs
from trtllm_tokenweave.batch import SequenceStep, StepLayout, step_inputs
from trtllm_tokenweave.batch_split import HalfBatch
from trtllm_tokenweave.comm import SingleComm
from trtllm_tokenweave.interpreter.attention import gpt_attention
from trtllm_tokenweave.interpreter.registry import KernelContext
from trtllm_tokenweave.kv_cache import BlockManager, KvCacheConfig, KvCachePool
from trtllm_tokenweave.llama.rope import cos_sin_table, inverse_frequencies
from trtllm_tokenweave.model_config import DType, ModelConfig, RotaryScaling
from trtllm_tokenweave.recorder.enums import DataType, numpy_dtype
from trtllm_tokenweave.recorder.plugin import Fields
from trtllm_tokenweave.recorder.trtllm_plugins import GPT_ATTENTION

Array = NDArray[Any]
Tensors = dict[str, Array]

VECTORS = Path(__file__).parents[1] / "vectors" / "gpt_attention.json"
TYPES = {"float16": DataType.HALF, "bfloat16": DataType.BF16}

LAYERS, LAYER = 3, 1
MAX_TOKENS, MAX_SEQUENCES, MAX_SEQ_LEN = 2304, 64, 6144
BLOCKS, TOKENS_PER_BLOCK = 300, 32
#: Largest error of an output: scores and sums are fp32 on either side, weights and queries rounded on the GPU alone.
TOLERANCE = {"float16": 0.004, "bfloat16": 0.03}
#: Distance of neighbours, relative: a rotated key may round to the one beside the oracle's.
ULP = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Heads:
    """Sizes of a layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: DType
    rotary_scaling: RotaryScaling | None = None

    def config(self) -> ModelConfig:
        """A Llama with such attention."""
        return ModelConfig(
            architecture="LlamaForCausalLM",
            dtype=self.dtype,
            hidden_size=self.num_heads * self.head_size,
            num_hidden_layers=LAYERS,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_size=self.head_size,
            intermediate_size=128,
            vocab_size=128,
            max_position_embeddings=MAX_SEQ_LEN,
            rotary_base=500000.0 if self.rotary_scaling else 10000.0,
            rotary_scaling=self.rotary_scaling,
        )


def layer_fields(heads: Heads) -> Fields:
    """The fields of an attention layer of this package's networks, with other sizes."""
    document = json.loads(VECTORS.read_text(encoding="utf-8"))
    fields = {field["name"]: field["values"][0] for field in document["fields"]}
    sizes = {
        "layer_idx": LAYER,
        "num_heads": heads.num_heads,
        "num_kv_heads": heads.num_kv_heads,
        "head_size": heads.head_size,
        "rotary_embedding_dim": heads.head_size,
        "tokens_per_block": TOKENS_PER_BLOCK,
        "type_id": TYPES[heads.dtype].value,
    }
    return fields | sizes


def to_torch(array: Array) -> torch.Tensor:
    """A CPU tensor of the same values; bfloat16 too, which numpy calls by another name."""
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> NDArray[np.float32]:
    """Values in fp32."""
    values: NDArray[np.float32] = tensor.float().cpu().numpy()
    return values


def half_tensors(tensors: Tensors, half: HalfBatch) -> Tensors:
    """The inputs of one half of a step, as TokenWeaveAttention hands them to the plugin inside."""
    rows, first = half.sequences, half.start
    contexts = half.context_lengths
    return tensors | {
        "qkv": tensors["qkv"][first : first + half.rows],
        "sequence_length": half.shortened(tensors["sequence_length"]),
        "host_past_key_value_lengths": half.shortened(tensors["host_past_key_value_lengths"]),
        "context_lengths": contexts,
        "host_context_lengths": contexts,
        "host_request_types": half.request_types,
        "cache_indirection": tensors["cache_indirection"][rows],
        "kv_cache_block_offsets": tensors["kv_cache_block_offsets"][:, rows],
        "host_kv_cache_block_offsets": tensors["host_kv_cache_block_offsets"][:, rows],
    }


@dataclass
class AttentionModel:
    """A layer with a cache on either side; the GPU's starts as NaN, as the oracle's does."""

    heads: Heads
    seed: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.heads.config()
        self.fields, self.dtype = layer_fields(self.heads), numpy_dtype(TYPES[self.heads.dtype])
        cache = KvCacheConfig(
            LAYERS,
            self.heads.num_kv_heads,
            self.heads.head_size,
            self.dtype,
            BLOCKS,
            TOKENS_PER_BLOCK,
            max_blocks_per_seq=MAX_SEQ_LEN // TOKENS_PER_BLOCK,
        )
        self.pool, self.blocks = KvCachePool(cache), BlockManager(cache)
        self.device_pool = to_torch(self.pool.pages).cuda()
        self.context = KernelContext(comm=SingleComm(), pools=dict(self.pool.bindings))
        self.tables = {"rotary_cos_sin": cos_sin_table(config), "rotary_inv_freq": inverse_frequencies(config)}
        self.names = attention_inputs(self.fields)
        self.rng = np.random.default_rng(self.seed)
        self.plugin = ReferencePlugin(GPT_ATTENTION, self.fields, self._largest())

    def _largest(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        steps = [SequenceStep(s, (1,), 0, 1, True) for s in range(MAX_SEQUENCES)]
        for step in steps:
            self.blocks.grow(step.sequence, 1)
        tensors = self._tensors(steps) | {"qkv": np.zeros((MAX_TOKENS, self._width), self.dtype)}
        for step in steps:
            self.blocks.free(step.sequence)
        shapes = [to_torch(tensors[name]) for name in self.names]
        return shapes, self.output(MAX_TOKENS)

    @property
    def _width(self) -> int:
        return (self.heads.num_heads + 2 * self.heads.num_kv_heads) * self.heads.head_size

    def _tensors(self, steps: Sequence[SequenceStep]) -> Tensors:
        tensors = step_inputs(steps, StepLayout(self.pool, self.blocks, MAX_SEQ_LEN))
        rows = int(tensors["last_token_ids"][-1])
        tensors["qkv"] = self.rng.normal(size=(rows, self._width)).astype(np.float32).astype(self.dtype)
        return tensors | self.tables

    def step(self, chunks: Sequence[tuple[int, int, bool]]) -> Tensors:
        """Inputs of a step of (sequence, tokens, is_context)."""
        steps = []
        for sequence, count, is_context in chunks:
            start = self.lengths.get(sequence, 0)
            prompt = start + count if is_context else self.prompts.get(sequence, start)
            self.lengths[sequence], self.prompts[sequence] = start + count, prompt
            steps.append(SequenceStep(sequence, (7,) * count, start, prompt, is_context))
            self.blocks.grow(sequence, start + count)
        return self._tensors(steps)

    def output(self, rows: int) -> torch.Tensor:
        """An output, poisoned."""
        width = self.heads.num_heads * self.heads.head_size
        dtype = getattr(torch, self.heads.dtype)
        return torch.full((rows, width), float("nan"), dtype=dtype, device="cuda")

    def inputs(self, tensors: Tensors) -> list[torch.Tensor]:
        """What the plugin gets, copied: host arrays stay on the CPU, the pool is the GPU's."""
        pool = np.array([[self.device_pool.data_ptr(), 0]], np.int64)
        given = [to_torch((tensors | {"host_kv_cache_pool_pointers": pool})[name]) for name in self.names]
        return [t.clone() if name.startswith("host_") else t.cuda() for name, t in zip(self.names, given, strict=True)]

    def run(self, tensors: Tensors) -> torch.Tensor:
        """The step on the GPU; [tokens, num_heads * head_size]."""
        out = self.output(len(tensors["qkv"]))
        assert self.plugin.enqueue(self.inputs(tensors), out)
        torch.cuda.synchronize()
        return out

    def expected(self, tensors: Tensors) -> NDArray[np.float32]:
        """The step in numpy."""
        (out,) = gpt_attention(self.context, self.fields, [tensors[name] for name in self.names])
        return out.astype(np.float32)

    def check(self, got: torch.Tensor, want: NDArray[np.float32]) -> None:
        """The output is the oracle's; so is the cache, and nothing else was written."""
        # Of keys that neither side was given both make NaN, and NaN equals NaN below.
        assert np.isfinite(want).all()
        np.testing.assert_allclose(to_numpy(got), want, rtol=0, atol=TOLERANCE[self.heads.dtype])
        ulp = ULP[self.heads.dtype]
        pages = self.pool.pages.astype(np.float32)
        np.testing.assert_allclose(to_numpy(self.device_pool), pages, rtol=ulp, atol=1e-6, equal_nan=True)
        self.plugin.check_workspace()
