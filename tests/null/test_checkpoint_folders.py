"""Hugging Face and TensorRT-LLM checkpoint folders: written tiny, read back, and every refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models

from trtllm_tokenweave.checkpoint import (
    HuggingFaceCheckpoint,
    RandomCheckpoint,
    TrtllmCheckpoint,
    full_shapes,
    numpy_dtype,
    open_checkpoint,
)
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig, make_config

Array = NDArray[Any]
Tensors = dict[str, Array]

SIZES: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_size": 6,
    "intermediate_size": 12,
    "vocab_size": 21,
    "max_position_embeddings": 64,
    "norm_epsilon": 1e-6,
    "rotary_base": 5e5,
}
LLAMA3 = {
    "type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA = make_config("", SIZES | {"architecture": "LlamaForCausalLM", "rotary_scaling": LLAMA3})
QWEN = make_config("", SIZES | {"architecture": "Qwen2ForCausalLM", "qkv_bias": True})
MIXTRAL = make_config("", SIZES | {"architecture": "MixtralForCausalLM", "moe": {"num_experts": 3, "top_k": 2}})
ALL = pytest.mark.parametrize("config", [LLAMA, QWEN, MIXTRAL], ids=["llama", "qwen2", "mixtral"])


def full_tensors(config: ModelConfig) -> Tensors:
    """The model's tensors in its dtype; the router, which stays float32 in a network, in float32."""
    checkpoint = RandomCheckpoint(config, seed=5)
    tensors = {name: checkpoint.read_full(name) for name in full_shapes(config)}
    dtype = numpy_dtype(config.dtype)
    return {name: t if name.endswith("moe.gate.weight") else t.astype(dtype) for name, t in tensors.items()}


def hugging_face_json(config: ModelConfig) -> dict[str, Any]:
    data: dict[str, Any] = {
        "architectures": [config.architecture],
        "torch_dtype": config.dtype,
        "head_dim": config.head_size,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_scaling": None,
        "sliding_window": None,
    }
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        data[name] = getattr(config, name)
    for name in ("intermediate_size", "vocab_size", "max_position_embeddings"):
        data[name] = getattr(config, name)
    if config.rotary_scaling:
        data["rope_scaling"] = config.rotary_scaling.model_dump()
        data["rope_scaling"]["rope_type"] = data["rope_scaling"].pop("type")
    if config.moe:
        data |= {"num_local_experts": config.moe.num_experts, "num_experts_per_tok": config.moe.top_k}
    return data


def trtllm_json(config: ModelConfig, tp_size: int) -> dict[str, Any]:
    data = config.model_dump()
    moe = data.pop("moe")
    data |= {
        "moe": {"num_experts": 0, "top_k": 0, "normalization_mode": None},
        "mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1, "cp_size": 1, "moe_ep_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "hidden_act": "swiglu" if moe else "silu",
        "attn_bias": data.pop("qkv_bias"),
        "position_embedding_type": "rope_gpt_neox",
        "logits_dtype": "float32",
        "use_parallel_embedding": False,
    }
    if moe:
        data["moe"] = {"num_experts": moe["num_experts"], "top_k": moe["top_k"], "normalization_mode": 1}
    return data


def write_hugging_face(folder: Path, config: ModelConfig = LLAMA, **changes: Any) -> Tensors:
    tensors = full_tensors(config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hugging_face_json(config) | changes))
    return tensors


def write_trtllm(folder: Path, config: ModelConfig = LLAMA, tp_size: int = 2, **changes: Any) -> None:
    checkpoint = RandomCheckpoint(config, seed=5)
    for rank in range(tp_size):
        save_file(checkpoint.rank_weights(Mapping(tp_size, rank, tp_size)), folder / f"rank{rank}.safetensors")
    (folder / "config.json").write_text(json.dumps(trtllm_json(config, tp_size) | changes))


def rewrite(path: Path, change: Callable[[Tensors], object]) -> None:
    from safetensors.numpy import load_file

    tensors: Tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def same(found: Tensors, expected: Tensors) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name], tensor)


@ALL
def test_hugging_face_round_trip(tmp_path: Path, config: ModelConfig) -> None:
    write_hugging_face(tmp_path, config)
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, HuggingFaceCheckpoint)
    assert checkpoint.config == config
    assert checkpoint.tokenizer() is None
    for rank in range(3):
        mapping = Mapping(3, rank, 3)
        same(checkpoint.rank_weights(mapping), RandomCheckpoint(config, seed=5).rank_weights(mapping))


