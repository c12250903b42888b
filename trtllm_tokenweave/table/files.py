"""Tables on disk: reading with one-line errors, and writing aside then renaming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trtllm_tokenweave.atomic import replace_file
from trtllm_tokenweave.errors import CHECK_PATH, UserError
from trtllm_tokenweave.table.model import SCHEMA_VERSION, RowError, TuningTable

_AGAIN = "check the file, or make it again"


def read_text(path: Path) -> str:
    """Text of a file.

    Raises:
        UserError: It cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path), fix=CHECK_PATH) from error
    except UnicodeDecodeError as error:
        raise UserError(f"is not UTF-8 text (byte {error.start})", where=str(path), fix=_AGAIN) from error


def read_json(text: str, where: str) -> Any:
    """Parse JSON, refusing what JSON readers disagree on (a name given twice).

    Raises:
        UserError: Not JSON.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f'name "{name}" is given more than once', where=where)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        what = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise UserError(what, where=where, fix=_AGAIN) from error
    except ValueError as error:
        # Python refuses to read an integer of thousands of digits.
        raise UserError("holds a number with too many digits", where=where, fix=_AGAIN) from error
    except RecursionError as error:
        raise UserError("is not a table: nested too deeply", where=where) from error


def parse_table(text: str, *, where: str = "table") -> TuningTable:
    """Read a table's JSON text.

    Raises:
        UserError: Not JSON, another schema, or a wrong value; names `where`, the row and the field.
    """
    data = read_json(text, where)
    if not isinstance(data, dict):
        raise UserError("is not a table: expected a JSON object", where=where)
    if "key" not in data:
        raise UserError('is not a table: it has no "key"', where=where)
    version = data.get("schema_version")
    if version is None:
        raise UserError("missing", where=f"{where}: schema_version", fix=f"write {SCHEMA_VERSION}")
    # Asked first: a newer form may hold fields that the checks below would blame.
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UserError(
            f"version {str(version)[:20]} was made by a newer version (this one reads up to {SCHEMA_VERSION})",
            where=f"{where}: schema_version",
            fix="upgrade trtllm-tokenweave",
        )
    try:
        return TuningTable.model_validate_json(text)
    except ValidationError as error:
        raise table_error(error, where) from error


def table_error(error: ValidationError, where: str) -> UserError:
    """One line from what pydantic found: the first problem, and how many more there are."""
    problems = error.errors(include_url=False)
    first = problems[0]
    path, what = _field_path(first["loc"]), first["msg"]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RowError):
        path, what = cause.path, str(cause)
    elif isinstance(cause, ValueError):
        what = str(cause)
    elif first["type"] == "missing":
        what = "missing"
    elif first["type"] == "extra_forbidden":
        what = "unknown field"
    elif not isinstance(first["input"], (dict, list)):
        got = json.dumps(first["input"])
        what = f"{what[0].lower()}{what[1:]}, got {got if len(got) <= 80 else got[:80] + '...'}"
    if len(problems) > 1:
        what += f" (and {len(problems) - 1} more)"
    return UserError(what, where=f"{where}: {path}" if path else where)


def _field_path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        # pydantic names the branch of a union that failed; it is no field of the file.
        elif part.isidentifier() and part not in ("int", "none"):
            path += f".{part}" if path else part
    return path


def load_table(path: str | Path) -> TuningTable:
    """Read and check a table file.

    Raises:
        UserError: As `parse_table`, or the file cannot be read.
    """
    return parse_table(read_text(Path(path)), where=str(path))


def table_text(table: TuningTable) -> str:
    """The JSON form as written to disk: indented, one launch configuration a line, ending in a newline."""
    data = table.model_dump(mode="json")
    rows = data.pop("rows")
    head = json.dumps(data, indent=2, ensure_ascii=False)[: -len("\n}")]
    if not rows:
        return f'{head},\n  "rows": []\n}}\n'
    lines = []
    for row in rows:
        fields = [f"      {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in row.items()]
        lines.append("    {\n" + ",\n".join(fields) + "\n    }")
    return head + ',\n  "rows": [\n' + ",\n".join(lines) + "\n  ]\n}\n"


def save_table(table: TuningTable, path: Path) -> None:
    """Write the JSON form. The file appears whole or not at all.

    Raises:
        UserError: It cannot be written.
    """
    replace_file(path, lambda aside: aside.write_text(table_text(table), encoding="utf-8"))
