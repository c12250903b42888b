"""Optional step between fuse and split: give GEMMs that start beside a collective to our ``Gemm`` plugin.

TensorRT's kernels for large products are persistent, with as many CTAs as the GPU has SMs and tiles that are dealt out
beforehand. CTAs that find a collective on their SM start when that has ended, and the whole product waits for them, but
for what they have less to do than others. The plugin asks cuBLASLt for kernels that keep off the collective's SMs
(``gemm_sms``). Products behind the first of a block start when the collective has ended, or nearly, and stay
TensorRT's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_tokenweave import recorder, trt
from trtllm_tokenweave.network import Graph, Node
from trtllm_tokenweave.passes import names
from trtllm_tokenweave.passes.plan import WeavePlan
from trtllm_tokenweave.plugin_specs import GEMM, NAMESPACE, VERSION, Half, SiteKind
from trtllm_tokenweave.recorder.plugin import FieldValue
from trtllm_tokenweave.recorder.trtllm_plugins import GEMM as TRTLLM_GEMM

#: Fields with which TensorRT-LLM's plugin is the plain product x * W^T.
_PLAIN = {"transa": 0, "transb": 1, "pad_lda": 0, "pad_ldb": 0, "pad_ldc": 0, "use_fp8": 0, "alpha": 1.0}


def gemm(network: Any, plan: WeavePlan) -> None:
    """Replace each block's first products, where they are of a half's rows and a constant 16-bit matrix.

    A block is what computes a site's input from the result of the site before: its first products are those of Q, K
    and V, and those of gate and up projection. A float32 product stays TensorRT's own: there the plugin would gain
    nothing.
    """
    wanted = plan.options.table.gemm if plan.options.gemm == "table" else plan.options.gemm
    if plan.region is None or wanted != "budget":
        return
    graph = Graph(network)
    table = plan.options.table.pack()
    references = [graph.named[names.start(0, Half.PREFIX)].inputs[at] for at in (-3, -2)]
    kinds = [site.kind for site in plan.sites]
    for node, site in _first_products(graph, plan):
        transposed = _transposed(graph, node)
        if transposed is None:
            continue
        x = node.inputs[0] or ""
        fields: dict[str, FieldValue] = {
            "type_id": recorder.DataType[graph.dtype(x)].value,
            "transb": int(transposed),
            "kind": int(beside(kinds, site, Half.PREFIX)),
            "table": table,
        }
        inputs = [graph.tensors[name or ""] for name in (*node.inputs[:2], *references)]
        layer = trt.add_plugin(network, (GEMM, VERSION, NAMESPACE), names.gemm(node.name), fields, inputs)
        trt.redirect(network, graph, node.outputs[0], layer.get_output(0), frozenset({node.name}))


def beside(kinds: Sequence[SiteKind], site: int, half: Half) -> SiteKind:
    """Kind of the collective that runs while a half computes what ``site`` will reduce.

    In the order of ``order.collective_order`` that is the suffix half's of the site before for the prefix half, and
    the prefix half's of the same site for the suffix half. Nothing runs beside the prefix half in front of site 0.

    Args:
        kinds: What precedes each site.
        site: Its index.
        half: PREFIX or SUFFIX.
    """
    return kinds[max(site - 1, 0)] if half is Half.PREFIX else kinds[site]


def _first_products(graph: Graph, plan: WeavePlan) -> list[tuple[Node, int]]:
    """The products that no other product of their block comes before, each with the site that the block computes."""
    assert plan.region is not None
    found = []
    done = frozenset({plan.region.entry})
    for site in range(len(plan.sites)):
        x = graph.named[names.start(site, Half.PREFIX)].inputs[0]
        block = graph.ancestors([x or ""], done) & graph.descendants(plan.region.entry)
        products = [n for n in graph.ordered(block) if n.kind == "MATRIX_MULTIPLY" or n.plugin_key == TRTLLM_GEMM]
        for node in products:
            before = graph.ancestors([name for name in node.inputs if name is not None], done)
            if before.isdisjoint(products):
                found.append((node, site))
        done |= frozenset(graph.named[names.join(site, Half.PREFIX)].outputs)
    return found


def _transposed(graph: Graph, node: Node) -> bool | None:
    """Whether the product reads its matrix as [n, k]; None for a layer that is no such product."""
    if node.kind == "MATRIX_MULTIPLY" and node.attribute("op0").name == "NONE":
        how = {"NONE": False, "TRANSPOSE": True}.get(node.attribute("op1").name)
    elif node.plugin_key == TRTLLM_GEMM and _is_plain(node.fields):
        how = True
    else:
        return None
    x, weight = (name or "" for name in node.inputs[:2])
    shapes_fit = len(graph.shape(x)) == len(graph.shape(weight)) == 2 and graph.is_constant(weight)
    typed = graph.dtype(x) == graph.dtype(weight) == graph.dtype(node.outputs[0]) and graph.dtype(x) in ("HALF", "BF16")
    return how if shapes_fit and typed else None


def _is_plain(fields: Mapping[str, FieldValue]) -> bool:
    return all(fields.get(name, value) == value for name, value in _PLAIN.items()) and "transb" in fields
