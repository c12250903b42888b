"""Every environment variable that the Python side reads, declared once.

No other module of this package reads ``os.environ``. (The C++ side has its own single place.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trtllm_tokenweave.errors import UserError


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: Its name.
        meaning: What it does, in one sentence.
        default: What holds when it is not set, in words.
    """

    name: str
    meaning: str
    default: str


DEBUG = Variable(
    "TLLM_TOKENWEAVE_DEBUG",
    "1 prints the Python traceback of an error below its one line.",
    "one line only",
)
CUDA_HOME = Variable(
    "CUDA_HOME",
    "Folder of the CUDA toolkit: its bin/nvcc is looked at before PATH.",
    "CUDA_PATH, then nvcc on PATH, then /usr/local/cuda",
)
CUDA_PATH = Variable(
    "CUDA_PATH",
    "Another usual name of CUDA_HOME; CUDA_HOME wins.",
    "not used",
)
TENSORRT_ROOT = Variable(
    "TENSORRT_ROOT",
    "Folder of a TensorRT SDK, with include/ and lib/: looked at before the system's libraries.",
    "the tensorrt Python package, then the system's libraries",
)
LIBRARY = Variable(
    "TOKENWEAVE_LIBRARY",
    "Path of libtokenweave.so, the CUDA library.",
    "lib/ of the installed package, then build/plugins/ of the source tree",
)
TRT_LIBRARY = Variable(
    "TOKENWEAVE_TRT_LIBRARY",
    "Path of libtokenweave_trt.so, the TensorRT plugins.",
    "lib/ of the installed package, then build/plugins/trt/ of the source tree",
)
REFERENCE_LIBRARY = Variable(
    "TOKENWEAVE_REFERENCE_LIBRARY",
    "Path of libtokenweave_reference.so, TensorRT-LLM's plugins for machines without TensorRT-LLM.",
    "lib/ of the installed package, then build/plugins/reference/ of the source tree",
)
IS_BUILDING = Variable(
    "IS_BUILDING",
    "1: plugins do nothing, as TensorRT-LLM's and ours do in a build; the builder sets it for that time.",
    "plugins run",
)
TABLE = Variable(
    "TOKENWEAVE_TABLE",
    "Tuning table of a trtllm-build that is given the model class file (docs/trtllm_build.md).",
    "the default rule",
)
MIN_TOKENS = Variable(
    "TOKENWEAVE_MIN_TOKENS",
    "The same build: steps of fewer tokens are not split.",
    "the table's",
)
SPLIT_ATTENTION = Variable("TOKENWEAVE_SPLIT_ATTENTION", "The same build: 0 leaves attention whole.", "split")
STRICT = Variable("TOKENWEAVE_STRICT", "The same build: 1 fails where nothing could be fused.", "builds as stock")
DATA_HOME = Variable("XDG_DATA_HOME", "Folder for data of this user's programs: of the shim.", "~/.local/share")
LAUNCH = Variable(
    "TOKENWEAVE_LAUNCH",
    'For experiments: "ctas=8,threads=1024,gemm_sms=116" (any of them) instead of what tables say of split steps.',
    "as the engines' tables say",
)
SHARE_GPUS = Variable(
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "NCCL's, from 2.30 on: 1 lets ranks share the GPUs where there are fewer; they take turns, slowly, for trying out.",
    "a GPU for each rank",
)
OMPI_RANK = Variable("OMPI_COMM_WORLD_RANK", "Set by Open MPI's mpirun: rank of this process.", "not under Open MPI")
OMPI_SIZE = Variable("OMPI_COMM_WORLD_SIZE", "Set by Open MPI's mpirun: number of ranks.", "not under Open MPI")
PMI_RANK = Variable("PMI_RANK", "Set by MPICH's and Intel MPI's mpirun: rank of this process.", "not under MPICH")
PMI_SIZE = Variable("PMI_SIZE", "Set by MPICH's and Intel MPI's mpirun: number of ranks.", "not under MPICH")

