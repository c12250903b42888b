"""Tensor names and shapes: of the whole model (Hugging Face's names) and of one rank (TensorRT-LLM's)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.model_config import ModelConfig

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


def full_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Hugging Face name -> shape of every tensor of the whole model, in the order of the network."""
    h, f, d = config.hidden_size, config.intermediate_size, config.head_size
    rows = {
        "q": config.num_attention_heads * d,
        "k": config.num_key_value_heads * d,
        "v": config.num_key_value_heads * d,
    }
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, h)}
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}."
        shapes[f"{layer}input_layernorm.weight"] = (h,)
        for part, size in rows.items():
            shapes[f"{layer}self_attn.{part}_proj.weight"] = (size, h)
            if config.qkv_bias:
                shapes[f"{layer}self_attn.{part}_proj.bias"] = (size,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (h, rows["q"])
        shapes[f"{layer}post_attention_layernorm.weight"] = (h,)
        if config.moe is None:
            shapes[f"{layer}mlp.gate_proj.weight"] = (f, h)
            shapes[f"{layer}mlp.up_proj.weight"] = (f, h)
            shapes[f"{layer}mlp.down_proj.weight"] = (h, f)
            continue
        shapes[f"{layer}block_sparse_moe.gate.weight"] = (config.moe.num_experts, h)
        for expert in range(config.moe.num_experts):
            prefix = f"{layer}block_sparse_moe.experts.{expert}."
            shapes |= {f"{prefix}w1.weight": (f, h), f"{prefix}w2.weight": (h, f), f"{prefix}w3.weight": (f, h)}
    shapes[FINAL_NORM] = (h,)
    shapes[LM_HEAD] = (config.vocab_size, h)
    return shapes


def rank_shapes(config: ModelConfig, tp_size: int) -> dict[str, Shape]:
    """TensorRT-LLM name -> shape of every tensor of one rank. Raises UserError when ``tp_size`` cannot be served."""
    local = config.local(tp_size)
    h, d, f = config.hidden_size, config.head_size, local.intermediate_size
    qkv, q = (local.num_heads + 2 * local.num_kv_heads) * d, local.num_heads * d
    shapes: dict[str, Shape] = {"transformer.vocab_embedding.weight": (config.vocab_size, h)}
    for index in range(config.num_hidden_layers):
        layer = f"transformer.layers.{index}."
        shapes[f"{layer}input_layernorm.weight"] = (h,)
        shapes[f"{layer}attention.qkv.weight"] = (qkv, h)
        if config.qkv_bias:
            shapes[f"{layer}attention.qkv.bias"] = (qkv,)
        shapes[f"{layer}attention.dense.weight"] = (h, q)
        shapes[f"{layer}post_layernorm.weight"] = (h,)
        if config.moe is None:
            shapes |= {f"{layer}mlp.fc.weight": (f, h), f"{layer}mlp.gate.weight": (f, h)}
            shapes[f"{layer}mlp.proj.weight"] = (h, f)
        else:
            experts = config.moe.num_experts
            shapes[f"{layer}mlp.router.weight"] = (experts, h)
            shapes[f"{layer}mlp.fc.weight"] = (experts, 2 * f, h)
            shapes[f"{layer}mlp.proj.weight"] = (experts, h, f)
    shapes["transformer.ln_f.weight"] = (h,)
    shapes["lm_head.weight"] = (local.vocab_size, h)
    return shapes


_SAME_MODEL = "make sure that the config and the weights belong to the same model"


def check_shapes(
    expected: Mapping[str, Shape],
    found: Mapping[str, Shape],
    source: str,
    *,
    file_names: Mapping[str, str] | None = None,
    places: Mapping[str, str] | None = None,
) -> None:
    """Raise UserError for the first tensor that is missing or has another shape.

    Args:
        expected: Name -> shape that the config asks for.
        found: Name -> shape in the file.
        source: The file, for the error.
        file_names: How the file calls a tensor, where it differs from the key.
        places: The file of each tensor found, where ``source`` is a folder of several.
    """
    for name, shape in expected.items():
        called = (file_names or {}).get(name, name)
        if name not in found:
            raise UserError(
                f"tensor {called} of shape {shape} is missing",
                where=source,
                fix=f"{_SAME_MODEL}, and that no file of them is left out",
            )
        if found[name] != shape:
            raise UserError(
                f"tensor {called} has shape {found[name]}, expected {shape}",
                where=(places or {}).get(name, source),
                fix=_SAME_MODEL,
            )


def check_all_read(read: Collection[str], found: Iterable[str], source: str, *, ignored: Callable[[str], bool]) -> None:
    """Raise UserError when the file holds tensors that belong to the model and that nothing reads.

    Such a model is another one than its config says: it has more layers, biases or norms of q and k.

    Args:
        read: Names that are read.
        found: Names in the file.
        source: The file, for the error.
        ignored: Says which unread tensors do not change what the model computes.
    """
    unread = [name for name in found if name not in read and not ignored(name)]
    if unread:
        more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
        raise UserError(
            f"a model of this config does not read the tensors {', '.join(unread[:3])}{more}",
            where=source,
            fix=f"{_SAME_MODEL} (number of layers, biases, q and k norms), one of a served architecture",
        )
