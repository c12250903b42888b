"""Tiny random models and steps of any shape for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.batch import SequenceStep, StepLayout, step_inputs
from trtllm_tokenweave.checkpoint import RandomCheckpoint
from trtllm_tokenweave.comm import LocalComm, run_ranks
from trtllm_tokenweave.interpreter import ExecutionContext, Schedule
from trtllm_tokenweave.kv_cache import BlockManager, KvCacheConfig, KvCachePool
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig, MoeConfig
from trtllm_tokenweave.passes import WeaveOptions, weave
from trtllm_tokenweave.recorder.enums import TRT_NAMES, numpy_dtype
from trtllm_tokenweave.table import Bucket, TableRow, TuningTable
from trtllm_tokenweave.waves import table_key

MAX_TOKENS = 96
BLOCK = 8


def tiny(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    """A two-layer model with grouped heads."""
    fields: dict[str, Any] = {
        "architecture": architecture,
        "dtype": "float32",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_size": 4,
        "intermediate_size": 24,
        "vocab_size": 40,
        "max_position_embeddings": 128,
        "qkv_bias": architecture == "Qwen2ForCausalLM",
        "moe": MoeConfig(num_experts=4, top_k=2) if architecture == "MixtralForCausalLM" else None,
    }
    return ModelConfig(**(fields | changes))


def small(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    """:func:`tiny` twice as wide with half as many heads, in bfloat16."""
    fields: dict[str, Any] = {
        "dtype": "bfloat16",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_size": 8,
        "intermediate_size": 48,
        "vocab_size": 50,
        "max_position_embeddings": 64,
    }
    return tiny(architecture, **(fields | changes))


def small_table(config: ModelConfig, tp_size: int, offset: int = 0) -> TuningTable:
    """Splits every step of more than 8 tokens, at half plus ``offset``."""
    row = TableRow(tokens=Bucket(lo=1), mode="weave", split_offset=offset)
    return TuningTable(key=table_key(config, tp_size), granularity=16, min_tokens=1, rows=(row,))


@dataclass(frozen=True)
class Model:
    """A model on ``tp_size`` virtual ranks, stock or woven."""

    config: ModelConfig
    tp_size: int
    weaving: str = "stock"
    split_attention: bool = True
    offset: int = 0
    reduce_fusion: bool = False
    integer: bool = False
    gemm_plugin: bool = False

    @lru_cache(maxsize=64)  # noqa: B019 - a few small models for one test run
    def networks(self) -> list[trt.RecordedNetwork]:
        """One network per rank, built once."""
        checkpoint = RandomCheckpoint(self.config, seed=1, integer=self.integer)
        options = NetworkOptions(
            max_batch_size=8,
            max_num_tokens=MAX_TOKENS,
            max_seq_len=MAX_TOKENS,
            tokens_per_block=BLOCK,
            reduce_fusion=self.reduce_fusion,
            gemm_plugin=self.gemm_plugin,
        )
        out = []
        for rank in range(self.tp_size):
            network, mapping = trt.RecordedNetwork(), Mapping(self.tp_size, rank, self.tp_size)
            build_llama(network, self.config, mapping, checkpoint.rank_weights(mapping), options)
            if self.weaving != "stock":
                table = small_table(self.config, self.tp_size, self.offset)
                how = WeaveOptions(
                    mapping, table, 8, MAX_TOKENS, split=self.weaving == "weave", split_attention=self.split_attention
                )
                # One rank has no all-reduce, hence nothing to fuse.
                assert weave(network, how).mode == (self.weaving if self.tp_size > 1 else "stock")
            out.append(network)
        return out

    def session(self, exact: bool = True, seed: int | None = None) -> Session:
        """A runner with empty caches."""
        return Session(self, self.networks(), exact, seed)


class Session:
    """Runs steps; the KV cache lives as long as the session."""

    def __init__(self, model: Model, networks: Sequence[trt.RecordedNetwork], exact: bool, seed: int | None) -> None:
        config = model.config
        cache = KvCacheConfig(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.local(model.tp_size).num_kv_heads,
            head_size=config.head_size,
            dtype=numpy_dtype(TRT_NAMES[config.dtype]),
            num_blocks=128,
            tokens_per_block=BLOCK,
            max_blocks_per_seq=MAX_TOKENS // BLOCK,
        )
        self.model = model
        self.pools = [KvCachePool(cache) for _ in networks]
        self.blocks = BlockManager(cache)
        self.contexts = []
        for rank, (network, comm) in enumerate(zip(networks, LocalComm.group(len(networks)), strict=True)):
            schedule = None if seed is None else Schedule(seed * 1009 + rank)
            context = ExecutionContext(network, comm, exact=exact, schedule=schedule)
            context.pools.update(self.pools[rank].bindings)
            self.contexts.append(context)

    def step(self, sequences: Sequence[SequenceStep]) -> NDArray[Any]:
        """Logits of rank 0; all ranks must agree on them."""
        for sequence in sequences:
            self.blocks.grow(sequence.sequence, sequence.end)
        jobs = []
        for context, pool in zip(self.contexts, self.pools, strict=True):
            given = step_inputs(sequences, StepLayout(pool, self.blocks, MAX_TOKENS, self.model.tp_size))
            known = {context.network.get_input(i).name for i in range(context.network.num_inputs)}
            jobs.append(partial(context.run, {n: x for n, x in given.items() if n in known}))
        outputs = [out["logits"] for out in run_ranks(jobs)]
        for other in outputs[1:]:
            np.testing.assert_array_equal(outputs[0], other)
        return outputs[0]


def ragged_steps(contexts: Sequence[tuple[int, int]], generations: Sequence[int]) -> list[list[SequenceStep]]:
    """Two steps: the first fills caches, the second mixes chunks with a past and generation rows.

    Args:
        contexts: (past, chunk) tokens of each context sequence of the second step.
        generations: Tokens in the cache of each generation row of the second step.
    """
    first, second = [], []
    for number, (past, chunk) in enumerate(contexts):
        length = past + chunk
        words = tuple((7 * number + 3 * i) % 40 for i in range(length))
        if past:
            first.append(SequenceStep(number, words[:past], 0, length, True))
        second.append(SequenceStep(number, words[past:], past, length, True))
    for number, length in enumerate(generations, start=len(contexts)):
        words = tuple((5 * number + i) % 40 for i in range(length + 1))
        first.append(SequenceStep(number, words[:length], 0, length, True))
        second.append(SequenceStep(number, words[length:], length, length, False))
    return [step for step in (first, second) if step]
