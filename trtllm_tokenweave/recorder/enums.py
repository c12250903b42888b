"""Enumerations of the TensorRT object model, spelled as the ``tensorrt`` Python module spells them.

Code that must run on both object models compares members by *name*: the numeric values of the real module
differ between releases and are never stored.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.errors import UserError


class DataType(enum.Enum):
    """Element types of tensors and weights."""

    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9

    @property
    def itemsize(self) -> int:
        """Bytes per element (INT4 is counted as one)."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    DataType.FLOAT: 4,
    DataType.HALF: 2,
    DataType.INT8: 1,
    DataType.INT32: 4,
    DataType.BOOL: 1,
    DataType.UINT8: 1,
    DataType.FP8: 1,
    DataType.BF16: 2,
    DataType.INT64: 8,
    DataType.INT4: 1,
}


class LayerType(enum.Enum):
    """Kinds of layers that a :class:`RecordedNetwork` can hold."""

    CAST = enum.auto()
    ACTIVATION = enum.auto()
    SOFTMAX = enum.auto()
    CONCATENATION = enum.auto()
    ELEMENTWISE = enum.auto()
    UNARY = enum.auto()
    SHUFFLE = enum.auto()
    REDUCE = enum.auto()
    TOPK = enum.auto()
    GATHER = enum.auto()
    MATRIX_MULTIPLY = enum.auto()
    CONSTANT = enum.auto()
    IDENTITY = enum.auto()
    PLUGIN_V2 = enum.auto()
    SLICE = enum.auto()
    SHAPE = enum.auto()
    SELECT = enum.auto()
    PLUGIN_V3 = enum.auto()


class ElementWiseOperation(enum.Enum):
    """Operations of an element-wise layer."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    SUB = 4
    DIV = 5
    POW = 6
    FLOOR_DIV = 7
    AND = 8
    OR = 9
    XOR = 10
    EQUAL = 11
    GREATER = 12
    LESS = 13


class UnaryOperation(enum.Enum):
    """Operations of a unary layer."""

    EXP = 0
    LOG = 1
    SQRT = 2
    RECIP = 3
    ABS = 4
    NEG = 5
    SIN = 6
    COS = 7
    FLOOR = 15
    ERF = 16
    NOT = 17


class ReduceOperation(enum.Enum):
    """Operations of a reduce layer."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


class ActivationType(enum.Enum):
    """Functions of an activation layer."""

    RELU = 0
    SIGMOID = 1
    TANH = 2


class MatrixOperation(enum.Enum):
    """How a matrix-multiply operand is read."""

    NONE = 0
    TRANSPOSE = 1
    VECTOR = 2


class GatherMode(enum.Enum):
    """Indexing mode of a gather layer (only DEFAULT is recorded)."""

    DEFAULT = 0
    ELEMENT = 1
    ND = 2


class TopKOperation(enum.Enum):
    """Which end a top-k layer keeps."""

    MAX = 0
    MIN = 1


class SampleMode(enum.Enum):
    """Out-of-bounds behaviour of a slice (only STRICT_BOUNDS is recorded)."""

    STRICT_BOUNDS = 0


class TensorLocation(enum.Enum):
    """Where a tensor lives."""

    DEVICE = 0
    HOST = 1


class PluginFieldType(enum.Enum):
    """Element types of plugin fields."""

    FLOAT16 = 0
    FLOAT32 = 1
    FLOAT64 = 2
    INT8 = 3
    INT16 = 4
    INT32 = 5
    CHAR = 6
    DIMS = 7
    UNKNOWN = 8
    BF16 = 9
    INT64 = 10


class TensorRTPhase(enum.Enum):
    """When a V3 plugin is created."""

    BUILD = 0
    RUNTIME = 1


class NetworkDefinitionCreationFlag(enum.Enum):
    """Flags of a network; recorded networks are always strongly typed."""

    STRONGLY_TYPED = 1


FLOATS = frozenset({DataType.FLOAT, DataType.HALF, DataType.BF16})
INTEGERS = frozenset({DataType.INT32, DataType.INT64})

_NUMPY_NAMES = {
    DataType.FLOAT: "float32",
    DataType.HALF: "float16",
    DataType.INT8: "int8",
    DataType.INT32: "int32",
    DataType.BOOL: "bool",
    DataType.UINT8: "uint8",
    DataType.FP8: "float8_e4m3fn",
    DataType.BF16: "bfloat16",
    DataType.INT64: "int64",
}
_FROM_NUMPY = {name: member for member, name in _NUMPY_NAMES.items()}
TRT_NAMES = {"float32": DataType.FLOAT, "float16": DataType.HALF, "bfloat16": DataType.BF16}


def numpy_dtype(dtype: DataType) -> np.dtype[Any]:
    """Return the numpy dtype that stores ``dtype`` (bfloat16 and fp8 through ml-dtypes).

    Raises:
        UserError: for INT4, which numpy cannot store.
    """
    name = _NUMPY_NAMES.get(dtype)
    if name is None:
        raise UserError(f"{dtype.name} has no numpy dtype", where="tensor")
    if dtype in (DataType.BF16, DataType.FP8):
        import ml_dtypes

        low: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return low
    return np.dtype(name)


def dtype_of(array: NDArray[Any], where: str = "weights", *, wanted: str = "") -> DataType:
    """Return the :class:`DataType` of a numpy array.

    Args:
        array: The array.
        where: What an error names: where the array is from.
        wanted: The dtype that an error asks for; any that TensorRT has where it is left out.

    Raises:
        UserError: for a numpy dtype that TensorRT has no name for.
    """
    found = _FROM_NUMPY.get(array.dtype.name)
    if found is None:
        fix = "give " + (wanted or f"one of {', '.join(_FROM_NUMPY)}")
        raise UserError(f"numpy dtype {array.dtype} has no TensorRT DataType", where=where, fix=fix)
    return found
