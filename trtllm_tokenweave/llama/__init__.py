"""Networks of Llama-type models, layer by layer as TensorRT-LLM 1.x builds them."""

from __future__ import annotations

from trtllm_tokenweave.llama.model import build_llama
from trtllm_tokenweave.llama.options import NetworkOptions
from trtllm_tokenweave.llama.weights import weight_specs

__all__ = ["NetworkOptions", "build_llama", "weight_specs"]
