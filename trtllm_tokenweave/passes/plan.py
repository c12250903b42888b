"""Everything the pass will do, decided before the first edit: layers of a network cannot be removed again."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from trtllm_tokenweave.attention_roles import split_refusal
from trtllm_tokenweave.errors import UserError, check_fields, check_kind
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.network import Graph, Node
from trtllm_tokenweave.passes.rowwise import Rows, RowWise
from trtllm_tokenweave.patterns import FusionSite, Refusal, find_sites, is_collective
from trtllm_tokenweave.plugin_specs import ALL_REDUCE_RMS_NORM, NAMESPACE, VERSION
from trtllm_tokenweave.schedule import check_limits

if TYPE_CHECKING:
    from trtllm_tokenweave.table import PrefixLookup, TuningTable

AttentionMode = Literal["split", "whole", "none"]
GemmChoice = Literal["table", "trt", "budget"]


@dataclass(frozen=True)
class WeaveOptions:
    """What the pass needs to know besides the network.

    Attributes:
        mapping: This rank's place in the tensor-parallel group.
        table: Splits and launch configurations by step size.
        max_batch_size: Most sequences of a step.
        max_num_tokens: Most tokens of a step.
        split: Cut steps in two; False fuses only.
        split_attention: Cut attention too; False leaves it whole.
        max_beam_width: Beams per request of the build.
        max_draft_len: Draft tokens of a generation row; above 0 attention stays whole.
        gemm: "budget" gives the GEMMs that start beside a collective to our plugin, which keeps to the table's
            ``gemm_sms``; "trt" leaves them to TensorRT; "table": what the table was measured with, else "budget".
        prefix_input: Name of a network input whose dimension 0 is the rows of the prefix half, in the place of the
            table's lookup: the split is then an input of every step, for tuning. The network brings the input (rank
            1); only its dimension is read.

    Raises:
        UserError: a value that no option has. `max_batch_size` and `max_num_tokens` are checked with the table.
    """

    mapping: Mapping
    table: TuningTable
    max_batch_size: int
    max_num_tokens: int
    split: bool = True
    split_attention: bool = True
    max_beam_width: int = 1
    max_draft_len: int = 0
    gemm: GemmChoice = "table"
    prefix_input: str | None = None

    def __post_init__(self) -> None:
        from trtllm_tokenweave.table import TuningTable

        check_fields(self)
        check_kind(self.mapping, ("a Mapping", Mapping), where="mapping")
        check_kind(self.table, ("a TuningTable", TuningTable), where="table")
        for name, least in (("max_beam_width", 1), ("max_draft_len", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{getattr(self, name)} is less than {least}", where=name)
        check_limits(self.max_batch_size, self.max_num_tokens)
        if self.gemm not in get_args(GemmChoice):
            raise UserError(f"no choice {self.gemm!r}", where="gemm", fix=f"give one of {get_args(GemmChoice)}")


@dataclass(frozen=True)
class Region:
    """The part of the network that is cut in two, from ``entry`` (tensor name) to the last site's norm."""

    entry: str
    attention: AttentionMode
    lookup: PrefixLookup


@dataclass(frozen=True)
class WeavePlan:
    """The sites to fuse, what is left alone and why, and the region to split (None: fuse only).

    ``tokens_ref`` and ``batch_ref`` name tensors whose dimension 0 is the step's tokens and its sequences (None: one
    sequence); only their dimensions are ever read.
    """

    options: WeaveOptions
    sites: tuple[FusionSite, ...]
    refused: tuple[Refusal, ...]
    region: Region | None
    tokens_ref: str = ""
    batch_ref: str | None = None

    def hash(self) -> int:
        """Of what two engines of a process may differ in, 31 bits; the same on all ranks."""
        options, region = self.options, self.region
        limits = (options.max_batch_size, options.max_num_tokens, options.prefix_input, options.gemm)
        kinds = [int(site.kind) for site in self.sites]
        told = repr((limits, kinds, None if region is None else region.attention)).encode()
        return zlib.crc32(told) >> 1

    def beyond_rows(self) -> str:
        """`TuningTable.beyond_rows` of a network that is split; empty for others."""
        return "" if self.region is None else self.options.table.beyond_rows(self.options.max_num_tokens)

    def run_starts(self) -> list[bool]:
        """Per site: does it start a run, taking the full residual instead of the previous site's shard."""
        sums = [None, *(s.sum for s in self.sites[:-1])]
        return [site.residual != before for site, before in zip(self.sites, sums, strict=True)]


def make_plan(network: Any, options: WeaveOptions) -> WeavePlan:
    """Decide what to fuse and whether to split; the network is only read.

    Args:
        network: A network definition, real or recorded.
        options: See :class:`WeaveOptions`.

    Raises:
        UserError: the table was made for another tp_size or hidden_size, or the network is woven already.
    """
    graph = Graph(network)
    _check_stock(graph)
    found, refused = find_sites(graph)
    if not found and not refused:
        reason = "it has no AllReduce layer, so there is nothing to fuse (tp_size 1?)"
        refused.append(Refusal("network", reason, "fuse"))
    sites = []
    for site in found:
        if site.group == options.mapping.tp_group:
            sites.append(site)
        else:
            reason = f"reduces over ranks {site.group}, the tensor-parallel group is {options.mapping.tp_group}"
            refused.append(Refusal(site.all_reduce, reason, "fuse"))
    plan = WeavePlan(options, tuple(sites), tuple(refused), None)
    if not sites:
        return plan
    _check_table(graph, plan)
    region, more = _plan_region(graph, plan)
    return replace(
        plan,
        refused=(*refused, *more),
        region=region,
        tokens_ref=_tokens_ref(graph, sites[0].residual),
        batch_ref="context_lengths" if "context_lengths" in graph.inputs else None,
    )


