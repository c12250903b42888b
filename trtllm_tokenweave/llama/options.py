"""What a network is built for, besides the model and the rank."""

from __future__ import annotations

from dataclasses import dataclass, fields

from trtllm_tokenweave.errors import UserError, check_fields
from trtllm_tokenweave.recorder.trtllm_plugins import AllReduceStrategy

_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class NetworkOptions:
    """Limits and build switches, named as ``trtllm-build`` names them.

    Attributes:
        max_batch_size: Most requests in one step.
        max_num_tokens: Most tokens in one step.
        max_seq_len: Longest sequence (prompt and generated tokens).
        max_beam_width: Beams per request.
        tokens_per_block: Tokens in one block of the paged KV cache; a power of two.
        reduce_fusion: Use AllReduce's own RESIDUAL_RMS_NORM operation. As in TensorRT-LLM it has no effect with
            one rank or for any architecture but LlamaForCausalLM.
        gemm_plugin: Gemm plugin layers instead of matrix multiplications.
        use_fused_mlp: One GEMM for the MLP's two column-parallel weights.
        use_paged_context_fmha: Context chunks attend to the cache.
        logits_dtype: Dtype of the output ``logits``.
        nccl_dtype: Dtype of the collectives; None: the model's.
        residual_multiplier: 1.0 adds the real multiplications by 1.0 that later releases emit (on the embedding
            and on both branches of every layer of Llama and Mixtral); None leaves them out.
        all_reduce_strategy: How the AllReduce plugins work; all but NCCL, UB and NCCL_SYMMETRIC bring the network
            input ``all_reduce_workspace``.
    """

    max_batch_size: int = 8
    max_num_tokens: int = 8192
    max_seq_len: int = 2048
    max_beam_width: int = 1
    tokens_per_block: int = 32
    reduce_fusion: bool = False
    gemm_plugin: bool = False
    use_fused_mlp: bool = True
    use_paged_context_fmha: bool = True
    logits_dtype: str = "float32"
    nccl_dtype: str | None = None
    residual_multiplier: float | None = None
    all_reduce_strategy: str = "NCCL"

    def __post_init__(self) -> None:
        check_fields(self, "option ")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int" and value < 1:
                raise UserError(f"{value} is less than 1", where=f"option {f.name}")
        if self.tokens_per_block & (self.tokens_per_block - 1):
            raise UserError(f"{self.tokens_per_block} is no power of two", where="option tokens_per_block")
        for name in ("logits_dtype", "nccl_dtype"):
            value = getattr(self, name)
            if value not in (*_DTYPES, *((None,) if name == "nccl_dtype" else ())):
                raise UserError(
                    f"dtype {value!r} is not served", where=f"option {name}", fix=f"choose one of {', '.join(_DTYPES)}"
                )
        if self.residual_multiplier not in (None, 1.0):
            raise UserError(
                f"{self.residual_multiplier} is not served", where="option residual_multiplier", fix="use 1.0 or none"
            )
        if self.all_reduce_strategy not in AllReduceStrategy.__members__:
            raise UserError(
                f"strategy {self.all_reduce_strategy!r} is unknown",
                where="option all_reduce_strategy",
                fix=f"choose one of {', '.join(AllReduceStrategy.__members__)}",
            )

    @property
    def strategy(self) -> AllReduceStrategy:
        """The strategy as the number that the plugin field holds."""
        return AllReduceStrategy[self.all_reduce_strategy]
