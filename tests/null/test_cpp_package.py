"""The installed C++ package: the example is built as a user's project is, with CMake and with pkg-config, and run.

Where there is no TensorRT library, a stand-in is linked: the example ends before it needs TensorRT.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from support.vectors import FOLDER

from trtllm_tokenweave.config import mpi_environment, read_environment
from trtllm_tokenweave.libraries import find_library

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "plugins" / "examples"
BUILD = (find_library("tokenweave_trt") or ROOT / "build" / "plugins" / "trt" / "none").parents[2]
NEEDED = {
    "nlohmann/json.hpp": "nlohmann-json3-dev",
    "CLI/CLI.hpp": "libcli11-dev",
    "openssl/evp.h": "libssl-dev",
    "/usr/bin/mpicc": "libopenmpi-dev",
    "/usr/bin/cmake": "cmake",
    "/usr/bin/pkg-config": "pkg-config",
}
DOCUMENT = json.loads((FOLDER / "engine_folder.json").read_text())


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**mpi_environment(), **variables}
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=300, env=environment
    )


def built(*command: str | Path, **variables: str) -> str:
    done = run(*command, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def cached(variable: str) -> Path:
    """A value that the build was configured with."""
    for line in (BUILD / "CMakeCache.txt").read_text().splitlines():
        if line.startswith(f"{variable}:"):
            return Path(line.partition("=")[2])
    pytest.skip(f"{BUILD} was configured without {variable}")


def tensorrt_folder() -> Path:
    """Where libnvinfer is: TensorRT's, or the tests' stand-in."""
    root = read_environment().tensorrt_root or Path("/nowhere")
    for folder in (root / "lib", root, BUILD / "tests" / "cpp" / "preload"):
        if (folder / "libnvinfer.so.10").exists():
            return folder
    pytest.skip("neither TensorRT nor its stand-in is there (cmake --build build)")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package is installed."""
    names = ("libtokenweave.so", *(f"{name}/libtokenweave_{name}.so" for name in ("trt", "reference", "preload")))
    if not all((BUILD / "plugins" / name).exists() for name in names):
        pytest.skip(f"{BUILD} holds no whole build (cmake --build build)")
    for file, package in NEEDED.items():
        if not (Path("/usr/include") / file).exists() and shutil.which(Path(file).name) is None:
            pytest.skip(f"no {package} (apt-get install {package})")
    target = tmp_path_factory.mktemp("prefix") / "moved"
    built("cmake", "--install", BUILD, "--prefix", target.with_name("made"))
    target.with_name("made").rename(target)  # a wheel is unpacked elsewhere, too
    return target


@pytest.fixture(scope="module")
def example(prefix: Path) -> Path:
    """The example, built with find_package."""
    folder = prefix.with_name("example")
    places = {
        "CMAKE_PREFIX_PATH": prefix,
        "TENSORRT_INCLUDE_DIR": cached("TENSORRT_INCLUDE_DIR"),
        "TENSORRT_ROOT": tensorrt_folder(),
        "CUDAToolkit_ROOT": cached("CMAKE_CUDA_COMPILER").parents[1],
        "CMAKE_CXX_FLAGS": "-O0 -Wall -Wextra -Werror",
    }
    built("cmake", "-S", EXAMPLE, "-B", folder, *(f"-D{name}={value}" for name, value in places.items()))
    built("cmake", "--build", folder)
    return folder / "run_engine"


def engine_folder(folder: Path, tp_size: int) -> Path:
    """Files of an engine that was built for a GPU of another machine."""
    config = DOCUMENT["folders"]["config"] | {"tp_size": tp_size, "model": DOCUMENT["generations"][0]["model"]}
    (folder / "config.json").write_text(json.dumps(config))
    for rank in range(tp_size):
        manifest = DOCUMENT["folders"]["manifest"] | {"tp_size": tp_size, "rank": rank}
        (folder / f"rank{rank}.json").write_text(json.dumps(manifest))
    return folder


