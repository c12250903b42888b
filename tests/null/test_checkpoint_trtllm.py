"""TensorRT-LLM checkpoint folders: written tiny, read back, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import ALL, LLAMA, MIXTRAL, rewrite, same, trtllm_json, write_trtllm

from trtllm_tokenweave.checkpoint import (
    RandomCheckpoint,
    TrtllmCheckpoint,
    numpy_dtype,
    open_checkpoint,
)
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig


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
