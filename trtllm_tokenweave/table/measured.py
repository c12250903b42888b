"""Whether what was measured holds here: on this GPU, with this TensorRT and this package, for these shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtllm_tokenweave import __version__
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.table.launch import CLUSTER
from trtllm_tokenweave.table.model import ANY_GPU, MeasuredOn, TuningTable

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
        if needed is None or have == needed or (name == "tensorrt" and _same_version(have, needed)):
            continue
        found.append(f"measured with {name} {have}, but {needed} is here")
    if here.gemms is not None:
        for name in dict.fromkeys([*measured.gemms, *here.gemms]):
            before, now = measured.gemms.get(name), here.gemms.get(name)
            if before != now:
                found.append(f"measured with {name} {gemm_text(before)}, but {gemm_text(now)} is needed")
    return found


def other_memory(measured: MeasuredOn, here: Here) -> str:
    """A sentence where a measurement has activations in other memory than here; else empty."""
    if here.symmetric is None or measured.symmetric == here.symmetric:
        return ""
    how = {True: "in place", False: "through a copy"}
    return f"measured with collectives {how[measured.symmetric]}, but here they work {how[here.symmetric]}"


def check_measured(table: TuningTable, here: Here, *, where: str = "table") -> None:
    """Refuse a measured table that is stale or foreign, or contradicts what it was measured on.

    Tables that were not measured pass; so do measured ones that do not say on what (tables joined of several, or made
    by hand): there is nothing to compare.

    Raises:
        UserError: names all that differs.
    """
    measured = table.source.measured
    if measured is None:
        return
    found = [*differences(measured, here), *_contradictions(table, measured)]
    if found:
        raise UserError("; ".join(found), where=where, fix=_AGAIN)


def _same_version(a: str, b: str) -> bool:
    """Whether two versions are the same in all parts that both have: 10.6.0.26 is 10.6.0, and 10.6."""
    return all(x == y for x, y in zip(a.split("."), b.split("."), strict=False))


def _contradictions(table: TuningTable, measured: MeasuredOn) -> list[str]:
    """Why a table cannot come from its measurement, one sentence each."""
    found = []
    if measured.tp_size != table.key.tp_size:
        found.append(f"measured with tp_size {measured.tp_size}, but made for {table.key.tp_size}")
    if table.key.gpu not in (ANY_GPU, measured.gpu):
        found.append(f"measured with gpu {measured.gpu}, but made for {table.key.gpu}")
    beside = [(row, max(row.attention.ctas, row.mlp.ctas)) for row in table.rows if row.mode == "weave"]
    full = [(row, ctas) for row, ctas in beside if measured.sms - ctas < CLUSTER]
    if full:
        row, ctas = full[0]
        more = f" (and {len(full) - 1} more)" if len(full) > 1 else ""
        left = f"{ctas} CTAs leave {max(measured.sms - ctas, 0)} of {measured.sms} SMs to the GEMMs"
        found.append(f"row batch {row.batch} tokens {row.tokens}{more}: {left}, which need {CLUSTER}")
    return found


def layer_gemms(shapes: Sequence[GemmShape]) -> dict[str, tuple[int, int]]:
    """(n, k) by name of `waves.gemm_shapes`."""
    return {shape.name: (shape.n, shape.k) for shape in shapes}


def gemm_text(shape: tuple[int, int] | None) -> str:
    """A GEMM's shapes in words, of its (n, k)."""
    return "nothing" if shape is None else f"[M, {shape[1]}] x [{shape[1]}, {shape[0]}]"
