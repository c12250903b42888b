"""Values of a wrong kind: each constructor names the field, the value and what it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.stack import Stack, options, table

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.kv_cache import KvCacheConfig
from trtllm_tokenweave.llama import NetworkOptions
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.passes import weave
from trtllm_tokenweave.predict import Workload
from trtllm_tokenweave.recorder import save
from trtllm_tokenweave.runner import GenerationLimits
from trtllm_tokenweave.table import LaunchConfig
from trtllm_tokenweave.waves import Tile, WaveModel, default_table

CACHE: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_size": 64, "dtype": np.dtype("int8")}
WHOLE, NUMBER, SWITCH = "a whole number", "a number", "True or False"


@pytest.mark.parametrize(
    ("make", "values", "where", "said", "wanted"),
    [
        (Mapping, {"world_size": "8", "tp_size": "8"}, "mapping.world_size", "'8' is a str", WHOLE),
        (Mapping, {"world_size": 8, "tp_size": 8, "rank": None}, "mapping.rank", "is None", WHOLE),
        (Mapping, {"tp_size": True}, "mapping.tp_size", "True is a bool", WHOLE),
        (Mapping, {"rank": 0.0}, "mapping.rank", "0.0 is a float", WHOLE),
        (options, {"table": None}, "table", "is None", "a TuningTable"),
        (options, {"table": "table.json"}, "table", "'table.json' is a str", "a TuningTable"),
        (options, {"max_num_tokens": "256"}, "max_num_tokens", "'256' is a str", WHOLE),
        (options, {"max_batch_size": None}, "max_batch_size", "is None", WHOLE),
        (options, {"max_beam_width": [1]}, "max_beam_width", "[1] is a list", WHOLE),
        (options, {"max_draft_len": "0"}, "max_draft_len", "'0' is a str", WHOLE),
        (options, {"split": 1}, "split", "1 is an int", SWITCH),
        (options, {"prefix_input": 7}, "prefix_input", "7 is an int", "a string or None"),
        (NetworkOptions, {"max_seq_len": "x" * 99}, "option max_seq_len", f"'{'x' * 59}... is a str", WHOLE),
        (NetworkOptions, {"reduce_fusion": "yes"}, "option reduce_fusion", "'yes' is a str", SWITCH),
        (
            NetworkOptions,
            {"residual_multiplier": "1.0"},
            "option residual_multiplier",
            "'1.0' is a str",
            "a number or None",
        ),
        (GenerationLimits, {"max_new_tokens": 1.5}, "limits: max_new_tokens", "1.5 is a float", WHOLE),
        (KvCacheConfig, {**CACHE, "num_blocks": "9"}, "KV cache: num_blocks", "'9' is a str", WHOLE),
        (Workload, {"config": "llama-3.3-70b", "tp_size": 8}, "config", "'llama-3.3-70b' is a str", "a ModelConfig"),
        (Workload, {"config": preset("llama-3.3-70b"), "tp_size": "8"}, "tp_size", "'8' is a str", WHOLE),
        (preset, {"name": []}, "preset", "[] is a list", "a string"),
        (default_table, {"config": preset("llama-2-7b"), "tp_size": "8"}, "mapping.world_size", "'8' is a str", WHOLE),
        (save, {"network": None, "path": "a.json"}, "network", "is None", "a RecordedNetwork"),
        (Tile, {"m": "128"}, "tile.m", "'128' is a str", WHOLE),
        (WaveModel, {"attention": 8}, "attention", "8 is an int", "a LaunchConfig or None"),
        (WaveModel, {"mlp": LaunchConfig(), "sms": "132"}, "sms", "'132' is a str", WHOLE),
    ],
)
def test_values_of_a_wrong_kind(make: Any, values: dict[str, Any], where: str, said: str, wanted: str) -> None:
    with pytest.raises(UserError) as raised:
        make(**values)
    assert str(raised.value) == f"{where}: {said}, not {wanted}. Fix: give {wanted}"


def test_numbers_of_numpy_are_numbers() -> None:
    assert Mapping(np.int64(2), np.int32(1), np.int64(2)).tp_group == (0, 1)  # type: ignore[arg-type]
    assert NetworkOptions(residual_multiplier=1).residual_multiplier == 1


def test_a_mapping_that_is_none() -> None:
    with pytest.raises(UserError, match=r"^mapping: 2 is an int, not a Mapping\. Fix: give a Mapping$"):
        type(options())(2, table(), 8, 256)  # type: ignore[arg-type]


def test_a_weave_without_options() -> None:
    network = Stack().build()
    for given in (None, table()):
        with pytest.raises(UserError, match=r"^options: .*is .*, not WeaveOptions\. Fix: give WeaveOptions$"):
            weave(network, given)  # type: ignore[arg-type]
    assert weave(network, options()).mode == "weave"


def test_a_weave_without_a_network() -> None:
    with pytest.raises(
        UserError, match=r"^network: a NoneType is no network\. Fix: give TensorRT's INetworkDefinition"
    ):
        weave(None, options())


@pytest.mark.parametrize("values", [{"max_batch_size": 0}, {"max_num_tokens": -1}, {"max_num_tokens": 2**20 + 1}])
def test_limits_that_no_engine_has(values: dict[str, int]) -> None:
    ((name, value),) = values.items()
    with pytest.raises(UserError, match=rf"^{name}: {value} is outside of 1\.\.1048576\. Fix: give the size"):
        options(**values)