def test_hugging_face_in_several_files_and_another_dtype(tmp_path: Path) -> None:
    tensors = write_hugging_face(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = list(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = open_checkpoint(tmp_path, dtype="float32").rank_weights(Mapping())
    np.testing.assert_array_equal(weights["lm_head.weight"], tensors["lm_head.weight"].astype(np.float32))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"b.safetensors: does not exist. Fix: copy every file"):
        open_checkpoint(tmp_path)
    index["weight_map"][names[0]] = "../b.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="outside the folder"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match="field weight_map: is missing"):
        open_checkpoint(tmp_path)


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    tensors = write_hugging_face(tmp_path, LLAMA, tie_word_embeddings=True)
    # A head that is there counts, whatever the config says.
    weights = open_checkpoint(tmp_path).rank_weights(Mapping())
    np.testing.assert_array_equal(weights["lm_head.weight"], tensors["lm_head.weight"])
    rewrite(tmp_path / "model.safetensors", lambda held: held.pop("lm_head.weight"))
    weights = open_checkpoint(tmp_path).rank_weights(Mapping())
    assert np.shares_memory(weights["lm_head.weight"], weights["transformer.vocab_embedding.weight"])
    (tmp_path / "config.json").write_text(json.dumps(hugging_face_json(LLAMA)))
    with pytest.raises(UserError, match=r"tensor lm_head.weight of shape \(21, 16\) is missing"):
        open_checkpoint(tmp_path)


def test_newer_config_spelling(tmp_path: Path) -> None:
    write_hugging_face(tmp_path)
    data = hugging_face_json(LLAMA)
    data["dtype"] = data.pop("torch_dtype")
    data["rope_parameters"] = data.pop("rope_scaling") | {"rope_theta": data.pop("rope_theta")}
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert open_checkpoint(tmp_path).config == LLAMA


def test_architecture_hint_fills_in_what_config_lacks(tmp_path: Path) -> None:
    write_hugging_face(tmp_path, LLAMA, architectures=None, model_type="llama")
    with pytest.raises(UserError, match="field architectures: is missing"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path, architecture_hint="LlamaForCausalLM").config == LLAMA


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"field architectures: .*GPT2LMHeadModel.* is not served.*Llama"),
        ({"architectures": "LlamaForCausalLM"}, "field architectures"),
        ({"hidden_size": None}, "field hidden_size: is missing"),
        ({"hidden_size": "16"}, "field hidden_size: is '16', expected an integer"),
        ({"num_hidden_layers": True}, "field num_hidden_layers: is True, expected an integer"),
        ({"num_attention_heads": 0}, "field num_attention_heads"),
        ({"rms_norm_eps": "small"}, "field rms_norm_eps: is 'small', expected a number"),
        ({"tie_word_embeddings": 1}, "field tie_word_embeddings: is 1, expected true or false"),
        ({"torch_dtype": "int8"}, "field torch_dtype: 'int8' is not served"),
        ({"quantization_config": {"quant_method": "awq"}}, "field quantization_config: quantized weights"),
        ({"hidden_act": "gelu"}, "field hidden_act: 'gelu' is not served"),
        ({"attention_bias": True}, "field attention_bias"),
        ({"sliding_window": 8}, "field sliding_window: a sliding window"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "field rope_scaling.rope_type: 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "field rope_scaling.factor: is missing"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 8}, r"tensor model.layers.0.self_attn.q_proj.weight has shape \(24, 16\), expected \(32, 16\)"),
        (
            {"num_hidden_layers": 1},
            r"does not read the tensors model.layers.1.\S+, model.layers.1.\S+, model.layers.1.\S+ and 6 more",
        ),
        ({"num_hidden_layers": 3}, r"tensor model.layers.2.input_layernorm.weight of shape \(16,\) is missing"),
    ],
)
def test_hugging_face_config_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_hugging_face(tmp_path, LLAMA, **changes)
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.1.mlp.down_proj.bias",
        "model.layers.0.mlp.up_proj.weight_scale",
        "lm_head.bias",
    ],
)
def test_tensors_that_the_model_would_ignore_are_refused(tmp_path: Path, name: str) -> None:
    write_hugging_face(tmp_path)
    rewrite(tmp_path / "model.safetensors", lambda held: held.update({name: np.ones(6, np.float32)}))
    with pytest.raises(UserError, match=f"does not read the tensors {name}") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.where == str(tmp_path)
    assert "same model" in caught.value.fix


