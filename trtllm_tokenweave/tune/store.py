"""What was measured, on disk: every sample of every candidate, so that a run that was killed goes on where it was.

A search asks for samples in an order that the samples and the answers of its clock decide. So nothing else is kept: a
search that starts again is given those of the file first, takes the same path, and measures from where they end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtllm_tokenweave.atomic import replace_file
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.table import LaunchConfig
from trtllm_tokenweave.table.files import read_json, read_text, table_error
from trtllm_tokenweave.table.shipped import UNFINISHED
from trtllm_tokenweave.tune.candidates import Candidate

_STRICT = ConfigDict(extra="forbid", strict=True)


class Measured(BaseModel):
    """The samples of one candidate at one token count.

    Attributes:
        offset: See `Candidate`.
        attention: See `Candidate`.
        mlp: See `Candidate`.
        error: Largest relative error of a row against the fuse-only result; None where the result was not finite.
        rejected: Why the candidate is not timed, or empty.
        ms: Milliseconds a step of the slowest rank, at the clock `Record.mhz`, in the order in which they were taken.
        mhz: The clock at which each was measured.
    """

    model_config = _STRICT

    offset: int | None
    attention: LaunchConfig
    mlp: LaunchConfig
    error: float | None = 0.0
    rejected: str = ""
    ms: list[float] = Field(default_factory=list)
    mhz: list[float] = Field(default_factory=list)

    @property
    def candidate(self) -> Candidate:
        """What was measured."""
        return Candidate(self.offset, self.attention, self.mlp)


class BucketRecord(BaseModel):
    """The samples of one token count.

    Attributes:
        seconds: How long they took.
        answers: Whether its time was over, each time that the search asked.
        candidates: The samples by the candidates' names.
    """

    model_config = _STRICT

    seconds: float = 0.0
    answers: list[bool] = Field(default_factory=list)
    candidates: dict[str, Measured] = Field(default_factory=dict)

    def of(self, candidate: Candidate) -> Measured | None:
        """The samples of a candidate, None where it was never tried."""
        return self.candidates.get(str(candidate))

    def add(self, candidate: Candidate, error: float | None, rejected: str) -> Measured:
        """Note a candidate that was tried for the first time."""
        made = Measured(
            offset=candidate.offset,
            attention=candidate.attention,
            mlp=candidate.mlp,
            error=error,
            rejected=rejected,
        )
        self.candidates[str(candidate)] = made
        return made


class Record(BaseModel):
    """All samples of a run.

    Attributes:
        format_version: Version of this form.
        key: What the samples depend on, by name; samples of another key are worth nothing here.
        seconds: Spent so far, engines included.
        mhz: The clock that all samples are given at; 0: there are none yet.
        buckets: By token count.
    """

    model_config = _STRICT

    format_version: Literal[2] = 2
    key: dict[str, Any]
    seconds: Annotated[float, Field(ge=0)] = 0.0
    mhz: Annotated[float, Field(ge=0)] = 0.0
    buckets: dict[int, Annotated[BucketRecord, Field()]] = Field(default_factory=dict)

    def bucket(self, num_tokens: int) -> BucketRecord:
        """The samples of a token count, made empty where there are none."""
        return self.buckets.setdefault(num_tokens, BucketRecord())


def partial_file(output: Path) -> Path:
    """Where the samples of an unfinished run are: beside its output."""
    return output.with_name(output.stem + UNFINISHED)


def save_record(record: Record, path: Path) -> None:
    """Write the samples aside, then rename.

    Raises:
        UserError: It cannot be written.
    """
    text = record.model_dump_json()
    replace_file(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def load_record(path: Path, key: dict[str, Any]) -> Record | None:
    """The samples of an unfinished run, None where there is no file.

    Args:
        path: The file.
        key: What this run's samples depend on.

    Raises:
        UserError: It cannot be read, or its samples are of another key: names the first difference, and how to start
            anew.
    """
    if not path.exists():
        return None
    fix = f"remove {path.name} or give --restart to start anew, or repeat the command that began it"
    try:
        record = Record.model_validate_json(read_text(path), strict=False)
    except ValidationError as error:
        read_json(read_text(path), str(path))
        raise UserError(table_error(error, "").what, where=str(path), fix=fix) from error
    here = json.loads(json.dumps(key))
    for name in dict.fromkeys([*record.key, *here]):
        before, now = record.key.get(name), here.get(name)
        if before != now:
            raise UserError(f"was begun with {name} {before}, and this run has {now}", where=str(path), fix=fix)
    return record
