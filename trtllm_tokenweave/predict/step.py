"""What one rank computes in a step, as kernels: a block (attention or MLP) of a layer, for the step or for a half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from trtllm_tokenweave.errors import UserError, check_fields, check_kind
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.plugin_specs import SiteKind
from trtllm_tokenweave.predict.gemm import BYTES, gemm_flops
from trtllm_tokenweave.predict.machine import Machine
from trtllm_tokenweave.predict.streams import Op
from trtllm_tokenweave.waves import GemmShape, Tile, gemm_shapes

# Of the GEMM that was watched beside a collective (nvjet_sm90_tst_256x128): an SM takes one such tile at a time.
TILE = Tile(128, 256)


@dataclass(frozen=True)
class Workload:
    """What runs: a prefill step of `batch` sequences of equal length without past, or a stack with stand-in attention.

    Attributes:
        config: Model.
        tp_size: Ranks, at least 2.
        batch: Sequences.
        stand_in_keys: Instead of attention two GEMMs [n, q] x [q, keys] and [n, keys] x [keys, q] with a ReLU between
            (`bench.stack_network`); 0: attention.

    Raises:
        UserError: tp_size cannot be served or has no collectives, or the dtype has no measurements.
    """

    config: ModelConfig
    tp_size: int
    batch: int = 1
    stand_in_keys: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_kind(self.config, ("a ModelConfig", ModelConfig), where="config")
        if self.tp_size == 1:
            raise UserError("tp_size 1 has no collectives", where="--tp", fix="give at least 2 ranks")
        if self.config.dtype == "float32":
            raise UserError(
                "float32 was not measured", where="dtype", fix="give a model in bfloat16 or float16 for a prediction"
            )
        _ = self.shapes

    @cached_property
    def shapes(self) -> tuple[GemmShape, ...]:
        """The layer's GEMMs."""
        return gemm_shapes(self.config, self.tp_size)

    @cached_property
    def query_size(self) -> int:
        """Columns of the queries on one rank."""
        return self.config.local(self.tp_size).num_heads * self.config.head_size

    def activation(self, num_tokens: int) -> int:
        """Bytes of [num_tokens, hidden]."""
        return num_tokens * self.config.hidden_size * BYTES

    def sequences(self, num_tokens: int) -> tuple[int, ...]:
        """Lengths of the step's sequences, which differ by at most one token."""
        each, more = divmod(num_tokens, self.batch)
        return (each + 1,) * more + (each,) * (self.batch - more)


def causal_pairs(lengths: Sequence[int], begin: int, end: int) -> float:
    """Pairs of query and key that rows begin..end of packed sequences attend to: row i of a sequence has i + 1 keys.

    Counted as an area, ``(b^2 - a^2) / 2`` for rows a..b of a sequence, as FLOPs of causal attention usually are.
    """
    pairs, start = 0.0, 0
    for length in lengths:
        a, b = (min(max(edge - start, 0), length) for edge in (begin, end))
        pairs += (b * b - a * a) / 2
        start += length
    return pairs


@dataclass(frozen=True)
class Rows:
    """Rows begin..end of the packed tokens of a step."""

    lengths: tuple[int, ...]
    begin: int
    end: int

    @property
    def count(self) -> int:
        """How many."""
        return self.end - self.begin


class Kernels:
    """The kernels of a workload on a machine."""

    def __init__(self, machine: Machine, workload: Workload) -> None:
        self.machine = machine
        self.workload = workload
        self._qkv, self._dense, self._fc, self._proj = workload.shapes

    def block(self, kind: SiteKind, rows: Rows) -> tuple[Op, ...]:
        """What runs between two collectives, without norms.

        Attention: qkv, rotary embedding with the write to the KV cache, attention, dense. MLP: fc and gate, their
        product, proj.
        """
        n = rows.count
        if kind is SiteKind.ATTENTION:
            return (self._gemm(self._qkv, n), *self._attention(rows), self._gemm(self._dense, n))
        half = self._fc.n // 2
        product = 3 * half * self._fc.rows_per_token * n * BYTES
        return self._gemm(self._fc, n), self._memory(product), self._gemm(self._proj, n)

    def _attention(self, rows: Rows) -> tuple[Op, ...]:
        n, width, keys = rows.count, self.workload.query_size, self.workload.stand_in_keys
        if keys:
            scores, values = GemmShape("", "attention", keys, width), GemmShape("", "attention", width, keys)
            return self._gemm(scores, n), self._memory(2 * keys * n * BYTES), self._gemm(values, n)
        # Two products of 2 FLOP for each pair and each column of the queries.
        flops = 4 * width * causal_pairs(rows.lengths, rows.begin, rows.end)
        launch = self.machine.memory_us(0)
        attention = Op(launch + flops / self.machine.parameters.attention_flops_per_us, flops=flops)
        return self._memory(2 * self._qkv.n * n * BYTES), attention

    def _gemm(self, shape: GemmShape, num_tokens: int) -> Op:
        us = self.machine.parameters.gemm_scale * self.machine.gemms.us(shape, num_tokens)
        return Op(us, shape.tiles(num_tokens, TILE), gemm_flops(shape, num_tokens))

    def _memory(self, moved: int) -> Op:
        return Op(self.machine.memory_us(moved))
