"""Hugging Face checkpoint folders: written tiny, read back, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.checkpoints import ALL, LLAMA, Tensors, hugging_face_json, rewrite, same, write_hugging_face, write_trtllm
from tokenizers import Tokenizer as Backend
from tokenizers import models

from trtllm_tokenweave.checkpoint import (
    HuggingFaceCheckpoint,
    RandomCheckpoint,
    numpy_dtype,
    open_checkpoint,
)
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig


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
