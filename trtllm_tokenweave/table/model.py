"""The tuning table: which split and which launch configuration a step of a given size uses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.schedule import (
    DEFAULT_GRANULARITY,
    DEFAULT_MIN_TOKENS,
    MAX_NUM_TOKENS,
    OFFSET_STEP,
    Mode,
    ModelKind,
    SplitPlan,
    default_min_tokens,
    plan_step,
)
from trtllm_tokenweave.table.launch import LaunchConfig

if TYPE_CHECKING:
    from trtllm_tokenweave.table.prefix import PrefixLookup

SCHEMA_VERSION = 1
# Bounds keep every sum of two fields inside a signed 32-bit integer.
MAX_COUNT = 2**30
ANY_GPU = "any"
GPU_NAME_BYTES = 64

DType = Literal["float32", "float16", "bfloat16"]
SourceKind = Literal["default", "capability", "measurement"]

# pydantic before 2.10 warns of any field called model_something unless told that nothing is protected.
_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class RowError(ValueError):
    """A row that is wrong in the light of the whole table; `path` is the field at fault, as in ``rows[3].tokens``."""

    def __init__(self, path: str, what: str) -> None:
        self.path = path
        super().__init__(what)


class Bucket(BaseModel):
    """An inclusive range of counts; `hi` None is unbounded."""

    model_config = _FROZEN

    lo: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    hi: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Bucket:
        if self.hi is not None and self.hi < self.lo:
            raise ValueError(f"hi {self.hi} is below lo {self.lo}")
        return self

    def contains(self, value: int) -> bool:
        """Whether `value` lies in the bucket."""
        return self.lo <= value and (self.hi is None or value <= self.hi)

    def overlaps(self, other: Bucket) -> bool:
        """Whether the buckets share a value."""
        return (other.hi is None or self.lo <= other.hi) and (self.hi is None or other.lo <= self.hi)

    def __str__(self) -> str:
        return f"{self.lo}.." + ("" if self.hi is None else str(self.hi))


class TableKey(BaseModel):
    """What a table was made for. `gpu` "any" fits every GPU (a table that was not measured)."""

    model_config = _FROZEN

    gpu: Annotated[str, Field(min_length=1)] = ANY_GPU
    tp_size: Annotated[int, Field(ge=1, le=1024)]
    hidden_size: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    dtype: DType
    model_kind: ModelKind = "dense"

    @field_validator("gpu")
    @classmethod
    def _fits_the_packed_form(cls, value: str) -> str:
        if len(value.encode()) >= GPU_NAME_BYTES or "\0" in value:
            raise ValueError(f"longer than {GPU_NAME_BYTES - 1} bytes, or holds a zero byte")
        return value


class MeasuredOn(BaseModel):
    """What a measurement holds for; `table.measured.check_measured` compares it with what is to be built or run.

    Attributes:
        gpu: Name of the GPU.
        sms: Its SMs.
        cuda_driver: CUDA version of the driver.
        tensorrt: Version of TensorRT, whose kernels were timed.
        library: Version of this package.
        model: Name of the model shape.
        tp_size: Ranks.
        layers: Decoder layers of the tuning engine.
        gemms: (n, k) of the GEMMs of a layer on one rank, by name.
        gemm: Whose GEMMs the engine has: "trt" or "budget".
        symmetric: Whether its activations were in symmetric memory.
        mode: "eager" steps or "graph".
        max_num_tokens: Most tokens of a step of its profile.
        opt_num_tokens: Tokens that the profile was optimised for.
        profiles_sha256: Of the ranges of its inputs.
        timing_cache_sha256: Of rank 0's timing cache after the build.
        date: Day of the measurement, ISO 8601.
    """

    model_config = _FROZEN

    gpu: Annotated[str, Field(min_length=1)]
    sms: Annotated[int, Field(ge=1)]
    cuda_driver: str
    tensorrt: str
    library: str
    model: str
    tp_size: Annotated[int, Field(ge=1)]
    layers: Annotated[int, Field(ge=1)]
    gemms: dict[str, Annotated[tuple[int, int], Field(strict=False)]]
    gemm: Literal["trt", "budget"] = "trt"
    symmetric: bool = True
    mode: Literal["eager", "graph"] = "eager"
    max_num_tokens: Annotated[int, Field(ge=1)]
    opt_num_tokens: Annotated[int, Field(ge=1)]
    profiles_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    timing_cache_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    date: str


class TableSource(BaseModel):
    """Where the numbers come from: a rule ("default"), what a machine can run ("capability"), or a "measurement".

    ``measured`` says what a measurement holds for, and ``gemm`` whose GEMMs joined tables of several measurements have.
    Each is left out of the file where there is none.
    """

    model_config = _FROZEN

    kind: SourceKind = "default"
    text: str = ""
    measured: MeasuredOn | None = None
    gemm: Literal["trt", "budget"] | None = None

    @model_validator(mode="after")
    def _one_gemm(self) -> TableSource:
        if self.measured is not None and self.gemm is not None:
            raise ValueError("gemm is given beside measured, which has its own")
        return self

    @model_serializer(mode="wrap")
    def _without_nothing(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {name: value for name, value in fields.items() if value is not None}


class TableRow(BaseModel):
    """One bucket of steps: `batch` sequences and `tokens` tokens. A "fuse" row never splits; its offset is 0."""

    model_config = _FROZEN

    batch: Bucket = Bucket()
    tokens: Bucket
    mode: Mode
    split_offset: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    attention: LaunchConfig = LaunchConfig()
    mlp: LaunchConfig = LaunchConfig()

    @field_validator("split_offset")
    @classmethod
    def _on_grid(cls, value: int) -> int:
        if value % OFFSET_STEP:
            raise ValueError(f"{value} is not a multiple of {OFFSET_STEP}")
        return value


class TuningTable(BaseModel):
    """Rows by (batch bucket, token bucket); what no row covers is served by the default rule.

    Attributes:
        schema_version: Version of the file form.
        key: What the table was made for.
        granularity: Tokens; the split is half of the token count rounded up to it, and token buckets end on it.
        min_tokens: Steps below are never split (default: 1024 dense, 4096 mixture of experts).
        source: Where the numbers come from.
        rows: Kept sorted by (batch.lo, tokens.lo), whatever order they were given in; never overlapping.
    """

    model_config = _FROZEN

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    key: TableKey
    granularity: Annotated[int, Field(ge=16, le=65536, multiple_of=16)] = DEFAULT_GRANULARITY
    # The default of the key's model kind is filled in below; this one only tells type checkers that there is one.
    min_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] = DEFAULT_MIN_TOKENS["dense"]
    source: TableSource = TableSource()
    # Lax for the container only (JSON has lists, no tuples); the rows themselves stay strict.
    rows: Annotated[tuple[TableRow, ...], Field(strict=False)] = ()

    @model_validator(mode="before")
    @classmethod
    def _threshold_of_the_kind(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "min_tokens" in data:
            return data
        key = data.get("key")
        kind = key.get("model_kind", "dense") if isinstance(key, dict) else getattr(key, "model_kind", "dense")
        return {**data, "min_tokens": default_min_tokens("moe" if kind == "moe" else "dense")}

    @field_validator("rows")
    @classmethod
    def _consistent(cls, rows: tuple[TableRow, ...], info: ValidationInfo) -> tuple[TableRow, ...]:
        granularity = info.data.get("granularity")
        if granularity is not None:
            for index, row in enumerate(rows):
                _check_row(row, f"rows[{index}]", granularity)
        for index, row in enumerate(rows):
            for earlier in range(index):
                if rows[earlier].batch.overlaps(row.batch) and rows[earlier].tokens.overlaps(row.tokens):
                    raise RowError(
                        f"rows[{index}].tokens",
                        f"batch {row.batch} tokens {row.tokens} overlaps rows[{earlier}] "
                        f"(batch {rows[earlier].batch} tokens {rows[earlier].tokens})",
                    )
        return tuple(sorted(rows, key=lambda row: (row.batch.lo, row.tokens.lo)))

    @property
    def default_launch(self) -> LaunchConfig:
        """Launch configuration of steps that no row covers."""
        return LaunchConfig()

    @property
    def gemm(self) -> Literal["trt", "budget"]:
        """Whose GEMMs run beside collectives: those that were measured, else ours, which keep off their SMs."""
        measured = self.source.measured
        return measured.gemm if measured is not None else self.source.gemm or "budget"

    @property
    def sha256(self) -> str:
        """SHA-256 of the canonical JSON (sorted keys, no spaces, UTF-8), as lower-case hexadecimal."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def warnings(self) -> tuple[str, ...]:
        """What is allowed but does nothing: no rows, and weave rows that no step can reach or that never split."""
        lines = [] if self.rows else ["it has no rows: every step follows the default rule"]
        for row in self.rows:
            hi = row.tokens.hi
            if row.mode == "fuse":
                continue
            place = f"row batch {row.batch} tokens {row.tokens}"
            if hi is not None and hi < self.min_tokens:
                lines.append(f"{place}: steps below min_tokens {self.min_tokens} are never split")
            elif row.tokens.lo > MAX_NUM_TOKENS or row.batch.lo > MAX_NUM_TOKENS:
                lines.append(f"{place}: no step is larger than {MAX_NUM_TOKENS}")
        return tuple(lines)

    def beyond_rows(self, max_num_tokens: int | None) -> str:
        """Which steps of an engine that splits lie above all rows and what is done with them; empty where none do.

        Args:
            max_num_tokens: Of the engine; None: it is not known.
        """
        ends = [row.tokens.hi for row in self.rows if row.tokens.hi is not None]
        if not ends or len(ends) < len(self.rows):
            return ""
        first = max(*ends, self.min_tokens - 1) + 1
        if max_num_tokens is not None and first > max_num_tokens:
            return ""
        steps = f"steps of {first}{' or more' if max_num_tokens is None else f' to {max_num_tokens}'} tokens"
        ctas = self.default_launch.ctas
        return f"{steps} are above its rows: the default rule splits them at half, with {ctas} CTAs"

    def lookup(self, batch: int, num_tokens: int) -> SplitPlan:
        """The plan of a step; see `schedule.plan_step`."""
        return plan_step(self, batch, num_tokens)

    def check_key(self, expected: TableKey | Mapping[str, str | int], *, where: str = "table") -> None:
        """Refuse a table that was made for something else.

        Args:
            expected: The key needed, or only the fields to compare. GPU "any" on either side fits.
            where: What the error names, usually the file.

        Raises:
            UserError: A field differs.
        """
        wanted = expected.model_dump() if isinstance(expected, TableKey) else dict(expected)
        for name, value in wanted.items():
            if name not in TableKey.model_fields:
                raise ValueError(f"{name} is no field of a table key")
            have = getattr(self.key, name)
            if have == value or (name == "gpu" and ANY_GPU in (have, value)):
                continue
            raise UserError(
                f"made for {name} {have}, but {value} is needed",
                where=f"{where}: key.{name}",
                fix="use the table of this model and GPU, tune one, or leave it out for the default rule",
            )

    @classmethod
    def load(cls, path: Path) -> TuningTable:
        """Read and check a JSON file; see `table.files.load_table`."""
        from trtllm_tokenweave.table.files import load_table

        return load_table(path)

    def save(self, path: Path) -> None:
        """Write the JSON form, aside first and then renamed; see `table.files.save_table`."""
        from trtllm_tokenweave.table.files import save_table

        save_table(self, path)

    def pack(self) -> bytes:
        """The form that engines carry; see `table.packing`."""
        from trtllm_tokenweave.table.packing import pack_table

        return pack_table(self)

    @classmethod
    def unpack(cls, data: bytes) -> TuningTable:
        """Read what `pack` wrote; see `table.packing`."""
        from trtllm_tokenweave.table.packing import unpack_table

        return unpack_table(data)

    def prefix_lookup(self, max_batch: int, max_num_tokens: int) -> PrefixLookup:
        """The split as in-graph constants; see `table.prefix`."""
        from trtllm_tokenweave.table.prefix import prefix_lookup

        return prefix_lookup(self, max_batch, max_num_tokens)


