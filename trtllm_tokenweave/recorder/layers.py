"""Layer classes of a recorded network; each knows its attributes and the shapes and dtypes of its outputs."""

# ruff: noqa: D102 - what the overridden methods of the layer classes do is said in their base, ILayer.
from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from trtllm_tokenweave.recorder import rules
from trtllm_tokenweave.recorder.enums import (
    INTEGERS,
    ActivationType,
    DataType,
    ElementWiseOperation,
    GatherMode,
    LayerType,
    MatrixOperation,
    ReduceOperation,
    SampleMode,
    TopKOperation,
    UnaryOperation,
)
from trtllm_tokenweave.recorder.tensor import ITensor, NetworkError, Shape, TensorDesc, Weights

if TYPE_CHECKING:
    from trtllm_tokenweave.recorder.network import RecordedNetwork


class ILayer:
    """Base of all layers. Assigning an attribute named in ``ATTRS`` re-infers the outputs."""

    layer_type: ClassVar[LayerType]
    ATTRS: ClassVar[tuple[str, ...]] = ()
    #: Input positions that TensorRT evaluates on the host while it works out shapes.
    SHAPE_INPUTS: ClassVar[tuple[int, ...]] = ()

    def __init__(self, network: RecordedNetwork, inputs: list[ITensor], **attrs: Any) -> None:
        self._ready = False
        self.network = network
        self.inputs: list[ITensor | None] = list(inputs)
        self.outputs: list[ITensor] = []
        self.metadata = ""
        self._name: str | None = None
        self.index = len(network.layers)
        self.__dict__.update(attrs)

    def __setattr__(self, key: str, value: Any) -> None:
        if key not in self.ATTRS or not self.__dict__.get("_ready"):
            object.__setattr__(self, key, value)
            return
        before = self.__dict__[key]
        self.__dict__[key] = value
        try:
            self.network.reinfer(self)
        except NetworkError:
            self.__dict__[key] = before
            self.network.reinfer(self)
            raise

    @property
    def name(self) -> str:
        """Name of the layer; TensorRT's default until one is set."""
        return self._name or f"(Unnamed Layer* {self.index}) [{self.layer_type.name}]"

    @name.setter
    def name(self, value: str) -> None:
        self._name = value

    @property
    def type(self) -> Any:
        """The LayerType (an activation layer shows its ActivationType instead, as in TensorRT)."""
        return self.layer_type

    @property
    def num_inputs(self) -> int:
        """Number of input positions."""
        return len(self.inputs)

    @property
    def num_outputs(self) -> int:
        """Number of outputs."""
        return len(self.outputs)

    def get_input(self, index: int) -> ITensor | None:
        """Return input ``index``; None past the end or where none is connected."""
        return self.inputs[index] if 0 <= index < len(self.inputs) else None

    def get_output(self, index: int) -> ITensor | None:
        """Return output ``index``; None past the end."""
        return self.outputs[index] if 0 <= index < len(self.outputs) else None

    def set_input(self, index: int, tensor: ITensor) -> None:
        """Connect ``tensor`` to input ``index``; slices and shuffles grow dynamic inputs this way.

        Raises:
            NetworkError: when the outputs can no longer be inferred; the network is then unchanged.
        """
        self.network.set_layer_input(self, index, tensor)

    def max_inputs(self) -> int:
        """Highest number of inputs that ``set_input`` may grow the layer to."""
        return len(self.inputs)

    def infer(self) -> list[TensorDesc]:
        """Return the descriptions of the outputs, or refuse."""
        raise NotImplementedError

    def fail(self, what: str) -> NoReturn:
        """Raise a NetworkError that names this layer."""
        raise NetworkError(what, where=f"layer {self.name}")

    def producers(self) -> set[ILayer]:
        """The layers whose outputs this one reads."""
        return {t.producer for t in self.inputs if t is not None and t.producer is not None}

    def desc(self, index: int) -> TensorDesc:
        """Description of a required input."""
        tensor = self.get_input(index)
        if tensor is None:
            self.fail(f"input {index} is not connected")
        return tensor.desc

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


class IConstantLayer(ILayer):
    """A constant; its weights are shared by reference."""

    layer_type = LayerType.CONSTANT
    ATTRS = ("shape",)
    shape: Shape
    weights: Weights

    def infer(self) -> list[TensorDesc]:
        return [rules.constant(self)]


class ICastLayer(ILayer):
    """Conversion to another dtype."""

    layer_type = LayerType.CAST
    ATTRS = ("to_type",)
    to_type: DataType

    def infer(self) -> list[TensorDesc]:
        source = self.desc(0)
        return [TensorDesc(self.to_type, source.shape, rules.values_as(self.to_type, source.values))]


class IIdentityLayer(ILayer):
    """A copy."""

    layer_type = LayerType.IDENTITY

    def infer(self) -> list[TensorDesc]:
        return [self.desc(0)]


