"""A synthetic serving trace, and the steps that the generator's scheduler makes of it, for `bench trace` (no GPU).

Lengths are those of ShareGPT conversations as Sarathi-Serve's evaluation states them (`SOURCE`): a log-normal
distribution goes through the published median and 90th percentile, so that its quantile at q is

    length(q) = median * (p90 / median) ** (z(q) / z(0.9)),    z: quantiles of the standard normal distribution.

n requests take the quantiles (k + 1/2) / n, for k from 0 to n - 1, prompts and outputs shuffled apart by the seed: so a
trace of a few dozen requests has the published statistics too. As there, no request holds more than `MAX_TOKENS`
tokens: prompts are cut to what their output leaves.

What nothing is fitted to is compared with the lengths that the authors publish (microsoft/sarathi-serve,
data/processed_traces/sharegpt_8k_filtered_stats_llama2_tokenizer.csv), 60 requests here and all of theirs: means of
prompts 2416 and 2340 and of outputs 479 and 439, standard deviations 2024 and 2089, and 271 and 266, longest outputs
1529 and 1024. Prompts and outputs correlate by 0.04 there; here they are shuffled apart.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.engine_runner import recurring
from trtllm_tokenweave.kv_cache import KvCacheConfig
from trtllm_tokenweave.runner import Array, GenerationLimits, Generator, StepFunction, StepInputs, StepRecord

SOURCE = "Sarathi-Serve (arXiv 2403.02310), table 2: openchat_sharegpt4"
FORMULA = "length(q) = median * (p90 / median) ** (z(q) / z(0.9)) at q = (k + 1/2) / n; prompts cut at max_tokens"
#: Most tokens of a request, prompt and output: longer ones are no part of the published statistics.
MAX_TOKENS = 8192

Kind = Literal["prefill", "mixed", "decode"]
KINDS: tuple[Kind, ...] = ("prefill", "mixed", "decode")


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths by what is published of it, in tokens."""

    median: int
    p90: int

    def at(self, quantile: float) -> int:
        """The length below which a share of the requests lies."""
        normal = NormalDist()
        grown = math.log(self.p90 / self.median) * normal.inv_cdf(quantile) / normal.inv_cdf(0.9)
        return max(1, round(self.median * math.exp(grown)))


PROMPTS = Lengths(median=1730, p90=5696)
OUTPUTS = Lengths(median=415, p90=834)


