from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tensorrt import NetworkDefinitionCreationFlag

from trtllm_tokenweave import recorder
from trtllm_tokenweave.checkpoint.config_files import read_trtllm_config
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.llama.profiles import decoder_profile
from trtllm_tokenweave.mapping import Mapping

from ._strict import Strict, seal
from .functional import DimRange, Tensor
from .models import PretrainedModel
from .network import Network


class _Definition(recorder.RecordedNetwork):
    def get_flag(self, flag: Any) -> bool:
        return bool(flag == NetworkDefinitionCreationFlag.STRONGLY_TYPED)


class _TrtConfig(Strict):
    """TensorRT's ``IBuilderConfig``."""

    def __init__(self) -> None:
        self._double_features: dict[str, bool] = {}
        self.max_aux_streams = -1

    def set_preview_feature(self, feature: str, on: bool) -> None:
        self._double_features[feature] = on

    def get_preview_feature(self, feature: str) -> bool:
        return self._double_features.get(feature, False)


@dataclass
class BuildConfig(Strict):
    opt_num_tokens: int | None = None
    max_beam_width: int = 1
    max_draft_len: int = 0
    _double_others: dict[str, Any] = field(default_factory=dict)


class BuilderConfig(Strict):
    def __init__(self) -> None:
        self._double_config = _TrtConfig()

    @property
    def trt_builder_config(self) -> Any:
        return self._double_config


def _is_building(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        os.environ["IS_BUILDING"] = "1"
        try:
            return function(*args, **kwargs)
        finally:
            del os.environ["IS_BUILDING"]

    return decorated


class Builder(Strict):
    @_is_building
    def build_engine(
        self, network: Network, builder_config: BuilderConfig, managed_weights: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What is "serialised": the network, and what TensorRT would have been told."""
        ranges = {
            name: [vars(p) for p in tensor.profiles] for name, tensor in network._inputs.items() if tensor.profiles
        }
        return {
            "network": network.trt_network,
            "features": builder_config._double_config._double_features,
            "max_aux_streams": builder_config._double_config.max_aux_streams,
            "profiles": [dict(zip(ranges, each, strict=True)) for each in zip(*ranges.values(), strict=True)],
            "unfilled": len(network._unfilled_weights),
            "managed_weights": managed_weights,
        }


def optimize(net: Network) -> None:
    """TensorRT-LLM's own passes: none that changes what this package looks at."""


class _Engine(SimpleNamespace):
    def double_save(self, folder: Path) -> None:
        rank = self.config.mapping._double_rank
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            build_config = {"max_beam_width": self.build_config.max_beam_width, **self.build_config._double_others}
            document = {"version": os.environ["TRTLLM_DOUBLE_VERSION"], "build_config": build_config}
            document["pretrained_config"] = self.config._double_document
            (folder / "config.json").write_text(json.dumps(document))
        if self.engine is not None:
            told = {name: value for name, value in self.engine.items() if name != "network"}
            (folder / f"rank{rank}.engine").touch()
            recorder.save(self.engine["network"], folder / f"network{rank}.json")
            (folder / f"told{rank}.json").write_text(json.dumps({**told, "process": os.getpid()}))


def _build(model: PretrainedModel, build_config: BuildConfig) -> _Engine:
    """``build`` of TensorRT-LLM."""
    config, others = model._double_config, build_config._double_others
    builder, builder_config, network = Builder(), BuilderConfig(), Network(_Definition())
    _forward(model, network, build_config)
    if config.architecture != "DecoderModel":
        optimize(network)
    engine = None if others["dry_run"] else builder.build_engine(network, builder_config, None)
    return _Engine(config=config, build_config=build_config, engine=engine)


def _forward(model: PretrainedModel, network: Network, build_config: BuildConfig) -> None:
    """Inputs with their profiles, and all layers."""
    config, others = model._double_config, build_config._double_others
    tp_size = config.mapping.tp_size
    mapping = Mapping(tp_size, config.mapping._double_rank % tp_size, tp_size)
    options = NetworkOptions(
        max_batch_size=others["max_batch_size"],
        max_num_tokens=others["max_num_tokens"],
        max_seq_len=others["max_seq_len"],
        max_beam_width=build_config.max_beam_width,
        reduce_fusion=others["reduce_fusion"] == "enable",
        all_reduce_strategy="AUTO",
        residual_multiplier=1.0,
    )
    assert model._double_folder is not None
    path = Path(model._double_folder) / "model.json"
    definition = network.trt_network
    build_llama(definition, read_trtllm_config(path).model, mapping, None, options)
    most, sequences = options.max_num_tokens, options.max_batch_size * options.max_beam_width
    optimum = min(build_config.opt_num_tokens or sequences, most)
    cuts = [n for n in (64, 128, 256, 512, 1024) if n < most] if others["multiple_profiles"] == "enable" else []
    tokens = [(a, b, b) for a, b in zip([1, *cuts], [*cuts, most], strict=True)] if cuts else [(1, optimum, most)]
    ranges = decoder_profile(definition, options, optimum)
    for tensor in (definition.get_input(i) for i in range(definition.num_inputs)):
        names = [tensor.get_dimension_name(i) for i in range(len(tensor.shape))]
        given = ranges.get(tensor.name)
        shape = [(d, d, d) for d in tensor.shape]
        if given is not None:
            shape = list(zip(given.minimum, given.optimum, given.maximum, strict=True))
        counts = [name in ("num_tokens", "position_ids_num_tokens_range") for name in names]
        profiles = [[t if c else d for d, c in zip(shape, counts, strict=True)] for t in tokens]
        network._inputs[tensor.name] = Tensor([DimRange(p, names) for p in profiles])
    if others["fast_build"]:  # weights of a fixed shape, which have no ranges
        network._inputs = {"managed_constant_0": Tensor([]), **network._inputs}
        network._unfilled_weights["managed_constant_0"] = (None, None)
    if others["max_prompt_embedding_table_size"]:
        network._inputs["tasks"] = Tensor([DimRange([t], ["input_len_task"]) for t in tokens])
    if others["remove_input_padding"] == "disable":
        for tensor in network._inputs.values():
            for each in tensor.profiles:
                each.dimension_names = [f"padded_{name}" for name in each.dimension_names]
    network._double_complete()


seal(__name__)
