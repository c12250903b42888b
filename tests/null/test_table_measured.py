"""What a measured table holds for, the tables that come with the package, and which is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from support.tuning import CONFIG, SHAPES, measured
from typer.testing import CliRunner, Result

from trtllm_tokenweave.cli.plan import plan
from trtllm_tokenweave.cli.table import app as table_app
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.table import (
    Bucket,
    LaunchConfig,
    MeasuredOn,
    TableRow,
    TableSource,
    TuningTable,
    diff_tables,
    load_table,
    merge_tables,
    parse_table,
    save_table,
)
from trtllm_tokenweave.table.measured import Here, check_measured, differences, layer_gemms
from trtllm_tokenweave.table.shipped import choose_table, shipped_folder, shipped_tables
from trtllm_tokenweave.waves import default_table, table_key

H200 = "NVIDIA H200"
app = typer.Typer()
app.add_typer(table_app, name="table")
app.command()(plan)


def made(lo: int = 1025, hi: int | None = 2048, **fields: Any) -> TuningTable:
    launch = LaunchConfig(ctas=8)
    row = TableRow(tokens=Bucket(lo=lo, hi=hi), mode="weave", split_offset=128, attention=launch, mlp=launch)
    source = TableSource(kind="measurement", text="a test", measured=measured(**fields))
    return TuningTable(key=table_key(CONFIG, 2, gpu=H200), source=source, rows=(row,))


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refusal(*arguments: str | Path) -> UserError:
    result = run(*arguments)
    assert isinstance(result.exception, UserError), result.output
    return result.exception


# ---- the file


def test_a_table_says_on_what_it_was_measured(tmp_path: Path) -> None:
    table = made()
    save_table(table, tmp_path / "t.json")
    assert load_table(tmp_path / "t.json") == table
    # A table that was not measured says nothing, and its file and hash are what they were.
    rule = default_table(CONFIG, 2)
    assert set(rule.model_dump(mode="json")["source"]) == {"kind", "text"}
    assert rule.sha256 != table.sha256
    # Engines carry what plugins need.
    assert TuningTable.unpack(table.pack()).source == TableSource(kind="measurement", text="a test")


@pytest.mark.parametrize(
    ("field", "value"), [("gpu", ""), ("sms", 0), ("profiles_sha256", "x"), ("mode", "fast"), ("nonsense", 1)]
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    data = json.loads(made().model_dump_json())
    data["source"]["measured"][field] = value
    with pytest.raises(UserError) as raised:
        parse_table(json.dumps(data))
    assert f"source.measured.{field}" in raised.value.where


def test_joined_tables_keep_what_is_common() -> None:
    assert merge_tables([made(), made(2049, 4096)], ["a", "b"]).source.measured == measured()
    joined = merge_tables([made(), made(2049, 4096, tensorrt="10.7.0")], ["a", "b"])
    assert joined.source.measured is None
    assert joined.source.kind == "measurement"
    assert merge_tables([made(), joined.model_copy(update={"rows": ()})], ["a", "b"]).source.measured is None


def test_joined_tables_have_the_later_date() -> None:
    days = ["2026-01-02", "2026-01-03", "2026-01-01"]
    tables = [made(1025 + 1024 * i, 2048 + 1024 * i, date=day) for i, day in enumerate(days)]
    assert merge_tables(tables, ["a", "b", "c"]).source.measured == measured(date="2026-01-03")


def test_merge_says_that_the_result_cannot_be_checked(tmp_path: Path) -> None:
    a, b, c, out = (tmp_path / f"{name}.json" for name in ("a", "b", "c", "out"))
    save_table(made(), a)
    save_table(made(2049, 4096, tensorrt="10.7.0"), b)
    save_table(made(2049, 4096, date="2026-02-01"), c)
    words = ("table", "merge", "-o", out, a)
    for extra in ((), ("--json",)):
        lines = run(*words, b, *extra).stderr.splitlines()
        assert len(lines) == 1
        assert "cannot be checked against a machine" in lines[0]
        assert run(*words, c, *extra).stderr == ""
    # Nothing is lost of a table that did not say it either.
    save_table(merge_tables([load_table(a), load_table(b)], ["a", "b"]), c)
    assert run("table", "merge", "-o", out, c, c).stderr == ""


@pytest.mark.parametrize("field", [name for name in MeasuredOn.model_fields if name != "gemm"])
def test_tables_measured_on_something_else_differ(tmp_path: Path, field: str) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    others = {"gemms": {"mlp.fc+gate": (8, 8)}, "symmetric": False, "mode": "graph"}
    old = getattr(measured(), field)
    changed: dict[str, Any] = {field: others.get(field, old + 1 if isinstance(old, int) else "2" * 64)}
    save_table(made(), a)
    save_table(made(**changed), b)
    result = run("table", "diff", a, b, "--exit-code")
    assert result.exit_code == 1
    assert f"source.measured.{field}" in result.stdout
    assert " -> " in result.stdout
    assert "equal" not in result.stdout
    assert run("table", "diff", b, b, "--exit-code").exit_code == 0


def test_a_table_that_does_not_say_on_what_it_was_measured_differs(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    save_table(made(), a)
    source = TableSource(kind="measurement", text="a test", gemm="trt")
    save_table(made().model_copy(update={"source": source}), b)
    assert "source.measured.tensorrt: 10.6.0 -> none" in run("table", "diff", a, b).stdout
    assert json.loads(run("table", "diff", b, a, "--json").stdout)["head"]["source.measured.sms"] == [None, 132]


def test_equal_is_the_same_as_no_difference() -> None:
    """Also where the GEMMs in effect are the same, as with "budget" given or left out."""
    bare, said = (made().model_copy(update={"source": TableSource(gemm=gemm)}) for gemm in (None, "budget"))
    assert diff_tables(bare, said).head == {"source.gemm": (None, "budget")}


def test_joined_tables_keep_whose_gemms_they_have(tmp_path: Path) -> None:
    tables = [made(gemm="trt"), made(2049, 4096, gemm="trt", tensorrt="10.7.0")]
    joined = merge_tables(tables, ["a", "b"])
    assert (joined.source.measured, joined.gemm) == (None, "trt")
    save_table(joined, tmp_path / "t.json")
    assert load_table(tmp_path / "t.json") == joined
    assert merge_tables([joined, made(4097, None, gemm="trt")], ["a", "b"]).gemm == "trt"
    ours = merge_tables([made(gemm="budget"), made(2049, 4096, gemm="budget", tensorrt="10.7.0")], ["a", "b"])
    assert (ours.gemm, ours.source.gemm) == ("budget", None)


def test_tables_of_other_gemms_are_not_joined() -> None:
    other = made(2049, 4096, gemm="budget")
    assert diff_tables(made(gemm="trt"), other).head["gemm"] == ("trt", "budget")
    for second in (other, other.model_copy(update={"source": TableSource()})):
        with pytest.raises(UserError, match="gemm is budget, but trt in a"):
            merge_tables([made(gemm="trt"), second], ["a", "b"])


def test_a_measurement_says_by_itself_whose_gemms_it_had() -> None:
    data = json.loads(made().model_dump_json())
    data["source"]["gemm"] = "budget"
    with pytest.raises(UserError, match="gemm is given beside measured"):
        parse_table(json.dumps(data))


# ---- stale and foreign


def test_nothing_speaks_against_a_table_of_this_machine() -> None:
    assert differences(measured(), Here(H200, "10.6.0", layer_gemms(SHAPES))) == []
    assert differences(measured(), Here()) == []
    check_measured(made(), Here(H200, "10.6.0", layer_gemms(SHAPES)))
    check_measured(default_table(CONFIG, 2), Here("Other GPU", "1.0", {}, "0.0"))


def test_all_that_differs_is_named() -> None:
    here = Here("NVIDIA H100", "10.7.0", {"attention.qkv": (1, 8192)}, "9.9")
    with pytest.raises(UserError) as raised:
        check_measured(made(), here, where="t.json")
    for part in (
        "gpu NVIDIA H200, but NVIDIA H100 is here",
        "tensorrt 10.6.0, but 10.7.0 is here",
        "library 0.1.0, but 9.9 is here",
        "attention.qkv [M, 8192] x [8192, 5120], but [M, 8192] x [8192, 1] is needed",
        "mlp.proj [M, 14336] x [14336, 8192], but nothing is needed",
    ):
        assert part in raised.value.what
    assert raised.value.where == "t.json"
    assert "tune" in raised.value.fix


def test_a_table_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(UserError, match="tp_size 4, but made for 2"):
        check_measured(made(tp_size=4), Here())
    with pytest.raises(UserError, match="gpu NVIDIA H100, but made for NVIDIA H200"):
        check_measured(made(gpu="NVIDIA H100"), Here())
    anywhere = made().model_copy(update={"key": table_key(CONFIG, 2)})
    check_measured(anywhere, Here())


def test_collectives_leave_sms_to_the_gemms_of_a_row_that_splits() -> None:
    check_measured(made(sms=10), Here())
    for sms, left in ((9, 1), (8, 0), (4, 0)):
        with pytest.raises(UserError, match=rf"row batch 1\.\. tokens 1025\.\.2048: 8 CTAs leave {left} of {sms} SMs"):
            check_measured(made(sms=sms), Here())
    table = made(sms=8)
    rows = tuple(table.rows[0].model_copy(update={"tokens": Bucket(lo=lo)}) for lo in (1025, 2049))
    with pytest.raises(UserError, match=r"1025\.\. \(and 1 more\)"):
        check_measured(table.model_copy(update={"rows": rows}), Here())
    # Nothing runs beside the collectives of a row that does not.
    whole = rows[0].model_copy(update={"mode": "fuse", "split_offset": 0})
    check_measured(table.model_copy(update={"rows": (whole,)}), Here())


@pytest.mark.parametrize("version", ["10.6.0", "10.6", "10", "10.6.0.26", "10.6.0.post1"])
def test_versions_are_compared_in_the_parts_that_both_have(version: str) -> None:
    assert differences(measured(), Here(tensorrt=version)) == []
    assert differences(measured(tensorrt=version), Here(tensorrt="10.6.0")) == []


@pytest.mark.parametrize("version", ["10.6.1", "10.60.0", "10.7", "1", "10.6.0b1", "10.6.1.26", ""])
def test_other_versions_are_not_the_same(version: str) -> None:
    assert len(differences(measured(), Here(tensorrt=version))) == 1
    assert len(differences(measured(tensorrt=version), Here(tensorrt="10.6.0"))) == 1


def test_versions_differ_in_a_part_that_only_longer_ones_have() -> None:
    assert differences(measured(tensorrt="10.6.0.26"), Here(tensorrt="10.6.0.27"))


def test_check_refuses_stale_and_foreign_tables(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    save_table(made(), path)
    good = ("--gpu", H200, "--tensorrt", "10.6.0", "--preset", "llama-3.3-70b")
    assert run("table", "check", path, *good).exit_code == 0
    assert run("table", "check", path, "--tensorrt", "10.6.0.26").exit_code == 0
    assert "tensorrt 10.6.0, but 10.7.0" in refusal("table", "check", path, "--tensorrt", "10.7.0").what
    for text in ("banana", "", "10.", "v10.6.0", "10.6.0 "):
        error = refusal("table", "check", path, "--tensorrt", text)
        assert (error.where, error.what) == ("--tensorrt", f'"{text}" is no version')
    assert "mlp.fc+gate" in refusal("table", "check", path, "--preset", "qwen2.5-72b").what
    assert "gpu" in refusal("table", "check", path, "--gpu", "NVIDIA H100").where
    save_table(made(library="0.0.1"), path)
    assert "library 0.0.1" in refusal("table", "check", path).what
    for contradiction, what in (({"sms": 8}, "leave 0 of 8 SMs"), ({"gpu": "NVIDIA H100"}, "made for NVIDIA H200")):
        save_table(made(**contradiction), path)
        assert what in refusal("table", "check", path).what


def test_check_warns_where_a_measurement_cannot_be_checked(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    save_table(made().model_copy(update={"source": TableSource(kind="measurement", text="by hand")}), path)
    document = json.loads(run("table", "check", path, "--json").stdout)
    assert "does not say on what it was measured" in document["warnings"][0]


def test_check_here_asks_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    save_table(made(), path)
    monkeypatch.setattr("trtllm_tokenweave.cli.table.this_machine", lambda: Here(H200, "10.8.0"))
    assert "10.8.0 is here" in refusal("table", "check", path, "--here").what


def test_show_prints_on_what_a_table_was_measured(tmp_path: Path) -> None:
    save_table(made(), tmp_path / "t.json")
    text = " ".join(run("table", "show", tmp_path / "t.json").stdout.split())
    assert "measured on 2 x NVIDIA H200 with TensorRT 10.6.0" in text


# ---- shipped tables


def test_shipped_tables_are_whole_and_were_measured() -> None:
    assert shipped_folder().is_dir()
    for path, table in shipped_tables().items():
        assert table.source.kind == "measurement", path
        assert table.source.measured is not None, path
        assert table.warnings() == (), path
        check_measured(table, Here(table.key.gpu), where=str(path))
        beside = json.loads((path.parent / f"{path.stem}.measurements.json").read_text())
        assert beside["table_sha256"] == table.sha256, path


def folder(tmp_path: Path, **fields: Any) -> Path:
    save_table(made(**fields), tmp_path / "llama.json")
    (tmp_path / "llama.measurements.json").write_text("{}")
    (tmp_path / "other.partial.json").write_text("{}")
    return tmp_path


def test_a_shipped_table_is_taken_for_its_gpu_and_shapes(tmp_path: Path) -> None:
    chosen = choose_table(CONFIG, 2, Here(H200, "10.6.0"), folder=folder(tmp_path))
    assert chosen.table == made()
    assert chosen.file == tmp_path / "llama.json"
    assert "llama.json" in chosen.said


@pytest.mark.parametrize(
    ("tp_size", "here", "said"),
    [
        (8, Here(H200), "none was measured for NVIDIA H200, tp_size 8"),
        (2, Here("NVIDIA H100"), "for NVIDIA H100, tp_size 2, these shapes; there is one for NVIDIA H200)"),
        (2, Here(), "an unknown GPU, tp_size 2, these shapes; there is one for NVIDIA H200)"),
        (2, Here(H200, "10.7.0"), "llama.json: measured with tensorrt 10.6.0, but 10.7.0 is here"),
        (2, Here(H200, library="2.0"), "llama.json: measured with library 0.1.0, but 2.0 is here"),
        (2, Here(H200, symmetric=False), "measured with collectives in place, but here they work through a copy"),
    ],
)
def test_the_default_rule_is_taken_where_none_fits_and_says_why(
    tmp_path: Path, tp_size: int, here: Here, said: str
) -> None:
    chosen = choose_table(CONFIG, tp_size, here, folder=folder(tmp_path))
    assert chosen.table == default_table(CONFIG, tp_size)
    assert chosen.file is None
    assert said in chosen.said
    assert "default rule" in chosen.said


def test_a_table_of_other_memory_is_taken_where_it_is_given_and_says_so(tmp_path: Path) -> None:
    path = folder(tmp_path) / "llama.json"
    copies = choose_table(CONFIG, 2, Here(H200, symmetric=False), given=path)
    assert copies.file == path
    assert "but here they work through a copy" in copies.said
    for here in (Here(H200), Here(H200, symmetric=True)):
        assert "copy" not in choose_table(CONFIG, 2, here, given=path).said
        assert choose_table(CONFIG, 2, here, folder=tmp_path).file == path


def test_other_shapes_of_the_same_key_are_not_enough(tmp_path: Path) -> None:
    folder(tmp_path)
    other = CONFIG.model_copy(update={"intermediate_size": 2 * CONFIG.intermediate_size})
    assert table_key(other, 2, gpu=H200) == made().key
    for gpu in (H200, "NVIDIA H100"):
        chosen = choose_table(other, 2, Here(gpu), folder=tmp_path)
        assert chosen.file is None
        assert "there is one" not in chosen.said


def test_a_given_table_is_checked(tmp_path: Path) -> None:
    path = folder(tmp_path) / "llama.json"
    assert choose_table(CONFIG, 2, Here(H200), given=path).file == path
    with pytest.raises(UserError, match="tp_size"):
        choose_table(CONFIG, 4, Here(H200), given=path)
    with pytest.raises(UserError, match=r"tensorrt 10\.6\.0"):
        choose_table(CONFIG, 2, Here(H200, "10.9.0"), given=path)


def test_plan_says_which_table_it_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("trtllm_tokenweave.table.shipped.shipped_folder", lambda: folder(tmp_path))
    words = ("plan", "--preset", "llama-3.3-70b", "--tp", "2", "--tokens", "2048")
    assert "default rule" in " ".join(run(*words).stdout.split())
    text = " ".join(run(*words, "--gpu", H200).stdout.split())
    assert "llama.json, which comes with this package" in text
    assert "1152+896" in text
    text = " ".join(run(*words, "--gpu", "NVIDIA H100").stdout.split())
    assert "no table fits (none was measured for NVIDIA H100" in text
    text = " ".join(run(*words, "--gpu", "nvidia h200").stdout.split())
    assert "there is one for NVIDIA H200" in text
    text = " ".join(run(*words, "--tp", "4", "--gpu", "nvidia h200").stdout.split())
    assert "none was measured for nvidia h200" in text
    assert "there is one" not in text


@pytest.mark.parametrize("gpu", ["", "x" * 64])
@pytest.mark.parametrize("extra", [(), ("--predict",), ("--json",)])
def test_plan_refuses_what_is_no_name(gpu: str, extra: tuple[str, ...]) -> None:
    error = refusal("plan", "--preset", "llama-3.3-70b", "--tp", "2", "--tokens", "2048", "--gpu", gpu, *extra)
    assert error.where == "--gpu"
    assert error.fix


def test_plan_shows_every_step_of_a_shipped_table() -> None:
    """Collectives that run alone may take all SMs: no GEMM runs beside them."""
    for path, table in shipped_tables().items():
        measured_on = table.source.measured
        assert measured_on is not None
        counts = sorted({1, *(row.tokens.hi or row.tokens.lo for row in table.rows), 16384})
        words = ("plan", "--preset", measured_on.model, "--tp", str(table.key.tp_size), "--gpu", table.key.gpu)
        result = run(*words, "--tokens", ",".join(map(str, counts)))
        assert result.exit_code == 0, result.exception
        text = " ".join(result.stdout.split())
        assert f"table: {path.name}, which comes with this package" in text
        assert f"TensorRT {measured_on.tensorrt})" in text
        assert "no row of the table fits 1, 16384 tokens: default rule" in text
        for count in counts:
            plan = table.lookup(1, count)
            halves = f"{plan.prefix}+{plan.suffix}" if plan.suffix else str(plan.prefix)
            assert f" {count} {plan.mode} {halves} " in f" {text} ", count
