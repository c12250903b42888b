from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_tokenweave import __version__, libraries
from trtllm_tokenweave.config import Environment, read_environment
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.libraries import LibraryName, find_library, load_library

#: The variable and the folder of the build of each library that a variable can name.
PLACES: dict[LibraryName, tuple[str, str]] = {
    "tokenweave": ("TOKENWEAVE_LIBRARY", ""),
    "tokenweave_trt": ("TOKENWEAVE_TRT_LIBRARY", "trt"),
    "tokenweave_reference": ("TOKENWEAVE_REFERENCE_LIBRARY", "reference"),
}
NOTHING = Environment()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders of the installed libraries and of those of a build; all empty."""
    installed, built = tmp_path / "package/lib", tmp_path / "build/plugins"
    monkeypatch.setattr(libraries, "PACKAGE", installed.parent)
    monkeypatch.setattr(libraries, "ROOT", tmp_path)
    for folder in (installed, *(built / folder for _, folder in PLACES.values())):
        folder.mkdir(parents=True, exist_ok=True)
    return [installed, built]


@pytest.mark.parametrize("name", PLACES)
def test_the_variable_wins_then_the_package_then_the_build(name: LibraryName, places: list[Path]) -> None:
    installed, built = places
    assert find_library(name, NOTHING) is None
    variable, folder = PLACES[name]
    in_build = built / folder / f"lib{name}.so"
    in_build.touch()
    assert find_library(name, NOTHING) == in_build
    in_package = installed / f"lib{name}.so"
    in_package.touch()
    assert find_library(name, NOTHING) == in_package
    assert find_library(name, read_environment({variable: "/named.so"})) == Path("/named.so")


@pytest.mark.parametrize("name", PLACES)
def test_no_library_is_taken_for_another(name: LibraryName, places: list[Path]) -> None:
    for other in set(PLACES) - {name}:
        for folder in (places[0], *(places[1] / folder for _, folder in PLACES.values())):
            (folder / f"lib{other}.so").touch()
    others = {variable: "/named.so" for other, (variable, _) in PLACES.items() if other != name}
    assert find_library(name, read_environment(others)) is None


def test_the_library_for_preloading_has_no_variable(places: list[Path]) -> None:
    installed, built = places
    (built / "preload").mkdir()
    for path in (built / "preload/libtokenweave_preload.so", installed / "libtokenweave_preload.so"):
        path.touch()
        assert find_library("tokenweave_preload", NOTHING) == path


def test_no_library(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENWEAVE_TRT_LIBRARY", raising=False)
    with pytest.raises(UserError, match=r"^libtokenweave_trt\.so: is not installed\. Fix: .*TOKENWEAVE_TRT_LIBRARY"):
        load_library("tokenweave_trt")
    (places[0] / "libtokenweave_trt.so").touch()
    with pytest.raises(UserError, match=r"package/lib/libtokenweave_trt\.so: cannot be loaded: .*too short"):
        load_library("tokenweave_trt")


class Loaded:
    """A library as ctypes has it; ``version`` None: it has no twVersion."""

    def __init__(self, version: str | None) -> None:
        if version is not None:
            self.twVersion = lambda: version.encode()


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "is another library: it has no twVersion"),
        ("0.0.1", f"is of version 0.0.1, but {__version__} is needed"),
        (__version__, None),
    ],
)
def test_other_libraries_and_versions(
    monkeypatch: pytest.MonkeyPatch, version: str | None, message: str | None
) -> None:
    monkeypatch.setenv("TOKENWEAVE_LIBRARY", "/there.so")
    monkeypatch.setattr("ctypes.CDLL", lambda _path: Loaded(version))
    if message is None:
        assert load_library("tokenweave").twVersion().decode() == version
    else:
        with pytest.raises(UserError, match=rf"^/there\.so: {message}\. Fix: .*TOKENWEAVE_LIBRARY"):
            load_library("tokenweave")


def test_a_library_that_the_variable_names_and_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWEAVE_LIBRARY", "/nowhere.so")
    with pytest.raises(UserError, match=r"^/nowhere\.so: cannot be loaded: .*Fix: .*TOKENWEAVE_LIBRARY"):
        load_library("tokenweave")
