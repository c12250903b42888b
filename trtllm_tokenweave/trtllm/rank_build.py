"""The weave of one rank's network inside TensorRT-LLM's build, and the table that it takes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

from trtllm_tokenweave import trt
from trtllm_tokenweave.builder import check_settings, enable_weave, split_optimum
from trtllm_tokenweave.checkpoint.config_files import read_trtllm_config
from trtllm_tokenweave.config import building
from trtllm_tokenweave.device import current_gpu
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.passes import WeaveMode, WeaveOptions, WeaveResult, chain_signature, weave
from trtllm_tokenweave.patterns import Refusal
from trtllm_tokenweave.recorder.trtllm_plugins import MIXTURE_OF_EXPERTS
from trtllm_tokenweave.schedule import ModelKind
from trtllm_tokenweave.table import ANY_GPU, TableKey, TuningTable, default_table, load_table
from trtllm_tokenweave.table.measured import Here, check_measured
from trtllm_tokenweave.table.model import DType
from trtllm_tokenweave.table.shipped import Chosen, choose_table
from trtllm_tokenweave.tensorrt_module import tensorrt
from trtllm_tokenweave.trtllm import notes
from trtllm_tokenweave.trtllm.options import TokenWeaveOptions

#: Reasons of one kind that are printed; the record has all.
_SHOWN = 5


@dataclass(frozen=True)
class Request:
    """What TensorRT-LLM is asked to build for one rank.

    Attributes:
        options: How to weave.
        rank: World rank.
        model_config: Its ``PretrainedConfig``.
        build_config: Its ``BuildConfig``.
        ckpt_dir: Folder of the checkpoint, or None.
    """

    options: TokenWeaveOptions
    rank: int
    model_config: Any
    build_config: Any
    ckpt_dir: str | None


@dataclass(frozen=True)
class Outcome:
    """What became of a rank's network.

    Attributes:
        mode: "stock" where nothing was done.
        refused: What was left alone, and why.
        result: What the weave did; None where it was not tried.
        table: The table of a network that was woven or fused, and where it comes from.
        opt_num_tokens: For each profile the tokens that it is optimised for.
        chain: The order of all collectives and joins, as `chain_signature` gives it.
    """

    mode: WeaveMode
    refused: tuple[Refusal, ...]
    result: WeaveResult | None = None
    table: Chosen | None = None
    opt_num_tokens: tuple[int, ...] = ()
    chain: tuple[str, ...] = ()


@dataclass
class RankBuild:
    """One rank's build: weaves its network once, then sets the builder up for it."""

    request: Request
    network_module: Any
    outcome: Outcome | None = field(default=None)

    def weave(self, net: Any) -> None:
        """Weave a complete network in place; nothing happens the second time.

        Args:
            net: TensorRT-LLM's ``Network``.

        Raises:
            UserError: the table is not this model's, or the plugin library is missing.
            TokenWeaveError: the pass's own check fails, or nothing could be fused and ``strict`` is set.
        """
        if self.outcome is not None:
            return
        self.outcome = self._weave(net)
        self._say(self.outcome)
        if self.outcome.mode == "stock" and self.request.options.strict:
            reasons = "; ".join(dict.fromkeys(refusal.reason for refusal in self.outcome.refused))
            raise TokenWeaveError(f"rank {self.request.rank}: nothing could be fused: {reasons}")

    def set_up(self, net: Any, config: Any) -> None:
        """Put what the woven network needs into TensorRT's ``IBuilderConfig``, and check all of it.

        What is right, but wasteful, rank 0 says: profiles are the same on all ranks.

        Raises:
            UserError: a profile's optimum is not split, or the network is not strongly typed.
        """
        if self.outcome is not None and self.outcome.result is not None:
            enable_weave(config, self.outcome.result)
            noted = check_settings(config, net.trt_network, notes.profiles(net), self.outcome.result)
            if self.request.rank == 0:
                _print([f"tokenweave:   {check}" for check in noted])

    def _weave(self, net: Any) -> Outcome:
        reason, counts = _unserved(self.request.model_config), notes.counting(net, notes.TOKENS)
        if not reason and counts is None:
            reason = f"no input counts tokens (a dimension {notes.TOKENS}): remove_input_padding is off"
        if reason or counts is None:
            return Outcome("stock", (Refusal("network", reason, "fuse"),))
        definition, request, profiles = net.trt_network, self.request, notes.profiles(net)
        notes.note_layers(net, self.network_module)
        chosen = tuning_table(request, _kind(definition))
        mapping, sequences = request.model_config.mapping, notes.counting(net, notes.SEQUENCES)
        options = WeaveOptions(
            Mapping(mapping.world_size, request.rank, mapping.tp_size),
            chosen.table,
            1 if sequences is None else max(profile.first(sequences)[2] for profile in profiles),
            max(profile.first(counts)[2] for profile in profiles),
            split_attention=request.options.split_attention,
            max_beam_width=request.build_config.max_beam_width,
            max_draft_len=request.build_config.max_draft_len,
        )
        with building():
            trt.register_plugins(definition)
            result = weave(definition, options)
        if result.plan.region is not None and request.build_config.opt_num_tokens is None:
            for index, profile in enumerate(profiles):
                batch = 1 if sequences is None else profile.first(sequences)[1]
                notes.set_optimum(net, index, split_optimum(result.plan.region.lookup, batch, profile.first(counts)))
        optima = tuple(profile.first(counts)[1] for profile in notes.profiles(net))
        chain = () if result.mode == "stock" else tuple(chain_signature(definition))
        return Outcome(result.mode, result.plan.refused, result, chosen, optima, chain)

    def _say(self, outcome: Outcome) -> None:
        """Print what was done: one line a rank, and rank 0's reasons."""
        head = f"tokenweave: rank {self.request.rank}"
        if outcome.result is None or outcome.mode == "stock":
            lines = [f"{head}: nothing could be fused, the engine is built as stock"]
        else:
            plan = outcome.result.plan
            split = "fused, not split" if plan.region is None else f"fused and split, attention {plan.region.attention}"
            table = "" if outcome.table is None else f", table {outcome.table.table.sha256[:12]}"
            optima = f", optimised for {list(outcome.opt_num_tokens)} tokens" if plan.region is not None else ""
            lines = [f"{head}: {len(plan.sites)} sites {split}{table}{optima}"]
        if self.request.rank == 0:
            if outcome.table is not None:
                lines.append(f"tokenweave:   {outcome.table.said}")
                if outcome.result is not None and (beyond := outcome.result.plan.beyond_rows()):
                    lines.append(f"tokenweave:   table: {beyond}")
            counts = Counter((refusal.stage, refusal.reason) for refusal in outcome.refused)
            first = {(r.stage, r.reason): r.where for r in reversed(outcome.refused)}
            for (stage, reason), count in list(counts.items())[:_SHOWN]:
                more = f" (and {count - 1} more)" if count > 1 else ""
                lines.append(f"tokenweave:   {stage}: {first[stage, reason]}{more}: {reason}")
            if len(counts) > _SHOWN:
                lines.append(f"tokenweave:   and {len(counts) - _SHOWN} other reasons, see rank0.tokenweave.json")
        _print(lines)


