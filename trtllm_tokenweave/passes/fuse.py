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
    fuser = _Fuser(network, plan, graph)
    for index, starts in enumerate(plan.run_starts()):
        fuser.replace(index, starts)


class _Fuser:
    def __init__(self, network: Any, plan: WeavePlan, graph: Graph) -> None:
        self.network, self.plan, self.graph = network, plan, graph
        self.half = Half.WHOLE if plan.region is None else Half.PREFIX
        self.replaced = frozenset(name for site in plan.sites for name in site.layers)
        self.chain = trt.constant(network, np.zeros(1, np.int32), name=names.CHAIN_START)
        self.tokens_ref = graph.tensors[plan.tokens_ref]
        if plan.batch_ref is None:
            self.batch_ref = trt.constant(network, np.zeros(1, np.int32), name=names.ONE_SEQUENCE)
        else:
            self.batch_ref = graph.tensors[plan.batch_ref]
        self.table = plan.options.table.pack()
        self.weave_hash = plan.hash()
        #: Tensors of the network as it was that a fused operation now puts out.
        self.current: dict[str, Any] = {}
        self.gathered = False

    def tensor(self, name: str) -> Any:
        """What stands for a tensor of the network as it was."""
        return self.current.get(name, self.graph.tensors[name])

    def replace(self, index: int, starts: bool) -> None:
        """Put the fused operation in a site's place; ``starts``: it takes the full residual."""
        site = self.plan.sites[index]
        x, held = self.tensor(site.x), self.tensor(site.residual)
        # Before the readers move: a reader outside the sites needs every row of the residual.
        gather = any(reader.name not in self.replaced for reader, _ in self.graph.live_readers(site.sum))
        fields: dict[str, FieldValue] = {
            "group": np.asarray(site.group, np.int32),
            "tp_rank": self.plan.options.mapping.tp_rank,
            "type_id": recorder.DataType[self.graph.dtype(site.residual)].value,
            "eps": site.eps,
            "kind": int(site.kind),
            "site": index,
            "half": int(self.half),
            "residual_sharded": int(not starts and not self.gathered),
            "gather_residual": int(gather),
            "has_bias": int(site.bias is not None),
            "side_stream": int(self.plan.region is not None),
            "last": int(index == len(self.plan.sites) - 1),
            "weave_hash": self.weave_hash,
            "table": self.table,
        }
        vectors = [self._flat(site, "gamma", site.gamma)]
        if site.bias is not None:
            vectors.append(self._flat(site, "bias", site.bias))
        layer = trt.add_plugin(
            self.network,
            (ALL_REDUCE_RMS_NORM, VERSION, NAMESPACE),
            names.start(index, self.half),
            fields,
            [x, held, *vectors, self.tokens_ref, self.batch_ref, self.chain],
        )
        outputs = [layer.get_output(i) for i in range(3)]
        if self.plan.region is not None:
            join = trt.add_plugin(
                self.network,
                (STREAM_JOIN, VERSION, NAMESPACE),
                names.join(index, self.half),
                {"num_aliased": 2, "site": index, "half": int(self.half), "waits": 1},
                [*outputs[:2], x, held, outputs[2]],
            )
            outputs = [join.get_output(i) for i in range(3)]
        self.current[site.normed], self.current[site.sum], self.chain = outputs
        self.gathered = gather
        trt.redirect(self.network, self.graph, site.sum, self.current[site.sum], self.replaced)
        trt.redirect(self.network, self.graph, site.normed, self.current[site.normed], frozenset(site.layers))

    def _flat(self, site: FusionSite, role: str, name: str) -> Any:
        """A vector as [hidden]; a reshape that TensorRT folds where it is stored as [1, hidden]."""
        tensor = self.graph.tensors[name]
        if len(tensor.shape) == 1:
            return tensor
        layer = self.network.add_shuffle(tensor)
        layer.reshape_dims = (tensor.shape[-1],)
        layer.name = f"{site.all_reduce}/tokenweave_{role}"
        return layer.get_output(0)
