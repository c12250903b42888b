"""Checkpoints: a model's shape, weights and tokenizer, from the formats that people have."""

from __future__ import annotations

from pathlib import Path

from trtllm_tokenweave.checkpoint.base import Checkpoint, FullCheckpoint, Message, Tokenizer, require_tokenizer
from trtllm_tokenweave.checkpoint.dtypes import numpy_dtype
from trtllm_tokenweave.checkpoint.fields import read_json
from trtllm_tokenweave.checkpoint.gguf_file import GgufCheckpoint, smollm2_gguf
from trtllm_tokenweave.checkpoint.hugging_face import HuggingFaceCheckpoint
from trtllm_tokenweave.checkpoint.names import full_shapes, rank_shapes
from trtllm_tokenweave.checkpoint.random_weights import RandomCheckpoint
from trtllm_tokenweave.checkpoint.sharding import RankWeights
from trtllm_tokenweave.checkpoint.trtllm import TrtllmCheckpoint
from trtllm_tokenweave.errors import UserError

__all__ = [
    "Checkpoint",
    "FullCheckpoint",
    "GgufCheckpoint",
    "HuggingFaceCheckpoint",
    "Message",
    "RandomCheckpoint",
    "RankWeights",
    "Tokenizer",
    "TrtllmCheckpoint",
    "full_shapes",
    "numpy_dtype",
    "open_checkpoint",
    "rank_shapes",
    "require_tokenizer",
    "smollm2_gguf",
]

_KINDS = "give a GGUF file, a Hugging Face folder or a TensorRT-LLM checkpoint folder"


def open_checkpoint(path: Path, *, dtype: str | None = None, architecture_hint: str | None = None) -> Checkpoint:
    """Open a GGUF file, a Hugging Face folder or a TensorRT-LLM checkpoint folder, whichever ``path`` is.

    Args:
        path: The file or folder.
        dtype: Give the weights in this dtype ("float32", "float16", "bfloat16"); by default in the config's, and for
            GGUF, whose values have none of their own, in float32.
        architecture_hint: The architecture to take where a Hugging Face config.json names none.

    Raises:
        UserError: Not one of the three, or one with anything missing, damaged, misshapen or not served.
    """
    path = Path(path)
    if not path.exists():
        raise UserError("does not exist", where=str(path), fix=_KINDS)
    if not path.is_file() and not path.is_dir():
        raise UserError("is neither a file nor a folder", where=str(path), fix=_KINDS)
    if path.is_file():
        if path.suffix in (".json", ".safetensors"):
            raise UserError(
                "is one file of a checkpoint folder", where=str(path), fix=f"give its folder, {path.parent}"
            )
        return GgufCheckpoint(path, dtype=dtype)
    if not (path / "config.json").exists():
        raise UserError("has no config.json", where=str(path), fix=_KINDS)
    data = read_json(path / "config.json")
    if "build_config" in data:
        raise UserError("holds built engines, no checkpoint", where=str(path), fix=_KINDS)
    if "architecture" in data:
        return TrtllmCheckpoint(path, dtype=dtype)
    if "architectures" in data or "model_type" in data or architecture_hint:
        return HuggingFaceCheckpoint(path, dtype=dtype, architecture_hint=architecture_hint)
    raise UserError(
        "is neither Hugging Face's (field architectures) nor TensorRT-LLM's (field architecture)",
        where=str(path / "config.json"),
        fix=_KINDS,
    )