def _print(lines: Sequence[str]) -> None:
    """Print lines on stderr, in one write, not one for each end of line: ranks share it."""
    print("".join(f"{line}\n" for line in lines), end="", file=sys.stderr)


def _unserved(model_config: Any) -> str:
    """Why no network of this model can be fused; empty where it may be."""
    mapping = model_config.mapping
    if mapping.tp_size == 1:
        return "tp_size is 1, so there is no AllReduce to fuse"
    for name in ("pp_size", "cp_size"):
        size = getattr(mapping, name)
        if size > 1:
            return f"{name} is {size}: tensor parallelism only is served"
    if str(model_config.dtype) not in get_args(DType):
        return f"dtype {model_config.dtype} is none of {', '.join(get_args(DType))}"
    return ""


def _kind(definition: Any) -> ModelKind:
    layers = (trt.get_layer(definition, index) for index in range(definition.num_layers))
    plugins = (layer for layer, kind in layers if kind in ("PLUGIN_V2", "PLUGIN_V3"))
    return "moe" if any(trt.plugin_of(definition, layer)[0] == MIXTURE_OF_EXPERTS for layer in plugins) else "dense"


# ---- the table


def tuning_table(request: Request, kind: ModelKind) -> Chosen:
    """The table that was given, else one that comes with this package and fits, else the default rule.

    Raises:
        UserError: the file is missing or damaged, or made for another model, GPU, release or number of ranks.
    """
    options, config = request.options, request.model_config
    tp_size = config.mapping.tp_size
    model, here = _known_model(request), _here()
    if model is not None and model.kind == kind:
        chosen = choose_table(model, tp_size, here, given=options.table)
    elif options.table is not None:
        table = given_table(options.table, config)
        table.check_key({"model_kind": kind}, where=str(options.table))
        check_measured(table, here, where=str(options.table))
        chosen = Chosen(table, f"table: {options.table}", options.table)
    else:
        dtype = cast(DType, str(config.dtype))
        table = default_table(TableKey(tp_size=tp_size, hidden_size=config.hidden_size, dtype=dtype, model_kind=kind))
        chosen = Chosen(table, f"no table fits (the model's shapes are not known here): {table.source.text}")
    if options.min_tokens is None:
        return chosen
    changed = TuningTable.model_validate({**chosen.table.model_dump(), "min_tokens": options.min_tokens})
    return replace(chosen, table=changed, said=f"{chosen.said}; min_tokens {options.min_tokens}")


def given_table(path: Path, model_config: Any) -> TuningTable:
    """A table file, checked against the model as far as TensorRT-LLM's configuration of it tells.

    Raises:
        UserError: as :func:`tuning_table`.
    """
    table = load_table(path)
    expected: dict[str, str | int] = {
        "gpu": _here().gpu or ANY_GPU,
        "tp_size": model_config.mapping.tp_size,
        "hidden_size": model_config.hidden_size,
        "dtype": str(model_config.dtype),
    }
    table.check_key(expected, where=str(path))
    return table


def _known_model(request: Request) -> ModelConfig | None:
    """The model where this package knows its shapes; None for TensorRT-LLM's other architectures."""
    if request.ckpt_dir is None:
        return None
    try:
        return read_trtllm_config(Path(request.ckpt_dir) / "config.json").model
    except UserError:
        return None


def _here() -> Here:
    try:
        gpu = current_gpu().name
    except TokenWeaveError:  # cuda-bindings is not installed, and tables of no particular GPU will do
        gpu = None
    # TensorRT-LLM's runtime keeps activations in memory of its own.
    return Here(gpu, str(tensorrt().__version__), symmetric=False)
