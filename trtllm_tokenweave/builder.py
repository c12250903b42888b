"""From a network to a plan: the builder settings that a woven network needs, and the check of what came out.

:func:`configure` and :func:`check_settings` take TensorRT's own objects, so that they also serve a build that
somebody else drives (``trtllm-build``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trtllm_tokenweave.agreement import on_all_ranks
from trtllm_tokenweave.atomic import check_target, replace_file
from trtllm_tokenweave.config import building
from trtllm_tokenweave.device import Gpu, current_gpu
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.inspection import BuildReport, Check, expect, inspect_plan
from trtllm_tokenweave.manifest import TensorSpec, tensor_specs
from trtllm_tokenweave.plugin_library import Attempt
from trtllm_tokenweave.tensorrt_module import create_builder, logger, progress_monitor, tensorrt
from trtllm_tokenweave.trt import dims_or_none

if TYPE_CHECKING:
    from trtllm_tokenweave.comm import CommBackend
    from trtllm_tokenweave.passes import WeaveResult
    from trtllm_tokenweave.table import PrefixLookup, TuningTable

Verbosity = Literal["DETAILED", "LAYER_NAMES_ONLY", "NONE"]

#: What a woven network cannot do without: its joins put out their inputs under new names.
ALIASED_IO = "ALIASED_PLUGIN_IO_10_03"

#: Seconds that ranks wait for another one's build: large models take an hour.
BUILD_TIMEOUT = 6 * 3600.0

_WHERE = "builder settings"


@dataclass(frozen=True)
class ShapeRange:
    """Shapes of one input in an optimisation profile; TensorRT picks kernels for ``optimum`` (its kOPT)."""

    minimum: tuple[int, ...]
    optimum: tuple[int, ...]
    maximum: tuple[int, ...]


Ranges = Mapping[str, ShapeRange]


@dataclass(frozen=True)
class BuilderSettings:
    """How to build.

    Attributes:
        profiles: For each optimisation profile the range of every dynamic input, by its name; or a function that
            gives it for the network.
        timing_cache: File of TensorRT's measurements; it is made when missing and added to after a build. Ranks
            have one each (:func:`build_on_all_ranks`).
        workspace_bytes: Most scratch memory of a layer; None: all of the device's.
        verbosity: What the engine says about its layers; the check after the build needs "DETAILED".
        fused_memory_bytes: Activation memory of the same network without the split, to check this one's against.
        progress: Is told now and then what TensorRT does, where its release says so.
    """

    profiles: tuple[Ranges | Callable[[Any], Ranges], ...]
    timing_cache: Path | None = None
    workspace_bytes: int | None = None
    verbosity: Verbosity = "DETAILED"
    fused_memory_bytes: int | None = None
    progress: Callable[[str], None] | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """A serialised engine.

    Attributes:
        data: The engine.
        result: What the weave did to its network.
        report: The check of the engine.
        tensors: Inputs and outputs.
        gpu: What it was built on.
    """

    data: memoryview
    result: WeaveResult
    report: BuildReport
    tensors: tuple[TensorSpec, ...]
    gpu: Gpu

    @property
    def num_bytes(self) -> int:
        """Size of the plan."""
        return self.data.nbytes


def build(make_network: Callable[[Any], WeaveResult], settings: BuilderSettings) -> Plan:
    """Build a strongly typed network into a plan for the current device.

    Plugins do nothing in the meantime: IS_BUILDING is set.

    Args:
        make_network: Fills the empty network that it is given, and weaves it. Libraries of the plugins that it uses
            must be registered by then. Weights that it adds by other ways than `trt.constant` must outlive this
            call.
        settings: How to build.

    Raises:
        UserError: no GPU or no TensorRT, or settings that do not fit the network.
        TokenWeaveError: TensorRT builds no plan, or the plan fails a check.
    """
    gpu = current_gpu()
    trt = tensorrt()
    if settings.timing_cache is not None:
        check_target(settings.timing_cache)
    with building():
        builder = create_builder()
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        result = make_network(network)
        config = builder.create_builder_config()
        noted = check_settings(config, network, configure(config, network, result, settings), result)
        if settings.progress is not None and hasattr(trt, "IProgressMonitor"):
            monitor = progress_monitor(settings.progress)  # held until the build ends
            config.progress_monitor = monitor
        attempt = Attempt()
        serialized = builder.build_serialized_network(network, config)
        if serialized is None:
            raise attempt.error("TensorRT built no engine")
        if settings.timing_cache is not None:
            _save_timing_cache(config, settings.timing_cache)
        attempt = Attempt()
        engine = trt.Runtime(logger()).deserialize_cuda_engine(serialized)
        if engine is None:
            raise attempt.error("TensorRT cannot read the plan that it built")
        expected = expect(network, result, settings.fused_memory_bytes)
        data = memoryview(serialized)
        report = inspect_plan(engine, expected, data.nbytes)
        report = replace(report, checks=(*report.checks, *noted))
        tensors = tensor_specs(engine)
    if report.failed:
        raise TokenWeaveError(f"the engine fails its check: {report.failed[0]} ({len(report.failed)} failed)")
    return Plan(data, result, report, tensors, gpu)


def build_on_all_ranks(
    comm: CommBackend, make_network: Callable[[Any], WeaveResult], settings: BuilderSettings
) -> Plan:
    """Build every rank's plan from the same timings of kernels; collective over ``comm``.

    So all run the same kernels, and their activations lie at the same offsets, which symmetric memory asks for. Rank 0
    builds first, and the others start from its timings. Where it has timings of an earlier build all start from those
    at once, and the others build again only if rank 0 found that some were missing.

    Args:
        comm: The ranks.
        make_network: As for :func:`build`; called once a build.
        settings: With a timing cache, each rank its own file.

    Raises:
        UserError, TokenWeaveError: on all ranks, when one cannot build.
    """

    def given_cache() -> Path:
        if settings.timing_cache is None:
            raise UserError("is not given", where="timing_cache", fix="name a file, each rank its own")
        check_target(settings.timing_cache)  # ranks other than 0 write theirs when rank 0's build is over
        return settings.timing_cache

    cache = on_all_ranks(comm, "timing caches", given_cache)

    def rank_0s_timings(missing_ok: bool) -> bytes:
        def read() -> bytes:
            return _read_timing_cache(cache) if comm.rank == 0 and (cache.exists() or not missing_ok) else b""

        mine = on_all_ranks(comm, "reading rank 0's timings", read)
        return comm.all_gather("rank 0's timings", np.frombuffer(mine, np.int8))[0].tobytes()

    def build_from(timings: bytes) -> Plan:
        if comm.rank != 0:
            replace_file(cache, lambda aside: aside.write_bytes(timings))
        return build(make_network, settings)

    known = rank_0s_timings(missing_ok=True)
    plan = on_all_ranks(comm, "building", lambda: build_from(known) if known or comm.rank == 0 else None, BUILD_TIMEOUT)
    found = rank_0s_timings(missing_ok=False)

    def build_again() -> Plan:
        nonlocal plan
        # TensorRT adds entries and removes none, and writes them in an order that means nothing.
        if comm.rank != 0 and not (known and len(found) == len(known)):
            plan = None  # as large as the model
        return build_from(found) if plan is None else plan

    return on_all_ranks(comm, "building the other ranks", build_again, BUILD_TIMEOUT)


# ---- settings


def configure(config: Any, network: Any, result: WeaveResult, settings: BuilderSettings) -> list[Any]:
    """Put the settings, and what a woven network needs, into an ``IBuilderConfig``.

    Returns:
        The optimisation profiles, in order.

    Raises:
        UserError: a profile that does not fit the network, or a timing cache that does not fit this TensorRT and GPU.
    """
    trt = tensorrt()
    enable_weave(config, result)
    config.profiling_verbosity = getattr(trt.ProfilingVerbosity, settings.verbosity)
    if settings.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace_bytes)
    if settings.timing_cache is not None:
        _load_timing_cache(config, settings.timing_cache)
    if not settings.profiles:
        raise UserError("there is none", where="optimisation profiles", fix="give the range of every dynamic input")
    ranges = [given(network) if callable(given) else given for given in settings.profiles]
    return [_add_profile(config, network, each, index) for index, each in enumerate(ranges)]


def enable_weave(config: Any, result: WeaveResult) -> None:
    """Put what a woven network cannot do without into an ``IBuilderConfig``; others need nothing."""
    if result.mode == "weave":
        config.set_preview_feature(getattr(tensorrt().PreviewFeature, ALIASED_IO), True)
        config.max_aux_streams = 0


def _add_profile(config: Any, network: Any, ranges: Ranges, index: int) -> Any:
    where = f"optimisation profile {index}"
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    dynamic = {str(t.name) for t in inputs if -1 in (dims_or_none(t.shape) or ())}
    known = {str(t.name) for t in inputs}
    for name in sorted(dynamic - set(ranges)):
        raise UserError(f"has no range for input {name!r}", where=where, fix="give one: its size is not fixed")
    for name in sorted(set(ranges) - known):
        raise UserError(f"gives a range for {name!r}, which is no input", where=where, fix=f"inputs: {sorted(known)}")
    profile = network.builder.create_optimization_profile()
    for name, shapes in ranges.items():
        try:
            profile.set_shape(name, shapes.minimum, shapes.optimum, shapes.maximum)
        except (TypeError, ValueError) as error:
            what = f"minimum {shapes.minimum}, optimum {shapes.optimum}, maximum {shapes.maximum} do not fit ({error})"
            raise UserError(what, where=f"{where}, input {name}", fix="let minimum <= optimum <= maximum") from error
    if config.add_optimization_profile(profile) < 0:
        raise UserError("TensorRT refuses it", where=where, fix="see TensorRT's log")
    return profile


def _read_timing_cache(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        fix = "let it be read, or name another: it is made again"
        raise UserError(f"cannot be read: {error.strerror or error}", where=str(path), fix=fix) from error


def _load_timing_cache(config: Any, path: Path) -> None:
    cache = config.create_timing_cache(_read_timing_cache(path) if path.exists() else b"")
    if cache is None or not config.set_timing_cache(cache, False):
        what = "is no timing cache of this TensorRT and GPU"
        raise UserError(what, where=str(path), fix="remove the file, or name another: it is made again")


def _save_timing_cache(config: Any, path: Path) -> None:
    data = memoryview(config.get_timing_cache().serialize())
    replace_file(path, lambda aside: aside.write_bytes(data))


# ---- what a woven network needs


def check_settings(config: Any, network: Any, profiles: Sequence[Any], result: WeaveResult) -> tuple[Check, ...]:
    """Refuse to build a woven network with settings that would make it wrong or slow.

    Args:
        config: The ``IBuilderConfig``.
        network: The ``INetworkDefinition``.
        profiles: Its optimisation profiles; a config does not tell them.
        result: What the weave did. Networks that are not split need nothing.

    Returns:
        What is right, but wasteful.

    Raises:
        UserError: names the setting and how to set it.
    """
    if result.mode != "weave":
        return ()
    trt = tensorrt()
    if not config.get_preview_feature(getattr(trt.PreviewFeature, ALIASED_IO)):
        raise UserError(
            f"the preview feature {ALIASED_IO} is off, so TensorRT would copy what is still being written",
            where=_WHERE,
            fix=f"config.set_preview_feature(PreviewFeature.{ALIASED_IO}, True), or do not split",
        )
    if config.max_aux_streams != 0:
        raise UserError(
            f"max_aux_streams is {config.max_aux_streams}, so TensorRT may run layers of both halves on other streams",
            where=_WHERE,
            fix="set it to 0, or do not split",
        )
    if not network.get_flag(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED):
        raise UserError(
            "the network is not strongly typed, so TensorRT may convert tensors between a collective and its join",
            where=_WHERE,
            fix="create it with NetworkDefinitionCreationFlag.STRONGLY_TYPED, or do not split",
        )
    _check_optimum(profiles, result)
    return _unreached_limits(profiles, result)


def _unreached_limits(profiles: Sequence[Any], result: WeaveResult) -> tuple[Check, ...]:
    """Warn of a network that was woven for larger steps than any profile has: its halves' bounds are too large."""
    plan = result.plan
    over = []
    for limit, name in (("max_num_tokens", plan.tokens_ref), ("max_batch_size", plan.batch_ref)):
        ranges = [] if name is None else [_dimension(profile, name) for profile in profiles]
        most = max((found[2] for found in ranges if found is not None), default=None)
        given = getattr(plan.options, limit)
        if most is not None and None not in ranges and given > most:
            over.append(f"{limit} {given} is above the {most} of the largest profile (input {name}): give it {most}")
    return (Check("limits", "warning", "; ".join(over)),) if over else ()


