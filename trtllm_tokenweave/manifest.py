"""What an engine file was built from and for, beside it on disk, and the comparison when it is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtllm_tokenweave import __version__
from trtllm_tokenweave.device import Gpu
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.passes import WeaveMode
from trtllm_tokenweave.table.files import read_json, read_text, table_error
from trtllm_tokenweave.trt import dims_or_none

FORMAT_VERSION = 1

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())
_REBUILD = "build the engine again on this machine"
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
# JSON has lists, no tuples; what is in them stays strict.
_Shape = Annotated[tuple[int, ...], Field(strict=False)]
_Form = TypeVar("_Form", bound=BaseModel)


class TensorSpec(BaseModel):
    """An input or output of the engine.

    Attributes:
        name: Its name.
        mode: "INPUT" or "OUTPUT".
        dtype: TensorRT's name of its dtype ("BF16").
        shape: -1 where known only at run time.
        profiles: For each optimisation profile minimum, optimum and maximum shape; none for outputs.
    """

    model_config = _FROZEN

    name: str
    mode: Literal["INPUT", "OUTPUT"]
    dtype: str
    shape: _Shape
    profiles: Annotated[tuple[Annotated[tuple[_Shape, _Shape, _Shape], Field(strict=False)], ...], Field(strict=False)]


class Manifest(BaseModel):
    """Identity of one rank's engine file.

    Attributes:
        format_version: Version of this form.
        library: Version of this package.
        tensorrt: Version of TensorRT.
        cuda_driver: CUDA version of the driver of the build.
        gpu: Name of the GPU.
        compute_capability: Its compute capability ("9.0").
        tp_size: Ranks of the tensor-parallel group.
        rank: Rank of this engine.
        dtype: Dtype of the activations.
        mode: What the weave made of the network.
        table_sha256: SHA-256 of the packed tuning table.
        tensors: Inputs and outputs, in the engine's order.
        plan_sha256: SHA-256 of the plan.
        plan_bytes: Size of the plan.
    """

    model_config = _FROZEN

    format_version: Literal[1] = 1
    library: str
    tensorrt: str
    cuda_driver: str
    gpu: str
    compute_capability: str
    tp_size: Annotated[int, Field(ge=1)]
    rank: Annotated[int, Field(ge=0)]
    dtype: str
    mode: WeaveMode
    table_sha256: _Sha256
    tensors: Annotated[tuple[TensorSpec, ...], Field(strict=False)]
    plan_sha256: _Sha256
    plan_bytes: Annotated[int, Field(ge=1)]

    def text(self) -> str:
        """The JSON form as written to disk."""
        return self.model_dump_json(indent=2) + "\n"

    def shared(self) -> dict[str, Any]:
        """What must be equal on all ranks of a group: all but the rank and its plan."""
        return self.model_dump(mode="json", exclude={"rank", "plan_sha256", "plan_bytes"})


def tensor_specs(engine: Any) -> tuple[TensorSpec, ...]:
    """Inputs and outputs of an ``ICudaEngine``."""
    specs = []
    for name in (engine.get_tensor_name(i) for i in range(engine.num_io_tensors)):
        mode: Literal["INPUT", "OUTPUT"] = "INPUT" if engine.get_tensor_mode(name).name == "INPUT" else "OUTPUT"
        indices = range(engine.num_optimization_profiles) if mode == "INPUT" else ()
        ranges = [tuple(tuple(shape) for shape in engine.get_tensor_profile_shape(name, i)) for i in indices]
        specs.append(
            TensorSpec(
                name=name,
                mode=mode,
                dtype=engine.get_tensor_dtype(name).name,
                shape=dims_or_none(engine.get_tensor_shape(name)) or (),
                profiles=tuple((r[0], r[1], r[2]) for r in ranges),
            )
        )
    return tuple(specs)


def sha256(data: Any) -> str:
    """SHA-256 of a buffer, as lower-case hexadecimal."""
    return hashlib.sha256(data).hexdigest()


# ---- loading


def read_file(path: Path, form: type[_Form]) -> _Form:
    """Read and check a file of JSON from an engine's folder.

    Raises:
        UserError: it is missing, has not this form, or another version of it.
    """
    if not path.exists():
        raise missing(path)
    text = read_text(path)
    data = read_json(text, str(path))
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        what = f"format_version is {version!r}, expected {FORMAT_VERSION}"
        raise UserError(what, where=str(path), fix=_REBUILD)
    try:
        return form.model_validate_json(text)
    except ValidationError as error:
        raise table_error(error, str(path)) from error


def missing(path: Path) -> UserError:
    """The error for a file that an engine's folder lacks."""
    return UserError("is missing", where=str(path), fix="give the folder of a whole engine, or build it again")


def check_manifest(manifest: Manifest, expected: Mapping[str, Any], where: str) -> None:
    """Refuse an engine that was built for something else.

    Args:
        manifest: The engine's.
        expected: Values by field name; see :func:`this_process`.
        where: What the error names: the manifest's file.

    Raises:
        UserError: names the first field that differs, what it is, what is needed, and what to do.
    """
    for field, wanted in expected.items():
        found = getattr(manifest, field)
        if found != wanted:
            raise UserError(
                f"{field} is {found}, but {wanted} is needed here", where=f"{where}: {field}", fix=_fix(field, found)
            )


def check_ranks(manifests: list[dict[str, Any]], where: str) -> None:
    """Refuse engines of a group that were not built together.

    Args:
        manifests: `Manifest.shared` of every rank, in rank order.
        where: The folder.

    Raises:
        UserError: names the first field that differs, and both ranks.
    """
    for rank, other in enumerate(manifests[1:], start=1):
        for field, first in manifests[0].items():
            if other.get(field) != first:
                values = "" if field == "tensors" else f": {first} and {other.get(field)}"
                raise UserError(
                    f"{field} differs between rank 0 and rank {rank}{values}",
                    where=where,
                    fix="build the engines of all ranks together",
                )


def this_process(gpu: Gpu, tensorrt_version: str, rank: int, tp_size: int) -> dict[str, Any]:
    """What an engine's manifest must say to be loaded by this process."""
    return {
        "library": __version__,
        "tensorrt": tensorrt_version,
        "gpu": gpu.name,
        "compute_capability": gpu.compute_capability,
        "tp_size": tp_size,
        "rank": rank,
    }


def _fix(field: str, found: Any) -> str:
    cures = {
        "library": f"install trtllm-tokenweave {found}, or {_REBUILD}",
        "tensorrt": f"install TensorRT {found}, or {_REBUILD}",
        "gpu": f"run it on a {found}, or {_REBUILD}",
        "compute_capability": f"run it on such a GPU, or {_REBUILD}",
        "tp_size": f"start {found} ranks (mpirun -n {found}), or build it for this many",
        "rank": "do not rename engine files",
        "table_sha256": "use the table that the engine was built with, or build it again with this one",
        "plan_sha256": "the engine file is damaged or of another build: copy it again, or build it again",
        "plan_bytes": "the engine file is damaged or of another build: copy it again, or build it again",
    }
    return cures.get(field, _REBUILD)
