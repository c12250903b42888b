"""A trace of a few short requests, and engines of a small model for it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from support.models import small
from trtllm_tokenweave.bench.e2e import E2eBench
from trtllm_tokenweave.bench.trace import Request, Trace, TraceStep
from trtllm_tokenweave.bench.trace_measure import TraceBench
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.passes import WeaveOptions
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableRow, TuningTable
from trtllm_tokenweave.waves import table_key

CONFIG = small(max_position_embeddings=128, vocab_size=52)
TRACE = Trace((Request(100, 3), Request(40, 5), Request(9, 12), Request(70, 2), Request(33, 9), Request(1, 1)), seed=3)
BUDGET, BATCH = 64, 3


def bench(rank: int = 0, tp_size: int = 2, **fields: Any) -> TraceBench:
    """Steps of 32 tokens and more are split: 33 to 48 in the table's way, others at half."""
    row = TableRow(tokens=Bucket(lo=33, hi=48), mode="weave", split_offset=8, mlp=LaunchConfig(ctas=12))
    table = TuningTable(key=table_key(CONFIG, tp_size), granularity=16, min_tokens=32, rows=(row,))
    weave = WeaveOptions(Mapping(tp_size, rank, tp_size), table, BATCH, 96)
    variants = fields.pop("variants", ("stock", "fuse_only", "woven", "no_comm"))
    engines = E2eBench(CONFIG, weave, variants=variants, max_seq_len=103, multiple_profiles=True)
    return replace(TraceBench(engines, TRACE, (BUDGET,), tuned=True, rounds=3), **fields)


def sized(num_tokens: int, batch: int = 3) -> TraceStep:
    """A step of which nothing but its size is known."""
    record = SimpleNamespace(num_tokens=num_tokens, batch=batch, num_contexts=1)
    return cast("TraceStep", SimpleNamespace(record=record))
