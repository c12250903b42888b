"""Small operations that add layers to a network, each in the form and under the names of TensorRT-LLM's.

A layer is named by its place in the model and its kind: ``<module path>/<KIND>_<n>``; its outputs are
``<layer>_output_<i>``. TensorRT-LLM works out most shapes inside the network, so a constant is brought to the rank
of its partner by SHAPE, GATHER and CONCATENATION layers that TensorRT folds while building; they are kept here
because the networks that users weave have them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave import trt as seam
from trtllm_tokenweave.recorder.enums import DataType, numpy_dtype
from trtllm_tokenweave.recorder.plugin import FieldValue, PluginKey
from trtllm_tokenweave.recorder.tensor import Shape


class Ops:
    """Adds named layers to one network."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.trt = seam.object_model(network)
        self._scope = ""
        self._counts: Counter[str] = Counter()
        self._small: dict[tuple[Any, ...], NDArray[Any]] = {}
        self._parameters: dict[str, Any] = {}

    @contextmanager
    def module(self, name: str) -> Iterator[None]:
        """Name the layers added inside as children of module ``name``."""
        outer = self._scope
        self._scope = f"{outer}/{name}" if outer else name
        try:
            yield
        finally:
            self._scope = outer

    def _next_name(self, kind: str) -> str:
        key = f"{self._scope}/{kind}" if self._scope else kind
        number = self._counts[key]
        self._counts[key] = number + 1
        return f"{key}_{number}"

    def _named(self, layer: Any, kind: str) -> Any:
        name = layer.name = self._next_name(kind)
        for i in range(layer.num_outputs):
            layer.get_output(i).name = f"{name}_output_{i}"
        return layer.get_output(0)

    # ---- constants

    def constant(self, values: Sequence[float] | Sequence[int], dtype: str) -> Any:
        """A small constant of rank 1 in the DataType named ``dtype``."""
        key = (tuple(values), dtype)
        array = self._small.get(key)
        if array is None:
            array = np.asarray(values).astype(numpy_dtype(DataType[dtype]))
            self._small[key] = array
        name = self._next_name("CONSTANT")
        tensor = seam.constant(self.network, array, name=name)
        tensor.name = f"{name}_output_0"
        return tensor

    def parameter(self, name: str, array: NDArray[Any] | None, shape: Shape, dtype: str) -> Any:
        """The constant of a model parameter, made once and named as the parameter; ``array`` None: its shape only."""
        tensor = self._parameters.get(name)
        if tensor is None:
            tensor = seam.constant(self.network, array, shape, getattr(self.trt.DataType, dtype), name)
            tensor.name = f"{name}_output_0"
            self._parameters[name] = tensor
        return tensor

    # ---- shapes

    def shape(self, x: Any) -> Any:
        """Dimensions of ``x``: INT64 [rank]."""
        return self._named(self.network.add_shape(x), "SHAPE")

    def pick(self, vector: Any, index: int) -> Any:
        """Element ``index`` of a vector, as [1]."""
        return self._named(self.network.add_gather(vector, self.constant((index,), "INT32"), 0), "GATHER")

    def dimension(self, x: Any, index: int) -> Any:
        """Dimension ``index`` of ``x`` as a scalar."""
        return self.view(self.pick(self.shape(x), index), ())

    def concat(self, parts: Sequence[Any], axis: int = 0) -> Any:
        """Concatenation; Python integers become INT64 constants, scalars become [1]."""
        tensors = [self.constant((p,), "INT64") if isinstance(p, int) else p for p in parts]
        tensors = [self.view(t, (1,)) if len(t.shape) == 0 else t for t in tensors]
        layer = self.network.add_concatenation(tensors)
        layer.axis = axis
        return self._named(layer, "CONCATENATION")

    def view(self, x: Any, target: Any, zero_is_placeholder: bool = True) -> Any:
        """Reshape to static dimensions (a tuple) or to those in a shape tensor."""
        layer = self.network.add_shuffle(x)
        layer.zero_is_placeholder = zero_is_placeholder
        if isinstance(target, tuple):
            layer.reshape_dims = target
        else:
            layer.set_input(1, target)
        return self._named(layer, "SHUFFLE")

    def expand_like(self, x: Any, reference: Any) -> Any:
        """Put dimensions of 1 in front of ``x`` until it has the rank of ``reference``."""
        missing = len(reference.shape) - len(x.shape)
        if missing <= 0:
            return x
        shape = self.shape(x)
        own = [self.pick(shape, i) for i in range(len(x.shape))]
        return self.view(x, self.concat([1] * missing + own), zero_is_placeholder=False)

    def slice(self, x: Any, starts: Any, sizes: Any) -> Any:
        """Slice with step 1; starts and sizes are shape tensors."""
        rank = len(x.shape)
        layer = self.network.add_slice(x, (0,) * rank, (1,) * rank, (1,) * rank)
        layer.set_input(1, starts)
        layer.set_input(2, sizes)
        return self._named(layer, "SLICE")

    def chunk(self, x: Any, count: int, axis: int) -> list[Any]:
        """Cut a static axis into ``count`` equal parts."""
        rank, size = len(x.shape), x.shape[axis] // count
        starts = [self.constant((0,), "INT64") for _ in range(rank)]
        sizes = [self.dimension(x, i) for i in range(rank)]
        sizes[axis] = self.constant((size,), "INT64")
        parts = []
        for i in range(count):
            starts[axis] = self.constant((size * i,), "INT64")
            parts.append(self.slice(x, self.concat(starts), self.concat(sizes)))
        return parts

    # ---- arithmetic

    def elementwise(self, a: Any, b: Any, op: str) -> Any:
        """Binary operation; a Python number ``b`` becomes a constant of ``a``'s dtype."""
        if isinstance(b, int | float):
            b = self.constant((b,), a.dtype.name)
        a, b = self.expand_like(a, b), self.expand_like(b, a)
        layer = self.network.add_elementwise(a, b, getattr(self.trt.ElementWiseOperation, op))
        return self._named(layer, f"ELEMENTWISE_{op}")

    def cast(self, x: Any, dtype: str) -> Any:
        """Conversion; no layer where the dtype is the same."""
        if x.dtype.name == dtype:
            return x
        return self._named(self.network.add_cast(x, getattr(self.trt.DataType, dtype)), "CAST")

    def mean(self, x: Any) -> Any:
        """Mean over the last axis, which stays as 1."""
        axes = 1 << (len(x.shape) - 1)
        return self._named(self.network.add_reduce(x, self.trt.ReduceOperation.AVG, axes, True), "REDUCE_AVG")

    def sqrt(self, x: Any) -> Any:
        """Square root."""
        return self._named(self.network.add_unary(x, self.trt.UnaryOperation.SQRT), "UNARY_SQRT")

    def sigmoid(self, x: Any) -> Any:
        """1 / (1 + exp(-x)); TensorRT-LLM names activation layers by their function."""
        return self._named(self.network.add_activation(x, self.trt.ActivationType.SIGMOID), "SIGMOID")

    def relu(self, x: Any) -> Any:
        """max(x, 0)."""
        return self._named(self.network.add_activation(x, self.trt.ActivationType.RELU), "RELU")

    def softmax(self, x: Any) -> Any:
        """Softmax over the last axis."""
        layer = self.network.add_softmax(x)
        layer.axes = 1 << (len(x.shape) - 1)
        return self._named(layer, "SOFTMAX")

    def topk(self, x: Any, k: int) -> tuple[Any, Any]:
        """The k largest along the last axis, and where they were (INT32)."""
        layer = self.network.add_topk(x, self.trt.TopKOperation.MAX, k, 1 << (len(x.shape) - 1))
        return self._named(layer, "TOPK"), layer.get_output(1)

    def gather(self, x: Any, indices: Any) -> Any:
        """Rows of ``x``."""
        return self._named(self.network.add_gather(x, indices, 0), "GATHER")

    def matmul(self, x: Any, weight: Any) -> Any:
        """x times the transposed weight [out, in]; float16 is computed in float32, as TensorRT-LLM asks for."""
        wide = x.dtype.name == "HALF"
        if wide:
            x, weight = self.cast(x, "FLOAT"), self.cast(weight, "FLOAT")
        ops = self.trt.MatrixOperation
        layer = self.network.add_matrix_multiply(x, ops.NONE, weight, ops.TRANSPOSE)
        out = self._named(layer, "MATRIX_MULTIPLY")
        return self.cast(out, "HALF") if wide else out

    # ---- plugins

    def plugin(self, key: PluginKey, fields: Mapping[str, FieldValue], inputs: list[Any]) -> list[Any]:
        """Add a V2 plugin layer; returns its outputs."""
        layer = seam.add_plugin(self.network, key, self._next_name(f"PLUGIN_V2_{key[0]}"), fields, inputs)
        outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
        for i, output in enumerate(outputs):
            output.name = f"{layer.name}_output_{i}"
        return outputs
