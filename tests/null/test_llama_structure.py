"""Layers, names, plugins and constants of the built networks, kind by kind."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from support.models import small as config

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig, MoeConfig
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.recorder import RecordedNetwork

TOP = "LLaMAForCausalLM"
LAYER0 = f"{TOP}/transformer/layers/0"


def mixtral(**changes: Any) -> ModelConfig:
    return config(architecture="MixtralForCausalLM", moe=MoeConfig(num_experts=4, top_k=2), **changes)


def qwen(**changes: Any) -> ModelConfig:
    return config(architecture="Qwen2ForCausalLM", qkv_bias=True, **changes)


def build(model: ModelConfig, tp_size: int = 2, rank: int = 0, **options: Any) -> RecordedNetwork:
    network = RecordedNetwork("test")
    limits = {"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 64}
    build_llama(network, model, Mapping(tp_size, rank, tp_size), None, NetworkOptions(**(limits | options)))
    return network


def named(network: RecordedNetwork, prefix: str) -> list[str]:
    """Names under a module, without its path, leaving out the layers that only work out shapes and constants."""
    graph = Graph(network)
    return [
        node.name.removeprefix(prefix + "/")
        for node in graph.nodes
        if node.name.startswith(prefix + "/")
        and not graph.is_constant(node.outputs[0])
        and not _shape_only(graph, node)
    ]


def _shape_only(graph: Graph, node: Any) -> bool:
    return graph.dtype(node.outputs[0]) == "INT64"


def plugins(network: RecordedNetwork, kind: str) -> list[trt.IPluginV2Layer]:
    return [x for x in network.layers if isinstance(x, trt.IPluginV2Layer) and x.plugin.plugin_type == kind]


def find(network: RecordedNetwork, name: str) -> trt.ILayer:
    return next(x for x in network.layers if x.name == name)


def shape_of(layer: trt.ILayer, index: int = 0) -> tuple[int, ...]:
    tensor = layer.get_output(index)
    assert tensor is not None
    return tensor.shape


NORM = [
    "CAST_0",
    "ELEMENTWISE_POW_0",
    "REDUCE_AVG_0",
    "ELEMENTWISE_SUM_0",
    "UNARY_SQRT_0",
    "ELEMENTWISE_DIV_0",
    "CAST_1",
    "ELEMENTWISE_PROD_0",
]


def under(module: str, names: list[str]) -> list[str]:
    return [f"{module}/{name}" for name in names]


def test_layers_of_a_decoder_layer() -> None:
    network = build(config())
    assert named(network, LAYER0) == [
        *under("input_layernorm", NORM),
        "attention/qkv/MATRIX_MULTIPLY_0",
        "attention/PLUGIN_V2_GPTAttention_0",
        "attention/dense/MATRIX_MULTIPLY_0",
        "attention/dense/PLUGIN_V2_AllReduce_0",
        "ELEMENTWISE_SUM_0",
        *under("post_layernorm", NORM),
        "mlp/fused_fc/MATRIX_MULTIPLY_0",
        "mlp/SLICE_0",
        "mlp/SLICE_1",
        "mlp/SIGMOID_0",
        "mlp/ELEMENTWISE_PROD_0",
        "mlp/ELEMENTWISE_PROD_1",
        "mlp/proj/MATRIX_MULTIPLY_0",
        "mlp/proj/PLUGIN_V2_AllReduce_0",
        "ELEMENTWISE_SUM_1",
    ]


def test_layers_around_the_decoder() -> None:
    network = build(config())
    inside = f"{TOP}/transformer/layers/"
    assert [n for n in named(network, TOP) if not f"{TOP}/{n}".startswith(inside)] == [
        "transformer/vocab_embedding/GATHER_0",
        *under("transformer/ln_f", NORM),
        "ELEMENTWISE_SUB_0",
        "GATHER_2",
        "SHUFFLE_4",
        "SHUFFLE_9",
        "lm_head/MATRIX_MULTIPLY_0",
        "lm_head/PLUGIN_V2_AllGather_0",
        "lm_head/SLICE_0",
        "lm_head/SLICE_1",
        "lm_head/CONCATENATION_4",
        "CAST_0",
    ]
    logits = network.get_output(0)
    assert (network.num_outputs, logits.name, logits.dtype, logits.shape) == (1, "logits", trt.float32, (-1, 50))


def test_every_layer_and_tensor_is_named_once() -> None:
    network = build(config(), reduce_fusion=True)
    assert max(Counter(x.name for x in network.layers).values()) == 1
    assert not any("Unnamed" in x.name for x in network.layers)
    for layer in network.layers:
        for i, tensor in enumerate(layer.outputs):
            assert tensor.name in (f"{layer.name}_output_{i}", "logits")


def test_operand_order_and_shared_cast_of_the_norm() -> None:
    network = build(config())
    graph = Graph(network)
    path = f"{LAYER0}/post_layernorm"
    cast = f"{path}/CAST_0_output_0"
    total = find(network, f"{LAYER0}/ELEMENTWISE_SUM_0")
    first, second = (t.name for t in total.inputs if t is not None)
    assert first == f"{TOP}/transformer/vocab_embedding/GATHER_0_output_0"
    assert second == f"{LAYER0}/attention/dense/PLUGIN_V2_AllReduce_0_output_0"
    assert sorted(n.name for n, _ in graph.readers[cast]) == [f"{path}/ELEMENTWISE_DIV_0", f"{path}/ELEMENTWISE_POW_0"]
    scale = find(network, f"{path}/ELEMENTWISE_PROD_0")
    normed, weight = scale.inputs
    assert normed is not None
    assert weight is not None
    assert normed.name == f"{path}/CAST_1_output_0"
    assert weight.shape == (1, 32)
    assert graph.scalar(graph.nodes[find(network, f"{path}/ELEMENTWISE_SUM_0").index].inputs[1] or "") == pytest.approx(
        1e-5
    )


def test_scalars_reach_their_rank_through_shape_layers() -> None:
    """SHUFFLE's target comes from CONCATENATION(1, GATHER(SHAPE(constant), 0))."""
    network = build(config())
    power = find(network, f"{LAYER0}/input_layernorm/ELEMENTWISE_POW_0")
    exponent = power.get_input(1)
    assert exponent is not None
    shuffle = exponent.producer
    assert isinstance(shuffle, trt.IShuffleLayer)
    assert shuffle.zero_is_placeholder is False
    target = shuffle.get_input(1)
    assert target is not None
    assert target.producer is not None
    kinds = [target.producer.layer_type.name]
    for tensor in target.producer.inputs:
        assert tensor is not None
        assert tensor.producer is not None
        kinds.append(tensor.producer.layer_type.name)
    assert kinds == ["CONCATENATION", "CONSTANT", "GATHER"]
    assert target.desc.values == (1, 1)


