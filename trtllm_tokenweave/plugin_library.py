"""The TensorRT plugin library: registration with TensorRT, and its C interface (plugins/trt/include)."""

from __future__ import annotations

import ctypes
import logging
from ctypes import byref, c_int32, c_size_t, c_uint64, c_void_p, sizeof
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trtllm_tokenweave.c_interface import OK, LibraryError, Status
from trtllm_tokenweave.config import LAUNCH, Environment, read_environment
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.libraries import find_library, load_library
from trtllm_tokenweave.plugin_specs import NAMESPACE, SPECS, VERSION
from trtllm_tokenweave.recorder.trtllm_plugins import NAMESPACE as TRTLLM_NAMESPACE
from trtllm_tokenweave.table.files import table_error
from trtllm_tokenweave.table.launch import LaunchConfig
from trtllm_tokenweave.tensorrt_module import LINES, tensorrt, tensorrt_error

#: What every build of the library registers.
_CREATORS = tuple(spec.name for spec in SPECS)


_COUNTERS = (
    "overlapped",
    "captured",
    "in_line",
    "empty",
    "joins",
    "staged",
    "alias_copies",
    "unkept_inputs",
    "fabric_fallbacks",
    "offset_fallbacks",
    "refused_steps",
    "unfinished_steps",
    "while_building",
)


class Counters(ctypes.Structure):
    """TwPluginCounters: what the plugins of this process queued; see plugins.h."""

    _fields_ = (("struct_bytes", c_size_t), *((name, c_uint64) for name in _COUNTERS))


class Launch(ctypes.Structure):
    """TwPluginLaunch; see plugins.h."""

    _fields_ = (("struct_bytes", c_size_t), ("ctas", c_int32), ("threads", c_int32), ("gemm_sms", c_int32))