def _check_optimum(profiles: Sequence[Any], result: WeaveResult) -> None:
    """A step of kOPT tokens must be split: TensorRT picks the suffix half's kernels for the rows it then has."""
    plan = result.plan
    assert plan.region is not None
    lookup, tokens_ref = plan.region.lookup, plan.tokens_ref
    ranges = [_dimension(profile, tokens_ref) for profile in profiles]
    unknown = [index for index, tokens in enumerate(ranges) if tokens is None]
    if unknown:
        what = "profiles %s: cannot tell whether their optimum is split: %r is no input with a range"
        logging.getLogger(__name__).warning(what, unknown, tokens_ref)
    split = 0
    for index, (profile, tokens) in enumerate(zip(profiles, ranges, strict=True)):
        if tokens is None:
            continue
        if tokens[2] > lookup.max_num_tokens:
            raise UserError(
                f"its maximum of {tokens[2]} tokens is above the {lookup.max_num_tokens} that the network was woven "
                "for, and the split would lose the rows above",
                where=f"optimisation profile {index}, input {tokens_ref}",
                fix="give WeaveOptions.max_num_tokens the profile's maximum",
            )
        batches = _dimension(profile, plan.batch_ref) if plan.batch_ref is not None else None
        batch = min(batches[1] if batches is not None else 1, lookup.max_batch)
        low, optimum, high = (min(n, lookup.max_num_tokens) for n in tokens)
        counts = _splitting_counts(lookup, batch, low, high)
        if not counts:
            continue  # it serves small steps only
        split += 1
        if lookup.evaluate(batch, optimum)[1] == 0:
            raise UserError(
                f"its optimum of {optimum} tokens in {batch} sequences is not split, so TensorRT would pick the suffix "
                "half's kernels for no rows",
                where=f"optimisation profile {index}, input {tokens_ref}",
                fix=f"optimise for {counts[-1]} tokens (opt_num_tokens), or do not split",
            )
    if not split and not unknown:
        raise UserError(
            f"none of {len(profiles)} holds a step that is split",
            where="optimisation profiles",
            fix="raise max_num_tokens, use another table, or do not split",
        )