def test_tensors_without_effect_are_ignored(tmp_path: Path) -> None:
    tensors = write_hugging_face(tmp_path)
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "value_head.weight")
    more = {name: np.ones(3, np.float32) for name in names}
    rewrite(tmp_path / "model.safetensors", lambda held: held.update(more))
    weights = open_checkpoint(tmp_path).rank_weights(Mapping())
    np.testing.assert_array_equal(weights["lm_head.weight"], tensors["lm_head.weight"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
)
def test_damaged_weights_are_found_at_load(tmp_path: Path, dtype: str, value: float, name: str) -> None:
    write_hugging_face(tmp_path)

    def damage(held: Tensors) -> None:
        tensor = held[name].astype(numpy_dtype(dtype))
        tensor.reshape(-1)[-1] = value
        held[name] = tensor

    rewrite(tmp_path / "model.safetensors", damage)
    for other in ("bfloat16", "float16", "float32"):
        with pytest.raises(UserError, match=rf"tensor {name} holds NaN or infinite values. Fix: "):
            open_checkpoint(tmp_path, dtype=other).rank_weights(Mapping())


def test_values_that_only_the_wide_dtype_holds_are_refused(tmp_path: Path) -> None:
    write_hugging_face(tmp_path)
    huge = {"model.norm.weight": np.full(16, 1e300)}
    rewrite(tmp_path / "model.safetensors", lambda held: held.update(huge))
    with pytest.raises(UserError, match=r"tensor model.norm.weight has values beyond float32's range"):
        open_checkpoint(tmp_path, dtype="float32").rank_weights(Mapping())


def test_tokenizer_with_more_ids_than_the_embedding(tmp_path: Path) -> None:
    write_hugging_face(tmp_path)
    fits, backend = (Backend(models.WordLevel({"<s>": 0, "hello": last}, unk_token="<s>")) for last in (20, 21))
    fits.save(str(tmp_path / "tokenizer.json"))
    assert open_checkpoint(tmp_path).tokenizer() is not None
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"ids up to 21, but the model's vocab_size is 21. Fix: "):
        open_checkpoint(tmp_path).tokenizer()
    folder = tmp_path / "trtllm"
    folder.mkdir()
    write_trtllm(folder)
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="ids up to 21"):
        open_checkpoint(folder).tokenizer()


def test_hugging_face_weight_refusals(tmp_path: Path) -> None:
    tensors = write_hugging_face(tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path)
    with pytest.raises(UserError, match=rf"tensor {name} of shape \(16, 12\) is missing. Fix: "):
        open_checkpoint(tmp_path)
    save_file(tensors | {name: np.zeros((12, 16), np.float32)}, path)
    with pytest.raises(UserError, match=rf"{path}: tensor {name} has shape \(12, 16\), expected \(16, 12\)"):
        open_checkpoint(tmp_path)
    save_file(tensors | {name: np.zeros((16, 12), np.int8)}, path)
    with pytest.raises(UserError, match=rf"tensor {name} has dtype I8, expected"):
        open_checkpoint(tmp_path)
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="no complete safetensors file"):
        open_checkpoint(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        open_checkpoint(tmp_path)


@ALL
@pytest.mark.parametrize("tp_size", [1, 2])
def test_trtllm_round_trip(tmp_path: Path, config: ModelConfig, tp_size: int) -> None:
    write_trtllm(tmp_path, config, tp_size)
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, TrtllmCheckpoint)
    assert checkpoint.config == config
    assert checkpoint.tokenizer() is None
    for rank in range(tp_size):
        mapping = Mapping(tp_size, rank, tp_size)
        found = checkpoint.rank_weights(mapping)
        same(found, RandomCheckpoint(config, seed=5).rank_weights(mapping))
        assert not any(tensor.flags.writeable for tensor in found.values())


def test_trtllm_legacy_fields_and_dtype(tmp_path: Path) -> None:
    write_trtllm(tmp_path, MIXTRAL, 2)
    data = trtllm_json(MIXTRAL, 2)
    del data["moe"], data["mapping"], data["head_size"]
    data |= {"moe_num_experts": 3, "moe_top_k": 2, "moe_normalization_mode": 0, "tp_size": 2, "pp_size": 1}
    data |= {"num_attention_heads": 4, "head_size": 6}
    (tmp_path / "config.json").write_text(json.dumps(data))
    checkpoint = open_checkpoint(tmp_path, dtype="float32")
    assert checkpoint.config.moe is not None
    assert not checkpoint.config.moe.renormalize
    assert checkpoint.rank_weights(Mapping(2, 1, 2))["lm_head.weight"].dtype == np.float32


