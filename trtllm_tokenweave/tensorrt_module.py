"""The one place that imports TensorRT, and TensorRT's log.

TensorRT is heavy, and many machines have none: nothing here is done before it is asked for.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import re
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from trtllm_tokenweave.config import TENSORRT_ROOT, read_environment
from trtllm_tokenweave.device import current_gpu
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.installed import TENSORRT

#: The bindings of NVIDIA's package, then the same without the libraries (``tensorrt_cu12_bindings`` and its like).
_PACKAGE, _BINDINGS = "tensorrt", "tensorrt_bindings"

#: What the bindings are linked to, in the order in which they need one another.
_LIBRARIES = ("libnvinfer.so.10", "libnvinfer_plugin.so.10", "libnvonnxparser.so.10")

_FIX = (
    f"pip install 'tensorrt>=10.6,<11', or set {TENSORRT_ROOT.name} to a TensorRT SDK and install its Python bindings"
)


@cache
def tensorrt() -> Any:
    """TensorRT's Python module: ``tensorrt``, else ``tensorrt_bindings`` over the libraries of TENSORRT_ROOT.

    Raises:
        UserError: when there is none, it cannot be loaded, or its version is not served.
    """
    lacks = []
    for name, prepare in ((_PACKAGE, None), (_BINDINGS, _load_libraries)):
        if importlib.util.find_spec(name) is None:
            lacks.append(f"there is no Python package {name}")
            continue
        try:
            if prepare is not None:
                prepare()
            module = importlib.import_module(name)
        except (ImportError, OSError, UserError) as error:
            lacks.append(f"{name} cannot be loaded ({error})")
            continue
        if module.__version__ not in TENSORRT:
            what = f"version {module.__version__} of {name} is not served: {TENSORRT} is needed"
            raise UserError(what, where="TensorRT", fix=_FIX)
        return module
    raise UserError("; ".join(lacks), where="TensorRT", fix=_FIX)


def _load_libraries() -> None:
    """Load the libraries of TENSORRT_ROOT for bindings that do not bring them; without it the loader finds them."""
    folder = _library_folder()
    for path in (Path(folder, name) for name in _LIBRARIES) if folder is not None else ():
        if path.exists():
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _library_folder() -> Path | None:
    """The folder of TENSORRT_ROOT that holds TensorRT's libraries; None where the variable is not set."""
    root = read_environment().tensorrt_root
    if root is None:
        return None
    folders = (folder for folder in (root / "lib", root, root / "lib64") if (folder / _LIBRARIES[0]).exists())
    found = next(folders, None)
    if found is None:
        what = f"is {root}, and neither it nor its lib holds {_LIBRARIES[0]}"
        raise UserError(what, where=TENSORRT_ROOT.name, fix="name the folder of a TensorRT SDK")
    return found


def create_builder() -> Any:
    """TensorRT's ``Builder``, with the log of this package.

    Raises:
        UserError: TensorRT's kernels cannot be loaded.
        TokenWeaveError: TensorRT makes none; carries its message.
    """
    trt = tensorrt()
    if trt.__name__ == _BINDINGS:
        _load_kernels()
    LINES.clear()
    try:
        return trt.Builder(logger())
    except TypeError as error:  # its way to say so
        raise tensorrt_error("TensorRT makes no builder") from error


def _load_kernels() -> None:
    """Load the builder's kernels from TENSORRT_ROOT, of which TensorRT knows nothing.

    They are one large file, or in newer releases one for each compute capability and one of PTX.
    """
    folder = _library_folder()
    if folder is None:
        return
    capability = current_gpu().compute_capability.replace(".", "")
    wanted = re.compile(rf"libnvinfer_builder_resource(_sm{capability}|_ptx)?\.so\..*")
    for path in sorted(path for path in folder.iterdir() if wanted.fullmatch(path.name)):
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            raise UserError(f"cannot be loaded: {error}", where=str(path), fix="install the SDK again") from error


#: TensorRT 10.6 logs it as an error for each TokenWeaveAttention layer of a context that it makes, and whose steps run.
#: Kept, these lines would push a real error's reason out.
_NO_ERROR = "Assertion mGpuAllocator != nullptr failed"


class LogLines:
    """Hands TensorRT's messages to Python's ``logging`` and keeps the newest errors for messages of ours.

    Severities are TensorRT's: 0 internal error, 1 error, 2 warning, 3 info, 4 verbose.
    """

    _LEVELS = (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)

    def __init__(self, name: str = "trtllm_tokenweave.tensorrt", keep: int = 3) -> None:
        self._logger = logging.getLogger(name)
        self._errors: deque[str] = deque(maxlen=keep)

    def record(self, severity: int, message: str) -> None:
        """Take one message in."""
        if _NO_ERROR in message:
            severity = len(self._LEVELS) - 1
        if severity <= 1:
            self._errors.append(message.strip())
        self._logger.log(self._LEVELS[min(severity, len(self._LEVELS) - 1)], "%s", message)

    def clear(self) -> None:
        """Forget the errors so far: before a call whose failure they would not explain."""
        self._errors.clear()

    def take_errors(self) -> str:
        """The newest errors, oldest first, on one line; they are forgotten with that."""
        text = "; ".join(" ".join(error.split()) for error in self._errors)
        self.clear()
        return text


LINES = LogLines()


@cache
def logger() -> Any:
    """The ``ILogger`` of everything that this package makes with TensorRT, which has one logger a process."""
    trt = tensorrt()

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            LINES.record(int(severity), message)

    return Logger()


def progress_monitor(say: Callable[[str], None], seconds: float = 5.0) -> Any:
    """An ``IProgressMonitor`` for builds, which take minutes: says what TensorRT does, once in ``seconds`` at most."""
    trt = tensorrt()

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.sizes: dict[str, int] = {}
            self.said = time.monotonic()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            del parent_phase
            self.sizes[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            now = time.monotonic()
            if now - self.said >= seconds:
                self.said = now
                say(f"{phase_name}: {step + 1} of {self.sizes.get(phase_name, 0)}")
            return True  # go on

        def phase_finish(self, phase_name: str) -> None:
            self.sizes.pop(phase_name, None)

    return Monitor()


def tensorrt_error(what: str, *, also: str = "") -> TokenWeaveError:
    """An error that carries what TensorRT logged.

    Args:
        what: What failed, as a clause.
        also: What another library says about it, for instance the plugins'.
    """
    reasons = [reason for reason in (also, LINES.take_errors()) if reason]
    return TokenWeaveError(f"{what}: {'; '.join(reasons) if reasons else 'TensorRT gave no reason'}")
