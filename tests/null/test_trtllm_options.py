"""Options of `trtllm-build --plugin tokenweave`, and what the weave knows of TensorRT-LLM's network."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.models import small_table, tiny
from support.trtllm_place import WEAVE, Place, place

from trtllm_tokenweave import recorder, trt
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.table import Bucket, TuningTable
from trtllm_tokenweave.trtllm.command import run
from trtllm_tokenweave.trtllm.notes import plugin_description

__all__ = ["place"]  # a fixture

ROOT = Path(__file__).resolve().parents[2]


def test_strict_fails_before_anything_is_built(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.tp_size = 1
    assert main(["trtllm-build", *place.woven("--tokenweave_strict")]) == 1
    assert "nothing could be fused: tp_size is 1" in capsys.readouterr().err
    assert not (place.out / "rank0.engine").exists()


def test_strict_builds_what_is_fused(place: Place) -> None:
    assert run(place.woven("--tokenweave_strict")) == 0
    assert place.record()["mode"] == "weave"


# ---- options


def test_attention_can_stay_whole(place: Place) -> None:
    assert run(place.woven("--tokenweave_split_attention", "disable")) == 0
    assert place.record()["attention"] == "whole"
    assert "GPTAttention" in place.plugins()


def test_beams_leave_attention_whole(place: Place) -> None:
    assert run(place.woven("--max_beam_width", "2")) == 0
    assert (place.record()["attention"], place.record()["max_batch_size"]) == ("whole", 16)


def test_draft_tokens_leave_attention_whole(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(place.woven("--max_draft_len", "3")) == 0
    assert place.record()["attention"] == "whole"
    assert place.record()["refused"] == [{"where": "attention", "reason": "max_draft_len is 3", "stage": "attention"}]
    shown = (ROOT / "docs" / "trtllm_build.md").read_text()
    head, table, reason = capsys.readouterr().err.splitlines()[:3]
    head = re.sub(r"table \w{12}", "table b09c083a3938", head)  # the digest is that of a test's table
    assert all(f"    {line}\n" in shown for line in (head, reason))
    assert str(place.table) in table


@pytest.mark.parametrize(("last", "said"), [(80, True), (96, False)])
def test_steps_above_the_tables_rows_are_said(
    place: Place, capsys: pytest.CaptureFixture[str], *, last: int, said: bool
) -> None:
    table = small_table(place.config, 2)
    row = table.rows[0].model_copy(update={"tokens": Bucket(lo=1, hi=last)})
    words = place.woven()
    table.model_copy(update={"rows": (row,)}).save(place.table)
    assert run(words) == 0
    assert ("tokenweave:   table: steps of 81 to 96 tokens are above its rows" in capsys.readouterr().err) is said
    assert place.record()["table"]["beyond_rows"].startswith("steps of 81 to 96 tokens are above") is said
    assert main(["inspect", str(place.out)]) == 0
    assert ("table: steps of 81 to 96 tokens are above its rows" in " ".join(capsys.readouterr().out.split())) is said


def test_the_threshold_overrides_the_table(place: Place) -> None:
    assert run(place.woven("--tokenweave_min_tokens", "97")) == 0
    record = place.record()
    assert (record["mode"], record["table"]["min_tokens"]) == ("fuse", 97)
    assert record["refused"] == [
        {"where": "tuning table", "reason": "it splits no step of up to 96 tokens", "stage": "split"}
    ]
    assert place.told()["features"] == {}


@pytest.mark.parametrize("gemm", ["trt", "budget"])
def test_the_table_says_whose_gemms(place: Place, monkeypatch: pytest.MonkeyPatch, gemm: str) -> None:
    monkeypatch.setattr(TuningTable, "gemm", gemm)
    place.config = tiny(dtype="bfloat16")
    assert run(place.woven()) == 0
    assert ("Gemm" in place.plugins()) == (gemm == "budget")


def test_the_default_table_is_the_models(place: Place) -> None:
    assert run(place.words(*WEAVE)) == 0
    record = place.record()
    assert record["mode"] == "fuse"
    assert "single wave" in record["table"]["source"]


def test_a_table_of_another_model_is_refused_before_the_build(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    words = place.woven()
    small_table(place.config, 4).save(place.table)
    assert main(["trtllm-build", *words]) == 2
    assert "key.tp_size: made for tp_size 4, but 2 is needed" in capsys.readouterr().err
    assert list(place.out.iterdir()) == []


def test_a_table_of_the_other_kind_is_refused(place: Place) -> None:
    words = place.woven()
    moe = small_table(tiny("MixtralForCausalLM"), 2)
    moe.save(place.table)
    with pytest.raises(UserError, match="made for model_kind moe, but dense is needed"):
        run(words)


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (("--tokenweave_strict",), "--tokenweave_strict"),
        (("--tokenweave_min_tokens", "8"), "--tokenweave_min_tokens"),
        ((*WEAVE, "--tokenweave_min_tokens", "0"), "--tokenweave_min_tokens"),
        ((*WEAVE, "--tokenweave_min_tokens", "many"), "trtllm-build"),
        ((*WEAVE, "--tokenweave_tabel", "x"), "--tokenweave_tabel"),
        (("--plugin", "other"), "trtllm-build"),
        ((*WEAVE, "--tokenweave_tune", "--tokenweave_table", "x"), "--tokenweave_tune, --tokenweave_table"),
        ((*WEAVE, "--tokenweave_table", "missing.json"), "missing.json"),
    ],
)
def test_options_that_are_refused(place: Place, words: Sequence[str], where: str) -> None:
    with pytest.raises(UserError) as raised:
        run(place.words(*words))
    assert raised.value.where == where
    assert "trtllm-build --help" not in raised.value.fix.replace("trtllm-tokenweave trtllm-build --help", "")
    assert not (place.out / "rank0.engine").exists()


def test_the_command_of_the_documentation(place: Place) -> None:
    text = (ROOT / "docs" / "trtllm_build.md").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^    trtllm-tokenweave (trtllm-build --checkpoint_dir .*)$", text, re.MULTILINE)
    assert main([*line.split(), *place.words("--workers", "1")]) == 0
    assert place.record()["opt_num_tokens"] == [64, 96]


def test_stock_options_go_through_as_they_are(place: Place) -> None:
    stock = ["--kv_cache_type", "paged", "--gather_context_logits", "--lora_dir", "a", "b", "--gemm_plugin=auto"]
    assert main(["trtllm-build", *place.woven(*stock, "--max_seq_len", "64")]) == 0
    told = json.loads((place.out / "config.json").read_text())["build_config"]
    assert (told["kv_cache_type"], told["gather_context_logits"], told["gemm_plugin"]) == ("paged", True, "auto")
    assert (told["lora_dir"], told["max_seq_len"], told["checkpoint_dir"]) == (
        ["a", "b"],
        64,
        str(place.folder / "checkpoint"),
    )


def test_a_wrong_stock_option_ends_as_the_stock_command_does(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.argv
    with pytest.raises(SystemExit) as ended:
        run(place.woven("--no_such_option"))
    assert ended.value.code == 2
    assert "usage: trtllm-build" in capsys.readouterr().err
    assert sys.argv is before


def test_an_error_of_tensorrt_llm_keeps_its_traceback(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    words = place.woven()
    (place.folder / "checkpoint" / "config.json").write_text("{}")
    assert main(["trtllm-build", *words]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "TypeError" in err.splitlines()[-1]


def test_help_shows_both(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["--help"])
    out = capsys.readouterr().out
    assert "--tokenweave_table" in out
    assert "--checkpoint_dir" in out


# ---- what is known of the network


def test_fields_are_those_of_the_build(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = {}
    known = trt.note_plugin

    def note(network: Any, layer: str, key: Any, fields: Any) -> None:
        noted[layer] = (key, fields)
        known(network, layer, key, fields)

    monkeypatch.setattr(trt, "note_plugin", note)
    assert run(place.words(*WEAVE, "--reduce_fusion", "enable")) == 0
    layers = [layer for layer in place.network(1).layers if hasattr(layer, "plugin")]  # noted last
    stock = [layer for layer in layers if layer.plugin.plugin_namespace == "tensorrt_llm"]
    assert {layer.plugin.plugin_type for layer in stock} == {"AllGather", "AllReduce", "GPTAttention"}
    for layer in stock:
        key, fields = noted[layer.name]
        assert key == layer.plugin.spec.key
        assert {n: np.asarray(v).tolist() for n, v in fields.items()} == {
            n: np.asarray(v).tolist() for n, v in layer.plugin.fields.items()
        }


class _Info:
    """A `PluginInfo` of a release whose fields have other types than are known here."""

    def __init__(self, name: str, kind: str, values: Any) -> None:
        self.plugin_creator = SimpleNamespace(name="GPTAttention", plugin_version="1", plugin_namespace="tensorrt_llm")
        self.pfc = [SimpleNamespace(name=name, type=SimpleNamespace(name=kind))]
        self.pfc_as_ndarray = {name: values}


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [("num_heads", "INT8", np.int8), ("unidirectional", "INT32", np.int32), ("brand_new", "INT8", np.int8)],
)
def test_a_field_keeps_the_type_that_the_release_gives_it(name: str, kind: str, dtype: Any) -> None:
    key, fields = plugin_description(_Info(name, kind, np.asarray([1], dtype)))
    (field,) = trt.plugin_fields(key, fields)
    assert (field.name, field.type.name) == (name, kind)


def test_a_field_of_text() -> None:
    _, fields = plugin_description(_Info("label", "CHAR", np.frombuffer(b"text", np.int8)))
    assert fields == {"label": b"text"}


def test_no_weight_is_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The double's weights have no values when the network is woven; what is asked for has one element, or is ours."""
    asked = []
    known = trt.constant_values

    def values(network: Any, layer: Any) -> Any:
        if not str(layer.name).startswith("tokenweave/"):
            asked.append(int(np.prod(layer.get_output(0).shape)))
        return known(network, layer)

    monkeypatch.setattr(trt, "constant_values", values)
    assert run(place.woven()) == 0
    assert set(asked) == {1}
    assert place.told()["unfilled"] > 10