@pytest.mark.parametrize("make", [config, qwen, mixtral])
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_two_all_reduces_per_layer(make: Any, tp_size: int) -> None:
    network = build(make(num_hidden_layers=3), tp_size)
    reduced = [x.name for x in plugins(network, "AllReduce")]
    assert len(reduced) == (0 if tp_size == 1 else 6)
    assert len(plugins(network, "GPTAttention")) == 3
    assert len(plugins(network, "AllGather")) == int(tp_size > 1)


def test_all_reduce_fields() -> None:
    attention, mlp = (x.plugin.fields for x in plugins(build(config(norm_epsilon=0.25)), "AllReduce")[:2])
    for fields in (attention, mlp):
        assert list(fields) == ["group", "type_id", "strategy", "fusion_op", "eps", "affine", "bias", "scale"]
        assert np.array_equal(np.asarray(fields["group"]), [0, 1])
        assert (fields["type_id"], fields["fusion_op"], fields["bias"], fields["scale"]) == (
            trt.bfloat16.value,
            0,
            0,
            0,
        )
    assert (attention["affine"], attention["eps"]) == (1, 0.25)
    assert mlp["affine"] == 0
    assert mlp["eps"] == pytest.approx(1e-6)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_reduce_fusion(layers: int) -> None:
    """2L - 1 all-reduces carry residual and norm; the last one is plain and its sum goes to the final norm."""
    network = build(config(num_hidden_layers=layers), reduce_fusion=True)
    ops = [int(x.plugin.fields["fusion_op"]) for x in plugins(network, "AllReduce")]
    assert ops == [1] * (2 * layers - 1) + [0]
    norms = {x.name.rsplit("/", 1)[0] for x in network.layers if "/REDUCE_AVG_" in x.name}
    assert norms == {f"{LAYER0}/input_layernorm", f"{TOP}/transformer/ln_f"}
    last = f"{TOP}/transformer/layers/{layers - 1}"
    assert [n for n in named(network, last) if n.startswith("ELEMENTWISE")] == ["ELEMENTWISE_SUM_0"]


