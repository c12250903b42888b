"""Typed access to the fields of a config file, with errors that name the file and the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_tokenweave.errors import UserError

_REQUIRED: Any = object()
_OWN_FILE = "copy the model's own file again"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from ``path``. Raises UserError when it cannot be read or is something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON ({error})"
        raise UserError(f"cannot be read: {reason}", where=str(path), fix=_OWN_FILE) from error
    if not isinstance(data, dict):
        raise UserError("holds no JSON object", where=str(path), fix=_OWN_FILE)
    return data


class Fields:
    """The fields of one JSON object or GGUF header; a field that is null counts as absent."""

    def __init__(self, data: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.data = data
        self.source = source
        self.prefix = prefix

    def where(self, name: str) -> str:
        """How errors call the field."""
        return f"{self.source}, field {self.prefix}{name}"

    def get(self, *names: str) -> Any:
        """The first of ``names`` that is present, or None."""
        return next((self.data[name] for name in names if self.data.get(name) is not None), None)

    def _typed(self, names: tuple[str, ...], default: Any, types: tuple[type, ...], noun: str) -> Any:
        value = self.get(*names)
        if value is None:
            if default is _REQUIRED:
                raise UserError("is missing", where=self.where(names[0]), fix=_OWN_FILE)
            return default
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise UserError(f"is {value!r}, expected {noun}", where=self.where(names[0]), fix=_OWN_FILE)
        return value

    def integer(self, *names: str, default: Any = _REQUIRED) -> int:
        """An integer under one of ``names``."""
        return self._typed(names, default, (int,), "an integer")  # type: ignore[no-any-return]

    def number(self, *names: str, default: Any = _REQUIRED) -> float:
        """A number under one of ``names``, as float."""
        return float(self._typed(names, default, (int, float), "a number"))

    def text(self, *names: str, default: Any = _REQUIRED) -> str:
        """A string under one of ``names``."""
        return self._typed(names, default, (str,), "a string")  # type: ignore[no-any-return]

    def flag(self, *names: str, default: bool = False) -> bool:
        """A boolean under one of ``names``."""
        return self._typed(names, default, (bool,), "true or false")  # type: ignore[no-any-return]

    def section(self, *names: str) -> Fields | None:
        """A nested object under one of ``names``, or None."""
        value = self._typed(names, None, (dict,), "an object")
        return None if value is None else Fields(value, self.source, f"{self.prefix}{names[0]}.")

    def refuse(self, name: str, *, allowed: tuple[Any, ...], what: str = "is not served", fix: str = "") -> None:
        """Raise UserError unless the field is absent, null or one of ``allowed``."""
        value = self.get(name)
        if value is not None and value not in allowed:
            served = " or ".join(json.dumps(choice) for choice in allowed) or "null"
            raise UserError(f"{value!r} {what}", where=self.where(name), fix=fix or f"use a model with {name} {served}")
