"""``ExecutionContext``: checks the inputs of a step, runs it, returns the outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.interpreter.ledger import Event, Ledger
from trtllm_tokenweave.interpreter.program import Program, Step, compile_network, raise_in_layer
from trtllm_tokenweave.interpreter.registry import KernelContext
from trtllm_tokenweave.interpreter.schedule import Schedule
from trtllm_tokenweave.interpreter.simulate import simulate
from trtllm_tokenweave.recorder.enums import dtype_of
from trtllm_tokenweave.recorder.network import RecordedNetwork
from trtllm_tokenweave.recorder.tensor import ITensor

Array = NDArray[Any]


class ExecutionContext:
    """One rank of a network, ready to run. The network must not be edited afterwards.

    Args:
        network: Built with weights.
        comm: This rank's collectives.
        exact: Results do not depend on how rows are batched; slower, meant for small networks.
        schedule: Run out of order in TensorRT-like memory; None runs in recorded order.
        trace: Fill ``ledger`` in every run (always so with a schedule).
        pools: Paged KV-cache pools by address; may also be filled later through ``pools``.

    Attributes:
        ledger: Record of the last run.
        pools: See `KernelContext`.

    Raises:
        UserError: when the network cannot be run (see `compile_network`).
    """

    def __init__(
        self,
        network: RecordedNetwork,
        comm: CommBackend,
        *,
        exact: bool = False,
        schedule: Schedule | None = None,
        trace: bool = False,
        pools: dict[int, Array] | None = None,
    ) -> None:
        self.network = network
        self.comm = comm
        self.schedule = schedule
        self.trace = trace
        self.ledger = Ledger()
        self.pools: dict[int, Array] = pools if pools is not None else {}
        self.scratch: dict[Any, Any] = {}
        self.runs = 0
        self.program = compile_network(
            network, KernelContext(comm=comm, exact=exact, pools=self.pools, step=self.scratch)
        )

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one step.

        Args:
            inputs: One array per network input, with its dtype and a shape that fits.

        Returns:
            One array per network output. It may share memory with an input that the network hands through.

        Raises:
            UserError: for inputs that do not fit, or an error inside a layer (``where`` names it).
            CommError: when another rank does not take part in a collective.
        """
        check_inputs(self.program, inputs)
        self.scratch.clear()
        self.ledger = Ledger()
        values = list(self.program.initial)
        for tensor, number in self.program.inputs:
            values[number] = inputs[tensor.name]
        # Poisoned and undefined rows are data here; infinities in float16 are, too.
        with np.errstate(all="ignore"):
            if self.schedule is not None:
                source = self.schedule.source(self.comm.rank, self.runs)
                outputs = simulate(self.program, values, self.schedule, source, self.ledger)
            else:
                _run(self.program, values, _tracer(values, self.ledger) if self.trace else None)
                outputs = {t.name: _present(values[n]) for t, n in self.program.outputs}
        self.runs += 1
        self.scratch.clear()
        return outputs


def _present(array: Array | None) -> Array:
    assert array is not None
    return array


def _run(program: Program, values: list[Array | None], done: Callable[[int, Step], None] | None = None) -> None:
    """Run in recorded order, dropping each tensor after its last reader; ``done`` is called before the drop."""
    for i, step in enumerate(program.steps):
        try:
            results = step.op(*[values[n] for n in step.inputs])
        except Exception as error:  # noqa: BLE001  (raised again with the layer's name)
            raise_in_layer(step.name, error)
        if isinstance(results, list):
            for number, array in zip(step.outputs, results, strict=True):
                values[number] = array
        else:
            values[step.outputs[0]] = results
        if done is not None:
            done(i, step)
        for number in step.drop:
            values[number] = None


def _tracer(values: list[Array | None], ledger: Ledger) -> Callable[[int, Step], None]:
    """Record the order, and the largest memory of layer outputs alive at once."""
    held = {id(_owner(v)) for v in values if v is not None}

    def record(i: int, step: Step) -> None:
        owners = {id(o): o.nbytes for o in (_owner(v) for v in values if v is not None)}
        size = sum(nbytes for key, nbytes in owners.items() if key not in held)
        ledger.peak_bytes = max(ledger.peak_bytes, size)
        ledger.events.append(Event(step.name, "side" if step.queued else "main", i, i))

    return record


def _owner(array: Array) -> Array:
    """The array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def check_inputs(program: Program, inputs: Mapping[str, Array]) -> None:
    """Refuse inputs that a TensorRT runtime would refuse.

    Raises:
        UserError: for a missing or unknown name, another dtype or rank, a wrong fixed dimension, or two dimensions of
            the same name with different sizes.
    """
    wanted = {tensor.name: tensor for tensor, _ in program.inputs}
    unknown = sorted(set(inputs) - set(wanted))
    if unknown:
        raise UserError(
            "the network has no such input", where=f"input {unknown[0]}", fix=f"inputs: {', '.join(wanted)}"
        )
    sizes: dict[str, tuple[int, str]] = {}
    for name, tensor in wanted.items():
        if name not in inputs:
            raise UserError("is missing", where=f"input {name}")
        _check_input(tensor, inputs[name], sizes)


def _check_input(tensor: ITensor, array: Array, sizes: dict[str, tuple[int, str]]) -> None:
    where = f"input {tensor.name}"
    if not isinstance(array, np.ndarray):
        raise UserError(f"is a {type(array).__name__}, not a numpy array", where=where)
    dtype = dtype_of(array, where, wanted=tensor.dtype.name)
    if dtype is not tensor.dtype:
        raise UserError(f"has dtype {dtype.name}, expected {tensor.dtype.name}", where=where)
    if array.ndim != len(tensor.shape):
        raise UserError(f"has rank {array.ndim}, expected {len(tensor.shape)}", where=where)
    for axis, (given, fixed) in enumerate(zip(array.shape, tensor.shape, strict=True)):
        if fixed not in (-1, given):
            raise UserError(f"has shape {array.shape}, expected {tensor.shape}", where=where)
        name = tensor.get_dimension_name(axis)
        if name:
            size, other = sizes.setdefault(name, (given, tensor.name))
            if size != given:
                raise UserError(f"dimension {name!r} has {given} elements, but {size} in input {other}", where=where)
