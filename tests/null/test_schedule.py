"""The split rule by hand-worked cases, and its invariants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_tokenweave.schedule import (
    DEFAULT_MIN_TOKENS,
    DEFAULT_OFFSETS,
    default_min_tokens,
    find_row,
    plan_step,
    split_point,
)
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableKey, TableRow, TuningTable, default_table

DENSE = TableKey(tp_size=8, hidden_size=8192, dtype="bfloat16")
MOE = TableKey(tp_size=8, hidden_size=6144, dtype="bfloat16", model_kind="moe")


@pytest.mark.parametrize(
    ("num_tokens", "granularity", "offset", "split"),
    [
        (0, 256, 0, 0),
        (1, 256, 0, 1),
        (128, 256, 0, 128),
        (129, 256, 0, 128),
        (1024, 256, 0, 512),
        (1025, 256, 0, 640),
        (1024, 256, 64, 576),
        (1024, 256, 512, 1024),
        (1024, 256, 4096, 1024),
        (8191, 256, 256, 4352),
        (33, 16, 8, 32),
    ],
)
def test_split_point(num_tokens: int, granularity: int, offset: int, split: int) -> None:
    assert split_point(num_tokens, granularity, offset) == split


@given(st.integers(0, 100_000), st.integers(1, 100).map(lambda k: 16 * k), st.integers(0, 500).map(lambda k: 8 * k))
def test_split_point_lies_on_the_grid_or_takes_all(num_tokens: int, granularity: int, offset: int) -> None:
    split = split_point(num_tokens, granularity, offset)
    assert 0 <= split <= num_tokens
    assert split == num_tokens or (split % 8 == 0 and split >= num_tokens / 2)


def test_default_thresholds_and_offsets() -> None:
    assert DEFAULT_MIN_TOKENS == {"dense": 1024, "moe": 4096}
    assert DEFAULT_OFFSETS == (0, 64, 128, 192, 256, 512)
    assert default_min_tokens("dense", one_wave_tokens=1023) == 1024
    assert default_min_tokens("dense", one_wave_tokens=1024) == 1025
    assert default_min_tokens("moe", one_wave_tokens=1024) == 4096


@pytest.mark.parametrize(("key", "first"), [(DENSE, 1024), (MOE, 4096)])
def test_default_rule(key: TableKey, first: int) -> None:
    table = default_table(key)
    below, at = plan_step(table, 1, first - 1), plan_step(table, 1, first)
    assert (below.mode, below.split, below.suffix, below.source) == ("fuse", first - 1, 0, "default")
    assert below.reason == f"default rule: below min_tokens {first}"
    assert (at.mode, at.prefix, at.suffix, at.source) == ("weave", first // 2, first // 2, "default")
    assert at.reason == f"default rule: half of {first} plus offset 0"
    assert at.attention == at.mlp == LaunchConfig(fabric="auto", ctas=8, threads=1024, gemm_sms=0)


def test_rows_by_batch_and_tokens() -> None:
    few = LaunchConfig(ctas=4)
    many = LaunchConfig(ctas=8)
    table = TuningTable(
        key=DENSE,
        rows=(
            TableRow(tokens=Bucket(lo=1025, hi=2048), batch=Bucket(lo=1, hi=8), mode="fuse", attention=few),
            TableRow(tokens=Bucket(lo=1025, hi=2048), batch=Bucket(lo=9), mode="weave", split_offset=128, mlp=many),
            TableRow(tokens=Bucket(lo=257, hi=1024), mode="weave", split_offset=0, mlp=few),
        ),
    )
    fused = plan_step(table, 8, 2048)
    assert (fused.mode, fused.split, fused.attention, fused.source) == ("fuse", 2048, few, "table")
    assert fused.reason == "the table's row says fuse"
    woven = plan_step(table, 9, 2048)
    assert (woven.mode, woven.split, woven.mlp, woven.source) == ("weave", 1152, many, "table")
    small = plan_step(table, 3, 1000)
    assert (small.mode, small.split, small.mlp, small.source) == ("fuse", 1000, few, "table")
    beyond = plan_step(table, 9, 2049)
    assert (beyond.mode, beyond.split, beyond.source) == ("weave", 1152, "default")
    assert beyond.reason.startswith("no row of the table fits, default rule:")


def test_an_offset_that_takes_everything_fuses() -> None:
    row = TableRow(tokens=Bucket(lo=1), mode="weave", split_offset=512)
    plan = plan_step(TuningTable(key=DENSE, rows=(row,)), 1, 1024)
    assert (plan.mode, plan.split, plan.suffix) == ("fuse", 1024, 0)
    assert plan.reason == "half of 1024 plus offset 512 leaves no suffix"


def test_empty_step_uses_the_first_row() -> None:
    row = TableRow(tokens=Bucket(lo=1, hi=256), mode="fuse")
    table = TuningTable(key=DENSE, rows=(row,))
    assert find_row(table, 0, 0) == row
    assert (plan_step(table, 0, 0).split, plan_step(table, 0, 0).mode) == (0, "fuse")


@pytest.mark.parametrize(("batch", "num_tokens"), [(-1, 5), (1, -1)])
def test_negative_counts_are_refused(batch: int, num_tokens: int) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        plan_step(default_table(DENSE), batch, num_tokens)
