"""The vectors that the C++ headers for engines are tested with: what Python refuses, and the steps that it runs."""

from __future__ import annotations

import json

from support.vectors import FOLDER, assert_fresh


def test_the_vectors_are_what_python_makes() -> None:
    assert_fresh("make_engine_vectors", "engine_folder.json")


def test_the_vectors_hold_what_can_go_wrong() -> None:
    document = json.loads((FOLDER / "engine_folder.json").read_text(encoding="utf-8"))
    errors = [case["error"] for case in document["folders"]["refused"]]
    assert all(errors)
    assert len(set(errors)) == len(errors)
    first = document["generations"][0]
    kinds = [step["host_request_types"]["values"] for step in first["steps"]]
    # Chunks of prompts alone, beside generation rows, and generation rows alone; one sequence ends early.
    assert {frozenset(types) for types in kinds} == {frozenset({0}), frozenset({0, 1}), frozenset({1})}
    assert min(len(tokens) for tokens in first["tokens"]) < first["max_new_tokens"]