def test_fused_all_reduce_takes_the_next_norm() -> None:
    network = build(config(), reduce_fusion=True)
    reduced = plugins(network, "AllReduce")
    weights = [t.name for x in reduced[:3] if (t := x.get_input(2)) is not None]
    assert weights == [
        "transformer.layers.0.post_layernorm.weight_output_0",
        "transformer.layers.1.input_layernorm.weight_output_0",
        "transformer.layers.1.post_layernorm.weight_output_0",
    ]
    assert all(x.plugin.fields["affine"] == 1 for x in reduced[:3])
    # The residual of one is the second output of the one before.
    assert reduced[1].get_input(1) is reduced[0].get_output(1)
    assert reduced[2].get_input(1) is reduced[1].get_output(1)
    qkv = find(network, f"{TOP}/transformer/layers/1/attention/qkv/MATRIX_MULTIPLY_0")
    assert qkv.get_input(0) is reduced[1].get_output(0)


@pytest.mark.parametrize(("make", "tp_size"), [(config, 1), (qwen, 2), (mixtral, 2)])
def test_reduce_fusion_is_for_llama_on_several_ranks(make: Any, tp_size: int) -> None:
    on, off = (build(make(), tp_size, reduce_fusion=flag) for flag in (True, False))
    assert [x.name for x in on.layers] == [x.name for x in off.layers]


def test_gemm_plugin_replaces_every_product() -> None:
    network = build(mixtral(), gemm_plugin=True)
    assert not [x for x in network.layers if isinstance(x, trt.IMatrixMultiplyLayer)]
    gemms = plugins(network, "Gemm")
    assert [x.name.removeprefix(f"{TOP}/") for x in gemms] == [
        *(
            f"transformer/layers/{i}/{module}/PLUGIN_V2_Gemm_0"
            for i in range(2)
            for module in ("attention/qkv", "attention/dense", "mlp/router")
        ),
        "lm_head/PLUGIN_V2_Gemm_0",
    ]
    assert [x.plugin.fields["type_id"] for x in gemms[:3]] == [
        trt.bfloat16.value,
        trt.bfloat16.value,
        trt.float32.value,
    ]
    assert gemms[0].plugin.fields["transb"] == 1


def test_unfused_mlp() -> None:
    network = build(config(), use_fused_mlp=False)
    assert named(network, f"{LAYER0}/mlp") == [
        "fc/MATRIX_MULTIPLY_0",
        "SIGMOID_0",
        "ELEMENTWISE_PROD_0",
        "gate/MATRIX_MULTIPLY_0",
        "ELEMENTWISE_PROD_1",
        "proj/MATRIX_MULTIPLY_0",
        "proj/PLUGIN_V2_AllReduce_0",
    ]
    assert shape_of(find(network, "transformer.layers.0.mlp.fc.weight")) == (24, 32)


def test_fused_mlp_slices_by_shape_tensors() -> None:
    network = build(config())
    for index, start in ((0, 0), (1, 24)):
        layer = find(network, f"{LAYER0}/mlp/SLICE_{index}")
        starts, sizes = layer.get_input(1), layer.get_input(2)
        assert starts is not None
        assert sizes is not None
        assert (starts.desc.values, sizes.desc.values) == ((0, start), (None, 24))
        assert shape_of(layer) == (-1, 24)
    # The second half goes through the activation.
    sigmoid = find(network, f"{LAYER0}/mlp/SIGMOID_0")
    assert sigmoid.get_input(0) is find(network, f"{LAYER0}/mlp/SLICE_1").get_output(0)


def test_residual_multiplier() -> None:
    network = build(config(), residual_multiplier=1.0)
    assert [n for n in named(network, LAYER0) if n.startswith("ELEMENTWISE")] == [
        "ELEMENTWISE_PROD_0",
        "ELEMENTWISE_SUM_0",
        "ELEMENTWISE_PROD_1",
        "ELEMENTWISE_SUM_1",
    ]
    assert "ELEMENTWISE_PROD_0" in named(network, f"{TOP}/transformer")
    plain = build(qwen(), residual_multiplier=1.0)
    assert [n for n in named(plain, "QWenForCausalLM/transformer/layers/0") if n.startswith("ELEMENTWISE")] == [
        "ELEMENTWISE_SUM_0",
        "ELEMENTWISE_SUM_1",
    ]