VARIABLES: tuple[Variable, ...] = (
    DEBUG,
    CUDA_HOME,
    CUDA_PATH,
    TENSORRT_ROOT,
    LIBRARY,
    TRT_LIBRARY,
    REFERENCE_LIBRARY,
    IS_BUILDING,
    LAUNCH,
    TABLE,
    MIN_TOKENS,
    SPLIT_ATTENTION,
    STRICT,
    DATA_HOME,
    SHARE_GPUS,
    OMPI_RANK,
    OMPI_SIZE,
    PMI_RANK,
    PMI_SIZE,
)
"""All of them, in the order in which documentation lists them."""


@dataclass(frozen=True)
class Launcher:
    """Place of this process among those that mpirun started.

    Attributes:
        rank: 0 <= rank < size.
        size: Number of processes, >= 1.
    """

    rank: int
    size: int


@dataclass(frozen=True)
class Environment:
    """The variables, read and checked.

    Attributes:
        debug: Print tracebacks (`DEBUG`).
        cuda_home: Folder of the CUDA toolkit (`CUDA_HOME`, `CUDA_PATH`), or None.
        tensorrt_root: Folder of a TensorRT SDK (`TENSORRT_ROOT`), or None.
        library: The CUDA library (`LIBRARY`), or None.
        trt_library: The TensorRT plugins (`TRT_LIBRARY`), or None.
        reference_library: TensorRT-LLM's plugins (`REFERENCE_LIBRARY`), or None.
        table: Tuning table (`TABLE`), or None.
        min_tokens: Least tokens of a step that is split (`MIN_TOKENS`), or None.
        split_attention: Cut attention too (`SPLIT_ATTENTION`).
        strict: Fail where nothing could be fused (`STRICT`).
        share_gpus: Ranks without a GPU of their own share one (`SHARE_GPUS`).
        launcher: Rank and size given by mpirun, or None outside of it. Known without loading MPI.
        launch: Launch configuration of experiments (`LAUNCH`) as it was written; read where the plugins are loaded.
    """

    debug: bool = False
    cuda_home: Path | None = None
    tensorrt_root: Path | None = None
    library: Path | None = None
    trt_library: Path | None = None
    reference_library: Path | None = None
    table: Path | None = None
    min_tokens: int | None = None
    split_attention: bool = True
    strict: bool = False
    share_gpus: bool = False
    launcher: Launcher | None = None
    launch: str = ""

    def needed_ranks(self, command: str) -> Launcher:
        """What mpirun started, for a command that needs several ranks.

        Raises:
            UserError: one rank, or none.
        """
        if self.launcher is None or self.launcher.size < 2:
            fix = f"mpirun -n 2 trtllm-tokenweave {command} ..."
            raise UserError("there is one rank, so nothing to communicate", where=command, fix=fix)
        return self.launcher

    def check_launch(self) -> None:
        """For commands that measure launches of their own.

        Raises:
            UserError: `LAUNCH` is set.
        """
        if self.launch:
            raise UserError("would be measured instead of every candidate", where=LAUNCH.name, fix="unset it")


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read the variables.

    Args:
        environ: Variables to read, default ``os.environ``. An empty value counts as not set.

    Raises:
        UserError: A value cannot be understood; the message names the variable and what it accepts.
    """
    values = {name: value.strip() for name, value in (os.environ if environ is None else environ).items()}
    return Environment(
        debug=_flag(values, DEBUG),
        cuda_home=_path(values, CUDA_HOME) or _path(values, CUDA_PATH),
        tensorrt_root=_path(values, TENSORRT_ROOT),
        library=_path(values, LIBRARY),
        trt_library=_path(values, TRT_LIBRARY),
        reference_library=_path(values, REFERENCE_LIBRARY),
        table=_path(values, TABLE),
        min_tokens=_count(values, MIN_TOKENS) if values.get(MIN_TOKENS.name) else None,
        split_attention=_flag(values, SPLIT_ATTENTION, default=True),
        strict=_flag(values, STRICT),
        share_gpus=values.get(SHARE_GPUS.name) == "1",
        launcher=_launcher(values, OMPI_RANK, OMPI_SIZE) or _launcher(values, PMI_RANK, PMI_SIZE),
        launch=values.get(LAUNCH.name, ""),
    )


def set_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of `VARIABLES` that are set, by name, with their values."""
    values = os.environ if environ is None else environ
    return {variable.name: values[variable.name] for variable in VARIABLES if values.get(variable.name)}


