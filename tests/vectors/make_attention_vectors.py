"""Writes attention.json: how a batch is cut in two, packed fields of inner plugins, and what must be refused of both.

The C++ plugins are tested against the same file. Usage:

    PYTHONPATH=tests python -m vectors.make_attention_vectors            write it
    PYTHONPATH=tests python -m vectors.make_attention_vectors --check    exit 1 when it is stale
"""

from __future__ import annotations

import json
import random
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
from support.vectors import write_or_check

from trtllm_tokenweave.batch_split import CONTEXT, GENERATION, HalfBatch, split_batch
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.recorder.enums import PluginFieldType
from trtllm_tokenweave.recorder.packed_fields import pack_fields, unpack_fields
from trtllm_tokenweave.recorder.plugin import PluginField

PATH = Path(__file__).with_name("attention.json")

#: (type, tokens, tokens of the sequence before this step); tokens of a generation row: its prompt's.
Sequence = tuple[int, int, int]

NAMED: dict[str, tuple[list[Sequence], list[int]]] = {
    "no sequences": ([], [0]),
    "one sequence longer than the prefix": ([(CONTEXT, 1000, 0)], [0, 1, 7, 256, 999, 1000]),
    "one sequence with a past": ([(CONTEXT, 77, 33)], [5, 64]),
    "whole sequences": ([(CONTEXT, 32, 0), (CONTEXT, 64, 32), (CONTEXT, 16, 0)], [32, 96]),
    "a cut that no block is aligned to": ([(CONTEXT, 50, 3), (CONTEXT, 50, 17)], [13, 50, 51, 99]),
    "pure decode": ([(GENERATION, 10, 12), (GENERATION, 500, 501), (GENERATION, 1, 1)], [0, 1, 2, 3]),
    "mixed": ([(CONTEXT, 10, 3), (CONTEXT, 4, 0), (GENERATION, 6, 7), (GENERATION, 9, 12)], [0, 4, 10, 12, 14, 15, 16]),
}
REFUSED: dict[str, tuple[list[Sequence], int]] = {
    "too many tokens": ([(CONTEXT, 3, 0), (GENERATION, 4, 5)], 5),
    "negative prefix": ([(CONTEXT, 3, 0)], -1),
    "context behind generation": ([(GENERATION, 3, 3), (CONTEXT, 4, 0)], 1),
    "unknown type": ([(CONTEXT, 3, 0), (2, 4, 0)], 1),
    "empty chunk": ([(CONTEXT, 0, 0)], 0),
    "negative chunk": ([(CONTEXT, -2, 0)], 0),
}


def random_cases(count: int) -> dict[str, tuple[list[Sequence], list[int]]]:
    """Batches of all sizes, each with a few cuts."""
    rng = random.Random(1)
    cases = {}
    for number in range(count):
        contexts = [
            (CONTEXT, rng.randint(1, 300), rng.choice((0, rng.randint(1, 500)))) for _ in range(rng.randint(0, 5))
        ]
        rows = [(GENERATION, rng.randint(1, 300), 0) for _ in range(rng.randint(0, 9))]
        batch = contexts + [(kind, prompt, prompt + rng.randint(0, 50)) for kind, prompt, _ in rows]
        tokens = sum(c for _, c, _ in contexts) + len(rows)
        cases[f"random {number}"] = (batch, sorted({rng.randint(0, tokens) for _ in range(4)}))
    return cases


def arrays(batch: list[Sequence]) -> dict[str, list[int]]:
    """Metadata of a step as TensorRT-LLM's runtime fills it."""
    lengths = [past + (tokens if kind == CONTEXT else 1) for kind, tokens, past in batch]
    return {
        "host_request_types": [kind for kind, _, _ in batch],
        "host_context_lengths": [tokens for _, tokens, _ in batch],
        "host_past_key_value_lengths": [
            n - (kind == GENERATION) for (kind, _, _), n in zip(batch, lengths, strict=True)
        ],
        "sequence_length": lengths,
    }


def half(cut: HalfBatch, step: dict[str, list[int]]) -> dict[str, Any]:
    """What one half's arrays have to be."""
    past, lengths = step["host_past_key_value_lengths"], step["sequence_length"]
    return {
        "rows": cut.rows,
        "first": cut.first,
        "num_contexts": int((cut.request_types == CONTEXT).sum()),
        "host_request_types": cut.request_types.tolist(),
        "host_context_lengths": cut.context_lengths.tolist(),
        "host_past_key_value_lengths": cut.shortened(np.asarray(past, np.int32)).tolist(),
        "sequence_length": cut.shortened(np.asarray(lengths, np.int32)).tolist(),
    }


