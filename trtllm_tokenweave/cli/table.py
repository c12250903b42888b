"""`trtllm-tokenweave table`: show, compare, join, check and convert tuning tables.

``diff`` exits with 0 whether or not the tables differ; with ``--exit-code`` it exits with 1 when they do. ``check``
exits with 0 when the table is valid, warnings or not.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from trtllm_tokenweave.atomic import same_file
from trtllm_tokenweave.cli.console import make_console
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.model_config import preset as model_preset
from trtllm_tokenweave.schedule import MAX_NUM_TOKENS
from trtllm_tokenweave.table import (
    LaunchConfig,
    PaperTarget,
    TableDiff,
    TableKey,
    TableRow,
    TuningTable,
    diff_tables,
    load_paper_config,
    load_table,
    merge_tables,
    save_table,
)
from trtllm_tokenweave.table.files import table_error
from trtllm_tokenweave.table.measured import Here, check_measured, layer_gemms
from trtllm_tokenweave.table.shipped import this_machine
from trtllm_tokenweave.waves import gemm_shapes, table_key

app = typer.Typer(no_args_is_help=True, help="Show, compare, join, check and convert tuning tables.")

File = Annotated[Path, typer.Argument(metavar="FILE", help="A tuning table (JSON).")]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="The table to write.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command()
def show(file: File, as_json: AsJson = False) -> None:
    """Print a table."""
    table = load_table(file)
    if as_json:
        print_json({"file": str(file), "sha256": table.sha256, "table": table.model_dump(mode="json")})
        return
    print_table(make_console(), table, str(file))


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="The first table.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The second table.")],
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 when the tables differ.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what differs between two tables. Exits with 0 even when they do, unless --exit-code is given."""
    result = diff_tables(load_table(a), load_table(b))
    _print_diff(result, (a, b), as_json)
    if exit_code and not result.same:
        raise typer.Exit(1)


def _print_diff(result: TableDiff, names: tuple[Path, Path], as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "same": result.same,
                "head": {name: list(values) for name, values in result.head.items()},
                "only_a": [row.model_dump(mode="json") for row in result.only_a],
                "only_b": [row.model_dump(mode="json") for row in result.only_b],
                "changed": [
                    {
                        "fields": list(change.fields),
                        "a": change.before.model_dump(mode="json"),
                        "b": change.after.model_dump(mode="json"),
                    }
                    for change in result.changed
                ],
            }
        )
        return
    console = make_console()
    if result.same:
        console.print("the tables are equal")
    for name, (left, right) in result.head.items():
        values = " -> ".join("none" if value is None else str(value) for value in (left, right))
        console.print(f"{name}: {values}", markup=False)
    for title, rows in ((f"only in {names[0]}", result.only_a), (f"only in {names[1]}", result.only_b)):
        if rows:
            console.print(_rows_table(title, rows))
    for change in result.changed:
        for name in change.fields:
            left, right = _value(getattr(change.before, name)), _value(getattr(change.after, name))
            place = f"batch {change.before.batch} tokens {change.before.tokens}"
            console.print(f"{place}: {name} {left} -> {right}", markup=False)


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="A B...", help="Tables of the same key.")],
    output: Output,
    as_json: AsJson = False,
) -> None:
    """Join tables of the same key; rows in conflict are refused, and an output that is one of the inputs."""
    for file in files:
        if same_file(file, output):
            raise UserError(
                f"{output} is one of the tables to join", where="--output", fix="write the result to another file"
            )
    tables = [load_table(file) for file in files]
    table = merge_tables(tables, [str(file) for file in files])
    save_table(table, output)
    if table.source.measured is None and any(part.source.measured is not None for part in tables):
        why = "the tables differ in what they were measured on"
        print(f"note: {why}, so {output} does not say it and cannot be checked against a machine", file=sys.stderr)
    _print_written(table, output, (), as_json)


