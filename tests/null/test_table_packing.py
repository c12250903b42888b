"""Packed form and shared vectors."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from support.vectors import FOLDER, assert_fresh

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableKey, TableRow, TableSource, TuningTable, parse_table

DOCUMENT: dict[str, Any] = json.loads((FOLDER / "table_lookup.json").read_text(encoding="utf-8"))


def test_the_vector_file_is_fresh() -> None:
    assert_fresh("make_table_vectors", "table_lookup.json")


@pytest.mark.parametrize("vector", DOCUMENT["tables"], ids=lambda vector: vector["name"])
def test_vectors(vector: dict[str, Any]) -> None:
    table = parse_table(json.dumps(vector["table"]))
    packed = bytes.fromhex(vector["packed_hex"])
    assert table.sha256 == vector["sha256"]
    assert table.pack() == packed
    assert TuningTable.unpack(packed) == table
    assert len(vector["cases"]) > 5
    for case in vector["cases"]:
        plan = table.lookup(case["batch"], case["num_tokens"])
        assert (plan.split, plan.mode, plan.source) == (case["split"], case["mode"], case["source"])
        assert plan.attention.model_dump() == case["attention"]
        assert plan.mlp.model_dump() == case["mlp"]


@pytest.mark.parametrize("vector", DOCUMENT["refused"], ids=lambda vector: vector["name"])
def test_refused_vectors(vector: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        TuningTable.unpack(bytes.fromhex(vector["packed_hex"]))
    assert "\n" not in str(caught.value)


def test_vectors_hold_every_kind_of_plan() -> None:
    cases = [case for table in DOCUMENT["tables"] for case in table["cases"]]
    assert {(case["mode"], case["source"]) for case in cases} == {
        ("weave", "table"),
        ("fuse", "table"),
        ("weave", "default"),
        ("fuse", "default"),
    }
    fabrics = {case[kind]["fabric"] for case in cases for kind in ("attention", "mlp")}
    assert fabrics == {"auto", "multimem", "peer", "loopback"}


def test_layout_by_offset() -> None:
    row = TableRow(
        batch=Bucket(lo=5, hi=64),
        tokens=Bucket(lo=513),
        mode="weave",
        split_offset=72,
        attention=LaunchConfig(fabric="peer", ctas=12, threads=96, gemm_sms=124),
        mlp=LaunchConfig(fabric="loopback", ctas=2, threads=32),
    )
    table = TuningTable(
        key=TableKey(gpu="NVIDIA H200", tp_size=3, hidden_size=576, dtype="float16", model_kind="moe"),
        granularity=128,
        min_tokens=300,
        source=TableSource(kind="capability", text="äx"),
        rows=(row,),
    )
    data = table.pack()
    assert data[:4] == b"TWTB"
    assert struct.unpack_from("<HHHH", data, 4) == (1, 112, 40, 1)
    assert struct.unpack_from("<IIIII", data, 12) == (1, 3, 128, 300, 576)
    assert struct.unpack_from("<HBBB", data, 32) == (3, 1, 1, 1)
    assert data[37:48] == bytes(11)
    assert data[48:112] == b"NVIDIA H200".ljust(64, b"\0")
    assert struct.unpack_from("<IIIII", data, 112) == (5, 64, 513, 0xFFFFFFFF, 72)
    assert data[132:136] == b"\x01\0\0\0"
    assert struct.unpack_from("<BBHHH", data, 136) == (2, 0, 12, 96, 124)
    assert struct.unpack_from("<BBHHH", data, 144) == (3, 0, 2, 32, 0)
    assert data[152:155] == "äx".encode()
    assert len(data) == 159
    assert TuningTable.unpack(data) == table


def test_every_single_byte_change_is_noticed() -> None:
    table = TuningTable(
        key=TableKey(tp_size=1, hidden_size=8, dtype="float32"),
        rows=(TableRow(tokens=Bucket(lo=1), mode="weave"),),
        source=TableSource(text="s"),
    )
    data = table.pack()
    for index in range(len(data)):
        changed = data[:index] + bytes([data[index] ^ 0x40]) + data[index + 1 :]
        with pytest.raises(UserError):
            TuningTable.unpack(changed)
    for length in range(len(data)):
        with pytest.raises(UserError):
            TuningTable.unpack(data[:length])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("wrong magic", "wrong magic"),
        ("last byte cut", "truncated"),
        ("flipped bit", "corrupt"),
        ("newer layout", "newer version"),
        ("unknown mode", "unknown value"),
        ("odd ctas", "rows[0].attention.ctas: 7 is odd"),
        ("bucket upside down", "below lo 4097"),
    ],
)
def test_refusals_say_what_is_wrong(name: str, what: str) -> None:
    forms = {vector["name"]: bytes.fromhex(vector["packed_hex"]) for vector in DOCUMENT["refused"]}
    with pytest.raises(UserError) as caught:
        TuningTable.unpack(forms[name])
    assert what in str(caught.value)
