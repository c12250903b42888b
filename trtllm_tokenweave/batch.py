"""The inputs of one engine step: from the sequences that take part to the tensors that the network declares.

Names, dtypes and meanings are those of TensorRT-LLM's engines with remove_input_padding and a paged KV cache, as
its ``RuntimeBuffers::setFromInputs`` fills them, for beam width 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.batch_split import CONTEXT, GENERATION
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.kv_cache import BlockManager, CachePool, pool_mapping

Array = NDArray[Any]

#: Length of ``host_runtime_perf_knobs``; entry 0 is multi_block_mode, the rest is unset (-1).
PERF_KNOBS = 16


@dataclass(frozen=True)
class SequenceStep:
    """What one sequence does in a step.

    Attributes:
        sequence: Its number: the key of its blocks.
        tokens: New token ids: a chunk of the prompt, or the one token generated last.
        start: Tokens of the sequence before these.
        prompt_length: Tokens of its prompt.
        is_context: A chunk of the prompt, not a generation row.
    """

    sequence: int
    tokens: tuple[int, ...]
    start: int
    prompt_length: int
    is_context: bool

    def __post_init__(self) -> None:
        where = f"sequence {self.sequence}"
        end = self.start + len(self.tokens)
        if not self.tokens or self.start < 0:
            raise UserError(f"{len(self.tokens)} tokens from position {self.start} make no step", where=where)
        if self.is_context and end > self.prompt_length:
            raise UserError(f"chunk ends at {end}, the prompt at {self.prompt_length}", where=where)
        if not self.is_context and (len(self.tokens) != 1 or self.start < self.prompt_length):
            raise UserError(f"{len(self.tokens)} tokens at {self.start} are no generation row", where=where)

    @property
    def end(self) -> int:
        """Tokens of the sequence after this step."""
        return self.start + len(self.tokens)

    @property
    def samples(self) -> bool:
        """Whether this step's logits choose the next token (not for a chunk that is not the prompt's last)."""
        return self.end >= self.prompt_length


@dataclass(frozen=True)
class StepLayout:
    """Sizes of an engine that its inputs follow; ``pool`` is the rank's, ``blocks`` shared by all ranks."""

    pool: CachePool
    blocks: BlockManager
    max_seq_len: int
    tp_size: int = 1


def step_inputs(steps: Sequence[SequenceStep], layout: StepLayout) -> dict[str, Array]:
    """Return every input of the network for one step (T tokens, B sequences), for one rank.

    The dict holds ``all_reduce_workspace`` when tp_size is above 1; a network that does not declare it ignores it.

    Raises:
        UserError: the step is empty, a generation row comes before a context chunk, or a sequence has too few
            blocks or too many tokens.
    """
    if not steps:
        raise UserError("a step needs at least one sequence", where="step")
    for before, after in pairwise(steps):
        if after.is_context and not before.is_context:
            raise UserError("context chunk after a generation row", where=f"sequence {after.sequence}")
    config = layout.pool.config
    for step in steps:
        have = len(layout.blocks.blocks(step.sequence)) * config.tokens_per_block
        if step.end > min(have, layout.max_seq_len):
            raise UserError(
                f"{step.end} tokens, room for {have} in its blocks, max_seq_len {layout.max_seq_len}",
                where=f"sequence {step.sequence}",
            )
    inputs = _sequence_inputs(steps)
    offsets = np.stack([layout.blocks.offsets(s.sequence) for s in steps])[None]
    layers = config.num_layers
    inputs |= {
        "host_max_attention_window_sizes": np.full(layers, layout.max_seq_len, np.int32),
        "host_sink_token_length": np.zeros(1, np.int32),
        "cache_indirection": np.zeros((len(steps), 1, layout.max_seq_len), np.int32),
        "kv_cache_block_offsets": offsets,
        "host_kv_cache_block_offsets": offsets.copy(),
        "host_kv_cache_pool_pointers": layout.pool.pointers,
        "host_kv_cache_pool_mapping": pool_mapping(layers),
        "host_runtime_perf_knobs": _perf_knobs(),
        "host_context_progress": np.zeros(1, np.int64),
    }
    if layout.tp_size > 1:
        inputs["all_reduce_workspace"] = np.zeros(7 * layout.tp_size + 3, np.int64)
    return inputs


def _sequence_inputs(steps: Sequence[SequenceStep]) -> dict[str, Array]:
    counts = np.array([len(s.tokens) for s in steps], np.int32)
    ends = np.array([s.end for s in steps], np.int32)
    context = np.array([s.is_context for s in steps])
    lengths = np.where(context, counts, [s.prompt_length for s in steps]).astype(np.int32)
    return {
        "input_ids": np.array([t for s in steps for t in s.tokens], np.int32),
        "position_ids": np.concatenate([np.arange(s.start, s.end, dtype=np.int32) for s in steps]),
        "last_token_ids": np.cumsum(counts).astype(np.int32),
        "sequence_length": ends,
        "context_lengths": lengths,
        "host_context_lengths": lengths.copy(),
        "host_request_types": np.where(context, CONTEXT, GENERATION).astype(np.int32),
        # A context chunk counts itself, a generation row does not.
        "host_past_key_value_lengths": np.where(context, ends, ends - 1).astype(np.int32),
    }


def _perf_knobs() -> NDArray[np.int64]:
    knobs = np.full(PERF_KNOBS, -1, np.int64)
    knobs[0] = 1
    return knobs