def test_the_value_of_an_unfilled_scalar_means_nothing() -> None:
    network = recorder.RecordedNetwork()
    tensor = trt.constant(network, np.ones(1, np.float32), name="scale")
    assert Graph(network).scalar(tensor.name) == 1.0
    trt.note_constant(network, "scale", None)
    assert Graph(network).scalar(tensor.name) is None


def test_constants_that_are_known_and_those_that_are_not(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor of 1.0 in bfloat16 stands in two bytes that numpy has no number for; weights have no values yet."""
    noted: dict[str, Any] = {}
    monkeypatch.setattr(trt, "note_constant", lambda _, layer, array: noted.update({layer: array}))
    place.config, place.tp_size = tiny(dtype="bfloat16"), 2
    assert run(place.woven()) == 0
    assert (place.record()["mode"], place.record()["refused"]) == ("weave", [])
    known = [array for array in noted.values() if array is not None]
    assert all(array.size == 1 for array in known)
    halves = [float(array.reshape(-1)[0]) for array in known if array.dtype == ml_dtypes.bfloat16]
    assert halves
    assert set(halves) == {1.0}
    assert any(array.dtype == np.float32 and array.reshape(-1)[0] < 1e-4 for array in known)  # epsilon
    assert sum(array is None for array in noted.values()) == place.told()["unfilled"]


def test_plugins_are_inert_while_they_are_made(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(trt, "register_plugins", lambda _: seen.append(os.environ.get("IS_BUILDING")))
    assert run(place.woven()) == 0
    assert seen == ["1", "1"]
    assert "IS_BUILDING" not in os.environ
