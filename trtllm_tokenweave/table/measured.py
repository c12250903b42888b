"""Whether what was measured holds here: on this GPU, with this TensorRT and this package, for these shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtllm_tokenweave import __version__
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.table.model import MeasuredOn, TuningTable

if TYPE_CHECKING:
    from trtllm_tokenweave.waves import GemmShape

_AGAIN = "measure it again (trtllm-tokenweave tune), or leave the table out for the default rule"


@dataclass(frozen=True)
class Here:
    """What a measurement is compared with; None: not known, not compared.

    Attributes:
        gpu: Name of the GPU.
        tensorrt: Version of TensorRT.
        gemms: (n, k) of a layer's GEMMs on one rank, by name (`layer_gemms`).
        library: Version of this package.
        symmetric: Whether activations lie in symmetric memory, so that collectives need not copy. It decides which
            table is the better one, not whether one may be used: `differences` leaves it out.
    """

    gpu: str | None = None
    tensorrt: str | None = None
    gemms: Mapping[str, tuple[int, int]] | None = None
    library: str = __version__
    symmetric: bool | None = None


def differences(measured: MeasuredOn, here: Here) -> list[str]:
    """Why a measurement does not hold here, one sentence each; empty when nothing speaks against it."""
    found = []
    for name in ("gpu", "tensorrt", "library"):
        have, needed = getattr(measured, name), getattr(here, name)
        if needed is not None and have != needed:
            found.append(f"measured with {name} {have}, but {needed} is here")
    if here.gemms is not None:
        for name in dict.fromkeys([*measured.gemms, *here.gemms]):
            before, now = measured.gemms.get(name), here.gemms.get(name)
            if before != now:
                found.append(f"measured with {name} {_shape(before)}, but {_shape(now)} is needed")
    return found


def other_memory(measured: MeasuredOn, here: Here) -> str:
    """A sentence where a measurement has activations in other memory than here; else empty."""
    if here.symmetric is None or measured.symmetric == here.symmetric:
        return ""
    how = {True: "in place", False: "through a copy"}
    return f"measured with collectives {how[measured.symmetric]}, but here they work {how[here.symmetric]}"


def check_measured(table: TuningTable, here: Here, *, where: str = "table") -> None:
    """Refuse a measured table that is stale or foreign.

    Tables that were not measured pass; so do measured ones that do not say on what (tables joined of several, or made
    by hand): there is nothing to compare.

    Raises:
        UserError: names all that differs.
    """
    measured = table.source.measured
    if measured is None:
        return
    found = differences(measured, here)
    if measured.tp_size != table.key.tp_size:
        found.append(f"measured with tp_size {measured.tp_size}, but made for {table.key.tp_size}")
    if found:
        raise UserError("; ".join(found), where=where, fix=_AGAIN)


def layer_gemms(shapes: Sequence[GemmShape]) -> dict[str, tuple[int, int]]:
    """(n, k) by name of `waves.gemm_shapes`."""
    return {shape.name: (shape.n, shape.k) for shape in shapes}


def _shape(shape: tuple[int, int] | None) -> str:
    return "nothing" if shape is None else f"[M, {shape[1]}] x [{shape[1]}, {shape[0]}]"