def refusal(code: int, *command: str | Path) -> str:
    """What a command says that ends with this code."""
    done = run(*command)
    assert (done.returncode, done.stdout) == (code, ""), done.stdout + done.stderr
    return done.stderr


def test_bad_input_ends_with_2_and_no_gpu_with_1(example: Path, tmp_path: Path) -> None:
    done = run(example)
    assert done.returncode == 2
    assert "folder is required" in done.stdout + done.stderr
    assert "'x' is no token id. Fix: " in refusal(2, example, tmp_path, "--prompt-ids", "1,x")
    missing = f"rank 0: error: {tmp_path}/config.json: is missing. Fix: give the folder of a whole engine"
    assert refusal(2, example, tmp_path, "--prompt-ids", "1,2").startswith(missing)
    engine_folder(tmp_path, 2)
    words = f"{tmp_path}/config.json: tp_size: tp_size is 2, but 1 ranks run. Fix: start 2 (mpirun -n 2)"
    assert words in refusal(2, example, tmp_path, "--prompt-ids", "1,2")
    where = "/nowhere.so: cannot open shared object file"
    assert where in refusal(2, example, tmp_path, "--prompt-ids", "1", "--plugins", "/nowhere.so")
    if shutil.which("nvidia-smi") is not None:
        return
    words = "rank 0: error: CUDA: no GPU can be used ("
    engine_folder(tmp_path, 1)
    assert refusal(1, example, tmp_path, "--prompt-ids", "1,2").startswith(words)
    engine_folder(tmp_path, 2)
    done = run("mpirun", "-n", "2", example, tmp_path, "--prompt-ids", "1,2")
    assert done.returncode == 1
    assert words in done.stderr


