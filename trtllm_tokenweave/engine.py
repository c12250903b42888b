"""Engines on disk, one file a rank: saved with a manifest, and loaded by all ranks of a group together.

A folder holds ``rank{r}.engine`` and ``rank{r}.json`` (the manifest) for every rank, and ``config.json``.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trtllm_tokenweave import __version__
from trtllm_tokenweave.agreement import gather_json, on_all_ranks
from trtllm_tokenweave.atomic import check_folder, replace_files
from trtllm_tokenweave.comm import CommBackend, SingleComm
from trtllm_tokenweave.device import current_gpu
from trtllm_tokenweave.engine_context import EngineContext
from trtllm_tokenweave.errors import CHECK_PATH, UserError
from trtllm_tokenweave.manifest import (
    Manifest,
    check_manifest,
    check_ranks,
    missing,
    read_file,
    sha256,
    this_process,
)
from trtllm_tokenweave.plugin_library import Attempt, plugin_library
from trtllm_tokenweave.table import TuningTable
from trtllm_tokenweave.table.files import read_json, read_text
from trtllm_tokenweave.tensorrt_module import logger, tensorrt

if TYPE_CHECKING:
    from trtllm_tokenweave.builder import Plan


#: What to do with an engine that ``trtllm-build`` made.
SERVE_TRTLLM = (
    "serve it with TensorRT-LLM (docs/trtllm_build.md), in Triton after trtllm-tokenweave triton fill (docs/triton.md)"
)


class EngineConfig(BaseModel):
    """``config.json``: what all ranks of a folder share.

    Attributes:
        format_version: Version of this form.
        tp_size: Number of ranks.
        table: The tuning table that the engines carry.
        model: Whatever the builder of the network wants to find again (the model's configuration).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    format_version: Literal[1] = 1
    tp_size: Annotated[int, Field(ge=1)]
    table: TuningTable
    model: dict[str, Any] = Field(default_factory=dict)

    def text(self) -> str:
        """The JSON form as written to disk."""
        return self.model_dump_json(indent=2) + "\n"


def plan_file(folder: Path, rank: int) -> Path:
    """The engine of a rank."""
    return folder / f"rank{rank}.engine"


def manifest_file(folder: Path, rank: int) -> Path:
    """The manifest of a rank."""
    return folder / f"rank{rank}.json"


def config_file(folder: Path) -> Path:
    """What all ranks share."""
    return folder / "config.json"


def save_engine(
    plan: Plan, folder: Path, comm: CommBackend | None = None, model: Mapping[str, Any] | None = None
) -> Manifest:
    """Write this rank's engine and manifest, and on rank 0 the configuration.

    All is written aside first and then renamed: a write that fails leaves what was there before.

    Args:
        plan: What `builder.build` made.
        folder: Made where it does not exist.
        comm: The ranks that save at the same time; None: this one alone.
        model: See `EngineConfig.model`; plain data.

    Raises:
        UserError: on all ranks, when one cannot write.
    """

    def save() -> Manifest:
        manifest = make_manifest(plan)
        check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files: list[tuple[Path, Callable[[Path], object]]] = [
            (manifest_file(folder, manifest.rank), lambda aside: aside.write_text(manifest.text(), encoding="utf-8")),
            (plan_file(folder, manifest.rank), lambda aside: aside.write_bytes(plan.data)),
        ]
        if manifest.rank == 0:
            config = EngineConfig(
                tp_size=manifest.tp_size, table=plan.result.plan.options.table, model=dict(model or {})
            )
            files.insert(0, (config_file(folder), lambda aside: aside.write_text(config.text(), encoding="utf-8")))
        replace_files(files)
        return manifest

    return on_all_ranks(comm or SingleComm(), "saving the engine", save)


def make_manifest(plan: Plan) -> Manifest:
    """The manifest of a plan, as of this process."""
    options = plan.result.plan.options
    return Manifest(
        library=__version__,
        tensorrt=str(tensorrt().__version__),
        cuda_driver=plan.gpu.driver,
        gpu=plan.gpu.name,
        compute_capability=plan.gpu.compute_capability,
        tp_size=options.mapping.tp_size,
        rank=options.mapping.rank,
        dtype=options.table.key.dtype,
        mode=plan.result.mode,
        table_sha256=sha256(options.table.pack()),
        tensors=plan.tensors,
        plan_sha256=sha256(plan.data),
        plan_bytes=plan.num_bytes,
    )


class Engine:
    """A loaded engine; make one with :meth:`load`.

    Attributes:
        manifest: Its manifest.
        config: What all ranks share.
        comm: The ranks of its group.
        tensorrt_engine: The ``ICudaEngine``.
    """

    def __init__(self, manifest: Manifest, config: EngineConfig, comm: CommBackend, tensorrt_engine: Any) -> None:
        self.manifest = manifest
        self.config = config
        self.comm = comm
        self.tensorrt_engine = tensorrt_engine

    @classmethod
    def load(cls, folder: Path, comm: CommBackend | None = None, table: TuningTable | None = None) -> Engine:
        """Load this rank's engine; collective over ``comm``.

        Args:
            folder: What `save_engine` wrote.
            comm: The ranks; None: this one alone.
            table: Refuse an engine that carries another table.

        Raises:
            UserError: on all ranks, when a file of one is missing, damaged, or made for something else.
            TokenWeaveError: on all ranks, when TensorRT of one cannot load its engine.
        """
        ranks = comm or SingleComm()

        def read() -> tuple[EngineConfig, Manifest]:
            config = load_config(folder, ranks.size)
            expected = this_process(current_gpu(), str(tensorrt().__version__), ranks.rank, ranks.size)
            expected["table_sha256"] = sha256((config.table if table is None else table).pack())
            return config, read_manifest(folder, ranks.rank, expected)

        config, manifest = on_all_ranks(ranks, "reading manifests", read)
        check_ranks(gather_json(ranks, "comparing manifests", manifest.shared()), str(folder))
        path = plan_file(folder, ranks.rank)
        loaded = on_all_ranks(
            ranks, "loading engines", lambda: _deserialize(open_plan(path, manifest), manifest, str(path))
        )
        return cls(manifest, config, ranks, loaded)

    @classmethod
    def of_plan(cls, plan: Plan, comm: CommBackend | None = None) -> Engine:
        """The engine of a plan in the process that built it, without files; collective over ``comm``.

        Raises:
            TokenWeaveError: on all ranks, when the plans do not belong together or TensorRT of one cannot load its own.
        """
        ranks = comm or SingleComm()
        manifest = on_all_ranks(ranks, "making manifests", lambda: make_manifest(plan))
        check_ranks(gather_json(ranks, "comparing manifests", manifest.shared()), "the plans")
        config = EngineConfig(tp_size=manifest.tp_size, table=plan.result.plan.options.table)
        loaded = on_all_ranks(ranks, "loading engines", lambda: _deserialize(plan.data, manifest, "the plan"))
        return cls(manifest, config, ranks, loaded)

    def context(self, *, symmetric: bool = False, profile: int = 0, allow_allocation: bool = False) -> EngineContext:
        """An execution context; see :class:`EngineContext`."""
        return EngineContext(self, symmetric=symmetric, profile=profile, allow_allocation=allow_allocation)


def load_config(folder: Path, tp_size: int | None = None) -> EngineConfig:
    """Read ``config.json``.

    Args:
        folder: What `save_engine` wrote.
        tp_size: Ranks that run; None: not known yet.

    Raises:
        UserError: it is missing, cannot be understood, or is of TensorRT-LLM's engine or of a group of another size.
    """
    path = config_file(folder)
    if trtllm_config(folder) is not None:
        raise UserError("is of an engine that trtllm-build made", where=str(path), fix=SERVE_TRTLLM)
    config = read_file(path, EngineConfig)
    if tp_size is not None and config.tp_size != tp_size:
        fix = f"start {config.tp_size} (mpirun -n {config.tp_size}), or build it for {tp_size}"
        raise UserError(f"tp_size is {config.tp_size}, but {tp_size} ranks run", where=f"{path}: tp_size", fix=fix)
    return config


def trtllm_config(folder: Path) -> dict[str, Any] | None:
    """The ``config.json`` of an engine that ``trtllm-build`` made; None: there is none, or it is no such engine's.

    Raises:
        UserError: it cannot be read.
    """
    path = config_file(folder)
    if not path.exists():
        return None
    data = read_json(read_text(path), str(path))
    return data if isinstance(data, dict) and {"build_config", "pretrained_config"} <= data.keys() else None


def read_manifest(folder: Path, rank: int, expected: Mapping[str, Any]) -> Manifest:
    """Read a rank's manifest, and check it against this process.

    Raises:
        UserError: see :meth:`Engine.load`.
    """
    path = manifest_file(folder, rank)
    manifest = read_file(path, Manifest)
    check_manifest(manifest, expected, str(path))
    return manifest


def open_plan(path: Path, manifest: Manifest) -> mmap.mmap:
    """The plan's file in memory, checked against its manifest.

    Raises:
        UserError: it is missing, or not the file that the manifest names.
    """
    try:
        with path.open("rb") as file:
            found = {"plan_bytes": path.stat().st_size}
            check_manifest(manifest, found, str(path))
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise missing(path) from error
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", where=str(path), fix=CHECK_PATH) from error
    check_manifest(manifest, {"plan_sha256": sha256(data)}, str(path))
    return data


def _deserialize(data: Any, manifest: Manifest, where: str) -> Any:
    if manifest.mode != "stock":
        plugin_library()
    attempt = Attempt()
    engine = tensorrt().Runtime(logger()).deserialize_cuda_engine(data)
    if engine is None:
        raise attempt.error(f"TensorRT cannot load {where}")
    return engine
