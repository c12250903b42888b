"""Writes smollm2_greedy.json: what the interpreter generates with SmolLM2-135M in bfloat16, and how sure it is.

The engines of TensorRT are compared with it. It takes a few minutes. Usage:

    PYTHONPATH=tests python -m vectors.make_smollm2_vectors            write it
    PYTHONPATH=tests python -m vectors.make_smollm2_vectors --check    exit 1 when it is stale
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from support.vectors import write_or_check

from trtllm_tokenweave.checkpoint import open_checkpoint, require_tokenizer, smollm2_gguf
from trtllm_tokenweave.comm import LocalComm
from trtllm_tokenweave.interpreter import ExecutionContext
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.recorder import RecordedNetwork
from trtllm_tokenweave.runner import Generation, GenerationLimits, make_generator

PATH = Path(__file__).with_name("smollm2_greedy.json")
NEW_TOKENS, BEST = 64, 5
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "List the planets of the solar system, and say one thing about each.",
    "Here is a note. 'The train to Lyon leaves at nine from platform four. Tickets are sold at the counter until half "
    "past eight, after that only on board, where they cost two euros more. Bicycles travel in the last carriage, dogs "
    "need a ticket of their own, and the restaurant car is closed on Sundays.' Say it in other words.",
    "Write a short story about a lighthouse keeper.",
    "How do I boil an egg?",
)


def generate(new_tokens: int = NEW_TOKENS, prompts: tuple[str, ...] = PROMPTS) -> list[Generation]:
    """Greedy tokens on one rank; the end token ends nothing."""
    checkpoint = open_checkpoint(smollm2_gguf(), dtype="bfloat16")
    tokenizer = require_tokenizer(checkpoint)
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in prompts]
    limits = GenerationLimits(max_num_tokens=512, max_batch_size=8, max_seq_len=512, max_new_tokens=new_tokens)
    sizes = NetworkOptions(max_batch_size=8, max_num_tokens=512, max_seq_len=512)
    network = RecordedNetwork("SmolLM2")
    build_llama(network, checkpoint.config, Mapping(), checkpoint.rank_weights(Mapping()), sizes)
    context = ExecutionContext(network, LocalComm.group(1)[0])
    generator = make_generator([context], checkpoint.config, 1, limits)
    return generator.generate([tokenizer.encode(text) for text in texts]).generations


def best(generation: Generation) -> list[list[list[float]]]:
    """Of each step the BEST most likely tokens and their logits, best first; ties: lowest token."""
    steps = []
    for logits in generation.logits:
        order = np.argsort(-logits, kind="stable")[:BEST]
        steps.append([[int(token), round(float(logits[token]), 3)] for token in order])
    return steps


def text() -> str:
    """The document as it stands in the file: one prompt a line."""
    lines = []
    for prompt, generation in zip(PROMPTS, generate(), strict=True):
        entry: dict[str, Any] = {"text": prompt, "ids": list(generation.prompt), "best": best(generation)}
        lines.append(f"  {json.dumps(entry, separators=(',', ':'))}")
    about = "greedy tokens of SmolLM2-135M-Instruct in bfloat16; written by make_smollm2_vectors.py"
    return f'{{\n "about": "{about}",\n "prompts": [\n' + ",\n".join(lines) + "\n ]\n}\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PATH, text()))
