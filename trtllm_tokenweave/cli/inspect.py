"""`trtllm-tokenweave inspect`: what the pass finds in a network, and what it leaves alone and why."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from trtllm_tokenweave import recorder
from trtllm_tokenweave.atomic import check_target, same_file
from trtllm_tokenweave.attention_roles import int_field
from trtllm_tokenweave.checkpoint import open_checkpoint
from trtllm_tokenweave.cli.console import make_console
from trtllm_tokenweave.cli.inspect_engine import is_engine, show_engine
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig, preset
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.passes import WeaveMode, WeaveOptions, WeavePlan, WeaveResult, weave
from trtllm_tokenweave.patterns import find_sites
from trtllm_tokenweave.plugin_specs import ALL_REDUCE_RMS_NORM, NAMESPACE, VERSION, Half
from trtllm_tokenweave.recorder import RecordedNetwork
from trtllm_tokenweave.recorder.enums import TRT_NAMES
from trtllm_tokenweave.recorder.trtllm_plugins import ALL_REDUCE
from trtllm_tokenweave.table import TableKey, TuningTable, load_table
from trtllm_tokenweave.table.measured import Here, check_measured
from trtllm_tokenweave.table.shipped import choose_table

DEFAULT_TP_SIZE = 8


def inspect_(
    network: Annotated[
        Path | None,
        typer.Argument(metavar="[NETWORK|ENGINE]", help="Recorded network (JSON), or engines: a folder or one."),
    ] = None,
    preset_: Annotated[str, typer.Option("--preset", help="Model shape, such as llama-3.3-70b.")] = "",
    checkpoint: Annotated[Path | None, typer.Option(help="GGUF file, Hugging Face or TensorRT-LLM folder.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="tp_size of a model shape or checkpoint; 8 by default.")] = None,
    rank: Annotated[int, typer.Option(help="Rank whose network is inspected.")] = 0,
    table: Annotated[Path | None, typer.Option(metavar="FILE", help="Tuning table; default: the default rule.")] = None,
    max_num_tokens: Annotated[int, typer.Option(help="Most tokens of a step.")] = 8192,
    max_batch_size: Annotated[int, typer.Option(help="Most sequences of a step.")] = 256,
    reduce_fusion: Annotated[bool, typer.Option(help="Build with TensorRT-LLM's reduce_fusion.")] = False,
    split_attention: Annotated[bool, typer.Option(help="Cut attention too.")] = True,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Save the woven network: NAME.json, weights beside it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print each fusion site of a network, each candidate refused with its reason, and how steps would be split.

    Of an engine that this package has saved: what it was built for, and the tuning table that it carries. Of one that
    trtllm-build made: what was recorded of it.
    """
    if sum(given is not None for given in (network, preset_ or None, checkpoint)) != 1:
        fix = "name the network or engine, or a model shape: --preset llama-3.3-70b"
        raise UserError("give one of NETWORK, --preset and --checkpoint", where="inspect", fix=fix)
    if output is not None:
        check_target(output)
        weights = None if network is None or network.is_dir() else network.with_suffix(".safetensors")
        _check_output(output, network, weights, checkpoint, table)
    if network is not None and is_engine(network):
        if output is not None or table is not None:
            option = "--output" if output is not None else "--table"
            raise UserError("is for networks", where=option, fix="leave it out")
        show_engine(network, as_json)
        return
    started = time.perf_counter()
    if network is not None:
        recorded = recorder.load(network)
        mapping = mapping_of(recorded, network, rank)
        if tp is not None and tp != mapping.tp_size:
            raise UserError(f"{tp}, but {network} was recorded for {mapping.tp_size}", where="--tp", fix="leave it out")
        tuning = network_table(recorded, mapping)
        if table is not None:
            expected, tuning = tuning.key, load_table(table)
            tuning.check_key(expected, where=str(table))
            check_measured(tuning, Here(), where=str(table))
    else:
        tp_size = DEFAULT_TP_SIZE if tp is None else tp
        mapping = _mapping(tp_size, rank)
        limits = NetworkOptions(
            max_batch_size=max_batch_size, max_num_tokens=max_num_tokens, reduce_fusion=reduce_fusion
        )
        config, recorded = _build(preset_, checkpoint, mapping, limits)
        tuning = choose_table(config, tp_size, Here(), given=table).table
    built = time.perf_counter() - started
    found = already_woven(recorded)
    options = WeaveOptions(mapping, tuning, max_batch_size, max_num_tokens, split_attention=split_attention)
    if found is None:
        result = weave(recorded, options)
    else:
        result = WeaveResult(WeavePlan(options, (), tuple(find_sites(Graph(recorded))[1]), None))
    document = describe(result, built)
    document["already_woven"] = None if found is None else asdict(found)
    if found is not None:
        document["mode"] = found.mode
    document["written"] = [] if output is None else [str(path) for path in recorder.save(recorded, output)]
    if as_json:
        print(json.dumps(document))
    else:
        _print(document, result, found)


