"""The in-graph lookup equals the lookup rule for every step, and its bounds are exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.table import (
    Bucket,
    LaunchConfig,
    PrefixLookup,
    TableKey,
    TableRow,
    TableSource,
    TuningTable,
    default_table,
    parse_table,
    prefix_lookup,
)
from trtllm_tokenweave.table.files import table_text

KEY = TableKey(tp_size=8, hidden_size=8192, dtype="bfloat16")


def cuts(draw: st.DrawFn, step: int) -> list[Bucket]:
    """Disjoint buckets with gaps; edges on `step`."""
    edges = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=6)))
    buckets = []
    for lo, hi in zip(edges, [*edges[1:], None], strict=True):
        if draw(st.integers(0, 4)):
            buckets.append(Bucket(lo=step * lo + 1, hi=None if hi is None else step * hi))
    return buckets


def launches() -> st.SearchStrategy[LaunchConfig]:
    return st.builds(
        LaunchConfig,
        fabric=st.sampled_from(["auto", "multimem", "peer", "loopback"]),
        ctas=st.integers(1, 66).map(lambda k: 2 * k),
        threads=st.integers(1, 32).map(lambda k: 32 * k),
        gemm_sms=st.integers(0, 66).map(lambda k: 2 * k),
    )


@st.composite
def tables(draw: st.DrawFn) -> TuningTable:
    granularity = draw(st.sampled_from([16, 32, 48]))
    rows = []
    for batch in cuts(draw, draw(st.sampled_from([1, 3]))):
        for tokens in cuts(draw, granularity):
            limit = (640 if tokens.hi is None else tokens.hi // 2) // 8
            offset = draw(st.sampled_from([0, 1, limit - 1]) | st.integers(0, limit - 1))
            mode = draw(st.sampled_from(["weave", "weave", "fuse"]))
            rows.append(
                TableRow(
                    batch=batch,
                    tokens=tokens,
                    mode="weave" if mode == "weave" else "fuse",
                    split_offset=8 * min(offset, limit - 1) if mode == "weave" else 0,
                    attention=draw(launches()),
                    mlp=draw(launches()),
                )
            )
    return TuningTable(
        key=KEY,
        granularity=granularity,
        min_tokens=draw(st.integers(1, 200) | st.just(100_000)),
        source=TableSource(text=draw(st.text(max_size=5))),
        rows=tuple(draw(st.permutations(rows))),
    )


def check(table: TuningTable, lookup: PrefixLookup) -> None:
    """Compare every step, and the bounds with what was reached."""
    reached_prefix = reached_suffix = 0
    for batch in range(lookup.max_batch + 1):
        for num_tokens in range(lookup.max_num_tokens + 1):
            plan = table.lookup(batch, num_tokens)
            assert lookup.evaluate(batch, num_tokens) == (plan.prefix, plan.suffix), (batch, num_tokens)
            reached_prefix = max(reached_prefix, plan.prefix)
            reached_suffix = max(reached_suffix, plan.suffix)
    assert (lookup.max_prefix, lookup.max_suffix) == (reached_prefix, reached_suffix)


@settings(max_examples=30, deadline=None)
@given(tables(), st.integers(1, 15), st.integers(1, 400))
def test_equals_the_rule_everywhere(table: TuningTable, max_batch: int, max_num_tokens: int) -> None:
    lookup = prefix_lookup(table, max_batch, max_num_tokens)
    check(table, lookup)
    assert lookup.prefix.dtype == np.int64
    assert lookup.prefix.shape == (len(lookup.batch_starts) + 1, -(-max_num_tokens // table.granularity) + 1)
    # True bounds only: no entry is above its token bucket.
    assert (lookup.prefix <= table.granularity * np.arange(lookup.prefix.shape[1])).all()
    assert list(lookup.batch_starts) == sorted(set(lookup.batch_starts))
    assert all(2 <= start <= max_batch for start in lookup.batch_starts)
    chunks = lookup.chunks()
    assert all(1 <= chunk.size <= 64 for chunk in chunks)
    np.testing.assert_array_equal(np.concatenate(chunks), lookup.prefix.reshape(-1))


@settings(max_examples=60, deadline=None)
@given(tables())
def test_files_and_packed_form_round_trip(table: TuningTable) -> None:
    assert parse_table(table_text(table)) == table
    assert TuningTable.unpack(table.pack()) == table


def test_default_table() -> None:
    table = default_table(KEY)
    lookup = table.prefix_lookup(1, 8192)
    assert lookup.batch_starts == ()
    assert lookup.prefix.shape == (1, 33)
    assert (lookup.max_prefix, lookup.max_suffix, lookup.activation_ratio) == (4096, 4096, 1.0)
    assert lookup.splits
    check(table, lookup)


def test_fuse_rows_above_a_split_cost_memory() -> None:
    rows = (
        TableRow(tokens=Bucket(lo=1, hi=4096), mode="weave"),
        TableRow(tokens=Bucket(lo=4097), mode="fuse"),
    )
    lookup = TuningTable(key=KEY, rows=rows).prefix_lookup(8, 8192)
    assert (lookup.max_prefix, lookup.max_suffix) == (8192, 2048)
    assert lookup.activation_ratio == 1.25


def test_never_split() -> None:
    lookup = TuningTable(key=KEY, min_tokens=9000).prefix_lookup(4, 8192)
    assert not lookup.splits
    assert (lookup.max_prefix, lookup.max_suffix, lookup.activation_ratio) == (8192, 0, 1.0)
    assert lookup.evaluate(4, 8192) == (8192, 0)


def test_batch_buckets_that_do_not_differ_are_joined() -> None:
    def row(lo: int, hi: int | None, offset: int) -> TableRow:
        return TableRow(batch=Bucket(lo=lo, hi=hi), tokens=Bucket(lo=1025), mode="weave", split_offset=offset)

    table = TuningTable(key=KEY, rows=(row(1, 4, 64), row(5, 8, 64), row(9, 16, 0), row(17, None, 128)))
    assert table.prefix_lookup(64, 4096).batch_starts == (9, 17)
    assert table.prefix_lookup(16, 4096).batch_starts == (9,)
    assert table.prefix_lookup(64, 1024).batch_starts == ()


def test_the_largest_size_is_quick_with_many_rows() -> None:
    rows = tuple(
        TableRow(batch=Bucket(lo=b, hi=b), tokens=Bucket(lo=16 * i + 1, hi=16 * i + 16), mode="weave")
        for b in range(1, 9)
        for i in range(64, 96)
    )
    lookup = TuningTable(key=KEY, granularity=16, rows=rows).prefix_lookup(2**20, 2**20)
    # Rows of offset 0 are the default rule: nothing tells the batches apart.
    assert lookup.batch_starts == ()
    assert lookup.prefix.shape == (1, 2**16 + 1)
    assert lookup.evaluate(1, 2**20) == (2**19, 2**19)


def test_large_tables_are_cut_into_constants_of_64() -> None:
    rows = tuple(
        TableRow(batch=Bucket(lo=2**i, hi=2 ** (i + 1) - 1), tokens=Bucket(lo=1), mode="weave", split_offset=8 * i)
        for i in range(4)
    )
    lookup = TuningTable(key=KEY, rows=rows).prefix_lookup(15, 16384)
    assert lookup.prefix.shape == (4, 65)
    assert [chunk.size for chunk in lookup.chunks()] == [64, 64, 64, 64, 4]


def test_ranges_are_checked() -> None:
    table = default_table(KEY)
    for sizes in ((0, 8), (8, 0), (2**20 + 1, 8), (8, 2**20 + 1), (8, 2**31 - 1), (8, 10**20)):
        with pytest.raises(UserError, match=r"is outside of 1\.\.1048576"):
            table.prefix_lookup(*sizes)
    lookup = table.prefix_lookup(8, 300)
    for step in ((9, 1), (1, 301), (-1, 1), (1, -1)):
        with pytest.raises(ValueError, match="outside"):
            lookup.evaluate(*step)
