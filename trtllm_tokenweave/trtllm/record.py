"""What was done to each rank's engine, beside it on disk and in TensorRT-LLM's config.json, and the comparison."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trtllm_tokenweave import __version__
from trtllm_tokenweave.atomic import replace_file
from trtllm_tokenweave.errors import TokenWeaveError
from trtllm_tokenweave.manifest import read_file
from trtllm_tokenweave.passes import WeaveMode
from trtllm_tokenweave.tensorrt_module import tensorrt
from trtllm_tokenweave.trtllm.rank_build import Outcome

#: Key of the record in config.json; TensorRT-LLM reads its own keys only.
KEY = "tokenweave"

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class Left(BaseModel):
    """Something that was left as it was: where, why, and in which step of the weave."""

    model_config = _FROZEN

    where: str
    reason: str
    stage: str


class Table(BaseModel):
    """The tuning table of the engine: digest of its canonical JSON, where it comes from, its threshold.

    ``beyond_rows`` is what happens to steps above its rows; "" where there are none, or nothing is split.
    """

    model_config = _FROZEN

    sha256: str
    source: str
    min_tokens: int
    beyond_rows: str = ""


class Record(BaseModel):
    """What was done to one rank's network.

    Attributes:
        format_version: Version of this form.
        library: Version of this package.
        tensorrt_llm: Version of TensorRT-LLM.
        tensorrt: Version of TensorRT.
        rank: The rank.
        mode: "weave", "fuse" or "stock".
        sites: Number of fused places.
        attention: "split", "whole" or "none"; "" where nothing is split.
        refused: What was left alone.
        table: The tuning table; None for a stock network.
        max_num_tokens: Most tokens of a step that the network is woven for.
        max_batch_size: Most sequences (times beams) likewise.
        opt_num_tokens: For each profile the tokens that it is optimised for.
        chain_sha256: Digest of the order of all collectives and joins, which must be the same on all ranks.
    """

    model_config = _FROZEN

    format_version: Literal[1] = 1
    library: str
    tensorrt_llm: str
    tensorrt: str
    rank: int
    mode: WeaveMode
    sites: int = 0
    attention: str = ""
    refused: Annotated[tuple[Left, ...], Field(strict=False)] = ()
    table: Table | None = None
    max_num_tokens: int = 0
    max_batch_size: int = 0
    opt_num_tokens: Annotated[tuple[int, ...], Field(strict=False)] = ()
    chain_sha256: str = ""

    def shared(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        return self.model_dump(mode="json", exclude={"rank"})


def make_record(outcome: Outcome, rank: int, release: str) -> Record:
    """Describe what became of a network.

    Args:
        outcome: Of its weave.
        rank: Its rank.
        release: Of TensorRT-LLM.
    """
    stock = Record(
        library=__version__,
        tensorrt_llm=release,
        tensorrt=str(tensorrt().__version__),
        rank=rank,
        mode="stock",
        refused=tuple(Left(where=r.where, reason=r.reason, stage=r.stage) for r in outcome.refused),
    )
    if outcome.mode == "stock" or outcome.result is None or outcome.table is None:
        return stock
    plan, table = outcome.result.plan, outcome.table.table
    source = f"{table.source.kind}{f', {table.source.text}' if table.source.text else ''}"
    done = {
        "mode": outcome.mode,
        "sites": len(plan.sites),
        "attention": "" if plan.region is None else plan.region.attention,
        "table": Table(sha256=table.sha256, source=source, min_tokens=table.min_tokens, beyond_rows=plan.beyond_rows()),
        "max_num_tokens": plan.options.max_num_tokens,
        "max_batch_size": plan.options.max_batch_size,
        "opt_num_tokens": outcome.opt_num_tokens,
        "chain_sha256": hashlib.sha256("\n".join(outcome.chain).encode()).hexdigest(),
    }
    return stock.model_copy(update=done)


def record_path(folder: Path, rank: int) -> Path:
    """The record of a rank's engine."""
    return folder / f"rank{rank}.tokenweave.json"


def save_record(record: Record, folder: Path) -> None:
    """Write a rank's record, and rank 0's also into the config.json that TensorRT-LLM has written.

    Raises:
        UserError: a file cannot be written.
    """
    text = record.model_dump_json(indent=2) + "\n"
    replace_file(record_path(folder, record.rank), lambda aside: aside.write_text(text))
    config = folder / "config.json"
    if record.rank == 0 and config.is_file():
        document = {**json.loads(config.read_text()), KEY: record.model_dump(mode="json")}
        replace_file(config, lambda aside: aside.write_text(json.dumps(document, indent=4)))


def check_ranks(folder: Path, world_size: int) -> None:
    """Refuse engines that would wait for one another in different orders.

    Ranks whose records cannot be seen from here (another node's disk) are not compared.

    Raises:
        TokenWeaveError: names the first rank and field that differ.
    """
    records = [read_file(path, Record) for r in range(world_size) if (path := record_path(folder, r)).exists()]
    for other in records[1:]:
        for name, first in records[0].shared().items():
            if other.shared()[name] != first:
                ranks = f"rank {records[0].rank} and rank {other.rank}"
                raise TokenWeaveError(f"{folder}: {name} differs between {ranks}: build all ranks alike")
