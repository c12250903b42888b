"""Greedy generation with in-flight batching: chunks of prompts and generation rows share the steps of an engine.

The bookkeeping is deterministic, so under mpirun every rank does it alone: with the same calls of `submit` and `cancel`
between the same steps on all ranks, all do the same steps. In one process the ranks are threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.batch import SequenceStep, StepLayout, step_inputs
from trtllm_tokenweave.comm import run_ranks
from trtllm_tokenweave.errors import TokenWeaveError, UserError, check_fields
from trtllm_tokenweave.interpreter.context import ExecutionContext
from trtllm_tokenweave.kv_cache import BlockManager, CachePool, KvCacheConfig, KvCachePool
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
        max_new_tokens: Tokens generated per prompt, where `Generator.submit` is not told otherwise.
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
        check_fields(self, "limits: ")
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
    """One step: its number, counted by its generator, its tokens, sequences, and how many of these are chunks."""

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


@dataclass(frozen=True)
class Produced:
    """A token that a step has produced.

    Attributes:
        number: The sequence; see `Generator.submit`.
        token: The token.
        ended: Why it is the sequence's last, "" where it is not.
    """

    number: int
    token: int
    ended: Literal["", "eos", "length"]


@dataclass
class _Sequence:
    number: int
    result: Generation
    max_new_tokens: int
    keep_logits: bool
    done: int = 0

    @property
    def prefilled(self) -> bool:
        return self.done >= len(self.result.prompt)

    @property
    def most_tokens(self) -> int:
        return len(self.result.prompt) + self.max_new_tokens

    @property
    def ended(self) -> Literal["", "eos", "length"]:
        if self.result.ended_by_eos:
            return "eos"
        return "length" if len(self.result.tokens) >= self.max_new_tokens else ""


class Generator:
    """Runs sequences through an engine: each step serves all that are in flight.

    One thread uses it at a time. After a step that raised, what is in flight must be cancelled: its keys and values may
    be missing.

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
        pools: Sequence[CachePool],
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
        self._blocks = BlockManager(pools[0].config)
        self._layouts = [StepLayout(p, self._blocks, limits.max_seq_len, tp_size) for p in pools]
        self._waiting: deque[_Sequence] = deque()
        self._active: list[_Sequence] = []
        self._submitted = self._steps = 0

    # ---- sequences in flight

    @property
    def busy(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self._waiting or self._active)

    def submit(self, prompt: Sequence[int], max_new_tokens: int | None = None) -> int:
        """Queue a prompt; the steps to come generate the most likely token each time (ties: lowest id).

        Sequences start in the order in which they were submitted, when there is room for all their tokens.

        Args:
            prompt: Token ids.
            max_new_tokens: Tokens to generate; None: the limits'.

        Returns:
            The sequence's number, never used again.

        Raises:
            UserError: the prompt is empty, too long, or holds a token outside the vocabulary; or the cache is too small
                for it. Nothing changes then.
        """
        return self._submit(prompt, max_new_tokens, f"sequence {self._submitted}", keep_logits=False).number

    def cancel(self, number: int) -> None:
        """End a sequence between two steps: it produces nothing more, and its blocks are free.

        Numbers of sequences that have ended are ignored.
        """
        self._waiting = deque(s for s in self._waiting if s.number != number)
        for sequence in [s for s in self._active if s.number == number]:
            self._end(sequence)

    def step(self) -> list[Produced]:
        """Run one step of the engine for what is in flight.

        Returns:
            A token for every sequence whose prompt is done, in the order of the step's rows: none when only chunks of
            prompts were run, or when nothing is in flight.

        Raises:
            TokenWeaveError: the engine failed, or put out logits that are not finite.
        """
        return self._run()[1] if self.busy else []

    # ---- whole prompts

    def generate(self, prompts: Sequence[Sequence[int]]) -> GenerationResult:
        """Generate up to the limits' ``max_new_tokens`` tokens for each prompt.

        Raises:
            UserError: as :meth:`submit`, or sequences are in flight.
            TokenWeaveError: as :meth:`step`.
        """
        if self._waiting or self._active:
            raise UserError("sequences are in flight", where="generate", fix="run their steps first, or cancel them")
        records: list[StepRecord] = []
        sequences: list[_Sequence] = []
        try:
            for number, prompt in enumerate(prompts):
                sequences.append(self._submit(prompt, None, f"prompt {number}", keep_logits=True))
            while self.busy:
                records.append(self._run()[0])
        finally:
            for sequence in sequences:
                self.cancel(sequence.number)
        return GenerationResult([s.result for s in sequences], records)

    # ---- bookkeeping

    def _submit(self, prompt: Sequence[int], max_new_tokens: int | None, where: str, *, keep_logits: bool) -> _Sequence:
        most = self.limits.max_new_tokens if max_new_tokens is None else max_new_tokens
        sequence = _Sequence(self._submitted, Generation(tuple(int(t) for t in prompt)), most, keep_logits)
        self._check(sequence, where)
        self._submitted += 1
        self._waiting.append(sequence)
        return sequence

    def _check(self, sequence: _Sequence, where: str) -> None:
        prompt, most = sequence.result.prompt, sequence.most_tokens
        limits, cache = self.limits, self.pools[0].config
        if not prompt:
            raise UserError("is empty", where=where)
        if sequence.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {sequence.max_new_tokens}, expected at least 1", where=where)
        wrong = [t for t in prompt if not 0 <= t < self.vocab_size]
        if wrong:
            raise UserError(f"token {wrong[0]} is outside the vocabulary of {self.vocab_size}", where=where)
        if most > limits.max_seq_len:
            raise UserError(
                f"{len(prompt)} tokens and {sequence.max_new_tokens} new ones exceed max_seq_len {limits.max_seq_len}",
                where=where,
                fix="shorten the prompt, lower max_new_tokens or raise max_seq_len",
            )
        if cache.blocks_for(most) > cache.num_blocks:
            raise UserError(
                f"needs {cache.blocks_for(most)} KV-cache blocks, there are {cache.num_blocks}",
                where=where,
                fix="raise num_blocks",
            )

    def _run(self) -> tuple[StepRecord, list[Produced]]:
        self._admit()
        steps = self._schedule()
        for step in steps:
            self._blocks.grow(step.sequence, step.end)
        inputs = [step_inputs(steps, layout) for layout in self._layouts]
        num_tokens, num_contexts = sum(len(s.tokens) for s in steps), sum(s.is_context for s in steps)
        record = StepRecord(self._steps, num_tokens, len(steps), num_contexts)
        self._steps += 1
        if self.on_step is not None:
            self.on_step(record, inputs[0])
        return record, self._advance(steps, self.run_step(inputs))

    def _admit(self) -> None:
        """Start sequences while all that run can reach their full length without running out of blocks."""
        cache, active, waiting = self.pools[0].config, self._active, self._waiting
        reserved = sum(cache.blocks_for(a.most_tokens) for a in active)
        while waiting and len(active) < self.limits.max_batch_size:
            reserved += cache.blocks_for(waiting[0].most_tokens)
            if reserved > cache.num_blocks:
                return
            active.append(waiting.popleft())

    def _schedule(self) -> list[SequenceStep]:
        """Every running sequence generates one token; prompts take what is left of the step, first come first served.

        A chunk that does not end its prompt is a whole number of blocks, as TensorRT-LLM's chunks are.
        """
        generation = [
            SequenceStep(a.number, (a.result.tokens[-1],), a.done, len(a.result.prompt), is_context=False)
            for a in self._active
            if a.prefilled
        ]
        budget = self.limits.max_num_tokens - len(generation)
        unit = self.pools[0].config.tokens_per_block
        contexts: list[SequenceStep] = []
        for a in self._active:
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

    def _advance(self, steps: Sequence[SequenceStep], logits: Array) -> list[Produced]:
        if logits.ndim != 2 or logits.shape[0] != len(steps) or logits.shape[1] < self.vocab_size:
            raise TokenWeaveError(
                f"logits have shape {logits.shape}, expected [{len(steps)}, at least {self.vocab_size}]"
            )
        by_number = {a.number: a for a in self._active}
        produced = []
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
            if sequence.keep_logits:
                sequence.result.logits.append(values)
            sequence.result.ended_by_eos = token in self.limits.eos_ids
            produced.append(Produced(sequence.number, token, sequence.ended))
            if sequence.ended:
                self._end(sequence)
        return produced

    def _end(self, sequence: _Sequence) -> None:
        self._active.remove(sequence)
        if self._blocks.blocks(sequence.number):
            self._blocks.free(sequence.number)


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
