from __future__ import annotations

import re
from pathlib import Path

import pytest

from trtllm_tokenweave import config
from trtllm_tokenweave.config import Environment, Launcher, read_environment, set_variables
from trtllm_tokenweave.errors import UserError

PACKAGE = Path(config.__file__).parent


def test_nothing_set() -> None:
    assert read_environment({}) == Environment()


@pytest.mark.parametrize(("value", "meaning"), [("1", True), ("ON", True), (" yes ", True), ("0", False), ("", False)])
def test_debug(value: str, meaning: bool) -> None:
    assert read_environment({"TLLM_TOKENWEAVE_DEBUG": value}).debug is meaning


def test_debug_refuses_other_words() -> None:
    with pytest.raises(UserError, match=r"TLLM_TOKENWEAVE_DEBUG: 'maybe' is neither 0 nor 1\. Fix: "):
        read_environment({"TLLM_TOKENWEAVE_DEBUG": "maybe"})


@pytest.mark.parametrize(("value", "meaning"), [("1", True), ("0", False), ("", False), ("2", False), ("yes", False)])
def test_what_nccl_takes_for_shared_gpus(value: str, meaning: bool) -> None:
    """The variable is NCCL's: no value of it is an error of ours."""
    assert read_environment({"NCCL_MULTI_RANK_GPU_ENABLE": value}).share_gpus is meaning


def test_folders() -> None:
    both = {"CUDA_HOME": "/a", "CUDA_PATH": "/b", "TENSORRT_ROOT": "/c"}
    assert read_environment(both).cuda_home == Path("/a")
    assert read_environment({"CUDA_PATH": "/b", "CUDA_HOME": ""}).cuda_home == Path("/b")
    assert read_environment(both).tensorrt_root == Path("/c")


def test_libraries() -> None:
    names = ("TOKENWEAVE_LIBRARY", "TOKENWEAVE_TRT_LIBRARY", "TOKENWEAVE_REFERENCE_LIBRARY")
    read = read_environment({name: f"/{name}.so" for name in names})
    assert [read.library, read.trt_library, read.reference_library] == [Path(f"/{name}.so") for name in names]


def test_launchers() -> None:
    open_mpi = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}
    assert read_environment(open_mpi).launcher == Launcher(rank=2, size=3)
    assert read_environment({"PMI_RANK": "0", "PMI_SIZE": "1"}).launcher == Launcher(rank=0, size=1)
    assert read_environment({"PMI_RANK": "0"}).launcher is None


@pytest.mark.parametrize(("rank", "size"), [("3", "3"), ("-1", "3"), ("one", "3"), ("0", "0"), ("٣", "4")])
def test_launcher_refuses_what_cannot_be(rank: str, size: str) -> None:
    with pytest.raises(UserError, match="OMPI_COMM_WORLD_"):
        read_environment({"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size})


def test_set_variables_lists_only_what_is_declared_and_set() -> None:
    environ = {"CUDA_HOME": "/a", "PATH": "/bin", "PMI_RANK": ""}
    assert set_variables(environ) == {"CUDA_HOME": "/a"}


def test_variables_are_declared_once_and_explained() -> None:
    names = [variable.name for variable in config.VARIABLES]
    assert len(names) == len(set(names))
    assert all(variable.meaning and variable.default for variable in config.VARIABLES)
    declared = {value for value in vars(config).values() if isinstance(value, config.Variable)}
    assert declared == set(config.VARIABLES)


def test_no_other_module_reads_the_environment() -> None:
    readers = re.compile(r"\bos\.(environ|getenv)|from os import .*(environ|getenv)")
    found = [path.name for path in PACKAGE.rglob("*.py") if readers.search(path.read_text(encoding="utf-8"))]
    assert found == ["config.py"]
