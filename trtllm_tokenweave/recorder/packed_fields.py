"""The fields of one plugin as bytes, to be carried in a field of another (``inner`` of TokenWeaveAttention).

The C++ library reads the same layout (``plugins/trt/packed_fields.cpp``); ``tests/vectors/attention.json`` holds both
sides to it. All numbers are little-endian::

    offset  size
    0       4     "TWPF"
    4       2     version of the layout: 1
    6       2     number of fields
    8             the fields, one after the other without padding:
            2     bytes of the name
            1     type: the number of TensorRT's PluginFieldType (1 FLOAT32, 3 INT8, 5 INT32, 6 CHAR, 10 INT64)
            1     0
            4     number of values (CHAR: bytes)
            ...   the name (UTF-8), then the values
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from trtllm_tokenweave.recorder.enums import PluginFieldType
from trtllm_tokenweave.recorder.plugin import FIELD_DTYPES, FieldValue, PluginField, plain_value
from trtllm_tokenweave.recorder.tensor import NetworkError

_MAGIC = b"TWPF"
_VERSION = 1
_HEADER = struct.Struct("<4sHH")
_FIELD = struct.Struct("<HBBI")


def pack_fields(fields: Iterable[PluginField]) -> bytes:
    """Return fields as bytes.

    Raises:
        NetworkError: for a field of a type that the layout does not have, a long name, or too many fields.
    """
    given = list(fields)
    parts = []
    for field in given:
        name, data = field.name.encode(), _data(field)
        values = len(data) // _size(field.type)
        if not 0 < len(name) < 1 << 16 or len(given) >= 1 << 16:
            raise _bad(f"cannot hold {len(given)} fields, or the name {field.name[:32]!r}")
        parts += [_FIELD.pack(len(name), field.type.value, 0, values), name, data]
    return b"".join([_HEADER.pack(_MAGIC, _VERSION, len(given)), *parts])


def unpack_fields(packed: bytes) -> dict[str, FieldValue]:
    """Inverse of :func:`pack_fields`: bytes for CHAR, else a number, or an array where there is not one value.

    Raises:
        NetworkError: for anything that :func:`pack_fields` does not write.
    """
    if not packed.startswith(_MAGIC):
        raise _bad("have a wrong magic")
    header, at = _take(packed, 0, _HEADER.size)
    _, version, count = _HEADER.unpack(header)
    if version != _VERSION:
        raise _bad(f"have layout {version}, expected {_VERSION}")
    fields: dict[str, FieldValue] = {}
    for _ in range(count):
        head, at = _take(packed, at, _FIELD.size)
        name_bytes, number, zero, values = _FIELD.unpack(head)
        kind = _kind(number)
        raw, at = _take(packed, at, name_bytes)
        data, at = _take(packed, at, values * _size(kind))
        name = raw.decode(errors="replace")
        if not name or name in fields or zero:
            raise _bad(f"have a bad head of field {name!r}")
        array: Any = data if kind is PluginFieldType.CHAR else np.frombuffer(data, _little_endian(kind))
        fields[name] = plain_value(PluginField(name, array, kind))
    if at != len(packed):
        raise _bad(f"have {len(packed) - at} bytes too many")
    return fields


def _bad(what: str) -> NetworkError:
    return NetworkError(f"packed plugin fields {what}", where="inner plugin", fix="weave the network again")


def _kind(number: int) -> PluginFieldType:
    kind = next((k for k in (PluginFieldType.CHAR, *FIELD_DTYPES) if k.value == number), None)
    if kind is None:
        raise _bad(f"have a field of type {number}")
    return kind


def _little_endian(kind: PluginFieldType) -> np.dtype[Any]:
    return np.dtype(FIELD_DTYPES[kind]).newbyteorder("<")


def _size(kind: PluginFieldType) -> int:
    return 1 if _kind(kind.value) is PluginFieldType.CHAR else _little_endian(kind).itemsize


def _data(field: PluginField) -> bytes:
    if _kind(field.type.value) is PluginFieldType.CHAR:
        return bytes(field.data)
    return np.ravel(np.asarray(field.data)).astype(_little_endian(field.type)).tobytes()


def _take(packed: bytes, at: int, count: int) -> tuple[bytes, int]:
    if count > len(packed) - at:
        raise _bad("are cut short")
    return packed[at : at + count], at + count
