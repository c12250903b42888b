"""Wave arithmetic: how many rounds of thread blocks each GEMM of a layer needs, whole or in halves.

A GEMM of M x N outputs is cut into tiles, one thread block each; the GPU runs as many blocks at a time as it has
SMs left, and a round that is not full costs as much as a full one. While a collective holds some SMs, fewer are
left: taking 8 SMs of 132 from a GEMM of exactly one wave makes it two (measured on H200: 172 -> 242 us). The
figures here seed a search and explain a plan; they are no timing, because the libraries choose other tiles at
will.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trtllm_tokenweave.errors import UserError, check_fields, check_kind
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.schedule import DEFAULT_GRANULARITY, DEFAULT_OFFSETS, SplitPlan, ceil_div, split_point
from trtllm_tokenweave.table.launch import CLUSTER, MAX_CTAS, LaunchConfig
from trtllm_tokenweave.table.model import ANY_GPU, TableKey, TuningTable
from trtllm_tokenweave.table.model import default_table as table_of_key

if TYPE_CHECKING:
    from trtllm_tokenweave.model_config import ModelConfig

Block = Literal["attention", "mlp"]
Half = Literal["prefix", "suffix", "whole"]

# H100 SXM and H200.
DEFAULT_SMS = 132
# A sanity bound, not a promise: no GPU has more (B200 has 148).
MAX_SMS = 1024


@dataclass(frozen=True)
class Tile:
    """Output tile of one thread block, in rows (tokens) and columns; 128 x 256 is the usual Hopper bf16 GEMM."""

    m: int = 128
    n: int = 256

    def __post_init__(self) -> None:
        check_fields(self, "tile.")
        for name in ("m", "n"):
            if getattr(self, name) < 1:
                raise UserError(f"{getattr(self, name)} is below 1", where=f"tile.{name}", fix="give a tile's size")


@dataclass(frozen=True)
class GemmShape:
    """One GEMM of a layer on one rank: [M, k] x [k, n], M following the tokens.

    Attributes:
        name: TensorRT-LLM's name of the layer.
        block: Which half of the transformer layer it belongs to.
        n: Output columns on this rank.
        k: Depth of the dot products.
        groups: Equal GEMMs run as one grouped GEMM (experts), else 1.
        rows_per_token: Rows of all groups together per token (experts per token), else 1.
    """

    name: str
    block: Block
    n: int
    k: int
    groups: int = 1
    rows_per_token: int = 1

    def rows(self, num_tokens: int) -> int:
        """Rows M of each group: ceil(tokens * rows_per_token / groups), that is with an even routing."""
        return ceil_div(num_tokens * self.rows_per_token, self.groups)

    def tiles(self, num_tokens: int, tile: Tile) -> int:
        """Thread blocks: groups * ceil(M / tile.m) * ceil(n / tile.n)."""
        return self.groups * ceil_div(self.rows(num_tokens), tile.m) * ceil_div(self.n, tile.n)


def gemm_shapes(config: ModelConfig, tp_size: int) -> tuple[GemmShape, ...]:
    """GEMMs of one transformer layer on one rank, in execution order.

    With h hidden, q and kv local head counts, d head_size, f local intermediate_size (column-parallel QKV and FC,
    row-parallel dense and proj, as in TensorRT-LLM): qkv [(q + 2 kv) d, h], attention.dense [h, q d],
    mlp.fc+gate [2 f, h] (both projections read the same input and are counted as one GEMM), mlp.proj [h, f].
    In a mixture of experts the MLP's two are grouped over the experts. The router is left out (n = experts only).

    Raises:
        UserError: tp_size cannot be served.
    """
    local = config.local(tp_size)
    hidden, head_size = config.hidden_size, config.head_size
    q, kv, ffn = local.num_heads, local.num_kv_heads, local.intermediate_size
    groups, rows = (config.moe.num_experts, config.moe.top_k) if config.moe is not None else (1, 1)
    return (
        GemmShape("attention.qkv", "attention", n=(q + 2 * kv) * head_size, k=hidden),
        GemmShape("attention.dense", "attention", n=hidden, k=q * head_size),
        GemmShape("mlp.fc+gate", "mlp", n=2 * ffn, k=hidden, groups=groups, rows_per_token=rows),
        GemmShape("mlp.proj", "mlp", n=hidden, k=ffn, groups=groups, rows_per_token=rows),
    )


def wave_count(tiles: int, sms_left: int) -> int:
    """Rounds needed for `tiles` thread blocks on the SMs that are left: clusters of 2, so pairs over pairs of SMs.

    ``ceil(ceil(tiles / 2) / floor(sms_left / 2))``, which is ceil(tiles / sms_left) for an even number of SMs.
    """
    if not CLUSTER <= sms_left <= MAX_SMS:
        fix = f"lower the CTAs of the collective: {CLUSTER} to {MAX_SMS} SMs have to be left"
        raise UserError(f"{sms_left} SMs are left for the GEMMs", where="sms", fix=fix)
    if tiles < 0:
        raise UserError(f"{tiles} tiles are below 0", where="tiles", fix="count the thread blocks of a GEMM")
    return ceil_div(ceil_div(tiles, CLUSTER), sms_left // CLUSTER)


def one_wave_tokens(shapes: Sequence[GemmShape], sms: int = DEFAULT_SMS, tile: Tile | None = None) -> int:
    """Largest token count at which each GEMM of an unsplit step is at most one wave.

    Up to there a step is not split: cutting a single wave in two makes two (the rule of TokenWeave,
    arXiv:2505.11329, that splitting must not add waves). Unsplit means that no collective runs beside the GEMMs,
    so all SMs count. Per GEMM: tile rows that fit beside each other are floor(sms / (groups * ceil(n / tile.n))),
    hence M <= tile.m times that, hence tokens <= floor(M * groups / rows_per_token).
    """
    tile = tile or Tile()
    _check_sms(sms)
    slots = sms // CLUSTER * CLUSTER
    limits = []
    for shape in shapes:
        rows = tile.m * (slots // (shape.groups * ceil_div(shape.n, tile.n)))
        limits.append(rows * shape.groups // shape.rows_per_token)
    return min(limits)


def _check_sms(sms: int) -> None:
    if not CLUSTER <= sms <= MAX_SMS:
        raise UserError(f"{sms} is outside of {CLUSTER}..{MAX_SMS}", where="sms", fix="give the GPU's SM count")


@dataclass(frozen=True)
class WaveModel:
    """SMs and tiles that the wave counts assume, with the collectives that run beside the halves.

    While a half computes, the other half's collective runs. In the order of the halves (attention of the prefix
    beside the suffix's MLP collective of the layer before, attention of the suffix beside the prefix's attention
    collective, MLP of the prefix beside the suffix's attention collective, MLP of the suffix beside the prefix's
    MLP collective) the prefix's attention and the suffix's MLP meet the MLP kind, the other two the attention kind.

    Attributes:
        attention: The collective after attention; None: nothing runs beside the GEMMs, as in a step that is not split.
        mlp: That after the MLP.
        sms: SMs of the GPU.
        tile: Output tile of a thread block.

    Raises:
        UserError: The collectives leave no SMs, or take less than none.
    """

    attention: LaunchConfig | None = None
    mlp: LaunchConfig | None = None
    sms: int = DEFAULT_SMS
    tile: Tile = Tile()

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("attention", "mlp"):
            launch = getattr(self, name)
            check_kind(launch, ("a LaunchConfig", LaunchConfig), ("None", type(None)), where=name)
            # What model_construct and model_copy make was not checked.
            if launch is not None and not CLUSTER <= launch.ctas <= MAX_CTAS:
                what = f"{launch.ctas} is outside of {CLUSTER}..{MAX_CTAS}"
                raise UserError(what, where=f"{name}.ctas", fix="give as many CTAs as a collective can have")
        _check_sms(self.sms)
        ctas = max(launch.ctas if launch is not None else 0 for launch in (self.attention, self.mlp))
        if self.sms - ctas < CLUSTER:
            raise UserError(
                f"a collective of {ctas} CTAs leaves {max(self.sms - ctas, 0)} of {self.sms} SMs to the GEMMs, which "
                f"need {CLUSTER}",
                where="sms",
                fix=f"give the GPU's SM count, at least {ctas + CLUSTER}, or a table whose collectives take fewer CTAs",
            )

    def sms_left(self, block: Block, half: Half) -> int:
        """SMs for a GEMM of `block` while `half` computes; a GEMM SM target caps what is left."""
        if half == "whole":
            return self.sms
        launch = self.mlp if (block == "attention") == (half == "prefix") else self.attention
        if launch is None:
            return self.sms
        left = self.sms - launch.ctas
        return min(left, launch.gemm_sms) if launch.gemm_sms else left

    def waves(self, shape: GemmShape, num_tokens: int, half: Half = "whole") -> int:
        """Waves of one GEMM over `num_tokens` tokens; 0 for an empty half."""
        return wave_count(shape.tiles(num_tokens, self.tile), self.sms_left(shape.block, half))


@dataclass(frozen=True)
class GemmWaves:
    """Waves of one GEMM: of the step unsplit (all SMs), and of either half (the SMs left)."""

    shape: GemmShape
    whole: int
    prefix: int
    suffix: int


def plan_waves(plan: SplitPlan, shapes: Iterable[GemmShape], model: WaveModel) -> tuple[GemmWaves, ...]:
    """Waves of each GEMM in the halves of `plan`. An unsplit step's prefix has all SMs to itself."""
    half: Half = "prefix" if plan.suffix else "whole"
    return tuple(
        GemmWaves(
            shape=shape,
            whole=model.waves(shape, plan.num_tokens),
            prefix=model.waves(shape, plan.prefix, half),
            suffix=model.waves(shape, plan.suffix, "suffix"),
        )
        for shape in shapes
    )


