"""A small tensor-parallel stack built by hand: sites as TensorRT-LLM emits them, without attention plugins.

Every variant that the pass must refuse or accept can be switched on by name, so that a test says exactly what is
unusual about its network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave import trt as seam
from trtllm_tokenweave.comm import LocalComm, run_ranks
from trtllm_tokenweave.interpreter import ExecutionContext, Schedule
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.passes import WeaveOptions
from trtllm_tokenweave.table import TableKey, TuningTable

PLAIN = trt.MatrixOperation.NONE

#: Called after each site with (builder, site index, all-reduce result, sum, normed): adds the unusual layers.
Twist = Callable[["Stack", int, trt.ITensor, trt.ITensor], None]


def _out(layer: Any, index: int = 0) -> trt.ITensor:
    tensor: trt.ITensor = layer.get_output(index)
    return tensor


@dataclass
class Stack:
    """Builds ``layers`` x 2 sites on one rank; weights are small integers unless ``scale`` says otherwise."""

    tp_size: int = 2
    rank: int = 0
    layers: int = 2
    hidden: int = 16
    ffn: int = 24
    dtype: trt.DataType = trt.float32
    seed: int = 0
    scale: float = 1.0
    fused: bool = False
    bias: bool = False
    multiplier: float | None = None
    twist: Twist | None = None
    inner: Callable[[Stack, int, trt.ITensor], trt.ITensor] | None = None
    #: An empty network; TensorRT's own does as well.
    network: trt.RecordedNetwork = field(default_factory=trt.RecordedNetwork)

    @property
    def model(self) -> Any:
        """The network's object model."""
        return seam.object_model(self.network)

    def const(self, values: Any, name: str, dtype: trt.DataType | None = None) -> trt.ITensor:
        """A named constant of the stack's dtype."""
        array = np.asarray(values).astype(trt.numpy_dtype(dtype or self.dtype))
        tensor: trt.ITensor = seam.constant(self.network, array, name=name)
        return tensor

    def binary(self, a: trt.ITensor, b: trt.ITensor, op: str) -> trt.ITensor:
        """Element-wise operation by name."""
        return _out(self.network.add_elementwise(a, b, getattr(self.model.ElementWiseOperation, op)))

    def cast(self, a: trt.ITensor, dtype: trt.DataType) -> trt.ITensor:
        """A cast, no layer where the dtype fits already."""
        if a.dtype.name == dtype.name:
            return a
        return _out(self.network.add_cast(a, getattr(self.model.DataType, dtype.name)))

    def matmul(self, a: trt.ITensor, b: trt.ITensor) -> trt.ITensor:
        """Product of two matrices."""
        plain = self.model.MatrixOperation.NONE
        return _out(self.network.add_matrix_multiply(a, plain, b, plain))

    def gamma(self, index: int) -> NDArray[Any]:
        """Norm weights: powers of two, so that scaling by them rounds nothing."""
        return 2.0 ** np.random.default_rng([self.seed, 77, index]).integers(-1, 2, self.hidden)

    def norm(self, x: trt.ITensor, index: int) -> trt.ITensor:
        """The RMSNorm layer chain, as TensorRT-LLM emits it."""
        n, f32 = self.network, trt.float32
        wide = self.cast(x, f32)
        square = self.binary(wide, self.const([[2.0]], f"norm{index}/two", f32), "POW")
        mean = _out(n.add_reduce(square, self.model.ReduceOperation.AVG, 2, True))
        plus = self.binary(mean, self.const([[1e-5]], f"norm{index}/eps", f32), "SUM")
        root = _out(n.add_unary(plus, self.model.UnaryOperation.SQRT))
        narrow = self.cast(self.binary(wide, root, "DIV"), self.dtype)
        return self.binary(narrow, self.norm_weight(index), "PROD")

    def norm_weight(self, index: int) -> trt.ITensor:
        """The norm's weight as [1, hidden], reshaped from [hidden] as TensorRT-LLM stores it."""
        shuffle = self.network.add_shuffle(self.const(self.gamma(index), f"norm{index}/gamma"))
        shuffle.reshape_dims = (1, self.hidden)
        return _out(shuffle)

    def weight(self, name: str, index: int, shape: tuple[int, int]) -> trt.ITensor:
        """This rank's part of a weight; the same on every build with this seed."""
        draws = np.random.default_rng([self.seed, index, *map(ord, name)]).integers(-2, 3, (self.tp_size, *shape))
        return self.const(draws[self.rank] * self.scale, f"site{index}/{name}")

    def build(self) -> trt.RecordedNetwork:
        """Record the network: input x [tokens, hidden], output out."""
        n = self.network
        x = n.add_input("x", getattr(self.model.DataType, self.dtype.name), (-1, self.hidden))
        x.set_dimension_name(0, "num_tokens")
        h, y = x, self.norm(x, 0)
        for index in range(2 * self.layers):
            kind = ("attention/dense", "mlp/proj")[index % 2]
            up = self.matmul(y, self.weight("up", index, (self.hidden, self.ffn)))
            act = _out(n.add_activation(up, self.model.ActivationType.RELU))
            if self.inner is not None:
                act = self.inner(self, index, act)
            partial = self.matmul(act, self.weight("down", index, (self.ffn, self.hidden)))
            h, y = self.site(index, kind, partial, h)
        y.name = "out"
        n.mark_output(y)
        return n

    def site(self, index: int, kind: str, x: trt.ITensor, h: trt.ITensor) -> tuple[trt.ITensor, trt.ITensor]:
        """One site in plain or fused form; returns (sum, normed)."""
        name = f"layers/{index // 2}/{kind}/PLUGIN_V2_AllReduce"
        fields: dict[str, Any] = dict.fromkeys(("strategy", "fusion_op", "affine", "bias", "scale"), 0)
        fields |= {"group": np.arange(self.tp_size), "type_id": self.dtype.value, "eps": 1e-5}
        key = ("AllReduce", "1", "tensorrt_llm")
        if self.fused:
            fields |= {"fusion_op": 1, "affine": 1}
            gamma = self.const(self.gamma(index + 1), f"norm{index + 1}/gamma")
            layer = seam.add_plugin(self.network, key, name, fields, [x, h, gamma])
            reduced, normed, total = _out(layer), _out(layer), _out(layer, 1)
        else:
            layer = seam.add_plugin(self.network, key, name, fields, [x])
            reduced = branch = _out(layer)
            if self.bias:
                values = np.random.default_rng([self.seed, 5, index]).integers(-3, 4, (1, self.hidden))
                branch = self.binary(branch, self.const(values, f"site{index}/bias"), "SUM")
            if self.multiplier is not None:
                branch = self.binary(branch, self.const([[self.multiplier]], f"site{index}/multiplier"), "PROD")
            total = self.binary(h, branch, "SUM")
            normed = self.norm(total, index + 1)
        if self.twist is not None:
            self.twist(self, index, reduced, total)
        return total, normed