@dataclass(frozen=True)
class Request:
    """Tokens of a prompt, and of what is generated for it whatever it says."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        """Both."""
        return self.prompt + self.output


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they come; all of them are there when the first step begins."""

    requests: tuple[Request, ...]
    seed: int

    def limits(self, max_num_tokens: int, max_batch_size: int) -> GenerationLimits:
        """Of engines for steps of so many tokens and sequences, with room for those that run at once.

        Raises:
            UserError: a step could not hold one token of every sequence.
        """
        limits = GenerationLimits(max_num_tokens, max_batch_size, max(request.total for request in self.requests))
        blocks = sorted(-(-request.total // limits.tokens_per_block) for request in self.requests)
        return replace(limits, num_blocks=sum(blocks[-max_batch_size:]))

    def document(self) -> dict[str, Any]:
        """What results say of it."""
        return {
            "requests": len(self.requests),
            "seed": self.seed,
            "arrivals": "all before the first step",
            "source": SOURCE,
            "formula": FORMULA,
            "published": {"prompt": vars(PROMPTS), "output": vars(OUTPUTS), "max_tokens": MAX_TOKENS},
            "prompt": _statistics([request.prompt for request in self.requests]),
            "output": _statistics([request.output for request in self.requests]),
        }


def _statistics(lengths: Sequence[int]) -> dict[str, float]:
    return {
        "median": statistics.median(lengths),
        "p90": round(float(np.quantile(lengths, 0.9)), 1),
        "mean": round(statistics.mean(lengths), 1),
        "std": round(statistics.pstdev(lengths), 1),
        "max": max(lengths),
        "sum": sum(lengths),
    }


def make_trace(requests: int, seed: int) -> Trace:
    """A trace of so many requests, at least one; the same for the same seed."""
    rng = np.random.default_rng(seed)
    middles = [(k + 0.5) / requests for k in range(requests)]
    prompts, outputs = ([lengths.at(middles[k]) for k in rng.permutation(requests)] for lengths in (PROMPTS, OUTPUTS))
    pairs = ((prompt, min(output, MAX_TOKENS - 1)) for prompt, output in zip(prompts, outputs, strict=True))
    return Trace(tuple(Request(min(prompt, MAX_TOKENS - output), output) for prompt, output in pairs), seed)


@dataclass(frozen=True, eq=False)
class TraceStep:
    """A step of a schedule: its sizes, and the inputs of one rank but for where its KV cache is."""

    record: StepRecord
    inputs: StepInputs

    @property
    def kind(self) -> Kind:
        """Whether it has chunks of prompts, generation rows, or both."""
        if not self.record.num_contexts:
            return "decode"
        return "mixed" if self.record.num_contexts < self.record.batch else "prefill"


@dataclass(frozen=True, eq=False)
class Schedule:
    """The steps of a trace, in order."""

    steps: tuple[TraceStep, ...]

    @property
    def loaded(self) -> Schedule:
        """Up to the step that reads the end of the last prompt."""
        last = max(index for index, step in enumerate(self.steps) if step.record.num_contexts)
        return Schedule(self.steps[: last + 1])

    @property
    def generation_rows(self) -> int:
        """Tokens that are generated from a token, not from a prompt."""
        return sum(step.record.batch - step.record.num_contexts for step in self.steps)

    def steps_of_kinds(self) -> dict[str, int]:
        """Steps of each kind."""
        counts = Counter(step.kind for step in self.steps)
        return {kind: counts[kind] for kind in KINDS}

    def tokens_of_kinds(self) -> dict[str, int]:
        """Tokens in the steps of each kind."""
        return {kind: sum(step.record.num_tokens for step in self.steps if step.kind == kind) for kind in KINDS}

    def recurring(self, max_seq_len: int) -> list[TraceStep]:
        """One step of generation rows for each CUDA graph that serves such steps; see `engine_runner.recurring`."""
        found: dict[tuple[int, int], TraceStep] = {}
        for step in self.steps:
            if step.kind == "decode":
                longest = int(recurring(step.inputs, max_seq_len)["host_past_key_value_lengths"][0])
                found.setdefault((step.record.batch, longest), step)
        return list(found.values())


@dataclass(frozen=True)
class _Pool:
    """Stands for the KV cache of an engine that is not there yet."""

    config: KvCacheConfig

    @property
    def pointers(self) -> NDArray[np.int64]:
        return np.zeros((1, 2), np.int64)


def make_schedule(trace: Trace, limits: GenerationLimits, cache: KvCacheConfig, vocab_size: int) -> Schedule:
    """The steps that `runner.Generator` makes of a trace, with ``max_num_tokens`` of the limits as chunk budget.

    Prompts and what is generated are random tokens of the seed, not the model's, and no token ends a sequence: the
    steps are the same for every engine, and so are their inputs, of every rank.

    Raises:
        UserError: a request does not fit the limits.
    """
    rng = np.random.default_rng(trace.seed)
    steps: list[TraceStep] = []
    generator = Generator(
        _random_tokens(rng, vocab_size),
        [_Pool(cache)],
        tp_size=1,
        vocab_size=vocab_size,
        limits=limits,
        on_step=lambda record, inputs: steps.append(TraceStep(record, _slim(inputs))),
    )
    for request in trace.requests:
        generator.submit(rng.integers(0, vocab_size, request.prompt).tolist(), request.output)
    while generator.busy:
        generator.step()
    return Schedule(tuple(steps))


def _random_tokens(rng: np.random.Generator, vocab_size: int) -> StepFunction:
    """A step function whose every next token is drawn."""

    def run(inputs: list[StepInputs]) -> Array:
        batch = len(inputs[0]["host_request_types"])
        logits = np.zeros((batch, vocab_size), np.float32)
        logits[np.arange(batch), rng.integers(0, vocab_size, batch)] = 1
        return logits

    return run


def _slim(inputs: StepInputs) -> StepInputs:
    """The inputs with less memory: thousands of steps are kept."""
    zeros = inputs["cache_indirection"]
    return inputs | {
        "cache_indirection": np.broadcast_to(np.zeros(1, zeros.dtype), zeros.shape),
        "host_kv_cache_block_offsets": inputs["kv_cache_block_offsets"],
    }