def _check_output(output: Path, *given: Path | None) -> None:
    """Refuse an output that would replace a file of the input; in a checkpoint's folder, any file is one."""
    inputs = [p for path in given if path is not None for p in (path.iterdir() if path.is_dir() else (path,))]
    for written in (output, output.with_suffix(".safetensors")):
        if written.exists() and any(same_file(written, path) for path in inputs):
            fix = "write the result to another file"
            raise UserError(f"{written} is a file of the input", where="--output", fix=fix)


def _build(
    preset_: str, checkpoint: Path | None, mapping: Mapping, limits: NetworkOptions
) -> tuple[ModelConfig, RecordedNetwork]:
    recorded = RecordedNetwork(preset_ or str(checkpoint))
    if checkpoint is not None:
        source = open_checkpoint(checkpoint)
        config = source.config
        weights = source.rank_weights(mapping, only_this_rank=True)
        build_llama(recorded, config, mapping, weights, _fitting(limits, config))
        return config, recorded
    config = preset(preset_)
    build_llama(recorded, config, mapping, None, _fitting(limits, config))
    return config, recorded


def _fitting(limits: NetworkOptions, config: ModelConfig) -> NetworkOptions:
    """The options with sequences no longer than the model has positions."""
    return replace(limits, max_seq_len=min(limits.max_seq_len, config.max_position_embeddings))


def mapping_of(network: RecordedNetwork, path: Path, rank: int = 0) -> Mapping:
    """The tensor-parallel group that a recorded network was built for, read from its AllReduce layers.

    Raises:
        UserError: when there is none, or ``rank`` is not in it.
    """
    for layer in network.layers:
        if isinstance(layer, recorder.IPluginV2Layer) and layer.plugin.spec.key == ALL_REDUCE:
            group = layer.plugin.fields["group"]
            size = len(group) if hasattr(group, "__len__") else 1
            return _mapping(size, rank)
    raise UserError(
        "no AllReduce layer: there is nothing to fuse", where=str(path), fix="record a network of tp_size 2 or more"
    )


def _mapping(tp_size: int, rank: int) -> Mapping:
    if not 0 <= rank < tp_size:
        fix = f"give 0 to {tp_size - 1}" if tp_size > 1 else "leave it out"
        raise UserError(f"rank {rank} is not there: tp_size is {tp_size}", where="--rank", fix=fix)
    return Mapping(tp_size, rank, tp_size)


@dataclass(frozen=True)
class AlreadyWoven:
    """What a network that is woven already holds: into what it was made, and its fusion sites."""

    mode: WeaveMode
    sites: int

    def __str__(self) -> str:
        return f"already woven: {self.sites} sites, mode {self.mode}"


def already_woven(network: RecordedNetwork) -> AlreadyWoven | None:
    """What the pass has done to a recorded network before; None: nothing."""
    plugins = [layer.plugin for layer in network.layers if isinstance(layer, recorder.IPluginV3Layer)]
    fused = [plugin.fields for plugin in plugins if plugin.spec.key == (ALL_REDUCE_RMS_NORM, VERSION, NAMESPACE)]
    if not fused:
        return None
    split = any(int_field(fields, "half") != Half.WHOLE for fields in fused)
    return AlreadyWoven("weave" if split else "fuse", len({int_field(fields, "site") for fields in fused}))