def cuts() -> list[dict[str, Any]]:
    """Every batch with its cuts."""
    cases = []
    for name, (batch, rows) in (NAMED | random_cases(60)).items():
        step = arrays(batch)
        types, contexts = (np.asarray(step[key], np.int32) for key in ("host_request_types", "host_context_lengths"))
        for prefix_rows in rows:
            prefix, suffix = split_batch(types, contexts, prefix_rows)
            halves = {"prefix": half(prefix, step), "suffix": half(suffix, step)}
            cases.append({"name": name, "prefix_rows": prefix_rows, "step": step} | halves)
    return cases


def refused_cuts() -> list[dict[str, Any]]:
    """Batches and cuts that every implementation has to refuse, with a part of the message."""
    cases = []
    for name, (batch, prefix_rows) in REFUSED.items():
        step = arrays(batch)
        try:
            split_batch(np.asarray(step["host_request_types"]), np.asarray(step["host_context_lengths"]), prefix_rows)
        except UserError as error:
            cases.append({"name": name, "prefix_rows": prefix_rows, "step": step, "message": error.what})
    return cases


FIELDS: dict[str, list[PluginField]] = {
    "none": [],
    "every type": [
        PluginField("flag", np.array([-1], np.int8), PluginFieldType.INT8),
        PluginField("count", np.array([1 << 30], np.int32), PluginFieldType.INT32),
        PluginField("large", np.array([-(1 << 40)], np.int64), PluginFieldType.INT64),
        PluginField("eps", np.array([1e-5], np.float32), PluginFieldType.FLOAT32),
        PluginField("text", b"bytes\0of any kind", PluginFieldType.CHAR),
    ],
    "lists": [
        PluginField("group", np.array([0, 1, 2], np.int32), PluginFieldType.INT32),
        PluginField("flags", np.array([1, 0, 1], np.int8), PluginFieldType.INT8),
        PluginField("nothing", np.array([], np.int32), PluginFieldType.INT32),
        PluginField("layer_idx", np.array([17], np.int32), PluginFieldType.INT32),
    ],
}


def packed() -> list[dict[str, Any]]:
    """Fields in both forms."""
    cases = []
    for name, fields in FIELDS.items():
        described = [
            {
                "name": field.name,
                "type": field.type.value,
                "values": list(field.data) if isinstance(field.data, bytes) else np.ravel(field.data).tolist(),
            }
            for field in fields
        ]
        cases.append({"name": name, "fields": described, "packed_hex": pack_fields(fields).hex()})
    return cases


def refused_packed() -> list[dict[str, str]]:
    """Packed forms that every reader has to refuse, with a part of the message."""
    one = pack_fields([PluginField("a", np.array([1], np.int32), PluginFieldType.INT32)])
    body = one[8:]
    forms = {
        "empty": b"",
        "json": b'{"a": 1}',
        "header cut": one[:7],
        "last byte cut": one[:-1],
        "name cut": one[:16],
        "one byte too many": one + b"\0",
        "newer layout": one[:4] + struct.pack("<H", 2) + one[6:],
        "one field too few": one[:6] + struct.pack("<H", 2) + body,
        "unknown type": one[:10] + b"\x07" + one[11:],
        "reserved byte": one[:11] + b"\x01" + one[12:],
        "no name": one[:8] + struct.pack("<HBBI", 0, 5, 0, 1) + one[17:],
        "name twice": one[:6] + struct.pack("<H", 2) + body * 2,
        "more values than bytes": one[:12] + struct.pack("<I", 0xFFFFFFFF) + one[16:],
    }
    cases = []
    for name, form in forms.items():
        try:
            unpack_fields(form)
        except UserError as error:
            cases.append({"name": name, "packed_hex": form.hex(), "message": error.what})
    return cases


def text() -> str:
    """The document as it stands in the file: one case a line."""
    sections = {
        "cuts": cuts(),
        "refused_cuts": refused_cuts(),
        "packed": packed(),
        "refused_packed": refused_packed(),
    }
    lines = [
        f' "{name}": [\n' + ",\n".join(f"  {json.dumps(c)}" for c in all_) + "\n ]" for name, all_ in sections.items()
    ]
    about = "cuts of batches, and packed fields of inner plugins; written by make_attention_vectors.py"
    return f'{{\n "about": "{about}",\n' + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PATH, text()))
