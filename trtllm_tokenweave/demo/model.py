"""Generate text with the stock and with the woven network of a checkpoint, and compare everything."""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trtllm_tokenweave.checkpoint import Checkpoint, require_tokenizer
from trtllm_tokenweave.comm import CommBackend, LocalComm
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.interpreter import ExecutionContext
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.passes import WeaveOptions, WeaveResult, chain_signature, verify_ranks, weave
from trtllm_tokenweave.recorder import IConstantLayer, RecordedNetwork
from trtllm_tokenweave.report import PromptRow, SplitStep, StepKind
from trtllm_tokenweave.runner import GenerationLimits, GenerationResult, StepRecord, make_generator
from trtllm_tokenweave.table import Bucket, TableRow, TuningTable
from trtllm_tokenweave.waves import table_key

#: Short and long, so that prompts are prefilled in chunks beside the generation of others.
PROMPTS: tuple[str, ...] = (
    "What is the capital of France?",
    "Name three primary colors.",
    "Explain in one short sentence why the sky looks blue during the day and red in the evening.",
    "Here is a note. 'The train to Lyon leaves at nine from platform four. Tickets are sold at the counter until "
    "half past eight, after that only on board, where they cost two euros more. Bicycles travel in the last carriage, "
    "dogs need a ticket of their own, and the restaurant car is closed on Sundays.' From which platform does the train "
    "leave?",
    "Write a two-word greeting.",
    "What comes after Monday?",
)

#: Rounding in another order moves fp32 logits by parts in a million; a thousandth is no rounding.
LOGIT_TOLERANCE = 1e-3

Progress = Callable[[str], None]


@dataclass(frozen=True)
class DemoOptions:
    """How the demo runs.

    Attributes:
        tp_size: Ranks.
        prompts: User messages; the model's chat template is put around each.
        max_new_tokens: Tokens generated per prompt.
        max_num_tokens: Most tokens of a step; longer prompts are prefilled in chunks.
        max_batch_size: Sequences in flight; fewer than prompts, so that steps mix prefill and generation.
        min_tokens: Steps below are fused, not split: lowered from 1024, so that small steps really split.
        granularity: Grid of the split, lowered from 256 likewise.
    """

    tp_size: int = 3
    prompts: tuple[str, ...] = PROMPTS
    max_new_tokens: int = 12
    max_num_tokens: int = 96
    max_batch_size: int = 4
    min_tokens: int = 12
    granularity: int = 16


@dataclass(frozen=True)
class DemoResult:
    """What came out; equal on every rank.

    Attributes:
        prompts: Texts of both networks, prompt by prompt.
        max_logit_diff: Largest absolute difference of a logit over all generated tokens that agree.
        logit_bound: What it may be: LOGIT_TOLERANCE times the largest absolute logit.
        split_steps: Every step of the woven run.
        weave: What the pass did (rank 0 of this process).
        seconds: Wall clock by phase on this machine.
    """

    prompts: tuple[PromptRow, ...]
    max_logit_diff: float
    logit_bound: float
    split_steps: tuple[SplitStep, ...]
    weave: WeaveResult
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """Whether every prompt gave the same tokens, from logits that are equal but for rounding."""
        return all(row.identical for row in self.prompts) and self.max_logit_diff <= self.logit_bound


def demo_table(checkpoint: Checkpoint, options: DemoOptions) -> TuningTable:
    """A table that splits small steps, unevenly: larger steps move more rows to the prefix."""
    g = options.granularity
    rows = (
        TableRow(tokens=Bucket(lo=1, hi=2 * g), mode="weave"),
        TableRow(tokens=Bucket(lo=2 * g + 1, hi=4 * g), mode="weave", split_offset=8),
        TableRow(tokens=Bucket(lo=4 * g + 1), mode="weave", split_offset=16),
    )
    key = table_key(checkpoint.config, options.tp_size)
    return TuningTable(key=key, granularity=g, min_tokens=options.min_tokens, rows=rows)