def network_table(network: RecordedNetwork, mapping: Mapping, **fields: Any) -> TuningTable:
    """The default rule for a recorded network, whose hidden size and dtype are those of its AllReduce layers."""
    names = {dtype: name for name, dtype in TRT_NAMES.items()}
    plugins = [layer for layer in network.layers if isinstance(layer, recorder.IPluginV2Layer)]
    reduced = next(layer for layer in plugins if layer.plugin.spec.key == ALL_REDUCE).outputs[0]
    moe = any(layer.plugin.plugin_type == "MixtureOfExperts" for layer in plugins)
    key = TableKey(
        tp_size=mapping.tp_size,
        hidden_size=reduced.shape[-1],
        dtype=cast(Literal["float32", "float16", "bfloat16"], names[reduced.dtype]),
        model_kind="moe" if moe else "dense",
    )
    return TuningTable(key=key, **fields)


def describe(result: WeaveResult, build_seconds: float) -> dict[str, Any]:
    """The command's JSON document."""
    plan = result.plan
    region = None
    if plan.region is not None:
        lookup = plan.region.lookup
        region = {
            "entry": plan.region.entry,
            "attention": plan.region.attention,
            "max_prefix": lookup.max_prefix,
            "max_suffix": lookup.max_suffix,
            "activation_ratio": lookup.activation_ratio,
        }
    return {
        "mode": result.mode,
        "sites": [{**asdict(site), "index": i, "kind": site.kind.name.lower()} for i, site in enumerate(plan.sites)],
        "refused": [asdict(refusal) for refusal in plan.refused],
        "region": region,
        "seconds": {"build": build_seconds, "weave": result.weave_seconds, "verify": result.verify_seconds},
    }


def _print(document: dict[str, Any], result: WeaveResult, found: AlreadyWoven | None) -> None:
    console = make_console()
    sites, refused = document["sites"], document["refused"]
    wheres, gammas = ([_plain_path(site[key]) for site in sites] for key in ("all_reduce", "gamma"))
    table = Table("#", "kind", "all-reduce in", "norm weight", "eps", "ops", box=box.SIMPLE, title="Fusion sites")
    for column in table.columns[2:4]:
        column.overflow = "fold"
    for site, where, gamma in zip(sites, _without_prefix(wheres), _without_prefix(gammas), strict=True):
        cells = (site["index"], site["kind"], where, gamma, f"{site['eps']:g}", len(site["layers"]))
        table.add_row(*(escape(str(cell)) for cell in cells))
    if found is None:
        console.print(table if sites else "No fusion site.")
    for refusal in refused:
        console.print(f"{refusal['stage']}: {escape(refusal['where'])}: {escape(refusal['reason'])}")
    region, seconds = document["region"], document["seconds"]
    console.print(
        f"{len(sites)} sites, mode [bold]{result.mode}[/bold]" if found is None else f"{found}, left as it is"
    )
    if region is not None:
        console.print(
            f"split from {escape(region['entry'])}, attention {region['attention']}\n"
            f"prefix up to {region['max_prefix']} tokens, suffix up to {region['max_suffix']}, activations about "
            f"{region['activation_ratio']:.2f} times fuse-only"
        )
    for path in document["written"]:
        console.print(f"wrote {escape(path)}")
    console.print(
        f"seconds: build {seconds['build']:.2f}, weave {seconds['weave']:.2f}, verify {seconds['verify']:.2f}"
    )


def _plain_path(name: str) -> str:
    """A layer or weight name without what all of its kind have in common."""
    plain = name.replace("/", ".")
    for suffix in ("_output_0", ".PLUGIN_V2_AllReduce_0", ".PLUGIN_V2_AllReduce", ".weight"):
        plain = plain.removesuffix(suffix)
    return plain


def _without_prefix(paths: list[str]) -> list[str]:
    """Paths without the components that all of them start with (each keeps at least one)."""
    parts = [path.split(".") for path in paths]
    common = 0
    while parts and all(len(p) > common + 1 and p[common] == parts[0][common] for p in parts):
        common += 1
    return [".".join(p[common:]) for p in parts]
