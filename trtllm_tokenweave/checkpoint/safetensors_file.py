"""Reading tensors out of one or more safetensors files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtllm_tokenweave.checkpoint.dtypes import Array
from trtllm_tokenweave.checkpoint.names import Shape
from trtllm_tokenweave.errors import UserError

_FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsFiles:
    """The tensors of several files under one roof; headers are read at once, a tensor when it is asked for.

    Raises UserError for a file that is missing or damaged.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        import ml_dtypes  # noqa: F401  (teaches numpy the name bfloat16, which safetensors looks up)
        from safetensors import SafetensorError, safe_open

        self.shapes: dict[str, Shape] = {}
        self._dtypes: dict[str, str] = {}
        self._files: dict[str, tuple[Path, Any]] = {}
        for path in paths:
            try:
                handle: Any = safe_open(path, framework="numpy")
                for name in handle.keys():  # noqa: SIM118  (the handle is no mapping)
                    view = handle.get_slice(name)
                    self.shapes[name] = tuple(view.get_shape())
                    self._dtypes[name] = view.get_dtype()
                    self._files[name] = (path, handle)
            except FileNotFoundError as error:
                raise UserError(
                    "does not exist", where=str(path), fix="copy every file of the checkpoint into the folder"
                ) from error
            except (SafetensorError, OSError, ValueError) as error:
                raise UserError(
                    f"is no complete safetensors file ({error})", where=str(path), fix="download or convert it again"
                ) from error

    @property
    def places(self) -> dict[str, str]:
        """Tensor name -> path of the file that holds it."""
        return {name: str(path) for name, (path, _) in self._files.items()}

    def check_dtypes(self, names: Sequence[str]) -> None:
        """Raise UserError for the first of ``names`` that does not hold plain floating-point numbers."""
        for name in names:
            if name in self._dtypes and self._dtypes[name] not in _FLOATS:
                raise UserError(
                    f"tensor {name} has dtype {self._dtypes[name]}, expected one of {', '.join(_FLOATS)}",
                    where=str(self._files[name][0]),
                    fix="use the checkpoint with unquantized weights",
                )

    def read(self, name: str) -> Array:
        """A copy of the tensor called ``name``, in the file's dtype."""
        tensor: Array = self._files[name][1].get_tensor(name)
        return tensor
