"""`trtllm-tokenweave run`: generate text with engines that `trtllm-tokenweave build` made."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from trtllm_tokenweave.agreement import gather_json
from trtllm_tokenweave.checkpoint.base import Tokenizer
from trtllm_tokenweave.checkpoint.tokenizer import load_folder_tokenizer
from trtllm_tokenweave.cli.console import steps_said
from trtllm_tokenweave.cli.ranks import Progress, start_ranks
from trtllm_tokenweave.decoder import TOKENIZER, DecoderModel
from trtllm_tokenweave.engine import Engine, config_file
from trtllm_tokenweave.engine_runner import engine_generator, engine_limits, engine_step
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.manifest import missing
from trtllm_tokenweave.plugin_library import plugin_library


@dataclass(frozen=True)
class Prompts:
    """What to go on from: texts, with the model's chat template around each, or token ids."""

    texts: tuple[str, ...]
    ids: tuple[str, ...]
    chat: bool

    def tokens(self, tokenizer: Tokenizer | None) -> list[list[int]]:
        """Token ids of each.

        Raises:
            UserError: a prompt is empty or no list of ids, or texts are given and there is no tokenizer.
        """
        if not self.texts and not self.ids:
            raise UserError("is missing", where="--prompt", fix="give --prompt TEXT, as often as you like")
        if self.texts and tokenizer is None:
            raise UserError("the engine's folder has no tokenizer", where="--prompt", fix="give --prompt-ids 1,2,3")
        found = []
        for number, text in enumerate(self.texts):
            assert tokenizer is not None
            if not text.strip():
                raise UserError("is empty", where=f"prompt {number}", fix="give some words")
            if self.chat:
                found.append(tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": text}])))
            else:
                found.append(tokenizer.encode(text, add_bos=True))
        for ids in self.ids:
            try:
                found.append([int(part) for part in ids.split(",")])
            except ValueError:
                raise UserError(f"{ids!r} is no list of numbers", where="--prompt-ids", fix="as in 1,2,3") from None
        return found


def run(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="Folder that trtllm-tokenweave build made.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt; may be repeated.")] = None,
    prompt_ids: Annotated[list[str] | None, typer.Option(help="Prompt as token ids, 1,2,3; may be repeated.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens generated per prompt.")] = 64,
    chat: Annotated[bool, typer.Option(help="Put the model's chat template around prompts.")] = True,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end token.")] = False,
    num_blocks: Annotated[
        int, typer.Option(min=0, help="Blocks of the KV cache; 0: enough for max_batch_size full sequences.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Generate text, the most likely token each time; under mpirun as the engine's ranks."""
    if not config_file(engine).is_file():
        raise missing(config_file(engine))
    comm = start_ranks()
    progress = Progress(comm)
    progress.say(f"loading {engine}")
    loaded = Engine.load(engine, comm)
    model = DecoderModel.of_config(loaded.config, engine)
    tokenizer = load_folder_tokenizer(engine / TOKENIZER, model.config.vocab_size)
    prompts = Prompts(tuple(prompt or ()), tuple(prompt_ids or ()), chat).tokens(tokenizer)
    eos_ids = frozenset() if tokenizer is None or ignore_eos else tokenizer.eos_ids
    limits = engine_limits(model, max_new_tokens=max_new_tokens, num_blocks=num_blocks, eos_ids=eos_ids)
    with engine_step(loaded, model, limits) as step:
        generator = engine_generator(step, limits)
        progress.say(f"generating from {len(prompts)} prompts")
        started = time.perf_counter()
        result = generator.generate(prompts)
        seconds = time.perf_counter() - started
        document = step.ladder.document()
    everyone = gather_json(comm, "tokens", result.tokens)
    if any(tokens != everyone[0] for tokens in everyone):
        raise TokenWeaveError("the ranks generated different tokens: their engines do not belong together")
    if comm.rank != 0:
        return
    count = sum(len(tokens) for tokens in result.tokens)
    document |= {
        "engine": str(engine),
        "tp_size": comm.size,
        "mode": loaded.manifest.mode,
        "prompts": [_prompt(g.prompt, g.tokens, tokenizer) for g in result.generations],
        "seconds": round(seconds, 4),
        "prompt_tokens": sum(len(p) for p in prompts),
        "new_tokens": count,
        "tokens_per_second": round(count / seconds, 1),
        "plugins": counters() if loaded.manifest.mode != "stock" else {},
    }
    print(json.dumps(document)) if as_json else show(document)


def counters() -> dict[str, int]:
    """What our plugins queued in this process."""
    return plugin_library().counters()


def _prompt(prompt: Sequence[int], tokens: Sequence[int], tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = None if tokenizer is None else tokenizer.decode(tokens)
    return {"prompt_tokens": len(prompt), "tokens": list(tokens), "text": text}


def show(document: dict[str, Any]) -> None:
    """Print the texts, the speed, and how the steps were run."""
    for number, entry in enumerate(document["prompts"]):
        said = entry["text"] if entry["text"] is not None else ",".join(str(t) for t in entry["tokens"])
        print(f"[{number}] {said.strip()}")
    print(
        f"{document['new_tokens']} tokens in {document['seconds']:.2f} s: {document['tokens_per_second']:.1f} tokens/s "
        f"(tp_size {document['tp_size']}, engine {document['mode']})"
    )
    print(f"steps: {steps_said(document)}")
    for reason, count in document["reasons"].items():
        print(f"  {count} times: {reason}")
