"""Cutting the whole model's tensors into one rank's, with zero padding that leaves the model's function as it is.

A padded query head has zero rows in q and zero columns in the output projection, a padded FFN channel zero rows in both
first matrices and zero columns in the second: each adds exactly 0. Padded heads and channels come last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trtllm_tokenweave.checkpoint.dtypes import Array, convert, numpy_dtype
from trtllm_tokenweave.checkpoint.names import EMBEDDING, FINAL_NORM, LM_HEAD
from trtllm_tokenweave.model_config import LocalShapes, ModelConfig

Reader = Callable[[str], Array]
RankWeights = dict[str, Array]


def take_rows(matrix: Array, start: int, count: int) -> Array:
    """Rows ``start..start+count`` of ``matrix`` [n, ...]; rows past n are zero. A view where all of them exist."""
    if start + count <= matrix.shape[0]:
        return matrix[start : start + count]
    padded = np.zeros((count, *matrix.shape[1:]), matrix.dtype)
    held = matrix[start : start + count]
    padded[: held.shape[0]] = held
    return padded


def take_columns(matrix: Array, start: int, count: int) -> Array:
    """Columns ``start..start+count`` of ``matrix`` [m, n], contiguous; columns past n are zero."""
    if start == 0 and count == matrix.shape[1]:
        return matrix
    held = matrix[:, start : start + count]
    if held.shape[1] == count:
        return np.ascontiguousarray(held)
    padded = np.zeros((matrix.shape[0], count), matrix.dtype)
    padded[:, : held.shape[1]] = held
    return padded


class Sharder:
    """Makes the weights of some ranks of ``tp_size`` in one pass over the whole model's tensors.

    Args:
        config: The model; its dtype is that of the result (the MoE router stays float32, as in TensorRT-LLM).
        tp_size: Number of ranks.
        read: Hugging Face name -> tensor, any float dtype; shapes have been checked.
        source: The checkpoint, for errors.
        tied_head: The head is the embedding; its shards are then views of that one array.
    """

    def __init__(
        self, config: ModelConfig, tp_size: int, read: Reader, *, source: str, tied_head: bool = False
    ) -> None:
        self.config = config
        self.local: LocalShapes = config.local(tp_size)
        self._raw = read
        self._source = source
        self._tied_head = tied_head
        self._copy_rows = False
        self._dtype = numpy_dtype(config.dtype)

    def _read(self, name: str, dtype: np.dtype[Any] | None = None) -> Array:
        return convert(self._raw(name), dtype or self._dtype, name=name, source=self._source)

    def shard(self, ranks: Sequence[int]) -> list[RankWeights]:
        """One dict per entry of ``ranks``, TensorRT-LLM name -> tensor; what is not sharded is one array in all."""
        results: list[RankWeights] = [{} for _ in ranks]
        # A view would keep the other ranks' rows in memory; the tied embedding is there anyway.
        self._copy_rows = len(ranks) < self.local.tp_size
        embedding = self._read(EMBEDDING)
        self._share(results, "transformer.vocab_embedding.weight", embedding)
        for index in range(self.config.num_hidden_layers):
            self._layer(f"model.layers.{index}.", f"transformer.layers.{index}.", ranks, results)
        self._share(results, "transformer.ln_f.weight", self._read(FINAL_NORM))
        self._copy_rows &= not self._tied_head
        head = embedding if self._tied_head else self._read(LM_HEAD)
        for rank, result in zip(ranks, results, strict=True):
            result["lm_head.weight"] = self._rows(head, rank, self.local.vocab_size)
        return results

    def _rows(self, matrix: Array, rank: int, count: int) -> Array:
        rows = take_rows(matrix, rank * count, count)
        return rows.copy() if self._copy_rows and rows.base is not None else rows

    @staticmethod
    def _share(results: Sequence[RankWeights], name: str, tensor: Array) -> None:
        for result in results:
            result[name] = tensor

    def _layer(self, full: str, out: str, ranks: Sequence[int], results: Sequence[RankWeights]) -> None:
        self._share(results, f"{out}input_layernorm.weight", self._read(f"{full}input_layernorm.weight"))
        kinds = ("weight", "bias") if self.config.qkv_bias else ("weight",)
        for kind in kinds:
            parts = [self._read(f"{full}self_attn.{part}_proj.{kind}") for part in ("q", "k", "v")]
            for rank, result in zip(ranks, results, strict=True):
                result[f"{out}attention.qkv.{kind}"] = self._qkv(parts, rank)
        dense = self._read(f"{full}self_attn.o_proj.weight")
        columns = self.local.num_heads * self.config.head_size
        for rank, result in zip(ranks, results, strict=True):
            result[f"{out}attention.dense.weight"] = take_columns(dense, rank * columns, columns)
        self._share(results, f"{out}post_layernorm.weight", self._read(f"{full}post_attention_layernorm.weight"))
        if self.config.moe is None:
            self._dense_ffn(full, out, ranks, results)
        else:
            self._moe_ffn(full, out, ranks, results)

    def _qkv(self, parts: Sequence[Array], rank: int) -> Array:
        d, local = self.config.head_size, self.local
        q, kv = local.num_heads, local.num_kv_heads
        first_kv = rank // local.kv_replicas if local.kv_replicas > 1 else rank * kv
        shards = [take_rows(parts[0], rank * q * d, q * d)]
        shards += [take_rows(part, first_kv * d, kv * d) for part in parts[1:]]
        return np.concatenate(shards)

    def _dense_ffn(self, full: str, out: str, ranks: Sequence[int], results: Sequence[RankWeights]) -> None:
        size = self.local.intermediate_size
        for source, target in (("gate_proj", "fc"), ("up_proj", "gate")):
            matrix = self._read(f"{full}mlp.{source}.weight")
            for rank, result in zip(ranks, results, strict=True):
                result[f"{out}mlp.{target}.weight"] = self._rows(matrix, rank, size)
        matrix = self._read(f"{full}mlp.down_proj.weight")
        for rank, result in zip(ranks, results, strict=True):
            result[f"{out}mlp.proj.weight"] = take_columns(matrix, rank * size, size)

    def _moe_ffn(self, full: str, out: str, ranks: Sequence[int], results: Sequence[RankWeights]) -> None:
        assert self.config.moe is not None
        experts, h, size = self.config.moe.num_experts, self.config.hidden_size, self.local.intermediate_size
        router = self._read(f"{full}block_sparse_moe.gate.weight", np.dtype(np.float32))
        self._share(results, f"{out}mlp.router.weight", router)
        for result in results:
            result[f"{out}mlp.fc.weight"] = np.empty((experts, 2 * size, h), self._dtype)
            result[f"{out}mlp.proj.weight"] = np.empty((experts, h, size), self._dtype)
        for expert in range(experts):
            w1, w2, w3 = (self._read(f"{full}block_sparse_moe.experts.{expert}.w{i}.weight") for i in (1, 2, 3))
            for rank, result in zip(ranks, results, strict=True):
                fc = result[f"{out}mlp.fc.weight"][expert]
                # TensorRT-LLM's order: the linear half first, then the half that goes through SiLU.
                fc[:size] = take_rows(w3, rank * size, size)
                fc[size:] = take_rows(w1, rank * size, size)
                result[f"{out}mlp.proj.weight"][expert] = take_columns(w2, rank * size, size)
