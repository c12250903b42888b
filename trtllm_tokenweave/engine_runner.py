"""The step function over a TensorRT engine: KV cache and inputs in device memory, recurring steps from CUDA graphs."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.agreement import on_all_ranks
from trtllm_tokenweave.batch_split import GENERATION
from trtllm_tokenweave.decoder import DecoderModel
from trtllm_tokenweave.device import CudaError, DeviceArray, PinnedArray, Stream
from trtllm_tokenweave.engine import Engine
from trtllm_tokenweave.engine_context import Binding, EngineContext
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.kv_cache import KvCacheConfig
from trtllm_tokenweave.passes import WeaveMode
from trtllm_tokenweave.plugin_library import plugin_library
from trtllm_tokenweave.recorder.enums import DataType, numpy_dtype
from trtllm_tokenweave.runner import Array, GenerationLimits, Generator, StepInputs, StepRecord
from trtllm_tokenweave.step_graphs import StepGraphs

Run = Literal["graph", "eager"]

#: Lengths in a graph's key are rounded up to it, as TensorRT-LLM's runtime rounds them.
LENGTH_STEP = 256

_TOKENS, _OUTPUT = "input_ids", "logits"
#: An input that never changes: with one beam it is all zeros.
_ZEROS = "cache_indirection"
_PAGES = "host_kv_cache_block_offsets"


class DeviceCachePool:
    """One rank's pages in device memory, in one piece; see `kv_cache.KvCachePool`.

    Args:
        config: Sizes.
        fill: Value of every byte at first; 0xFF makes NaN, which shows reads of what was never written.
    """

    def __init__(self, config: KvCacheConfig, fill: int = 0) -> None:
        self.config = config
        self.pages = DeviceArray(config.pool_shape, config.dtype)
        self.pages.fill(fill)

    @property
    def pointers(self) -> NDArray[np.int64]:
        """See `kv_cache.CachePool`."""
        return np.array([[self.pages.address, 0]], np.int64)


@dataclass
class Ladder:
    """How steps were run: from weave with a CUDA graph down to stock, eager.

    Attributes:
        steps: Steps by (what was run, how).
        seconds: What they took, by the same; the capture of a graph counts as its eager step.
        reasons: Steps that were run further down than they could be, by the reason.
    """

    steps: Counter[tuple[WeaveMode, Run]] = field(default_factory=Counter)
    seconds: defaultdict[tuple[WeaveMode, Run], float] = field(default_factory=lambda: defaultdict(float))
    reasons: Counter[str] = field(default_factory=Counter)

    def note(self, mode: WeaveMode, run: Run, reasons: list[str], seconds: float) -> None:
        """Count a step; a reason is logged when it comes first."""
        self.steps[mode, run] += 1
        self.seconds[mode, run] += seconds
        for reason in reasons:
            if reason not in self.reasons:
                logging.getLogger(__name__).info("%s, %s: %s", mode, run, reason)
            self.reasons[reason] += 1

    def document(self) -> dict[str, Any]:
        """Plain data: {"steps": {"weave graph": count}, "step_seconds": {"weave graph": s}, "reasons": {reason: n}}."""
        return {
            "steps": {f"{mode} {run}": n for (mode, run), n in sorted(self.steps.items())},
            "step_seconds": {f"{mode} {run}": round(s, 5) for (mode, run), s in sorted(self.seconds.items())},
            "reasons": dict(self.reasons),
        }


def is_host(name: str) -> bool:
    """Whether an input is bound to CPU memory, as TensorRT-LLM's runtime does."""
    return name.startswith("host_") or name == "all_reduce_workspace"


