"""The predictions against measurements: docs/results/predict_check.json.

A row compares a ratio of two times, or the milliseconds of a step. What the fit has seen of a row's times says its
source's role.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_tokenweave.predict.data import About, Role, SourceError, Unit

ROLES: Mapping[Role, str] = {
    "check": "other times than the parameters were fitted to",
    "same setting as the fit": "other runs of what was fitted: the same GEMM and collective, CTAs in the same range",
    "fit": "the parameters were fitted to these times",
}


@dataclass(frozen=True)
class CheckRow:
    """One value, measured and predicted, on `machine`; `case` tells rows of one source and size apart."""

    machine: str
    source: str
    role: Role
    num_tokens: int
    measured: float
    predicted: float
    case: str = ""
    unit: Unit = "ratio"
    about: About = "parts"

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.measured - 1


def check_document(rows: Iterable[CheckRow]) -> dict[str, Any]:
    """The JSON document."""
    rows = list(rows)
    return {
        "what": "ratios of two times, and milliseconds of steps, measured and predicted",
        "method": "docs/prediction.md",
        "command": "python -m trtllm_tokenweave.predict",
        "roles": dict(ROLES),
        "sources": [
            {"machine": machine, **error.model_dump()} for machine, all_ in errors(rows).items() for error in all_
        ],
        "rows": [
            {
                "source": f"{row.source}, {row.case}" if row.case else row.source,
                "num_tokens": row.num_tokens,
                f"measured_{row.unit}": round(row.measured, 4),
                f"predicted_{row.unit}": round(row.predicted, 4),
            }
            for row in rows
        ],
    }


def check_markdown(document: Mapping[str, Any]) -> str:
    """The errors as the documentation's table."""
    lines = ["| ratio or time | role | rows | worst | mean |", "|---|---|---|---|---|"]
    for error in document["sources"]:
        share = f"{error['worst']:+.1%} | {error['mean']:.1%}".replace("%", " %")
        lines.append(f"| {error['source']} | {error['role']} | {error['rows']} | {share} |")
    return "\n".join(lines)


def errors(rows: Iterable[CheckRow]) -> dict[str, tuple[SourceError, ...]]:
    """By machine, one for each source, in the order of the rows."""
    groups: dict[str, dict[str, list[CheckRow]]] = {}
    for row in rows:
        groups.setdefault(row.machine, {}).setdefault(row.source, []).append(row)
    return {
        machine: tuple(
            SourceError(
                source=source,
                role=found[0].role,
                about=found[0].about,
                unit=found[0].unit,
                rows=len(found),
                worst=round(max(found, key=lambda row: abs(row.error)).error, 5),
                mean=round(sum(abs(row.error) for row in found) / len(found), 5),
            )
            for source, found in sources.items()
        )
        for machine, sources in groups.items()
    }
