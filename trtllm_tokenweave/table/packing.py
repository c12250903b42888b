"""The packed form of a table, as plugins carry it in their ``table`` field.

All integers are unsigned and little-endian; no padding beyond what is listed.

Header, 112 bytes::

    offset  size  field
         0     4  magic "TWTB"
         4     2  layout version, 1
         6     2  header size in bytes, 112
         8     2  row size in bytes, 40
        10     2  schema version of the JSON form
        12     4  number of rows
        16     4  length of the source text in bytes
        20     4  granularity
        24     4  min_tokens
        28     4  hidden_size
        32     2  tp_size
        34     1  dtype: 0 float32, 1 float16, 2 bfloat16
        35     1  model_kind: 0 dense, 1 moe
        36     1  source kind: 0 default, 1 capability, 2 measurement
        37    11  zero
        48    64  gpu: UTF-8, zero-terminated, zero-filled

Rows, 40 bytes each, sorted by (batch_lo, token_lo), never overlapping::

         0     4  batch_lo
         4     4  batch_hi, inclusive; 0xffffffff: unbounded
         8     4  token_lo
        12     4  token_hi, inclusive; 0xffffffff: unbounded
        16     4  split_offset
        20     1  mode: 0 fuse, 1 weave
        21     3  zero
        24     8  launch configuration of the attention collective
        32     8  launch configuration of the MLP collective

Launch configuration, 8 bytes::

         0     1  fabric: 0 auto, 1 multimem, 2 peer, 3 loopback
         1     1  zero
         2     2  ctas
         4     2  threads
         6     2  gemm_sms

Then the source text (UTF-8), then 4 bytes: CRC-32 (IEEE 802.3, as zlib's) of everything before it.

A step that no row covers uses the default rule: mode weave, split_offset 0, launch configuration
(auto, 8 CTAs, 1024 threads, gemm_sms 0).
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, cast

from pydantic import ValidationError

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.table.files import table_error
from trtllm_tokenweave.table.launch import LaunchConfig
from trtllm_tokenweave.table.model import GPU_NAME_BYTES, SCHEMA_VERSION, Bucket, TuningTable

MAGIC = b"TWTB"
LAYOUT_VERSION = 1
UNBOUNDED = 0xFFFFFFFF

_HEADER = struct.Struct(f"<4sHHHHIIIIIHBBB11s{GPU_NAME_BYTES}s")
_ROW = struct.Struct("<IIIIIB3s8s8s")
_LAUNCH = struct.Struct("<BBHHH")
_CRC = struct.Struct("<I")

DTYPES = ("float32", "float16", "bfloat16")
MODEL_KINDS = ("dense", "moe")
SOURCE_KINDS = ("default", "capability", "measurement")
MODES = ("fuse", "weave")
FABRICS = ("auto", "multimem", "peer", "loopback")

_REBUILD = "rebuild the engine"


def pack_table(table: TuningTable) -> bytes:
    """The packed form of `table`; `unpack_table` gives an equal table back."""
    text = table.source.text.encode()
    head = _HEADER.pack(
        MAGIC,
        LAYOUT_VERSION,
        _HEADER.size,
        _ROW.size,
        table.schema_version,
        len(table.rows),
        len(text),
        table.granularity,
        table.min_tokens,
        table.key.hidden_size,
        table.key.tp_size,
        DTYPES.index(table.key.dtype),
        MODEL_KINDS.index(table.key.model_kind),
        SOURCE_KINDS.index(table.source.kind),
        b"",
        table.key.gpu.encode(),
    )
    rows = b"".join(
        _ROW.pack(
            *_pack_bucket(row.batch),
            *_pack_bucket(row.tokens),
            row.split_offset,
            MODES.index(row.mode),
            b"",
            _pack_launch(row.attention),
            _pack_launch(row.mlp),
        )
        for row in table.rows
    )
    body = head + rows + text
    return body + _CRC.pack(zlib.crc32(body))


def unpack_table(data: bytes, *, where: str = "packed table") -> TuningTable:
    """Read the packed form.

    Raises:
        UserError: Not a table, truncated, corrupt, of another layout version, or holding refused values.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise UserError("is not a packed table (wrong magic)", where=where)
    if len(data) < _HEADER.size + _CRC.size:
        raise UserError(f"is truncated: {len(data)} bytes", where=where, fix=_REBUILD)
    values = _HEADER.unpack_from(data)
    version, header_size, row_size, schema_version, num_rows, text_size = values[1:7]
    if version > LAYOUT_VERSION or schema_version > SCHEMA_VERSION:
        raise UserError(
            f"version {version} (schema {schema_version}) was made by a newer version",
            where=where,
            fix="upgrade trtllm-tokenweave",
        )
    if (version, header_size, row_size) != (LAYOUT_VERSION, _HEADER.size, _ROW.size):
        raise UserError(f"has an unknown layout (version {version})", where=where, fix=_REBUILD)
    rows_end = header_size + num_rows * row_size
    if len(data) != rows_end + text_size + _CRC.size:
        raise UserError(
            f"is truncated or too long: {len(data)} bytes, expected {rows_end + text_size + _CRC.size}",
            where=where,
            fix=_REBUILD,
        )
    body = data[: -_CRC.size]
    if _CRC.unpack(data[-_CRC.size :])[0] != zlib.crc32(body):
        raise UserError("is corrupt: the checksum does not match", where=where, fix=_REBUILD)
    granularity, min_tokens, hidden_size, tp_size, dtype, kind, source = values[7:14]
    try:
        return TuningTable.model_validate(
            {
                "schema_version": schema_version,
                "key": {
                    "gpu": values[15].rstrip(b"\0").decode(),
                    "tp_size": tp_size,
                    "hidden_size": hidden_size,
                    "dtype": _name(DTYPES, dtype),
                    "model_kind": _name(MODEL_KINDS, kind),
                },
                "granularity": granularity,
                "min_tokens": min_tokens,
                "source": {"kind": _name(SOURCE_KINDS, source), "text": body[rows_end:].decode()},
                "rows": tuple(_unpack_row(row) for row in _ROW.iter_unpack(body[header_size:rows_end])),
            }
        )
    except ValidationError as error:
        raise table_error(error, where) from error
    except ValueError as error:
        raise UserError(f"holds an unknown value: {error}", where=where, fix=_REBUILD) from error


