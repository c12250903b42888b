"""What pip installs: the source distribution, installations that compile nothing, and the check of the real wheel."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

import trtllm_tokenweave

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "trtllm_tokenweave"
TAG = "py3-none-linux_x86_64"
_NAMES = ("tokenweave", "tokenweave_trt", "tokenweave_reference", "tokenweave_preload")
LIBRARIES = {f"{PACKAGE}/lib/lib{name}.so" for name in _NAMES}
FOUND_BY = [
    f"cmake/{PACKAGE}/{PACKAGE}{name}.cmake" for name in ("Config", "ConfigVersion", "Targets", "Targets-release")
]
FOUND_BY += [f"pkgconfig/{name}.pc" for name in ("tokenweave", PACKAGE)]


def build(hook: str, folder: Path, **env: str) -> Path:
    """Call one of the build backend's hooks, as pip does."""
    pytest.importorskip("scikit_build_core")
    call = f"import sys; from scikit_build_core.build import {hook} as hook; hook(sys.argv[1])"
    command = [sys.executable, "-c", call, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def package_files(folder: str) -> set[str]:
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files}


def shipped_tables() -> dict[str, Path]:
    return {f"{PACKAGE}/tables/{path.name}": path for path in (ROOT / "tuning/tables").iterdir()}


def test_source_distribution_holds_what_the_build_needs_and_nothing_that_was_fetched_or_built(tmp_path: Path) -> None:
    made = build("build_sdist", tmp_path)
    with tarfile.open(made) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "build_scripts/fetch_sdk"} <= files
    assert package_files("plugins") | package_files(PACKAGE) | package_files("tuning") <= files
    assert {name.split("/")[0] for name in files if name.startswith(".")} <= {".ci", ".clang-format", ".gitignore"}
    assert not any(re.match(r"build/|demo_report/|.*__pycache__|.*\.(so|whl|pyc)$", name) for name in files)
    assert made.stat().st_size < 5e6


def test_editable_installation_compiles_nothing_and_is_the_source_tree(tmp_path: Path) -> None:
    files = names(build("build_editable", tmp_path))
    assert not any(name.startswith(f"{PACKAGE}/") for name in files)
    assert any(name.endswith(".pth") for name in files)


def test_installation_without_the_libraries_can_be_asked_for(tmp_path: Path) -> None:
    wheel = build("build_wheel", tmp_path, SKBUILD_WHEEL_CMAKE="0")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert names(wheel) == package_files(PACKAGE) | set(shipped_tables())
    assert refusal(wheel)[:1] == [f"its tag is not py3-none-PLATFORM: {wheel.name}"]


# ---- build_scripts/check_wheel: what it has to refuse


def pack(folder: Path, library: Path, tag: str = TAG, without: str = "", extra: str = "") -> Path:
    """A wheel like the real one, but for its libraries."""
    version = trtllm_tokenweave.__version__
    info = f"{PACKAGE}-{version}.dist-info"
    wheel = folder / f"{PACKAGE}-{version}-{tag}.whl"
    headers = ROOT.glob("plugins/**/include/tokenweave/*.h")
    files = {name: ROOT / name for name in package_files(PACKAGE)}
    files |= {f"{PACKAGE}/include/tokenweave/{path.name}": path for path in headers}
    files |= shipped_tables()
    files |= dict.fromkeys(LIBRARIES, library)
    files |= {f"{PACKAGE}/lib/{name}": ROOT / "README.md" for name in FOUND_BY}
    if extra:
        files[extra] = library
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, path in files.items():
            if name != without:
                archive.write(path, name)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def refusal(wheel: Path) -> list[str]:
    """What check_wheel holds against a wheel."""
    command = [sys.executable, str(ROOT / "build_scripts/check_wheel"), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, ""), done.stdout + done.stderr
    return done.stdout.removeprefix("FAIL: ").rstrip().split("\nFAIL: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tag": "cp311-cp311-linux_x86_64"}, "its tag is not py3-none-PLATFORM: "),
        ({"without": f"{PACKAGE}/lib/libtokenweave_trt.so"}, f"it lacks {PACKAGE}/lib/libtokenweave_trt.so"),
        (
            {"without": f"{PACKAGE}/lib/libtokenweave_reference.so"},
            f"it lacks {PACKAGE}/lib/libtokenweave_reference.so",
        ),
        ({"without": f"{PACKAGE}/include/tokenweave/plugins.h"}, f"it lacks {PACKAGE}/include/tokenweave/plugins.h"),
        ({"without": f"{PACKAGE}/tables/README.md"}, f"it lacks {PACKAGE}/tables/README.md"),
        ({"without": f"{PACKAGE}/lib/pkgconfig/tokenweave.pc"}, f"it lacks {PACKAGE}/lib/pkgconfig/tokenweave.pc"),
        ({"without": f"{PACKAGE}/cli/entry.py"}, f"it lacks {PACKAGE}/cli/entry.py"),
        ({"extra": f"{PACKAGE}/lib/libtokenweave.so.0"}, f"it should not hold {PACKAGE}/lib/libtokenweave.so.0"),
        ({"extra": "tests/cpp/tokenweave_tests"}, "it should not hold tests/cpp/tokenweave_tests"),
    ],
)
def test_wheels_with_other_files_are_refused(change: dict[str, str], message: str, tmp_path: Path) -> None:
    (found,) = refusal(pack(tmp_path, Path(__file__), **change))
    assert found.startswith(message)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf (apt-get install binutils)")
def test_libraries_that_another_machine_cannot_load_are_refused(tmp_path: Path) -> None:
    (numpys,) = Path(np.__file__).parent.rglob("_multiarray_umath*.so")
    found = refusal(pack(tmp_path, numpys))
    assert any(re.match(r"libtokenweave\.so has NEEDED lib.*blas", fault) for fault in found)
    assert any(re.match(r"libtokenweave_trt\.so has R(UN)?PATH \$ORIGIN", fault) for fault in found)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf (apt-get install binutils)")
def test_libraries_of_something_else_are_refused(tmp_path: Path) -> None:
    ctypes.CDLL("libm.so.6")
    libm = re.search(r"\S+/libm\.so\.6", Path("/proc/self/maps").read_text(encoding="utf-8"))
    assert libm is not None
    (found,) = refusal(pack(tmp_path, Path(libm.group())))
    assert "is another library: it has no twVersion" in found
