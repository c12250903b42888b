"""The vectors that the reference attention plugin is tested with: what this package's networks give it."""

from __future__ import annotations

import json

from support.vectors import FOLDER, assert_fresh

from trtllm_tokenweave.recorder.trtllm_plugins import GPT_ATTENTION, SPECS


def test_the_vector_file_is_fresh() -> None:
    assert_fresh("make_gpt_attention_vectors", "gpt_attention.json")


def test_the_vectors_hold_every_field_in_order() -> None:
    document = json.loads((FOLDER / "gpt_attention.json").read_text(encoding="utf-8"))
    (spec,) = (s for s in SPECS if (s.name, s.version, s.namespace) == GPT_ATTENTION)
    assert [(f["name"], f["type"]) for f in document["fields"]] == [(f.name, f.type.value) for f in spec.fields]