def table(tp_size: int = 2, granularity: int = 16, min_tokens: int = 1, **fields: Any) -> TuningTable:
    """A tuning table of the default rule that splits small steps."""
    key = TableKey(gpu="any", tp_size=tp_size, hidden_size=16, dtype="float32", model_kind="dense")
    return TuningTable(key=key, granularity=granularity, min_tokens=min_tokens, rows=fields.pop("rows", ()), **fields)


def options(tp_size: int = 2, rank: int = 0, **fields: Any) -> WeaveOptions:
    """Options of the pass for a stack."""
    values: dict[str, Any] = {"max_batch_size": 8, "max_num_tokens": 256, "table": table(tp_size)} | fields
    return WeaveOptions(mapping=Mapping(tp_size, rank, tp_size), **values)


def run(
    networks: list[trt.RecordedNetwork],
    inputs: dict[str, NDArray[Any]],
    *,
    exact: bool = False,
    seed: int | None = None,
) -> list[dict[str, NDArray[Any]]]:
    """Run one network per rank on the same inputs; ``seed`` turns the adversarial simulation on."""
    comms = LocalComm.group(len(networks))

    def job(rank: int) -> dict[str, NDArray[Any]]:
        schedule = None if seed is None else Schedule(seed * 1009 + rank)
        return ExecutionContext(networks[rank], comms[rank], exact=exact, schedule=schedule).run(inputs)

    return run_ranks([lambda r=rank: job(r) for rank in range(len(networks))])  # type: ignore[misc]
