"""A read-only view of a network as a graph: who produces and who reads each tensor, what is live.

Works on TensorRT's object model, real or recorded. A view is a snapshot: take a new one after an edit. Tensors
are identified by their names, which TensorRT keeps unique.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from trtllm_tokenweave import trt
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.recorder.plugin import Fields, PluginKey
from trtllm_tokenweave.topology import producers_first

#: Inputs that, where connected, take the place of an attribute; TensorRT then warns of each reading of it.
_REPLACES = {
    ("SHUFFLE", "reshape_dims"): 1,
    ("SLICE", "start"): 1,
    ("SLICE", "shape"): 2,
    ("SLICE", "stride"): 3,
}


@dataclass(eq=False, slots=True)
class Node:
    """One layer: ``inputs`` and ``outputs`` are tensor names (None: an input that is not connected)."""

    index: int
    layer: Any
    kind: str
    inputs: list[str | None]
    outputs: list[str]
    plugin_key: PluginKey | None = None
    _fields: Fields | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Layer name."""
        return str(self.layer.name)

    @property
    def plugin_name(self) -> str:
        """Creator name of a plugin layer, else an empty string."""
        return self.plugin_key[0] if self.plugin_key else ""

    @property
    def fields(self) -> Fields:
        """Fields of a plugin layer."""
        return self._fields or {}

    def op(self) -> str:
        """Name of the layer's ``op`` ("SUM"), an empty string for layers without one."""
        op = getattr(self.layer, "op", None)
        return "" if op is None else str(op.name)

    def attribute(self, name: str) -> Any:
        """An attribute of the layer as a value that compares; None where it is not set, or an input replaces it."""
        position = _REPLACES.get((self.kind, name))
        if position is not None and position < len(self.inputs) and self.inputs[position] is not None:
            return None
        return trt.attribute(self.layer, name)

    def __hash__(self) -> int:
        return self.index


