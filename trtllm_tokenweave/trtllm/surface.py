"""Every name of TensorRT-LLM that this package touches: the list, the check against an install, the import.

:func:`main` checks the install of its interpreter and prints a JSON document: `doctor` runs it in a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from types import CodeType, ModuleType
from typing import Any

from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.installed import TENSORRT_LLM, parse_version

PACKAGE = "tensorrt_llm"
_FIX = "pip install 'tensorrt_llm>=0.17,<1.3'"


@dataclass(frozen=True)
class Name:
    """One name of TensorRT-LLM.

    Attributes:
        module: Module that holds it.
        path: Its name there; ``Class.member`` for a member, which may also be set on instances only.
        parameters: Parameters that a function must have, by name.
        use: What it is needed for.
    """

    module: str
    path: str
    parameters: tuple[str, ...] = ()
    use: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"


_BUILD, _BUILDER, _NETWORK = "tensorrt_llm.commands.build", "tensorrt_llm.builder", "tensorrt_llm.network"
_FUNCTIONAL, _MODELS, _MAPPING = "tensorrt_llm.functional", "tensorrt_llm.models", "tensorrt_llm.mapping"

_RANK = ("rank", "gpu_id", "ckpt_dir", "build_config", "output_dir", "log_level", "model_config", "model_cls")
_ALL_RANKS = ("model_config", "ckpt_dir", "build_config", "output_dir", "workers", "log_level", "model_cls")

SURFACE: tuple[Name, ...] = (
    Name(PACKAGE, "__version__", (), "which release it is"),
    Name(_BUILD, "main", (), "the command"),
    Name(_BUILD, "parallel_build", _ALL_RANKS, "called by main: replaced, to check before and compare ranks after"),
    Name(_BUILD, "build_and_save", _RANK, "called by parallel_build, also in workers: replaced, to set the hooks"),
    Name(_BUILD, "mpi_world_size", (), "whether ranks are built by processes of mpirun"),
    Name(_BUILD, "mpi_rank", (), "which process compares the ranks"),
    Name(_BUILD, "mpi_comm", (), "to end all processes when one cannot build"),
    Name(_BUILDER, "optimize", ("net",), "called once the network is complete: replaced, to weave"),
    Name(_BUILDER, "Builder.build_engine", ("network", "builder_config"), "replaced, to set the builder's switches"),
    Name(_BUILDER, "BuilderConfig.trt_builder_config", (), "TensorRT's IBuilderConfig"),
    Name(_BUILDER, "BuildConfig.opt_num_tokens", (), "whether the user has chosen the optimum"),
    Name(_BUILDER, "BuildConfig.max_beam_width", (), "attention stays whole with beams"),
    Name(_BUILDER, "BuildConfig.max_draft_len", (), "and with draft tokens"),
    Name(_NETWORK, "Network.trt_network", (), "TensorRT's INetworkDefinition"),
    Name(_NETWORK, "Network._inputs", (), "inputs with their optimisation profiles"),
    Name(_NETWORK, "Network._unfilled_weights", (), "constants whose values come later, and are not read"),
    Name(_NETWORK, "get_plugin_info", ("trt_network", "layer_name"), "fields of the plugins in the network"),
    Name(_NETWORK, "get_np_weight", ("trt_network", "layer_name"), "values of one-element constants (epsilon)"),
    Name(_NETWORK, "PluginInfo.plugin_creator", (), "a plugin's name, version and namespace"),
    Name(_NETWORK, "PluginInfo.pfc", (), "names and types of its fields"),
    Name(_NETWORK, "PluginInfo.pfc_as_ndarray", (), "values of its fields"),
    Name(_FUNCTIONAL, "Tensor.profiles", (), "ranges of an input, one for each profile"),
    Name(_FUNCTIONAL, "DimRange.min", (), "least sizes"),
    Name(_FUNCTIONAL, "DimRange.opt", (), "sizes to optimise for: set to a token count that is split"),
    Name(_FUNCTIONAL, "DimRange.max", (), "largest sizes"),
    Name(_FUNCTIONAL, "DimRange.dimension_names", (), "which dimension counts tokens"),
    Name(_MODELS, "MODEL_MAP", (), "stock classes by architecture, for --model_cls_name"),
    Name(_MODELS, "PretrainedConfig.architecture", (), "which stock class"),
    Name(_MODELS, "PretrainedConfig.dtype", (), "the table's key"),
    Name(_MODELS, "PretrainedConfig.hidden_size", (), "the table's key"),
    Name(_MODELS, "PretrainedConfig.mapping", (), "the ranks"),
    Name(_MODELS, "PretrainedModel.from_checkpoint", ("ckpt_dir", "config"), "to make a stock model"),
    Name(_MAPPING, "Mapping.world_size", (), "number of ranks"),
    Name(_MAPPING, "Mapping.tp_size", (), "ranks of the tensor-parallel group"),
    Name(_MAPPING, "Mapping.pp_size", (), "above 1 nothing is fused"),
    Name(_MAPPING, "Mapping.cp_size", (), "above 1 nothing is fused"),
)


@dataclass(frozen=True)
class Checked:
    """Whether an install has a name as it is used here; ``lack`` says what is wrong with it, "" where nothing is."""

    name: str
    lack: str = ""


@dataclass(frozen=True)
class TensorRtLlm:
    """The modules that are touched, and the release."""

    version: str
    build: Any
    builder: Any
    network: Any
    models: Any


def version() -> str:
    """Release of the installed TensorRT-LLM; it is not imported where its metadata tells.

    Raises:
        UserError: it is not installed.
    """
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        if importlib.util.find_spec(PACKAGE) is None:
            raise UserError("is not installed for this Python", where="TensorRT-LLM", fix=_FIX) from None
        return str(_import(PACKAGE).__version__)


def check_version(found: str) -> None:
    """Refuse a release without what is needed.

    Raises:
        UserError: says which releases are served.
    """
    if found in TENSORRT_LLM:
        return
    if parse_version(found) < TENSORRT_LLM.at_least:
        what = f"release {found} is too old: {TENSORRT_LLM} is needed"
    else:
        what = f"release {found} cannot build TensorRT engines any more: {TENSORRT_LLM} is needed"
    raise UserError(what, where="TensorRT-LLM", fix=f"{_FIX}, or leave out --plugin tokenweave")


@cache
def load() -> TensorRtLlm:
    """Import TensorRT-LLM and make sure that it has every name of `SURFACE`; once a process, before any is replaced.

    Raises:
        UserError: it is not installed, not served, cannot be imported, or differs from what is expected.
    """
    found = version()
    check_version(found)
    lacks = [checked for checked in check() if checked.lack]
    if lacks:
        more = f" (and {len(lacks) - 1} more)" if len(lacks) > 1 else ""
        what = f"release {found} is not as expected: {lacks[0].name} {lacks[0].lack}{more}"
        fix = "trtllm-tokenweave doctor lists all that differs; use another release, or leave out --plugin tokenweave"
        raise UserError(what, where="TensorRT-LLM", fix=fix)
    modules = [_import(name) for name in (_BUILDER, _NETWORK, _MODELS)]
    return TensorRtLlm(found, _command_module(), *modules)


def _command_module() -> ModuleType:
    """The module whose ``main`` runs: ``python -m tensorrt_llm.commands.build`` has a copy of its own."""
    program = sys.modules.get("__main__")
    spec = getattr(program, "__spec__", None)
    return program if program is not None and spec is not None and spec.name == _BUILD else _import(_BUILD)


def stock_main() -> Any:
    """The function behind ``trtllm-build``, of any release.

    Raises:
        UserError: TensorRT-LLM is not installed, or cannot be imported.
    """
    version()
    return _import(_BUILD).main


def check() -> list[Checked]:
    """Look for every name of `SURFACE` in the installed TensorRT-LLM, which is imported for it.

    Raises:
        UserError: it cannot be imported at all.
    """
    _import(PACKAGE)  # once: what fails may take a minute, and fails in another way the second time
    return [Checked(str(name), _lack(name)) for name in SURFACE]


def _lack(name: Name) -> str:
    try:
        found: Any = _import(name.module)
    except UserError as error:
        return error.what
    owner, _, member = name.path.rpartition(".")
    if owner:
        found = getattr(found, owner, None)
        if found is None:
            return f"is missing: there is no {owner}"
        if not _declares(found, member):
            return "is missing"
        found = getattr(found, member, None)
    elif not hasattr(found, member):
        return "is missing"
    else:
        found = getattr(found, member)
    if name.parameters:
        have = inspect.signature(found).parameters
        lacking = [parameter for parameter in name.parameters if parameter not in have]
        if lacking:
            return f"takes no {', '.join(lacking)}"
    return ""


def _declares(owner: Any, member: str) -> bool:
    """Whether a class has a member, or a field, or sets an attribute of that name in one of its functions."""
    if hasattr(owner, member):
        return True
    for base in inspect.getmro(owner):
        if member in inspect.get_annotations(base) or member in base.__dict__.get("model_fields", {}):
            return True
        functions = (inspect.unwrap(f) for f in base.__dict__.values() if inspect.isfunction(f))
        if any(member in code.co_names for f in functions for code in _codes(f.__code__)):
            return True
    return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    # A package of this size fails in many ways: no driver, another MPI, another TensorRT.
    except Exception as error:
        what = f"cannot be imported: {type(error).__name__}: {error}"
        raise UserError(what, where=module, fix="make `python -c 'import tensorrt_llm'` work first") from error


def main() -> None:
    """Print what `doctor` asks for, a JSON document in the last line: version, error, and the names that differ."""
    document: dict[str, Any] = {"version": "", "error": "", "names": []}
    try:
        document["version"] = version()
        check_version(document["version"])
        document["names"] = [asdict(checked) for checked in check()]
    except TokenWeaveError as error:
        document["error"] = str(error)
    print(f"\n{json.dumps(document)}")  # TensorRT-LLM prints lines of its own before
