"""Comparing, joining and converting tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.table import (
    Bucket,
    LaunchConfig,
    PaperTarget,
    TableKey,
    TableRow,
    TableSource,
    TuningTable,
    convert_paper_config,
    diff_tables,
    load_paper_config,
    merge_tables,
)

KEY = TableKey(tp_size=8, hidden_size=8192, dtype="bfloat16")
MOE = TableKey(tp_size=8, hidden_size=6144, dtype="bfloat16", model_kind="moe")


def weave(lo: int, hi: int | None, offset: int = 0) -> TableRow:
    return TableRow(tokens=Bucket(lo=lo, hi=hi), mode="weave", split_offset=offset)


def make(*rows: TableRow, source: TableSource | None = None) -> TuningTable:
    return TuningTable(key=KEY, rows=rows, source=source or TableSource())


def entry(baseline: int, attention: int, mlp: int, offset: int) -> dict[str, int]:
    return {"baseline_ctas": baseline, "attention_ctas": attention, "mlp_ctas": mlp, "split_offset": offset}


def test_diff_of_equal_tables() -> None:
    table = make(weave(1025, 2048))
    assert diff_tables(table, table).same


def test_diff() -> None:
    a = make(weave(1025, 2048), weave(2049, 4096, 64), source=TableSource(text="a"))
    b = TuningTable(key=KEY, min_tokens=2048, rows=(weave(2049, 4096, 128), weave(4097, None)))
    result = diff_tables(a, b)
    assert not result.same
    assert result.head == {"min_tokens": (1024, 2048), "source.text": ("a", "")}
    assert [row.tokens.lo for row in result.only_a] == [1025]
    assert [row.tokens.lo for row in result.only_b] == [4097]
    assert [(c.before.split_offset, c.after.split_offset, c.fields) for c in result.changed] == [
        (64, 128, ("split_offset",))
    ]


def test_merge() -> None:
    a = make(weave(1025, 2048), weave(2049, 4096), source=TableSource(kind="measurement", text="a"))
    b = make(weave(2049, 4096), weave(4097, None, 8), source=TableSource(kind="capability", text="b"))
    merged = merge_tables([a, b], ["a", "b"])
    assert [row.tokens.lo for row in merged.rows] == [1025, 2049, 4097]
    assert merged.source == TableSource(kind="capability", text="a; b")
    assert merge_tables([a], ["a"]) == a
    assert merge_tables([a, a], ["a", "a"]) == a


@pytest.mark.parametrize("other", [weave(2049, 4096, 64), weave(1793, 2560), weave(1, None)])
def test_merge_conflicts(other: TableRow) -> None:
    with pytest.raises(UserError) as caught:
        merge_tables([make(weave(1025, 2048)), make(weave(2049, 4096)), make(other)], ["a", "b", "c"])
    assert caught.value.where == "c"
    assert "conflicts with batch 1.." in caught.value.what


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (TuningTable(key=MOE), "key.hidden_size is 6144, but 8192 in a"),
        (TuningTable(key=KEY, granularity=128), "granularity is 128, but 256 in a"),
        (TuningTable(key=KEY, min_tokens=5), "min_tokens is 5, but 1024 in a"),
    ],
)
def test_merge_of_other_models(other: TuningTable, what: str) -> None:
    with pytest.raises(UserError) as caught:
        merge_tables([make(), other], ["a", "b"])
    assert (caught.value.where, caught.value.what) == ("b", what)


def test_paper_dense() -> None:
    config = {"8192": entry(32, 8, 4, 256), "1024": entry(16, 3, 2, 0), "2048": entry(15, 4, 4, 128)}
    table, notes = convert_paper_config(config, PaperTarget(KEY))
    assert [(str(row.tokens), row.mode, row.split_offset) for row in table.rows] == [
        ("1..768", "fuse", 0),
        ("769..1024", "weave", 0),
        ("1025..2048", "weave", 128),
        ("2049..", "weave", 256),
    ]
    assert [(row.attention.ctas, row.mlp.ctas) for row in table.rows] == [(16, 16), (4, 2), (4, 4), (8, 4)]
    assert {row.attention.fabric for row in table.rows} == {"multimem"}
    assert notes == ("3 CTAs raised to 4: collectives launch in clusters of 2",)
    plans = {n: table.lookup(1, n) for n in (1, 1023, 1024, 1025, 2048, 2049, 65536)}
    assert {n: plan.split for n, plan in plans.items()} == {
        1: 1,
        1023: 1023,
        1024: 512,
        1025: 768,
        2048: 1152,
        2049: 1408,
        65536: 33024,
    }
    assert {plan.source for plan in plans.values()} == {"table"}


def test_paper_moe_keys_below_the_threshold_fuse() -> None:
    config = {"1024": entry(16, 2, 4, 0), "2048": entry(20, 8, 2, 0), "4096": entry(24, 8, 2, 256)}
    table, notes = convert_paper_config(config, PaperTarget(MOE))
    assert notes == (
        'not split, their split_offset is not used: "1024", "2048"; the least step that is split has 4096 tokens',
    )
    assert [(str(row.tokens), row.mode, row.attention.ctas) for row in table.rows] == [
        ("1..1024", "fuse", 16),
        ("1025..2048", "fuse", 20),
        ("2049..3840", "fuse", 24),
        ("3841..", "weave", 8),
    ]
    assert (table.lookup(1, 4095).mode, table.lookup(1, 4096).split) == ("fuse", 2304)


def test_paper_small_keys_end_on_the_granularity() -> None:
    config = {str(n): entry(n // 32, 4, 4, 0) for n in (64, 128, 256, 600, 1000, 4096)}
    table, notes = convert_paper_config(config, PaperTarget(KEY))
    assert [(str(row.tokens), row.mode, row.attention.ctas) for row in table.rows] == [
        ("1..256", "fuse", 8),
        ("257..512", "fuse", 18),
        ("513..768", "fuse", 32),
        ("769..", "weave", 4),
    ]
    assert '"600" ends at 512 tokens, the multiple of 256 below' in notes
    assert '"64" ends at 0 tokens, the multiple of 256 below' in notes


def test_paper_keys_all_below_the_threshold() -> None:
    table, notes = convert_paper_config({"100": entry(4, 4, 4, 0), "700": entry(8, 4, 4, 0)}, PaperTarget(KEY))
    assert [(str(row.tokens), row.mode, row.attention.ctas) for row in table.rows] == [("1..", "fuse", 8)]
    assert notes[-1] == (
        'not split, their split_offset is not used: "100", "700"; the least step that is split has 1024 tokens. '
        '"700" also covers all steps above it, so that no step is split'
    )


def test_paper_older_spelling() -> None:
    old = {"1024": {"baseline_ctas": 16, "attention_ctas": 4, "mlp_ctas": 2, "chunk_offset": 64}}
    table, _ = convert_paper_config(old, PaperTarget(KEY))
    assert table.rows[-1].split_offset == 64


@pytest.mark.parametrize(
    ("config", "where", "what"),
    [
        ({}, "c", "no entries"),
        ({"many": entry(16, 4, 4, 0)}, "c", '"many" is not a token count'),
        ({"0": entry(16, 4, 4, 0)}, "c", "not a token count"),
        ({"-5": entry(16, 4, 4, 0)}, "c", "not a token count"),
        ({"01024": entry(16, 4, 4, 0)}, "c", "not a token count"),
        ({"9999999999": entry(16, 4, 4, 0)}, "c", "not a token count"),
        ({"1024": 5}, 'c: "1024"', "PaperEntry"),
        ({"1024": {"baseline_ctas": 16}}, 'c: "1024": attention_ctas', "missing"),
        ({"1024": entry(16, 4, 4, 0) | {"x": 1}}, 'c: "1024": x', "unknown field"),
        ({"1024": entry(0, 4, 4, 0)}, 'c: "1024": baseline_ctas', "greater than or equal to 1"),
        ({"1024": entry(16, 133, 4, 0)}, 'c: "1024": attention_ctas', "less than or equal to 132"),
        ({"1024": entry(16, 4, 4, 12)}, 'c: "1024": split_offset', "multiple of 8"),
        ({"1024": entry(16, 4, 4, -8)}, 'c: "1024": split_offset', "greater than or equal to 0"),
        ({"1024": entry(16, 4, 4, 0) | {"mlp_ctas": "4"}}, 'c: "1024": mlp_ctas', "valid integer"),
        ({"1500": entry(16, 4, 4, 0), "4096": entry(16, 4, 4, 0)}, 'c: "1500"', "multiple of the granularity"),
        ({"1024": entry(16, 4, 4, 512), "4096": entry(16, 4, 4, 0)}, 'c: "1024".split_offset', "leaves no suffix"),
        ({"1024": entry(16, 4, 4, 0), "4096": entry(16, 4, 4, 100_000)}, 'c: "4096".split_offset', "below 2048"),
        ({"4096": entry(16, 4, 4, 2048)}, 'c: "4096".split_offset', "leaves no suffix"),
    ],
)
def test_bad_paper_configs(config: dict[str, Any], where: str, what: str) -> None:
    with pytest.raises(UserError) as caught:
        convert_paper_config(config, PaperTarget(KEY), where="c")
    assert caught.value.where == where
    assert what in caught.value.what


@pytest.mark.parametrize(
    ("text", "what"),
    [("nope", "is not JSON"), ("[1]", "expected a JSON object"), ('{"1024": 1, "1024": 2}', "more than once")],
)
def test_bad_paper_files(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "paper.json"
    path.write_text(text)
    with pytest.raises(UserError, match=what):
        load_paper_config(path, PaperTarget(KEY))


def test_paper_file(tmp_path: Path) -> None:
    path = tmp_path / "paper.json"
    path.write_text(json.dumps({"1024": entry(16, 4, 4, 0)}))
    table, notes = load_paper_config(path, PaperTarget(KEY, fabric="auto", granularity=128))
    assert (table.granularity, notes) == (128, ())
    assert [str(row.tokens) for row in table.rows] == ["1..896", "897.."]
    assert table.rows[0].attention == LaunchConfig(ctas=16)
