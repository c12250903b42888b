"""Step 1: replace every fusion site by ``AllReduceRmsNorm``."""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_tokenweave import recorder, trt
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.passes import names
from trtllm_tokenweave.passes.plan import WeavePlan
from trtllm_tokenweave.patterns import FusionSite
from trtllm_tokenweave.plugin_specs import ALL_REDUCE_RMS_NORM, NAMESPACE, STREAM_JOIN, VERSION, Half
from trtllm_tokenweave.recorder.plugin import FieldValue


def fuse(network: Any, plan: WeavePlan) -> None:
    """Replace the plan's sites; where a region will be split, each is followed at once by its ``StreamJoin``.

    The residual stream stays sharded by token inside a run of sites. Everything the communication stream reads
    or writes is an input of the join, so that TensorRT does not reuse its memory too early.
    """
    if not plan.sites:
        return
    graph = Graph(network)
    tensors = graph.tensors
    chain = trt.constant(network, np.zeros(1, np.int32), name=names.CHAIN_START)
    tokens_ref, batch_ref = _step_refs(network, graph, plan.sites[0].residual)
    replaced = frozenset(name for site in plan.sites for name in site.layers)
    residual: Any = None
    for index, (site, starts) in enumerate(zip(plan.sites, plan.run_starts(), strict=True)):
        gather = any(reader.name not in replaced for reader, _ in graph.live_readers(site.sum))
        fields: dict[str, FieldValue] = {
            "group": np.asarray(site.group, np.int32),
            "tp_rank": plan.options.mapping.tp_rank,
            "type_id": recorder.DataType[graph.dtype(site.x)].value,
            "eps": site.eps,
            "kind": int(site.kind),
            "site": index,
            "half": int(Half.WHOLE if plan.region is None else Half.PREFIX),
            "residual_sharded": int(not starts),
            "gather_residual": int(gather),
            "has_bias": int(site.bias is not None),
            "side_stream": int(plan.region is not None),
            "table": plan.options.table.pack(),
        }
        held = tensors[site.residual] if starts else residual
        x = tensors[site.x]
        vectors = [_flat(network, graph, site, n) for n in (site.gamma, site.bias) if n is not None]
        half = Half.WHOLE if plan.region is None else Half.PREFIX
        layer = trt.add_plugin(
            network,
            (ALL_REDUCE_RMS_NORM, VERSION, NAMESPACE),
            names.start(index, half),
            fields,
            [x, held, *vectors, tokens_ref, batch_ref, chain],
        )
        normed, residual, chain = (layer.get_output(i) for i in range(3))
        if plan.region is not None:
            join = trt.add_plugin(
                network,
                (STREAM_JOIN, VERSION, NAMESPACE),
                names.join(index, half),
                {"num_aliased": 2, "site": index, "half": int(half), "waits": 1},
                [normed, residual, x, held, chain],
            )
            normed, residual, chain = (join.get_output(i) for i in range(3))
        trt.redirect(network, graph, site.sum, residual, replaced)
        trt.redirect(network, graph, site.normed, normed, frozenset(site.layers))


def _flat(network: Any, graph: Graph, site: FusionSite, name: str) -> Any:
    """The weight as [hidden]; a reshape that TensorRT folds where it is stored as [1, hidden]."""
    tensor = graph.tensors[name]
    if len(tensor.shape) == 1:
        return tensor
    layer = network.add_shuffle(tensor)
    layer.reshape_dims = (tensor.shape[-1],)
    layer.name = f"{site.all_reduce}/tokenweave_flat"
    return layer.get_output(0)


def _step_refs(network: Any, graph: Graph, entry: str) -> tuple[Any, Any]:
    """Two tensors whose dimension 0 is the step's tokens and its sequences; only their shapes are ever read.

    Network inputs are preferred: they are bound for the whole step anyway, so nothing is kept alive for them.
    """
    tokens = graph.tensors[entry]
    inputs = [graph.tensors[n] for n in graph.inputs]
    if "input_ids" in graph.inputs:
        tokens = graph.tensors["input_ids"]
    else:
        above = {n for node in graph.ancestors([entry]) for n in node.inputs} | {entry}
        dynamic = [t for t in inputs if t.name in above and len(t.shape) > 0 and t.shape[0] == -1]
        tokens = dynamic[0] if dynamic else tokens
    if "context_lengths" in graph.inputs:
        return tokens, graph.tensors["context_lengths"]
    return tokens, trt.constant(network, np.zeros(1, np.int32), name=names.ONE_SEQUENCE)
