"""Creators and layers of TensorRT-LLM's own plugins: fields, inputs, outputs, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.attention_roles import attention_inputs
from trtllm_tokenweave.recorder import NetworkError, RecordedNetwork, TensorDesc
from trtllm_tokenweave.recorder.plugin import FieldValue, PluginKey
from trtllm_tokenweave.recorder.trtllm_plugins import (
    ALL_GATHER,
    ALL_REDUCE,
    GEMM,
    GPT_ATTENTION,
    MIXTURE_OF_EXPERTS,
    SPECS,
    AllReduceFusionOp,
    AllReduceStrategy,
    all_reduce_inputs,
)
from trtllm_tokenweave.trt import create_plugin

F, H, B, I32, I64 = trt.float32, trt.float16, trt.bfloat16, trt.int32, trt.int64
Desc = tuple[Any, tuple[int, ...]]


def outputs(key: PluginKey, fields: dict[str, FieldValue], inputs: list[Desc]) -> list[Desc]:
    """Dtypes and shapes that a layer puts out."""
    net = RecordedNetwork()
    tensors = [net.add_input(f"x{i}", dtype, shape) for i, (dtype, shape) in enumerate(inputs)]
    layer = net.add_plugin_v2(tensors, create_plugin(net, key, "plugin", fields))
    return [(t.dtype, t.shape) for t in layer.outputs]


def all_reduce_fields(**changes: FieldValue) -> dict[str, FieldValue]:
    fields: dict[str, FieldValue] = {
        "group": np.arange(4, dtype=np.int32),
        "type_id": B.value,
        "strategy": 0,
        "fusion_op": 0,
        "eps": 1e-5,
        "affine": 0,
        "bias": 0,
        "scale": 0,
    }
    return fields | changes


def test_every_plugin_is_a_v2_plugin_under_tensorrt_llms_names() -> None:
    assert {s.key for s in SPECS} == {ALL_REDUCE, ALL_GATHER, GEMM, GPT_ATTENTION, MIXTURE_OF_EXPERTS}
    for spec in SPECS:
        assert spec.v2
        assert spec.key[1:] == ("1", "tensorrt_llm")
        assert trt.get_plugin_registry().get_creator(*spec.key) is not None


def test_plain_all_reduce() -> None:
    assert outputs(ALL_REDUCE, all_reduce_fields(), [(B, (-1, 8))]) == [(B, (-1, 8))]
    workspace = all_reduce_fields(strategy=int(AllReduceStrategy.AUTO))
    assert outputs(ALL_REDUCE, workspace, [(B, (-1, 8)), (I64, (31,))]) == [(B, (-1, 8))]


def test_a_marked_plain_all_reduce_still_has_one_input() -> None:
    """TensorRT-LLM sets affine on attention's plain all-reduce, whose norm weight is no input."""
    assert all_reduce_inputs(all_reduce_fields(affine=1)) == ("input",)


@pytest.mark.parametrize(
    ("op", "flags", "names"),
    [
        ("RESIDUAL_RMS_NORM", {"affine": 1}, ["residual", "norm_weight"]),
        ("RESIDUAL_RMS_NORM", {"affine": 1, "bias": 1}, ["bias", "residual", "norm_weight"]),
        ("LAST_PROCESS_FOR_UB", {}, ["residual"]),
        ("RESIDUAL_RMS_PREPOST_NORM", {"affine": 1}, ["residual", "norm_weight", "norm_pre_residual_weight"]),
        ("RESIDUAL_RMS_NORM_QUANT_FP8", {"affine": 1, "scale": 1}, ["residual", "norm_weight", "scale"]),
    ],
)
def test_fused_all_reduce(op: str, flags: dict[str, int], names: list[str]) -> None:
    fields = all_reduce_fields(fusion_op=int(AllReduceFusionOp[op]), **flags)
    assert all_reduce_inputs(fields) == ("input", *names)
    shapes: dict[str, Desc] = {"residual": (B, (-1, 8)), "scale": (F, (1,))}
    inputs = [(B, (-1, 8)), *(shapes.get(n, (B, (8,))) for n in names)]
    first = trt.DataType.FP8 if "QUANT" in op else B
    assert outputs(ALL_REDUCE, fields, inputs) == [(first, (-1, 8)), (B, (-1, 8))]
    with pytest.raises(NetworkError, match="expected input"):
        outputs(ALL_REDUCE, fields, inputs[:-1])