class Graph:
    """Snapshot of ``network``.

    Raises:
        UserError: when it is no network, or two layers or two tensors share a name.
    """

    def __init__(self, network: Any) -> None:
        if not hasattr(network, "num_layers"):
            fix = "give TensorRT's INetworkDefinition, or a RecordedNetwork"
            raise UserError(f"a {type(network).__name__} is no network", where="network", fix=fix)
        self.network = network
        self.nodes: list[Node] = []
        self.named: dict[str, Node] = {}
        self.tensors: dict[str, Any] = {}
        self.producer: dict[str, Node] = {}
        self.readers: dict[str, list[tuple[Node, int]]] = {}
        self._constants: dict[str, bool] = {}
        for i in range(network.num_inputs):
            self._own(network.get_input(i))
        self.inputs = list(self.tensors)
        for i in range(network.num_layers):
            self._add(i, *trt.get_layer(network, i))
        for node in self.nodes:
            for position, name in enumerate(node.inputs):
                if name is not None:
                    self.readers[name].append((node, position))
        self.outputs = [str(network.get_output(i).name) for i in range(network.num_outputs)]

    def _own(self, tensor: Any) -> str:
        name = str(tensor.name)
        if name in self.tensors:
            raise UserError("two tensors have this name", where=f"tensor {name}")
        self.tensors[name] = tensor
        self.readers[name] = []
        return name

    def _add(self, index: int, layer: Any, kind: str) -> None:
        inputs = [None if (t := layer.get_input(i)) is None else str(t.name) for i in range(layer.num_inputs)]
        outputs = [self._own(layer.get_output(i)) for i in range(layer.num_outputs)]
        node = Node(index, layer, kind, inputs, outputs)
        if node.name in self.named:
            raise UserError("two layers have this name", where=f"layer {node.name}")
        self.named[node.name] = node
        if kind in ("PLUGIN_V2", "PLUGIN_V3"):
            node.plugin_key, node._fields = trt.plugin_of(self.network, layer)
        self.nodes.append(node)
        for name in outputs:
            self.producer[name] = node

    # ---- questions

    def single_reader(self, name: str) -> Node | None:
        """The only live reader of a tensor that is no network output, else None."""
        readers = self.live_readers(name)
        return readers[0][0] if len(readers) == 1 and name not in self.outputs else None

    def live_readers(self, name: str) -> list[tuple[Node, int]]:
        """Readers of a tensor that some network output depends on."""
        return [r for r in self.readers[name] if r[0] in self.live]

    @cached_property
    def live(self) -> set[Node]:
        """Layers that some network output depends on."""
        return self.ancestors(self.outputs)

    def ancestors(self, names: Iterable[str], stop: frozenset[str] = frozenset()) -> set[Node]:
        """Layers that the tensors depend on, not looking past the tensors in ``stop``."""
        todo, found = [n for n in names if n not in stop], set[Node]()
        while todo:
            node = self.producer.get(todo.pop())
            if node is not None and node not in found:
                found.add(node)
                todo.extend(n for n in node.inputs if n is not None and n not in stop)
        return found

    def descendants(self, name: str) -> set[Node]:
        """Live layers that depend on a tensor."""
        todo, found = [name], set[Node]()
        while todo:
            for node, _ in self.readers[todo.pop()]:
                if node not in found and node in self.live:
                    found.add(node)
                    todo.extend(node.outputs)
        return found

    def between(self, entry: str, exits: Iterable[str]) -> set[Node]:
        """Live layers on a path from the tensor ``entry`` to one of ``exits``."""
        return self.descendants(entry) & self.ancestors(exits, frozenset({entry}))

    def ordered(self, nodes: set[Node] | None = None) -> list[Node]:
        """The (live, by default) layers in a topological order; ties in order of creation.

        Raises:
            UserError: when they form a cycle.
        """
        nodes = self.live if nodes is None else nodes
        producers = {n: {self.producer[t] for t in n.inputs if t is not None and t in self.producer} for n in nodes}
        return producers_first({n: found & nodes for n, found in producers.items()})

    def is_constant(self, name: str) -> bool:
        """Whether a tensor depends on constants only (TensorRT folds it while building)."""
        known = self._constants
        todo = [name]
        while todo:
            current = todo[-1]
            node = self.producer.get(current)
            if current in known:
                todo.pop()
            elif node is None or node.kind.startswith("PLUGIN"):
                known[current] = False
            else:
                inputs = [n for n in node.inputs if n is not None]
                unknown = [n for n in inputs if n not in known]
                if node.kind == "SHAPE" and all(d >= 0 for d in self.shape(inputs[0])):
                    known[current] = True
                elif unknown:
                    todo.extend(unknown)
                else:
                    known[current] = all(known[n] for n in inputs)
        return known[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; -1 where known only at run time, also for a rank that TensorRT does not know."""
        dims = trt.dims_or_none(self.tensors[name].shape)
        return (-1,) if dims is None else dims

    def elements(self, name: str) -> int:
        """Number of elements of a tensor of known shape."""
        return int(np.prod(self.shape(name), dtype=np.int64))

    def dtype(self, name: str) -> str:
        """DataType name of a tensor ("BF16")."""
        return str(self.tensors[name].dtype.name)

    def is_zero(self, name: str) -> bool:
        """Whether a tensor is a constant of two elements, as the pass makes them, and both are 0."""
        node = self.producer.get(name)
        if node is None or node.kind != "CONSTANT" or self.elements(name) != 2:
            return False
        array = trt.constant_values(self.network, node.layer)
        return array is not None and not np.any(array)

    def scalar(self, name: str) -> float | None:
        """Value of a one-element constant, seen through reshapes and casts; None when it is anything else.

        Values of constants are read here and in `is_zero` only: TensorRT-LLM fills its weights in later.
        """
        node = self.producer.get(name)
        while node is not None and node.kind in ("SHUFFLE", "CAST", "IDENTITY"):
            source = node.inputs[0]
            node = None if source is None else self.producer.get(source)
        if node is None or node.kind != "CONSTANT" or self.elements(node.outputs[0]) != 1:
            return None
        array = trt.constant_values(self.network, node.layer)
        return None if array is None else float(np.ravel(array)[0])
