"""The list of TensorRT-LLM's names: against the double, against installs that lack some, and in `doctor`."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support import trtllm_double

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.installed import SURFACE_PROBE, Finding, Machine, look
from trtllm_tokenweave.trtllm import surface
from trtllm_tokenweave.trtllm.models import stock_class
from trtllm_tokenweave.trtllm.surface import SURFACE, Name

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def double(tmp_path: Path) -> Iterator[dict[str, str]]:
    values = trtllm_double.environment(tmp_path)
    with trtllm_double.imported(values):
        yield values


def unlisted() -> type[BaseException]:
    found: type[BaseException] = importlib.import_module("tensorrt_llm._strict").__dict__["Unlisted"]
    return found


def test_the_double_has_every_name_and_is_checked_by_the_same_code(double: dict[str, str]) -> None:
    assert [checked for checked in surface.check() if checked.lack] == []
    assert surface.load().version == "1.1.0"


def test_the_double_has_no_other_name(double: dict[str, str]) -> None:
    for module in sorted({name.module for name in SURFACE}):
        listed = {name.path.partition(".")[0] for name in SURFACE if name.module == module}
        found = importlib.import_module(module)
        here = {name for name, value in found.__dict__.items() if getattr(value, "__module__", "") == module}
        # The stock classes are reached through MODEL_MAP.
        stock = {"LLaMAForCausalLM", "QWenForCausalLM", "EncoderDecoder"}
        assert {name for name in here if not name.startswith("_")} - stock <= listed, module


@pytest.mark.parametrize(
    ("module", "name"),
    [("tensorrt_llm.builder", "BuilderConfigs"), ("tensorrt_llm.network", "net_guard"), ("tensorrt_llm", "logger")],
)
def test_another_name_of_a_module_is_a_loud_failure(double: dict[str, str], module: str, name: str) -> None:
    found = importlib.import_module(module)
    with pytest.raises(unlisted()):
        getattr(found, name, "a default does not help")
    with pytest.raises(unlisted()):
        setattr(found, name, 1)


def test_names_that_the_double_needs_itself_are_closed_too(double: dict[str, str]) -> None:
    builder = importlib.import_module("tensorrt_llm.builder")
    assert "build_llama" in builder.__dict__
    with pytest.raises(unlisted()):
        _ = builder.build_llama


def test_another_member_of_an_object_is_a_loud_failure(double: dict[str, str]) -> None:
    network = importlib.import_module("tensorrt_llm.network").Network(None)
    with pytest.raises(unlisted()):
        hasattr(network, "plugin_config")
    mapping = importlib.import_module("tensorrt_llm.mapping").Mapping()
    with pytest.raises(unlisted()):
        getattr(mapping, "moe_ep_size", 1)


def test_the_package_touches_tensorrt_llm_in_one_place_only() -> None:
    sources = list((ROOT / "trtllm_tokenweave").rglob("*.py"))
    importing = [p.name for p in sources if re.search(r"^\s*(import|from) tensorrt_llm", p.read_text(), re.MULTILINE)]
    named = [p.name for p in sources if re.search(r"import_module\([^)]*tensorrt_llm", p.read_text())]
    assert importing == named == []


def test_every_name_is_documented() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text()
    for name in SURFACE:
        assert f"`{name.path}`" in text, name


# ---- installs that differ


def lacks() -> dict[str, str]:
    return {checked.name: checked.lack for checked in surface.check() if checked.lack}


def test_a_function_that_is_gone(double: dict[str, str]) -> None:
    del importlib.import_module("tensorrt_llm.network").__dict__["get_plugin_info"]
    assert lacks() == {"tensorrt_llm.network.get_plugin_info": "is missing"}
    with pytest.raises(UserError, match=r"get_plugin_info is missing") as raised:
        surface.load()
    assert "doctor" in raised.value.fix


def test_several_names_that_are_gone(double: dict[str, str]) -> None:
    module = importlib.import_module("tensorrt_llm.network")
    del module.__dict__["get_plugin_info"], module.__dict__["get_np_weight"]
    with pytest.raises(UserError, match=r"is missing \(and 1 more\)"):
        surface.load()


def test_a_class_that_is_gone(double: dict[str, str]) -> None:
    assert lacks() == {}  # all is imported
    del importlib.import_module("tensorrt_llm.functional").__dict__["DimRange"]
    assert set(lacks()) == {f"tensorrt_llm.functional.DimRange.{n}" for n in ("min", "opt", "max", "dimension_names")}


def test_a_parameter_that_is_gone(double: dict[str, str]) -> None:
    def optimize(network: object) -> None:
        del network

    importlib.import_module("tensorrt_llm.builder").__dict__["optimize"] = optimize
    assert lacks() == {"tensorrt_llm.builder.optimize": "takes no net"}


def test_a_member_that_is_gone(double: dict[str, str]) -> None:
    module = importlib.import_module("tensorrt_llm.network")

    class Network:
        def __init__(self) -> None:
            self.trt_network, self._inputs = None, None

    module.__dict__["Network"] = Network
    assert lacks() == {"tensorrt_llm.network.Network._unfilled_weights": "is missing"}


def test_members_are_found_where_a_class_declares_them() -> None:
    class Base:
        annotated: int

        def __init__(self) -> None:
            self.set_in_a_function = 1

        @property
        def asked(self) -> int:
            return 1

    class Derived(Base):
        pass

    Derived.model_fields = {"a_pydantic_field": None}  # type: ignore[attr-defined]
    for member in ("annotated", "set_in_a_function", "asked", "a_pydantic_field"):
        assert surface._declares(Derived, member)
    assert not surface._declares(Derived, "nowhere")


def test_an_install_that_does_not_import(tmp_path: Path) -> None:
    values = trtllm_double.environment(tmp_path)
    with trtllm_double.imported(values):
        sys.path.insert(0, str(tmp_path))
        package = tmp_path / "tensorrt_llm"
        package.mkdir()
        (package / "__init__.py").write_text(
            "import os\nos.environ['TRIED'] = os.environ.get('TRIED', '') + 'x'\nraise RuntimeError('no driver')"
        )
        with pytest.raises(UserError) as raised:
            surface.load()
        assert raised.value.what == "cannot be imported: RuntimeError: no driver"
        assert raised.value.where == "tensorrt_llm"
        assert os.environ["TRIED"] == "x"


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LLaMAForCausalLM", "Qwen2ForCausalLM"])
def test_stock_classes(double: dict[str, str], name: str) -> None:
    assert stock_class(name).__module__ == "tensorrt_llm.models"


def test_a_model_that_is_not_there(double: dict[str, str]) -> None:
    with pytest.raises(UserError, match="has no model 'Llama'") as raised:
        stock_class("Llama")
    assert "AutoModel, or one of DecoderModel, LlamaForCausalLM" in raised.value.fix


# ---- doctor


def machine(version: str | None, said: str | None) -> Machine:
    versions = {} if version is None else {"tensorrt_llm": version}
    none = Machine(versions.get, lambda _: None, lambda _: None, lambda _: None)
    return replace(none, surface=lambda: said)


def finding(there: Machine) -> Finding:
    (found,) = [found for found in look(there) if found.key == "trtllm_build"]
    return found


def asked(values: dict[str, str], folder: Path | None = None) -> str:
    """What the process of `doctor` prints."""
    command = [sys.executable, "-c", SURFACE_PROBE]
    return subprocess.run(command, env=values, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_doctor_asks_a_real_install(double: dict[str, str]) -> None:
    found = finding(machine("1.1.0", asked(double)))
    assert (found.status, found.version) == ("ok", f"{len(SURFACE)} names as expected")


def test_doctor_asks_no_source_tree(double: dict[str, str], tmp_path: Path) -> None:
    found = finding(machine("1.1.0", asked(double, trtllm_double.source_tree(tmp_path))))
    assert found.status == "ok"


def test_doctor_says_that_a_release_is_not_served(tmp_path: Path) -> None:
    found = finding(machine("0.16.0", asked(trtllm_double.environment(tmp_path, "0.16.0"))))
    assert found.status == "unsupported"
    assert "is too old" in found.version


def test_doctor_lists_what_differs() -> None:
    names = [{"name": "a.b", "lack": ""}, {"name": "a.c", "lack": "takes no d"}]
    found = finding(machine("1.1.0", "log lines\n" + json.dumps({"version": "1.1.0", "error": "", "names": names})))
    assert (found.status, found.version) == ("unsupported", "1 of 2 names differ")
    assert found.costs.endswith("; a.c takes no d")


@pytest.mark.parametrize("said", [None, "", "Segmentation fault"])
def test_doctor_without_an_answer(said: str | None) -> None:
    assert finding(machine("1.1.0", said)).status == "unsupported"


def test_doctor_without_tensorrt_llm() -> None:
    assert finding(machine(None, None)).status == "missing"


def test_names_read_well() -> None:
    assert str(Name("a.b", "C.d")) == "a.b.C.d"
    assert len({str(name) for name in SURFACE}) == len(SURFACE)
    assert all(name.use for name in SURFACE)
