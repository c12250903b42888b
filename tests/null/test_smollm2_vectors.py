"""The tokens that the engines of TensorRT are compared with are the interpreter's."""

from __future__ import annotations

import json
from importlib import import_module

import pytest
from support.vectors import FOLDER

SCRIPT = import_module("vectors.make_smollm2_vectors")


def test_what_the_file_holds() -> None:
    prompts = json.loads((FOLDER / "smollm2_greedy.json").read_text(encoding="utf-8"))["prompts"]
    assert [prompt["text"] for prompt in prompts] == list(SCRIPT.PROMPTS)
    for prompt in prompts:
        assert len(prompt["best"]) == SCRIPT.NEW_TOKENS
        for step in prompt["best"]:
            assert len(step) == SCRIPT.BEST
            logits = [logit for _, logit in step]
            assert logits == sorted(logits, reverse=True)


@pytest.mark.slow
def test_the_interpreter_still_says_so() -> None:
    """The first tokens of the last prompt; the script's --check compares all of them."""
    prompt = json.loads((FOLDER / "smollm2_greedy.json").read_text(encoding="utf-8"))["prompts"][-1]
    (made,) = SCRIPT.generate(2, SCRIPT.PROMPTS[-1:])
    assert list(made.prompt) == prompt["ids"]
    assert [[token for token, _ in step[:1]] for step in SCRIPT.best(made)] == [
        [token for token, _ in step[:1]] for step in prompt["best"][:2]
    ]
