"""Packed fields of inner plugins, and the vectors that the C++ plugins share."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from support.vectors import FOLDER, assert_fresh

from trtllm_tokenweave import recorder, trt
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.recorder.packed_fields import pack_fields, unpack_fields
from trtllm_tokenweave.recorder.plugin import PluginField
from trtllm_tokenweave.recorder.trtllm_plugins import GPT_ATTENTION
from trtllm_tokenweave.recorder.trtllm_plugins import SPECS as TRTLLM_SPECS

DOCUMENT: dict[str, Any] = json.loads((FOLDER / "attention.json").read_text(encoding="utf-8"))


def test_the_vector_file_is_fresh() -> None:
    assert_fresh("make_attention_vectors", "attention.json")


def test_the_vectors_hold_every_refusal() -> None:
    made = import_module("vectors.make_attention_vectors")
    assert {case["name"] for case in DOCUMENT["refused_cuts"]} == set(made.REFUSED)
    assert len(DOCUMENT["refused_packed"]) == 13
    names = {case["name"] for case in DOCUMENT["cuts"]}
    assert names >= set(made.NAMED)
    # Cuts inside a sequence, between two, and at either end.
    shared = [c["suffix"]["first"] < len(c["prefix"]["host_request_types"]) for c in DOCUMENT["cuts"]]
    assert 60 < sum(shared) < len(shared) - 20
    for half in ("prefix", "suffix"):
        assert sum(case[half]["rows"] == 0 for case in DOCUMENT["cuts"]) > 5


@pytest.mark.parametrize("vector", DOCUMENT["packed"], ids=lambda vector: vector["name"])
def test_packed_vectors(vector: dict[str, Any]) -> None:
    fields = unpack_fields(bytes.fromhex(vector["packed_hex"]))
    assert list(fields) == [field["name"] for field in vector["fields"]]
    for field in vector["fields"]:
        value = fields[field["name"]]
        values = list(value) if isinstance(value, bytes) else np.ravel(value).tolist()
        assert values == field["values"]


@pytest.mark.parametrize("vector", DOCUMENT["refused_packed"], ids=lambda vector: vector["name"])
def test_refused_vectors(vector: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        unpack_fields(bytes.fromhex(vector["packed_hex"]))
    assert caught.value.what == vector["message"]


def test_types_travel() -> None:
    fields: dict[str, Any] = {
        "layer_idx": 3,
        "q_scaling": 1.5,
        "use_cache": 1,
        "unfuse_qkv_gemm": 0,
        "cp_group": [0],
        "new_field": 7,
    }
    packed = pack_fields(trt.plugin_fields(GPT_ATTENTION, fields))
    assert unpack_fields(packed) == {**fields, "cp_group": 0}
    # Byte 10 is the type of the first field: INT32. Of unfuse_qkv_gemm it is INT8, although its value is an int.
    assert packed[10] == recorder.PluginFieldType.INT32.value
    at = packed.index(b"unfuse_qkv_gemm") - 8
    assert packed[at + 2] == recorder.PluginFieldType.INT8.value


def test_every_attention_field_can_be_packed() -> None:
    (spec,) = [spec for spec in TRTLLM_SPECS if spec.key == GPT_ATTENTION]
    fields = {field.name: 1 for field in spec.fields}
    assert unpack_fields(pack_fields(trt.plugin_fields(GPT_ATTENTION, fields))) == fields


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (PluginField("x", np.array([1.0]), recorder.PluginFieldType.FLOAT64), "a field of type 2"),
        (PluginField("", np.array([1], np.int32), recorder.PluginFieldType.INT32), "the name ''"),
        (PluginField("x" * 70000, np.array([1], np.int32), recorder.PluginFieldType.INT32), "the name 'xxx"),
    ],
)
def test_fields_that_cannot_be_packed(field: PluginField, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pack_fields([field])