def _dimension(profile: Any, name: str) -> tuple[int, int, int] | None:
    """Dimension 0 of an input at minimum, optimum and maximum; None where the profile has none."""
    shapes = [dims_or_none(shape) for shape in profile.get_shape(name)]
    if len(shapes) != 3 or not all(shapes):
        return None
    low, optimum, high = (shape[0] for shape in shapes if shape)
    return low, optimum, high


def _splitting_counts(lookup: PrefixLookup, batch: int, low: int, high: int) -> list[int]:
    """Token counts between ``low`` and ``high`` that are split, at the ends of token buckets, ascending.

    Inside a bucket the suffix never shrinks as the count grows, so a bucket that splits does so at its end.
    """
    grid = range(-(-low // lookup.granularity) * lookup.granularity, high, lookup.granularity)
    return [n for n in (*grid, high) if lookup.evaluate(batch, n)[1] > 0]


def split_optimum(lookup: PrefixLookup, batch: int, tokens: tuple[int, int, int]) -> int:
    """Tokens to optimise a profile for, so that TensorRT picks the suffix half's kernels for the rows it has.

    Args:
        lookup: The woven network's.
        batch: Sequences that the profile is optimised for.
        tokens: The profile's minimum, optimum and maximum.

    Returns:
        The optimum itself where a step of it is split or none of the profile is, else a count that is.
    """
    batch = min(batch, lookup.max_batch)
    low, optimum, high = (min(n, lookup.max_num_tokens) for n in tokens)
    counts = _splitting_counts(lookup, batch, low, high)
    return tokens[1] if not counts or lookup.evaluate(batch, optimum)[1] else counts[-1]


def opt_num_tokens(table: TuningTable, max_num_tokens: int, max_batch: int) -> int:
    """Tokens to optimise a profile for (its kOPT; ``opt_num_tokens`` of ``trtllm-build``).

    The largest count that is split: the more tiles a GEMM has, the less its time depends on how they fill the last
    wave. A kernel that TensorRT picks for a size which just misses a wave is slow at all others: on two H200 a stack
    optimised for halves of 1280 tokens ran halves of 2048 with kernels that took 16 % longer than those it then
    had for them. Where no step is split: one token of each of ``max_batch`` sequences, as TensorRT-LLM takes it.

    Args:
        table: The tuning table.
        max_num_tokens: Most tokens of a step.
        max_batch: Most sequences of a step; profiles are optimised for half of them, as TensorRT-LLM's are.
    """
    lookup = table.prefix_lookup(max_batch, max_num_tokens)
    counts = _splitting_counts(lookup, (max_batch + 1) // 2, 1, max_num_tokens)
    return counts[-1] if counts else min(max_batch, max_num_tokens)
