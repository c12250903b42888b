"""SmolLM2-135M in TensorRT on the ranks that mpirun started (or one); test_llama_engine.py starts them.

Every token must be the interpreter's (tests/vectors/smollm2_greedy.json), or tie with it: then it is compared again
from the interpreter's token on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.progress import progress
from trtllm_tokenweave.batch_split import CONTEXT
from trtllm_tokenweave.checkpoint import open_checkpoint, smollm2_gguf
from trtllm_tokenweave.comm import CommBackend, MpiComm, SingleComm
from trtllm_tokenweave.config import read_environment
from trtllm_tokenweave.decoder import DecoderBuild, DecoderModel, build_decoder, describe, register_decoder_plugins
from trtllm_tokenweave.device import use_device_of_rank
from trtllm_tokenweave.engine import Engine, plan_file, save_engine
from trtllm_tokenweave.engine_runner import EngineStep, engine_generator, engine_limits, engine_step
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.llama import NetworkOptions
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.passes import WeaveMode, WeaveOptions
from trtllm_tokenweave.plugin_library import plugin_library
from trtllm_tokenweave.runner import GenerationLimits, StepInputs
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableRow, TuningTable
from trtllm_tokenweave.waves import table_key

VECTORS = Path(__file__).parents[1] / "vectors" / "smollm2_greedy.json"
OPTIONS = NetworkOptions(max_batch_size=16, max_num_tokens=512, max_seq_len=512)
#: Logits that differ by less are tied: neighbours in bfloat16 are 0.25 apart there, after 30 layers that round too.
TIE = 0.75
#: Most ties of all tokens, where something is wrong beyond rounding.
MOST_TIES = 0.1


@dataclass(frozen=True)
class Variant:
    """An engine to build."""

    mode: WeaveMode
    split_attention: bool = True
    multiple_profiles: bool = False


VARIANTS: dict[str, Variant] = {
    "stock": Variant("stock"),
    "fuse": Variant("fuse"),
    "weave": Variant("weave"),
    "whole": Variant("weave", split_attention=False),
    "profiles": Variant("weave", multiple_profiles=True),
}


@dataclass
class Prompt:
    """What the interpreter made of a prompt: of each step the most likely tokens and their logits, best first."""

    ids: list[int]
    best: list[list[tuple[int, float]]]

    @property
    def tokens(self) -> list[int]:
        """The greedy ones."""
        return [candidates[0][0] for candidates in self.best]

    def margin(self, step: int, token: int) -> float:
        """How far a token's logit is below the best; infinite for one that is not among the best."""
        logits = dict(self.best[step])
        return self.best[step][0][1] - logits[token] if token in logits else float("inf")


def read_prompts() -> list[Prompt]:
    """The prompts of the file."""
    document = json.loads(VECTORS.read_text(encoding="utf-8"))
    return [
        Prompt(p["ids"], [[(int(t), float(x)) for t, x in step] for step in p["best"]]) for p in document["prompts"]
    ]


def small_table(config: ModelConfig, tp_size: int) -> TuningTable:
    """Splits steps of 12 tokens and more, at a multiple of 8 tokens that falls inside of prompts."""
    launch = LaunchConfig(ctas=8)
    rows = (
        TableRow(tokens=Bucket(lo=1, hi=64), mode="weave", attention=launch, mlp=launch),
        TableRow(tokens=Bucket(lo=65), mode="weave", split_offset=8, attention=launch, mlp=launch),
    )
    return TuningTable(key=table_key(config, tp_size), granularity=16, min_tokens=12, rows=rows)


def load(variant: Variant, folder: Path, comm: CommBackend) -> tuple[Engine, DecoderModel]:
    """Build, save, and load from the folder."""
    mapping = Mapping(comm.size, comm.rank, comm.size)
    checkpoint = open_checkpoint(smollm2_gguf(), dtype="bfloat16")
    weave = WeaveOptions(
        mapping,
        small_table(checkpoint.config, comm.size),
        OPTIONS.max_batch_size,
        OPTIONS.max_num_tokens,
        split_attention=variant.split_attention,
    )
    weights = checkpoint.rank_weights(mapping, only_this_rank=True)
    timings = folder.parent / f"timing{comm.rank}.cache"  # variants share them
    build = DecoderBuild(
        checkpoint.config,
        weights,
        OPTIONS,
        weave,
        variant.mode,
        timings,
        multiple_profiles=variant.multiple_profiles,
    )
    plan = build_decoder(build, comm)
    save_engine(plan, folder / "engine", comm, describe(build, plan, "SmolLM2").model_dump(mode="json"))
    engine = Engine.load(folder / "engine", comm)
    return engine, DecoderModel.of_config(engine.config, folder / "engine")


@dataclass
class Cuts:
    """Counts the steps that an engine splits, by where the cut falls."""

    step: EngineStep
    inside_chunk: int = 0
    generation: int = 0
    mixed: int = 0

    def __call__(self, _record: object, inputs: StepInputs) -> None:
        """Called before each step."""
        types, lengths = inputs["host_request_types"], inputs["host_context_lengths"]
        counts = np.where(types == CONTEXT, lengths, 1)
        prefix, suffix = self.step.lookup.evaluate(len(types), int(counts.sum()))
        if suffix and self.step.engine.manifest.mode == "weave":
            self.inside_chunk += prefix not in np.cumsum(counts)
            self.generation += not (types == CONTEXT).any()
            self.mixed += len(set(types.tolist())) == 2


