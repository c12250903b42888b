"""The vectors that the reference attention plugin is tested with: what this package's networks give it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from trtllm_tokenweave.recorder.trtllm_plugins import GPT_ATTENTION, SPECS

VECTORS = Path(__file__).parents[1] / "vectors"


def test_the_vector_file_is_fresh() -> None:
    script = VECTORS / "make_gpt_attention_vectors.py"
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (VECTORS / "gpt_attention.json").read_text(encoding="utf-8")
    assert text == module.text(), f"stale: run python tests/vectors/{script.name}"


def test_the_vectors_hold_every_field_in_order() -> None:
    document = json.loads((VECTORS / "gpt_attention.json").read_text(encoding="utf-8"))
    (spec,) = (s for s in SPECS if (s.name, s.version, s.namespace) == GPT_ATTENTION)
    assert [(f["name"], f["type"]) for f in document["fields"]] == [(f.name, f.type.value) for f in spec.fields]