def test_collectives_in_another_dtype_are_cast_on_both_sides() -> None:
    network = build(config(), nccl_dtype="float32")
    assert named(network, f"{LAYER0}/attention/dense") == [
        "MATRIX_MULTIPLY_0",
        "CAST_0",
        "PLUGIN_V2_AllReduce_0",
        "CAST_1",
    ]
    assert "CAST_0" in named(network, f"{TOP}/lm_head")
    assert {x.plugin.fields["type_id"] for x in plugins(network, "AllReduce")} == {trt.float32.value}
    assert not [n for n in named(build(config(), nccl_dtype="bfloat16"), f"{LAYER0}/attention/dense") if "CAST" in n]


def test_float32_needs_no_casts() -> None:
    network = build(config(dtype="float32"))
    assert not [x for x in network.layers if isinstance(x, trt.ICastLayer)]


def test_float16_products_are_computed_in_float32() -> None:
    network = build(config(dtype="float16"))
    assert named(network, f"{LAYER0}/attention/dense") == [
        "CAST_0",
        "MATRIX_MULTIPLY_0",
        "CAST_2",
        "PLUGIN_V2_AllReduce_0",
    ]
    assert Graph(network).dtype(f"{LAYER0}/attention/dense/MATRIX_MULTIPLY_0_output_0") == "FLOAT"
    with_plugin = build(config(dtype="float16"), gemm_plugin=True)
    assert named(with_plugin, f"{LAYER0}/attention/dense") == ["PLUGIN_V2_Gemm_0", "PLUGIN_V2_AllReduce_0"]


@pytest.mark.parametrize(("dtype", "cast"), [("float32", True), ("bfloat16", False)])
def test_logits_dtype(dtype: str, cast: bool) -> None:
    network = build(config(), logits_dtype=dtype)
    assert network.get_output(0).dtype.name == {"float32": "FLOAT", "bfloat16": "BF16"}[dtype]
    assert (f"{TOP}/CAST_0" in {x.name for x in network.layers}) == cast


def test_qwen_adds_the_bias_in_the_network() -> None:
    network = build(qwen())
    path = "QWenForCausalLM/transformer/layers/0/attention"
    assert named(network, path)[:3] == ["qkv/MATRIX_MULTIPLY_0", "qkv/ELEMENTWISE_SUM_0", "PLUGIN_V2_GPTAttention_0"]
    bias = find(network, f"{path}/qkv/ELEMENTWISE_SUM_0").get_input(1)
    assert bias is not None
    assert bias.shape == (1, 32)
    (attention, _) = plugins(network, "GPTAttention")
    assert (attention.plugin.fields["qkv_bias_enabled"], attention.num_inputs) == (0, 17)
    assert plugins(network, "AllReduce")[0].plugin.fields["affine"] == 0


def test_mixtral_routes_in_float32_and_reduces_once() -> None:
    network = build(mixtral())
    assert named(network, f"{LAYER0}/mlp") == [
        "router/CAST_0",
        "router/MATRIX_MULTIPLY_0",
        "TOPK_0",
        "SOFTMAX_0",
        "PLUGIN_V2_MixtureOfExperts_0",
        "PLUGIN_V2_AllReduce_0",
    ]
    router = find(network, "transformer.layers.0.mlp.router.weight").get_output(0)
    assert router is not None
    assert (router.dtype, router.shape) == (trt.float32, (4, 32))
    experts = plugins(network, "MixtureOfExperts")[0]
    assert [t.shape for t in experts.inputs if t is not None] == [(-1, 32), (4, 48, 32), (4, 32, 24), (-1, 2), (-1, 2)]
    fields = experts.plugin.fields
    assert (fields["experts_per_token"], fields["expert_inter_size"], fields["activation_type"]) == (2, 24, 3)
    assert (fields["tp_size"], fields["ep_size"], fields["use_final_scales"]) == (2, 1, 1)


def test_mixtral_without_renormalisation_takes_the_softmax_first() -> None:
    model = config(architecture="MixtralForCausalLM", moe=MoeConfig(num_experts=4, top_k=2, renormalize=False))
    assert named(build(model), f"{LAYER0}/mlp")[2:4] == ["SOFTMAX_0", "TOPK_0"]