def _check_row(row: TableRow, path: str, granularity: int) -> None:
    lo, hi = row.tokens.lo, row.tokens.hi
    if (lo - 1) % granularity:
        raise RowError(f"{path}.tokens.lo", f"{lo} is not a multiple of the granularity {granularity} plus 1")
    if hi is not None and hi % granularity:
        raise RowError(f"{path}.tokens.hi", f"{hi} is not a multiple of the granularity {granularity}")
    if row.mode == "fuse" and row.split_offset:
        raise RowError(f"{path}.split_offset", f"{row.split_offset} on a fuse row, which never splits")
    # At n = hi the suffix is largest: hi / 2 - offset. Where even that is empty, the row can never split. An open row
    # ends at the largest step that can be served.
    limit = (max(lo, MAX_NUM_TOKENS) if hi is None else hi) // 2
    if row.mode == "weave" and row.split_offset >= limit:
        raise RowError(f"{path}.split_offset", f"{row.split_offset} leaves no suffix; must be below {limit} here")


def default_table(key: TableKey, *, one_wave_tokens: int = 0, granularity: int = DEFAULT_GRANULARITY) -> TuningTable:
    """The default rule as a table without rows.

    Args:
        key: What it is for.
        one_wave_tokens: Largest token count whose GEMMs are all a single wave (`waves.one_wave_tokens`).
        granularity: Tokens, a multiple of 16.
    """
    min_tokens = default_min_tokens(key.model_kind, one_wave_tokens)
    text = f"default rule: split at half from {min_tokens} tokens"
    if min_tokens == one_wave_tokens + 1:
        text += f" (up to {one_wave_tokens} every GEMM is a single wave)"
    source = TableSource(kind="default", text=text)
    return TuningTable(key=key, granularity=granularity, min_tokens=min_tokens, source=source)