@lru_cache(maxsize=64)
def _first_pages(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A block table [pools, sequences, 2, blocks] that names pages 0 and 1 for keys and values of every block."""
    pages = np.zeros(shape, dtype)
    pages[:, :, 1] = 1
    pages.setflags(write=False)
    return pages


def recurring(inputs: StepInputs, max_seq_len: int) -> StepInputs:
    """The inputs with host values that recur, so that one graph serves generation however long sequences grow.

    For a generation row attention plugins take from the host only whether it is one, and how long the longest may be:
    what they compute follows the device's lengths and block tables, also where TokenWeaveAttention gives an inner
    plugin its half of the rows (a row of one token is never cut). So prompts count one token, lengths are rounded up
    to `LENGTH_STEP`, and block tables name pages 0 and 1. Steps with context chunks stay as they are: the rows that a
    plugin gives each chunk come from the host.

    Args:
        inputs: What `batch.step_inputs` made.
        max_seq_len: The engine's.
    """
    if (inputs["host_request_types"] != GENERATION).any():
        return inputs
    past, table = inputs["host_past_key_value_lengths"], inputs[_PAGES]
    longest = min(-(-int(past.max() + 1) // LENGTH_STEP) * LENGTH_STEP, max_seq_len)
    return inputs | {
        "host_context_lengths": np.ones_like(inputs["host_context_lengths"]),
        "host_past_key_value_lengths": np.full_like(past, longest - 1),
        _PAGES: _first_pages(table.shape, table.dtype),
    }


class EngineStep:
    """Runs steps of one rank's engine: a `runner.StepFunction`. The logits that it returns last until the next step.

    Given back by :meth:`close` or at the end of a ``with``. All ranks make theirs together.

    Attributes:
        pool: The KV cache.
        ladder: How steps were run.
        contexts: One for each optimisation profile; they take turns.
        graphs: The CUDA graphs.
        lookup: The split of each step, where the engine is woven.

    Args:
        engine: This rank's.
        model: What its folder says.
        cache: Sizes of the KV cache.
        fill: See `DeviceCachePool`.
        graphs: Most CUDA graphs kept; 0: none.

    Raises:
        UserError: on all ranks, when one has no room for the KV cache.
        TokenWeaveError: on all ranks, when one has none for the activations, or TensorRT makes no context.
    """

    def __init__(
        self, engine: Engine, model: DecoderModel, cache: KvCacheConfig, *, fill: int = 0, graphs: int = 16
    ) -> None:
        self.engine, self.model, self.ladder = engine, model, Ladder()
        self._names = [spec.name for spec in engine.manifest.tensors if spec.mode == "INPUT"]
        on_all_ranks(engine.comm, "KV cache", lambda: self._allocate(cache, fill))
        self.lookup = engine.config.table.prefix_lookup(model.max_batch_size, model.max_num_tokens)
        self._closing = ExitStack()
        self.stream = self._closing.enter_context(Stream())
        symmetric = engine.manifest.mode != "stock"
        tokens = next(spec for spec in engine.manifest.tensors if spec.name == _TOKENS)
        self._most_tokens = [most for _, _, (most,) in tokens.profiles]
        first = engine.context(symmetric=symmetric)
        self.contexts: list[EngineContext] = [self._closing.enter_context(first)]
        for profile in range(1, len(self._most_tokens)):
            self.contexts.append(self._closing.enter_context(self._beside(first, profile)))
        self.graphs = self._closing.enter_context(StepGraphs(self.contexts[0], graphs))

    def _beside(self, first: EngineContext, profile: int) -> EngineContext:
        """The context of another profile."""
        if not first.symmetric:
            return self.engine.context(profile=profile)
        # An engine asks for its symmetric memory once: of several engines only the newest can.
        return on_all_ranks(self.engine.comm, "execution contexts", lambda: first.sibling(profile))

    def _allocate(self, cache: KvCacheConfig, fill: int) -> None:
        specs = {spec.name: spec for spec in self.engine.manifest.tensors}
        dtypes = {name: numpy_dtype(DataType[spec.dtype]) for name, spec in specs.items()}
        try:
            self.pool = DeviceCachePool(cache, fill)
        except CudaError as error:
            size = math.prod(cache.pool_shape) * cache.dtype.itemsize / 2**30
            what, fix = f"{size:.1f} GiB cannot be had ({error})", "give it fewer blocks (num_blocks)"
            raise UserError(what, where="KV cache", fix=fix) from error
        self._device = {n: DeviceArray(specs[n].profiles[0][2], dtypes[n]) for n in self._names if not is_host(n)}
        self._device[_ZEROS].fill(0)
        columns = self.model.config.local(self.engine.manifest.tp_size).padded_vocab_size
        shape = (self.model.max_batch_size, columns)
        self._logits = DeviceArray(shape, dtypes[_OUTPUT])
        self._host_logits = PinnedArray(shape, dtypes[_OUTPUT])

    def __call__(self, inputs: list[StepInputs]) -> Array:
        """Run a step and wait for it; see `runner.StepFunction`.

        Raises:
            TokenWeaveError: TensorRT or a plugin refuses the step, or a plugin failed in it.
        """
        started = time.perf_counter()
        (step,) = inputs
        given = recurring(step, self.model.max_seq_len)  # held until the step is done, which reads it
        # A hundred kilobytes with 64 sequences: not to be hashed in every step.
        stand_ins = {} if given is step else {_PAGES: b"first pages"}
        before, failed = self._said(), self.graphs.counters.fallback
        replayed = self.graphs.counters.graph
        batch = len(given["host_request_types"])
        shape = (batch, self._logits.shape[1])
        bound = {name: self._bind(name, given[name], stand_ins.get(name)) for name in self._names}
        logits_binding = Binding(self._logits.address, shape, self._logits.dtype)
        self.graphs.step(bound, {_OUTPUT: logits_binding}, self.stream, self._context(len(given[_TOKENS])))
        logits = self._logits.read(self._host_logits, shape, self.stream)
        self.stream.synchronize()
        after = self._said()
        if after != before:
            raise TokenWeaveError(f"the step failed: {after}")
        run: Run = "graph" if self.graphs.counters.graph > replayed else "eager"
        self._count(given, run, time.perf_counter() - started, capture_failed=self.graphs.counters.fallback > failed)
        return logits

    def _context(self, num_tokens: int) -> EngineContext:
        """The context of the narrowest profile that holds the step; the first holds all (`DecoderBuild.settings`)."""
        holding = [profile for profile, most in enumerate(self._most_tokens) if num_tokens <= most]
        return self.contexts[min(holding, key=self._most_tokens.__getitem__, default=0)]

    def _bind(self, name: str, array: Array, stands_for: bytes | None) -> Binding:
        if is_host(name):
            return Binding.on_host(array, stands_for)
        device = self._device[name]
        if name != _ZEROS:
            device.write(array, self.stream)
        return Binding(device.address, array.shape, array.dtype)

    def _said(self) -> str:
        return plugin_library().last_error() if self.engine.manifest.mode != "stock" else ""

    def _count(self, given: StepInputs, run: Run, seconds: float, *, capture_failed: bool) -> None:
        types = given["host_request_types"]
        mode, reasons = self.engine.manifest.mode, []
        if mode != self.model.wanted:
            reasons += [f"the engine is built {mode}: {why}" for why in self.model.refused] or [f"built {mode}"]
        elif mode == "weave" and not self.lookup.evaluate(len(types), len(given[_TOKENS]))[1]:
            mode = "fuse"
            reasons.append("steps of so few tokens are not split (the engine's table)")
        if capture_failed:
            reasons.append(f"no graph: {self.graphs.counters.reason}")
        elif run == "eager":
            chunks = bool((types != GENERATION).any())
            reasons.append("no graph: a prompt is read" if chunks else "no graph yet: it is made when a step recurs")
        self.ladder.note(mode, run, reasons, seconds)

    def close(self) -> None:
        """Give everything back: graphs, context, stream, then the memory."""
        self._closing.close()
        self.pool.pages.free()
        for array in (*self._device.values(), self._logits):
            array.free()
        self._host_logits.free()

    def __enter__(self) -> EngineStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def engine_step(engine: Engine, model: DecoderModel, limits: GenerationLimits, *, fill: int = 0) -> EngineStep:
    """Make the step function of this rank's engine, with a KV cache for ``limits``; see `EngineStep`."""
    return EngineStep(engine, model, limits.cache(model.config, engine.manifest.tp_size), fill=fill)


def engine_limits(
    model: DecoderModel, *, max_new_tokens: int, num_blocks: int = 0, eos_ids: frozenset[int] = frozenset()
) -> GenerationLimits:
    """Limits of steps and sequences of an engine."""
    return GenerationLimits(
        max_num_tokens=model.max_num_tokens,
        max_batch_size=model.max_batch_size,
        max_seq_len=model.max_seq_len,
        max_new_tokens=max_new_tokens,
        tokens_per_block=model.tokens_per_block,
        num_blocks=num_blocks,
        eos_ids=eos_ids,
    )


def engine_generator(
    step: EngineStep,
    limits: GenerationLimits,
    on_step: Callable[[StepRecord, StepInputs], None] | None = None,
) -> Generator:
    """A generator over an engine; under mpirun every rank makes its own, and all are told the same."""
    return Generator(
        step,
        [step.pool],
        tp_size=step.engine.manifest.tp_size,
        vocab_size=step.model.config.vocab_size,
        limits=limits,
        on_step=on_step,
    )
