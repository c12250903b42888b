"""Modules and objects that have what is listed and complain loudly about anything else."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from trtllm_tokenweave.trtllm.surface import SURFACE


class Unlisted(BaseException):
    """A name of TensorRT-LLM was touched that `SURFACE` does not list; no Exception, so that nothing catches it."""


def listed(module: str) -> set[str]:
    """Names of a module that may be touched."""
    return {name.path.partition(".")[0] for name in SURFACE if name.module == module}


class StrictModule(ModuleType):
    """A module of the double."""

    def __getattribute__(self, name: str) -> Any:
        inside = _name(sys._getframe(1).f_globals)
        if _own(name) or inside.startswith(("tensorrt_llm", "importlib", "_frozen_importlib")):
            return super().__getattribute__(name)
        module = _name(super().__getattribute__("__dict__"))
        if name not in listed(module) and not isinstance(super().__getattribute__("__dict__").get(name), ModuleType):
            raise Unlisted(f"{module}.{name} is read in {inside}")
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = _name(self.__dict__)
        if not (_own(name) or isinstance(value, ModuleType) or name in listed(module)):
            raise Unlisted(f"{module}.{name} is set")
        super().__setattr__(name, value)


class Strict:
    """An object of the double: members of classes that `SURFACE` does not list begin with ``_double``."""

    def __getattr__(self, name: str) -> Any:
        if _own(name):
            raise AttributeError(name)
        raise Unlisted(f"{type(self).__name__}.{name} is read")


def _own(name: str) -> bool:
    """Python's own names, which anything may ask for."""
    return name.startswith("__") and name.endswith("__") and name != "__version__"


def _name(module: dict[str, Any]) -> str:
    """Name of a module, also of one that ``python -m`` runs as ``__main__``."""
    spec = module.get("__spec__")
    return str(module.get("__name__", "") if spec is None else spec.name)


def seal(module: str) -> None:
    """Make a module of the double strict."""
    sys.modules[module].__class__ = StrictModule
