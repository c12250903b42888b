"""Writes gpt_attention.json: fields and inputs of the attention layers of this package's networks.

The reference plugin is tested against the same file. Usage:

    PYTHONPATH=tests python -m vectors.make_gpt_attention_vectors            write it
    PYTHONPATH=tests python -m vectors.make_gpt_attention_vectors --check    exit 1 when it is stale
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from support.vectors import write_or_check

from trtllm_tokenweave import trt
from trtllm_tokenweave.attention_roles import attention_inputs
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.recorder import RecordedNetwork
from trtllm_tokenweave.recorder.plugin import Fields
from trtllm_tokenweave.recorder.trtllm_plugins import GPT_ATTENTION

PATH = Path(__file__).with_name("gpt_attention.json")
LAYER = 2


def layer_fields() -> Fields:
    """Fields of layer LAYER of rank 3 of 8 of a Llama 3.3 70B: 8 heads, 1 KV head, RoPE with llama3 scaling."""
    config = preset("llama-3.3-70b").model_copy(update={"num_hidden_layers": LAYER + 1})
    network = RecordedNetwork("attention")
    build_llama(network, config, Mapping(world_size=8, rank=3, tp_size=8), None, NetworkOptions())
    layers = (trt.get_layer(network, i) for i in range(network.num_layers))
    plugins = (trt.plugin_of(network, layer) for layer, kind in layers if kind == "PLUGIN_V2")
    return [fields for key, fields in plugins if key == GPT_ATTENTION][LAYER]


def text() -> str:
    """The document as it stands in the file: one field a line."""
    fields = layer_fields()
    described: list[dict[str, Any]] = [
        {"name": field.name, "type": field.type.value, "values": np.ravel(field.data).tolist()}
        for field in trt.plugin_fields(GPT_ATTENTION, fields)
    ]
    lines = ",\n".join(f"  {json.dumps(field)}" for field in described)
    inputs = {
        "inputs": attention_inputs(fields),
        "inputs_without_rope": attention_inputs({**fields, "position_embedding_type": 0}),
    }
    lists = "".join(f',\n "{name}": {json.dumps(names)}' for name, names in inputs.items())
    about = "an attention layer of this package's networks; written by make_gpt_attention_vectors.py"
    return f'{{\n "about": "{about}",\n "fields": [\n{lines}\n ]{lists}\n}}\n'


if __name__ == "__main__":
    sys.exit(write_or_check(PATH, text()))