def _flag(values: Mapping[str, str], variable: Variable, *, default: bool = False) -> bool:
    value = values.get(variable.name, "").lower()
    if not value:
        return default
    if value in ("0", "false", "off", "no"):
        return False
    if value in ("1", "true", "on", "yes"):
        return True
    raise UserError(f"{value!r} is neither 0 nor 1", where=variable.name, fix="set it to 0 or 1, or unset it")


def _path(values: Mapping[str, str], variable: Variable) -> Path | None:
    value = values.get(variable.name, "")
    return Path(value) if value else None


def _launcher(values: Mapping[str, str], rank: Variable, size: Variable) -> Launcher | None:
    """Rank and size, or None where either is missing (some launchers set only one of them for other ends)."""
    if not values.get(rank.name) or not values.get(size.name):
        return None
    launcher = Launcher(_count(values, rank), _count(values, size))
    if launcher.rank >= launcher.size:
        what = f"rank {launcher.rank} of {launcher.size} processes does not exist"
        raise UserError(what, where=f"{rank.name}, {size.name}", fix="start the command with mpirun, or unset both")
    return launcher


def _count(values: Mapping[str, str], variable: Variable) -> int:
    value = values[variable.name]
    if not (value.isascii() and value.isdigit()):
        fix = "give a count of tokens" if variable is MIN_TOKENS else "start the command with mpirun"
        raise UserError(f"{value!r} is not a count", where=variable.name, fix=fix)
    return int(value)


#: Thread counts of the BLAS libraries that numpy comes with. Ranks run beside each other as threads or processes;
#: a BLAS that takes all cores for each of them is several times slower.
BLAS_THREADS: dict[str, str] = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

#: Lets Open MPI (4 and 5) start as root and start more ranks than there are cores.
_MPI: dict[str, str] = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@contextmanager
def building() -> Iterator[None]:
    """Set IS_BUILDING to 1 inside a ``with``, for the C++ side too; afterwards it is what it was."""
    before = os.environ.get(IS_BUILDING.name)
    os.environ[IS_BUILDING.name] = "1"
    try:
        yield
    finally:
        del os.environ[IS_BUILDING.name]
        if before is not None:
            os.environ[IS_BUILDING.name] = before


def data_folder() -> Path:
    """Folder for data of this user's programs (`DATA_HOME`)."""
    given = os.environ.get(DATA_HOME.name, "")
    return Path(given) if given.startswith("/") else Path.home() / ".local" / "share"


def search_path() -> list[Path]:
    """The folders in which programs are looked for (PATH), in order."""
    return [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]


def columns_are_given() -> bool:
    """Whether the user says how wide output is (COLUMNS)."""
    return "COLUMNS" in os.environ


def forget_no_columns() -> None:
    """Take a COLUMNS that is empty or 0 as not set: in no columns at all nothing would be shown."""
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)


#: What `limit_blas_threads` has set.
_limited: set[str] = set()


def limit_blas_threads() -> None:
    """Set `BLAS_THREADS` in this process where the user has not; works only before numpy is imported."""
    for name, value in BLAS_THREADS.items():
        if name not in os.environ:
            os.environ[name] = value
            _limited.add(name)


def prepare_benchmark() -> dict[str, str]:
    """Let NCCL's symmetric kernels use enough CTAs (where the user has not set it); every rank, before NCCL starts.

    Returns:
        The variables of NCCL and of torch's symmetric memory that are set: results depend on them.
    """
    os.environ.setdefault("NCCL_SYM_CTAS", "64")
    return {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "TORCH_SYMM"))}


def launch_environment() -> dict[str, str]:
    """The user's environment for an mpirun of programs that choose their threads themselves."""
    return {**_MPI, **{name: value for name, value in os.environ.items() if name not in _limited}}


def launch_additions() -> dict[str, str]:
    """What `launch_environment` adds to the user's."""
    return {name: value for name, value in _MPI.items() if name not in os.environ}


def mpi_environment() -> dict[str, str]:
    """This process's environment for an mpirun that the user did not start himself."""
    return {**BLAS_THREADS, **_MPI, **os.environ}
