"""`trtllm-tokenweave doctor`: what is installed, what is missing, what each lack costs and how to get it."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from trtllm_tokenweave import __version__
from trtllm_tokenweave.cli.console import make_console
from trtllm_tokenweave.config import VARIABLES, read_environment, set_variables
from trtllm_tokenweave.installed import Finding, Status, look, this_machine

# Columns of a terminal from which on the places of things fit beside the rest.
_WIDE = 110

_MARKS: dict[Status, str] = {
    "ok": "[green]ok[/green]",
    "missing": "[yellow]missing[/yellow]",
    "unsupported": "[red]unsupported[/red]",
}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 when anything is missing.")] = False,
) -> None:
    """Say what is installed, what is missing, what each lack costs and how to get it.

    Without --strict the exit code is 0 whatever is found: everything but Python and numpy can be done without.
    """
    findings = look(this_machine(read_environment()))
    if as_json:
        print(json.dumps(document(findings), indent=2))
    else:
        show(findings, make_console())
    if strict and any(finding.status != "ok" for finding in findings):
        raise typer.Exit(1)


def document(findings: Sequence[Finding]) -> dict[str, object]:
    """The JSON document: version, system, environment variables that are set, findings."""
    return {
        "version": __version__,
        "system": platform.platform(),
        "environment": set_variables(),
        "findings": [asdict(finding) for finding in findings],
    }


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print a table of the findings, then what to do about those that are not "ok"."""
    title = f"trtllm-tokenweave {__version__} on {platform.platform()}"
    columns = ["What", "Status", "Version", "Supported"]
    if console.width >= _WIDE:
        columns.append("Where")
    table = Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for finding in findings:
        version, where = escape(finding.version or "-"), escape(finding.where or "-")
        row = [escape(finding.title), _MARKS[finding.status], version, escape(finding.supported or "any"), where]
        table.add_row(*row[: len(columns)])
    console.print(table)
    for finding in findings:
        if finding.status == "ok":
            continue
        head = f"Missing: {finding.title}"
        if finding.status == "unsupported":
            head = f"Not usable: {finding.title} {finding.version} (supported: {finding.supported})"
        console.print(f"[bold]{escape(head)}[/bold]", highlight=False)
        for name, text in (("costs", finding.costs), ("fix", finding.fix)):
            console.print(Padding(f"{name + ':':<6} {escape(text)}", (0, 0, 0, 2), expand=False), highlight=False)
    values = set_variables()
    if values:
        meanings = {variable.name: variable.meaning for variable in VARIABLES}
        console.print("\n[bold]Environment variables that are set[/bold]")
        for name, value in values.items():
            console.print(f"  {escape(name)}={escape(value)}  {escape(meanings[name])}", highlight=False)
