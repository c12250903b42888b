"""A decoder as a TensorRT engine: what it is built from, the build, and what the engine's folder says of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from collections.abc import Mapping as Dict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtllm_tokenweave.builder import BuilderSettings, Plan, build_on_all_ranks, opt_num_tokens
from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.device import current_gpu, use_device_of_rank
from trtllm_tokenweave.engine import EngineConfig, config_file
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.llama.profiles import decoder_profile
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.passes import WeaveMode, WeaveOptions, WeavePlan, WeaveResult, weave
from trtllm_tokenweave.plugin_library import plugin_library, register_reference
from trtllm_tokenweave.recorder.trtllm_plugins import ALL_GATHER, ALL_REDUCE, GPT_ATTENTION
from trtllm_tokenweave.table import TuningTable
from trtllm_tokenweave.table.files import table_error
from trtllm_tokenweave.tensorrt_module import tensorrt
from trtllm_tokenweave.waves import table_key

#: Folder of the tokenizer inside the engines' folder.
TOKENIZER = "tokenizer"

_Lines = Annotated[tuple[str, ...], Field(strict=False)]


class DecoderModel(BaseModel):
    """`EngineConfig.model` of a decoder: what it takes to run the engines of a folder.

    Attributes:
        config: The whole model.
        source: Where its weights come from.
        max_batch_size: Most sequences of a step.
        max_num_tokens: Most tokens of a step.
        max_seq_len: Longest sequence, prompt and generated tokens.
        tokens_per_block: Tokens of a block of the KV cache.
        wanted: What the build asked for.
        refused: Why the engines are less than that, a reason each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    config: ModelConfig
    source: str
    max_batch_size: Annotated[int, Field(ge=1)]
    max_num_tokens: Annotated[int, Field(ge=1)]
    max_seq_len: Annotated[int, Field(ge=1)]
    tokens_per_block: Annotated[int, Field(ge=1)]
    wanted: WeaveMode
    refused: _Lines = ()

    @classmethod
    def of_config(cls, config: EngineConfig, folder: Path) -> DecoderModel:
        """What the configuration of an engine's folder says.

        Raises:
            UserError: it does not say it: the engine was built by something else.
        """
        where = f"{config_file(folder)}: model"
        if not config.model:
            raise UserError("is empty", where=where, fix="build the engine with trtllm-tokenweave build")
        try:
            return cls.model_validate_json(json.dumps(config.model))
        except ValidationError as error:
            raise table_error(error, where) from error


@dataclass(frozen=True)
class DecoderBuild:
    """What one rank's engine is built from.

    Attributes:
        config: The whole model.
        weights: This rank's tensors.
        options: Limits and switches of the network.
        weave: Options of the pass; its mapping is the rank's.
        mode: "weave" splits and fuses, "fuse" only fuses, "stock" leaves the network as it is.
        timing_cache: See `BuilderSettings`.
        progress: Is told what the builder does.
        multiple_profiles: A second optimisation profile, for steps of generation rows alone.
    """

    config: ModelConfig
    weights: Dict[str, NDArray[Any]]
    options: NetworkOptions
    weave: WeaveOptions
    mode: WeaveMode
    timing_cache: Path
    progress: Callable[[str], None] | None = None
    multiple_profiles: bool = False

    def make_network(self, network: Any) -> WeaveResult:
        """Fill an empty network; returns what the weave did."""
        build_llama(network, self.config, self.weave.mapping, self.weights, self.options)
        if self.mode == "stock":
            return WeaveResult(WeavePlan(self.weave, (), (), None))
        return weave(network, replace(self.weave, split=self.mode == "weave"))

    def settings(self) -> BuilderSettings:
        """Settings of the builder: profiles, with the same optima for all modes."""
        sizes = profile_sizes(self.options, self.weave.table, multiple=self.multiple_profiles)
        profiles = (partial(decoder_profile, options=size, opt_num_tokens=optimum) for size, optimum in sizes)
        return BuilderSettings(tuple(profiles), timing_cache=self.timing_cache, progress=self.progress)


def profile_sizes(options: NetworkOptions, table: TuningTable, *, multiple: bool) -> list[tuple[NetworkOptions, int]]:
    """Limits of each optimisation profile and the tokens that it is optimised for; the first holds all steps.

    Its optimum is a large step, for which TensorRT picks kernels that are slow for a few rows. With ``multiple`` steps
    of at most ``max_batch_size`` tokens have kernels of their own, where the table does not split them: no half may be
    without rows at one optimum of its profile, and have some in a step of it.
    """
    optimum = opt_num_tokens(table, options.max_num_tokens, options.max_batch_size)
    sizes = [(options, optimum)]
    few = min(options.max_batch_size, table.min_tokens - 1)
    if multiple and 0 < few < optimum:
        sizes.append((replace(options, max_num_tokens=few), few))
    return sizes


def register_decoder_plugins(tp_size: int) -> None:
    """Register what the networks of decoders are made of: our plugins, and those that stand for TensorRT-LLM's.

    Raises:
        UserError: a library is missing, or lacks one of them.
    """
    plugin_library()
    register_reference(GPT_ATTENTION[0], *((ALL_REDUCE[0], ALL_GATHER[0]) if tp_size > 1 else ()))


def prepare_rank(comm: CommBackend) -> None:
    """Let this rank have its GPU, TensorRT and the plugins of decoders.

    Raises:
        UserError: the first of them that it lacks.
    """
    current_gpu()
    use_device_of_rank(comm.rank)
    tensorrt()
    register_decoder_plugins(comm.size)


def build_decoder(build: DecoderBuild, comm: CommBackend) -> Plan:
    """Build this rank's engine; collective over ``comm``.

    Raises:
        UserError, TokenWeaveError: on all ranks, see `builder.build_on_all_ranks`.
    """
    return build_on_all_ranks(comm, build.make_network, build.settings())


def describe(build: DecoderBuild, plan: Plan, source: str) -> DecoderModel:
    """What the engine's folder is to say."""
    options = build.options
    counts = Counter(refusal.reason for refusal in plan.result.plan.refused)
    return DecoderModel(
        config=build.config,
        source=source,
        max_batch_size=options.max_batch_size,
        max_num_tokens=options.max_num_tokens,
        max_seq_len=options.max_seq_len,
        tokens_per_block=options.tokens_per_block,
        wanted=build.mode,
        refused=tuple(reason if count == 1 else f"{reason} ({count} times)" for reason, count in counts.items()),
    )


def check_attention(config: ModelConfig) -> None:
    """Refuse models that the reference attention does not serve, before anything is built.

    Raises:
        UserError: says what is served.
    """
    if config.dtype == "float32":
        raise UserError("attention has no float32", where="dtype", fix="choose float16 or bfloat16")
    if config.head_size not in (64, 128):
        raise UserError(f"head_size {config.head_size} is not served", where="model", fix="64 and 128 are")


def check_table(table: TuningTable, config: ModelConfig, tp_size: int, where: str) -> None:
    """Refuse a table that was made for another model or number of ranks.

    Raises:
        UserError: names the field.
    """
    table.check_key(table_key(config, tp_size).model_dump(exclude={"gpu"}), where=where)