def run_demo(
    checkpoint: Checkpoint, options: DemoOptions, progress: Progress, comm: CommBackend | None = None
) -> DemoResult:
    """Build, weave, verify and run both networks.

    Args:
        checkpoint: The model.
        options: How to run it.
        progress: Called with one line per phase.
        comm: This process's place under mpirun; None runs every rank as a thread of this process.

    Raises:
        UserError: when the checkpoint has no tokenizer, the model cannot be cut for ``tp_size``, or a prompt is too
            long.
        TokenWeaveError: when the checker finds a fault, or ranks disagree.
    """
    if options.tp_size < 2:
        raise UserError(
            f"tp_size {options.tp_size} has no communication to hide", where="demo", fix="use --tp 2 or more"
        )
    seconds: dict[str, float] = {}
    clock = time.perf_counter()

    def phase(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        seconds[name], clock = now - clock, now

    config = checkpoint.config
    config.local(options.tp_size)
    if options.max_new_tokens < 1:
        raise UserError(f"{options.max_new_tokens} is below 1", where="--max-new-tokens")
    for number, prompt in enumerate(options.prompts):
        if not prompt.strip():
            raise UserError("is empty", where=f"prompt {number}", fix="give some words")
    tokenizer = require_tokenizer(checkpoint)
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": p}]) for p in options.prompts]
    prompts = [tokenizer.encode(text) for text in texts]
    for number, tokens in enumerate(prompts):
        if len(tokens) + options.max_new_tokens > config.max_position_embeddings:
            raise UserError(
                f"its {len(tokens)} tokens and {options.max_new_tokens} new ones exceed the model's "
                f"{config.max_position_embeddings} positions",
                where=f"prompt {number}",
                fix="shorten it, or lower --max-new-tokens",
            )
    longest = max(len(p) for p in prompts) + options.max_new_tokens
    limits = GenerationLimits(
        max_num_tokens=options.max_num_tokens,
        max_batch_size=options.max_batch_size,
        max_seq_len=min(-(-longest // 32) * 32, config.max_position_embeddings),
        max_new_tokens=options.max_new_tokens,
        eos_ids=tokenizer.eos_ids,
    )
    ranks = range(options.tp_size) if comm is None else [comm.rank]
    progress(f"building {len(ranks) * 2} networks of {checkpoint.config.num_hidden_layers} layers")
    stock = [_build(checkpoint, options, limits, rank, comm is not None) for rank in ranks]
    woven = [_build(checkpoint, options, limits, rank, comm is not None) for rank in ranks]
    phase("build")
    table = demo_table(checkpoint, options)
    results = [
        weave(
            network,
            WeaveOptions(
                Mapping(options.tp_size, rank, options.tp_size), table, options.max_batch_size, options.max_num_tokens
            ),
        )
        for rank, network in zip(ranks, woven, strict=True)
    ]
    faults = verify_ranks(woven) if comm is None else _ranks_agree(checkpoint, woven[0], comm)
    if faults:
        raise TokenWeaveError(faults[0])
    phase("weave")
    plan = results[0].plan
    if not plan.sites:
        where, reason = plan.refused[0].where, plan.refused[0].reason
        raise TokenWeaveError(f"nothing could be fused, so there is nothing to show: {where}: {reason}")
    progress(f"weaving done: {len(plan.sites)} sites fused, mode {results[0].mode}")
    comms = LocalComm.group(options.tp_size) if comm is None else [comm]
    outcome: list[GenerationResult] = []
    records: list[StepRecord] = []
    for name, networks, seen in (("stock", stock, None), ("woven", woven, records)):
        progress(f"generating with the {name} network")
        contexts = [ExecutionContext(n, c) for n, c in zip(networks, comms, strict=True)]
        on_step = None if seen is None else lambda record, _inputs: records.append(record)
        generator = make_generator(contexts, checkpoint.config, options.tp_size, limits, on_step)
        outcome.append(generator.generate(prompts))
        phase(name)
    rows, difference, largest = _compare(options.prompts, outcome, tokenizer.decode)
    return DemoResult(
        rows, difference, LOGIT_TOLERANCE * largest, tuple(_cut(r, results[0]) for r in records), results[0], seconds
    )


def _build(
    checkpoint: Checkpoint, options: DemoOptions, limits: GenerationLimits, rank: int, alone: bool
) -> RecordedNetwork:
    network = RecordedNetwork(f"{checkpoint.source} rank {rank}")
    mapping = Mapping(options.tp_size, rank, options.tp_size)
    sizes = NetworkOptions(
        max_batch_size=limits.max_batch_size, max_num_tokens=limits.max_num_tokens, max_seq_len=limits.max_seq_len
    )
    build_llama(network, checkpoint.config, mapping, checkpoint.rank_weights(mapping, only_this_rank=alone), sizes)
    return network


def _ranks_agree(checkpoint: Checkpoint, network: RecordedNetwork, comm: CommBackend) -> list[str]:
    """Compare model and order of collectives with the other ranks, each of which has read and built its own."""
    layers = [x for x in network.layers if isinstance(x, IConstantLayer) and "vocab_embedding" in x.name]
    words = [layer.weights.array for layer in layers if layer.weights.array is not None]
    parts = [
        checkpoint.config.model_dump_json(),
        *chain_signature(network),
        *(str(zlib.crc32(w.tobytes())) for w in words),
    ]
    digest = hashlib.sha256("\n".join(parts).encode()).digest()
    digests = [d.tobytes() for d in comm.all_gather("digest", np.frombuffer(digest, np.uint8))]
    return [
        f"rank {rank} runs another model, or orders its collectives differently from rank 0"
        for rank, other in enumerate(digests)
        if other != digests[0]
    ]


def _compare(
    prompts: Sequence[str], outcome: Sequence[GenerationResult], decode: Callable[[Sequence[int]], str]
) -> tuple[tuple[PromptRow, ...], float, float]:
    rows, difference, largest = [], 0.0, 0.0
    for prompt, a, b in zip(prompts, outcome[0].generations, outcome[1].generations, strict=True):
        same = a.tokens == b.tokens
        rows.append(PromptRow(prompt, decode(b.tokens), same, len(b.tokens), decode(a.tokens)))
        for x, y, i, j in zip(a.logits, b.logits, a.tokens, b.tokens, strict=False):
            difference = max(difference, float(np.abs(x - y).max()))
            largest = max(largest, float(np.abs(x).max()))
            if i != j:
                break
    return tuple(rows), difference, largest


def _cut(record: StepRecord, result: WeaveResult) -> SplitStep:
    kind: StepKind = "mixed"
    if record.num_contexts in (0, record.batch):
        kind = "context" if record.num_contexts else "generation"
    prefix, suffix = record.num_tokens, 0
    if result.plan.region is not None:
        prefix, suffix = result.plan.region.lookup.evaluate(record.batch, record.num_tokens)
    return SplitStep(record.index, record.num_tokens, record.batch, prefix, suffix, kind)