class PluginLibrary:
    """The C interface of the loaded library."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def last_error(self) -> str:
        """The newest error of any plugin of this process, an empty string when there is none."""
        status = Status()
        self._library.twPluginLastError(byref(status))
        return bytes(status.message).decode(errors="replace")

    def counters(self) -> dict[str, int]:
        """What the plugins did since they were loaded, or since :meth:`reset_counters`."""
        counters = Counters(struct_bytes=sizeof(Counters))
        self._call("twPluginGetCounters", byref(counters))
        return {name: int(getattr(counters, name)) for name in _COUNTERS}

    def reset_counters(self) -> None:
        """Count from zero."""
        self._library.twPluginResetCounters()

    def override_launch(self, launch: LaunchConfig | None) -> None:
        """For experiments: launch split steps like this instead of as the engines' tables say; None: as they say.

        The split and the fabric stay as they are, and so do steps in captured graphs. All ranks do it before the same
        step.

        Raises:
            LibraryError: a value that no table may have.
        """
        given = None if launch is None else Launch(sizeof(Launch), launch.ctas, launch.threads, launch.gemm_sms)
        self._call("twPluginOverrideLaunch", None if given is None else byref(given))

    def tensor_memory(self, device: int, num_bytes: int) -> int:
        """Address of symmetric memory for the contexts of the engine that runs on ``device``.

        Collective: all ranks call it after they have made their contexts and before their first step. It is the
        library's, and stays until the last of these contexts is gone.

        Raises:
            LibraryError: on all ranks, when it cannot be had.
        """
        address = c_void_p()
        self._call("twPluginTensorMemory", c_int32(device), c_uint64(num_bytes), byref(address))
        return address.value or 0

    def _call(self, function: str, *args: Any) -> None:
        status = Status()
        if getattr(self._library, function)(*args, byref(status)) != OK:
            raise LibraryError(status)


@cache
def plugin_library() -> PluginLibrary:
    """Our plugin library, registered with TensorRT.

    Raises:
        UserError: as `register`, or it is not there.
    """
    loaded = load_library("tokenweave_trt")
    register(Path(loaded._name), _CREATORS)
    library = PluginLibrary(loaded)
    launch = launch_of_environment(read_environment())
    if launch is not None:
        logging.getLogger(__name__).warning("%s is set: split steps are launched as %s", LAUNCH.name, launch)
        library.override_launch(launch)
    return library


def launch_of_environment(environment: Environment) -> LaunchConfig | None:
    """What `config.LAUNCH` says, None where it is not set; what it does not name is `LaunchConfig`'s default.

    Raises:
        UserError: it cannot be understood.
    """
    if not environment.launch:
        return None
    fix = "write ctas=8,threads=1024,gemm_sms=116, or some of them"
    fields: dict[str, int] = {}
    for part in environment.launch.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in ("ctas", "threads", "gemm_sms") or name in fields or not (value.isascii() and value.isdigit()):
            raise UserError(f"{part.strip()!r} cannot be understood", where=LAUNCH.name, fix=fix)
        fields[name] = int(value)
    try:
        return LaunchConfig.model_validate(fields)
    except ValidationError as error:
        raise UserError(table_error(error, "").what, where=LAUNCH.name, fix=fix) from error


_registered: set[Path] = set()


def register(path: Path, creators: tuple[str, ...] = (), namespace: str = NAMESPACE) -> None:
    """Register a library of plugins with TensorRT; once a process, however often this is called.

    Args:
        path: The library. Libraries other than ours (the reference plugins) are registered with this, too.
        creators: Names that must be known to TensorRT afterwards, version `plugin_specs.VERSION`.
        namespace: Their namespace.

    Raises:
        UserError: when it is not there, or TensorRT does not take it.
    """
    path = path.resolve()
    if path in _registered:
        return
    if not path.is_file():
        raise UserError("there is no such file", where=str(path), fix="build it (plugins/README.md)")
    registry = tensorrt().get_plugin_registry()
    fix = f"build it with the headers of TensorRT {tensorrt().__version__} (plugins/README.md)"

    def missing() -> list[str]:
        return [name for name in creators if registry.get_creator(name, VERSION, namespace) is None]

    LINES.clear()
    try:
        ctypes.CDLL(str(path))  # first by ourselves: TensorRT does not say why the loader refuses a file
        handle = registry.load_library(str(path))
    except (OSError, RuntimeError) as error:
        raise UserError(f"cannot be loaded: {error}", where=str(path), fix=fix) from error
    if missing() or (handle is None and not creators):
        what = f"TensorRT does not know its plugins {', '.join(missing())}".rstrip()
        reason = LINES.take_errors()
        raise UserError(f"{what}: {reason}" if reason else what, where=str(path), fix=fix)
    if handle is None:
        # That one would run, and this one's counters, errors and memory would be asked for.
        what = f"another library has registered its plugins {', '.join(creators)}"
        raise UserError(what, where=str(path), fix="load one of them only (LD_PRELOAD, the variables of README.md)")
    _registered.add(path)


def register_reference(*creators: str) -> None:
    """Register this project's own copies of TensorRT-LLM's plugins, for machines without TensorRT-LLM.

    Args:
        creators: Those that are needed ("AllReduce").

    Raises:
        UserError: as `register`, or the library is not there.
    """
    path = find_library("tokenweave_reference")
    if path is None:
        fix = "build it (plugins/README.md)"
        raise UserError("is not installed", where="libtokenweave_reference.so", fix=fix)
    register(path, creators, TRTLLM_NAMESPACE)


class Attempt:
    """A call of TensorRT that may fail: made before it, so that its error carries what was said since, and no more."""

    def __init__(self) -> None:
        LINES.clear()
        self._before = _plugin_error()

    def error(self, what: str) -> TokenWeaveError:
        """The error, with the messages of TensorRT and of our plugins."""
        newest = _plugin_error()
        return tensorrt_error(what, also="" if newest == self._before else newest)


def _plugin_error() -> str:
    """The newest error of our plugins; empty when the library is not loaded or has none."""
    return plugin_library().last_error() if plugin_library.cache_info().currsize else ""
