"""Table files: what is accepted, what is refused and how the refusal reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.table import (
    Bucket,
    LaunchConfig,
    TableKey,
    TableRow,
    TableSource,
    TuningTable,
    default_table,
    load_table,
    parse_table,
    save_table,
)

KEY = TableKey(gpu="NVIDIA H200", tp_size=8, hidden_size=8192, dtype="bfloat16")


def document() -> dict[str, Any]:
    launch = {"fabric": "auto", "ctas": 8, "threads": 1024, "gemm_sms": 0}
    row = {"batch": {"lo": 1, "hi": None}, "mode": "weave", "split_offset": 64, "attention": launch, "mlp": launch}
    return {
        "schema_version": 1,
        "key": KEY.model_dump(),
        "granularity": 256,
        "min_tokens": 1024,
        "source": {"kind": "measurement", "text": "by hand"},
        "rows": [row | {"tokens": {"lo": 1025, "hi": 2048}}, row | {"tokens": {"lo": 2049, "hi": None}}],
    }


def put(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Set a field such as "rows.0.mlp.ctas" in a deep copy."""
    data = json.loads(json.dumps(data))
    *parents, last = path.split(".")
    place: Any = data
    for name in parents:
        place = place[int(name)] if name.isdigit() else place[name]
    place[last] = value
    return data


def test_steps_above_all_rows_are_named() -> None:
    rows = parse_table(json.dumps(document())).rows
    table = TuningTable(key=KEY, rows=rows[:1])
    assert table.beyond_rows(2048) == ""
    assert table.beyond_rows(8192) == (
        "steps of 2049 to 8192 tokens are above its rows: the default rule splits them at half, with 8 CTAs"
    )
    assert table.lookup(1, 2049).source == "default"
    # An engine whose limit is not known, and a threshold above the rows.
    assert table.beyond_rows(None).startswith("steps of 2049 or more tokens are above its rows: ")
    late = table.model_copy(update={"min_tokens": 4096})
    assert late.beyond_rows(8192).startswith("steps of 4096 to 8192 tokens are above its rows: ")
    assert late.beyond_rows(4095) == ""
    # A row without an end, or no rows at all: `warnings` says that.
    assert TuningTable(key=KEY, rows=rows).beyond_rows(8192) == ""
    assert TuningTable(key=KEY).beyond_rows(8192) == ""


def test_round_trip(tmp_path: Path) -> None:
    table = parse_table(json.dumps(document()))
    path = tmp_path / "table.json"
    save_table(table, path)
    assert load_table(path) == TuningTable.load(path) == table
    assert load_table(str(path)).sha256 == table.sha256
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]
    assert json.loads(path.read_text()) == document()


def test_a_table_without_rows_round_trips(tmp_path: Path) -> None:
    table = default_table(KEY, one_wave_tokens=2000)
    table.save(tmp_path / "table.json")
    assert load_table(tmp_path / "table.json") == table
    assert table.min_tokens == 2001
    assert "single wave" in table.source.text


def test_defaults() -> None:
    minimal = {"schema_version": 1, "key": {"tp_size": 2, "hidden_size": 64, "dtype": "float32"}}
    table = parse_table(json.dumps(minimal))
    assert (table.granularity, table.min_tokens, table.rows, table.key.gpu) == (256, 1024, (), "any")
    assert parse_table(json.dumps(put(minimal, "key.model_kind", "moe"))).min_tokens == 4096
    assert TuningTable(key=KEY.model_copy(update={"model_kind": "moe"})).min_tokens == 4096


def test_row_order_does_not_matter() -> None:
    data = document()
    reversed_rows = data | {"rows": data["rows"][::-1]}
    assert parse_table(json.dumps(reversed_rows)).sha256 == parse_table(json.dumps(data)).sha256


def test_the_hash_depends_on_every_part() -> None:
    base = document()
    changes: list[tuple[str, Any]] = [
        ("min_tokens", 1025),
        ("granularity", 128),
        ("key.tp_size", 4),
        ("source.text", "x"),
        ("rows.0.mlp.ctas", 6),
        ("rows.1.split_offset", 0),
    ]
    hashes = {parse_table(json.dumps(put(base, path, value))).sha256 for path, value in changes}
    assert len(hashes | {parse_table(json.dumps(base)).sha256}) == len(changes) + 1


def test_tables_are_frozen() -> None:
    table = default_table(KEY)
    with pytest.raises(ValidationError):
        table.min_tokens = 5


