"""TokenWeaveAttention and TokenWeaveBatchSplit of the built library in TensorRT's own registry, without a GPU.

The library is the one that the package finds, see trtllm_tokenweave.libraries. Where the reference plugins are built,
too, their GPTAttention is the inner plugin.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.library_tests import run_alone

from trtllm_tokenweave import recorder, trt
from trtllm_tokenweave.attention_roles import attention_roles
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.libraries import find_library
from trtllm_tokenweave.plugin_library import plugin_library, register
from trtllm_tokenweave.plugin_specs import ATTENTION, BATCH_SPLIT, NAMESPACE, SPECS, VERSION
from trtllm_tokenweave.recorder.packed_fields import pack_fields
from trtllm_tokenweave.recorder.plugin import FieldValue
from trtllm_tokenweave.recorder.trtllm_plugins import GPT_ATTENTION
from trtllm_tokenweave.recorder.trtllm_plugins import SPECS as TRTLLM_SPECS
from trtllm_tokenweave.tensorrt_module import tensorrt

ROOT = Path(__file__).resolve().parents[2]
HEADS, KV_HEADS, HEAD_SIZE, LENGTH = 8, 2, 64, 512


def inner_fields() -> dict[str, FieldValue]:
    """Every field of a GPTAttention layer as Llama has it."""
    (spec,) = [spec for spec in TRTLLM_SPECS if spec.key == GPT_ATTENTION]
    fields: dict[str, FieldValue] = {field.name: 0 for field in spec.fields}
    ones = """
        q_scaling rotary_embedding_scale rotary_embedding_short_m_scale rotary_embedding_long_m_scale unidirectional
        mask_type remove_input_padding use_cache paged_kv_cache use_paged_context_fmha context_fmha_type tp_size cp_size
        spec_decoding_max_generation_length
    """
    fields |= dict.fromkeys(ones.split(), 1)
    fields |= {"layer_idx": 5, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "num_kv_heads_origin": KV_HEADS}
    fields |= {"head_size": HEAD_SIZE, "position_embedding_type": 2, "rotary_embedding_dim": HEAD_SIZE}
    fields |= {"rotary_embedding_base": 10000.0, "rotary_embedding_max_positions": LENGTH, "vision_start": -1}
    fields |= {"rotary_embedding_original_max_positions": LENGTH, "vision_length": -1, "max_context_length": LENGTH}
    return fields | {"tokens_per_block": 32, "type_id": recorder.DataType.BF16.value, "cp_group": np.array([0])}


def wrapper_fields() -> dict[str, FieldValue]:
    fields = inner_fields()
    inner: dict[str, FieldValue] = dict(
        zip(("inner_name", "inner_version", "inner_namespace"), (part.encode() for part in GPT_ATTENTION), strict=True)
    )
    return {
        "half": 1,
        "num_heads": HEADS,
        "head_size": HEAD_SIZE,
        **inner,
        "inner": pack_fields(trt.plugin_fields(GPT_ATTENTION, fields)),
        "roles": np.asarray(attention_roles(fields), np.int32),
    }


# ---- in a process of its own: TensorRT's real registry


def collection(module: Any, given: list[recorder.PluginField]) -> Any:
    """A creator's argument; TensorRT's fields keep the addresses of the data in ``given`` only."""
    return module.PluginFieldCollection(
        [module.PluginField(f.name, f.data, getattr(module.PluginFieldType, f.type.name)) for f in given]
    )


def registry_report() -> dict[str, Any]:
    """Register the library, and ask both creators for plugins; attention without and with its inner creator."""
    try:
        module = tensorrt()
    except UserError as error:
        return {"lacks": str(error)}
    library = plugin_library()
    registry = module.get_plugin_registry()
    creators = {name: registry.get_creator(name, VERSION, NAMESPACE) for name in (ATTENTION, BATCH_SPLIT)}
    report: dict[str, Any] = {
        name: [(field.name, field.type.name) for field in creator.field_names] for name, creator in creators.items()
    }
    build = module.TensorRTPhase.BUILD
    given = trt.plugin_fields((BATCH_SPLIT, VERSION, NAMESPACE), {"max_num_tokens": LENGTH})
    halves = creators[BATCH_SPLIT].create_plugin("split", collection(module, given), build)
    report["outputs"] = halves.get_capability_interface(module.PluginCapabilityType.BUILD).num_outputs

    given = trt.plugin_fields((ATTENTION, VERSION, NAMESPACE), wrapper_fields())
    fields = collection(module, given)
    report["without"] = creators[ATTENTION].create_plugin("layer", fields, build) is None
    report["error"] = library.last_error()
    reference = find_library("tokenweave_reference")
    if reference is None or not reference.is_file():
        return report
    register(reference)
    if registry.get_creator(*GPT_ATTENTION) is None:
        return report
    plugin = creators[ATTENTION].create_plugin("layer", fields, build)
    report["with"] = "" if plugin is not None else library.last_error()
    if plugin is None:
        return report
    report["metadata"] = plugin.get_capability_interface(module.PluginCapabilityType.BUILD).metadata_string
    return report


# ---- the tests


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    library = find_library("tokenweave_trt")
    if library is None or not library.is_file():
        pytest.skip("libtokenweave_trt.so is not built (cmake --build build)")
    answer: dict[str, Any] = json.loads(run_alone(__file__).splitlines()[-1])
    if "lacks" in answer:
        pytest.skip(answer["lacks"])
    return answer


@pytest.mark.parametrize("name", [ATTENTION, BATCH_SPLIT])
def test_creators_have_the_fields_of_the_specs(report: dict[str, Any], name: str) -> None:
    (spec,) = [spec for spec in SPECS if spec.name == name]
    assert report[name] == [[field.name, field.type.name] for field in spec.fields]


def test_a_batch_split_has_two_tensors_for_either_half(report: dict[str, Any]) -> None:
    assert report["outputs"] == 4


def test_attention_without_its_inner_creator_is_refused(report: dict[str, Any]) -> None:
    assert report["without"]
    assert report["error"].startswith(
        "TokenWeaveAttention: layer 'layer': no library has registered plugin 'GPTAttention' version '1' of namespace "
        "'tensorrt_llm'. Fix: load its library first"
    )


def test_attention_with_its_inner_creator_is_made(report: dict[str, Any]) -> None:
    if "with" not in report:
        pytest.skip("the reference plugins have no GPTAttention here (plugins/reference)")
    assert report["with"] == ""
    assert report["metadata"] == "TokenWeaveAttention layer 5 suffix"


if __name__ == "__main__":
    print(json.dumps(registry_report()))
