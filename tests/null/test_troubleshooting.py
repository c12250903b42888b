"""docs/troubleshooting.md quotes messages that exist, and the documentation names all that a user may set or count."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from trtllm_tokenweave.config import VARIABLES
from trtllm_tokenweave.plugin_library import Counters

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "plugins").rglob("README.md")))

#: Programs whose messages the page quotes behind their name.
OTHERS = ("CMake", "CUDA", "ld.so", "mpirun", "NCCL", "TensorRT", "TensorRT-LLM", "Triton")

#: Stands in a template for what a message takes from its case.
HOLE = "\0"


# ---- the messages of the source


def python_templates(text: str) -> Iterator[str]:
    """Every string of a module that is no docstring, and every ``where: what. Fix: fix`` of an error."""
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and id(node) not in prose:
            yield _template(node)
        elif isinstance(node, ast.Call) and len(node.args) == 1:
            named = {keyword.arg: _template(keyword.value) for keyword in node.keywords}
            yield f"{named.get('where', '')}: {_template(node.args[0])}. Fix: {named.get('fix', '')}"


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[srd]", HOLE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return _template(node.left) + _template(node.right)
    return HOLE


def cpp_templates(text: str) -> Iterator[str]:
    """The string literals of each statement, in order; adjacent ones are one literal."""
    statement = ""
    joined = False
    for token in re.findall(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[^\s]", text, re.DOTALL):
        if token.startswith(("//", "/*")):
            continue
        if token.startswith('"'):
            statement += ("" if joined else HOLE) + token[1:-1].replace('\\"', '"')
        elif token in ";{}":
            yield statement
            statement = ""
        joined = token.startswith('"')


@cache
def templates() -> tuple[str, ...]:
    found: list[str] = []
    for path in (ROOT / "trtllm_tokenweave").rglob("*.py"):
        found += python_templates(path.read_text())
    for path in (ROOT / "plugins").rglob("*"):
        if path.suffix in (".cpp", ".cu", ".cuh", ".h"):
            found += cpp_templates(path.read_text())
    scripts = (path for path in (ROOT / "build_scripts").iterdir() if path.is_file())
    for path in (*scripts, ROOT / "CMakeLists.txt"):
        found += re.sub(r"\$\{?\w+\}?", HOLE, path.read_text()).splitlines()
    return tuple(found)


def exists(message: str, among: Iterable[str]) -> bool:
    """Whether a message, ``...`` for what differs, is part of one of the templates."""
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("...")), re.DOTALL)
    return any(pattern.search(template) for template in among)


# ---- the page


def tables(text: str) -> Iterator[tuple[str, list[str]]]:
    """The heading of the first column and its cells, for each table of a page."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        heading, _, *rows = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines())
        yield heading[0], [row[0] for row in rows]


def quoted(text: str) -> list[str]:
    """The messages of this project that a page quotes."""
    cells = [cell for heading, column in tables(text) if heading == "message" for cell in column]
    ours = [cell for cell in cells if not cell.startswith(tuple(f"{name}: `" for name in OTHERS))]
    return [message for cell in ours for message in re.findall(r"`([^`]+)`", cell)]


def test_every_message_of_the_page_is_in_the_source() -> None:
    messages = quoted(PAGE.read_text())
    assert len(messages) > 100
    assert [message for message in messages if not exists(message, templates())] == []


def test_messages_say_enough_to_be_found() -> None:
    assert [m for m in quoted(PAGE.read_text()) if max(map(len, m.split("..."))) < 8] == []


@pytest.mark.parametrize(
    "message",
    [
        "release ... cannot build TensorRT engines any longer",  # one word differs
        "is needed here, but ... is",  # the words are there, in another order
        "Errors that reach a user",  # a docstring
        "The others give rank 0 time to find out who is missing",  # a comment of C++
    ],
)
def test_a_message_that_is_not_in_the_source_is_found_out(message: str) -> None:
    assert not exists(message, templates())


def test_what_counts_as_a_quoted_message() -> None:
    page = "| message | cure |\n|---|---|\n| `a ...`, `b` | `no` |\n| mpirun: `theirs` | x |\n"
    page += "\n| other |\n|---|\n| `c` |\n"
    assert quoted(page) == ["a ...", "b"]


# ---- counters and variables


def unnamed(names: Iterable[str], documents: Iterable[Path] = DOCUMENTS) -> list[str]:
    text = "\n".join(path.read_text() for path in documents)
    return [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]


def test_every_counter_is_explained() -> None:
    (cells,) = [column for heading, column in tables(PAGE.read_text()) if heading == "counter"]
    assert cells == [f"`{field[0]}`" for field in Counters._fields_[1:]]


def test_every_variable_is_in_the_documentation() -> None:
    cpp = re.findall(r'text\("(\w+)"\)', (ROOT / "plugins/src/env.cpp").read_text())
    assert {"TOKENWEAVE_TIMEOUT_MS", "NCCL_NVLS_ENABLE"} <= set(cpp)
    assert unnamed([*(variable.name for variable in VARIABLES), *cpp]) == []
    assert unnamed(["TOKENWEAVE_TIMEOUT"]) == ["TOKENWEAVE_TIMEOUT"]