REFUSED: list[tuple[str, Any, str, str]] = [
    ("rows.1.tokens.lo", 1025, "rows[1].tokens", "overlaps rows[0]"),
    ("rows.0.split_offset", 12, "rows[0].split_offset", "12 is not a multiple of 8"),
    ("rows.0.split_offset", -8, "rows[0].split_offset", "greater than or equal to 0"),
    ("rows.0.split_offset", 1024, "rows[0].split_offset", "1024 leaves no suffix; must be below 1024"),
    ("rows.1.split_offset", 2**29, "rows[1].split_offset", "leaves no suffix"),
    ("rows.1.split_offset", 2**19, "rows[1].split_offset", "leaves no suffix; must be below 524288"),
    ("rows.1.split_offset", "x" * 9999, "rows[1].split_offset", "xxx..."),
    ("rows.0.split_offset", "64", "rows[0].split_offset", 'valid integer, got "64"'),
    ("rows.0.split_offset", True, "rows[0].split_offset", "valid integer, got true"),
    ("rows.0.split_offset", 64.5, "rows[0].split_offset", "valid integer"),
    ("rows.0.mode", "fuse", "rows[0].split_offset", "on a fuse row"),
    ("rows.0.mode", "split", "rows[0].mode", "'weave' or 'fuse'"),
    ("rows.0.tokens.lo", 1024, "rows[0].tokens.lo", "multiple of the granularity 256 plus 1"),
    ("rows.0.tokens.hi", 2000, "rows[0].tokens.hi", "2000 is not a multiple of the granularity 256"),
    ("rows.0.tokens.hi", 512, "rows[0].tokens", "hi 512 is below lo 1025"),
    ("rows.0.tokens.lo", 0, "rows[0].tokens.lo", "greater than or equal to 1"),
    ("rows.0.tokens", [1025, 2048], "rows[0].tokens", "object"),
    ("rows.0.batch.lo", 0, "rows[0].batch.lo", "greater than or equal to 1"),
    ("rows.0.batch.hi", "8", "rows[0].batch.hi", "valid integer"),
    ("rows.0.mlp.ctas", 7, "rows[0].mlp.ctas", "7 is odd"),
    ("rows.0.mlp.ctas", 0, "rows[0].mlp.ctas", "greater than or equal to 2"),
    ("rows.0.mlp.ctas", 134, "rows[0].mlp.ctas", "less than or equal to 132"),
    ("rows.0.attention.threads", 100, "rows[0].attention.threads", "100 is not a multiple of 32"),
    ("rows.0.attention.threads", 1056, "rows[0].attention.threads", "less than or equal to 1024"),
    ("rows.0.attention.threads", 0, "rows[0].attention.threads", "greater than or equal to 32"),
    ("rows.0.attention.gemm_sms", 131, "rows[0].attention.gemm_sms", "odd"),
    ("rows.0.attention.gemm_sms", -2, "rows[0].attention.gemm_sms", "greater than or equal to 0"),
    ("rows.0.attention.fabric", "nvlink", "rows[0].attention.fabric", "'multimem'"),
    ("rows.0.attention.sms", 3, "rows[0].attention.sms", "unknown field"),
    ("rows", {}, "rows", "array"),
    ("granularity", 100, "granularity", "multiple of 16"),
    ("granularity", 0, "granularity", "greater than or equal to 16"),
    ("min_tokens", 0, "min_tokens", "greater than or equal to 1"),
    ("min_tokens", None, "min_tokens", "valid integer"),
    ("key.dtype", "int8", "key.dtype", "'bfloat16'"),
    ("key.tp_size", 0, "key.tp_size", "greater than or equal to 1"),
    ("key.gpu", "x" * 64, "key.gpu", "longer than 63 bytes"),
    ("key.gpu", "", "key.gpu", "at least 1"),
    ("key.model_kind", "ssm", "key.model_kind", "'dense' or 'moe'"),
    ("source.kind", "guess", "source.kind", "'measurement'"),
    ("note", "hello", "note", "unknown field"),
    ("schema_version", 2, "schema_version", "made by a newer version"),
    ("schema_version", 0, "schema_version", "greater than or equal to 1"),
    ("schema_version", "1", "schema_version", "valid integer"),
]


@pytest.mark.parametrize(("path", "value", "field", "what"), REFUSED)
def test_refusals_name_file_row_and_field(tmp_path: Path, path: str, value: Any, field: str, what: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(put(document(), path, value)))
    with pytest.raises(UserError) as caught:
        load_table(file)
    assert caught.value.where == f"{file}: {field}"
    assert what in caught.value.what
    assert "\n" not in str(caught.value)