@app.command()
def check(
    file: File,
    gpu: Annotated[str | None, typer.Option(help="GPU name that the table has to be for.")] = None,
    tp: Annotated[int | None, typer.Option(help="tp_size that the table has to be for.")] = None,
    hidden: Annotated[int | None, typer.Option(help="hidden_size that the table has to be for.")] = None,
    dtype: Annotated[str | None, typer.Option(help="dtype that the table has to be for.")] = None,
    kind: Annotated[str | None, typer.Option(help="Model kind (dense, moe) that the table has to be for.")] = None,
    preset: Annotated[str, typer.Option(help="Model shape that it has to be for; options above go first.")] = "",
    tensorrt: Annotated[str | None, typer.Option(help="TensorRT that it has to be measured with.")] = None,
    here: Annotated[bool, typer.Option("--here", help="Take GPU and TensorRT from this machine.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a table, and that it was made for what is asked for, with this version. Rows that do nothing are warned of.

    A measured table is refused where it was measured on another GPU, with another TensorRT, another version of this
    package or for other shapes, as far as these are known.
    """
    table = load_table(file)
    config = model_preset(preset) if preset else None
    if tensorrt is not None and not _VERSION.fullmatch(tensorrt):
        raise UserError(f'"{tensorrt}" is no version', where="--tensorrt", fix="write it as in 10.6.0")
    if here:
        machine = this_machine()
        gpu, tensorrt = gpu or machine.gpu, tensorrt or machine.tensorrt
    given = {"gpu": gpu, "tp_size": tp, "hidden_size": hidden, "dtype": dtype, "model_kind": kind}
    expected = {name: value for name, value in given.items() if value is not None}
    if config is not None:
        expected = table_key(config, table.key.tp_size).model_dump(exclude={"gpu", "tp_size"}) | expected
    # A value that no table can have is the option's fault, not the table's.
    option_key({**table.key.model_dump(), **expected})
    table.check_key(expected, where=str(file))
    gemms = None if config is None else layer_gemms(gemm_shapes(config, table.key.tp_size))
    check_measured(table, Here(gpu, tensorrt, gemms), where=str(file))
    warnings = table.warnings() + _unknown(table)
    if as_json:
        document = {"ok": True, "file": str(file), "sha256": table.sha256, "checked": sorted(expected)}
        print_json({**document, "warnings": list(warnings)})
        return
    checked = f", made for {', '.join(f'{name} {value}' for name, value in expected.items())}" if expected else ""
    console = make_console()
    for warning in warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False)
    console.print(f"{file}: good, {len(table.rows)} rows{checked}", markup=False, highlight=False)


def _unknown(table: TuningTable) -> tuple[str, ...]:
    """What cannot be checked about a measured table."""
    if table.source.kind != "measurement" or table.source.measured is not None:
        return ()
    return ("it does not say on what it was measured (source.measured), so that cannot be checked",)


@app.command("from-paper")
def from_paper(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A configuration published by TokenWeave's authors.")],
    output: Output,
    tp: Annotated[int, typer.Option(help="tp_size of the published run.")],
    hidden: Annotated[int, typer.Option(help="hidden_size of the model.")],
    dtype: Annotated[str, typer.Option(help="dtype of the model.")] = "bfloat16",
    gpu: Annotated[str, typer.Option(help="GPU name of the published run.")] = "any",
    kind: Annotated[str, typer.Option(help="Model kind: dense or moe.")] = "dense",
    as_json: AsJson = False,
) -> None:
    """Convert a published configuration to a table."""
    if same_file(file, output):
        raise UserError(f"{output} is the configuration to convert", where="--output", fix="write to another file")
    key = option_key({"gpu": gpu, "tp_size": tp, "hidden_size": hidden, "dtype": dtype, "model_kind": kind})
    table, notes = load_paper_config(file, PaperTarget(key))
    save_table(table, output)
    _print_written(table, output, notes, as_json)


# "10.6", "10.6.0.26", and the spellings of Python's packages: "10.0.0b6", "10.0.1.post1".
_VERSION = re.compile(r"\d+(\.\d+)*(\.?[a-z]+\d+)?")
_OPTIONS = {"gpu": "--gpu", "tp_size": "--tp", "hidden_size": "--hidden", "dtype": "--dtype", "model_kind": "--kind"}


def option_key(fields: dict[str, Any]) -> TableKey:
    """A table key made of options.

    Raises:
        UserError: A value that no table can have; names the option.
    """
    try:
        return TableKey.model_validate(fields)
    except ValidationError as error:
        field = str(error.errors(include_url=False)[0]["loc"][0])
        raise UserError(
            table_error(error, "").what, where=_OPTIONS[field], fix="give a value that tables can have"
        ) from error


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    typer.echo(json.dumps(document, indent=2))


def read_tokens(text: str) -> tuple[int, ...]:
    """Token counts of a comma-separated list.

    Raises:
        UserError: Not a list of positive integers up to `schedule.MAX_NUM_TOKENS`.
    """
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if counts and min(counts) < 1:
        raise UserError("a count is below 1", where="--tokens", fix="write counts of 1 and more: 512,1024,2048")
    if not counts:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise UserError(f'"{shown}" is not a list of token counts', where="--tokens", fix="write 512,1024,2048")
    if max(counts) > MAX_NUM_TOKENS:
        raise UserError("a count is too large", where="--tokens", fix=f"give counts up to {MAX_NUM_TOKENS}")
    return counts


def _print_written(table: TuningTable, output: Path, notes: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        document = {"file": str(output), "sha256": table.sha256, "rows": len(table.rows), "notes": list(notes)}
        print_json(document)
        return
    console = make_console()
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    console.print(f"wrote {output}: {len(table.rows)} rows", markup=False, highlight=False)


def print_table(console: Console, table: TuningTable, name: str) -> None:
    """Print a table's head and rows."""
    _print_head(console, table, name)
    console.print(_rows_table("rows", table.rows) if table.rows else "no rows: the default rule for every step")


def _print_head(console: Console, table: TuningTable, name: str) -> None:
    key = table.key
    lines = [
        name,
        f"made for gpu {key.gpu}, tp_size {key.tp_size}, hidden_size {key.hidden_size}, {key.dtype}, {key.model_kind}",
        f"granularity {table.granularity}, min_tokens {table.min_tokens}",
        f"source: {table.source.kind}{f', {table.source.text}' if table.source.text else ''}",
    ]
    measured = table.source.measured
    if measured is not None:
        lines.append(
            f"measured on {measured.tp_size} x {measured.gpu} with TensorRT {measured.tensorrt}, trtllm-tokenweave "
            f"{measured.library}: {measured.layers} layers of {measured.model}, {measured.mode} steps"
        )
    lines.append(f"sha256 {table.sha256}")
    console.print("\n".join(lines), markup=False, highlight=False)


def _rows_table(title: str, rows: tuple[TableRow, ...]) -> Table:
    table = Table("batch", "tokens", "mode", "offset", "attention", "mlp", title=title, box=box.SIMPLE)
    for row in rows:
        offset = str(row.split_offset) if row.mode == "weave" else "-"
        table.add_row(
            str(row.batch), str(row.tokens), row.mode, offset, launch_text(row.attention), launch_text(row.mlp)
        )
    return table


def launch_text(launch: LaunchConfig) -> str:
    """One launch configuration in a few characters, as in "auto 16x1024"."""
    text = f"{launch.fabric} {launch.ctas}x{launch.threads}"
    return f"{text} gemm {launch.gemm_sms}" if launch.gemm_sms else text


def _value(value: Any) -> str:
    return launch_text(value) if isinstance(value, LaunchConfig) else str(value)
