"""Builds SmolLM2 as engines, and serves them as Triton's model does; test_serving.py starts the ranks.

The same requests in the same order make the same steps as `Generator.generate`, so the tokens must be equal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from trtllm_tokenweave.checkpoint import smollm2_gguf
from trtllm_tokenweave.cli.app import main as command
from trtllm_tokenweave.comm import CommBackend, MpiComm, SingleComm
from trtllm_tokenweave.config import read_environment
from trtllm_tokenweave.demo.model import PROMPTS
from trtllm_tokenweave.triton.service import Ended, Request, Service
from trtllm_tokenweave.triton.settings import Settings
from trtllm_tokenweave.triton.source import open_source

_TOKENS = 24


class Listener:
    """Keeps the tokens."""

    def __init__(self) -> None:
        self.said: list[int] = []
        self.ended: Ended = ""
        self.error = ""

    def tokens(self, tokens: Sequence[int], ended: Ended) -> None:
        self.said += tokens
        self.ended = ended

    def failed(self, what: str, *, refused: bool = False) -> None:
        self.error = f"refused: {what}" if refused else what

    def is_cancelled(self) -> bool:
        return False


def main() -> None:
    """Build into the folder that is named, then serve from it."""
    folder = Path(sys.argv[1])
    words = ["build", str(smollm2_gguf()), "-o", str(folder), "--min-tokens", "8", "--max-seq-len", "512"]
    assert command(words) == 0
    launcher = read_environment().launcher
    comm: CommBackend = SingleComm() if launcher is None else MpiComm()
    with open_source(Settings(engine_dir=folder, max_tokens=_TOKENS), comm) as source:
        tokenizer = source.tokenizer
        prompts = [tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": p}])) for p in PROMPTS]
        wanted = source.generator.generate(prompts).tokens
        service, listeners = Service(comm, source.generator), [Listener() for _ in prompts]
        if comm.rank == 0:
            for prompt, listener in zip(prompts, listeners, strict=True):
                service.add(Request(tuple(prompt), _TOKENS, listener))
            service.stop()
        service.run()
        if comm.rank == 0:
            assert [listener.error for listener in listeners] == [""] * len(prompts)
            assert [listener.said for listener in listeners] == wanted
            assert all(listener.ended for listener in listeners)
            print(f"{comm.size} ranks serve {source.what}: {tokenizer.decode(wanted[0])}")


if __name__ == "__main__":
    main()
