"""Writes table_lookup.json: tables in both forms, the plan of many steps, and packed forms that must be refused.

Readers of the packed form in other languages are tested against the same file. Usage:

    PYTHONPATH=tests python -m vectors.make_table_vectors            write it
    PYTHONPATH=tests python -m vectors.make_table_vectors --check    exit 1 when it is stale
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

from support.vectors import write_or_check

from trtllm_tokenweave.table import (
    Bucket,
    LaunchConfig,
    PaperTarget,
    TableKey,
    TableRow,
    TableSource,
    TuningTable,
    convert_paper_config,
    default_table,
)

PATH = Path(__file__).with_name("table_lookup.json")

DENSE = TableKey(gpu="NVIDIA H200", tp_size=8, hidden_size=8192, dtype="bfloat16")
MOE = TableKey(tp_size=4, hidden_size=6144, dtype="float16", model_kind="moe")


def tables() -> dict[str, TuningTable]:
    """The tables, by name."""
    small = LaunchConfig(fabric="multimem", ctas=4, threads=512, gemm_sms=128)
    large = LaunchConfig(fabric="peer", ctas=16)
    batches = TuningTable(
        key=DENSE,
        source=TableSource(kind="measurement", text="vectors: batch buckets, µs"),
        rows=(
            TableRow(batch=Bucket(lo=1, hi=4), tokens=Bucket(lo=1, hi=1024), mode="fuse", attention=small, mlp=large),
            TableRow(
                batch=Bucket(lo=1, hi=4),
                tokens=Bucket(lo=1025, hi=2048),
                mode="weave",
                split_offset=64,
                attention=large,
                mlp=small,
            ),
            TableRow(
                batch=Bucket(lo=5, hi=64), tokens=Bucket(lo=513, hi=2048), mode="weave", split_offset=512, mlp=small
            ),
            TableRow(batch=Bucket(lo=65), tokens=Bucket(lo=2049), mode="fuse", attention=large),
        ),
    )
    fine = TuningTable(
        key=TableKey(gpu="any", tp_size=3, hidden_size=576, dtype="float32"),
        granularity=16,
        min_tokens=20,
        rows=(
            TableRow(
                tokens=Bucket(lo=17, hi=48), mode="weave", split_offset=8, attention=LaunchConfig(fabric="loopback")
            ),
            TableRow(tokens=Bucket(lo=65), mode="weave", split_offset=40),
        ),
    )
    paper, _ = convert_paper_config(
        {
            "512": {"baseline_ctas": 16, "attention_ctas": 4, "mlp_ctas": 4, "split_offset": 0},
            "1024": {"baseline_ctas": 15, "attention_ctas": 3, "mlp_ctas": 2, "split_offset": 128},
            "4096": {"baseline_ctas": 32, "attention_ctas": 8, "mlp_ctas": 4, "split_offset": 256},
        },
        PaperTarget(DENSE),
    )
    return {
        "default_dense": default_table(DENSE),
        "default_moe": default_table(MOE),
        "one_wave": default_table(DENSE, one_wave_tokens=1500),
        "batches": batches,
        "fine": fine,
        "paper": paper,
    }


def steps(table: TuningTable) -> list[tuple[int, int]]:
    """(batch, num_tokens) around every edge of a table's buckets."""
    edges = {0, table.min_tokens, 8192, 100_000}
    batches = {1}
    for row in table.rows:
        edges |= {row.tokens.lo, row.tokens.hi or row.tokens.lo + 3 * table.granularity}
        batches |= {row.batch.lo, row.batch.hi or row.batch.lo + 1}
    counts = {edge + step for edge in edges for step in (-1, 0, 1, table.granularity // 2)}
    return [(batch, count) for batch in sorted(batches) for count in sorted(counts) if count >= 0]


def refused(table: TuningTable) -> list[dict[str, str]]:
    """Packed forms that every reader has to refuse."""
    good = table.pack()

    def patched(offset: int, value: bytes) -> bytes:
        body = bytearray(good[:-4])
        body[offset : offset + len(value)] = value
        return bytes(body) + struct.pack("<I", zlib.crc32(body))

    forms = {
        "empty": b"",
        "wrong magic": patched(0, b"NOPE"),
        "header cut": good[:60],
        "last byte cut": good[:-1],
        "one byte too many": good + b"\0",
        "flipped bit": good[:130] + bytes([good[130] ^ 1]) + good[131:],
        "newer layout": patched(4, struct.pack("<H", 2)),
        "newer schema": patched(10, struct.pack("<H", 2)),
        "layout zero": patched(4, struct.pack("<H", 0)),
        "unknown dtype": patched(34, b"\x09"),
        "unknown mode": patched(112 + 20, b"\x02"),
        "unknown fabric": patched(112 + 24, b"\x07"),
        "odd ctas": patched(112 + 26, struct.pack("<H", 7)),
        "row count too large": patched(12, struct.pack("<I", 0xFFFFFFFF)),
        "bucket upside down": patched(112 + 8, struct.pack("<I", 4097)),
    }
    return [{"name": name, "packed_hex": form.hex()} for name, form in forms.items()]


def build() -> dict[str, Any]:
    """The whole document."""
    documents = []
    for name, table in tables().items():
        cases = []
        for batch, num_tokens in steps(table):
            plan = table.lookup(batch, num_tokens)
            cases.append(
                {
                    "batch": batch,
                    "num_tokens": num_tokens,
                    "split": plan.split,
                    "mode": plan.mode,
                    "source": plan.source,
                    "attention": plan.attention.model_dump(mode="json"),
                    "mlp": plan.mlp.model_dump(mode="json"),
                }
            )
        documents.append(
            {
                "name": name,
                "table": table.model_dump(mode="json"),
                "sha256": table.sha256,
                "packed_hex": table.pack().hex(),
                "cases": cases,
            }
        )
    return {
        "about": "lookup rule and packed form of tuning tables; written by make_table_vectors.py",
        "tables": documents,
        "refused": refused(tables()["batches"]),
    }


def text() -> str:
    """The document as it stands in the file: one case a line."""
    document = build()
    for table in document["tables"]:
        table["cases"] = [json.dumps(case) for case in table["cases"]]
    lines = json.dumps(document, indent=1, ensure_ascii=False).split("\n")
    # Cases were encoded twice to keep each on its line; decode the outer layer again.
    return "\n".join(_inline(line) for line in lines) + "\n"


def _inline(line: str) -> str:
    stripped = line.strip()
    if not stripped.startswith('"{'):
        return line
    comma = "," if stripped.endswith(",") else ""
    indent = line[: len(line) - len(line.lstrip())]
    return f"{indent}{json.loads(stripped.removesuffix(','))}{comma}"


if __name__ == "__main__":
    sys.exit(write_or_check(PATH, text()))