class IActivationLayer(ILayer):
    """An element-wise activation; ``type`` is the ActivationType."""

    layer_type = LayerType.ACTIVATION
    ATTRS = ("activation", "alpha", "beta")
    activation: ActivationType
    alpha: float
    beta: float

    @property
    def type(self) -> Any:
        return self.activation

    def infer(self) -> list[TensorDesc]:
        return [rules.float_like(self)]


class IElementWiseLayer(ILayer):
    """A binary operation with broadcasting between equal ranks."""

    layer_type = LayerType.ELEMENTWISE
    ATTRS = ("op",)
    op: ElementWiseOperation

    def infer(self) -> list[TensorDesc]:
        return [rules.elementwise(self)]


class IUnaryLayer(ILayer):
    """A unary operation."""

    layer_type = LayerType.UNARY
    ATTRS = ("op",)
    op: UnaryOperation

    def infer(self) -> list[TensorDesc]:
        if self.op is UnaryOperation.NOT:
            if self.desc(0).dtype is not DataType.BOOL:
                self.fail("NOT needs BOOL")
            return [self.desc(0)]
        if self.op in (UnaryOperation.ABS, UnaryOperation.NEG) and self.desc(0).dtype in INTEGERS:
            return [TensorDesc(self.desc(0).dtype, self.desc(0).shape)]
        return [rules.float_like(self)]


class IReduceLayer(ILayer):
    """A reduction over the axes set in the bit mask ``axes``."""

    layer_type = LayerType.REDUCE
    ATTRS = ("op", "axes", "keep_dims")
    op: ReduceOperation
    axes: int
    keep_dims: bool

    def infer(self) -> list[TensorDesc]:
        return [rules.reduce(self)]


class ISoftMaxLayer(ILayer):
    """Softmax over the single axis set in ``axes``."""

    layer_type = LayerType.SOFTMAX
    ATTRS = ("axes",)
    axes: int

    def infer(self) -> list[TensorDesc]:
        rules.axes_of(self, self.axes)
        return [rules.float_like(self)]


class ITopKLayer(ILayer):
    """The k largest or smallest along the axis in ``axes``: values, then INT32 indices."""

    layer_type = LayerType.TOPK
    ATTRS = ("op", "k", "axes")
    op: TopKOperation
    k: int
    axes: int

    def infer(self) -> list[TensorDesc]:
        return rules.topk(self)


class IMatrixMultiplyLayer(ILayer):
    """Batched matrix product of operands with equal rank."""

    layer_type = LayerType.MATRIX_MULTIPLY
    ATTRS = ("op0", "op1")
    op0: MatrixOperation
    op1: MatrixOperation

    def infer(self) -> list[TensorDesc]:
        return [rules.matrix_multiply(self)]


class IConcatenationLayer(ILayer):
    """Concatenation along ``axis``."""

    layer_type = LayerType.CONCATENATION
    ATTRS = ("axis",)
    axis: int
    axis_given: bool = False

    def __setattr__(self, key: str, value: Any) -> None:
        if key == "axis" and self.__dict__.get("_ready"):
            self.__dict__["axis_given"] = True
        super().__setattr__(key, value)

    def infer(self) -> list[TensorDesc]:
        return [rules.concatenation(self)]


class IShuffleLayer(ILayer):
    """Transpose, reshape (static ``reshape_dims`` or input 1), transpose."""

    layer_type = LayerType.SHUFFLE
    ATTRS = ("first_transpose", "reshape_dims", "second_transpose", "zero_is_placeholder")
    SHAPE_INPUTS = (1,)
    first_transpose: Shape | None
    reshape_dims: Shape | None
    second_transpose: Shape | None
    zero_is_placeholder: bool

    def max_inputs(self) -> int:
        return 2

    def infer(self) -> list[TensorDesc]:
        return [rules.shuffle(self)]


class ISliceLayer(ILayer):
    """A slice; inputs 1, 2, 3 override ``start``, ``shape`` and ``stride``."""

    layer_type = LayerType.SLICE
    ATTRS = ("start", "shape", "stride", "mode")
    SHAPE_INPUTS = (1, 2, 3)
    start: Shape
    shape: Shape
    stride: Shape
    mode: SampleMode

    def max_inputs(self) -> int:
        return 4

    def infer(self) -> list[TensorDesc]:
        return [rules.slice_(self)]


class IGatherLayer(ILayer):
    """Gather of whole slices along ``axis`` by integer indices."""

    layer_type = LayerType.GATHER
    ATTRS = ("axis", "mode", "num_elementwise_dims")
    axis: int
    mode: GatherMode
    num_elementwise_dims: int

    def infer(self) -> list[TensorDesc]:
        return [rules.gather(self)]


class IShapeLayer(ILayer):
    """The dimensions of a tensor as INT64."""

    layer_type = LayerType.SHAPE

    def infer(self) -> list[TensorDesc]:
        shape = self.desc(0).shape
        return [TensorDesc(DataType.INT64, (len(shape),), tuple(d if d >= 0 else None for d in shape))]


class ISelectLayer(ILayer):
    """Element-wise choice between two tensors by a BOOL condition."""

    layer_type = LayerType.SELECT

    def infer(self) -> list[TensorDesc]:
        return [rules.select(self)]