def test_trtllm_shared_and_sharded_embedding(tmp_path: Path) -> None:
    write_trtllm(tmp_path, LLAMA, 2, share_embedding_table=True)
    whole = RandomCheckpoint(LLAMA, seed=5).rank_weights(Mapping())["transformer.vocab_embedding.weight"]
    padded = np.concatenate([whole, np.zeros((1, 16), whole.dtype)])
    for rank in range(2):
        rewrite(tmp_path / f"rank{rank}.safetensors", lambda held: held.pop("lm_head.weight"))
    found = open_checkpoint(tmp_path).rank_weights(Mapping(2, 1, 2))
    np.testing.assert_array_equal(found["lm_head.weight"], padded[11:])
    for dim, shards in enumerate((np.split(padded, 2, axis=0), np.split(whole, 2, axis=1))):
        changes = {"share_embedding_table": True, "use_parallel_embedding": True, "embedding_sharding_dim": dim}
        (tmp_path / "config.json").write_text(json.dumps(trtllm_json(LLAMA, 2) | changes))
        for rank, shard in enumerate(shards):
            piece = {"transformer.vocab_embedding.weight": np.ascontiguousarray(shard)}
            rewrite(tmp_path / f"rank{rank}.safetensors", lambda held, piece=piece: held.update(piece))  # type: ignore[misc]
        found = open_checkpoint(tmp_path).rank_weights(Mapping(2, 1, 2))
        np.testing.assert_array_equal(found["transformer.vocab_embedding.weight"], whole)
        np.testing.assert_array_equal(found["lm_head.weight"], padded[11:])


