"""Greedy generation with in-flight batching: chunks of prompts and generation rows share the steps of an engine.

The bookkeeping is deterministic, so under mpirun every rank does it alone and all stay in step; in one process the
ranks are threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.batch import SequenceStep, StepLayout, step_inputs
from trtllm_tokenweave.comm import run_ranks
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.interpreter.context import ExecutionContext
from trtllm_tokenweave.kv_cache import BlockManager, KvCacheConfig, KvCachePool
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.recorder.enums import TRT_NAMES, numpy_dtype

Array = NDArray[Any]
StepInputs = dict[str, Array]

#: Runs one step: the inputs of each local rank in, logits [B, at least vocab_size] out (equal on all ranks).
StepFunction = Callable[[list[StepInputs]], Array]


@dataclass(frozen=True)
class GenerationLimits:
    """What a step and a sequence may hold (TensorRT-LLM's build options of the same names).

    Attributes:
        max_num_tokens: Tokens of a step: longer prompts are cut in chunks of whole blocks.
        max_batch_size: Sequences in flight.
        max_seq_len: Tokens of a sequence, prompt included.
        max_new_tokens: Tokens generated per prompt.
        tokens_per_block: Tokens of a KV-cache block.
        num_blocks: Blocks of the KV cache; 0: enough for max_batch_size full sequences.
        eos_ids: Tokens that end a sequence; they are part of the result.
    """

    max_num_tokens: int = 256
    max_batch_size: int = 8
    max_seq_len: int = 512
    max_new_tokens: int = 32
    tokens_per_block: int = 32
    num_blocks: int = 0
    eos_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name in ("max_num_tokens", "max_batch_size", "max_seq_len", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, expected at least 1", where="limits")
        if self.max_num_tokens < max(self.max_batch_size, self.tokens_per_block):
            raise UserError(
                f"max_num_tokens {self.max_num_tokens} is less than max_batch_size {self.max_batch_size} or "
                f"tokens_per_block {self.tokens_per_block}",
                where="limits",
                fix="a step must hold one token of every sequence, and a block of a prompt",
            )

    def cache(self, config: ModelConfig, tp_size: int) -> KvCacheConfig:
        """KV cache of one rank of a model."""
        per_sequence = -(-self.max_seq_len // self.tokens_per_block)
        return KvCacheConfig(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.local(tp_size).num_kv_heads,
            head_size=config.head_size,
            dtype=numpy_dtype(TRT_NAMES[config.dtype]),
            num_blocks=self.num_blocks or per_sequence * self.max_batch_size,
            tokens_per_block=self.tokens_per_block,
            max_blocks_per_seq=per_sequence,
        )


@dataclass(frozen=True)
class StepRecord:
    """One step that was run: its tokens, sequences, and how many of them were context chunks."""

    index: int
    num_tokens: int
    batch: int
    num_contexts: int


@dataclass
class Generation:
    """What came of one prompt: the tokens, and for each the logits that chose it ([vocab_size] float32)."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logits: list[NDArray[np.float32]] = field(default_factory=list)
    ended_by_eos: bool = False


@dataclass
class GenerationResult:
    """All generations, in the order of the prompts, and the steps that made them."""

    generations: list[Generation]
    steps: list[StepRecord]

    @property
    def tokens(self) -> list[list[int]]:
        """Generated tokens per prompt."""
        return [g.tokens for g in self.generations]


@dataclass
class _Active:
    number: int
    result: Generation
    done: int = 0

    @property
    def prefilled(self) -> bool:
        return self.done >= len(self.result.prompt)


class Generator:
    """Runs prompts through an engine.

    Args:
        run_step: Runs one step on every local rank.
        pools: KV-cache pool of each local rank; all of the same shape.
        tp_size: Ranks of the engine (more than ``len(pools)`` under mpirun).
        vocab_size: Logits past it are padding and never chosen.
        limits: Sizes of steps and sequences.
        on_step: Called before each step with its record and the inputs of the first local rank.
    """

    def __init__(
        self,
        run_step: StepFunction,
        pools: Sequence[KvCachePool],
        *,
        tp_size: int,
        vocab_size: int,
        limits: GenerationLimits,
        on_step: Callable[[StepRecord, StepInputs], None] | None = None,
    ) -> None:
        self.run_step = run_step
        self.pools = pools
        self.tp_size = tp_size
        self.vocab_size = vocab_size
        self.limits = limits
        self.on_step = on_step

    def generate(self, prompts: Sequence[Sequence[int]]) -> GenerationResult:
        """Generate up to ``max_new_tokens`` tokens for each prompt, the most likely one each time (ties: lowest id).

        Raises:
            UserError: a prompt is empty, too long, or holds a token outside the vocabulary; or the cache is too small
                for it.
            TokenWeaveError: logits that are not finite.
        """
        blocks = BlockManager(self.pools[0].config)
        generations = [Generation(tuple(int(t) for t in prompt)) for prompt in prompts]
        for number, generation in enumerate(generations):
            self._check_prompt(number, generation.prompt)
        layouts = [StepLayout(p, blocks, self.limits.max_seq_len, self.tp_size) for p in self.pools]
        waiting = deque(_Active(n, g) for n, g in enumerate(generations))
        active: list[_Active] = []
        records: list[StepRecord] = []
        while waiting or active:
            self._admit(waiting, active)
            steps = self._schedule(active)
            for step in steps:
                blocks.grow(step.sequence, step.end)
            inputs = [step_inputs(steps, layout) for layout in layouts]
            record = StepRecord(
                len(records), sum(len(s.tokens) for s in steps), len(steps), sum(s.is_context for s in steps)
            )
            records.append(record)
            if self.on_step is not None:
                self.on_step(record, inputs[0])
            self._advance(active, steps, self.run_step(inputs))
            for ended in [a for a in active if self._ended(a)]:
                active.remove(ended)
                blocks.free(ended.number)
        return GenerationResult(generations, records)

    def _check_prompt(self, number: int, prompt: tuple[int, ...]) -> None:
        where, limits, cache = f"prompt {number}", self.limits, self.pools[0].config
        if not prompt:
            raise UserError("is empty", where=where)
        wrong = [t for t in prompt if not 0 <= t < self.vocab_size]
        if wrong:
            raise UserError(f"token {wrong[0]} is outside the vocabulary of {self.vocab_size}", where=where)
        if self._most_tokens(prompt) > limits.max_seq_len:
            raise UserError(
                f"{len(prompt)} tokens and {limits.max_new_tokens} new ones exceed max_seq_len {limits.max_seq_len}",
                where=where,
                fix="shorten the prompt, lower max_new_tokens or raise max_seq_len",
            )
        if cache.blocks_for(self._most_tokens(prompt)) > cache.num_blocks:
            raise UserError(
                f"needs {cache.blocks_for(self._most_tokens(prompt))} KV-cache blocks, there are {cache.num_blocks}",
                where=where,
                fix="raise num_blocks",
            )

    def _most_tokens(self, prompt: tuple[int, ...]) -> int:
        return len(prompt) + self.limits.max_new_tokens

    def _admit(self, waiting: deque[_Active], active: list[_Active]) -> None:
        """Start sequences while all that run can reach their full length without running out of blocks."""
        cache = self.pools[0].config
        reserved = sum(cache.blocks_for(self._most_tokens(a.result.prompt)) for a in active)
        while waiting and len(active) < self.limits.max_batch_size:
            reserved += cache.blocks_for(self._most_tokens(waiting[0].result.prompt))
            if reserved > cache.num_blocks:
                return
            active.append(waiting.popleft())

    def _schedule(self, active: list[_Active]) -> list[SequenceStep]:
        """Every running sequence generates one token; prompts take what is left of the step, first come first served.

        A chunk that does not end its prompt is a whole number of blocks, as TensorRT-LLM's chunks are.
        """
        generation = [
            SequenceStep(a.number, (a.result.tokens[-1],), a.done, len(a.result.prompt), is_context=False)
            for a in active
            if a.prefilled
        ]
        budget = self.limits.max_num_tokens - len(generation)
        unit = self.pools[0].config.tokens_per_block
        contexts: list[SequenceStep] = []
        for a in active:
            if a.prefilled:
                continue
            prompt = a.result.prompt
            chunk = len(prompt) - a.done
            if chunk > budget:
                chunk = budget // unit * unit
            if not chunk:
                break
            tokens = prompt[a.done : a.done + chunk]
            contexts.append(SequenceStep(a.number, tokens, a.done, len(prompt), is_context=True))
            budget -= chunk
        return contexts + generation

    def _advance(self, active: list[_Active], steps: Sequence[SequenceStep], logits: Array) -> None:
        if logits.ndim != 2 or logits.shape[0] != len(steps) or logits.shape[1] < self.vocab_size:
            raise TokenWeaveError(
                f"logits have shape {logits.shape}, expected [{len(steps)}, at least {self.vocab_size}]"
            )
        by_number = {a.number: a for a in active}
        for row, step in enumerate(steps):
            sequence = by_number[step.sequence]
            sequence.done = step.end
            if not step.samples:
                continue
            values = logits[row, : self.vocab_size].astype(np.float32)
            if not np.isfinite(values).all():
                raise TokenWeaveError(
                    f"logits of sequence {step.sequence} at position {step.end - 1} are not finite: something read "
                    "memory that was not written"
                )
            token = int(np.argmax(values))
            sequence.result.tokens.append(token)
            sequence.result.logits.append(values)
            sequence.result.ended_by_eos = token in self.limits.eos_ids

    def _ended(self, sequence: _Active) -> bool:
        result = sequence.result
        return result.ended_by_eos or len(result.tokens) >= self.limits.max_new_tokens


def context_step(contexts: Sequence[ExecutionContext], output: str = "logits") -> StepFunction:
    """Make the step function of the ranks of this process: all of them as threads, or one under mpirun.

    Inputs that a network does not declare are left out, as TensorRT-LLM's runtime does.

    Args:
        contexts: One per local rank, in rank order.
        output: Network output to return.
    """
    names = [frozenset(c.network.get_input(i).name for i in range(c.network.num_inputs)) for c in contexts]

    def run(inputs: list[StepInputs]) -> Array:
        given = [{n: x for n, x in i.items() if n in known} for i, known in zip(inputs, names, strict=True)]
        outputs = run_ranks([partial(c.run, g) for c, g in zip(contexts, given, strict=True)])
        results = [o[output] for o in outputs]
        first = results[0]
        for rank, other in enumerate(results):
            if other.tobytes() != first.tobytes():
                raise TokenWeaveError(f"{output} of local rank {rank} differ from those of rank 0")
        return first

    return run


def make_generator(
    contexts: Sequence[ExecutionContext],
    config: ModelConfig,
    tp_size: int,
    limits: GenerationLimits,
    on_step: Callable[[StepRecord, StepInputs], None] | None = None,
) -> Generator:
    """Make a generator over the interpreter: allocates each local rank's KV-cache pool and binds it.

    The pools of an earlier generator of these contexts are unbound; that generator cannot be used again.

    Args:
        contexts: One per local rank (all of them, or this process's one under mpirun).
        config: The model that the networks were built from.
        tp_size: Ranks of the engine.
        limits: Sizes of steps and sequences.
        on_step: See `Generator`.

    Raises:
        UserError: ``max_seq_len`` exceeds what the model's positions allow.
    """
    if limits.max_seq_len > config.max_position_embeddings:
        raise UserError(
            f"max_seq_len {limits.max_seq_len} exceeds the model's {config.max_position_embeddings} positions",
            where="limits",
        )
    pools = [KvCachePool(limits.cache(config, tp_size)) for _ in contexts]
    for context, pool in zip(contexts, pools, strict=True):
        context.pools.clear()
        context.pools.update(pool.bindings)
    return Generator(
        context_step(contexts),
        pools,
        tp_size=tp_size,
        vocab_size=config.vocab_size,
        limits=limits,
        on_step=on_step,
    )