def test_a_newer_schema_asks_for_an_upgrade() -> None:
    newer = put(document(), "schema_version", 7) | {"unheard_of": 1}
    with pytest.raises(UserError, match="upgrade"):
        parse_table(json.dumps(newer))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "expected a JSON object"),
        ("3", "expected a JSON object"),
        ("{}", 'has no "key"'),
        ('{"key": {}, "key": {}}', '"key" is given more than once'),
        ('{"key": {"tp_size": 1, "hidden_size": 8, "dtype": "float32"}}', "missing"),
        ("[" * 100_000, "nested too deeply"),
        ('{"schema_version": 1, "key": {"tp_size": ' + "9" * 5000 + "}}", "too many digits"),
        ('{"schema_version": ' + "9" * 4000 + ', "key": {}}', "newer version"),
    ],
)
def test_not_a_table(text: str, what: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_table(text, where="x.json")
    assert what in caught.value.what
    assert caught.value.where.startswith("x.json")
    assert len(str(caught.value)) < 300


def test_missing_fields_are_named() -> None:
    data = document()
    del data["rows"][1]["mode"]
    with pytest.raises(UserError) as caught:
        parse_table(json.dumps(data), where="f")
    assert str(caught.value) == "f: rows[1].mode: missing"


def test_open_rows_may_split_up_to_the_largest_step() -> None:
    offset = 2**19 - 8
    table = parse_table(json.dumps(put(document(), "rows.1.split_offset", offset)))
    assert table.lookup(1, 2**20).suffix == 8


def test_rows_that_do_nothing_are_warned_of() -> None:
    data = document()
    assert parse_table(json.dumps(data)).warnings() == ()
    dead = put(data, "min_tokens", 2049)
    (line,) = parse_table(json.dumps(dead)).warnings()
    assert line == "row batch 1.. tokens 1025..2048: steps below min_tokens 2049 are never split"
    # At exactly min_tokens a row is alive, and a fuse row says nothing about splitting.
    assert parse_table(json.dumps(put(data, "min_tokens", 2048))).warnings() == ()
    fuse = put(put(dead, "rows.0.mode", "fuse"), "rows.0.split_offset", 0)
    assert parse_table(json.dumps(fuse)).warnings() == ()
    for place in ("rows.1.tokens.lo", "rows.1.batch.lo"):
        (line,) = parse_table(json.dumps(put(data, place, 2**20 + 1))).warnings()
        assert "no step is larger than 1048576" in line


def test_the_first_of_several_problems_is_named() -> None:
    data = put(put(document(), "rows.0.mlp.ctas", 7), "rows.1.mlp.ctas", 9)
    with pytest.raises(UserError, match=r"rows\[0\]\.mlp\.ctas: 7 is odd.*\(and 1 more\)"):
        parse_table(json.dumps(data))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_table(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot be read"):
        load_table(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        load_table(tmp_path / "binary.json")


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    table = default_table(KEY)
    with pytest.raises(UserError, match="does not exist"):
        save_table(table, tmp_path / "no" / "table.json")
    target = tmp_path / "table.json"
    target.mkdir()
    with pytest.raises(UserError, match="is a folder"):
        save_table(table, target)
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]
    assert list(target.iterdir()) == []


def test_an_existing_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("old " * 10_000)
    before = path.stat().st_ino
    save_table(default_table(KEY), path)
    assert load_table(path) == default_table(KEY)
    # Another file took the name: whoever reads meanwhile sees the old one or the new one, never a part.
    assert path.stat().st_ino != before
    assert path.stat().st_mode & 0o600 == 0o600


def test_a_write_that_breaks_off_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    path.write_text("old")

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        save_table(default_table(KEY), path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_check_key() -> None:
    table = default_table(KEY)
    table.check_key(KEY)
    table.check_key({})
    table.check_key({"gpu": "any", "tp_size": 8})
    default_table(KEY.model_copy(update={"gpu": "any"})).check_key(KEY)
    others: list[tuple[str, str | int]] = [
        ("gpu", "NVIDIA B200"),
        ("tp_size", 4),
        ("hidden_size", 4096),
        ("dtype", "float16"),
        ("model_kind", "moe"),
    ]
    for name, value in others:
        with pytest.raises(UserError) as caught:
            table.check_key(KEY.model_copy(update={name: value}), where="t.json")
        assert caught.value.where == f"t.json: key.{name}"
        assert f"but {value} is needed" in caught.value.what
    with pytest.raises(ValueError, match="no field"):
        table.check_key({"pp_size": 1})


def test_rows_may_touch_and_share_one_axis() -> None:
    rows = (
        TableRow(batch=Bucket(lo=1, hi=4), tokens=Bucket(lo=1, hi=256), mode="fuse"),
        TableRow(batch=Bucket(lo=5), tokens=Bucket(lo=1, hi=256), mode="fuse"),
        TableRow(batch=Bucket(lo=1, hi=4), tokens=Bucket(lo=257), mode="weave", attention=LaunchConfig(ctas=2)),
    )
    table = TuningTable(key=KEY, rows=rows, source=TableSource(kind="capability", text="x"))
    assert [str(row.tokens) for row in table.rows] == ["1..256", "257..", "1..256"]