def _check_stock(graph: Graph) -> None:
    """Refuse a network that was woven: what a second weave did would stand outside the first one's chain."""
    key = (ALL_REDUCE_RMS_NORM, VERSION, NAMESPACE)
    fused = next((node.name for node in graph.nodes if node.plugin_key == key), None)
    if fused is not None:
        fix = "weave a network once; for other options build it again, and weave that"
        raise UserError("is of an earlier weave: the network is woven already", where=f"layer {fused}", fix=fix)


def _check_table(graph: Graph, plan: WeavePlan) -> None:
    """Refuse a table that was made for another model, as far as the mapping and the sites tell."""
    key = {"tp_size": plan.options.mapping.tp_size, "hidden_size": graph.shape(plan.sites[0].residual)[-1]}
    plan.options.table.check_key({name: value for name, value in key.items() if value != -1})


def _tokens_ref(graph: Graph, entry: str) -> str:
    """A network input with as many rows as ``entry``, where that can be proven; else ``entry`` itself.

    Inputs are bound for the whole step anyway, so nothing is kept alive for them. A sum over ranks, of an embedding
    whose vocabulary they share, has the rows of what it sums.
    """
    if entry in graph.inputs:
        return entry
    for name in graph.inputs:
        nodes = graph.between(name, [entry])
        if graph.shape(name)[:1] == (-1,) and nodes:
            rows = RowWise(graph, name, sums=True)
            if not rows.check(graph.ordered(nodes)) and rows.rows.get(entry) is Rows.TOKEN:
                return name
    return entry


def _plan_region(graph: Graph, plan: WeavePlan) -> tuple[Region | None, list[Refusal]]:
    options, first, last = plan.options, plan.sites[0], plan.sites[-1]

    def no(where: str, reason: str) -> tuple[None, list[Refusal]]:
        return None, [Refusal(where, reason, "split")]

    if not options.split:
        return no("network", "splitting is switched off")
    lookup = options.table.prefix_lookup(options.max_batch_size, options.max_num_tokens)
    if lookup.max_suffix == 0:
        return no("tuning table", f"it splits no step of up to {options.max_num_tokens} tokens")
    if options.prefix_input is not None:
        if graph.inputs.count(options.prefix_input) != 1 or len(graph.shape(options.prefix_input)) != 1:
            return no(options.prefix_input, "it is no network input of rank 1, so it cannot say the prefix half's rows")
        # Any split may be asked for: either half may hold nearly all of a step.
        lookup = replace(lookup, max_prefix=options.max_num_tokens, max_suffix=options.max_num_tokens - 1)
    if sum(plan.run_starts()) != 1:
        at = plan.sites[plan.run_starts().index(True, 1)].all_reduce
        return no(at, "a site before it is not fused, so the residual stream is interrupted")
    if graph.shape(first.residual)[0] != -1:
        return no(first.residual, "its number of tokens is fixed")
    loose = _loose_collective(graph, plan)
    if loose is not None:
        return no(loose, "this collective is neither before the first site nor after the last")
    nodes = graph.ordered(graph.between(first.residual, [last.normed]))
    failures = _region_failures(graph, plan, nodes)
    if failures:
        return None, failures
    attention = [n for n in nodes if n.plugin_name == "GPTAttention"]
    mode, whole = _attention_mode(attention, options)
    return Region(first.residual, mode, lookup), whole


def _loose_collective(graph: Graph, plan: WeavePlan) -> str | None:
    """A stock collective that could run beside the chained ones, in another order on each rank."""
    first, last = plan.sites[0], plan.sites[-1]
    fused = {site.all_reduce for site in plan.sites}
    ordered = graph.ancestors([first.x, first.residual]) | graph.descendants(last.normed)
    loose = (n.name for n in graph.nodes if n in graph.live and is_collective(n) and n not in ordered)
    return next((name for name in loose if name not in fused), None)


def _region_failures(graph: Graph, plan: WeavePlan, nodes: list[Node]) -> list[Refusal]:
    trusted = {name for site in plan.sites for name in site.layers}
    rows = RowWise(graph, plan.sites[0].residual, trusted)
    failures = [Refusal(node.name, f"inside the region: {why}", "split") for node, why in rows.check(nodes)]
    for site in plan.sites:
        for name in (site.x, site.residual):
            if rows.rows.get(name) is not Rows.TOKEN:
                reason = f"it reads {name!r}, which is not computed from the region's tokens"
                failures.append(Refusal(site.all_reduce, reason, "split"))
    inside = set(nodes)
    ends = {plan.sites[-1].normed, plan.sites[-1].sum}
    for node in nodes:
        for name in node.outputs:
            if name in ends:
                continue
            outside = [r.name for r, _ in graph.live_readers(name) if r not in inside]
            if name in graph.outputs:
                outside.append("a network output")
            if outside:
                failures.append(Refusal(node.name, f"its result {name!r} is read outside by {outside[0]}", "split"))
    return failures


def _attention_mode(nodes: list[Node], options: WeaveOptions) -> tuple[AttentionMode, list[Refusal]]:
    if not nodes:
        return "none", []
    if not options.split_attention:
        return "whole", [Refusal("attention", "split_attention is switched off", "attention")]
    if options.max_beam_width > 1:
        return "whole", [Refusal("attention", f"max_beam_width is {options.max_beam_width}", "attention")]
    if options.max_draft_len > 0:
        return "whole", [Refusal("attention", f"max_draft_len is {options.max_draft_len}", "attention")]
    for node in nodes:
        reason = split_refusal(node.fields)
        if reason:
            return "whole", [Refusal(node.name, reason, "attention")]
    return "split", []
