"""Comparing and joining tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.table.files import table_error
from trtllm_tokenweave.table.measured import gemm_text
from trtllm_tokenweave.table.model import MeasuredOn, SourceKind, TableKey, TableRow, TableSource, TuningTable

# From the weakest claim to the strongest: a joined table claims no more than its weakest part.
_STRENGTH: tuple[SourceKind, ...] = ("default", "capability", "measurement")


@dataclass(frozen=True)
class RowChange:
    """A row whose buckets are the same in both tables and whose `fields` differ."""

    before: TableRow
    after: TableRow
    fields: tuple[str, ...]


@dataclass(frozen=True)
class TableDiff:
    """What differs between two tables, a and b.

    Attributes:
        head: Field outside of the rows ("key.gpu", "source.measured.date", ...) -> (value in a, value in b); None: the
            table does not have it.
        only_a: Rows whose buckets b does not have.
        only_b: Rows whose buckets a does not have.
        changed: Rows with the same buckets and other content.
    """

    head: dict[str, tuple[str | int | None, str | int | None]]
    only_a: tuple[TableRow, ...]
    only_b: tuple[TableRow, ...]
    changed: tuple[RowChange, ...]

    @property
    def same(self) -> bool:
        """Whether the tables are equal."""
        return not (self.head or self.only_a or self.only_b or self.changed)


def diff_tables(a: TuningTable, b: TuningTable) -> TableDiff:
    """Compare two tables; rows correspond when both their buckets are equal."""
    head_a, head_b = _head(a), _head(b)
    rows_a = {(row.batch, row.tokens): row for row in a.rows}
    rows_b = {(row.batch, row.tokens): row for row in b.rows}
    changed = []
    for where, row in rows_a.items():
        other = rows_b.get(where, row)
        fields = tuple(name for name in TableRow.model_fields if getattr(row, name) != getattr(other, name))
        if fields:
            changed.append(RowChange(row, other, fields))
    values = {name: (head_a.get(name), head_b.get(name)) for name in [*head_a, *head_b]}
    return TableDiff(
        head={name: (left, right) for name, (left, right) in values.items() if left != right},
        only_a=tuple(row for where, row in rows_a.items() if where not in rows_b),
        only_b=tuple(row for where, row in rows_b.items() if where not in rows_a),
        changed=tuple(changed),
    )


def merge_tables(tables: Sequence[TuningTable], names: Sequence[str]) -> TuningTable:
    """Join tables of the same key; equal rows are kept once.

    What they were measured on is kept where it is the same but for the date, with the last one; else left out.

    Args:
        tables: At least one.
        names: What errors call each of them, usually the file.

    Raises:
        UserError: Keys, granularity, min_tokens or GEMMs differ, or rows overlap without being equal.
    """
    first = tables[0]
    merged: list[TableRow] = list(first.rows)
    owners = [names[0]] * len(merged)
    for table, name in zip(tables[1:], names[1:], strict=True):
        _check_joinable(first, table, names[0], name)
        for row in table.rows:
            clashes = [i for i, have in enumerate(merged) if _overlap(have, row)]
            if [merged[i] for i in clashes] == [row]:
                continue
            if clashes:
                have = merged[clashes[0]]
                raise UserError(
                    f"row batch {row.batch} tokens {row.tokens} conflicts with batch {have.batch} "
                    f"tokens {have.tokens} of {owners[clashes[0]]}",
                    where=name,
                    fix="remove one of the two rows",
                )
            merged.append(row)
            owners.append(name)
    kind = min((table.source.kind for table in tables), key=_STRENGTH.index)
    measured = _common([table.source.measured for table in tables])
    # Rows of several measurements have no common one to be compared with; their GEMMs are the same (_check_joinable).
    gemm = first.gemm if measured is None and first.gemm != "budget" else None
    text = "; ".join(dict.fromkeys(table.source.text for table in tables if table.source.text))
    try:
        return TuningTable(
            key=first.key,
            granularity=first.granularity,
            min_tokens=first.min_tokens,
            source=TableSource(kind=kind, text=text, measured=measured, gemm=gemm),
            rows=tuple(merged),
        )
    except ValidationError as error:  # pragma: no cover - conflicts were refused above
        raise table_error(error, "merged table") from error


def _common(all_measured: Sequence[MeasuredOn | None]) -> MeasuredOn | None:
    """What all were measured on, of the last day; None where they differ in more than the day."""
    found = [measured for measured in all_measured if measured is not None]
    if len(found) < len(all_measured):
        return None
    last = max(found, key=lambda measured: measured.date)
    return last if all(measured.model_copy(update={"date": last.date}) == last for measured in found) else None


def _head(table: TuningTable) -> dict[str, str | int | None]:
    head: dict[str, str | int | None] = {f"key.{name}": getattr(table.key, name) for name in TableKey.model_fields}
    head |= {"granularity": table.granularity, "min_tokens": table.min_tokens, "gemm": table.gemm}
    head |= {f"source.{name}": getattr(table.source, name) for name in ("kind", "text", "gemm")}
    measured = table.source.measured
    if measured is None:
        return head
    # Whose GEMMs it had is the table's "gemm".
    fields = measured.model_dump(exclude={"gemm", "gemms"})
    head |= {f"source.measured.{name}": value for name, value in fields.items()}
    return head | {f"source.measured.gemms.{name}": gemm_text(shape) for name, shape in measured.gemms.items()}


def _check_joinable(first: TuningTable, table: TuningTable, first_name: str, name: str) -> None:
    head, other = _head(first), _head(table)
    for field, value in head.items():
        if not field.startswith("source.") and other[field] != value:
            raise UserError(f"{field} is {other[field]}, but {value} in {first_name}", where=name)


def _overlap(a: TableRow, b: TableRow) -> bool:
    return a.batch.overlaps(b.batch) and a.tokens.overlaps(b.tokens)
