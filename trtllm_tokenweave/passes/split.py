"""Step 2: clone the region for the suffix half; the original layers serve the prefix half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trtllm_tokenweave import trt
from trtllm_tokenweave.attention_roles import attention_roles
from trtllm_tokenweave.network import Graph, Node
from trtllm_tokenweave.passes import names
from trtllm_tokenweave.passes.clone import clone_layer
from trtllm_tokenweave.passes.gemm import beside
from trtllm_tokenweave.passes.join import thread_chain
from trtllm_tokenweave.passes.lookup import SizeMath, prefix_size
from trtllm_tokenweave.passes.order import serial_order
from trtllm_tokenweave.passes.plan import WeavePlan
from trtllm_tokenweave.plugin_specs import (
    ALL_REDUCE_RMS_NORM,
    ATTENTION,
    BATCH_SPLIT,
    GEMM,
    NAMESPACE,
    STREAM_JOIN,
    SUFFIX_ROWS,
    VERSION,
    AttentionRole,
    Half,
)
from trtllm_tokenweave.recorder.packed_fields import pack_fields
from trtllm_tokenweave.recorder.plugin import FieldValue

#: Device tensors of the batch that differ between the halves, in the order of TokenWeaveBatchSplit's inputs.
_BATCH_ROLES = (AttentionRole.SEQUENCE_LENGTH, AttentionRole.CONTEXT_LENGTHS)
_HALVES = (Half.PREFIX, Half.SUFFIX)


def split(network: Any, plan: WeavePlan) -> None:
    """Cut the plan's region in two.

    The rows of the halves are taken apart once at the region's entry and concatenated once at its end. After this
    step each collective is joined at once and the suffix half follows the prefix half: correct, not yet overlapped.
    """
    if plan.region is not None:
        _Splitter(network, plan).run()
        kinds = [site.kind for site in plan.sites]
        thread_chain(network, serial_order(kinds, plan.region.attention == "whole"))


class _Splitter:
    def __init__(self, network: Any, plan: WeavePlan) -> None:
        assert plan.region is not None
        self.network = network
        self.region = plan.region
        self.prefix_input = plan.options.prefix_input
        self.kinds = [site.kind for site in plan.sites]
        self.graph = Graph(network)
        last = names.join(len(plan.sites) - 1, Half.PREFIX)
        self.last = next(n for n in self.graph.nodes if n.name == last)
        self.nodes = self.graph.ordered(self.graph.between(self.region.entry, self.last.outputs[:1]))
        self.inside = set(self.nodes)
        self.inside_names = frozenset(n.name for n in self.nodes)
        self.math = SizeMath(network)
        #: Tensor name of the prefix half -> tensor of the suffix half.
        self.suffix: dict[str, Any] = {}
        self._metadata: dict[tuple[str, ...], tuple[list[Any], list[Any]]] = {}

    def run(self) -> None:
        graph, tensors = self.graph, self.graph.tensors
        entry = tensors[self.region.entry]
        first = next(n for n in self.nodes if n.plugin_name == ALL_REDUCE_RMS_NORM)
        *_, tokens_ref, batch_ref, chain_start = (tensors[n] for n in first.inputs if n is not None)
        given = None if self.prefix_input is None else tensors[self.prefix_input]
        self.prefix_size = prefix_size(self.math, self.region.lookup, tokens_ref, batch_ref, given)
        self.chain_start = chain_start
        prefix_rows, suffix_rows = self._rows(entry, -1, names.rows)
        # Attention left whole waits for both halves: a gate at the entry would wait for itself.
        whole = self.region.attention == "whole"
        self.suffix = {self.region.entry: suffix_rows if whole else self._gate(names.gate(0), suffix_rows)}
        self.prefix_rows, self.tokens_ref = prefix_rows, tokens_ref
        site = number = 0
        for node in self.nodes:
            if node.plugin_name == "GPTAttention":
                if self.region.attention == "split":
                    self._split_attention(node)
                else:
                    self._whole_attention(node, site, number)
                    number += 1
                continue
            if node.plugin_name == ALL_REDUCE_RMS_NORM:
                site, number = site + 1, 0
            self._clone(node, site)
        self._repoint(self.region.entry, prefix_rows)
        for name in self.last.outputs[:2]:
            outside = any(reader not in self.inside for reader, _ in graph.live_readers(name))
            if outside or name in graph.outputs:
                joined = self.network.add_concatenation([tensors[name], self.suffix[name]])
                joined.axis = 0
                joined.name = names.concatenate(name)
                trt.redirect(self.network, graph, name, joined.get_output(0), self.inside_names)

    def _clone(self, node: Node, site: int) -> None:
        """Add the suffix half's copy of a layer; ``site`` is the next one that it comes before."""
        inputs = [None if n is None else self.suffix.get(n, self.graph.tensors[n]) for n in node.inputs]
        for position in self._references(node):
            inputs[position] = self.graph.tensors[node.inputs[position] or ""]
        fields, name = None, names.clone(node.name)
        if node.plugin_name in (ALL_REDUCE_RMS_NORM, STREAM_JOIN):
            fields = {"half": int(Half.SUFFIX)}
            of = names.start if node.plugin_name == ALL_REDUCE_RMS_NORM else names.join
            name = of(int(node.fields["site"]), Half.SUFFIX)
        elif node.plugin_key == (GEMM, VERSION, NAMESPACE):
            fields = {"kind": int(beside(self.kinds, site, Half.SUFFIX))}
        copy = clone_layer(self.network, node, inputs, name, fields)
        for index, output in enumerate(node.outputs):
            self.suffix[output] = copy.get_output(index)

    def _repoint(self, name: str, new: Any) -> None:
        """Let the original layers of the region that read a tensor read ``new`` (the prefix half's rows)."""
        for reader, position in self.graph.readers[name]:
            if reader in self.inside and position not in self._references(reader):
                reader.layer.set_input(position, new)

    @staticmethod
    def _references(node: Node) -> tuple[int, ...]:
        """Inputs of a layer of ours that stand for the whole step; only their dimensions are read."""
        count = len(node.inputs)
        if node.plugin_key == (GEMM, VERSION, NAMESPACE):
            return (count - 2, count - 1)
        return (count - 3, count - 2) if node.plugin_name == ALL_REDUCE_RMS_NORM else ()

    def _rows(self, tensor: Any, site: int, name_of: Callable[[Half], str]) -> tuple[Any, Any]:
        """Rows [prefix, width] and [suffix, width] of a [tokens, width] tensor."""
        layer = self.network.add_slice(tensor, (0, 0), (0, 0), (1, 1))
        layer.name = name_of(Half.PREFIX)
        layer.set_input(1, self.math.const(0, 0))
        layer.set_input(2, self.math.join(self.prefix_size, int(tensor.shape[1])))
        prefix = layer.get_output(0)
        fields: dict[str, FieldValue] = {"site": site, "max_rows": self.region.lookup.max_suffix}
        key, name = (SUFFIX_ROWS, VERSION, NAMESPACE), name_of(Half.SUFFIX)
        return prefix, trt.add_plugin(self.network, key, name, fields, [tensor, prefix]).get_output(0)

    # ---- attention

    def _whole_attention(self, node: Node, site: int, number: int) -> None:
        """Leave an attention layer whole: concatenate the halves before it, take its result apart after it."""
        qkv, result = node.inputs[0], node.outputs[0]
        assert qkv is not None
        joined = self.network.add_concatenation([self.graph.tensors[qkv], self.suffix[qkv]])
        joined.axis = 0
        joined.name = names.concatenate(node.name)
        made = self.graph.tensors[result]
        prefix, suffix = self._rows(made, site, lambda half: names.attention_rows(site, number, half))
        node.layer.set_input(0, joined.get_output(0))
        self._repoint(result, prefix)
        self.suffix[result] = self._gate(names.gate(site, number), suffix)

    def _gate(self, name: str, rows: Any) -> Any:
        """A pass-through that holds the suffix half's compute behind the chain; its place there is set later."""
        layer = trt.add_plugin(
            self.network,
            (STREAM_JOIN, VERSION, NAMESPACE),
            name,
            {"num_aliased": 1, "site": -1, "half": int(Half.SUFFIX), "waits": 0},
            [rows, self.chain_start],
        )
        return layer.get_output(0)

    def _split_attention(self, node: Node) -> None:
        """Replace an attention layer by one wrapper per half; the wrapper owns an inner plugin of its own."""
        tensors = self.graph.tensors
        roles = attention_roles(node.fields)
        at: dict[AttentionRole, int] = {role: i for i, role in enumerate(roles) if role is not AttentionRole.OTHER}
        originals = [tensors[n] for n in node.inputs if n is not None]
        halves = self._batch_metadata(at, originals)
        result, qkv = node.outputs[0], node.inputs[at[AttentionRole.QKV]]
        assert node.plugin_key is not None
        assert qkv is not None
        fields: dict[str, FieldValue] = {
            "num_heads": int(node.fields["num_heads"]),
            "head_size": int(node.fields["head_size"]),
            "inner_name": node.plugin_key[0].encode(),
            "inner_version": node.plugin_key[1].encode(),
            "inner_namespace": node.plugin_key[2].encode(),
            "inner": pack_fields(trt.plugin_fields(node.plugin_key, node.fields)),
            "roles": np.asarray(roles, np.int32),
        }
        outputs = []
        for half, metadata, rows in zip(_HALVES, halves, (tensors[qkv], self.suffix[qkv]), strict=True):
            inputs = list(originals)
            inputs[at[AttentionRole.QKV]] = rows
            for role, tensor in zip(_BATCH_ROLES, metadata, strict=True):
                inputs[at[role]] = tensor
            layer = trt.add_plugin(
                self.network,
                (ATTENTION, VERSION, NAMESPACE),
                f"{node.name}/{half.name.lower()}",
                {"half": int(half), **fields},
                inputs,
            )
            outputs.append(layer.get_output(0))
        self._repoint(result, outputs[0])
        self.suffix[result] = outputs[1]

    def _batch_metadata(self, at: dict[AttentionRole, int], originals: list[Any]) -> tuple[list[Any], list[Any]]:
        """Device metadata of either half, made once per step for all layers that share the batch's tensors."""
        roles = (AttentionRole.HOST_REQUEST_TYPES, AttentionRole.HOST_CONTEXT_LENGTHS, *_BATCH_ROLES)
        inputs = [originals[at[role]] for role in roles]
        key = tuple(t.name for t in inputs)
        if key not in self._metadata:
            suffix = f"_{len(self._metadata)}" if self._metadata else ""
            layer = trt.add_plugin(
                self.network,
                (BATCH_SPLIT, VERSION, NAMESPACE),
                names.BATCH_SPLIT + suffix,
                {"max_num_tokens": self.region.lookup.max_num_tokens},
                [self.prefix_rows, self.tokens_ref, *inputs],
            )
            count = len(_BATCH_ROLES)
            made = [layer.get_output(i) for i in range(2 * count)]
            self._metadata[key] = (made[:count], made[count:])
        return self._metadata[key]