def test_pkg_config_builds_it_too(prefix: Path, tmp_path: Path) -> None:
    pkg_config = {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    flags = shlex.split(built("pkg-config", "--cflags", "--libs", "trtllm_tokenweave", "CLI11", "ompi-c", **pkg_config))
    cuda, tensorrt = cached("CMAKE_CUDA_COMPILER").parents[1], tensorrt_folder()
    folders = [folder for folder in (tensorrt, cuda / "lib64", cuda / "lib") if folder.exists()]
    program = tmp_path / "run_engine"
    built(
        *("c++", "-std=c++17", "-O0", "-DOMPI_SKIP_MPICXX", EXAMPLE / "run_engine.cpp", "-o", program),
        *("-isystem", cached("TENSORRT_INCLUDE_DIR"), "-isystem", cuda / "include"),
        *(f"-L{folder}" for folder in folders),
        *(f"-Wl,-rpath,{folder}" for folder in (prefix / "lib", *folders)),
        *flags,
    )
    assert "config.json: is missing" in refusal(2, program, tmp_path, "--prompt-ids", "1,2")


def test_the_kernels_alone_need_neither_tensorrt_nor_cuda(prefix: Path, tmp_path: Path) -> None:
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    _, alone = re.findall(r"```cpp\n(.*?)```", (ROOT / "docs/cpp.md").read_text(), re.DOTALL)
    source.write_text(alone)
    pkg_config = {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    flags = shlex.split(built("pkg-config", "--cflags", "--libs", "tokenweave", **pkg_config))
    built("c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", source, "-o", program, *flags)
    done = run(program, "2", LD_LIBRARY_PATH=str(prefix / "lib"))
    assert (done.returncode, done.stdout) == (1, "rank is 2, not 0 to size - 1 = 1\n")


def test_the_documented_use_of_an_engine_compiles(prefix: Path, tmp_path: Path) -> None:
    source = tmp_path / "program.cpp"
    code, _ = re.findall(r"```cpp\n(.*?)```", (ROOT / "docs/cpp.md").read_text(), re.DOTALL)
    source.write_text(code)
    includes = [
        prefix / "include",
        cached("TENSORRT_INCLUDE_DIR"),
        cached("CMAKE_CUDA_COMPILER").parents[1] / "include",
    ]
    flags = [word for folder in includes for word in ("-isystem", folder)]
    built("c++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", source, *flags)


def test_what_is_missing_is_named(prefix: Path, tmp_path: Path) -> None:
    nothing = {"TENSORRT_ROOT": "/nowhere", "CUDA_HOME": "/nowhere"}
    done = run("cmake", "-S", EXAMPLE, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}", **nothing)
    if done.returncode == 0:
        pytest.skip("this system has TensorRT and CUDA in its own folders")
    assert "TENSORRT_LIBRARY is not found" in done.stderr or "CUDA_RUNTIME_LIBRARY is not found" in done.stderr


def configured(prefix: Path, folder: Path, components: str, *options: str, **variables: str) -> tuple[int, str]:
    """The exit code of a project that asks for these components, and what CMake says, on one line."""
    project = "cmake_minimum_required(VERSION 3.25)\nproject(asks LANGUAGES C CXX)\n"
    (folder / "CMakeLists.txt").write_text(f"{project}find_package(trtllm_tokenweave REQUIRED {components})\n")
    done = run("cmake", "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}", *options, **variables)
    return done.returncode, " ".join(done.stderr.split())


def test_an_unknown_component_is_named_beside_the_known_one(prefix: Path, tmp_path: Path) -> None:
    code, said = configured(prefix, tmp_path, "COMPONENTS nosuch")
    assert code == 1
    assert "There is no component nosuch. Fix: leave it out; the only component is engine." in said
    assert configured(prefix, tmp_path, "OPTIONAL_COMPONENTS nosuch") == (0, "")


def test_without_tensorrt_its_variable_is_named(prefix: Path, tmp_path: Path) -> None:
    empty = tmp_path / "sdk"
    empty.mkdir()
    nothing = ("COMPONENTS engine", "-DTENSORRT_INCLUDE_DIR=NOTFOUND", "-DTENSORRT_LIBRARY=NOTFOUND")
    code, said = configured(prefix, tmp_path, *nothing, TENSORRT_ROOT=str(empty))
    if "TENSORRT_INCLUDE_DIR is not found. TENSORRT_LIBRARY is not found." not in said:
        pytest.skip("this system has TensorRT in its own folders")
    assert code == 1
    lacks = "with no include/NvInferRuntime.h and no lib/libnvinfer.so.10"
    assert f"TENSORRT_ROOT is {empty}, {lacks}. Fix: set TENSORRT_ROOT to a TensorRT SDK." in said
    (empty / "NvInferRuntime.h").touch()
    said = configured(prefix, tmp_path, *nothing, f"-DTENSORRT_ROOT={empty}", TENSORRT_ROOT="")[1]
    assert f"TENSORRT_ROOT is {empty}, with no lib/libnvinfer.so.10. Fix: " in said
    said = configured(prefix, tmp_path, *nothing, "-UTENSORRT_ROOT", TENSORRT_ROOT="")[1]
    assert "TENSORRT_ROOT is " not in said
    assert "Fix: set TENSORRT_ROOT to a TensorRT SDK." in said


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_a_build_that_leaves_the_plugins_out_names_the_variable(tmp_path: Path) -> None:
    # Without the system's own folders, which may hold TensorRT.
    not_there = (f"set(CMAKE_FIND_USE_{name}_PATH OFF)" for name in ("CMAKE_SYSTEM", "SYSTEM_ENVIRONMENT"))
    lines = ("cmake_minimum_required(VERSION 3.25)", "project(plugins NONE)", *not_there)
    (tmp_path / "CMakeLists.txt").write_text("\n".join([*lines, f"add_subdirectory({ROOT}/plugins/trt trt)", ""]))
    said = built("cmake", "-S", tmp_path, "-B", tmp_path / "build", TENSORRT_ROOT="/nowhere")
    assert "No TensorRT headers: the plugins are not built. Fix: set TENSORRT_ROOT to a TensorRT 10 SDK" in said
