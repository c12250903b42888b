"""A small random Llama in TensorRT on the ranks that mpirun started; test_small_llama.py starts them.

What the networks differ in must not show in their logits: how they are woven, and what stands before their region.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.progress import progress
from trtllm_tokenweave import trt
from trtllm_tokenweave.checkpoint import RandomCheckpoint
from trtllm_tokenweave.comm import CommBackend, MpiComm
from trtllm_tokenweave.decoder import DecoderBuild, DecoderModel, build_decoder, describe, register_decoder_plugins
from trtllm_tokenweave.device import use_device_of_rank
from trtllm_tokenweave.engine import Engine, save_engine
from trtllm_tokenweave.engine_runner import EngineStep, engine_generator, engine_limits, engine_step
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.passes import WeaveMode, WeaveOptions, WeavePlan, WeaveResult, weave
from trtllm_tokenweave.plugin_library import plugin_library
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableRow, TuningTable
from trtllm_tokenweave.waves import table_key

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    hidden_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_size=64,
    intermediate_size=1024,
    vocab_size=1024,
    max_position_embeddings=512,
)
OPTIONS = NetworkOptions(max_batch_size=32, max_num_tokens=512, max_seq_len=512)
#: Lengths of the prompts of a step: below and at the threshold, cut between and inside of prompts, the largest suffix
#: half, the largest step.
STEPS: tuple[tuple[int, ...], ...] = (
    (3, 8),
    (12,),
    (1,) * 20,
    (40, 24),
    (50, 7, 8),
    (15, 19, 31) * 4,
    (12,) * 32,
    (16,) * 32,
)
#: Largest difference of a row's logits, relative to the largest of them; rows of other prompts differ by 1 and more.
TOLERANCE = 0.05

Array = NDArray[Any]


@dataclass(frozen=True)
class Variant:
    """A network; with ``reduced_embedding`` the region begins at a collective's output, as with parallel embedding."""

    name: str
    mode: WeaveMode = "weave"
    split_attention: bool = True
    reduced_embedding: bool = False


VARIANTS = (
    Variant("fuse", "fuse"),
    Variant("weave"),
    Variant("whole", split_attention=False),
    Variant("reduced_weave", reduced_embedding=True),
    Variant("reduced_whole", split_attention=False, reduced_embedding=True),
)


def table(tp_size: int) -> TuningTable:
    """Splits steps of 12 tokens and more; the suffix half is largest in a step that is not."""
    launch = LaunchConfig(ctas=8)
    rows = (
        TableRow(tokens=Bucket(lo=1, hi=64), mode="weave", attention=launch, mlp=launch),
        TableRow(tokens=Bucket(lo=65, hi=384), mode="weave", split_offset=8, attention=launch, mlp=launch),
        TableRow(tokens=Bucket(lo=385), mode="weave", split_offset=128, attention=launch, mlp=launch),
    )
    return TuningTable(key=table_key(CONFIG, tp_size), granularity=16, min_tokens=12, rows=rows)


@dataclass(frozen=True)
class Build(DecoderBuild):
    """A decoder whose embedding may be summed over the ranks."""

    reduced_embedding: bool = False

    def make_network(self, network: Any) -> WeaveResult:
        """Fill an empty network."""
        build_llama(network, self.config, self.weave.mapping, self.weights, self.options)
        if self.reduced_embedding:
            graph = Graph(network)
            reduce = next(n for n in graph.nodes if n.plugin_name == "AllReduce")
            embedding = next(n for n in graph.nodes if n.name.endswith("vocab_embedding/GATHER_0")).outputs[0]
            assert reduce.plugin_key is not None
            inputs = [graph.tensors[embedding], *(graph.tensors[n] for n in reduce.inputs[1:] if n is not None)]
            layer = trt.add_plugin(network, reduce.plugin_key, "embedding/AllReduce", reduce.fields, inputs)
            trt.redirect(network, graph, embedding, layer.get_output(0), frozenset({"embedding/AllReduce"}))
        if self.mode == "stock":
            return WeaveResult(WeavePlan(self.weave, (), (), None))
        return weave(network, replace(self.weave, split=self.mode == "weave"))


