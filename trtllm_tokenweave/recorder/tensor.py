"""Tensors and weights of a recorded network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.recorder.enums import DataType, TensorLocation, dtype_of

if TYPE_CHECKING:
    from trtllm_tokenweave.recorder.layers import ILayer
    from trtllm_tokenweave.recorder.network import RecordedNetwork

Shape = tuple[int, ...]

#: Element values of a small integer tensor, None where they are only known at run time.
Values = tuple[int | None, ...]

#: TensorRT evaluates shape tensors on the host and goes wrong in silence above this many elements.
MAX_SHAPE_TENSOR_ELEMENTS = 64


class NetworkError(UserError):
    """A network that TensorRT would refuse; ``where`` names the layer or tensor."""


@dataclass(frozen=True)
class TensorDesc:
    """Dtype and shape of a tensor (-1: known at run time); ``values`` of small integer tensors if known."""

    dtype: DataType
    shape: Shape
    values: Values | None = None


class Weights:
    """Values of a constant: a numpy array, or dtype and element count only (planning without weights).

    Args:
        source: The array (kept by reference, never copied), or a DataType for weights without values.
        count: Number of elements when ``source`` is a DataType.
    """

    def __init__(self, source: NDArray[Any] | DataType, count: int | None = None) -> None:
        if isinstance(source, DataType):
            self.array: NDArray[Any] | None = None
            self.dtype = source
            self.size = int(count or 0)
        else:
            self.array = source
            self.dtype = dtype_of(source)
            self.size = source.size

    @property
    def nbytes(self) -> int:
        """Size in bytes, also when the values are absent."""
        return self.size * self.dtype.itemsize

    def numpy(self) -> NDArray[Any]:
        """Return the values.

        Raises:
            NetworkError: when the network was built from shapes only.
        """
        if self.array is None:
            raise NetworkError("the constant has a shape but no values", fix="build the network from a checkpoint")
        return self.array


class ITensor:
    """A tensor: made by :meth:`RecordedNetwork.add_input` or by a layer, never directly."""

    __slots__ = ("_dims", "consumers", "desc", "index", "is_network_input", "is_network_output", "name", "producer")

    def __init__(self, name: str, desc: TensorDesc, producer: ILayer | None = None, index: int = 0) -> None:
        self.name = name
        self.desc = desc
        self.producer = producer
        self.index = index
        self.consumers: list[tuple[ILayer, int]] = []
        self.is_network_input = producer is None
        self.is_network_output = False
        self._dims: dict[int, str] = {}

    @property
    def dtype(self) -> DataType:
        """Element type."""
        return self.desc.dtype

    @property
    def shape(self) -> Shape:
        """Dimensions; -1 where known only at run time."""
        return self.desc.shape

    @property
    def location(self) -> TensorLocation:
        """Always DEVICE, as TensorRT-LLM declares even the tensors it binds to host memory."""
        return TensorLocation.DEVICE

    def set_dimension_name(self, index: int, name: str) -> None:
        """Name dimension ``index`` of a network input; equal names must have equal sizes at run time."""
        if not self.is_network_input:
            raise NetworkError("only dimensions of network inputs can be named", where=self.name)
        if not 0 <= index < len(self.shape):
            raise NetworkError(f"dimension {index} is outside rank {len(self.shape)}", where=self.name)
        self._dims[index] = name

    def get_dimension_name(self, index: int) -> str | None:
        """Return the name of dimension ``index``, None where it has none."""
        return self._dims.get(index)

    def __repr__(self) -> str:
        return f"ITensor({self.name!r}, {self.dtype.name}, {self.shape})"


def volume(shape: Shape) -> int | None:
    """Number of elements, None when a dimension is dynamic."""
    return None if any(d < 0 for d in shape) else math.prod(shape)


def check_shape_tensor(tensor: ITensor, network: RecordedNetwork) -> None:
    """Refuse a shape tensor that TensorRT would evaluate wrongly.

    Walks from ``tensor`` to the SHAPE layers and inputs that it is computed from. TensorRT 10.6 evaluates such
    tensors on the host only up to 64 elements; above, dimensions become data-dependent and results are wrong
    without any error.

    Raises:
        NetworkError: for a non-integer tensor, or more than 64 (or unknown many) elements.
    """
    todo, checked = [tensor], set[ITensor]()
    while todo:
        t = todo.pop()
        if t in network.shape_tensors or t in checked:
            continue
        size = volume(t.shape)
        if size is None or size > MAX_SHAPE_TENSOR_ELEMENTS:
            raise NetworkError(
                f"shape tensor {t.name!r} has {size or 'unknown many'} elements, at most "
                f"{MAX_SHAPE_TENSOR_ELEMENTS} are evaluated correctly by TensorRT",
                where=tensor.name,
                fix="cut the constant into several of at most 64 elements joined by comparisons",
            )
        if t is tensor and t.dtype not in (DataType.INT32, DataType.INT64):
            raise NetworkError(f"shape tensor has dtype {t.dtype.name}, expected INT32 or INT64", where=t.name)
        checked.add(t)
        if t.producer is not None and t.producer.layer_type.name != "SHAPE":
            todo.extend(i for i in t.producer.inputs if i is not None)
    network.shape_tensors |= checked