@pytest.mark.parametrize(
    ("changes", "inputs", "message"),
    [
        ({"type_id": H.value}, [(B, (-1, 8))], "is not type_id HALF"),
        ({"strategy": 3}, [(B, (-1, 8)), (I32, (31,))], "expected INT64"),
        ({"strategy": 77}, [(B, (-1, 8))], "77 is not a valid"),
        ({"fusion_op": 7}, [(B, (-1, 8))], "7 is not a valid"),
        ({"fusion_op": 1, "affine": 1}, [(B, (-1, 8)), (B, (-1, 9)), (B, (8,))], "residual is BF16"),
        ({"fusion_op": 1, "affine": 1}, [(B, (-1, 8)), (B, (-1, 8)), (B, (9,))], "norm_weight is BF16"),
        ({"fusion_op": 1, "affine": 1}, [(B, (-1, 8)), (F, (-1, 8)), (B, (8,))], "residual is FLOAT"),
    ],
)
def test_refused_all_reduce(changes: dict[str, FieldValue], inputs: list[Desc], message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        outputs(ALL_REDUCE, all_reduce_fields(**changes), inputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type_id": I32.value}, "is not one of"),
        ({"affine": 2}, r"outside 0\.\.1"),
        ({"group": np.array([-1], np.int32)}, "outside 0"),
        ({"eps": np.array([1.0, 2.0])}, "has 2 values, expected 1"),
    ],
)
def test_refused_fields(changes: dict[str, FieldValue], message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        create_plugin(RecordedNetwork(), ALL_REDUCE, "ar", all_reduce_fields(**changes))


def test_missing_unknown_and_mistyped_fields() -> None:
    fields = all_reduce_fields()
    del fields["strategy"]
    with pytest.raises(NetworkError, match="field 'strategy' is missing"):
        create_plugin(RecordedNetwork(), ALL_REDUCE, "ar", fields)
    creator = trt.get_plugin_registry().get_creator(*ALL_GATHER)
    assert creator is not None
    group = trt.PluginField("group", np.array([0], np.int32), trt.PluginFieldType.INT32)
    kind = trt.PluginField("type_id", np.array([0], np.int32), trt.PluginFieldType.INT32)
    with pytest.raises(NetworkError, match="unknown field 'extra'"):
        creator.create_plugin("ag", [group, kind, trt.PluginField("extra", b"", trt.PluginFieldType.CHAR)])
    with pytest.raises(NetworkError, match="has type INT8, expected INT32"):
        creator.create_plugin("ag", [trt.PluginField("group", np.array([0]), trt.PluginFieldType.INT8), kind])


def test_all_reduce_takes_the_fields_of_other_releases() -> None:
    """Some releases also advertise ``config`` and ``counter``."""
    creator = trt.get_plugin_registry().get_creator(*ALL_REDUCE)
    assert creator is not None
    types = {f.name: f.type for f in creator.spec.fields}
    given = [trt.PluginField(n, v, types[n]) for n, v in all_reduce_fields().items()]
    counter = trt.PluginField("counter", np.int32(3), trt.PluginFieldType.INT32)
    assert creator.create_plugin("ar", [*given, counter]).fields["counter"] == 3


def test_v2_plugins_are_not_added_as_v3() -> None:
    net = RecordedNetwork()
    plugin = create_plugin(net, ALL_REDUCE, "ar", all_reduce_fields())
    with pytest.raises(NetworkError, match="is a V2 plugin"):
        net.add_plugin_v3([net.add_input("x", B, (-1, 8))], [], plugin)


def test_registry_refuses_a_second_plugin_of_the_same_name() -> None:
    registry = trt.PluginRegistry()
    registry.register(SPECS[0])
    with pytest.raises(NetworkError, match="registered already"):
        registry.register(SPECS[0])
    assert registry.get_creator("AllReduce", "2", "tensorrt_llm") is None
    assert [c.name for c in registry.all_creators] == ["AllReduce"]


def test_all_gather_multiplies_the_rows() -> None:
    fields: dict[str, FieldValue] = {"group": np.arange(4, dtype=np.int32), "type_id": F.value}
    assert outputs(ALL_GATHER, fields, [(F, (-1, 8))]) == [(F, (-1, 8))]
    assert outputs(ALL_GATHER, fields, [(F, (3, 8))]) == [(F, (12, 8))]
    with pytest.raises(NetworkError, match="is not type_id"):
        outputs(ALL_GATHER, fields, [(H, (3, 8))])


def gemm_fields(**changes: FieldValue) -> dict[str, FieldValue]:
    fields: dict[str, FieldValue] = {"transa": 0, "transb": 1, "pad_lda": 0, "pad_ldb": 0, "type_id": H.value}
    return fields | {"use_fp8": 0, "alpha": 1.0} | changes


def test_gemm() -> None:
    assert outputs(GEMM, gemm_fields(), [(H, (-1, 8)), (H, (5, 8))]) == [(H, (-1, 5))]
    assert outputs(GEMM, gemm_fields(transb=0), [(H, (-1, 8)), (H, (8, 5))]) == [(H, (-1, 5))]
    fp8 = trt.DataType.FP8
    assert outputs(GEMM, gemm_fields(use_fp8=1), [(fp8, (-1, 8)), (fp8, (5, 8))]) == [(H, (-1, 5))]


@pytest.mark.parametrize(
    ("changes", "inputs", "message"),
    [
        ({}, [(H, (-1, 8))], "has 1 inputs"),
        ({}, [(H, (-1, 8)), (H, (8, 5))], "inner dimensions differ: 8 and 5"),
        ({}, [(H, (-1, 8)), (F, (5, 8))], "expected HALF"),
        ({"transa": 1}, [(H, (-1, 8)), (H, (5, 8))], "transa"),
        ({"pad_lda": 8}, [(H, (-1, 8)), (H, (5, 8))], "padded"),
        ({}, [(H, (-1, 8)), (H, (1, 5, 8))], "ranks 2 and 3"),
    ],
)
def test_refused_gemm(changes: dict[str, FieldValue], inputs: list[Desc], message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        outputs(GEMM, gemm_fields(**changes), inputs)


def moe_fields(**changes: FieldValue) -> dict[str, FieldValue]:
    spec = next(s for s in SPECS if s.key == MIXTURE_OF_EXPERTS)
    fields: dict[str, FieldValue] = {f.name: 0 for f in spec.fields}
    fields |= {"number_of_experts": 4, "experts_per_token": 2, "expert_hidden_size": 8, "expert_inter_size": 6}
    fields |= {"activation_type": 3, "use_final_scales": 1, "tp_size": 1, "ep_size": 1, "group_size": -1}
    return fields | {"type_id": B.value, "weight_type_id": B.value, "output_type_id": B.value} | changes


MOE_INPUTS: list[Desc] = [(B, (-1, 8)), (B, (4, 12, 8)), (B, (4, 8, 6)), (I32, (-1, 2)), (F, (-1, 2))]


def test_mixture_of_experts() -> None:
    assert outputs(MIXTURE_OF_EXPERTS, moe_fields(), MOE_INPUTS) == [(B, (-1, 8))]
    assert outputs(MIXTURE_OF_EXPERTS, moe_fields(use_final_scales=0), MOE_INPUTS[:4]) == [(B, (-1, 8))]
    assert outputs(MIXTURE_OF_EXPERTS, moe_fields(output_type_id=F.value), MOE_INPUTS) == [(F, (-1, 8))]
    ungated = [MOE_INPUTS[0], (B, (4, 6, 8)), *MOE_INPUTS[2:]]
    assert outputs(MIXTURE_OF_EXPERTS, moe_fields(activation_type=1), ungated) == [(B, (-1, 8))]


@pytest.mark.parametrize(
    ("changes", "place", "desc", "message"),
    [
        ({"quant_mode": 1}, 0, MOE_INPUTS[0], "quant_mode 1 is not recorded"),
        ({"side_stream_id": 1}, 0, MOE_INPUTS[0], "side_stream_id 1"),
        ({"experts_per_token": 5}, 0, MOE_INPUTS[0], "experts_per_token 5"),
        ({"use_bias": 1}, 0, MOE_INPUTS[0], "expected 7"),
        ({}, 0, (B, (-1, 9)), "input is"),
        ({}, 1, (B, (4, 6, 8)), "fc is"),
        ({}, 2, (B, (4, 6, 8)), "proj is"),
        ({}, 3, (I64, (-1, 2)), "token_selected_experts is"),
        ({}, 4, (B, (-1, 2)), "token_final_scales is"),
    ],
)
def test_refused_experts(changes: dict[str, FieldValue], place: int, desc: Desc, message: str) -> None:
    inputs = list(MOE_INPUTS)
    inputs[place] = desc
    with pytest.raises(NetworkError, match=message):
        outputs(MIXTURE_OF_EXPERTS, moe_fields(**changes), inputs)


def attention_fields(**changes: FieldValue) -> dict[str, FieldValue]:
    spec = next(s for s in SPECS if s.key == GPT_ATTENTION)
    fields: dict[str, FieldValue] = {f.name: 0 for f in spec.fields}
    fields |= {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "position_embedding_type": 2, "mask_type": 1}
    fields |= {"paged_kv_cache": 1, "use_cache": 1, "remove_input_padding": 1, "type_id": H.value, "cp_size": 1}
    return fields | {"cp_group": np.array([0], np.int32)} | changes


def attention_descs(fields: dict[str, FieldValue]) -> dict[str, Desc]:
    special: dict[str, Desc] = {
        "qkv": (H, (-1, 64)),
        "rotary_inv_freq": (F, (4,)),
        "rotary_cos_sin": (F, (1, 64)),
        "qkv_bias": (H, (64,)),
        "host_kv_cache_pool_pointers": (I64, (-1, 2)),
        "host_runtime_perf_knobs": (I64, (16,)),
        "host_context_progress": (I64, (1,)),
    }
    return {name: special.get(name, (I32, (-1,))) for name in attention_inputs(fields)}


def test_gpt_attention() -> None:
    fields = attention_fields()
    descs = attention_descs(fields)
    assert len(descs) == 17
    assert outputs(GPT_ATTENTION, fields, list(descs.values())) == [(H, (-1, 32))]
    biased = attention_fields(qkv_bias_enabled=1)
    assert outputs(GPT_ATTENTION, biased, list(attention_descs(biased).values())) == [(H, (-1, 32))]
    assert len(attention_descs(biased)) == 18


@pytest.mark.parametrize(
    ("changes", "name", "desc", "message"),
    [
        ({"paged_kv_cache": 0}, None, None, "only the paged KV cache"),
        ({"fuse_fp4_quant": 1}, None, None, "FP4"),
        ({}, "qkv", (H, (-1, 60)), "qkv is HALF"),
        ({}, "qkv", (F, (-1, 64)), "qkv has dtype FLOAT"),
        ({}, "sequence_length", (I64, (-1,)), "sequence_length has dtype INT64"),
        ({}, "host_kv_cache_pool_pointers", (I32, (-1, 2)), "host_kv_cache_pool_pointers has dtype INT32"),
        ({}, "host_request_types", (I64, (-1,)), "host_request_types has dtype INT64"),
        ({}, "rotary_cos_sin", (H, (1, 64)), "rotary_cos_sin has dtype HALF"),
    ],
)
def test_refused_attention(changes: dict[str, FieldValue], name: str | None, desc: Desc | None, message: str) -> None:
    fields = attention_fields(**changes)
    descs = attention_descs(fields)
    if name is not None and desc is not None:
        descs[name] = desc
    with pytest.raises(NetworkError, match=message):
        outputs(GPT_ATTENTION, fields, list(descs.values()))


def test_attention_counts_its_inputs() -> None:
    fields = attention_fields()
    with pytest.raises(NetworkError, match="has 16 inputs, expected 17"):
        outputs(GPT_ATTENTION, fields, list(attention_descs(fields).values())[:-1])


def test_outputs_are_plain_descriptions() -> None:
    spec = next(s for s in SPECS if s.key == ALL_REDUCE)
    assert spec.outputs(all_reduce_fields(), [TensorDesc(B, (2, 8))]) == [TensorDesc(B, (2, 8))]
    assert spec.aliased(all_reduce_fields(), 1) == {}