@dataclass
class Checker:
    """Generates with one engine, and compares."""

    step: EngineStep
    say: Callable[[str], None]
    compared: int = 0
    ties: int = 0
    cuts: Cuts = field(init=False)

    def __post_init__(self) -> None:
        self.cuts = Cuts(self.step)

    def check(self, prompts: list[Prompt], limits: GenerationLimits) -> None:
        """Every token of every prompt; ends with an AssertionError where one differs by more than a tie."""
        left = [(number, 0) for number in range(len(prompts))]
        while left:
            ids = [prompts[n].ids + prompts[n].tokens[:done] for n, done in left]
            generator = engine_generator(self.step, limits, on_step=self.cuts)
            for (number, done), made in zip(list(left), generator.generate(ids).generations, strict=True):
                left.remove((number, done))
                prompt = prompts[number]
                for i, token in enumerate(made.tokens[: len(prompt.tokens) - done], start=done):
                    self.compared += 1
                    if token == prompt.tokens[i]:
                        continue
                    logits = made.logits[i - done]
                    margins = prompt.margin(i, token), float(logits[token] - logits[prompt.tokens[i]])
                    where = f"prompt {number}, token {i}: {token}, the interpreter has {prompt.tokens[i]}"
                    assert max(margins) < TIE, f"{where}; margins {margins[0]:.3f} and {margins[1]:.3f}"
                    self.say(f"tie: {where} ({margins[0]:.3f}, {margins[1]:.3f})")
                    self.ties += 1
                    if i + 1 < len(prompt.tokens):
                        left.append((number, i + 1))
                    break

    def finish(self) -> dict[str, Any]:
        """What was seen; ends with an AssertionError where too much differs."""
        assert self.ties <= MOST_TIES * self.compared, f"{self.ties} ties in {self.compared} tokens"
        return {"compared": self.compared, "ties": self.ties, "cuts": vars(self.cuts) | {"step": None}}


def run(step: EngineStep, say: Callable[[str], None]) -> dict[str, Any]:
    """All the ways to generate."""
    prompts = read_prompts()
    limits = engine_limits(step.model, max_new_tokens=len(prompts[0].tokens))
    checker = Checker(step, say)
    checker.check(prompts, limits)
    # Chunks of one block beside the generation of others.
    checker.check(prompts, replace(limits, max_num_tokens=48, max_batch_size=3))
    # Enough sequences that generation steps are split.
    short = [Prompt(p.ids, p.best[:24]) for p in prompts] * 3
    checker.check(short, replace(limits, max_new_tokens=24))
    assert step.graphs.counters.fallback == 0, step.graphs.counters
    assert step.ladder.steps[step.engine.manifest.mode, "graph"] > 0, step.ladder
    if step.engine.manifest.mode == "weave":
        cuts = checker.cuts
        assert min(cuts.inside_chunk, cuts.generation, cuts.mixed) > 0, cuts
        assert step.ladder.steps["weave", "eager"] > 0
        counters = plugin_library().counters()
        assert counters["overlapped"] > 0
        assert counters["captured"] > 0
    return checker.finish() | step.ladder.document()


def check_damage(folder: Path, comm: CommBackend) -> None:
    """One rank's damaged engine is every rank's error."""
    if comm.rank == comm.size - 1:
        data = bytearray(plan_file(folder, comm.rank).read_bytes())
        data[len(data) // 2] ^= 0xFF
        plan_file(folder, comm.rank).write_bytes(data)
    comm.barrier()
    with pytest.raises(UserError, match=f"rank {comm.size - 1}.*plan_sha256" if comm.size > 1 else "plan_sha256"):
        Engine.load(folder, comm)


def main(name: str, folder: Path) -> None:
    """Run a variant on this rank; raises where something is wrong."""
    launcher = read_environment().launcher
    comm: CommBackend = SingleComm() if launcher is None or launcher.size == 1 else MpiComm()
    say = progress(comm)
    use_device_of_rank(comm.rank)
    register_decoder_plugins(comm.size)
    folder.mkdir(parents=True, exist_ok=True)

    variant = VARIANTS[name]
    engine, model = load(variant, folder, comm)
    say("built and loaded")
    wanted = variant.mode if comm.size > 1 else "stock"
    assert engine.tensorrt_engine.num_optimization_profiles == 1 + variant.multiple_profiles
    assert engine.manifest.mode == wanted, f"{engine.manifest.mode}, wanted {wanted}: {model.refused}"
    limits = engine_limits(model, max_new_tokens=64)
    with engine_step(engine, model, limits, fill=0xFF) as step:
        say(json.dumps({"variant": name, "ranks": comm.size} | run(step, say)))
    say("closed")
    check_damage(folder / "engine", comm)
    say(f"{comm.size} ranks agree with the interpreter")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
