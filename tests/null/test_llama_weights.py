"""Weights of the built networks: what is refused, what is shared, how they are laid out; rotary constants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import trtllm_tokenweave.recorder as trt
from trtllm_tokenweave.checkpoint import RandomCheckpoint
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.llama import NetworkOptions, build_llama, weight_specs
from trtllm_tokenweave.llama import weights as weights_module
from trtllm_tokenweave.llama.rope import cos_sin_table, inverse_frequencies
from trtllm_tokenweave.llama.weights import RankWeights, replicated, window_weights
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig, MoeConfig, RotaryScaling
from trtllm_tokenweave.recorder import RecordedNetwork

OPTIONS = NetworkOptions(max_seq_len=64)
Weights = dict[str, NDArray[Any]]


def config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_size": 4,
        "intermediate_size": 24,
        "vocab_size": 30,
        "max_position_embeddings": 64,
    }
    return ModelConfig(**(values | changes))


def weights_of(model: ModelConfig, tp_size: int = 2, rank: int = 0) -> Weights:
    return dict(RandomCheckpoint(model).rank_weights(Mapping(tp_size, rank, tp_size)))


def build(
    model: ModelConfig, weights: Weights | None, tp_size: int = 2, rank: int = 0, **options: Any
) -> RecordedNetwork:
    network = RecordedNetwork()
    build_llama(network, model, Mapping(tp_size, rank, tp_size), weights, NetworkOptions(max_seq_len=64, **options))
    return network


def constants(network: RecordedNetwork) -> dict[str, trt.IConstantLayer]:
    return {x.name: x for x in network.layers if isinstance(x, trt.IConstantLayer)}


MODELS = {
    "llama": config(),
    "qwen": config(architecture="Qwen2ForCausalLM", qkv_bias=True),
    "mixtral": config(architecture="MixtralForCausalLM", moe=MoeConfig(num_experts=4, top_k=2)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_weights_of_every_rank_fit(name: str, tp_size: int) -> None:
    model = MODELS[name]
    for rank in range(tp_size):
        weights = weights_of(model, tp_size, rank)
        specs = weight_specs(model, Mapping(tp_size, rank, tp_size))
        assert {n: (a.shape, a.dtype.name) for n, a in weights.items()} == specs
        build(model, weights, tp_size, rank)


def test_weights_are_taken_by_reference_and_once() -> None:
    weights = weights_of(MODELS["llama"])
    found = constants(build(MODELS["llama"], weights, reduce_fusion=True))
    for name, array in weights.items():
        if not name.endswith(("mlp.fc.weight", "mlp.gate.weight")):
            assert found[name].weights.array is array
    assert set(found) >= {"transformer.layers.1.mlp.fused_fc.weight", "rotary_inv_freq"}


def test_fused_mlp_weight_holds_the_linear_half_first() -> None:
    weights = weights_of(MODELS["llama"])
    fused = constants(build(MODELS["llama"], weights))["transformer.layers.0.mlp.fused_fc.weight"].weights.numpy()
    gate, fc = (weights[f"transformer.layers.0.mlp.{n}.weight"] for n in ("gate", "fc"))
    assert fused.dtype == gate.dtype
    assert np.array_equal(fused, np.concatenate([gate, fc]))


@pytest.mark.parametrize("name", MODELS)
def test_shapes_only_gives_the_same_network(name: str) -> None:
    """Layers, names, shapes and the constants that are part of the form; no value of a weight or rotary table."""
    model = MODELS[name]
    full, plan = build(model, weights_of(model)), build(model, None)
    assert [(x.name, [(t.dtype, t.shape) for t in x.outputs]) for x in full.layers] == [
        (x.name, [(t.dtype, t.shape) for t in x.outputs]) for x in plan.layers
    ]
    for key, layer in constants(plan).items():
        array = layer.weights.array
        if "CONSTANT" in key:
            assert array is not None
            assert np.array_equal(array, constants(full)[key].weights.numpy())
        else:
            assert array is None
            assert layer.weights.size == constants(full)[key].weights.size


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama", "transformer.vocab_embedding.weight"),
        ("llama", "transformer.layers.1.mlp.gate.weight"),
        ("llama", "lm_head.weight"),
        ("qwen", "transformer.layers.0.attention.qkv.bias"),
        ("mixtral", "transformer.layers.1.mlp.router.weight"),
    ],
)
def test_a_missing_tensor_is_named(name: str, tensor: str) -> None:
    weights, network = weights_of(MODELS[name], 2, 1), RecordedNetwork()
    del weights[tensor]
    with pytest.raises(UserError, match=rf"{tensor}: tensor is missing from the weights of rank 1 of 2"):
        build_llama(network, MODELS[name], Mapping(2, 1, 2), weights, OPTIONS)
    assert (network.num_inputs, network.num_layers) == (0, 0)


def test_a_misshapen_tensor_is_named() -> None:
    weights = weights_of(MODELS["llama"])
    name = "transformer.layers.1.attention.dense.weight"
    weights[name] = weights[name][:, :-1]
    with pytest.raises(UserError, match=rf"{name}: tensor has shape \(16, 7\), rank 0 of 2 needs \(16, 8\)"):
        build(MODELS["llama"], weights)


def test_a_tensor_of_another_dtype_is_named() -> None:
    weights = weights_of(MODELS["llama"])
    weights["transformer.ln_f.weight"] = weights["transformer.ln_f.weight"].astype(np.float32)
    with pytest.raises(UserError, match=r"transformer\.ln_f\.weight: tensor has dtype float32, .* needs bfloat16"):
        build(MODELS["llama"], weights)


def test_weights_of_another_tp_size_are_refused() -> None:
    with pytest.raises(UserError, match=r"attention\.qkv\.weight: tensor has shape \(32, 16\), rank 0 of 2 needs"):
        build(MODELS["llama"], weights_of(MODELS["llama"], 1))


def test_extra_tensors_do_no_harm() -> None:
    weights = weights_of(MODELS["llama"]) | {"unused": np.zeros(1, np.float32)}
    assert "unused" not in constants(build(MODELS["llama"], weights))


# ---- rotary constants


def test_plain_frequencies() -> None:
    model = config(head_size=8, rotary_base=10000.0)
    assert inverse_frequencies(model) == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert inverse_frequencies(model).dtype == np.float32


def test_linear_scaling_divides_every_frequency() -> None:
    scaled = config(head_size=8, rotary_scaling=RotaryScaling(type="linear", factor=4.0))
    assert inverse_frequencies(scaled) == pytest.approx(inverse_frequencies(config(head_size=8)) / 4)


def test_llama3_scaling_keeps_high_and_divides_low_frequencies() -> None:
    scaling = RotaryScaling(
        type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    model = config(head_size=128, rotary_base=500000.0)
    plain = inverse_frequencies(model).astype(np.float64)
    scaled = inverse_frequencies(model.model_copy(update={"rotary_scaling": scaling}))
    expected = []
    for frequency in plain:
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            expected.append(frequency)
        elif wavelength > 8192:
            expected.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / 3
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    assert scaled == pytest.approx(expected, rel=1e-6)
    ratios = plain / scaled
    assert (ratios[0], ratios[-1]) == pytest.approx((1.0, 8.0))
    assert ((ratios > 1.01) & (ratios < 7.99)).any()


def test_table_holds_cos_and_sin_in_turn() -> None:
    model = config(head_size=4, max_position_embeddings=64)
    table = cos_sin_table(model)
    assert table.shape == (1, 64 * 4)
    assert table.dtype == np.float32
    pairs = table.reshape(64, 2, 2)
    angles = np.arange(64)[:, None] * inverse_frequencies(model)
    assert pairs[..., 0] == pytest.approx(np.cos(angles), abs=1e-5)
    assert pairs[..., 1] == pytest.approx(np.sin(angles), abs=1e-5)


def test_rotary_constants_of_the_network() -> None:
    network = build(MODELS["llama"], weights_of(MODELS["llama"]))
    found = constants(network)
    table = found["embed_positions_for_gpt_attention"].weights.numpy()
    assert np.array_equal(table, cos_sin_table(MODELS["llama"]))
    assert found["rotary_inv_freq"].weights.numpy().shape == (2,)


# ---- random weights


def random_weights(model: ModelConfig, rank: int, tp_size: int = 2) -> Weights:
    mapping = Mapping(tp_size, rank, tp_size)
    return window_weights(weight_specs(model, mapping), mapping, replicated(model, mapping))


@pytest.mark.parametrize("name", MODELS)
def test_windows_of_random_numbers_are_a_ranks_weights(name: str) -> None:
    model = MODELS[name]
    first, second = (random_weights(model, rank) for rank in range(2))
    RankWeights(weight_specs(model, Mapping(2, 0, 2)), Mapping(2, 0, 2), first)  # shapes and dtypes
    same = {tensor for tensor in first if np.array_equal(first[tensor], second[tensor])}
    assert same == replicated(model, Mapping(2, 0, 2))
    assert {"transformer.vocab_embedding.weight", "transformer.ln_f.weight"} <= same
    matrices = [w for tensor, w in first.items() if w.ndim > 1]
    assert len({w.astype(np.float32).tobytes() for w in matrices}) == len(matrices)
    for w in matrices:
        assert abs(float(w.astype(np.float32).std()) * np.sqrt(w.shape[-1]) - 1) < 0.4
    assert abs(float(first["transformer.ln_f.weight"].astype(np.float32).mean()) - 1) < 0.2


def test_tensors_that_are_larger_than_the_buffer_are_made_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_MOST_NUMBERS", 100)
    mapping = Mapping()
    made = window_weights({"a": ((300, 100), "float32"), "b": ((7,), "float32")}, mapping, set())["a"]
    assert np.isfinite(made).all()
    assert len({row.tobytes() for row in made}) == len(made)  # no two rows are alike