def load(variant: Variant, folder: Path, comm: CommBackend) -> tuple[Engine, DecoderModel]:
    """Build, save, and load from the folder."""
    mapping = Mapping(comm.size, comm.rank, comm.size)
    how = WeaveOptions(
        mapping,
        table(comm.size),
        OPTIONS.max_batch_size,
        OPTIONS.max_num_tokens,
        split_attention=variant.split_attention,
    )
    weights = RandomCheckpoint(CONFIG, seed=1).rank_weights(mapping)
    timings = folder / f"timing{comm.rank}.cache"
    build = Build(CONFIG, weights, OPTIONS, how, variant.mode, timings, reduced_embedding=variant.reduced_embedding)
    plan = build_decoder(build, comm)
    assert plan.result.mode == variant.mode, plan.result
    save_engine(plan, folder / variant.name, comm, describe(build, plan, "random").model_dump(mode="json"))
    engine = Engine.load(folder / variant.name, comm)
    return engine, DecoderModel.of_config(engine.config, folder / variant.name)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Random tokens."""
    random = np.random.default_rng([len(lengths), *lengths])
    return [random.integers(1, CONFIG.vocab_size, length).tolist() for length in lengths]


@dataclass(frozen=True)
class Run:
    """A step of `STEPS`, or chunks of prompts beside generation: of each prompt its tokens and their logits."""

    name: str
    tokens: list[list[int]]
    logits: list[Array]

    def errors(self, stock: Run) -> list[float]:
        """Of each token up to the first that differs, whose logits are still of the same tokens."""
        found = []
        for mine, given, theirs, wanted in zip(self.tokens, self.logits, stock.tokens, stock.logits, strict=True):
            same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine) - 1)
            found += errors(given[: same + 1], wanted[: same + 1]).tolist()
        return found


def runs(step: EngineStep) -> list[Run]:
    """All of `STEPS`, then steps of at most 48 tokens."""
    found = []
    for lengths, max_new_tokens, max_num_tokens in (*((s, 1, 512) for s in STEPS), ((19, 40, 7) * 8, 4, 48)):
        limits = engine_limits(step.model, max_new_tokens=max_new_tokens)
        generator = engine_generator(step, replace(limits, max_num_tokens=max_num_tokens))
        made = generator.generate(prompts(lengths)).generations
        logits = [np.stack(m.logits).astype(np.float32) for m in made]
        found.append(Run(f"{sum(lengths)} tokens in steps of {max_num_tokens}", [m.tokens for m in made], logits))
    return found


def errors(got: Array, want: Array) -> Array:
    """Of each row; NaN is infinitely wrong."""
    found: Array = np.abs(got - want).max(axis=1) / np.abs(want).max(axis=1)
    return np.nan_to_num(found, nan=np.inf)


def main(folder: Path) -> None:
    """Compare all networks with the stock one; raises where one differs."""
    comm = MpiComm()
    say = progress(comm)
    use_device_of_rank(comm.rank)
    register_decoder_plugins(comm.size)
    folder.mkdir(parents=True, exist_ok=True)

    wanted: dict[bool, list[Run]] = {}
    wrong = []
    stock = [Variant("stock", "stock"), Variant("reduced_stock", "stock", reduced_embedding=True)]
    for variant in (*stock, *VARIANTS):
        engine, model = load(variant, folder, comm)
        with engine_step(engine, model, engine_limits(model, max_new_tokens=4), fill=0xFF) as step:
            found = runs(step)
        if variant.mode == "stock":
            wanted[variant.reduced_embedding] = found
            # The check below would see rows of other prompts.
            rows = np.concatenate(found[-1].logits)
            assert errors(rows[4:], rows[:-4]).min() > 2 * TOLERANCE
            continue
        for run, as_stock in zip(found, wanted[variant.reduced_embedding], strict=True):
            differ = run.errors(as_stock)
            assert 2 * len(differ) > sum(len(tokens) for tokens in run.tokens), run.name
            if max(differ) > TOLERANCE:
                wrong.append(f"{variant.name}, {run.name}: {np.round(differ, 2).tolist()}")
        overlapped = plugin_library().counters()["overlapped"]
        assert (overlapped > 0) == (variant.mode == "weave"), overlapped
        plugin_library().reset_counters()
        say(f"{variant.name}: {wrong or 'as stock'}")
    assert not wrong, "\n".join(wrong)
    say(f"{comm.size} ranks agree")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