def _pack_bucket(bucket: Bucket) -> tuple[int, int]:
    return bucket.lo, UNBOUNDED if bucket.hi is None else bucket.hi


def _pack_launch(launch: LaunchConfig) -> bytes:
    return _LAUNCH.pack(FABRICS.index(launch.fabric), 0, launch.ctas, launch.threads, launch.gemm_sms)


def _name(names: tuple[str, ...], code: int) -> str:
    if code >= len(names):
        raise ValueError(f"code {code}, known are 0 to {len(names) - 1} ({', '.join(names)})")
    return names[code]


def _bucket(lo: int, hi: int) -> dict[str, int | None]:
    return {"lo": lo, "hi": None if hi == UNBOUNDED else hi}


def _unpack_row(values: tuple[Any, ...]) -> dict[str, Any]:
    return {
        "batch": _bucket(values[0], values[1]),
        "tokens": _bucket(values[2], values[3]),
        "split_offset": values[4],
        "mode": _name(MODES, values[5]),
        "attention": _unpack_launch(cast("bytes", values[7])),
        "mlp": _unpack_launch(cast("bytes", values[8])),
    }


def _unpack_launch(data: bytes) -> dict[str, Any]:
    fabric, _, ctas, threads, gemm_sms = _LAUNCH.unpack(data)
    return {"fabric": _name(FABRICS, fabric), "ctas": ctas, "threads": threads, "gemm_sms": gemm_sms}
