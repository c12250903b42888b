"""`trtllm-tokenweave inspect`: what the pass finds in a network, and what it leaves alone and why."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtllm_tokenweave import recorder
from trtllm_tokenweave.checkpoint import open_checkpoint
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig, preset
from trtllm_tokenweave.passes import WeaveOptions, WeaveResult, weave
from trtllm_tokenweave.patterns import ALL_REDUCE_KEY
from trtllm_tokenweave.recorder import RecordedNetwork, store
from trtllm_tokenweave.table import TuningTable, load_table
from trtllm_tokenweave.waves import default_table, table_key


def inspect_(
    network: Annotated[Path | None, typer.Argument(metavar="[NETWORK]", help="Recorded network (JSON).")] = None,
    preset_: Annotated[str, typer.Option("--preset", help="Model shape, such as llama-3.3-70b.")] = "",
    checkpoint: Annotated[Path | None, typer.Option(help="GGUF file, Hugging Face or TensorRT-LLM folder.")] = None,
    tp: Annotated[int, typer.Option(help="tp_size of a model shape or checkpoint.")] = 8,
    rank: Annotated[int, typer.Option(help="Rank whose network is inspected.")] = 0,
    table: Annotated[Path | None, typer.Option(metavar="FILE", help="Tuning table; default: the default rule.")] = None,
    max_num_tokens: Annotated[int, typer.Option(help="Most tokens of a step.")] = 8192,
    max_batch_size: Annotated[int, typer.Option(help="Most sequences of a step.")] = 256,
    reduce_fusion: Annotated[bool, typer.Option(help="Build with TensorRT-LLM's reduce_fusion.")] = False,
    split_attention: Annotated[bool, typer.Option(help="Cut attention too.")] = True,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Save the woven network here (JSON).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print each fusion site of a network, each candidate refused with its reason, and how steps would be split."""
    if sum(given is not None for given in (network, preset_ or None, checkpoint)) != 1:
        raise UserError("give one of NETWORK, --preset and --checkpoint", where="inspect")
    started = time.perf_counter()
    limits = NetworkOptions(max_batch_size=max_batch_size, max_num_tokens=max_num_tokens, reduce_fusion=reduce_fusion)
    if network is not None:
        recorded = store.load(network, recorder.get_plugin_registry())
        mapping = mapping_of(recorded, network, rank)
        tuning = load_table(table) if table is not None else network_table(recorded, mapping)
    else:
        config, recorded = _build(preset_, checkpoint, Mapping(tp, rank, tp), limits)
        mapping = Mapping(tp, rank, tp)
        tuning = load_table(table) if table is not None else default_table(config, tp)
        if table is not None:
            tuning.check_key(table_key(config, tp).model_dump(exclude={"gpu"}), where=str(table))
    built = time.perf_counter() - started
    result = weave(
        recorded, WeaveOptions(mapping, tuning, max_batch_size, max_num_tokens, split_attention=split_attention)
    )
    if output is not None:
        store.save(recorded, output)
    document = describe(result, built)
    if as_json:
        print(json.dumps(document))
    else:
        _print(document, result)


def _build(
    preset_: str, checkpoint: Path | None, mapping: Mapping, limits: NetworkOptions
) -> tuple[ModelConfig, RecordedNetwork]:
    recorded = RecordedNetwork(preset_ or str(checkpoint))
    if checkpoint is not None:
        source = open_checkpoint(checkpoint)
        build_llama(recorded, source.config, mapping, source.rank_weights(mapping), limits)
        return source.config, recorded
    config = preset(preset_)
    build_llama(recorded, config, mapping, None, limits)
    return config, recorded


def mapping_of(network: RecordedNetwork, path: Path, rank: int = 0) -> Mapping:
    """The tensor-parallel group that a recorded network was built for, read from its AllReduce layers.

    Raises:
        UserError: when there is none, or ``rank`` is not in it.
    """
    for layer in network.layers:
        if isinstance(layer, recorder.IPluginV2Layer) and layer.plugin.spec.key == ALL_REDUCE_KEY:
            group = layer.plugin.fields["group"]
            size = len(group) if hasattr(group, "__len__") else 1
            return Mapping(size, rank, size)
    raise UserError(
        "no AllReduce layer: there is nothing to fuse", where=str(path), fix="record a network of tp_size 2 or more"
    )


def network_table(network: RecordedNetwork, mapping: Mapping, **fields: Any) -> TuningTable:
    """The default rule for a recorded network, whose hidden size and dtype are those of its AllReduce layers."""
    from trtllm_tokenweave.recorder.enums import TRT_NAMES
    from trtllm_tokenweave.table import TableKey

    names = {dtype: name for name, dtype in TRT_NAMES.items()}
    plugins = [layer for layer in network.layers if isinstance(layer, recorder.IPluginV2Layer)]
    reduced = next(layer for layer in plugins if layer.plugin.spec.key == ALL_REDUCE_KEY).outputs[0]
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


def _print(document: dict[str, Any], result: WeaveResult) -> None:
    console = Console()
    sites = Table("#", "kind", "all-reduce", "layers", "gamma", "eps", box=box.SIMPLE, title="Fusion sites")
    for site in document["sites"]:
        cells = (
            site["index"],
            site["kind"],
            site["all_reduce"],
            len(site["layers"]),
            site["gamma"],
            f"{site['eps']:g}",
        )
        sites.add_row(*(escape(str(cell)) for cell in cells))
    console.print(sites if document["sites"] else "No fusion site.")
    if document["refused"]:
        refused = Table("stage", "where", "reason", box=box.SIMPLE, title="Left as it was")
        for refusal in document["refused"]:
            refused.add_row(refusal["stage"], escape(refusal["where"]), escape(refusal["reason"]))
        console.print(refused)
    region, seconds = document["region"], document["seconds"]
    console.print(f"{len(document['sites'])} sites, mode [bold]{result.mode}[/bold]")
    if region is not None:
        console.print(
            f"Split from {escape(region['entry'])}, attention {region['attention']}: prefix up to "
            f"{region['max_prefix']} tokens, suffix up to {region['max_suffix']}, activations about "
            f"{region['activation_ratio']:.2f} times stock"
        )
    console.print(
        f"Seconds: build {seconds['build']:.2f}, weave {seconds['weave']:.2f}, verify {seconds['verify']:.2f}"
    )
