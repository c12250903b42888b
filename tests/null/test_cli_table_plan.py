"""The `table` and `plan` commands, run in process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from trtllm_tokenweave.cli.plan import plan
from trtllm_tokenweave.cli.table import app as table_app
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableKey, TableRow, TuningTable, load_table, save_table

app = typer.Typer()
app.add_typer(table_app, name="table")
app.command()(plan)

KEY = TableKey(gpu="NVIDIA H200", tp_size=8, hidden_size=8192, dtype="bfloat16")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def output(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def run_json(*arguments: str | Path) -> Any:
    return json.loads(output(*arguments, "--json"))


def refusal(*arguments: str | Path) -> UserError:
    """The UserError that the application turns into one line and exit code 2."""
    result = run(*arguments)
    assert isinstance(result.exception, UserError), result.output
    assert result.stdout == ""
    return result.exception


def write(path: Path, *rows: tuple[int, int | None, int], key: TableKey = KEY) -> Path:
    made = tuple(
        TableRow(tokens=Bucket(lo=lo, hi=hi), mode="weave", split_offset=offset, mlp=LaunchConfig(ctas=8, gemm_sms=124))
        for lo, hi, offset in rows
    )
    save_table(TuningTable(key=key, rows=made), path)
    return path


def test_show(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", (1025, 2048, 64), (2049, None, 0))
    text = output("table", "show", path)
    for part in (
        "NVIDIA H200",
        "tp_size 8",
        "granularity 256",
        "1025..2048",
        "2049..",
        "weave",
        load_table(path).sha256,
    ):
        assert part in text
    document = run_json("table", "show", path)
    assert document["table"] == load_table(path).model_dump(mode="json")
    assert document["sha256"] == load_table(path).sha256
    assert "default rule" in output("table", "show", write(tmp_path / "empty.json"))


def test_diff(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", (1025, 2048, 64), (2049, 4096, 0))
    b = write(tmp_path / "b.json", (1025, 2048, 128), (4097, None, 0), key=KEY.model_copy(update={"gpu": "any"}))
    document = run_json("table", "diff", a, b)
    assert not document["same"]
    assert document["head"] == {"key.gpu": ["NVIDIA H200", "any"]}
    assert [row["tokens"]["lo"] for row in document["only_a"]] == [2049]
    assert [row["tokens"]["lo"] for row in document["only_b"]] == [4097]
    assert document["changed"][0]["fields"] == ["split_offset"]
    text = output("table", "diff", a, b)
    assert "split_offset 64 -> 128" in text
    assert "key.gpu: NVIDIA H200 -> any" in text
    assert run_json("table", "diff", a, a)["same"]
    assert "equal" in output("table", "diff", a, a)


def test_diff_tells_by_exit_code_on_request(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", (1025, 2048, 64))
    b = write(tmp_path / "b.json", (1025, 2048, 128))
    assert run("table", "diff", a, b).exit_code == 0
    for extra in ((), ("--json",)):
        assert run("table", "diff", a, b, "--exit-code", *extra).exit_code == 1
        assert run("table", "diff", a, a, "--exit-code", *extra).exit_code == 0
    assert json.loads(run("table", "diff", a, b, "--exit-code", "--json").stdout)["same"] is False
    assert "--exit-code" in output("table", "diff", "--help")


def test_borders_are_light(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", (1025, 2048, 64))
    b = write(tmp_path / "b.json", (2049, 4096, 0))
    for text in (output("table", "show", a), output("table", "diff", a, b)):
        assert "1025..2048" in text
        assert not set("┏┃│┡└") & set(text)


@pytest.mark.parametrize("name", ["a.json", "sub/../a.json", "link.json"])
def test_merge_refuses_to_overwrite_an_input(tmp_path: Path, name: str) -> None:
    a = write(tmp_path / "a.json", (1025, 2048, 64))
    b = write(tmp_path / "b.json", (2049, None, 0))
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.json").symlink_to(a)
    before = a.read_bytes()
    error = refusal("table", "merge", b, a, "-o", tmp_path / name)
    assert error.where == "--output"
    assert "another file" in error.fix
    assert a.read_bytes() == before


def test_merge(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", (1025, 2048, 64))
    b = write(tmp_path / "b.json", (2049, None, 0))
    out = tmp_path / "out.json"
    assert run_json("table", "merge", a, b, "-o", out)["rows"] == 2
    assert [row.tokens.lo for row in load_table(out).rows] == [1025, 2049]
    assert "2 rows" in output("table", "merge", a, b, "-o", out)


def test_a_refused_merge_writes_nothing(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", (1025, 2048, 64))
    b = write(tmp_path / "b.json", (1025, None, 0))
    error = refusal("table", "merge", a, b, "-o", tmp_path / "out.json")
    assert error.where == str(b)
    assert not (tmp_path / "out.json").exists()


def test_check(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", (1025, None, 64))
    assert run_json("table", "check", path) == {
        "ok": True,
        "file": str(path),
        "sha256": load_table(path).sha256,
        "checked": [],
        "warnings": [],
    }
    good = ("--gpu", "NVIDIA H200", "--tp", "8", "--hidden", "8192", "--dtype", "bfloat16", "--kind", "dense")
    assert len(run_json("table", "check", path, *good)["checked"]) == 5
    assert "good" in output("table", "check", path, *good)


def test_check_warns_of_rows_that_never_split(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", (257, 512, 0), (1025, None, 64))
    (warning,) = run_json("table", "check", path)["warnings"]
    assert "tokens 257..512: steps below min_tokens 1024 are never split" in warning
    text = " ".join(output("table", "check", path).split())
    assert "warning: row batch 1.. tokens 257..512" in text
    assert "good, 2 rows" in text


def test_check_warns_of_a_table_without_rows(tmp_path: Path) -> None:
    text = output("table", "check", write(tmp_path / "t.json"))
    assert "warning: it has no rows: every step follows the default rule" in text


@pytest.mark.parametrize(
    ("option", "value"),
    [("--kind", "foo"), ("--dtype", "foo"), ("--tp", "-3"), ("--tp", "0"), ("--hidden", "0"), ("--gpu", "")],
)
def test_check_blames_impossible_options(tmp_path: Path, option: str, value: str) -> None:
    path = write(tmp_path / "t.json", (1025, None, 64))
    error = refusal("table", "check", path, option, value)
    assert error.where == option
    assert error.fix


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--gpu", "NVIDIA B200", "gpu"),
        ("--tp", "4", "tp_size"),
        ("--hidden", "4096", "hidden_size"),
        ("--dtype", "float16", "dtype"),
        ("--kind", "moe", "model_kind"),
    ],
)
def test_check_refuses_another_key(tmp_path: Path, option: str, value: str, field: str) -> None:
    path = write(tmp_path / "t.json", (1025, None, 64))
    assert refusal("table", "check", path, option, value).where == f"{path}: key.{field}"


@pytest.mark.parametrize(
    ("preset", "field"), [("mixtral-8x7b", "hidden_size"), ("llama-3.1-8b", "hidden_size"), ("llama-3.3-70b", "")]
)
def test_check_compares_an_unmeasured_table_with_the_preset(tmp_path: Path, preset: str, field: str) -> None:
    path = write(tmp_path / "t.json", (1025, None, 64))
    if field:
        assert refusal("table", "check", path, "--preset", preset).where == f"{path}: key.{field}"
    else:
        assert run_json("table", "check", path, "--preset", preset)["checked"] == ["dtype", "hidden_size", "model_kind"]


@pytest.mark.parametrize(("field", "value"), [("model_kind", "moe"), ("dtype", "float16")])
def test_options_of_check_go_before_the_preset(tmp_path: Path, field: str, value: str) -> None:
    path = write(tmp_path / "t.json", (1025, None, 64), key=KEY.model_copy(update={field: value}))
    words = ("table", "check", path, "--preset", "llama-3.3-70b")
    assert refusal(*words).where == f"{path}: key.{field}"
    option = "--kind" if field == "model_kind" else "--dtype"
    assert "good" in output(*words, option, value)


def test_missing_files(tmp_path: Path) -> None:
    none = tmp_path / "none.json"
    for command in (("show",), ("check",), ("diff", none)):
        error = refusal("table", *command, none)
        assert "cannot be read" in error.what
        assert error.fix == "check the path, and that you may read it"


def test_from_paper(tmp_path: Path) -> None:
    source, out = tmp_path / "paper.json", tmp_path / "out.json"
    source.write_text('{"2048": {"baseline_ctas": 15, "attention_ctas": 4, "mlp_ctas": 4, "split_offset": 64}}')
    options = ("-o", out, "--tp", "8", "--hidden", "8192", "--dtype", "bfloat16", "--gpu", "NVIDIA H100 80GB HBM3")
    document = run_json("table", "from-paper", source, *options)
    assert document["rows"] == 2
    assert "15 CTAs raised to 16" in document["notes"][0]
    assert load_table(out).key.gpu == "NVIDIA H100 80GB HBM3"
    assert "note: 15 CTAs" in output("table", "from-paper", source, *options)
    assert run_json("table", "from-paper", source, *options, "--kind", "moe")["rows"] == 1


def test_from_paper_refuses(tmp_path: Path) -> None:
    source, out = tmp_path / "paper.json", tmp_path / "out.json"
    source.write_text('{"2048": {}}')
    assert "missing" in refusal("table", "from-paper", source, "-o", out, "--tp", "8", "--hidden", "8192").what
    source.write_text('{"2048": {"baseline_ctas": 16, "attention_ctas": 4, "mlp_ctas": 4, "split_offset": 64}}')
    before = source.read_text()
    same = ("-o", source, "--tp", "8", "--hidden", "8192")
    assert "is the configuration to convert" in refusal("table", "from-paper", source, *same).what
    assert source.read_text() == before
    bad_key = ("-o", out, "--tp", "0", "--hidden", "8192")
    assert refusal("table", "from-paper", source, *bad_key).where == "--tp"
    source.write_text(source.read_text().replace("64", "100000"))
    error = refusal("table", "from-paper", source, "-o", out, "--tp", "8", "--hidden", "8192")
    assert error.where == f'{source}: "2048".split_offset'
    assert not out.exists()


def test_plan_by_the_default_rule() -> None:
    document = run_json("plan", "--preset", "llama-3.3-70b", "--tp", "8", "--tokens", "512,1024,2048")
    assert document["table"]["file"] is None
    assert document["model"] == {"preset": "llama-3.3-70b", "tp_size": 8, "hidden_size": 8192, "kind": "dense"}
    assert [(s["num_tokens"], s["mode"], s["prefix"], s["suffix"]) for s in document["steps"]] == [
        (512, "fuse", 512, 0),
        (1024, "weave", 512, 512),
        (2048, "weave", 1024, 1024),
    ]
    assert [s["seed_offset"] is None for s in document["steps"]] == [True, False, False]
    gemms = document["steps"][2]["gemms"]
    assert [(g["name"], g["whole"], g["prefix"], g["suffix"]) for g in gemms] == [
        ("attention.qkv", 1, 1, 1),
        ("attention.dense", 4, 3, 3),
        ("mlp.fc+gate", 4, 2, 2),
        ("mlp.proj", 4, 3, 3),
    ]


def test_plan_by_a_table(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", (1025, 2048, 64))
    document = run_json("plan", "--preset", "llama-3.3-70b", "--table", path, "--tokens", "2048,4096", "--batch", "3")
    steps = document["steps"]
    assert document["table"]["sha256"] == load_table(path).sha256
    assert [(s["split"], s["source"], s["mlp"]["ctas"], s["batch"]) for s in steps] == [
        (1088, "table", 8, 3),
        (2048, "default", 8, 3),
    ]
    text = output("plan", "--preset", "llama-3.3-70b", "--table", path, "--tokens", "2048,4096")
    assert "no row of the table fits 4096 tokens" in text


def test_plan_text() -> None:
    # 80 characters: what a terminal has at least, and what a pipe gets.
    arguments = ["plan", "--preset", "llama-3.3-70b", "--tokens", "512,2048,16384"]
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments)
    assert result.exit_code == 0
    for part in (
        "fc+gate",
        "1024+1024",
        "4:2+2",
        "32:17+17",
        "8/8",
        "own",
        "fuse",
        "weave",
        "split at half from 1024 tokens",
    ):
        assert part in result.stdout


def test_ctas_of_a_fuse_row_are_shown_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    rows = (
        TableRow(tokens=Bucket(lo=1, hi=512), mode="fuse"),  # names no CTAs: the plugins take the default's 8
        TableRow(tokens=Bucket(lo=513, hi=768), mode="weave"),  # below min_tokens
        TableRow(tokens=Bucket(lo=2049), mode="fuse", mlp=LaunchConfig(ctas=64)),
    )
    save_table(TuningTable(key=KEY, rows=rows), path)
    lines = output("plan", "--preset", "llama-3.3-70b", "--table", path, "--tokens", "512,768,4096").splitlines()
    shown = {line.split()[0]: line.split()[3] for line in lines if line[:1].isdigit()}
    assert shown == {"512": "8/8", "768": "own", "4096": "8/64"}
    assert output("table", "show", path).count("auto 8x1024") == 5


def test_plan_text_cuts_no_number_off() -> None:
    arguments = ["plan", "--preset", "llama-3.1-405b", "--tp", "2", "--tokens", "1048576,2048", "--sms", "18"]
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments)
    assert result.exit_code == 0
    assert "…" not in result.stdout
    assert "524288+524288" in result.stdout
    lines = [line for line in result.stdout.splitlines() if line.startswith(("1048576", "2048"))]
    assert [len(line.split()) for line in lines] == [9, 9]


def test_a_prediction_cuts_no_number_off() -> None:
    arguments = ["plan", "--preset", "llama-3.3-70b", "--predict", "--tokens", "1048576,2048"]
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments)
    assert result.exit_code == 0
    assert "…" not in result.stdout
    assert any(line.startswith("1048576 ") for line in result.stdout.splitlines())


def test_one_rank_has_nothing_to_plan() -> None:
    arguments = ("plan", "--preset", "llama-3.3-70b", "--tp", "1", "--tokens", "2048")
    said = "tp_size 1: one rank has nothing to communicate, so nothing is fused or split: mode stock"
    assert " ".join(output(*arguments).split()) == said
    document = run_json(*arguments)
    assert (document["steps"], document["table"]["said"]) == ([], said)
    assert run_json(*arguments[:4], "2", *arguments[5:])["steps"]


def test_plan_takes_the_sms_of_the_gpu() -> None:
    few = run_json("plan", "--preset", "llama-3.3-70b", "--tokens", "2048", "--sms", "66")
    assert few["steps"][0]["gemms"][2]["whole"] == 7
    assert few["sms"] == 66


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--tokens", "abc"), "not a list of token counts"),
        (("--tokens", ""), "not a list of token counts"),
        (("--tokens", "512,,1024"), "not a list of token counts"),
        (("--tokens", "0"), "a count is below 1"),
        (("--tokens", "99999999999999999999"), "give counts up to 1048576"),
        (("--tokens", "512,1048577"), "give counts up to 1048576"),
        (("--tokens", "9" * 5000), "not a list of token counts"),
        (("--batch", "0"), "below 1"),
        (("--batch", "99999"), "99999 sequences need at least 99999 tokens"),
        (("--sms", "0"), "outside of 1..1024"),
        (("--sms", "1000000000"), "outside of 1..1024"),
        (("--sms", "1"), "sms: 1 is outside of 2..1024"),
        (("--sms", "8"), "leaves 0 of 8 SMs"),
        (("--sms", "9"), "leaves 1 of 9 SMs"),
        (("--tp", "1000"), "1000"),
    ],
)
def test_plan_refuses(options: tuple[str, str], what: str) -> None:
    error = refusal("plan", "--preset", "llama-3.3-70b", *options)
    assert what in str(error)
    assert error.fix
    assert len(str(error)) < 250


def test_a_step_that_is_not_split_needs_no_sms_for_collectives() -> None:
    (step,) = run_json("plan", "--preset", "llama-3.3-70b", "--tokens", "256", "--sms", "8")["steps"]
    assert (step["mode"], step["suffix"]) == ("fuse", 0)
    assert all(gemm["prefix"] == gemm["whole"] for gemm in step["gemms"])


def test_plan_leaves_out_steps_of_fewer_tokens_than_sequences() -> None:
    arguments = ("plan", "--preset", "llama-3.3-70b", "--batch", "100", "--tokens", "50,99,100,2048")
    document = run_json(*arguments)
    assert [step["num_tokens"] for step in document["steps"]] == [100, 2048]
    assert document["skipped"] == [50, 99]
    assert "left out, fewer tokens than the 100 sequences: 50, 99" in output(*arguments)
    assert "need at least 100 tokens" in str(refusal(*arguments[:-1], "50"))


def test_plan_refuses_unknown_presets_and_other_tables(tmp_path: Path) -> None:
    assert "llama-3.3-70b" in str(refusal("plan", "--preset", "llama-9"))
    path = write(tmp_path / "t.json", (1025, None, 64))
    error = refusal("plan", "--preset", "llama-3.1-8b", "--table", path)
    assert error.where == f"{path}: key.hidden_size"
    assert "cannot be read" in refusal("plan", "--preset", "llama-3.3-70b", "--table", tmp_path / "none").what