def test_trtllm_other_tp_size_says_how_to_convert(tmp_path: Path) -> None:
    write_trtllm(tmp_path)
    with pytest.raises(UserError, match=r"is sharded for tp_size 2, not 4.*convert_checkpoint.py --tp_size 4"):
        open_checkpoint(tmp_path).rank_weights(Mapping(4, 0, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "GPTForCausalLM"}, r"field architecture: 'GPTForCausalLM' is not served"),
        ({"architecture": 7}, "field architecture: is 7, expected a string"),
        ({"dtype": "fp8"}, "field dtype: 'fp8'"),
        ({"vocab_size": None}, "field vocab_size: is missing"),
        ({"quantization": {"quant_algo": "FP8"}}, r"field quantization.quant_algo: 'FP8' quantization is not served"),
        ({"quantization": {"kv_cache_quant_algo": "INT8"}}, r"field quantization.kv_cache_quant_algo"),
        ({"quantization": []}, "field quantization: is .*, expected an object"),
        ({"mapping": {"tp_size": 2, "pp_size": 2}}, r"field mapping.pp_size: 2 is not served.*pp_size 1"),
        ({"mapping": {"tp_size": 2, "moe_ep_size": 2}}, "field mapping.moe_ep_size"),
        ({"attn_bias": True}, "field attn_bias"),
        ({"hidden_act": "gelu"}, "field hidden_act"),
        ({"position_embedding_type": "learned_absolute"}, "field position_embedding_type"),
        ({"residual_multiplier": 0.2}, "field residual_multiplier"),
        ({"moe": {"num_experts": 4, "top_k": 2, "normalization_mode": 3}}, "field moe.normalization_mode"),
        ({"mapping": {"tp_size": 5}}, "tp_size 5 is larger than the model's 4 attention heads"),
        ({"mapping": {"tp_size": 4}}, "rank2.safetensors: does not exist"),
    ],
)
def test_trtllm_config_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_trtllm(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.fix


def test_trtllm_tensors_that_the_model_would_ignore_are_refused(tmp_path: Path) -> None:
    write_trtllm(tmp_path)
    path = tmp_path / "rank0.safetensors"
    table = {"embed_positions_for_gpt_attention": np.ones(3, np.float32)}
    rewrite(path, lambda held: held.update(table))
    assert "lm_head.weight" in open_checkpoint(tmp_path).rank_weights(Mapping(2, 0, 2))
    name = "transformer.layers.0.attention.q_layernorm.weight"
    rewrite(path, lambda held: held.update({name: np.ones(6, np.float32)}))
    with pytest.raises(UserError, match=rf"rank0.safetensors: .*does not read the tensors {name}"):
        open_checkpoint(tmp_path).rank_weights(Mapping(2, 0, 2))
    (tmp_path / "config.json").write_text(json.dumps(trtllm_json(LLAMA, 2) | {"num_hidden_layers": 1}))
    with pytest.raises(UserError, match=r"does not read the tensors transformer.layers.\S+, .* and \d+ more"):
        open_checkpoint(tmp_path).rank_weights(Mapping(2, 1, 2))


def test_trtllm_damaged_weights_are_found_at_load(tmp_path: Path) -> None:
    write_trtllm(tmp_path)
    name = "transformer.layers.1.mlp.proj.weight"
    bad = np.zeros((16, 6), numpy_dtype("bfloat16"))
    bad[3, 2] = np.nan
    rewrite(tmp_path / "rank1.safetensors", lambda held: held.update({name: bad}))
    assert name in open_checkpoint(tmp_path).rank_weights(Mapping(2, 0, 2))
    with pytest.raises(UserError, match=rf"rank1.safetensors: tensor {name} holds NaN or infinite values"):
        open_checkpoint(tmp_path).rank_weights(Mapping(2, 1, 2))


def test_trtllm_weight_refusals(tmp_path: Path) -> None:
    write_trtllm(tmp_path)
    name = "transformer.layers.1.attention.qkv.weight"
    rewrite(tmp_path / "rank0.safetensors", lambda held: held.pop(name))
    rewrite(tmp_path / "rank1.safetensors", lambda held: held.update({name: np.zeros((24, 8), np.float16)}))
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(UserError, match=rf"rank0.safetensors: tensor {name} of shape \(24, 16\) is missing"):
        checkpoint.rank_weights(Mapping(2, 0, 2))
    with pytest.raises(UserError, match=rf"rank1.safetensors: tensor {name} has shape \(24, 8\), expected \(24, 16\)"):
        checkpoint.rank_weights(Mapping(2, 1, 2))
    rewrite(tmp_path / "rank1.safetensors", lambda held: held.update({name: np.zeros((24, 16), np.int32)}))
    with pytest.raises(UserError, match=rf"tensor {name} has dtype I32"):
        checkpoint.rank_weights(Mapping(2, 1, 2))


def test_neither_kind_of_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing: does not exist.*GGUF file"):
        open_checkpoint(tmp_path / "missing")
    with pytest.raises(UserError, match=r"has no config.json.*Hugging Face folder"):
        open_checkpoint(tmp_path)
    config = tmp_path / "config.json"
    for text, message in (
        ("{}", "is neither Hugging Face's"),
        ("[]", "holds no JSON object"),
        ("{", "not JSON"),
        ('{"build_config": {}}', "built engines"),
    ):
        config.write_text(text)
        with pytest.raises(UserError, match=message) as caught:
            open_checkpoint(tmp_path)
        assert caught.value.fix
    config.write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"config.json: cannot be read: not JSON.*Fix: copy"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_file_of_a_folder_asks_for_the_folder(tmp_path: Path, name: str) -> None:
    write_hugging_face(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(
        UserError, match=rf"{name}: is one file of a checkpoint folder. Fix: give its folder, {tmp_path}"
    ):
        open_checkpoint(tmp_path / name)


def test_neither_file_nor_folder() -> None:
    with pytest.raises(UserError, match=r"/dev/null: is neither a file nor a folder. Fix: give a GGUF file"):
        open_checkpoint(Path("/dev/null"))


def test_dtype_that_is_not_served(tmp_path: Path) -> None:
    write_hugging_face(tmp_path)
    with pytest.raises(UserError, match="dtype 'int4' is not served"):
        open_checkpoint(tmp_path, dtype="int4")


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("output", ["model.json", "config.json", "LINK"])
def test_inspect_does_not_replace_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    write_hugging_face(folder)
    before = contents(folder)
    target = folder / output
    if output == "LINK":
        target = tmp_path / "link.json"
        target.symlink_to(folder / "config.json")
    words = ["inspect", "--checkpoint", str(folder), "--tp", "2", "-o"]
    assert main([*words, str(target)]) == 2
    assert "is a file of the input" in capsys.readouterr().err
    assert contents(folder) == before
    woven = tmp_path / "woven.json"
    for _ in range(2):
        assert main([*words, str(woven)]) == 0
        assert woven.with_suffix(".safetensors").exists()
    assert contents(folder) == before
