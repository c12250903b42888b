"""How one step is cut: the split rule, the lookup of a tuning table and the plan that comes out of them.

Everything here is pure and imports nothing heavy. The in-graph lookup (`table.prefix`), the C++ plugins and the
command line all have to agree with `plan_step`; the vectors in ``tests/vectors/table_lookup.json`` pin it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trtllm_tokenweave.errors import UserError

if TYPE_CHECKING:
    from trtllm_tokenweave.table.launch import LaunchConfig
    from trtllm_tokenweave.table.model import TableRow, TuningTable

Mode = Literal["weave", "fuse"]
PlanSource = Literal["table", "default"]
ModelKind = Literal["dense", "moe"]

# Round the token count up to this before halving: two rows of 128-row GEMM tiles, so that with offset 0 the prefix
# ends on a tile boundary.
DEFAULT_GRANULARITY = 256

# Below these token counts a split costs more waves than the hidden communication is worth (TokenWeave,
# arXiv:2505.11329: 1024 tokens for dense models, 4096 for mixture of experts).
DEFAULT_MIN_TOKENS: dict[ModelKind, int] = {"dense": 1024, "moe": 4096}

# Offsets tried by default. The prefix is the half that grows, because its collective is the one that is hidden
# behind the suffix's work, which in turn attends to the prefix's keys.
DEFAULT_OFFSETS: tuple[int, ...] = (0, 64, 128, 192, 256, 512)

# Most tokens, and so most sequences, of any step that anything here is asked about. One activation of such a step
# takes 16 GiB at hidden_size 8192 in 16 bits, more than an engine can hold several of; TensorRT-LLM's default is 8192.
# The bound keeps the in-graph lookup, one constant per token bucket, at a size that can be built.
MAX_NUM_TOKENS = 2**20

# Rows of 8 elements are what the kernels load at once; offsets are kept to the same grid.
OFFSET_STEP = 8


@dataclass(frozen=True)
class SplitPlan:
    """What one step does.

    Attributes:
        num_tokens: Tokens of the step (all sequences together).
        batch: Sequences of the step.
        split: Tokens of the prefix half, 0 <= split <= num_tokens; split == num_tokens means no suffix.
        mode: "weave" when both halves hold tokens, else "fuse" (the fused collective only).
        attention: Launch configuration of the collective that follows attention. Its CTAs are those beside the other
            half's work: a collective that runs alone takes the kernel's own number, unless the row says "fuse".
        mlp: The same of the collective that follows the MLP.
        source: "table" when a row of the table matched, else "default".
        reason: Why, in words.
    """

    num_tokens: int
    batch: int
    split: int
    mode: Mode
    attention: LaunchConfig
    mlp: LaunchConfig
    source: PlanSource
    reason: str

    @property
    def prefix(self) -> int:
        """Tokens of the prefix half."""
        return self.split

    @property
    def suffix(self) -> int:
        """Tokens of the suffix half (0 when the step is not split)."""
        return self.num_tokens - self.split


def check_limits(max_batch_size: int, max_num_tokens: int) -> None:
    """Refuse limits of an engine that none can have.

    Raises:
        UserError: One is outside of 1..`MAX_NUM_TOKENS`.
    """
    for name, size in (("max_batch_size", max_batch_size), ("max_num_tokens", max_num_tokens)):
        if not 1 <= size <= MAX_NUM_TOKENS:
            what = f"{size} is outside of 1..{MAX_NUM_TOKENS}"
            raise UserError(what, where=name, fix="give the size that the engine is built for")


def ceil_div(value: int, divisor: int) -> int:
    """Smallest integer that is not below value / divisor, for value >= 0 and divisor > 0."""
    return (value + divisor - 1) // divisor


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is not below `value`, for value >= 0."""
    return ceil_div(value, multiple) * multiple


def split_point(num_tokens: int, granularity: int, offset: int) -> int:
    """Tokens of the prefix: ``min(n, round_up(n, granularity) / 2 + offset)``.

    Args:
        num_tokens: Tokens of the step, >= 0.
        granularity: Even; halves of it are the grid of the split.
        offset: Tokens moved from the suffix to the prefix, >= 0.
    """
    return min(num_tokens, round_up(num_tokens, granularity) // 2 + offset)


def default_min_tokens(model_kind: ModelKind, one_wave_tokens: int = 0) -> int:
    """Smallest token count that the default rule splits.

    Args:
        model_kind: "dense" or "moe".
        one_wave_tokens: Largest token count at which every GEMM of the unsplit step is a single wave
            (`waves.one_wave_tokens`). Two halves of a single wave are two waves, so such steps are not split.
    """
    return max(DEFAULT_MIN_TOKENS[model_kind], one_wave_tokens + 1)


def find_row(table: TuningTable, batch: int, num_tokens: int) -> TableRow | None:
    """The table's row for a step, or None. At most one row can match, because rows of a table never overlap.

    An empty step or batch is looked up as if it held one token or one sequence.
    """
    batch, num_tokens = max(batch, 1), max(num_tokens, 1)
    for row in table.rows:
        if row.batch.contains(batch) and row.tokens.contains(num_tokens):
            return row
    return None


def plan_step(table: TuningTable, batch: int, num_tokens: int) -> SplitPlan:
    """The one lookup rule.

    A step of n tokens is split at `split_point` when n >= `table.min_tokens` and its row says "weave", or when no
    row matches: then the default rule applies (offset 0, the table's default launch configuration). A step whose
    suffix would be empty is a "fuse" step.

    Args:
        table: The table; one without rows is the default rule alone.
        batch: Sequences of the step, >= 0.
        num_tokens: Tokens of the step, >= 0.

    Raises:
        ValueError: A negative count.
    """
    if batch < 0 or num_tokens < 0:
        raise ValueError(f"batch {batch} and num_tokens {num_tokens} must not be negative")
    row = find_row(table, batch, num_tokens)
    mode: Mode = row.mode if row is not None else "weave"
    offset = row.split_offset if row is not None else 0
    split = num_tokens
    if num_tokens < table.min_tokens:
        reason = f"below min_tokens {table.min_tokens}"
    elif mode == "fuse":
        reason = "the table's row says fuse"
    else:
        split = split_point(num_tokens, table.granularity, offset)
        reason = f"half of {round_up(num_tokens, table.granularity)} plus offset {offset}"
        if split == num_tokens:
            reason += " leaves no suffix"
    if row is None:
        reason = f"{'no row of the table fits, ' if table.rows else ''}default rule: {reason}"
    return SplitPlan(
        num_tokens=num_tokens,
        batch=batch,
        split=split,
        mode="weave" if split < num_tokens else "fuse",
        attention=row.attention if row is not None else table.default_launch,
        mlp=row.mlp if row is not None else table.default_launch,
        source="table" if row is not None else "default",
        reason=reason,
    )
