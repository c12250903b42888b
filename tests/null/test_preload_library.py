"""The built library for LD_PRELOAD: its symbols. What it does is tested in tests/cpp/preload."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.library_tests import looked_into

from trtllm_tokenweave.libraries import find_library

LIBRARY = find_library("tokenweave_preload") or Path("libtokenweave_preload.so")


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY.name} is not built (cmake --build build)")


def test_one_function_is_exported() -> None:
    lines = looked_into(LIBRARY, "nm", "-D", "--defined-only").splitlines()
    assert [line.split()[-1] for line in lines] == ["createInferRuntime_INTERNAL"]


def test_every_process_can_load_it() -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", looked_into(LIBRARY, "readelf", "-d"))
    assert needed
    assert [name for name in needed if not re.fullmatch(r"lib(c|dl)\.so\.\d+|ld-linux-\S+\.so\.\d+", name)] == []