@dataclass(frozen=True)
class SplitSeed:
    """A candidate offset and the share of its GEMM time that waves not full waste, over both halves."""

    offset: int
    prefix: int
    suffix: int
    wasted: float


def seed_offsets(
    shapes: Sequence[GemmShape],
    model: WaveModel,
    num_tokens: int,
    *,
    granularity: int = DEFAULT_GRANULARITY,
    offsets: Iterable[int] = DEFAULT_OFFSETS,
) -> tuple[SplitSeed, ...]:
    """Candidate offsets that leave a suffix, the least wasteful first; ties go to the more even halves.

    A wave of a GEMM takes time in proportion to its depth k, so the cost of a split is the sum over GEMMs of
    k * (waves(prefix) + waves(suffix)), and it would be k * (work / SMs) if no wave were partly filled:
    ``wasted = 1 - sum(k * rows * n / (tile.m * tile.n) / sms_left) / sum(k * waves)``.
    """
    seeds = []
    for offset in sorted(set(offsets)):
        prefix = split_point(num_tokens, granularity, offset)
        suffix = num_tokens - prefix
        if suffix == 0:
            continue
        cost, work = 0.0, 0.0
        for shape in shapes:
            halves: tuple[tuple[Half, int], ...] = (("prefix", prefix), ("suffix", suffix))
            for half, tokens in halves:
                cost += shape.k * model.waves(shape, tokens, half)
                filled = tokens * shape.rows_per_token * shape.n / (model.tile.m * model.tile.n)
                work += shape.k * filled / model.sms_left(shape.block, half)
        seeds.append(SplitSeed(offset, prefix, suffix, wasted=1.0 - work / cost))
    return tuple(sorted(seeds, key=lambda seed: (seed.wasted, seed.offset)))


def default_table(
    config: ModelConfig, tp_size: int, *, gpu: str = ANY_GPU, sms: int = DEFAULT_SMS, tile: Tile | None = None
) -> TuningTable:
    """The default rule for a model, with the one-wave rule raising min_tokens where it applies.

    Raises:
        UserError: tp_size cannot be served.
    """
    return table_of_key(
        table_key(config, tp_size, gpu=gpu), one_wave_tokens=one_wave_tokens(gemm_shapes(config, tp_size), sms, tile)
    )


def table_key(config: ModelConfig, tp_size: int, *, gpu: str = ANY_GPU) -> TableKey:
    """The key that a table for this model must have.

    Raises:
        UserError: tp_size is no number of ranks.
    """
    return TableKey(
        gpu=gpu,
        tp_size=Mapping(tp_size, 0, tp_size).tp_size,
        hidden_size=config.hidden_size,
        dtype=config.dtype,
        model_kind=config.kind,
    )
