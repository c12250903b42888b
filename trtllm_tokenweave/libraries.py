"""Where the compiled libraries are: what `pip install .` put into the package, or what a source tree has built."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Literal

from trtllm_tokenweave import __version__
from trtllm_tokenweave.config import (
    LIBRARY,
    REFERENCE_LIBRARY,
    TRT_LIBRARY,
    Environment,
    Variable,
    read_environment,
)
from trtllm_tokenweave.errors import UserError

LibraryName = Literal["tokenweave", "tokenweave_trt", "tokenweave_reference", "tokenweave_preload"]
"""The CUDA library with its C interface, the TensorRT plugins, TensorRT-LLM's plugins for where it is missing, and what
LD_PRELOAD gives the plugins to a server with."""

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent
"""The source tree, where the package is not installed but run from one."""

_VARIABLES: dict[LibraryName, Variable] = {
    "tokenweave": LIBRARY,
    "tokenweave_trt": TRT_LIBRARY,
    "tokenweave_reference": REFERENCE_LIBRARY,
}
_BUILD: dict[LibraryName, str] = {
    "tokenweave": "build/plugins",
    "tokenweave_trt": "build/plugins/trt",
    "tokenweave_reference": "build/plugins/reference",
    "tokenweave_preload": "build/plugins/preload",
}


def find_library(name: LibraryName, environment: Environment | None = None) -> Path | None:
    """The file of a library: what its environment variable names (that for LD_PRELOAD has none), else the package's,
    else the source tree's build.

    Args:
        name: The library.
        environment: The variables, default those of this process.

    Returns:
        The file, or None where there is none. What the variable names is not looked at.
    """
    values = read_environment() if environment is None else environment
    named: dict[LibraryName, Path | None] = {
        "tokenweave": values.library,
        "tokenweave_trt": values.trt_library,
        "tokenweave_reference": values.reference_library,
    }
    if (path := named.get(name)) is not None:
        return path
    file = f"lib{name}.so"
    return next((path for path in (PACKAGE / "lib" / file, ROOT / _BUILD[name] / file) if path.is_file()), None)


def load_library(name: Literal["tokenweave", "tokenweave_trt"]) -> ctypes.CDLL:
    """Load what `find_library` finds of a library that has a C interface.

    Raises:
        UserError: There is none, it cannot be loaded, or it is another library or of another version.
    """
    fix = f"pip install . (README.md), build it (plugins/README.md) or set {_VARIABLES[name].name}"
    path = find_library(name)
    if path is None:
        raise UserError("is not installed", where=f"lib{name}.so", fix=fix)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UserError(f"cannot be loaded: {error}", where=str(path), fix=fix) from None
    version = getattr(library, "twVersion", None)
    if version is None:
        raise UserError("is another library: it has no twVersion", where=str(path), fix=fix)
    version.restype = ctypes.c_char_p
    found = version().decode()
    if found != __version__:
        raise UserError(f"is of version {found}, but {__version__} is needed", where=str(path), fix=fix)
    return library
