"""What the documentation shows runs as shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trtllm_tokenweave import recorder
from trtllm_tokenweave.cli.app import COMMANDS
from trtllm_tokenweave.passes import verify
from trtllm_tokenweave.table import PaperTarget, TableKey, convert_paper_config, parse_table

ROOT = Path(__file__).resolve().parents[2]


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_python_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("README.md", "python")
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "weave 32 []\n"
    assert verify(recorder.load("woven.json")) == []


def test_tables_of_the_documentation() -> None:
    ours, paper = blocks("docs/tables.md", "json")
    table = parse_table(ours, where="docs/tables.md")
    assert table.lookup(1, 2048).split == 1024 + 128
    assert table.lookup(65, 4096).mode == "fuse"
    target = PaperTarget(key=TableKey(tp_size=8, hidden_size=8192, dtype="bfloat16"))
    converted, _ = convert_paper_config(json.loads(paper), target, where="docs/tables.md")
    assert converted.lookup(1, 1024).split == 512 + 128


def test_documentation_shows_the_command_of_each_result() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    shown = {
        " ".join(re.sub(r"\\\n", "", line).split()) for line in re.findall(r"^    (?:.*\\\n)*.*$", text, re.MULTILINE)
    }
    results = {
        path.name: json.loads(path.read_text())["command"] for path in (ROOT / "docs" / "results").glob("*.json")
    }
    assert len(results) > 5
    assert {name: command for name, command in results.items() if command not in shown} == {}
    assert f"{results['e2e_tp2.json']} --json" not in shown


def test_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text()
    assert all(f"| `{command.name}" in readme for command in COMMANDS)


def anchors(document: Path) -> set[str]:
    """Where links into a document may lead, as GitHub names its headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "plugins").rglob("README.md")]
    for document in documents:
        for name, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", document.read_text())):
            if "://" not in name:
                target = document.parent / name if name else document
                assert target.exists(), f"{document.name}: {name}"
                assert not anchor or anchor in anchors(target), f"{document.name}: {name}#{anchor}"
