"""Reading the configuration files that the TokenWeave authors published with their artifact."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.schedule import DEFAULT_GRANULARITY, OFFSET_STEP, default_min_tokens, round_up
from trtllm_tokenweave.table.files import read_json, read_text, table_error
from trtllm_tokenweave.table.launch import CLUSTER, MAX_CTAS, Fabric, LaunchConfig
from trtllm_tokenweave.table.model import MAX_COUNT, Bucket, TableKey, TableRow, TableSource, TuningTable

_Ctas = Annotated[int, Field(ge=1, le=MAX_CTAS)]


class PaperEntry(BaseModel):
    """One entry of a published configuration. Older files spell ``split_offset`` as ``chunk_offset``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    baseline_ctas: _Ctas
    attention_ctas: _Ctas
    mlp_ctas: _Ctas
    split_offset: Annotated[
        int,
        Field(
            ge=0, le=MAX_COUNT, multiple_of=OFFSET_STEP, validation_alias=AliasChoices("split_offset", "chunk_offset")
        ),
    ]


@dataclass(frozen=True)
class PaperTarget:
    """What the converted table is for. The published kernels use multicast only, hence the default fabric."""

    key: TableKey
    fabric: Fabric = "multimem"
    granularity: int = DEFAULT_GRANULARITY


def load_paper_config(path: Path, target: PaperTarget) -> tuple[TuningTable, tuple[str, ...]]:
    """Convert a published file; see `convert_paper_config`.

    Raises:
        UserError: The file cannot be read, is not JSON, or is no such configuration.
    """
    where = str(path)
    data = read_json(read_text(path), where)
    if not isinstance(data, dict):
        raise UserError('expected a JSON object of "<tokens>": {...}', where=where)
    return convert_paper_config(data, target, where=where)


def convert_paper_config(
    config: Mapping[str, Any], target: PaperTarget, *, where: str = "configuration"
) -> tuple[TuningTable, tuple[str, ...]]:
    """Convert ``{"<tokens>": {"baseline_ctas", "attention_ctas", "mlp_ctas", "split_offset"}}``.

    Key T covers the token counts above the key before it, up to T; the last key covers everything above as well.
    Counts below the table's min_tokens become fuse rows with ``baseline_ctas`` (what the authors launch when
    nothing overlaps), the others weave rows; a note names the entries that lose their split by it. Odd CTA counts are
    raised by one; keys between two multiples of the granularity end at the lower one, and are refused where a split
    would depend on it.

    Returns:
        The table, and notes on what was changed.

    Raises:
        UserError: Names the entry and the field that is wrong.
    """
    if not config:
        raise UserError("holds no entries", where=where)
    entries = [(_token_key(name, where), _entry(value, f'{where}: "{name}"')) for name, value in config.items()]
    entries.sort(key=lambda entry: entry[0])
    notes: list[str] = []
    rows = _rows(entries, target, notes, where)
    notes += _lost_splits([tokens for tokens, _ in entries], default_min_tokens(target.key.model_kind))
    try:
        table = TuningTable(
            key=target.key,
            granularity=target.granularity,
            min_tokens=default_min_tokens(target.key.model_kind),
            source=TableSource(kind="default", text="converted from a configuration published with arXiv:2505.11329"),
            rows=tuple(rows),
        )
    except ValidationError as error:  # pragma: no cover - entries were checked above
        raise table_error(error, where) from error
    return table, tuple(dict.fromkeys(notes))


def _lost_splits(keys: list[int], min_tokens: int) -> list[str]:
    """A note on the entries (ascending) that lie below the least step that is split."""
    lost = ", ".join(f'"{tokens}"' for tokens in keys if tokens < min_tokens)
    if not lost:
        return []
    note = f"not split, their split_offset is not used: {lost}; the least step that is split has {min_tokens} tokens"
    if keys[-1] < min_tokens:
        note += f'. "{keys[-1]}" also covers all steps above it, so that no step is split'
    return [note]


def _token_key(name: str, where: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,9}", name) or int(name) > MAX_COUNT:
        raise UserError(f'"{name}" is not a token count', where=where)
    return int(name)


def _entry(value: Any, where: str) -> PaperEntry:
    try:
        return PaperEntry.model_validate(value)
    except ValidationError as error:
        raise table_error(error, where) from error


def _rows(entries: list[tuple[int, PaperEntry]], target: PaperTarget, notes: list[str], where: str) -> list[TableRow]:
    granularity, min_tokens = target.granularity, default_min_tokens(target.key.model_kind)
    # Token buckets end on the granularity; the last whole one below min_tokens ends here.
    fuse_top = (min_tokens - 1) // granularity * granularity
    launches = _Launches(target.fabric, notes)
    rows: list[TableRow] = []
    top = 0
    for index, (tokens, entry) in enumerate(entries):
        last = index == len(entries) - 1
        if tokens < min_tokens:
            # A bucket that two keys share goes to the larger one.
            hi = tokens // granularity * granularity
            if hi != tokens and not last:
                notes.append(f'"{tokens}" ends at {hi} tokens, the multiple of {granularity} below')
            if hi > top or last:
                rows.append(launches.fuse(top + 1, None if last else hi, entry))
                top = hi
            continue
        if tokens % granularity and not last:
            raise UserError(
                f"{tokens} is not a multiple of the granularity {granularity}",
                where=f'{where}: "{tokens}"',
                fix="remove the entry or round its token count",
            )
        if top < fuse_top:
            rows.append(launches.fuse(top + 1, fuse_top, entry))
            top = fuse_top
        # The last entry's row is open, but the authors measured it up to its own key.
        if entry.split_offset >= tokens // 2:
            raise UserError(
                f"{entry.split_offset} leaves no suffix; must be below {tokens // 2}",
                where=f'{where}: "{tokens}".split_offset',
                fix="lower the offset or remove the entry",
            )
        rows.append(launches.weave(top + 1, None if last else tokens, entry))
        top = tokens
    return rows


@dataclass(frozen=True)
class _Launches:
    fabric: Fabric
    notes: list[str]

    def fuse(self, lo: int, hi: int | None, entry: PaperEntry) -> TableRow:
        launch = self._launch(entry.baseline_ctas)
        return TableRow(tokens=Bucket(lo=lo, hi=hi), mode="fuse", attention=launch, mlp=launch)

    def weave(self, lo: int, hi: int | None, entry: PaperEntry) -> TableRow:
        return TableRow(
            tokens=Bucket(lo=lo, hi=hi),
            mode="weave",
            split_offset=entry.split_offset,
            attention=self._launch(entry.attention_ctas),
            mlp=self._launch(entry.mlp_ctas),
        )

    def _launch(self, ctas: int) -> LaunchConfig:
        even = round_up(ctas, CLUSTER)
        if even != ctas:
            self.notes.append(f"{ctas} CTAs raised to {even}: collectives launch in clusters of {CLUSTER}")
        return LaunchConfig(fabric=self.fabric, ctas=even)
